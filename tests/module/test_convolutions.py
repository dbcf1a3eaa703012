"""Convolutions are laid out channels-last, and whitening filters make the patches of images uncorrelated."""

import pytest
import torch
from torch import nn

from drivetrain.module.convolutions import (
    channels_last_input,
    is_worth_channels_last,
    to_channels_last,
    whiten_convolution,
    whitening_kernel,
)
from tests.module import models


def test_kernels_are_laid_out_in_place_and_the_output_is_the_same():
    torch.manual_seed(0)
    model = models.ResNet(depths=(1, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected, parameters, keys = model(x), list(model.parameters()), list(model.state_dict())
    count = to_channels_last(model)
    assert count == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(a is b for a, b in zip(parameters, model.parameters())) and list(model.state_dict()) == keys
    torch.testing.assert_close(model(channels_last_input(x)), expected, rtol=1e-4, atol=1e-5)


def test_volumes_get_their_own_format_and_other_layers_are_left_alone():
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv1d(2, 4, 3), nn.Bilinear(2, 3, 4))
    assert to_channels_last(model) == 1
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert model[1].weight.is_contiguous() and model[2].weight.is_contiguous()


def test_inputs_follow_where_they_have_channels():
    assert channels_last_input(torch.zeros(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    assert channels_last_input(torch.zeros(2, 3, 4, 4, 4)).is_contiguous(memory_format=torch.channels_last_3d)
    for other in (torch.zeros(2, 3), torch.zeros(2, 3, 4, 4, dtype=torch.long)):
        assert channels_last_input(other) is other


def test_it_is_worth_it_for_convolutional_networks_only():
    assert is_worth_channels_last(models.ResNet()) and is_worth_channels_last(models.UNet())
    assert not is_worth_channels_last(models.ViT()) and not is_worth_channels_last(models.GPT2())
    assert not is_worth_channels_last(nn.ReLU())


def smooth_images(count=64, channels=3, size=10):
    noise = torch.randn(count, channels, size + 2, size + 2, generator=torch.Generator().manual_seed(0))
    return nn.functional.avg_pool2d(noise, 3, stride=1)


def outputs_of(kernel, images):
    """One row per filter, one column per patch."""
    return nn.functional.conv2d(images, kernel).transpose(0, 1).flatten(1).double()


@pytest.mark.parametrize("kernel_size", [(2, 2), (1, 3)])
def test_channels_are_uncorrelated_and_of_unit_variance(kernel_size):
    images = smooth_images()
    outputs = outputs_of(whitening_kernel(images, kernel_size, eps=0.0), images)
    assert torch.allclose(torch.cov(outputs), torch.eye(len(outputs), dtype=torch.float64), atol=1e-3)


def test_eps_damps_weak_directions_and_the_strongest_come_first():
    images, eps = smooth_images(), 0.01
    raw = torch.cov(outputs_of(torch.eye(12).reshape(12, 3, 2, 2), images))
    expected = torch.linalg.eigvalsh(raw).flip(0)
    variances = outputs_of(whitening_kernel(images, (2, 2), eps), images).var(1)
    assert torch.allclose(variances, expected / (expected + eps), atol=1e-4)
    assert (variances.diff() <= 1e-6).all()


def test_a_convolution_holds_both_signs_and_is_frozen():
    convolution, images = nn.Conv2d(3, 24, 2), smooth_images()
    whiten_convolution(convolution, images)
    assert torch.equal(convolution.weight[:12], -convolution.weight[12:])
    assert not convolution.weight.requires_grad and convolution.bias.requires_grad and not convolution.bias.any()
    single = nn.Conv2d(3, 12, 2, bias=False)
    whiten_convolution(single, images)
    assert torch.equal(single.weight, convolution.weight[:12])


def test_what_cannot_be_whitened_is_refused():
    images = smooth_images()
    with pytest.raises(ValueError, match=r"Conv2d\(3, 12\) or Conv2d\(3, 24\)"):
        whiten_convolution(nn.Conv2d(3, 16, 2), images)
    with pytest.raises(ValueError, match="2 groups"):
        whiten_convolution(nn.Conv2d(4, 16, 2, groups=2), images)
    with pytest.raises(ValueError, match="Give more images"):
        whitening_kernel(torch.rand(1, 3, 2, 2), (2, 2))
    with pytest.raises(TypeError, match="uint8"):
        whitening_kernel(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), (2, 2))
