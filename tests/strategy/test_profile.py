"""What a profile says of a model: against hand-written arithmetic, against real runs, and without touching anything."""

import copy
import gc
import logging
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.strategy.profile import model as profiling
from drivetrain.strategy.profile.fake_world import Deadline, OutOfTime
from drivetrain.strategy.profile.findings import upper_edge
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.step_memory import StepMemory
from drivetrain.strategy.profile.torch_private import fake_mode
from drivetrain.strategy.profile.values import ARITHMETICS, PARTS, line_through
from drivetrain.strategy.task import CallModel, TrainingTask
from tests.module.models import ResNet
from tests.strategy.candidates import profile_model
from tests.strategy.tasks import LENGTH, VOCAB, WIDTH, TinyGPT, loss_func, make_data

FLOAT, HALF = 4, 2


class Mlp(nn.Module):
    """The one hidden layer of the hand-written figures."""

    def __init__(self, inputs=64, hidden=256, outputs=32):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def take_first(model, pair):
    return model(pair[0])


def squared_error(pair, outputs):
    return F.mse_loss(outputs, pair[1])


def mlp_task(model=None, **changes):
    samples = (torch.randn(4, 64), torch.randn(4, 32))
    settings = {"call": take_first, "loss_func": squared_error, "optim_func": torch.optim.AdamW, "samples": samples}
    model = model or (None if "model_fn" in changes else Mlp())
    return TrainingTask(model=model, **(settings | changes))


def token_rows(size):
    data = make_data(size)
    return {"tokens": data.tokens[:, :-1].contiguous(), "labels": data.tokens[:, 1:].contiguous()}


def gpt_task(**changes):
    settings = {
        "model_fn": TinyGPT,
        "call": CallModel("unpack_dict"),
        "loss_func": loss_func,
        "optim_func": torch.optim.AdamW,
        "samples": token_rows(4),
    }
    return TrainingTask(**(settings | changes))


@pytest.fixture(scope="module")
def gpt():
    """The profile of the small transformer, with all its parts."""
    return profile_model(gpt_task())


@pytest.fixture(scope="module")
def mlp():
    return profile_model(mlp_task(), compiled=False)


# Against arithmetic by hand.


def test_an_mlp_keeps_and_computes_what_is_written_on_paper(mlp):
    (rest,) = mlp.units
    assert mlp.parameters == mlp.trainable == rest.parameters == 64 * 256 + 256 + 256 * 32 + 32
    assert rest.forward_flops == 2 * 64 * 256 + 2 * 256 * 32
    # In float32 the activation and the output that the loss compares; the batch itself counts as input.
    assert rest.saved_bytes["float32"] == FLOAT * (256 + 32)
    # Under autocast: the input and the activation in 16 bits, and the loss in float32.
    assert rest.saved_bytes["bfloat16"] == HALF * (64 + 256) + FLOAT * 32
    assert mlp.input_bytes == FLOAT * (64 + 32)
    assert mlp.optimizer_bytes == pytest.approx(2 * FLOAT * mlp.parameters, rel=1e-3)
    assert mlp.optimizer_temporary_bytes == FLOAT * mlp.parameters  # one list of square roots


def test_the_optimizers_state_follows_the_optimizer():
    momentum = profile_model(
        mlp_task(optim_func=torch.optim.SGD, optim_args={"lr": 0.1, "momentum": 0.9}), compiled=False
    )
    assert momentum.optimizer_bytes == FLOAT * momentum.parameters
    assert profile_model(mlp_task(optim_func=None), compiled=False).optimizer_bytes == 0


def test_the_state_of_an_optimizer_that_takes_no_small_step_is_taken_as_adams():
    model = nn.EmbeddingBag(1000, 16, sparse=True)
    task = TrainingTask(
        model=model,
        call=CallModel(),
        loss_func=lambda batch, output: output.square().mean(),
        optim_func=torch.optim.SparseAdam,
        samples=torch.zeros(4, 3, dtype=torch.long),
    )
    profile = profile_model(task, compiled=False)
    assert profile.optimizer_bytes == 2 * profile.parameter_bytes == 2 * 4 * 16_000
    assert any("taken as Adam's" in note for note in profile.notes)


