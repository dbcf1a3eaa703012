"""Kernels keep their norm, and what a batch norm follows computes as before."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.kernel_norm import KernelNorm, normalise_kernels
from drivetrain.algorithms.layer_freezing import LayerFreezing
from drivetrain.core.event import Event
from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import Watch, conv_trainer, image_data, train


def squared_norms(state):
    return [float(state.model.features[i].weight.detach().norm() ** 2) for i in (0, 4)]


def test_the_norm_is_the_root_of_the_number_of_filters_and_the_direction_stays():
    kernels = [torch.randn(8, 3, 3, 3), torch.randn(5, 2, 1).contiguous()]
    before = [kernel.clone() for kernel in kernels]
    normalise_kernels(kernels)
    for kernel, old in zip(kernels, before):
        assert torch.allclose(kernel.norm() ** 2, torch.tensor(float(len(kernel))))
        assert torch.allclose(kernel / kernel.norm(), old / old.norm(), atol=1e-6)


def test_every_step_starts_from_that_norm():
    watch = Watch(Event.BEFORE_STEP, squared_norms)
    train(conv_trainer(KernelNorm(), callbacks=[watch]), image_data())
    assert watch.values == [pytest.approx([6.0, 8.0], rel=1e-5)] * 8


def test_a_kernel_that_is_frozen_later_is_left_alone():
    watch = Watch(Event.BEFORE_STEP, lambda state: state.model.features[0].weight.detach().clone())
    trainer = conv_trainer(KernelNorm(), LayerFreezing(freeze_start=0), callbacks=[watch])
    train(trainer, image_data())
    frozen = trainer.state.model.features[0].weight
    assert not frozen.requires_grad and all(map(torch.equal, watch.values[4:], [frozen] * 4))
    assert abs(float(frozen.norm()) - 6**0.5) > 1e-4  # as the last step before left it


def test_only_named_layers_are_changed():
    watch = Watch(Event.BEFORE_STEP, squared_norms)
    train(conv_trainer(KernelNorm(layers="features.4"), callbacks=[watch]), image_data(), num_epochs=1)
    assert all(second == pytest.approx(8.0, rel=1e-5) and abs(first - 6) > 1e-2 for first, second in watch.values)


def test_mistakes_are_found_when_the_trainer_is_built():
    with pytest.raises(ValueError, match="featuers"):
        conv_trainer(KernelNorm(layers="featuers.4"))
    with pytest.raises(ValueError, match="no trainable convolution"):
        Trainer(nn.Linear(2, 2), nn.MSELoss(), None, callbacks=(), algorithms=[KernelNorm()])


def test_a_shared_kernel_is_scaled_once_and_one_of_zeros_stays():
    shared, zeros = torch.randn(4, 1, 2, 2), torch.zeros(3, 1, 2, 2)
    normalise_kernels([shared, zeros, shared])
    assert shared.norm().item() == pytest.approx(2.0) and not zeros.any()
