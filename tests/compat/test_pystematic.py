"""The names of pystematic-torch."""

import pytest
import torch

import drivetrain
from drivetrain.compat.pystematic import torch as names


def test_a_broadcast_number_is_a_tensor_under_the_old_name_and_a_number_under_ours():
    found = drivetrain.torch.broadcast_from_master(3)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.item() == 3
    assert torch.equal(names.broadcast_from_master([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert names.broadcast_from_master("text") == "text" and names.broadcast_from_master({"lr": 1}) == {"lr": 1}
    assert type(drivetrain.broadcast_from_master(3)) is int


def test_the_validation_error_of_pystematic_is_raised_by_and_may_be_raised_for_parameters(tmp_path):
    import drivetrain.experiment as pystematic

    def even(text):
        if int(text) % 2:
            raise pystematic.parametric.ValidationError("expected an even number")
        return int(text)

    @pystematic.parameter("n", type=even, default=2)
    @pystematic.experiment
    def halve(params):
        return params["n"] // 2

    with pytest.raises(pystematic.parametric.ValidationError, match=r"n cannot be 3: .*expected an even number"):
        halve.run(n=3, output_dir=str(tmp_path))
    assert halve.run(n=4, output_dir=str(tmp_path)) == 2