def test_a_frozen_layer_needs_no_gradient_and_no_state():
    model = Mlp()
    model.up.requires_grad_(False)
    profile = profile_model(mlp_task(model), compiled=False)
    assert profile.trainable == 256 * 32 + 32 < profile.parameters
    assert profile.optimizer_bytes == pytest.approx(2 * FLOAT * profile.trainable, rel=1e-2)


def test_a_blocks_arithmetic_is_that_of_its_matrices_and_its_attention(gpt):
    block, rest = gpt.units
    assert (block.path, block.count, rest.path) == ("blocks", 2, "")
    matrices = 4 * WIDTH * WIDTH + 2 * 2 * WIDTH * WIDTH
    assert block.forward_flops == 2 * LENGTH * matrices + 2 * 2 * LENGTH * LENGTH * WIDTH
    assert rest.forward_flops == 2 * LENGTH * WIDTH * VOCAB
    assert block.input_bytes["float32"] == FLOAT * LENGTH * WIDTH
    products = 3 * WIDTH + WIDTH + 2 * WIDTH + WIDTH  # q, k and v; out; up; down
    attention = WIDTH + 4  # its output, and a logarithm for each of four heads
    assert block.selective_bytes["float32"] == FLOAT * LENGTH * (WIDTH + products + attention)
    assert block.selective_bytes["float32"] < block.saved_bytes["float32"]
    assert block.heads == 4 and gpt.sequence_length == LENGTH and gpt.cross_entropy_head == "head"
    assert gpt.logits_bytes["float32"] == 3 * FLOAT * LENGTH * VOCAB  # output, what the loss keeps, its gradient
    assert gpt.logits_bytes["bfloat16"] == (HALF + 2 * FLOAT) * LENGTH * VOCAB
    assert block.parameters * 2 + rest.parameters == gpt.parameters


def test_autocast_keeps_norms_and_losses_in_float32_as_cuda_does(gpt):
    block = gpt.units[0]
    per_token = FLOAT * WIDTH  # what enters the first norm
    per_token += 2 * FLOAT + 2 * FLOAT  # statistics of two norms
    per_token += 3 * HALF * WIDTH  # what leaves it, cast once for each of three projections
    per_token += HALF * 3 * WIDTH + HALF * WIDTH + FLOAT * 4  # q, k and v, attention, its logarithms
    per_token += (
        FLOAT * WIDTH + HALF * WIDTH + HALF * 2 * WIDTH + HALF * 2 * WIDTH
    )  # residual, normed, before and after gelu
    assert block.saved_bytes["bfloat16"] == LENGTH * per_token


# Against real runs.


