"""Contexts on two real processes: DDP, sharding, states that pass between them, and random streams."""

import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from drivetrain.context import Context, State
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.run import Run, set_current_run
from drivetrain.runtime.seeds import capture_rng, derive_seed, restore_rng


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(7, 3)
        self.temperature = 2.0

    def forward(self, x):
        return self.head(self.body(x)) / self.temperature

    def describe(self):
        return "net"


class Plain(nn.Sequential):
    """Uneven shapes, no batch statistics: shards and whole must agree."""

    def __init__(self):
        super().__init__(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


class Loader:
    distributed = False

    def ddp(self):
        self.distributed = True
        return self


DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(8) % 3


def session(model, **items):
    ctx = Context(model=model, **items)
    ctx.optimizer = torch.optim.Adam(ctx.model.parameters(), lr=0.05, eps=1e-4)
    return ctx


def train(ctx, steps, rows):
    for _ in range(steps):
        ctx.optimizer.zero_grad()
        nn.functional.cross_entropy(ctx.model(DATA[rows]), TARGETS[rows]).backward()
        ctx.optimizer.step()


def own_rows():
    return slice(4 * get_rank(), 4 * get_rank() + 4)


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def numbers(state):
    return {name: value.tolist() for name, value in state.items() if value.is_floating_point()}


def in_ddp():
    before = capture_rng()
    torch.manual_seed(get_rank())  # the ranks begin with different weights; DDP makes them equal
    ctx = session(Net(), loader=Loader(), frozen=nn.Linear(1, 1).requires_grad_(False), loss=nn.CrossEntropyLoss())
    weight = ctx.model.head.weight
    ctx.ddp()
    once = ctx.model
    seed = torch.initial_seed()
    ctx.ddp().cpu()
    assert ctx.model is once and isinstance(ctx.model, DistributedDataParallel)
    assert torch.initial_seed() == seed, "a second call draws no new seed"
    assert ctx.loader.distributed and type(ctx.frozen) is nn.Linear and type(ctx.loss) is nn.CrossEntropyLoss
    assert ctx.model.describe() == "net" and ctx.model.temperature == 2.0 and ctx.model.head.weight is weight
    assert "DDP" in ctx.explain()
    train(ctx, 2, own_rows())
    state = through_file(ctx.state_dict())
    assert list(state["model"]) == list(Net().state_dict()) and state["model"]._metadata == Net().state_dict()._metadata
    assert state["optimizer"]["param_groups"][0]["param_names"][0] == "model.body.0.weight"
    bare = session(Net())
    bare.load_state_dict({name: state[name] for name in ("model", "optimizer")})
    assert torch.equal(bare.model.head.weight, ctx.model.head.weight)
    again = session(Net(), loader=Loader(), frozen=ctx.frozen, loss=ctx.loss).ddp(find_unused_parameters=True)
    again.load_state_dict(
        through_file({**bare.state_dict(), "frozen": state["frozen"], "loss": state["loss"], "loader": state["loader"]})
    )
    train(again, 1, own_rows())
    train(ctx, 1, own_rows())
    assert torch.equal(again.model.head.weight, ctx.model.head.weight)
    restore_rng(before)
    return numbers(ctx.model.state_dict())


def test_ddp_keeps_the_model_reachable_wraps_once_and_its_state_fits_a_bare_model(world2):
    one, two = world2(in_ddp)
    trained = {
        name: value for name, value in one.items() if "running" not in name
    }  # buffers are broadcast at the next forward
    assert trained == {name: two[name] for name in trained}


def ddp_and_alone():
    before = capture_rng()
    torch.manual_seed(0)
    model = Plain()
    together, alone = session(copy.deepcopy(model)).ddp(), session(model)
    train(together, 3, own_rows())
    train(alone, 3, slice(0, 8))
    restore_rng(before)
    for one, two in zip(together.model.parameters(), alone.model.parameters()):
        torch.testing.assert_close(one, two)


def test_two_processes_train_what_one_would(world2):
    world2(ddp_and_alone)


def own_streams(in_run):
    before = capture_rng()
    torch.manual_seed(21)
    if in_run:
        set_current_run(Run(folder="unused", seed=77))
    try:
        ctx = (State(seed=5) if in_run == "state" else Context()).ddp()
        seed = torch.initial_seed()
        mask = nn.functional.dropout(torch.ones(64)).tolist()
        drawn = torch.rand(1, generator=ctx.rng("mixup")).item() if in_run == "state" else None
        return seed, mask, drawn
    finally:
        set_current_run(None)
        restore_rng(before)


def test_each_rank_gets_its_own_random_stream(world2):
    for in_run, root in ((False, 21), (True, 77), ("state", 5)):
        results = world2(own_streams, in_run)
        assert [seed for seed, _, _ in results] == [derive_seed(root, "rank", rank) for rank in range(2)]
        assert results[0][1] != results[1][1]
        assert in_run != "state" or results[0][2] != results[1][2]


def sharded(optimizer_first, ddp_first):
    before = capture_rng()
    torch.manual_seed(0)
    model = Plain()
    alone = session(copy.deepcopy(model))
    ctx = Context(model=model, epoch=3)
    if optimizer_first:
        ctx.optimizer = torch.optim.Adam(ctx.model.parameters(), lr=0.05, eps=1e-4)
    if ddp_first:
        ctx.ddp()
    if optimizer_first and ddp_first:  # state from before sharding goes along
        train(ctx, 2, own_rows())
        train(alone, 2, slice(0, 8))
    ctx.fsdp()
    assert not isinstance(ctx.model, DistributedDataParallel)
    ctx.fsdp()
    if not optimizer_first:
        ctx.optimizer = torch.optim.Adam(ctx.model.parameters(), lr=0.05, eps=1e-4)
    train(ctx, 2, own_rows())
    train(alone, 2, slice(0, 8))

    shards = ctx.state_dict()
    assert type(next(iter(shards["model"].values()))).__name__ == "DTensor"
    full = ctx.state_dict(full=True)
    assert (full == {}) == (get_rank() != 0)
    box = [full]
    dist.broadcast_object_list(box, src=0)
    full = through_file(box[0])
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(full["model"][name], value)
    for number, entries in alone.optimizer.state_dict()["state"].items():
        torch.testing.assert_close(full["optimizer"]["state"][number]["exp_avg"], entries["exp_avg"])

    bare = session(Plain(), epoch=0)  # a full state fits a bare model
    bare.load_state_dict(full)
    assert bare.epoch == 3
    shards_again = session(Plain(), epoch=0).fsdp()  # and a sharded one
    shards_again.load_state_dict(full)
    third = session(Plain(), epoch=0).fsdp()  # shards fit shards
    third.load_state_dict(shards)
    gathered = session(Plain(), epoch=0)  # and a bare model, gathered by all ranks
    gathered.load_state_dict(shards)
    for other in (shards_again, third):
        train(other, 1, own_rows())
    for other in (bare, gathered):
        train(other, 1, slice(0, 8))
    train(ctx, 1, own_rows())
    final = ctx.state_dict(full=True)
    others = [shards_again.state_dict(full=True), third.state_dict(full=True)]
    if get_rank() == 0:
        for other in (*others, bare.state_dict(), gathered.state_dict()):
            for name, value in final["model"].items():
                torch.testing.assert_close(other["model"][name], value)
    restore_rng(before)


def test_sharding_rebinds_the_optimizer_and_states_pass_between_all_forms(world2):
    world2(sharded, True, True)
    world2(sharded, False, False)


def two_modules_sharded():
    before = capture_rng()
    torch.manual_seed(0)
    ctx = Context(
        one=nn.Linear(4, 4), two=nn.Linear(4, 3), gain=nn.Parameter(torch.ones(1)), loss=nn.CrossEntropyLoss()
    )
    ctx.optimizer = torch.optim.SGD([*ctx.one.parameters(), ctx.gain, *ctx.two.parameters()], lr=0.1, momentum=0.9)
    ctx.scheduler = torch.optim.lr_scheduler.StepLR(ctx.optimizer, 1)
    ctx.fsdp()
    weight = ctx.state_dict(full=True).get("one")
    ctx.loss(ctx.two(ctx.one(DATA)) * ctx.gain, TARGETS).backward()
    ctx.optimizer.step()
    changed = ctx.state_dict(full=True)
    if get_rank() == 0:
        assert not torch.equal(weight["weight"], changed["one"]["weight"]) and ctx.gain.item() != 1.0
    restore_rng(before)


def test_one_optimizer_over_several_modules_is_rebound(world2):
    world2(two_modules_sharded)


def follow_the_run():
    before = capture_rng()
    try:
        torch.manual_seed(get_rank() + 40)
        states = capture_rng()
        expected = torch.rand(3)

        def restore(context):
            context.epoch = 9
            return states

        run = Run(folder="unused", seed=3, params={"distributed": True, "cuda": False})
        run.restore = restore
        set_current_run(run)
        ctx = session(Net(), epoch=0).autotransform()
        assert isinstance(ctx.model, DistributedDataParallel) and ctx.epoch == 9
        return torch.equal(torch.rand(3), expected)
    finally:
        set_current_run(None)
        restore_rng(before)


def test_autotransform_distributes_and_puts_random_states_back_last(world2):
    assert world2(follow_the_run) == [True, True]


def loader_made_before():
    from drivetrain.data.loader import SmartDataLoader

    before = capture_rng()
    ctx = Context(loader=SmartDataLoader(TensorDataset(torch.arange(8)), batch_size=2, loading_bar=False)).ddp()
    rows = [value for (batch,) in ctx.loader for value in batch.tolist()]
    restore_rng(before)
    return rows


def test_a_loader_made_before_ddp_splits_the_data(world2):
    one, two = world2(loader_made_before)
    assert sorted(one + two) == list(range(8)) and len(one) == len(two) == 4


def autotransform_in_a_launched_process():
    """As under torchrun, before anybody has joined the group."""
    from torch.nn.parallel import DistributedDataParallel

    from drivetrain.runtime.group import destroy_group
    from drivetrain.runtime.ranks import get_num_processes

    destroy_group()
    ctx = Context(model=torch.nn.Linear(2, 1)).autotransform()
    return isinstance(ctx.model, DistributedDataParallel), get_num_processes()


def test_autotransform_joins_the_world_that_a_launcher_has_started(world2):
    assert world2(autotransform_in_a_launched_process) == [(True, 2), (True, 2)]
