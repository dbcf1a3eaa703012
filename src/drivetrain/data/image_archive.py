"""Pictures in a tar file, `<split>/<class>/<name>`, as uint8 tensors: decoded once, read back from a cache afterwards.

Small pictures train faster than they can be decoded, so a benchmark or a short run wants all of them as one tensor. The
cache is a plain file of tensors beside nothing else; it carries the archive's size and date in its name, so that a
changed archive is decoded anew.
"""

import os
import tarfile
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError, MissingExtra

Split = tuple[Tensor, Tensor]
"""Images (N, 3, H, W) as uint8 and class numbers (N,)."""


def load_image_archive(path: str | Path, cache_dir: str | Path | None = None) -> dict[str, Split]:
    """Return the pictures of every split; classes are numbered in alphabetical order, samples follow their names.

    The cache is kept in `cache_dir`, by default `~/.cache/drivetrain`.
    """
    archive = Path(path).expanduser()
    if not archive.is_file():
        raise ConfigError(
            f"load_image_archive: there is no file {str(archive)!r}. Expected a tar file of <split>/<class>/<name>."
        )
    facts = archive.stat()
    folder = Path(cache_dir).expanduser() if cache_dir is not None else Path.home() / ".cache" / "drivetrain"
    cache = folder / f"{archive.name}-{facts.st_size:x}-{int(facts.st_mtime):x}.pt"
    if cache.is_file():
        return torch.load(cache, weights_only=True)
    splits = _decode(archive)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = cache.with_suffix(f".{os.getpid()}")
    torch.save(splits, unfinished)
    unfinished.replace(cache)  # at once: another process sees all of it or nothing
    return splits


def _decode(archive: Path) -> dict[str, Split]:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", None, "decoding pictures") from error
    found: dict[str, list[tuple[str, str, Tensor]]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            stream = tar.extractfile(member) if member.isfile() and len(parts) >= 3 else None
            if stream is None:
                continue
            picture = Image.open(stream).convert("RGB")
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            found.setdefault(parts[-3], []).append(
                (parts[-2], parts[-1], pixels.view(picture.height, picture.width, 3))
            )
    if not found:
        raise ConfigError(f"load_image_archive: {str(archive)!r} holds no <split>/<class>/<name>.")
    return {split: _join(pictures, archive) for split, pictures in found.items()}


def _join(pictures: list[tuple[str, str, Tensor]], archive: Path) -> Split:
    sizes = {tuple(pixels.shape) for _, _, pixels in pictures}
    if len(sizes) > 1:
        raise ConfigError(
            f"load_image_archive: the pictures in {str(archive)!r} have {len(sizes)} sizes; one tensor needs one size."
        )
    pictures.sort(key=lambda picture: picture[:2])
    numbers = {name: number for number, name in enumerate(sorted({name for name, _, _ in pictures}))}
    images = torch.stack([pixels for _, _, pixels in pictures]).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([numbers[name] for name, _, _ in pictures])