def real_peak(model, batch, call, loss):
    """Return the largest number of bytes that a real step on the host holds, with a warmed-up optimizer beside."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    loss(batch, call(model, batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    timeline = StepMemory(512)
    with timeline:
        timeline.register(model.parameters(), "parameters")
        timeline.register(model.buffers(), "buffers")
        timeline.register((value for state in optimizer.state.values() for value in state.values()), "optimizer")
        timeline.register(batch.values(), "inputs")
        loss(batch, call(model, batch)).backward()
    timeline.freeze()
    return max(timeline.totals())


@pytest.mark.parametrize("size", [3, 16, 64])
def test_the_predicted_peak_is_that_of_a_real_step(gpt, size):
    real = real_peak(TinyGPT(), token_rows(size), CallModel("unpack_dict"), loss_func)
    assert gpt.peak("float32", size) == pytest.approx(real, rel=0.04)  # tensors here are as small as the rounding


def test_the_peak_of_a_convolutional_net_is_that_of_a_real_step():
    samples = {"x": torch.randn(4, 3, 16, 16), "y": torch.randint(10, (4,))}
    call, loss = lambda model, batch: model(batch["x"]), lambda batch, out: F.cross_entropy(out, batch["y"])
    profile = profile_model(
        TrainingTask(
            model=ResNet(depths=(1, 1)), call=call, loss_func=loss, optim_func=torch.optim.AdamW, samples=samples
        ),
        compiled=False,
    )
    batch = {"x": torch.randn(32, 3, 16, 16), "y": torch.randint(10, (32,))}
    assert profile.peak("float32", 32) == pytest.approx(real_peak(ResNet(depths=(1, 1)), batch, call, loss), rel=0.02)
    assert profile.has_batchnorm and profile.has_convolution
    assert profile.sequence_length is None


def test_checkpointing_lowers_the_peak_and_selective_lies_between(gpt):
    for arithmetic in ("float32", "bfloat16"):
        full, selective, plain = (gpt.peak(arithmetic + mode, 256) for mode in ("/full", "/selective", ""))
        assert full < selective < plain


def test_a_compiled_pass_keeps_less_than_an_eager_one(gpt):
    assert gpt.compiled_bytes.keys() == {"float32", "bfloat16"}
    for arithmetic in gpt.compiled_bytes:
        assert 0 < gpt.compiled_bytes[arithmetic] < gpt.saved_bytes(arithmetic)
        assert gpt.compiled_fixed_bytes[arithmetic] >= 0
    assert gpt.evidence == "simulated" and gpt.notes == ()


class Deep(TinyGPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([copy.deepcopy(self.blocks[0]) for _ in range(6)])


class DeepByNumber(Deep):
    """Asks for its blocks by number, so that none can be left out."""

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for index in range(6):
            x = self.blocks[index](x)
        return self.head(self.norm(x))


class Growing(Deep):
    """Blocks of one shape that do different things: a factor is taken in more often, and kept, the deeper they are."""

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            for _ in range(index):
                x = x.sin()
        return self.head(self.norm(x))


class GrowingByNumber(DeepByNumber):
    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for index in range(6):
            x = self.blocks[index](x)
            for _ in range(index):
                x = x.sin()
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("kind", "by_number"),
    [
        (Deep, DeepByNumber),
        pytest.param(type("DeepToo", (Deep,), {}), DeepByNumber, marks=pytest.mark.slow),
        pytest.param(Growing, GrowingByNumber, marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_a_deep_model_is_found_from_few_blocks_as_from_all(kind, by_number):
    parts = [part for part in PARTS if not part.endswith("compiled")]
    parts = ["bfloat16/full"] if kind is Deep else parts  # the quick one
    few, all_of_them = (ModelProfiler(gpt_task(model_fn=each)).profile(parts) for each in (kind, by_number))
    assert few.peak_lines.keys() == all_of_them.peak_lines.keys()
    assert len(few.peak_lines) == (3 if kind is Deep else 6)
    for name, lines in few.peak_lines.items():
        assert lines == all_of_them.peak_lines[name], name
    assert few.units[0].count == all_of_them.units[0].count == 6


def test_parameters_of_blocks_that_do_not_run_count_without_an_optimizer_too():
    tasks = (gpt_task(model_fn=kind, optim_func=None) for kind in (Deep, DeepByNumber))
    few, all_of_them = (ModelProfiler(task).profile(["bfloat16/full"]) for task in tasks)
    assert few.peak_lines == all_of_them.peak_lines and few.optimizer_bytes == 0


@pytest.mark.slow
def test_a_deep_model_is_captured_from_two_blocks_as_from_all():
    few, all_of_them = (profile_model(gpt_task(model_fn=kind)) for kind in (Deep, DeepByNumber))
    assert few.compiled_bytes == pytest.approx(all_of_them.compiled_bytes)


class Deepest(Deep):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([copy.deepcopy(self.blocks[0]) for _ in range(12)])


class GrowingDeepest(Deepest):
    forward = Growing.forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_uniform"), [(Deepest, True), pytest.param(GrowingDeepest, False, marks=pytest.mark.slow)]
)
def test_what_blocks_do_and_keep_is_found_from_few_of_them_where_they_are_alike(kind, is_uniform, monkeypatch):
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 100.0)  # however busy the machine is
    few = ModelProfiler(gpt_task(model_fn=kind))
    found = few.profile(time_limit=0.0)  # without the tracked peaks
    assert few._runs._is_uniform is is_uniform
    monkeypatch.setattr(profiling._FakeRuns, "_is_uniform", False)
    assert found.units == profile_model(gpt_task(model_fn=kind), time_limit=0.0).units
    assert found.units[0].count == 12


class GroupedAttention(nn.Module):
    """Four heads that share one key and value."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 32 + 8 + 8)

    def forward(self, x):
        q, k, v = self.qkv(x).split((32, 8, 8), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_grouped_keys_are_kept_as_they_are_in_16_bits_and_written_out_in_float32():
    length = 64
    task = TrainingTask(model=GroupedAttention(), call=take_first, samples=(torch.randn(2, length, 32),))
    profile = profile_model(task, compiled=False)
    assert profile.evidence == "simulated", profile.notes
    (rest,) = profile.units
    linear = 2 * length * 32 * 48
    assert rest.forward_flops == linear + 2 * 2 * 4 * length * length * 8  # every head has scores of its own
    # Input, projections, output and a logarithm per head; no kernel of CUDA takes groups in float32, so there scores are kept.
    assert rest.saved_bytes["bfloat16"] == length * (HALF * (32 + 48 + 32) + FLOAT * 4)
    assert rest.saved_bytes["float32"] > 4 * length * length * FLOAT


def test_dropout_keeps_a_byte_per_element():
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Tanh())
    task = mlp_task(model, loss_func=None)
    profile = profile_model(task, compiled=False)
    assert profile.units[-1].saved_bytes["float32"] == 128 * (1 + FLOAT)  # mask, and the result of tanh


