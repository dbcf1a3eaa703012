"""The names of pystematic-torch."""

import torch

import drivetrain
from drivetrain.compat.pystematic_torch import torch as names


def test_a_broadcast_number_is_a_tensor_under_the_old_name_and_a_number_under_ours():
    found = drivetrain.torch.broadcast_from_master(3)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.item() == 3
    assert torch.equal(names.broadcast_from_master([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert names.broadcast_from_master("text") == "text" and names.broadcast_from_master({"lr": 1}) == {"lr": 1}
    assert type(drivetrain.broadcast_from_master(3)) is int
