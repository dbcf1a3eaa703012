"""On sharded parameters the optimizers and the clipping do what they do on whole ones."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from drivetrain.algorithms.gradient_clipping import apply_gradient_clipping
from drivetrain.algorithms.kernel_norm import normalise_kernels
from drivetrain.module.optimizers import split_optimizer
from drivetrain.module.sharding import shard_fully
from drivetrain.optim import AdamWScheduleFree, Lion, Lookahead, MuonHybrid, SAMOptimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2))


MAKERS = {
    "Lion": lambda m: Lion(m.parameters(), lr=1e-2, weight_decay=0.1),
    "AdamWScheduleFree": lambda m: AdamWScheduleFree(m.parameters(), lr=0.05),
    "MuonHybrid": lambda m: MuonHybrid(m, weight_decay=0.1),
    "Lookahead": lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1), k=2),
    "SAM": lambda m: SAMOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), rho=0.5),
}


def full_weights(model):
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def train(model, make, sees):
    optimizer = make(model)
    step_often(model, optimizer, range(4), sees)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return full_weights(model)


def step_often(model, optimizer, numbers, sees):
    for step in numbers:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[sees]

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, SAMOptimizer) else optimizer.step()
        optimizer.zero_grad()


def clipped(model, kind, threshold, sees):
    model(10 * torch.randn(8, 6, generator=torch.Generator().manual_seed(9))[sees]).pow(2).mean().backward()
    apply_gradient_clipping(model, kind, threshold, eps=1e-3)
    gradients = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


CLIPPING = (("norm", 0.5), ("value", 0.05), ("adaptive", 0.01))


def continue_on_rank():
    """Pass states between shards in torch's distributed form, and return the differences to the runs that go on."""
    differences = {}
    for name, make in MAKERS.items():
        for flat in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            model, other = shard_fully(net()), shard_fully(net())
            optimizer, resumed = make(model), make(other)
            step_often(model, optimizer, range(3), slice(None))
            other.load_state_dict(model.state_dict())
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            set_optimizer_state_dict(other, resumed, saved, options=options)
            for pair in ((model, optimizer), (other, resumed)):
                step_often(*pair, range(3, 6), slice(None))
            pairs = zip(full_weights(model), full_weights(other))
            differences[name, flat] = max((a - b).abs().max().item() for a, b in pairs)
    return differences


def continue_around_a_split_optimizer():
    """Lookahead around an optimizer that gathers its state from all ranks, and inside of one."""
    differences = []
    for make in (
        lambda m: Lookahead(split_optimizer(torch.optim.AdamW, m.parameters(), {"lr": 0.01}, None), k=3),
        lambda m: split_optimizer(
            lambda p, **own: Lookahead(torch.optim.AdamW(p, **own), k=3), m.parameters(), {}, None
        ),
    ):
        model, other = net(), net()
        optimizer, resumed = make(model), make(other)
        step_often(model, optimizer, range(4), slice(None))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for pair in ((model, optimizer), (other, resumed)):
            step_often(*pair, range(4, 8), slice(None))
        differences += [(a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters())]
    return max(differences)


def test_slow_weights_of_split_optimizers_are_saved(world2):
    assert world2(continue_around_a_split_optimizer) == [0.0, 0.0]


def test_a_sharded_state_in_torchs_distributed_form_continues_bit_for_bit(world2):
    for differences in world2(continue_on_rank):
        assert {name: value for name, value in differences.items() if value} == {}


def compare_on_rank():
    rank = torch.distributed.get_rank()
    share = slice(4 * rank, 4 * rank + 4)
    differences = {}
    for name, make in MAKERS.items():
        pairs = zip(train(shard_fully(net()), make, share), train(net(), make, slice(None)))
        differences[name] = max((a - b).abs().max().item() for a, b in pairs)
    for kind, threshold in CLIPPING:
        pairs = zip(clipped(shard_fully(net()), kind, threshold, share), clipped(net(), kind, threshold, slice(None)))
        differences[kind] = max((a - b).abs().max().item() for a, b in pairs)
    whole = {name: p for name, p in net().named_parameters() if p.ndim > 1}
    shards = {name: p for name, p in shard_fully(net()).named_parameters() if p.ndim > 1}
    for kernels in (whole, shards):
        normalise_kernels(list(kernels.values()))
    differences["kernels"] = max((shards[name].full_tensor() - p).abs().max().item() for name, p in whole.items())
    return differences


def test_shards_of_two_processes_take_the_steps_of_one(world2):
    for differences in world2(compare_on_rank):
        # Muon rounds to bfloat16, so the order of a sum over ranks may show there.
        assert {
            name: value for name, value in differences.items() if value > (2e-3 if name == "MuonHybrid" else 1e-5)
        } == {}


@pytest.mark.parametrize(("kind", "threshold"), CLIPPING)
def test_the_clipping_of_this_comparison_acts(kind, threshold):
    raw = clipped(net(), "value", 1e9, slice(None))
    assert any(not torch.equal(a, b) for a, b in zip(raw, clipped(net(), kind, threshold, slice(None))))
