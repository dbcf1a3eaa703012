"""Each part of a batch is normalised by itself; evaluation is the ordinary batch norm."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.algorithms.ghost_batchnorm import (
    GhostBatchNorm,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    apply_ghost_batchnorm,
    smallest_batch,
)
from drivetrain.train.trainer import Trainer
from tests.algorithms.surgery_models import ConvNet, images


@pytest.mark.parametrize(
    ("cls", "shape"), [(nn.BatchNorm1d, (12, 3)), (nn.BatchNorm2d, (12, 3, 4, 4)), (nn.BatchNorm3d, (12, 3, 2, 2, 2))]
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_parts_go_through_one_batch_norm_with_a_shared_momentum(cls, shape, momentum):
    torch.manual_seed(0)
    net = nn.Sequential(cls(3, momentum=momentum))
    reference = copy.deepcopy(net[0])
    reference.momentum = None if momentum is None else momentum / 3
    apply_ghost_batchnorm(net, ghost_batch_size=5)  # 12 rows: three parts of 4
    x = torch.randn(shape)
    torch.testing.assert_close(net(x), torch.cat([reference(part) for part in x.chunk(3)]))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(net[0].state_dict()[name], value)


def test_evaluation_takes_a_single_image():
    net = nn.Sequential(nn.BatchNorm2d(3))
    apply_ghost_batchnorm(net, 32)
    plain = nn.BatchNorm2d(3).eval()
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(net.eval()(x), plain(x))


def test_a_batch_smaller_than_a_part_is_refused():
    with pytest.raises(ValueError, match="Worker batch size"):
        GhostBatchNorm2d(3, ghost_batch_size=8)(torch.randn(7, 3, 2, 2))


@pytest.mark.parametrize(("rows", "size", "parts"), [(7, 2, 3), (10, 3, 4), (3, 2, 1), (5, 2, 2), (33, 32, 2)])
def test_no_part_of_a_matrix_has_a_single_row(rows, size, parts):
    torch.manual_seed(0)
    ghost, plain = GhostBatchNorm1d(3, ghost_batch_size=size), nn.BatchNorm1d(3, momentum=0.1 / parts)
    x = torch.randn(rows, 3)
    torch.testing.assert_close(ghost(x), torch.cat([plain(part) for part in x.tensor_split(parts)]))
    torch.testing.assert_close(ghost.state_dict(), plain.state_dict())
    images = torch.randn(rows, 3, 2, 2)  # a single image has four values
    chunks = images.chunk(-(-rows // size))
    expected = torch.cat([nn.BatchNorm2d(3)(part) for part in chunks])
    torch.testing.assert_close(GhostBatchNorm2d(3, ghost_batch_size=size)(images), expected)


def test_names_parameters_and_settings_stay():
    net = nn.Sequential(
        nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3, eps=0.1)
    )
    keys, weight = list(net.state_dict()), net[2].weight
    apply_ghost_batchnorm(net, 4)
    assert list(net.state_dict()) == keys and net[2].weight is weight and net[2].eps == 0.1
    net(torch.randn(8, 3))
    assert isinstance(net[0], nn.BatchNorm1d)


def test_a_subclass_of_batch_norm_stays():
    class Own(nn.BatchNorm2d):
        pass

    net = nn.Sequential(Own(3), nn.BatchNorm2d(3))
    apply_ghost_batchnorm(net, 4)
    assert [type(layer) for layer in net] == [Own, GhostBatchNorm2d]


def test_the_layers_can_be_made_by_hand():
    assert GhostBatchNorm1d(3)(torch.randn(64, 3)).shape == (64, 3)
    assert GhostBatchNorm3d(3, ghost_batch_size=2)(torch.randn(4, 3, 2, 2, 2)).shape == (4, 3, 2, 2, 2)


@pytest.mark.parametrize(("rows", "size", "drop", "smallest"), [(24, 8, False, 8), (20, 8, False, 4), (20, 8, True, 8)])
def test_the_smallest_batch_of_a_loader(rows, size, drop, smallest):
    loader = DataLoader(TensorDataset(torch.zeros(rows)), batch_size=size, drop_last=drop)
    assert smallest_batch(loader) == smallest
    assert smallest_batch(iter(())) is None


def test_a_last_batch_too_small_is_found_before_the_first_step():
    model = ConvNet()
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=(),
        algorithms=[GhostBatchNorm(8)],
    )
    with pytest.raises(ValueError, match="drop_last=True"):
        trainer.train(images(20), num_epochs=1, per_device_batch_size=8)
    assert trainer.state.clock.batch == 0
    trainer.train(images(20), num_epochs=1, per_device_batch_size=8, train_dataloader_kwargs={"drop_last": True})
    with pytest.raises(ValueError, match="larger batches"):
        trainer.train(images(20), num_epochs=1, per_device_batch_size=4)
