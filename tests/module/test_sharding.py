import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError, StateError
from drivetrain.module import sharding
from drivetrain.module.average import AveragedWeights
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.module.ddp import wrap_ddp
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.sharding import rebind_optimizer, shard_fully
from drivetrain.module.surgery import replace_module_classes
from drivetrain.module.wrapping import clean_state_dict, is_wrapped, load_clean_state_dict, unwrap
from tests.module import models


def tokens(rank, seed=3):
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed + rank))


def language_loss(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def full_grads(model):
    return {name: full(p.grad).detach().clone() for name, p in model.named_parameters()}


def full_state(model):
    return {name: full(value).detach().clone() for name, value in clean_state_dict(model).items()}


def reference_grads(model, losses):
    """Gradients of the mean loss over all ranks, by the plain model."""
    sum(losses).div(len(losses)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def all_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def num_units(model):
    from torch.distributed.fsdp import FSDPModule

    return sum(isinstance(module, FSDPModule) for module in model.modules())


def shard_a_gpt():
    """Tied head, checkpointed blocks, an optimizer with state from before, gradients against the plain model."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    # float64: the gradient of a key's bias is zero but for rounding, and Adam scales that up to a whole step
    model, plain = models.GPT2(depth=3).double(), models.GPT2(depth=3).double()
    plain.load_state_dict(model.state_dict())
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    optimizer, reference = (
        torch.optim.AdamW(
            [
                {"params": [p for p in network.parameters() if p.ndim > 1], "lr": 1e-2},
                {"params": [p for p in network.parameters() if p.ndim < 2], "lr": 1e-3},
            ]
        )
        for network in (model, plain)
    )
    for network, optim in ((model, optimizer), (plain, reference)):  # one step before sharding
        language_loss(network, tokens(7)).backward()
        optim.step()
        optim.zero_grad()

    checkpoint_blocks(model, every=2)
    old_names = dict(model.named_parameters())
    assert (
        shard_fully(wrap_ddp(model)) is model and shard_fully(model) is model
    )  # the DDP shell comes off; twice is once
    rebind_optimizer(optimizer, old_names, model)
    assert [n for n, _ in model.named_parameters()] == names and list(model.state_dict()) == keys
    assert is_wrapped(model) and unwrap(model) is model and num_units(model) == 4
    assert model.lm_head.weight is model.transformer["wte"].weight
    assert all(p in optimizer.state for p in model.parameters())
    with pytest.raises(TypeError, match="fully_shard"):
        replace_module_classes(model, {nn.GELU: lambda m, i: None})
    with pytest.raises(TypeError, match="fully_shard"):
        wrap_ddp(model)

    for step in range(2):
        language_loss(model, tokens(rank, 20 + step)).backward()
        expected = reference_grads(plain, [language_loss(plain, tokens(other, 20 + step)) for other in range(2)])
        all_close(full_grads(model), expected, rtol=1e-6, atol=1e-10)
        for optim in (optimizer, reference):
            optim.step()
            optim.zero_grad()
    all_close(full_state(model), plain.state_dict(), rtol=1e-6, atol=1e-8)
    return tuple(next(model.parameters()).to_local().shape)


def test_a_sharded_model_trains_like_the_plain_one(world2):
    assert world2(shard_a_gpt) == [(16, 16), (16, 16)]


def average_over_shards():
    """The shadow of a sharded model equals that of the plain one, also where evaluation left parameters gathered."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, plain = models.ViT(depth=2), models.ViT(depth=2)
    plain.load_state_dict(model.state_dict())
    shadow = AveragedWeights(plain)
    early = AveragedWeights(model)  # made before sharding, sharded at its next use
    shard_fully(model)
    sharded = AveragedWeights(model)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        for parameter, reference in zip(model.parameters(), plain.parameters()):
            with torch.no_grad():
                parameter.add_(0.1 * (step + 1))
                reference.add_(0.1 * (step + 1))
        with torch.no_grad():
            model(images)  # leaves the root's parameters gathered
        for average, network in ((early, model), (sharded, model), (shadow, plain)):
            average.update_lerp(network, 0.3)
    expected = dict(shadow.named_tensors())
    for average in (sharded, early):
        all_close({name: full(value) for name, value in average.named_tensors()}, expected)
    identity = list(model.parameters())
    with torch.no_grad():
        training = model(images)
        sharded.swap(model)
        averaged = model(images)
        sharded.swap(model)
        assert torch.equal(model(images), training)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    assert all(a is b for a, b in zip(identity, model.parameters()))
    shadow.swap(plain)
    with torch.no_grad():
        torch.testing.assert_close(averaged, plain(images))
    shadow.swap(plain)

    state = {"num_updates": 3, "shadow": {name: value + 1 for name, value in expected.items()}}
    sharded.load_state_dict(state)  # a full state into a sharded shadow
    all_close({name: full(value) for name, value in sharded.named_tensors()}, state["shadow"])
    shadow.load_state_dict(sharded.state_dict())  # and back
    all_close(dict(shadow.named_tensors()), state["shadow"])
    target = models.ViT(depth=2)
    sharded.copy_to(target)
    torch.testing.assert_close(target.head.weight.detach(), state["shadow"]["head.weight"])


def test_averaged_weights_work_shard_by_shard(world2):
    world2(average_over_shards)


def shard_in_bfloat16():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, plain = models.Llama(depth=2), models.Llama(depth=2)
    plain.load_state_dict(model.state_dict())
    shard_fully(model, mixed_precision=torch.bfloat16, wrap="LlamaLayer")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    out = model(tokens(rank))
    assert seen == [torch.bfloat16] and out.dtype == torch.float32
    F.cross_entropy(out.flatten(0, 1), tokens(rank).flatten()).backward()
    expected = reference_grads(plain, [language_loss(plain, tokens(other)) for other in range(2)])
    grads = full_grads(model)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    all_close(grads, expected, rtol=0.1, atol=2e-3)


def test_all_units_compute_in_bfloat16_and_the_output_is_float32(world2):
    world2(shard_in_bfloat16)


def shard_scalars_and_shared_parameters():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = models.CLIP()  # holds a scalar, which cannot be sharded
    text = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(rank))
    image = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(10 + rank))
    shard_fully(model)
    for _ in range(2):  # accumulated over two passes
        model(text, image).square().mean().backward()
    torch.manual_seed(0)
    plain = models.CLIP()
    for other in range(2):
        text = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(other))
        image = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(10 + other))
        plain(text, image).square().mean().backward()
    all_close(full_grads(model), {name: p.grad for name, p in plain.named_parameters()}, rtol=1e-4, atol=1e-6)

    torch.manual_seed(0)
    model, plain = models.ViT(depth=3), models.ViT(depth=3)
    plain.load_state_dict(model.state_dict())
    for network in (model, plain):
        network.blocks[2].mlp.up.weight = network.blocks[0].mlp.up.weight
    shard_fully(model)
    assert model.blocks[2].mlp.up.weight is model.blocks[0].mlp.up.weight
    images = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(other)) for other in range(2)]
    model(images[rank]).square().mean().backward()
    expected = reference_grads(plain, [plain(x).square().mean() for x in images])
    all_close(full_grads(model), expected, rtol=1e-4, atol=1e-6)


