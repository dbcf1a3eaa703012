"""Every method that needs a CUDA device, or works differently on one, follows the plain loss curve there.

Tolerances are relative, of each loss of a short curve: exact methods 1e-3 (the first loss 1e-5), TF32 5e-3, 16 bits 3e-2, 8 bits 6e-2.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.models import cross_entropy, loss_func, make_batch, make_model
from drivetrain.auto import auto_accelerate
from drivetrain.module.chunked_loss import linear_cross_entropy
from drivetrain.module.fp8 import Float8Linear
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler and prototypes of torch have much to say
]
STEPS, SIZE, LR = 6, 8, 3e-3
BF16 = ("amp_native", "bf16")


@pytest.fixture(autouse=True)
def process_settings():
    """Leave matrix precision as it was, and nothing compiled."""
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    yield
    torch.set_float32_matmul_precision("highest")


def batches(name="gpt2"):
    return make_batch(name, STEPS * SIZE, tiny=True, seed=1)


def dataset(name="gpt2"):
    data = batches(name)
    return TensorDataset(data["inputs"], data["labels"])


def as_input(batch, device):
    inputs, labels = (part.to(device, non_blocking=True) for part in batch)
    return {"inputs": inputs, "labels": labels}


def plain_curve(name="gpt2", optimizer=torch.optim.AdamW):
    model = make_model(name, tiny=True).cuda()
    optim, losses = optimizer(model.parameters(), lr=LR), []
    data = {key: value.cuda() for key, value in batches(name).items()}
    for first in range(0, STEPS * SIZE, SIZE):
        batch = {key: value[first : first + SIZE] for key, value in data.items()}
        loss = loss_func(batch, model(**batch))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def accelerated(plan, name="gpt2", **kwargs):
    kwargs = {"ignore_dryrun_on_load_strategy": True, "strict": True, **kwargs}
    status, result, applied = auto_accelerate(
        make_model(name, tiny=True), torch.optim.AdamW, dataset(name), loss_func, as_input, "unpack_dict", {"lr": LR},
        dataloader_args={"batch_size": SIZE, "num_workers": 0}, load_strategy=plan, device="cuda", **kwargs,
    )  # fmt: skip
    assert status, applied.failure
    return result


def epoch(result):
    losses = []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, result.context.device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]  # read after the last step: nothing may have written over them


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        self.values.append(state.loss.detach())


def trained(plan, name="gpt2", **kwargs):
    model, losses = make_model(name, tiny=True), Losses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    trainer = Trainer(model, cross_entropy, optimizer, callbacks=[losses], strategy=plan, device="cuda")
    settings = {"shuffle": False, "num_workers": 0}
    trainer.train(dataset(name), num_epochs=1, per_device_batch_size=SIZE, train_dataloader_kwargs=settings, **kwargs)
    return [value.item() for value in losses.values]


def check(losses, tolerance, name="gpt2", first=None):
    expected = plain_curve(name)
    assert losses == pytest.approx(expected, rel=tolerance)
    assert losses[0] == pytest.approx(expected[0], rel=tolerance if first is None else first)


EXACT = {
    "fused": ["fused_optimizer"],
    "checkpoint": [("checkpoint", {"mode": "full"})],
    "checkpoint, offload": [("checkpoint", {"mode": "offload"}), "fused_optimizer"],
    "cpu_offload": ["cpu_offload"],
    "cpu_offload, fused, unpinned": [("cpu_offload", {"pin_memory": False}), "fused_optimizer"],
    "chunked": [("chunked_cross_entropy", 48), "fused_optimizer"],
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_follow_the_curve(name):
    check(epoch(accelerated(EXACT[name])), 1e-3, first=1e-5)


SIXTEEN_BITS = {
    "amp bf16": [BF16, "fused_optimizer"],
    "half bf16": [("half", "bf16"), "fused_optimizer"],
    "half bf16, cpu_offload": [("half", "bf16"), "cpu_offload", "fused_optimizer"],
    "amp bf16, chunked": [BF16, ("chunked_cross_entropy", 32)],
    "half bf16, chunked": [("half", "bf16"), "chunked_cross_entropy"],
    "amp bf16, cpu_offload": [BF16, "cpu_offload"],
    "tf32, amp bf16, checkpoint": ["tf32", BF16, "checkpoint"],
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sixteen_bits_stay_close(name):
    check(epoch(accelerated(SIXTEEN_BITS[name])), 3e-2)


def set_scale(scaler, value):
    """Begin with another loss scale; `update` would need a step before."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": value})


@pytest.mark.parametrize(
    "plan", [[("amp_native", "fp16")], [("amp_native", "fp16"), "fused_optimizer"], [("half", "fp16")]]
)
def test_float16_is_scaled(plan):
    result = accelerated(plan)
    assert result.context.scaler is not None
    set_scale(result.context.scaler, 2.0**10)  # low enough for every update to be made
    losses = epoch(result)
    assert not result.optim.step_was_skipped
    check(losses, 3e-2)


def test_a_float16_overflow_is_left_out_and_lowers_the_scale():
    result = accelerated([("half", "fp16"), "fused_optimizer"])
    set_scale(result.context.scaler, 2.0**40)
    before = [p.detach().clone() for p in result.model.parameters()]
    batch = result.prepare_input(next(iter(result.dataloader)), "cuda")
    result.loss_func(batch, result.model(**batch)).backward()
    result.optim.step()
    assert result.optim.step_was_skipped and result.context.scaler.get_scale() < 2.0**40
    assert all(map(torch.equal, result.model.parameters(), before))


def test_tf32_holds_for_the_process_and_compiles():
    losses = epoch(accelerated(["tf32", "compile"]))
    assert torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.backends.cuda.matmul.allow_tf32
    torch.set_float32_matmul_precision("highest")
    check(losses, 5e-3)


