import copy
import pickle

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.checkpointing import Checkpointed, checkpoint_blocks
from drivetrain.module.wrapping import user_class
from tests.module import models

TOKENS = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(1))


def gpt(p=0.0):
    torch.manual_seed(0)
    return models.GPT2(depth=4, p=p)


def loss_and_grads(model, tokens=TOKENS):
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(tokens).float().square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def saved_bytes(model, tokens=TOKENS):
    """Bytes that autograd keeps for backward, without parameters."""
    kept = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_loss_and_gradients_are_those_of_the_plain_model_with_dropout(mode):
    plain, checkpointed = gpt(p=0.3), gpt(p=0.3)
    names, keys = [n for n, _ in plain.named_parameters()], list(plain.state_dict())
    assert checkpoint_blocks(checkpointed, mode=mode) == [f"transformer.h.{i}" for i in range(4)]
    assert [n for n, _ in checkpointed.named_parameters()] == names and list(checkpointed.state_dict()) == keys
    (loss, grads), (expected_loss, expected) = loss_and_grads(checkpointed), loss_and_grads(plain)
    assert torch.equal(loss, expected_loss)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name])


def test_less_is_kept_for_backward_the_more_is_recomputed():
    plain, full = gpt(), gpt()
    checkpoint_blocks(full)
    assert saved_bytes(full) < 0.4 * saved_bytes(plain)


def test_selective_recomputes_no_matrix_product_and_full_recomputes_all():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products, self.others = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or "attention" in str(func)
            self.products += is_product
            self.others += not is_product
            return func(*args, **(kwargs or {}))

    counts = {}
    for mode in (None, "selective", "full"):
        model = gpt()
        if mode:
            checkpoint_blocks(model, mode=mode)
        loss = model(TOKENS).square().mean()
        with Count() as count:
            loss.backward()
        counts[mode] = count
    assert counts["selective"].products == counts[None].products < counts["full"].products
    assert counts["selective"].others > counts[None].others


def test_attention_scores_are_recomputed_but_their_products_with_values_are_kept():
    from torch.utils.checkpoint import CheckpointPolicy

    from drivetrain.module.checkpointing import keep_expensive

    queries, keys = torch.zeros(2, 64, 8), torch.zeros(2, 8, 64)
    bmm = torch.ops.aten.bmm.default
    assert keep_expensive(None, bmm, queries, keys) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keep_expensive(None, bmm, torch.zeros(2, 64, 64), queries) is CheckpointPolicy.MUST_SAVE
    assert (
        keep_expensive(None, torch.ops.aten.baddbmm.default, queries, queries, keys)
        is CheckpointPolicy.PREFER_RECOMPUTE
    )
    assert keep_expensive(None, torch.ops.aten.relu.default, queries) is CheckpointPolicy.PREFER_RECOMPUTE


def test_offload_packs_the_inputs_of_blocks(monkeypatch):
    packed = []

    class Spy(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory=False, device_type="cuda"):
            super().__init__(pin_memory)
            original = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tuple(tensor.shape)) or original(tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Spy)
    model = gpt()
    checkpoint_blocks(model, mode="offload")
    model(TOKENS).sum().backward()
    assert packed.count((4, 16, 16)) == 4 and all(shape in ((4, 16, 16), (0,)) for shape in packed)


def test_every_and_max_modules_choose_among_the_blocks():
    assert checkpoint_blocks(gpt(), every=2) == ["transformer.h.0", "transformer.h.2"]
    assert checkpoint_blocks(gpt(), max_modules=3) == [f"transformer.h.{i}" for i in range(3)]
    assert checkpoint_blocks(gpt(), models.Mlp, every=3) == ["transformer.h.0.mlp", "transformer.h.3.mlp"]
    assert checkpoint_blocks(gpt(), "transformer.h.1") == ["transformer.h.1"]


def test_modules_inside_chosen_ones_are_left_out():
    assert checkpoint_blocks(gpt(), ["Block", "Mlp"]) == [f"transformer.h.{i}" for i in range(4)]


