"""The blur is the binomial filter, the layers keep what they replace, and settings are checked."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain.algorithms.blurpool import (
    BlurConv2d,
    BlurMaxPool2d,
    BlurPool,
    BlurPool2d,
    apply_blurpool,
    blur_2d,
    blurmax_pool2d,
)
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from tests.algorithms.surgery_models import ConvNet

KERNEL = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16


def reference_blur(x, stride=1):
    """Blur pixel by pixel, in double precision."""
    padded = F.pad(x.double(), (1, 1, 1, 1))
    height, width = x.shape[-2:]
    out = torch.empty(*x.shape[:2], -(-height // stride), -(-width // stride), dtype=torch.float64)
    for row in range(0, height, stride):
        for column in range(0, width, stride):
            window = padded[..., row : row + 3, column : column + 3]
            out[..., row // stride, column // stride] = (window * KERNEL).sum(dim=(-2, -1))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_default_blur_is_binomial_in_every_type(dtype, stride):
    x = torch.randn(2, 3, 7, 6).to(dtype)
    out = blur_2d(x, stride=stride)
    assert out.dtype is dtype
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(out.double(), reference_blur(x, stride), **tolerance)


def test_a_filter_per_channel_is_used_as_given():
    x, filters = torch.randn(1, 2, 5, 5), torch.rand(2, 1, 3, 3)
    torch.testing.assert_close(blur_2d(x, filter=filters), F.conv2d(x, filters, padding=1, groups=2))


def test_an_even_filter_has_no_centre():
    with pytest.raises(IndexError, match="odd"):
        blur_2d(torch.randn(1, 1, 4, 4), filter=torch.ones(1, 1, 2, 2))


def test_an_image_smaller_than_the_filter_is_returned():
    x = torch.randn(1, 2, 1, 1)
    assert blur_2d(x, filter=torch.ones(1, 1, 5, 3)) is not x
    tiny = torch.randn(1, 2, 0, 4)
    assert blur_2d(tiny, filter=torch.ones(1, 1, 5, 3)) is tiny


def test_max_pooling_takes_every_maximum_then_blurs():
    x = torch.randn(2, 3, 8, 8)
    expected = blur_2d(F.max_pool2d(x, 3, stride=1, padding=1), stride=2)
    torch.testing.assert_close(blurmax_pool2d(x, 3, 2, 1), expected)
    layer = BlurMaxPool2d.from_maxpool2d(nn.MaxPool2d(3, stride=2, padding=1))
    torch.testing.assert_close(layer(x), expected)
    assert BlurMaxPool2d(2).stride == 2
    assert BlurPool2d()(x).shape == (2, 3, 4, 4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_a_convolution_keeps_weights_bias_and_padding_mode(bias, mode):
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, dilation=1, bias=bias, padding_mode=mode)
    x = torch.randn(2, 4, 8, 8)
    first = BlurConv2d.from_conv2d(conv, blur_first=True)
    torch.testing.assert_close(first(x), conv(blur_2d(x)))
    last = BlurConv2d.from_conv2d(conv, blur_first=False)
    dense = nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=bias, padding_mode=mode)
    dense.load_state_dict(conv.state_dict())
    torch.testing.assert_close(last(x), blur_2d(dense(x), stride=2))
    for layer in (first, last):
        assert layer.conv.weight is conv.weight and layer.conv.bias is conv.bias
    assert conv.stride == (2, 2)


def test_the_layer_can_be_made_by_hand():
    layer = BlurConv2d(4, 8, 3, stride=2, padding=1, bias=False)
    assert layer(torch.randn(1, 4, 8, 8)).shape == (1, 8, 4, 4) and layer.conv.bias is None
    assert BlurConv2d(4, 8, 3, stride=2, padding=1, blur_first=False)(torch.randn(1, 4, 8, 8)).shape == (1, 8, 4, 4)


def test_only_wide_strided_convolutions_and_pools_are_replaced():
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 32, 3, stride=2), nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(2),
    )  # fmt: skip
    apply_blurpool(net)
    assert [type(layer).__name__ for layer in net] == ["Conv2d", "Conv2d", "BlurConv2d", "MaxPool2d", "BlurMaxPool2d"]


def test_it_logs_how_many_layers_it_made():
    seen = {}
    logger = type("Log", (), {"log_hyperparameters": lambda self, values: seen.update(values)})()
    Engine(State(model=ConvNet(), seed=0), logger, [BlurPool(min_channels=8)]).fire(Event.INIT)
    assert seen == {"blurpool/num_blurpool_layers": 1, "blurpool/num_blurconv_layers": 1}


def test_nothing_to_do_is_refused():
    for make in (lambda: BlurPool(False, False), lambda: apply_blurpool(ConvNet(), False, False)):
        with pytest.raises(ValueError, match="both False"):
            make()


def test_shifted_images_look_more_alike():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1))
    x = torch.randn(4, 16, 32, 32)

    def change(model):
        a, b = model(x)[..., 2:-2, 2:-2], model(x.roll(1, dims=-1))[..., 2:-2, 2:-2]
        return ((a - b).norm() / a.norm()).item()

    before = change(net)
    apply_blurpool(net)
    assert change(net) < 0.9 * before


@pytest.mark.gpu
def test_the_default_filter_follows_its_input_to_the_device():
    assert blur_2d(torch.randn(1, 2, 8, 8, device="cuda", dtype=torch.bfloat16)).is_cuda


def test_single_images_are_blurred_like_batches():
    x = torch.randn(3, 8, 8)
    for layer in (BlurMaxPool2d(2), BlurPool2d(), BlurConv2d(3, 4, 3, 2)):
        torch.testing.assert_close(layer(x), layer(x[None])[0])


def test_a_convolution_with_a_parametrized_weight_is_blurred_at_its_end():
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 3, 3, stride=2)))
    x, kept = torch.randn(2, 4, 9, 9), [id(p) for p in model.parameters()]
    expected = blur_2d(F.conv2d(x, model[0].weight, model[0].bias), stride=2)
    apply_blurpool(model, blur_first=False, min_channels=1)
    torch.testing.assert_close(model(x), expected)
    assert [id(p) for p in model.parameters()] == kept
