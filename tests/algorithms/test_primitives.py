"""The thirteen augmentations: strengths as drawn, and tensors treated as PIL treats images."""

import math

import pytest
import torch

from drivetrain.algorithms.utils import augmentation_sets, tensor_ops
from drivetrain.algorithms.utils import primitives as primitives_module
from drivetrain.algorithms.utils.primitives import as_pil, as_tensor, find_set

PIL_IMAGE = pytest.importorskip("PIL.Image")
pil_ops = pytest.importorskip("drivetrain.algorithms.utils.pil_ops")


def picture(channels=3, height=21, width=28):
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, channels, 5, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)[0]
    noisy = smooth + 0.1 * torch.rand(channels, height, width, generator=generator)
    return (noisy.clamp(0, 1) * 220 + 10).to(torch.uint8)


OPERATIONS = [
    ("autocontrast", ()),
    ("equalize", ()),
    ("posterize", (1,)),
    ("posterize", (4,)),
    ("solarize", (26,)),
    ("solarize", (256,)),
    ("rotate", (17,)),
    ("rotate", (-30,)),
    ("rotate", (0,)),
    ("affine", ((1, 0.27, 0, 0, 1, 0),)),
    ("affine", ((1, 0, 0, -0.2, 1, 0),)),
    ("affine", ((1, 0, 5, 0, 1, 0),)),
    ("affine", ((1, 0, 0, 0, 1, -7),)),
    ("color", (0.3,)),
    ("color", (4.0,)),
    ("contrast", (0.2,)),
    ("contrast", (2.5,)),
    ("brightness", (0.4,)),
    ("brightness", (3.0,)),
    ("sharpness", (0.1,)),
    ("sharpness", (5.0,)),
]


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(("name", "arguments"), OPERATIONS)
def test_tensors_are_changed_as_pil_changes_images(name, arguments, channels):
    values = picture(channels)
    image = as_pil(values, "RGB" if channels == 3 else "L")
    assert torch.equal(as_tensor(image), values)
    ours = getattr(tensor_ops, name)(values, *arguments)
    theirs = as_tensor(getattr(pil_ops, name)(image, *arguments))
    assert ours.dtype == torch.uint8 and ours.shape == theirs.shape
    difference = (ours.int() - theirs.int()).abs()
    assert difference.max() <= math.ceil(max(1, *[abs(a) for a in arguments if isinstance(a, float)], 1))
    assert (difference > 0).float().mean() < 0.02  # a level here and there, where PIL rounds in another precision


def test_flat_images_survive_every_operation():
    flat = torch.full((3, 8, 8), 77, dtype=torch.uint8)
    for name in ("autocontrast", "equalize"):
        assert torch.equal(getattr(tensor_ops, name)(flat), flat)


def test_the_sets():
    assert {name: len(members) for name, members in augmentation_sets.items()} == {"all": 13, "safe": 9, "original": 13}
    assert augmentation_sets["all"][:9] == augmentation_sets["safe"] == augmentation_sets["original"][:9]
    with pytest.raises(KeyError, match="Did you mean 'safe'"):
        find_set("saef", "test")


class Recorder:
    """Stands for the operations and keeps what they are called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name == "size":
            return lambda image: (30, 60)
        return lambda image, *arguments: self.calls.append((name, *arguments)) or image


def drawn(function, level, monkeypatch, count=400):
    recorder = Recorder()
    monkeypatch.setattr(primitives_module, "tensor_ops", recorder)
    generator, image = torch.Generator().manual_seed(1), torch.zeros(1, 2, 2, dtype=torch.uint8)
    for _ in range(count):
        function(image, level, generator)
    return [call[1] for call in recorder.calls]


@pytest.mark.parametrize(
    ("name", "low", "high", "whole"),
    [
        ("posterize", 1, 4, True),
        ("rotate", -30, 30, True),
        ("solarize", 1, 256, True),
        ("color", 0.1, 10, False),
        ("brightness", 0.1, 7.5, False),
        ("color_original", 0.118, 1.9, False),
    ],
)
def test_strengths_at_the_highest_level(name, low, high, whole, monkeypatch):
    values = drawn(getattr(primitives_module, name), 10, monkeypatch)
    span = high - low
    assert low <= min(values) < low + 0.1 * span + whole and high - 0.1 * span - whole < max(values) <= high
    assert all(isinstance(value, int) for value in values) == whole


def test_shears_and_shifts_go_both_ways(monkeypatch):
    for name, place, most in (("shear_x", 1, 0.3), ("shear_y", 3, 0.3), ("translate_x", 2, 10), ("translate_y", 5, 20)):
        moves = [matrix[place] for matrix in drawn(getattr(primitives_module, name), 10, monkeypatch)]
        assert -most <= min(moves) < -0.8 * most and 0.8 * most < max(moves) <= most
        assert all(isinstance(move, int) for move in moves) == name.startswith("translate")


def test_factors_are_as_often_above_as_below_one(monkeypatch):
    factors = drawn(primitives_module.contrast, 6, monkeypatch, 1000)
    assert 420 < sum(factor > 1 for factor in factors) < 580
    assert max(factors) <= 6 and min(factors) >= 1 - 0.54


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_float_images_keep_dtype_and_range(dtype):
    image = (picture().float() / 255).to(dtype)
    for augment in augmentation_sets["all"]:
        changed = augment(image, 5, torch.Generator().manual_seed(0))
        assert changed.dtype == dtype and changed.shape == image.shape and 0 <= changed.min() <= changed.max() <= 1
