import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import DistributedError, StateError, UnsupportedMethodError
from drivetrain.module.ddp import rewrap_ddp, wrap_ddp
from drivetrain.module.sharding import shard_fully
from drivetrain.module.wrapping import (
    clean_name,
    clean_state_dict,
    is_wrapped,
    load_clean_state_dict,
    named_clean_parameters,
    unwrap,
)
from drivetrain.runtime.ranks import get_rank
from tests.module.models import Shell


class OwnModule(nn.Module):
    """A user's model whose layer happens to be called `module`."""

    def __init__(self):
        super().__init__()
        self.module, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.temperature = 1.0

    def forward(self, x):
        return self.norm(self.module(x)) * self.temperature

    def describe(self):
        return f"temperature {self.temperature}"


def compiled(model):
    return torch.compile(model, backend="eager")


def everything_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("wrap", [Shell, compiled, lambda m: Shell(compiled(m))])
def test_unwrap_finds_the_users_module_under_any_shells(wrap):
    model = OwnModule()
    wrapped = wrap(model)
    assert is_wrapped(wrapped) and unwrap(wrapped) is model
    assert not is_wrapped(model) and unwrap(model) is model  # its own `module` is not a shell


def test_unwrap_can_keep_the_compiled_shell():
    model = nn.Linear(2, 2)
    outside, inside = compiled(Shell(model)), Shell(compiled(model))
    kept = unwrap(outside, keep_compile=True)
    assert is_wrapped(kept) and kept._orig_mod is model
    assert unwrap(inside, keep_compile=True) is inside.module
    x = torch.randn(3, 2)
    assert torch.equal(kept(x), model(x))


def test_names_are_cleaned_of_every_prefix():
    assert clean_name("module._orig_mod.layer.weight") == "layer.weight"
    assert clean_name("layer._orig_mod.weight") == "layer.weight"
    assert clean_name("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b") == "a.b"
    assert clean_name("module.module.weight") == "module.weight"
    assert clean_name("submodule.weight") == "submodule.weight"
    assert clean_name("module") == "module"


def test_parameter_names_are_the_users_own_whatever_is_wrapped():
    model = OwnModule()
    expected = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in named_clean_parameters(Shell(compiled(model)))] == expected
    model.module = compiled(model.module)
    assert [name for name, _ in named_clean_parameters(Shell(model))] == expected


@pytest.mark.parametrize("wrap", [lambda m: m, Shell, compiled, lambda m: compiled(Shell(m))])
def test_clean_state_has_the_models_own_keys_and_metadata(wrap):
    model = OwnModule()
    state = clean_state_dict(wrap(model))
    assert everything_equal(state, model.state_dict())
    assert state._metadata == model.state_dict()._metadata
    assert state._metadata["norm"] == {"version": 2}


def test_clean_state_sees_through_shells_inside_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = model.state_dict()
    model[1] = compiled(model[1])
    state = clean_state_dict(model)
    assert everything_equal(state, expected) and state._metadata["1"] == {"version": 2}
    fresh = nn.Sequential(nn.Linear(2, 2), compiled(nn.BatchNorm1d(2)))
    load_clean_state_dict(fresh, expected)
    assert everything_equal(clean_state_dict(fresh), expected)


def test_torchs_checkpoint_wrapper_is_seen_through():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    names, state = [name for name, _ in model.named_parameters()], copy.deepcopy(model.state_dict())
    model[0] = checkpoint_wrapper(model[0])
    assert [name for name, _ in named_clean_parameters(model)] == names
    assert everything_equal(clean_state_dict(model), state)
    load_clean_state_dict(model, {name: value + 1 for name, value in state.items()})
    assert torch.equal(unwrap(model[0]).bias, state["0.bias"] + 1)


@pytest.mark.parametrize("save", [lambda m: m, Shell, compiled, lambda m: Shell(compiled(m))])
@pytest.mark.parametrize("load", [lambda m: m, Shell, compiled])
def test_a_state_saved_by_torch_under_any_wrapping_loads_into_any_other(save, load):
    saved, target = OwnModule(), OwnModule()
    target.norm.running_mean += 1
    missing, unexpected = load_clean_state_dict(load(target), save(saved).state_dict())
    assert (missing, unexpected) == ([], []) and everything_equal(target.state_dict(), saved.state_dict())


