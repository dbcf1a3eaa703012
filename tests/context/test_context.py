"""Registration, moves, names and the table of a Context. The meta device stands for an accelerator."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from drivetrain.context import Context, TorchContext
from drivetrain.core.errors import ConfigError, DeviceError, DistributedError

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass
class Bag:
    x: torch.Tensor
    n: int = 0


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


@pytest.fixture(autouse=True)
def same_parameters():
    """Let modules keep their parameters on the way to the meta device, as they do on the way to an accelerator."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def ones() -> torch.Tensor:
    return torch.ones(2)


def test_items_are_the_attributes_and_assignment_costs_what_python_costs():
    ctx = Context(epoch=1)
    ctx.model, ctx._private = nn.Linear(2, 1), object()
    assert dict(ctx.items()) == {"epoch": 1, "model": ctx.model}
    assert Context.__setattr__ is object.__setattr__


def test_torch_context_is_context():
    assert TorchContext is Context


def test_everything_moves_and_containers_stay_the_same_objects():
    inner = Context(weight=ones())
    ctx = Context(
        tensor=ones(),
        listed=[ones(), {"deep": (ones(), "text")}],
        ordered=OrderedDict(x=ones()),
        pair=Pair(ones(), 1),
        bag=Bag(ones()),
        frozen=Frozen(ones()),
        model=nn.Linear(2, 1),
        inner=inner,
        count=3,
        function=len,
    )
    kept = {name: getattr(ctx, name) for name in ("listed", "ordered", "bag", "model", "inner", "function")}
    types = {name: type(item) for name, item in ctx.items()}
    assert ctx.to(META) is ctx
    assert all(getattr(ctx, name) is item for name, item in kept.items())
    assert {name: type(item) for name, item in ctx.items()} == types
    places = [
        ctx.tensor,
        ctx.listed[0],
        ctx.listed[1]["deep"][0],
        ctx.ordered["x"],
        ctx.pair.x,
        ctx.bag.x,
        ctx.frozen.x,
    ]
    places += [ctx.model.weight, ctx.inner.weight]
    assert all(tensor.device == META for tensor in places)
    assert ctx.device == META and ctx.count == 3 and ctx.listed[1]["deep"][1] == "text"


def test_an_object_in_two_places_stays_one_object():
    tensor = ones()
    ctx = Context(a=tensor, b=[tensor], c=(tensor,))
    ctx.to(META)
    assert ctx.a is ctx.b[0] is ctx.c[0]


def test_a_list_that_contains_itself_moves():
    ring = [ones()]
    ring.append(ring)
    ctx = Context(ring=ring).to(META)
    assert ctx.ring[0].device == META and ctx.ring[1] is ctx.ring


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_the_optimizer_may_be_made_before_or_after_moving(optimizer_first):
    def run(move: bool):
        torch.manual_seed(0)
        ctx = Context(model=nn.Linear(2, 1))
        if optimizer_first:
            ctx.optimizer = torch.optim.Adam(ctx.model.parameters(), lr=0.1)
        if move:
            ctx.to(torch.device("cpu"))
        if not optimizer_first:
            ctx.optimizer = torch.optim.Adam(ctx.model.parameters(), lr=0.1)
        ctx.model(ones()).sum().backward()
        ctx.optimizer.step()
        return ctx

    ctx = run(move=True)
    assert torch.equal(ctx.model.weight, run(move=False).model.weight)
    ctx.to(META)
    assert all(state["exp_avg"].device == META for state in ctx.optimizer.state.values())
    assert set(ctx.optimizer.state) == set(ctx.model.parameters())


