"""Pictures as PNG: from PIL images, tensors, arrays and matplotlib figures.

PNG needs no more than zlib, so it is written here and no imaging package has to be installed. Floats are brightness in
[0, 1]; values outside are clipped, with one warning.
"""

import io
import logging
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drivetrain.core.errors import ConfigError

logger = logging.getLogger(__name__)

_CHANNELS = (1, 3, 4)
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # grey, RGB, RGBA, in PNG's own numbers


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image or figure as the bytes of a PNG file."""

    png: bytes
    path: str | None = None
    """Where the file is kept within the output folder; None when pictures are not written as files."""

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


def check_image(image: Any) -> Any:
    """Return an image as a tensor or array of two or three dimensions, or raise; values are not read. A batch of one is its image."""
    if type(image).__module__.partition(".")[0] == "PIL":
        if image.mode not in ("L", "RGB", "RGBA", "I", "F") and not image.mode.startswith("I;"):
            has_alpha = image.mode in ("LA", "PA") or "transparency" in image.info
            image = image.convert("RGBA" if has_alpha else "RGB")
        image = np.asarray(image)  # of 16 bits and more, PIL would cut off what is above 255
    if not isinstance(image, torch.Tensor):
        try:
            image = np.asarray(image)
        except ValueError:
            image = np.empty(0)
    is_tensor = isinstance(image, torch.Tensor)
    if is_tensor:
        is_known = image.dtype in (torch.uint8, torch.bool) or image.dtype.is_floating_point
    else:
        is_known = image.dtype in (np.uint8, np.bool_) or np.issubdtype(image.dtype, np.floating)
    if not is_known:
        raise ConfigError(
            f"the image has the type {image.dtype}; expected uint8, or floats between 0 and 1. Convert it with "
            ".to(torch.uint8) or divide it by its largest value."
        )
    if image.ndim == 4 and image.shape[0] == 1:
        image = image[0]
    shape = tuple(image.shape)
    if 0 in shape or not (len(shape) == 2 or (len(shape) == 3 and (shape[0] in _CHANNELS or shape[2] in _CHANNELS))):
        raise ConfigError(
            f"the image has the shape {shape}; expected (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels. Record the images of a "
            "batch one by one, or all of them with log_images(images, name)."
        )
    # (3, 5, 3) can be read both ways: torch puts channels first, numpy last.
    is_channels_first = len(shape) == 3 and shape[0] in _CHANNELS and (is_tensor or shape[2] not in _CHANNELS)
    if is_channels_first:
        return image.permute(1, 2, 0) if is_tensor else image.transpose(1, 2, 0)
    return image


def encode_image(image: Any, tag: str, warned: set[str]) -> bytes:
    """Return a checked image as PNG; `warned` has the tags whose range a warning has named."""
    if isinstance(image, torch.Tensor):
        image = image.cpu()
        image = (image.float() if image.dtype.is_floating_point else image).numpy()
    if image.dtype == np.bool_:
        image = image.astype(np.uint8) * 255
    elif image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        if not (low >= -1e-3 and high <= 1 + 1e-3) and tag not in warned:  # NaN also ends up here
            warned.add(tag)
            logger.warning(
                "image %r: values from %g to %g are clipped to [0, 1]; scale them to [0, 1] first.", tag, low, high
            )
        image = (np.clip(np.nan_to_num(image), 0, 1) * 255 + 0.5).astype(np.uint8)
    return encode_png(image)


def encode_png(pixels: np.ndarray) -> bytes:
    """Return pixels (H, W) or (H, W, C) of bytes as a PNG file (ISO/IEC 15948)."""
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    rows = np.ascontiguousarray(pixels).reshape(height, width * channels)
    # Filter 2, "up": each row minus the one above, which makes even areas and slow changes compress well.
    filtered = np.full((height, width * channels + 1), 2, dtype=np.uint8)
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(filtered.tobytes(), 6), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts.items())


def check_figure(figure: object) -> Any:
    """Return a matplotlib Figure, or raise an error with the type that was given."""
    matplotlib = sys.modules.get("matplotlib.figure")  # a Figure cannot exist before it is loaded
    if matplotlib is None or not isinstance(figure, matplotlib.Figure):
        is_part = hasattr(figure, "get_figure")
        hint = "Pass its figure: axes.figure." if is_part else "Arrays and PIL images go to image()."
        raise ConfigError(f"figure() was given a {type(figure).__name__}; expected a matplotlib Figure. {hint}")
    return figure


def encode_figure(figure: Any) -> bytes:
    """Return a matplotlib Figure, as it looks now, as PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