def test_scalars_are_averaged_and_shared_parameters_stay_shared(world2):
    world2(shard_scalars_and_shared_parameters)


def shard_several_types():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double(), nn.Linear(4, 4))
    model[2].odd = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    shard_fully(model, wrap="2")
    return num_units(model), {name for name, p in model.named_parameters() if not is_dtensor(p)}


def test_modules_of_another_type_are_units_and_single_parameters_stay_whole(world2):
    for units, whole in world2(shard_several_types):
        assert units == 3 and whole == {"2.odd"}


def load_into_shards():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    saved = {
        name: torch.randn_like(value) if value.is_floating_point() else value + 4
        for name, value in model.state_dict().items()
    }
    shard_fully(model, wrap=1)
    assert num_units(model) == 4  # both linear layers, the norm, and the root
    load_clean_state_dict(model, {"module." + name: value for name, value in saved.items()})
    all_close(full_state(model), saved)
    target = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    load_clean_state_dict(target, clean_state_dict(model))
    all_close(dict(target.state_dict()), saved)
    with pytest.raises(StateError, match=r"expected shape \(5, 3\)"):
        load_clean_state_dict(model, {**saved, "0.weight": torch.zeros(3, 5)})

    model = nn.Linear(4, 4)
    optimizer, names = torch.optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters())
    optimizer.state[model.weight]["rows"] = torch.zeros(4, 1)
    shard_fully(model)
    with pytest.raises(StateError, match="'rows' has shape"):
        rebind_optimizer(optimizer, names, model)
    assert optimizer.param_groups[0]["params"][0] is names["weight"]  # unchanged
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(StateError, match="not among the 2 names"):
        rebind_optimizer(stranger, names, model)
    for wrong, message in ((None, "wrap=None"), ("Lineer", "Did you mean 'Linear'")):
        with pytest.raises(ConfigError, match=message):
            shard_fully(nn.Sequential(nn.Linear(2, 2)), wrap=wrong)
    with pytest.raises(ConfigError, match=r"logit_scale: a parameter without dimensions.*\(1,\)"):
        shard_fully(models.CLIP().to("meta"))
    with pytest.raises(ConfigError, match="mixed_precision='bf16'"):
        shard_fully(nn.Sequential(nn.Linear(2, 2)), mixed_precision="bf16")


def test_states_pass_between_sharded_and_plain_models(world2):
    world2(load_into_shards)


def statistics_of_shards(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 1, 5, 5))
    model = shard_fully(model, mixed_precision=dtype)
    torch.manual_seed(torch.distributed.get_rank() + 1)
    for _ in range(2):
        model(torch.randn(8, 1, 5, 5)).float().sum().backward()
    return model[1].running_mean.clone(), model[1].running_var.clone(), int(model[1].num_batches_tracked)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_running_statistics_of_a_sharded_model_are_the_mean_over_ranks_on_all(world2, dtype):
    first, second = world2(statistics_of_shards, dtype)
    assert all(map(torch.equal, first[:2], second[:2])) and first[2] == second[2] == 3
    assert first[0].abs().max() > 0


@pytest.mark.parametrize(
    ("backends", "kind"), [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda"), ("cuda:nccl", "cuda")]
)
def test_a_model_that_was_not_moved_yet_is_sharded_over_the_devices_of_the_group(backends, kind, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda kind, shape: (kind, shape))
    assert sharding._default_mesh(nn.Linear(2, 2)) == (kind, (1,))