def test_attention_never_writes_its_scores_not_even_with_dropout_or_a_mask():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)

    samples = (torch.randn(2, 512, 16),)
    task = TrainingTask(model=Attend(), call=take_first, samples=samples)
    saved = profile_model(task, compiled=False).units[-1].saved_bytes["float32"]
    assert saved == FLOAT * 512 * (48 + 16 + 2)  # q, k, v, output, a logarithm per head


# Any model, any batch.


def test_a_model_may_be_made_or_be_on_meta(gpt):
    with torch.device("meta"):
        model = TinyGPT()
    profile = profile_model(gpt_task(model=model, model_fn=None), compiled=False)  # the other was made by a function
    assert profile.evidence == "simulated"
    assert (
        profile.units == gpt.units and profile.peak_lines.items() <= gpt.peak_lines.items()
    )  # which has compiled ones too
    assert profile.parameters == sum(p.numel() for p in TinyGPT().parameters())


class Ramp(Mlp):
    """Reads values while it is made, as ramps of drop rates do."""

    def __init__(self):
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 1, 3) + torch.rand(3)]


def test_a_constructor_that_reads_values_is_run_for_real(mlp):
    profile = profile_model(mlp_task(model_fn=Ramp), compiled=False)
    assert profile.evidence == "simulated" and profile.units[0].saved_bytes == mlp.units[0].saved_bytes


def test_samples_may_be_nested_and_prepared_by_the_user():
    def prepare(batch, device):
        return {"x": batch[0]["deep"].float().to(device), "rest": (batch[1], "a name")}

    task = TrainingTask(
        model=Mlp(),
        call=lambda model, inputs: model(inputs["x"]),
        loss_func=lambda inputs, outputs: (F.mse_loss(outputs, inputs["rest"][0]), "more"),
        prepare_input=prepare,
        samples=[{"deep": torch.randint(9, (3, 64))}, torch.randn(3, 32)],
    )
    profile = profile_model(task, compiled=False)
    assert profile.evidence == "simulated" and profile.input_bytes == FLOAT * (64 + 32)


