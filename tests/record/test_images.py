"""Images of every accepted form become the same PNG, read back with Pillow."""

import io
import logging

import numpy as np
import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.record.images import Picture, check_figure, check_image, encode_figure, encode_image, encode_png

Image = pytest.importorskip("PIL.Image")
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def decoded(image):
    return np.asarray(Image.open(io.BytesIO(encode_image(check_image(image), "x", set()))))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4), (1, 1), (1, 9)])
def test_png_is_read_back_bit_for_bit(shape):
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    image = Image.open(io.BytesIO(encode_png(pixels)))
    image.verify()
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(encode_png(pixels)))),
        pixels.squeeze(-1) if shape[-1:] == (1,) and len(shape) == 3 else pixels,
    )
    assert Picture(png=encode_png(pixels)).size == (shape[1], shape[0])


@pytest.mark.parametrize(
    "image",
    [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        torch.from_numpy(PIXELS).permute(2, 0, 1) / 255,
        torch.from_numpy(PIXELS).permute(2, 0, 1)[None],
        PIXELS[None],
        (PIXELS / 255).astype(np.float16),
        Image.fromarray(PIXELS),
        PIXELS[:, ::-1][:, ::-1],
    ],
    ids=[
        "HWC",
        "CHW",
        "tensor HWC",
        "tensor CHW",
        "float tensor",
        "batch of one",
        "array batch of one",
        "half array",
        "PIL",
        "strided",
    ],
)
def test_every_form_gives_the_same_pixels(image):
    assert np.array_equal(decoded(image), PIXELS)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_every_kind_of_pil_image_is_written(mode):
    image = Image.fromarray(PIXELS).convert(mode)
    expected = image if mode in ("L", "RGBA") else image.convert("RGBA" if mode == "LA" else "RGB")
    assert np.array_equal(decoded(image), np.asarray(expected))


def test_a_shape_that_can_be_read_both_ways_follows_its_library():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    assert decoded(pixels).shape == (3, 5, 3)
    assert decoded(torch.from_numpy(pixels)).shape == (5, 3, 3)


def test_values_outside_the_range_are_cut_off_and_said_once(caplog):
    told = set()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            png = encode_image(check_image(torch.tensor([[-1.0, 2.0, float("nan"), 0.5]])), "mask", told)
    assert np.asarray(Image.open(io.BytesIO(png))).tolist() == [[0, 255, 0, 128]]
    assert len(caplog.records) == 1 and "'mask'" in caplog.text


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(2, 3, 5, 5),
        torch.zeros(5),
        torch.zeros(2, 5, 5),
        np.zeros((5, 5), int),
        torch.zeros(0, 4),
        "x",
        [[1], [1, 2]],
    ],
)
def test_what_is_no_image_is_refused(image):
    with pytest.raises(ValueError, match="the image has the"):
        check_image(image)


def test_only_a_figure_is_a_figure():
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    axes = figure.subplots()
    with pytest.raises(ValueError, match=r"axes\.figure"):
        check_figure(axes)
    with pytest.raises(ValueError, match="image()"):
        check_figure(np.zeros((2, 2)))
    assert Picture(png=encode_figure(check_figure(figure))).size == (100, 50)


def test_deep_images_of_pil_are_not_cut_off_silently():
    brightness = np.array([[0.0, 0.25], [0.5, 1.0]], dtype=np.float32)
    assert np.array_equal(check_image(Image.fromarray(brightness)), brightness)  # was black: all below 1
    for kind in (np.uint16, np.int32):
        with pytest.raises(ConfigError, match="expected uint8"):
            check_image(Image.fromarray(np.array([[0, 65535]], dtype=kind)))  # was white