def test_a_class_change_keeps_isinstance_the_written_class_and_is_made_once():
    model = gpt()
    checkpoint_blocks(model)
    block = model.transformer["h"][0]
    changed = type(block)
    assert isinstance(block, models.Block) and isinstance(block, Checkpointed)
    assert changed.__name__ == "CheckpointedBlock" and user_class(block) is models.Block
    checkpoint_blocks(model, mode="selective")
    assert type(block) is changed and type(model.transformer["h"][3]) is changed


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_checkpointed_and_trains_itself(clone):
    model = gpt()
    checkpoint_blocks(model, mode="selective")
    twin = clone(model)
    assert isinstance(twin.transformer["h"][1], Checkpointed)
    loss, _ = loss_and_grads(twin)
    assert torch.equal(loss, loss_and_grads(model)[0])
    model.zero_grad()
    loss_and_grads(twin)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_changes_without_gradients_and_blocks_without_grad_inputs_still_train():
    model = gpt()
    checkpoint_blocks(model)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), gpt()(TOKENS))
    block = model.transformer["h"][0]
    block(torch.randn(1, 4, 16)).sum().backward()
    assert block.mlp.up.weight.grad is not None


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_cache_for_generation_is_not_filled_twice(mode, by_name):
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, past_key_values=None):
            x = self.linear(x)
            if past_key_values is not None:
                past_key_values.append(x)
                x = x * len(past_key_values)
            return self.second(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Caching(), Caching()])

        def forward(self, x):
            self.cache = []
            for layer in self.layers:
                x = layer(x, past_key_values=self.cache) if by_name else layer(x, self.cache)
            return x

    model = Model()
    checkpoint_blocks(model, mode=mode)
    model(torch.ones(1, 2)).sum().backward()
    assert model.cache == []
    with torch.no_grad():
        cached = []
        model.layers[0](torch.ones(1, 2), past_key_values=cached)
    assert len(cached) == 1


def test_reentrant_checkpointing_is_available_on_request():
    model, plain = gpt(), gpt()
    checkpoint_blocks(model, reentrant=True)
    _, grads = loss_and_grads(model)
    _, expected = loss_and_grads(plain)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name])
    with pytest.raises(ConfigError, match="reentrant"):
        checkpoint_blocks(model, mode="offload", reentrant=True)


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, shift=None):
        return {"x": self.layer(x) + (0 if shift is None else shift), "count": 1}


@pytest.mark.parametrize("needs_grad", [True, False])
def test_reentrant_checkpointing_takes_keywords_returns_mappings_and_needs_no_input_with_a_gradient(needs_grad):
    torch.manual_seed(0)
    plain = nn.ModuleList([Unusual(), Unusual()])
    model = copy.deepcopy(plain)
    assert checkpoint_blocks(model, reentrant=True) == ["0", "1"]
    results = []
    for blocks in (plain, model):
        x, shift = torch.ones(2, 4), torch.ones(4, requires_grad=needs_grad)
        blocks[1](blocks[0](x=x, shift=shift)["x"])["x"].square().sum().backward()
        results.append([shift.grad, *(parameter.grad for parameter in blocks.parameters())])
    torch.testing.assert_close(*results)


def test_bad_settings_are_refused_before_anything_changes():
    model = gpt()
    with pytest.raises(ConfigError, match="Did you mean 'selective'"):
        checkpoint_blocks(model, mode="selectiv")
    with pytest.raises(ConfigError, match="every=0"):
        checkpoint_blocks(model, every=0)
    with pytest.raises(ConfigError, match=r"unknown module class or name 'Blck'.*Repeated blocks of GPT2: Block"):
        checkpoint_blocks(model, ["Block", "Blck"])
    assert not any(isinstance(module, Checkpointed) for module in model.modules())


@pytest.mark.parametrize("settings", [{}, {"mode": "selective"}, {"reentrant": True}])
def test_running_statistics_are_updated_once_although_blocks_run_twice(settings):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))

    plain, model = make(), make()
    model[0][1].momentum = plain[0][1].momentum = None  # the mean over all batches
    checkpoint_blocks(model, ["0", "1"], **settings)
    for _ in range(2):
        x = torch.randn(8, 4, requires_grad=True)
        for one in (plain, model):
            one(x).square().sum().backward()
    for (name, expected), value in zip(plain.state_dict().items(), model.state_dict().values()):
        assert torch.equal(expected, value), name
    assert model[0][1].momentum is None and model[1][1].momentum == 0.1
    for first, second in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(first.grad, second.grad)


class CastsOnce(nn.Module):
    """Copies its weight in the first call and again in every recomputation, as autocast and sharding may."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.calls):
            x = x.double().float()
        return x + self.linear(x).relu()


def test_selective_recomputation_may_make_more_cheap_operations_than_the_forward():
    torch.manual_seed(0)
    model = nn.Sequential(CastsOnce(), CastsOnce())
    plain = copy.deepcopy(model)
    checkpoint_blocks(model, mode="selective")
    x = torch.randn(3, 4)
    for one in (model, plain):
        one(x).sum().backward()
    assert [block.calls for block in model] == [2, 2]
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