def test_channels_last_images():
    result = accelerated(["channels_last"], "resnet50")
    losses = epoch(result)
    assert result.model.stem.weight.is_contiguous(memory_format=torch.channels_last)
    check(losses, 2e-2, "resnet50")


def needs_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit products")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("base", [[BF16], [("half", "bf16")]], ids=["amp", "half"])
def test_fp8_follows_the_curve(recipe, base):
    needs_fp8()
    result = accelerated([*base, ("fp8", {"include": "head", "min_features": 16, "recipe": recipe})])
    assert sum(isinstance(module, Float8Linear) for module in result.model.modules()) == 9
    check(epoch(result), 6e-2)


def test_flash_attention_follows_the_curve():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        losses = epoch(accelerated([BF16]))
    check(losses, 3e-2)


COMPILED = {
    "amp bf16, compile": [BF16, "compile", "fused_optimizer"],
    "amp bf16, compile, chunked": [BF16, "compile", "chunked_cross_entropy"],
    "compile, cuda_graphs": ["compile", "cuda_graphs", "fused_optimizer"],
    # A replay writes its gradients over those of the replay before: nothing may be lost of the first half of a batch.
    "compile, cuda_graphs, micro batches": ["compile", "cuda_graphs", ("micro_batch", 4)],
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_plans_follow_the_curve(name):
    result = accelerated(COMPILED[name])
    losses = epoch(result)
    assert "compile: no graph breaks" in result.notes
    parts = (
        len(losses) // STEPS
    )  # the loop sees a loss for each micro-batch, and all of an update's parts are equally large
    assert len(losses) == parts * STEPS and parts == (2 if "micro batches" in name else 1)
    losses = [sum(losses[first : first + parts]) / parts for first in range(0, len(losses), parts)]
    check(losses, 3e-2 if "amp" in name else 1e-3)


def test_fp8_is_compiled_without_a_break():
    needs_fp8()
    result = accelerated([BF16, ("compile", {"fullgraph": True}), ("fp8", {"include": "head"})])
    check(epoch(result), 6e-2)


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ([BF16, "compile", "cuda_graphs", "fused_optimizer"], 3e-2),
        ([("half", "fp16")], 3e-2),
        ([BF16, "chunked_cross_entropy"], 3e-2),
        (["cpu_offload", "fused_optimizer"], 1e-3),
    ],
    ids=["compile, graphs", "half fp16", "chunked", "cpu_offload"],
)
def test_the_trainer_follows_the_curve(plan, tolerance):
    losses = trained(plan)
    if ("half", "fp16") in plan:  # the first updates are left out while the scale is too large
        assert losses[0] == pytest.approx(plain_curve()[0], rel=tolerance)
        assert torch.isfinite(torch.tensor(losses)).all()
    else:
        check(losses, tolerance)


def test_state_is_on_the_host_and_resumed():
    result = accelerated(["cpu_offload", "fused_optimizer"])
    epoch(result)
    masters = [p for group in result.optim.param_groups for p in group["params"]]
    assert all(p.device.type == "cpu" and p.is_pinned() for p in masters)
    kept = [value for state in result.optim.state.values() for value in state.values() if torch.is_tensor(value)]
    assert kept and all(value.device.type == "cpu" for value in kept)
    state = copy.deepcopy(result.context.state_dict())
    expected = epoch(result)
    for plan in (["cpu_offload", "fused_optimizer"], ["fused_optimizer"]):
        resumed = accelerated(plan)
        resumed.context.load_state_dict(copy.deepcopy(state))
        assert epoch(resumed) == pytest.approx(expected, rel=1e-4)


def peak(function):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_save_memory_and_keep_the_gradients(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(4096, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(32768, 64, device="cuda") * 0.05).to(dtype).requires_grad_()
    target = torch.randint(32768, (4096,), device="cuda")
    target[::7] = -100
    # In double precision: plain float16 loses the gradients of most logits, which the mean makes smaller than it can hold.
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    F.cross_entropy(F.linear(*exact), target).backward()
    peaks = []
    for loss in (
        lambda: F.cross_entropy(F.linear(hidden, weight).float(), target),
        lambda: linear_cross_entropy(hidden, weight, target, chunk=256),
    ):
        hidden.grad = weight.grad = None
        peaks.append(peak(lambda loss=loss: loss().backward()))
    assert peaks[1] < 0.25 * peaks[0], peaks
    for ours, true in zip((hidden, weight), exact):
        error = (ours.grad.double() - true.grad).norm() / true.grad.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype], error


@pytest.mark.parametrize(
    "plan",
    [
        [BF16, "fused_optimizer"],
        [("half", "bf16"), "fused_optimizer"],
        [BF16, "chunked_cross_entropy", "fused_optimizer"],
        [BF16, ("micro_batch", 4), "fused_optimizer"],
    ],
    ids=["amp", "half", "chunked", "micro batches"],
)
def test_steps_of_a_plan_do_not_wait_for_the_device(plan):
    result = accelerated(plan)
    epoch(result)  # everything is made that will be made
    ready = [result.prepare_input(batch, "cuda") for batch in result.dataloader]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in ready:
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_a_head_of_its_own_type_stays_in_the_loss():
    """bfloat16 parameters without autocast: the loss has the type that plain cross entropy would give it."""
    model = nn.Linear(16, 48, device="cuda", dtype=torch.bfloat16)
    x, y = torch.randn(32, 16, device="cuda", dtype=torch.bfloat16), torch.randint(48, (32,), device="cuda")
    ours = linear_cross_entropy(x, model.weight, y, model.bias, chunk=8)
    torch.testing.assert_close(ours, F.cross_entropy(model(x).float(), y), rtol=1e-2, atol=1e-2)