def test_a_state_that_does_not_fit_is_refused_whole_with_every_fault_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    before = copy.deepcopy(model.state_dict())
    state = {
        "0.weight": torch.ones(2, 2),
        "1.weight": torch.ones(3, 3),
        "1.bias": torch.ones(3),
        "1.bais": torch.ones(3),
    }
    with pytest.raises(StateError) as caught:
        load_clean_state_dict(model, state)
    text = str(caught.value)
    assert "0.bias: missing" in text and "1.bais: unexpected (nearest: 1.bias)" in text
    assert "1.weight: given shape (3, 3), expected shape (3, 2)" in text
    assert everything_equal(model.state_dict(), before)


def test_without_strict_what_fits_is_loaded_and_the_rest_is_listed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    state = {"0.weight": torch.ones(2, 2), "1.weight": torch.ones(3, 3), "old": torch.ones(1)}
    missing, unexpected = load_clean_state_dict(model, state, strict=False)
    assert torch.equal(model[0].weight, torch.ones(2, 2))
    assert missing == ["0.bias", "1.weight", "1.bias"] and unexpected == ["old"]


def test_a_batch_norm_saved_before_counts_existed_still_loads():
    model = nn.Sequential(nn.BatchNorm1d(2))
    state = model.state_dict()
    del state["0.num_batches_tracked"]
    state._metadata["0"]["version"] = 1
    assert load_clean_state_dict(Shell(model), state) == ([], [])
    state._metadata["0"]["version"] = 2
    with pytest.raises(StateError, match="num_batches_tracked"):
        load_clean_state_dict(model, state)
    with pytest.raises(StateError, match=r"expected shape \(2,\)"):
        load_clean_state_dict(model, {**model.state_dict(), "0.weight": torch.ones(3)})


def test_a_model_that_renames_old_keys_keeps_doing_so():
    class Renaming(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_load_state_dict_pre_hook(self.rename)

        def rename(self, module, state, prefix, *rest):
            for key in [key for key in state if key.startswith(prefix + "old.")]:
                state[key.replace("old.", "layer.")] = state.pop(key)

    model = Renaming()
    state = {"old.weight": torch.ones(2, 2), "old.bias": torch.ones(2)}
    assert load_clean_state_dict(Shell(model), state) == ([], [])
    assert torch.equal(model.layer.bias, torch.ones(2))


def test_ddp_without_a_process_group_says_how_to_start_one():
    with pytest.raises(DistributedError, match="torchrun"):
        wrap_ddp(nn.Linear(2, 2))
    with pytest.raises(DistributedError, match="torchrun"):
        shard_fully(nn.Linear(2, 2))


def test_ddp_keywords_are_checked_before_anything_else():
    with pytest.raises(TypeError, match="Did you mean 'static_graph'"):
        wrap_ddp(nn.Linear(2, 2), static_grah=True)


def test_a_frozen_model_needs_no_ddp():
    model = nn.Linear(2, 2).requires_grad_(False)
    assert wrap_ddp(model) is model


def test_importing_the_folder_loads_neither_fsdp_nor_dynamo():
    import subprocess

    code = (
        "import sys, drivetrain.module.wrapping, drivetrain.module.average, drivetrain.module.compilation, "
        "drivetrain.module.checkpointing, drivetrain.module.params, drivetrain.module.surgery; "
        "print([n for n in ('torch.distributed.fsdp', 'torch._dynamo', 'torch.distributed.tensor') if n in "
        "sys.modules])"
    )
    paths = ":".join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": paths})
    assert done.stdout.strip() == "[]", done.stderr


# ---------------------------------------------------------------------------------------------- two processes


def train_in_ddp():
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # DDP must start everybody from rank 0's weights
    model = OwnModule()
    model.device, model.logger = "mine", "mine"  # names that DDP uses itself
    wrapped = wrap_ddp(model, find_unused_parameters=False)
    assert isinstance(wrapped, DistributedDataParallel) and isinstance(wrapped, nn.Module)
    assert wrap_ddp(wrapped) is wrapped and unwrap(wrapped) is model
    assert wrapped.gradient_as_bucket_view and wrapped.device_ids is None
    assert wrapped.describe() == "temperature 1.0" and wrapped.temperature == 1.0
    wrapped.temperature = 2.0  # reaches the model, where forward reads it
    assert model.temperature == 2.0 and wrapped.describe() == "temperature 2.0"
    assert model.device == "mine" and model.logger == "mine"
    wrapped.fresh = 3  # a name nobody has stays on the shell
    assert not hasattr(model, "fresh")
    with pytest.raises(AttributeError, match="nothing_here"):
        wrapped.nothing_here

    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(5 + rank))
    wrapped(x).square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    twin = copy.deepcopy(wrapped)
    assert isinstance(twin, DistributedDataParallel) and twin.describe() == "temperature 2.0"
    assert twin.module.device == "mine" and twin.module is not model
    return {name: value.detach() for name, value in clean_state_dict(wrapped).items()}, grads


