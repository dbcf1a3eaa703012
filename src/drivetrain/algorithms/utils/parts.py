"""Parts of a batch, one tensor or several where a key selects several, and random numbers for what is done to them.

Whatever is done to one tensor is done to all. Random numbers are drawn on the host from a given generator, so that no step waits for the
device. Every draw takes torch's global generator when it is given None. A generator of another device works too, at the price of a wait;
the State's generators are the host's.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from drivetrain.algorithms.surgery import warn_no_effect
from drivetrain.core.containers import leaves
from drivetrain.core.errors import ConfigTypeError, NotIntendedUseWarning, warn
from drivetrain.core.types import Batch
from drivetrain.runtime.device import copy_to

T = TypeVar("T")


def map_tensors(function: Callable[..., object], part: object, *others: Any) -> Batch:
    """Return the part with `function` applied to each tensor, together with the tensors at the same position of the other parts."""
    if isinstance(part, Tensor):
        return function(part, *others)
    if isinstance(part, Mapping):
        return {name: map_tensors(function, item, *(other[name] for other in others)) for name, item in part.items()}
    if isinstance(part, list | tuple):
        return [map_tensors(function, *items) for items in zip(part, *others, strict=True)]
    raise ConfigTypeError(
        f"a part of the batch is a {type(part).__name__}; expected a tensor, or several in a list or mapping."
    )


def first_tensor(part: object, who: str) -> Tensor:
    """Return the first tensor of a part."""
    found = next(leaves(part, Tensor), None)
    if found is None:
        raise ConfigTypeError(
            f"{who} found no tensor in its part of the batch, a {type(part).__name__}. Give another input_key."
        )
    return found


def take_rows(part: T, index: Tensor) -> T:
    """Return the rows that `index` names, of every tensor."""
    taken: Any = map_tensors(lambda tensor: tensor.index_select(0, index.to(tensor.device)), part)
    return taken


def check_images(x: object, who: str) -> None:
    """Reject what is not a batch of images: height and width are the last two dimensions."""
    if not isinstance(x, Tensor) or x.ndim < 3:
        shape = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ConfigTypeError(f"{who} works on images, (N, C, H, W) or (C, H, W); got {shape}. Give another input_key.")


def first_image(part: object, who: str, *, same_size: bool = True) -> Tensor:
    """Return the first of a part's images, which all have its height and width unless `same_size` is off."""
    first = first_tensor(part, who)
    for image in leaves(part, Tensor):
        check_images(image, who)
        if same_size and image.shape[-2:] != first.shape[-2:]:
            raise ConfigTypeError(
                f"{who} changes several images alike, and they have shapes {tuple(first.shape)} and {tuple(image.shape)}. Give images of "
                "one height and width, or another input_key."
            )
    return first


def check_floating(x: Tensor, who: str) -> None:
    """Reject whole numbers where values are mixed: half of a token id is not a token id."""
    if not x.is_floating_point():
        raise ConfigTypeError(
            f"{who} mixes values, which needs floating-point inputs; got {str(x.dtype).removeprefix('torch.')}. Convert images "
            "with x.float() / 255; token ids cannot be mixed."
        )


def is_image_like(target: object, image: Tensor) -> bool:
    """Return whether a target has the height and width of the images, as segmentation masks do."""
    return isinstance(target, Tensor) and target.ndim > 2 and target.shape[-2:] == image.shape[-2:]


def warn_of_small_sides(image: Tensor, who: str) -> None:
    """Warn that boxes have no pixel, as those of a signal (N, C, L) that is taken for images."""
    warn_no_effect(
        f"{who} changes nothing in inputs of shape {tuple(image.shape)}: a box of part of their height and width, the last two "
        "dimensions, has no pixel. Is this an image?"
    )


def warn_of_images_left(batch: object, images: object, who: str) -> None:
    """Warn if a batch has other tensors of the images' height and width, such as masks, that are not moved with them."""
    first, own = first_image(images, who, same_size=False), {id(image) for image in leaves(images, Tensor)}
    left = [tuple(part.shape) for part in leaves(batch, Tensor) if id(part) not in own and is_image_like(part, first)]
    if left:
        warn(
            f"{who} moves the pixels of images {tuple(first.shape)}, but not those of {', '.join(map(str, left))} in the same batch. If "
            "they belong together, as a mask does, name both: input_key=[0, 1].",
            NotIntendedUseWarning,
        )


Generator = torch.Generator | None


def draw_uniform(low: float, high: float, generator: Generator = None) -> float:
    """Return a number between `low` and `high`."""
    drawn = torch.rand((), dtype=torch.float64, generator=generator, device=device_of(generator))
    return low + (high - low) * float(drawn)


def draw_integer(low: int, high: int, generator: Generator = None) -> int:
    """Return a whole number from `low` to `high - 1`."""
    return int(torch.randint(low, high, (), generator=generator, device=device_of(generator)))


def draw_coin(generator: Generator = None) -> bool:
    """Return True half of the time."""
    return draw_uniform(0.0, 1.0, generator) > 0.5


def draw_beta(alpha: float, generator: Generator = None) -> float:
    """Return a sample of Beta(alpha, alpha)."""
    return draw_weights(2, alpha, generator)[0]


def draw_weights(count: int, alpha: float, generator: Generator = None) -> list[float]:
    """Return `count` weights that sum to one, a sample of the symmetric Dirichlet distribution."""
    concentration = torch.full((count,), alpha, dtype=torch.float64, device=device_of(generator))
    return torch._sample_dirichlet(concentration, generator).tolist()


def draw_permutation(count: int, device: torch.device | str, generator: Generator = None) -> Tensor:
    """Return the numbers 0..count-1 in random order, on `device`."""
    return copy_to(torch.device(device), torch.randperm(count, generator=generator, device=device_of(generator)))


def draw_subset(count: int, keep: int, device: torch.device | str, generator: Generator = None) -> Tensor:
    """Return `keep` of the numbers 0..count-1 in ascending order, on `device`."""
    chosen = draw_permutation(count, device_of(generator), generator)[:keep].sort().values
    return copy_to(torch.device(device), chosen)


def device_of(generator: Generator) -> torch.device:
    """Return where a generator draws."""
    return torch.device("cpu") if generator is None else generator.device


Box = tuple[int, int, int, int]
"""First row, first column, and the row and column after the last."""


def draw_box(image: tuple[int, int], box: tuple[int, int], uniform: bool, generator: Generator = None) -> Box:
    """Return a box of the given height and width around a random place, clipped to the image.

    With `uniform` the centre may lie outside, so that every pixel is covered equally often.
    """
    edges = []
    for side, length in zip(image, box):
        low, high = (-length // 2, side + length // 2) if uniform else (0, side)
        centre = draw_integer(low, high, generator)
        edges.append([min(max(edge, 0), side) for edge in (centre - length // 2, centre + length // 2)])
    (top, bottom), (left, right) = edges
    return top, left, bottom, right