def test_an_optimizer_held_only_by_a_scheduler_follows_too():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx = Context(model=model, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    model(ones()).sum().backward()
    optimizer.step()
    ctx.to(META)
    assert all(state["momentum_buffer"].device == META for state in optimizer.state.values())


def test_objects_take_part_by_structure():
    class Loader:
        def __init__(self):
            self.device, self.distributed = None, False

        def to(self, device):
            self.device = device
            return self

    ctx = Context(loader=Loader(), kind=Loader)
    ctx.to(META)
    assert ctx.loader.device == META and ctx.kind is Loader


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_leaves_the_context_untouched():
    ctx = Context(tensor=ones())
    for move in (ctx.cuda, lambda: ctx.cuda(0), lambda: ctx.to("cuda:1")):
        with pytest.raises(DeviceError):
            move()
    assert ctx.tensor.device.type == "cpu" and ctx.device.type == "cpu"


def test_distribution_without_a_process_group_says_what_to_do():
    ctx = Context(model=nn.Linear(2, 1))
    for call in (ctx.ddp, ctx.fsdp):
        with pytest.raises(DistributedError, match="torchrun --nproc-per-node=N"):
            call()
    assert type(ctx.model) is nn.Linear


def test_names_of_methods_cannot_be_items():
    with pytest.raises(ConfigError, match="'to' is a method of Context"):
        Context(to=3)
    ctx = Context()
    ctx.explain = 3
    with pytest.raises(ConfigError, match="'explain' is a method"):
        ctx.state_dict()


def test_excluded_items_move_but_are_not_saved():
    ctx = Context(a=1, cache=ones()).exclude("cache")
    assert list(ctx.state_dict()) == ["a"]
    assert ctx.to(META).cache.device == META
    assert ctx.load_state_dict({"a": 2, "cache": torch.zeros(2)}).is_complete and ctx.a == 2
    with pytest.raises(ConfigError, match="Did you mean 'cache'"):
        ctx.exclude("cahce")


def test_explain_says_kind_device_wrapper_and_how_each_item_is_saved():
    model = nn.Linear(2, 1)
    ctx = Context(
        model=model,
        compiled=torch.compile(nn.Linear(1, 1), backend="eager"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        epoch=0,
        loss=nn.functional.mse_loss,
        notes={},
        secret="x",
    ).exclude("secret")
    rows = {line.split()[0]: line for line in ctx.explain().splitlines()}
    assert list(rows) == ["name", "model", "compiled", "optimizer", "epoch", "loss", "notes", "secret"]
    assert "Linear" in rows["model"] and "cpu" in rows["model"] and "2 entries" in rows["model"]
    assert "OptimizedModule" in rows["compiled"]
    assert "parameter names" in rows["optimizer"]
    assert "not state" in rows["loss"] and "excluded" in rows["secret"]


def test_the_example_of_pystematic_runs_with_the_import_changed():
    import drivetrain as pystematic

    class Dataset(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.full((2,), float(index)), torch.ones(1)

    ctx = pystematic.torch.TorchContext()
    ctx.model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
    # We use the smart dataloader so that batches are moved to the correct device
    ctx.dataloader = pystematic.torch.SmartDataLoader(dataset=Dataset(), batch_size=2)
    ctx.loss_function = torch.nn.BCELoss()
    before = ctx.model[0].weight.clone()
    # Remember to initialize the optimizer after moving
    ctx.optimzer = torch.optim.SGD(ctx.model.parameters(), lr=0.01)
    for input, lbl in ctx.dataloader:
        output = ctx.model(input)
        loss = ctx.loss_function(output, lbl)
        ctx.optimzer.zero_grad()
        loss.backward()
        ctx.optimzer.step()
    assert not torch.equal(ctx.model[0].weight, before)
    assert set(ctx.state_dict()) == {"model", "dataloader", "loss_function", "optimzer"}


def test_the_device_is_not_an_item_and_the_error_says_how_to_move():
    ctx = Context(model=torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"ctx\.to\('cpu'\)"):
        ctx.device = torch.device("cpu")
    with pytest.raises(ConfigError, match="another name"):
        Context(device="cpu")
    assert ctx.device == torch.device("cpu")
