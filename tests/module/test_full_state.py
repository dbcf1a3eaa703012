"""After a sharded run the model's own `state_dict()` and `save_pretrained()` give whole, plain weights."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.errors import DistributedError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.full_state import full_state_dict
from tests.train.tasks import make_data, make_trainer, train


class Pretrained(nn.Module):
    """A model with tied weights that saves itself as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), f"{folder}/rank-{dist.get_rank()}.pt")


def plain(state):
    return all(type(value) in (torch.Tensor, nn.Parameter) and not is_dtensor(value) for value in state.values())


def export(folder):
    model = Pretrained()
    trainer = make_trainer(model, strategy=["fsdp"], seed=1)
    data = make_data(16)
    train(trainer, data, per_device_batch_size=4)
    model = trainer.get_model()
    state = model.state_dict()
    assert any(map(is_dtensor, model.parameters())) and plain(state)
    assert state["first.weight"] is state["second.weight"]
    trainer.save_checkpoint(f"{folder}/file.pt")
    model.save_pretrained(folder)
    train(trainer, data, per_device_batch_size=4)  # goes on from parts
    again = full_state_dict(trainer.get_model())
    return {name: value.clone() for name, value in state.items()}, {
        name: value.clone() for name, value in again.items()
    }


def test_a_sharded_model_exports_whole_weights_on_every_rank(world2, tmp_path):
    (first, again), (second, _) = world2(export, str(tmp_path))
    reference = make_trainer(Pretrained(), seed=1)
    train(reference, make_data(16), per_device_batch_size=8)
    expected = reference.get_model().state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(first[name], second[name])
    assert [path.name for path in tmp_path.glob("rank-*.pt")] == ["rank-0.pt"]  # written once
    saved = torch.load(tmp_path / "rank-0.pt", weights_only=True)
    file = torch.load(tmp_path / "file.pt", weights_only=True)["model_state_dict"]
    for state in (saved, file):
        assert plain(state) and all(torch.equal(state[name], first[name]) for name in first)
    train(reference, make_data(16), per_device_batch_size=8)
    for name, value in reference.get_model().state_dict().items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)


def gather_on_one_rank():
    trainer = make_trainer(Pretrained(), strategy=["fsdp"], seed=1)
    train(trainer, make_data(16), per_device_batch_size=4)
    if dist.get_rank() == 0:
        with (
            mock.patch("drivetrain.module.full_state.DEADLINE", timedelta(seconds=0.2)),
            pytest.raises(DistributedError, match="on all ranks, not under a condition"),
        ):
            trainer.get_model().state_dict()
    return True


def test_a_rank_that_gathers_alone_is_told_to_do_so_on_all_ranks(world2):
    assert world2(gather_on_one_rank) == [True, True]
    world2.close(grace=0)  # the other rank never came to the barrier