def test_ddp_averages_gradients_and_keeps_the_models_attributes(world2):
    (state0, grads0), (state1, grads1) = world2(train_in_ddp)
    weights0, weights1 = ({k: v for k, v in state.items() if "running" not in k} for state in (state0, state1))
    assert everything_equal(weights0, weights1)
    assert everything_equal(grads0, grads1)
    expected = []
    for rank in range(2):
        torch.manual_seed(0)
        model = OwnModule()
        model.temperature = 2.0
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(5 + rank))
        model(x).square().sum().backward()
        expected.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads0.items():
        torch.testing.assert_close(grad, (expected[0][name] + expected[1][name]) / 2)


def freeze_and_rewrap():
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = wrap_ddp(model, static_graph=False, bucket_cap_mb=1)
    x = torch.full((1, 2), float(rank + 1))
    wrapped(x).sum().backward()
    model[0].requires_grad_(False)
    model.zero_grad(set_to_none=True)
    again = rewrap_ddp(wrapped)
    assert again is not wrapped and unwrap(again) is model and again.bucket_bytes_cap == wrapped.bucket_bytes_cap
    assert rewrap_ddp(model) is model
    for _ in range(3):  # the old shell's hooks must not reduce a second time
        again(x).sum().backward()
    return model[0].weight.grad, model[1].weight.grad, model(x).detach(), [p.detach() for p in model.parameters()]


def wrap_with_max_norm():
    try:
        wrap_ddp(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))
    except UnsupportedMethodError as error:
        return str(error)


def test_ddp_rejects_embeddings_that_ranks_would_train_differently(world2):
    assert all("'0' has max_norm" in told for told in world2(wrap_with_max_norm))


def test_ddp_can_be_renewed_after_freezing(world2):
    (none, grad0, *_), (_, grad1, *_) = world2(freeze_and_rewrap)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for value in (1.0, 2.0):
        (3 * model(torch.full((1, 2), value)).sum() / 2).backward()
    assert none is None and torch.equal(grad0, grad1)
    torch.testing.assert_close(grad0, model[1].weight.grad)


def trained_in_two_runs(stops):
    """Train eight steps on this rank in DDP, wrapped again after `stops` of them, and return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 3)).double()
    for steps in (range(stops), range(stops, 8)):
        wrapped, optimizer = wrap_ddp(model), torch.optim.SGD(model.parameters(), lr=0.05)
        assert all(parameter.grad is None for parameter in model.parameters())
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + get_rank())
            rows = torch.randn(8, 16, generator=generator, dtype=torch.double)
            (wrapped(rows[:, :13]) - rows[:, 13:]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_four_ranks_that_wrap_a_model_again_add_gradients_up_in_the_same_order(world4):
    """DDP would lay its buckets out again after the first step, so that a resumed run rounded in another way."""
    whole, resumed = world4(trained_in_two_runs, 0), world4(trained_in_two_runs, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))


def gradients_of_an_open_window():
    """Wrap a model whose parameters hold gradients already, add two more and average; return what should be there, and what is."""
    model = nn.Linear(5, 3).double()
    nn.init.ones_(model.weight)
    model.weight.grad = torch.full_like(model.weight, float(get_rank()))
    wrapped = wrap_ddp(model)
    rows = torch.ones(1, 5, dtype=torch.double)
    with wrapped.no_sync():
        wrapped(rows).sum().backward()
    wrapped(rows).sum().backward()
    return torch.full_like(model.weight, 2.0 + 1.5), model.weight.grad


def test_a_model_that_is_wrapped_inside_a_window_keeps_its_gradients(world4):
    for expected, found in world4(gradients_of_an_open_window):
        assert torch.equal(expected, found)
