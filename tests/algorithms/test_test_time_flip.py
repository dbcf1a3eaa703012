"""Evaluation and prediction average over mirrored and moved images."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drivetrain.algorithms.test_time_flip import TestTimeFlip, average_flips
from drivetrain.core.errors import ConfigError
from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import ConvNet, conv_trainer, image_data, train


def reference(model, x, shift):
    def pair(images):
        return (model(images) + model(images.flip(-1))) / 2

    if not shift:
        return pair(x)
    padded = F.pad(x, (shift,) * 4, mode="reflect")
    size = x.shape[-1]
    corners = padded[..., 2 * shift :, 2 * shift :], padded[..., :size, :size]
    return pair(x) / 2 + sum(map(pair, corners)) / 4


def test_the_mean_is_that_of_the_views():
    model, (x, _) = conv_trainer().model.eval(), image_data().tensors
    for shift in (0, 1, 2):
        assert torch.allclose(average_flips(model, x, shift), reference(model, x, shift), atol=1e-6)


def test_loss_and_metrics_see_the_mean():
    data = image_data()
    trainer = conv_trainer(TestTimeFlip(shift=1), metrics={"sum": lambda outputs, targets: outputs[:, 0].mean()})
    result = trainer.evaluate(data, per_device_batch_size=24)
    outputs = reference(trainer.model.eval(), data.tensors[0], 1)
    assert abs(result["evaluation_loss"] - F.cross_entropy(outputs, data.tensors[1]).item()) < 1e-6
    assert abs(result["evaluation_sum"] - outputs[:, 0].mean().item()) < 1e-6


def test_prediction_averages_with_and_without_targets():
    (x, y), trainer = image_data().tensors, conv_trainer(TestTimeFlip())
    expected = reference(trainer.model.eval(), x, 0)
    for data in (TensorDataset(x, y), x):
        assert torch.allclose(trainer.predict(data, per_device_batch_size=12), expected, atol=1e-6)


@pytest.mark.parametrize("shift", [0, 1])
def test_maps_over_the_pixels_are_turned_back(shift):
    x, model = torch.rand(3, 2, 8, 8), nn.Conv2d(2, 4, 1).eval()  # sees each pixel by itself
    seen = average_flips(model, x, shift)
    inner = (..., slice(shift, 8 - shift), slice(shift, 8 - shift))  # what a shift moves out comes back as a reflection
    torch.testing.assert_close(seen[inner], model(x)[inner])
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, (), algorithms=[TestTimeFlip(shift)])
    torch.testing.assert_close(trainer.predict(x, per_device_batch_size=3), seen)


def test_smaller_maps_cannot_be_shifted_back():
    with pytest.raises(ConfigError, match="shift=0"):
        average_flips(nn.MaxPool2d(2), torch.rand(3, 2, 8, 8), shift=1)
    x = torch.rand(3, 2, 8, 8)
    torch.testing.assert_close(average_flips(nn.MaxPool2d(2), x), nn.MaxPool2d(2)(x))


def test_training_is_not_touched():
    data = image_data()
    losses = [
        train(conv_trainer(*algorithms), data).get_metric_values("train_loss_epoch")
        for algorithms in ((), (TestTimeFlip(),))
    ]
    assert losses[0] == losses[1]


def test_it_follows_the_precision_of_the_run():
    trainer = conv_trainer(TestTimeFlip(), precision="bf16")
    result = trainer.evaluate(image_data(), per_device_batch_size=24)
    exact = F.cross_entropy(reference(trainer.model.eval(), image_data().tensors[0], 0), image_data().tensors[1]).item()
    assert result["evaluation_loss"] != exact and abs(result["evaluation_loss"] - exact) < 0.02


def test_several_images_are_mirrored_together():
    (x, y), other = image_data().tensors, torch.rand(24, 3, 8, 8)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = ConvNet(channels=6)

        def forward(self, left, right):
            return self.net(torch.cat([left, right], 1))

    trainer = Trainer(Pair(), nn.CrossEntropyLoss(), None, (), algorithms=[TestTimeFlip(input_key=[0, 1])])
    expected = reference(trainer.model.net.eval(), torch.cat([x, other], 1), 0)
    found = trainer.predict(TensorDataset(x, other, y), per_device_batch_size=12)
    assert torch.allclose(found, expected, atol=1e-6)
