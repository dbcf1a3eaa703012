"""Channels are weighed by a small network of their means."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.squeeze_excite import (
    SqueezeExcite,
    SqueezeExcite2d,
    SqueezeExciteConv2d,
    apply_squeeze_excite,
)


def test_channels_are_multiplied_by_a_sigmoid_of_their_means():
    layer, x = SqueezeExcite2d(8, 0.5), torch.randn(2, 8, 5, 5)
    first, second = (module.weight for module in layer.pool_and_mlp if isinstance(module, nn.Linear))
    weights = torch.sigmoid(torch.relu(x.mean(dim=(2, 3)) @ first.t()) @ second.t())
    torch.testing.assert_close(layer(x), x * weights[:, :, None, None])
    assert first.shape == (4, 8)


@pytest.mark.parametrize(("latent", "expected"), [(64, 64), (1, 1), (0.125, 2), (3.7, 3)])
def test_the_hidden_width_is_a_count_or_a_fraction(latent, expected):
    assert SqueezeExcite2d(16, latent).latent_channels == expected


def test_a_fraction_that_leaves_no_channel_is_refused():
    with pytest.raises(ValueError, match="no hidden channel"):
        SqueezeExcite2d(4, 0.1)
    with pytest.raises(ValueError, match="latent_channels"):
        SqueezeExcite(latent_channels=-1)


def test_both_sizes_of_a_convolution_must_be_wide():
    net = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1))
    inner = net[1]
    apply_squeeze_excite(net, latent_channels=4, min_channels=8)
    assert [type(layer) for layer in net] == [nn.Conv2d, SqueezeExciteConv2d, nn.Conv2d]
    assert net[1].conv is inner


def test_the_layer_can_be_made_by_hand():
    layer = SqueezeExciteConv2d(4, 8, 3, padding=1, latent_channels=2)
    assert layer(torch.randn(1, 4, 6, 6)).shape == (1, 8, 6, 6)
