"""Pictures in a tar file, `<split>/<class>/<name>`, as uint8 tensors: decoded once, read back from a cache afterwards.

Small pictures train faster than they can be decoded, so a benchmark or a short run wants all of them as one tensor. The
cache is a plain file of tensors; the archive's SHA-256 is part of its name, so that a changed archive is decoded again.

An archive may come from anywhere. Only JPEG and PNG are decoded (PIL would start other programs for some formats), a picture is
measured before it is decoded, and nothing is unpacked beyond a limit, whatever the headers promise.
"""

import bz2
import gzip
import hashlib
import io
import logging
import lzma
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError, needs_package
from drivetrain.core.files import atomic_write, home_cache

logger = logging.getLogger(__name__)

Split = tuple[Tensor, Tensor]
"""Images (N, 3, H, W) as uint8 and class numbers (N,)."""

FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 2**26
"""Of one picture: 8192 by 8192."""
MAX_BYTES = 2**35
"""Of all pixels together, and of the unpacked archive: 32 GiB. `max_bytes=` changes it."""
MAX_FILE = 2**28
"""Bytes of one file in the archive, and of one of its headers."""
_COMPRESSIONS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\x00", lzma.open),
)


def load_image_archive(
    path: str | Path, cache_dir: str | Path | None = None, *, max_bytes: int = MAX_BYTES
) -> dict[str, Split]:
    """Return the pictures of every split; classes are numbered over all splits in alphabetical order, samples follow their names.

    The cache is kept in `cache_dir`, by default `~/.cache/drivetrain`; one that is damaged is made again. An archive that holds
    more than `max_bytes` of pixels is a `ConfigError`.
    """
    archive = Path(path).expanduser()
    if not archive.is_file():
        raise ConfigError(
            f"load_image_archive: there is no file {str(archive)!r}. Expected a tar file of <split>/<class>/<name>."
        )
    folder = Path(cache_dir).expanduser() if cache_dir is not None else home_cache()
    with open(archive, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = folder / f"images-2-{digest}.pt"  # 2: classes are numbered over all splits
    splits = _read_cache(cache) if cache.is_file() else None
    if splits is not None:
        return splits
    splits = _decode(archive, max_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(cache) as aside:
            torch.save(splits, aside)
    except OSError as error:
        text = "the pictures of %s cannot be cached in %s and will be decoded again next time: %s"
        logger.warning(text, archive, folder, error)
    return splits


def _read_cache(cache: Path) -> dict[str, Split] | None:
    """Return what a cache holds, None where it is damaged."""
    try:
        splits = torch.load(cache, weights_only=True)
    except Exception as error:  # a truncated file raises whatever the reader happens to meet
        logger.warning("the cache %s is damaged (%s), so the pictures are decoded again.", cache, error)
        return None
    if not isinstance(splits, dict) or not all(map(_is_split, splits.values())):
        logger.warning("the cache %s does not hold pictures, so they are decoded again.", cache)
        return None
    return splits


def _is_split(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(part, Tensor) for part in value):
        return False
    images, labels = value
    return images.dtype is torch.uint8 and images.ndim == 4 and labels.shape == images.shape[:1]


class _Unpacked(io.RawIOBase):
    """The unpacked archive, of which no single read and no position may exceed a limit."""

    def __init__(self, stream: BinaryIO, limit: int, name: str):
        self._stream, self._limit, self._name = stream, limit, name
        self.last = b""
        """What was read last: at the end of a whole archive, a block of zeros."""

    def read(self, size: int = -1) -> bytes:
        """Read as tarfile asks for it; a header that claims to be huge is an error."""
        if not 0 <= size <= MAX_FILE:
            raise ConfigError(f"{self._name} holds a header or file of more than {MAX_FILE:,} bytes.")
        self._check(self._stream.tell() + size)
        self.last = self._stream.read(size)
        return self.last

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._check(position)
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > self._limit + MAX_FILE:
            raise ConfigError(
                f"{self._name} unpacks to more than {self._limit:,} bytes. If this is expected, raise max_bytes."
            )


Picture = tuple[str, str, Tensor]
"""Class, name and pixels (H, W, 3)."""


def _decode(archive: Path, max_bytes: int) -> dict[str, Split]:
    place = f"load_image_archive: {str(archive)!r}"
    with open(archive, "rb") as plain:
        head = plain.read(8)
    openers = [opener for magic, opener in _COMPRESSIONS if head.startswith(magic)]
    unpack: Callable[[Any], Any] = openers[0] if openers else partial(open, mode="rb")
    try:
        with unpack(archive) as packed:
            found = _decode_members(_Unpacked(packed, max_bytes, place), max_bytes, place)
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"{place} cannot be read as a tar file: {error}") from None
    if not found:
        raise ConfigError(f"{place} holds no <split>/<class>/<name>.")
    classes = sorted({name for pictures in found.values() for name, _, _ in pictures})
    return {split: _join(pictures, classes, place) for split, pictures in found.items()}


def _decode_members(unpacked: _Unpacked, max_bytes: int, place: str) -> dict[str, list[Picture]]:
    """Return the pictures of each split."""
    with needs_package("pillow", None, "decoding pictures"):
        from PIL import Image, UnidentifiedImageError
    found: dict[str, list[Picture]] = {}
    total = 0
    with tarfile.open(fileobj=unpacked, mode="r:") as tar:
        for member in tar:
            parts = Path(member.name).parts
            stream = tar.extractfile(member) if member.isfile() and len(parts) >= 3 else None
            if stream is None:
                continue
            name = f"{place}: {member.name!r}"
            data = stream.read(member.size)
            try:
                picture = Image.open(io.BytesIO(data), formats=FORMATS)
                total += 3 * picture.width * picture.height
                if picture.width * picture.height > MAX_PIXELS:
                    raise ConfigError(
                        f"{name} has {picture.width} x {picture.height} pixels, more than {MAX_PIXELS:,}."
                    )
                if total > max_bytes:
                    raise ConfigError(f"{name}: the decoded images exceed {max_bytes:,} bytes. Raise max_bytes.")
                if picture.mode.startswith("I"):  # PIL would clip its values, not scale them
                    raise ConfigError(f"{name} has 16 bits per pixel; expected 8 bits per channel.")
                colours = picture.convert("RGB")
            except ConfigError:
                raise
            except UnidentifiedImageError:
                raise ConfigError(
                    f"{name} is neither {' nor '.join(FORMATS)}; other formats are not supported."
                ) from None
            except (
                Image.DecompressionBombError,
                Image.DecompressionBombWarning,
                OSError,
                ValueError,
                SyntaxError,
            ) as error:
                raise ConfigError(f"{name} cannot be decoded: {error}") from None
            pixels = torch.frombuffer(bytearray(colours.tobytes()), dtype=torch.uint8)
            found.setdefault(parts[-3], []).append(
                (parts[-2], parts[-1], pixels.view(picture.height, picture.width, 3))
            )
    if unpacked.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a header that is cut or damaged for the end
        raise ConfigError(f"{place} is damaged or truncated: it ends without the mark that ends a tar file.")
    return found


def _join(pictures: list[Picture], classes: list[str], place: str) -> Split:
    sizes = {pixels.shape for _, _, pixels in pictures}
    if len(sizes) > 1:
        raise ConfigError(f"{place}: the pictures have {len(sizes)} sizes; one tensor needs one size.")
    pictures.sort(key=lambda picture: picture[:2])
    images = torch.stack([pixels for _, _, pixels in pictures]).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([classes.index(name) for name, _, _ in pictures])
