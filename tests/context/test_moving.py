"""Moving batches, tensors and optimizer state. The meta device stands for an accelerator."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from drivetrain.context.moving import move_optimizer_state, move_tensor, move_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Bag(dict):
    note = None


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Movable:
    device = "cpu"

    def to(self, device):
        self.device = str(device)


def ones() -> torch.Tensor:
    return torch.ones(2)


def test_one_argument_gives_the_object_and_several_a_list():
    assert move_to_device("meta", ones()).device == META
    moved = move_to_device("meta", ones(), "text", non_blocking=True)
    assert type(moved) is list and moved[0].device == META and moved[1] == "text"
    assert move_to_device("meta") == []


@pytest.mark.parametrize(
    "batch",
    [
        (ones(), 3),
        [ones(), "a"],
        {"x": ones(), "n": None},
        OrderedDict(x=ones()),
        defaultdict(list, x=ones()),
        Bag(x=ones()),
        Pair(ones(), 1),
        Sample(ones(), "a"),
        pack_sequence([ones()]),
        ([{"deep": (ones(),)}],),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type_and_the_given_one_is_left_alone(batch):
    moved = move_to_device(META, batch)
    assert type(moved) is type(batch)
    assert "device='meta'" in repr(moved)
    assert "device='meta'" not in repr(batch)


def test_a_defaultdict_keeps_its_factory_and_a_subclass_its_attributes():
    bag = Bag(x=ones())
    bag.note = "kept"
    assert move_to_device(META, bag).note == "kept"
    assert move_to_device(META, defaultdict(list, x=ones()))["new"] == []


def test_objects_move_themselves_and_others_stay():
    thing, other = Movable(), object()
    assert move_to_device(META, thing) is thing and thing.device == "meta"
    assert move_to_device(META, other) is other
    assert move_to_device(META, torch.nn.Linear) is torch.nn.Linear
    assert next(move_to_device(META, torch.nn.Linear(2, 1)).parameters()).device == META


@pytest.fixture
def same_parameters():
    """Let modules keep their parameters on the way to the meta device, as they do on the way to an accelerator."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.gpu
def test_a_trained_leaf_keeps_its_identity_and_its_gradient():
    for leaf in (torch.nn.Parameter(ones()), ones().requires_grad_()):
        leaf.grad = ones()
        assert move_tensor(leaf, torch.device("cuda", 0)) is leaf
        assert leaf.is_cuda and leaf.grad.is_cuda and leaf.is_leaf


def test_a_plain_tensor_is_copied():
    plain = ones()
    assert move_tensor(plain, META) is not plain and plain.device.type == "cpu"


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.LBFGS]
)
def test_optimizer_state_follows_its_parameters(make, same_parameters):
    model = torch.nn.Linear(2, 1)
    optimizer = make(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(ones()).pow(2).sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    model.to(META)
    move_optimizer_state(optimizer)
    tensors = []
    for state in optimizer.state.values():
        for key, value in state.items():
            values = value if isinstance(value, list) else [value]
            tensors += [(key, item) for item in values if isinstance(item, torch.Tensor)]
    assert tensors
    assert all((tensor.device == META) == (key != "step") for key, tensor in tensors)