def test_a_model_that_exists_and_all_random_streams_stay_as_they_were(gpt):
    model, task = TinyGPT(), None
    model.eval()
    before = copy.deepcopy(model.state_dict())
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    task = gpt_task(model=model, model_fn=None)
    profile = profile_model(task, compiled=False)
    assert (
        profile.units == gpt.units and profile.peak_lines.items() <= gpt.peak_lines.items()
    )  # which has compiled ones too
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert F.dropout(torch.ones(64), 0.5).unique().tolist() == [0.0, 2.0]  # torch's own kernels are back


class Pruning(nn.Module):
    """Shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Mlp(16, 64, 16) for _ in range(3)])

    def forward(self, x):
        return self.layers(x[x.sum(-1) > 0]).sum()


def test_shapes_that_depend_on_values_give_a_modelled_profile_and_say_so():
    task = TrainingTask(
        model=Pruning(),
        call=take_first,
        loss_func=lambda batch, loss: loss,
        optim_func=torch.optim.AdamW,
        samples=(torch.randn(4, 10, 16),),
    )
    profile = profile_model(task)
    assert profile.evidence == "modelled" and "fake tensors" in profile.notes[0]
    block = profile.units[0]
    assert block.count == 3 and block.forward_flops == 10 * 2 * 2 * 16 * 64
    assert block.saved_bytes["float32"] == FLOAT * 10 * 2 * (16 + 64)
    assert profile.optimizer_bytes == pytest.approx(2 * profile.parameter_bytes, rel=1e-2)
    assert profile.peak("bfloat16", 8) < profile.peak("float32", 8)


def test_a_task_without_samples_is_modelled():
    profile = profile_model(mlp_task(samples=None))
    assert profile.evidence == "modelled" and "no samples" in profile.notes[0]


def test_without_time_the_slow_parts_are_left_out_and_named():
    profile = profile_model(gpt_task(), time_limit=0.0)
    assert profile.evidence == "simulated" and profile.forward_flops > 0
    assert profile.compiled_bytes is None and profile.peak("float32", 1) is None
    assert sum("out of time" in note for note in profile.notes) >= 4


@pytest.mark.slow
def test_parts_that_are_asked_for_one_after_another_give_the_same_profile(gpt):
    profiler = ModelProfiler(gpt_task())
    first = profiler.profile()
    assert first.peak_lines.keys() == set(ARITHMETICS) and first.compiled_bytes is None
    assert first.units == gpt.units and first.notes == ()
    second = profiler.profile(["bfloat16/full"])
    assert second.peak_lines.keys() == {*ARITHMETICS, "bfloat16/full"}
    third = profiler.profile(["bfloat16/compiled", "bfloat16/selective"])
    for name, lines in third.peak_lines.items():
        assert lines == gpt.peak_lines[name]
    assert third.compiled_bytes == {"bfloat16": gpt.compiled_bytes["bfloat16"]}
    assert third.compiled_fixed_bytes == {"bfloat16": gpt.compiled_fixed_bytes["bfloat16"]}
    again = profiler.profile(["bfloat16/full", "bfloat16/compiled"], time_limit=0.0)
    assert again == third  # nothing is tried twice


class Waiting(Mlp):
    """Takes its time for each layer."""

    def forward(self, x):
        for _ in range(4):
            time.sleep(0.05)
            x = torch.relu(x)
        return super().forward(x)


def test_a_run_that_takes_too_long_is_stopped_and_closed_forms_take_its_place(monkeypatch):
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 0.1)
    profile_model(mlp_task(), compiled=False)  # what is imported only once is not what takes the time
    profiler = ModelProfiler(mlp_task(Waiting()))
    profile = profiler.profile(PARTS, time_limit=0.0)
    assert profile.evidence == "modelled" and profile.forward_flops > 0
    assert "stopped after" in profile.notes[0] and "estimated from" in profile.notes[0]
    assert profiler.profile(PARTS) is profile  # what took too long is not begun again


def test_a_tracked_step_that_takes_too_long_is_left_out(monkeypatch):
    profiler = ModelProfiler(mlp_task(Waiting()))
    profile = profiler.profile(time_limit=1.0)  # the units take 0.8 s in any case
    assert profile.evidence == "simulated" and not profile.peak_lines
    assert all("out of time" in note for note in profile.notes) and len(profile.notes) == 2


@pytest.mark.slow  # the import alone takes as long as all other tests here
def test_models_of_the_transformers_library_are_profiled():
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
    }
    ids = torch.randint(64, (2, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for config, cls in (
        (transformers.LlamaConfig(**small, num_key_value_heads=2), transformers.LlamaForCausalLM),
        (transformers.BertConfig(**small), transformers.BertForMaskedLM),
    ):
        task = TrainingTask(
            model=cls(config),
            call=CallModel("unpack_dict"),
            loss_func=lambda inputs, outputs: outputs.loss,
            optim_func=torch.optim.AdamW,
            samples=batch,
        )
        profile = profile_model(task, compiled=False)
        assert profile.evidence == "simulated", profile.notes
        assert [unit.heads for unit in profile.units if unit.count == 2] == [4]
        assert profile.sequence_length == 12 and profile.peak("bfloat16/full", 64) < profile.peak("bfloat16", 64)


# Lines.


def test_the_upper_edge_is_the_largest_of_all_lines_everywhere():
    generator = random.Random(0)
    for _ in range(50):
        lines = [(generator.uniform(-5, 50), generator.uniform(0, 9)) for _ in range(12)]
        edge = upper_edge(lines)
        for batch in (1, 2, 3, 7, 50, 1000):
            highest = max(fixed + batch * each for fixed, each in lines)
            assert max(fixed + batch * each for fixed, each in edge) == pytest.approx(highest)
    assert line_through((2, 4), (5.0, 5.0)) == (5.0, 0.0)


def test_a_run_that_is_stopped_at_any_operation_ends_in_closed_forms(monkeypatch):
    """Questions for a device are no place to stop at: torch asks where no exception may leave, and the process would end."""

    class Countdown(Deadline):
        left = 0

        def check(self):
            Countdown.left -= 1
            if Countdown.left == 0:
                raise OutOfTime(1.0)

    monkeypatch.setattr(profiling, "Deadline", Countdown)
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    samples = torch.randn(4, 3, 8, 8), torch.randn(4, 3)
    for number in range(1, 40):
        Countdown.left = number
        profile = profile_model(mlp_task(block, samples=samples), compiled=False)
        if Countdown.left > 0:
            break
        assert profile.evidence == "modelled" and "stopped after 1.0 s" in " ".join(profile.notes)


@pytest.mark.slow
def test_a_model_compiles_as_before_after_a_profile():
    """Torch remembers which kernels it found while the rules of an accelerator held."""
    profile_model(gpt_task())

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 2, 8, 4, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(x)  # a warning would be an error here
    ours, theirs = torch.autograd.grad(compiled.sum(), x)[0], torch.autograd.grad(attend(x).sum(), x)[0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "layer", "shape", "mebibytes"),
    [
        (torch.bfloat16, nn.Conv2d(64, 64, 3, padding=1), (128, 64, 56, 56), 98),
        (torch.float32, nn.Conv2d(64, 64, 3, padding=1), (128, 64, 56, 56), 196),
        (torch.bfloat16, nn.Conv2d(256, 512, 1, 2), (128, 256, 56, 56), 294),
        (torch.bfloat16, nn.Conv2d(256, 64, 1), (128, 256, 56, 56), 0),  # a product
        (torch.bfloat16, nn.Conv2d(64, 64, 3, padding=1, groups=64), (128, 64, 56, 56), 0),
    ],
)
def test_convolutions_borrow_what_they_did_on_an_h200(dtype, layer, shape, mebibytes):
    for layout, borrowed in ((torch.contiguous_format, mebibytes * 2**20), (torch.channels_last, 0)):
        with fake_mode(), StepMemory(512) as timeline:
            x = torch.empty(shape, dtype=dtype).to(memory_format=layout).requires_grad_()
            weight = torch.empty(layer.weight.shape, dtype=dtype).to(memory_format=layout).requires_grad_()
            y = torch.conv2d(x, weight, None, layer.stride, layer.padding, 1, layer.groups)
            y.backward(torch.empty_like(y))
        there_and_back = [
            one.size for one, two in zip(timeline.events, timeline.events[1:]) if one.key == two.key and one.size > 0
        ]
        assert there_and_back.count(borrowed) == (2 if borrowed else 0)


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "soft margin": F.soft_margin_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "the same with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "each one": lambda x, y: F.mse_loss(x, y, reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_holds_in_a_profile_what_it_holds_in_torch(name):
    x, y = torch.randn(8, 100), torch.randn(8, 100)
    real = LOSSES[name](x, y).untyped_storage().nbytes()
    with fake_mode() as mode, StepMemory(512), torch.no_grad():
        assert LOSSES[name](mode.from_tensor(x), mode.from_tensor(y)).untyped_storage().nbytes() == real
    memory = StepMemory()
    with fake_mode() as mode, memory, torch.no_grad():
        loss = LOSSES[name](mode.from_tensor(x), mode.from_tensor(y))
        assert loss.untyped_storage().nbytes() == real
        held = memory.record().segments["start"]
    assert held["activations"] >= real and held["gathered"] == 0


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", ["", "/full"])
def test_the_predicted_peak_is_within_five_percent_of_cuda(arithmetic, checkpoint):
    from drivetrain.module.checkpointing import checkpoint_blocks

    size = 256  # activations of gigabytes: what the allocator rounds and what products borrow is small beside
    small = Mlp(1024, 4096, 1024).cuda()  # what products keep for themselves is there from now on, in both threads
    with torch.autocast("cuda", torch.bfloat16, enabled=arithmetic == "bfloat16"):
        small(torch.randn(4, 256, 1024, device="cuda")).sum().backward()
    del small
    model = nn.Sequential(nn.Linear(1024, 1024), *[Mlp(1024, 4096, 1024) for _ in range(8)])
    samples = (torch.randn(2, 256, 1024), torch.randn(2, 256, 1024))
    gc.collect()
    before = torch.cuda.memory_allocated()  # that, and what other tests of this process left
    torch.cuda.reset_peak_memory_stats()
    profile = profile_model(mlp_task(model, samples=samples), compiled=False)
    assert torch.cuda.max_memory_allocated() == before  # the device is not touched
    batch = tuple(tensor.cuda() for tensor in (torch.randn(size, 256, 1024), torch.randn(size, 256, 1024)))
    model.cuda()
    if checkpoint:
        checkpoint_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=arithmetic == "bfloat16"):
            loss = squared_error(batch, take_first(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    measured = torch.cuda.max_memory_allocated() - before
    assert profile.peak(arithmetic + checkpoint, size) == pytest.approx(measured, rel=0.05)


class TooWide(nn.Module):
    """Adds tensors that do not fit where they are fake: torch logs the whole stack."""

    def forward(self, batch):
        return batch["x"] + torch.ones(8 if type(batch["x"]) is torch.Tensor else 3)


def test_what_fails_on_fake_tensors_is_a_note_and_not_a_traceback_in_the_log():
    records, logger = [], logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        task = TrainingTask(model=TooWide(), call=CallModel(), samples={"x": torch.randn(4, 8)})
        profile = profile_model(task, compiled=False)
    finally:
        logger.removeHandler(handler)
    assert "could not run on fake tensors" in profile.notes[0] and records == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="trials fork on Linux")
def test_a_process_forked_after_a_profile_can_run_a_backward_pass():
    program = """
import os, torch
from drivetrain.strategy.profile.torch_private import fake_mode
with fake_mode():  # the first backward pass of this process
    torch.ones(3, requires_grad=True).sum().backward()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.ones(3, requires_grad=True).sum().backward()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
