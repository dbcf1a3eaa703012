"""Parts of a batch: one tensor, or several where a key selects several; whatever is done to one is done to all."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from drivetrain.core.errors import ConfigTypeError
from drivetrain.core.types import Batch


def map_tensors(function: Callable[..., object], part: Batch, *others: Batch) -> Batch:
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


def tensors_of(part: object) -> Iterator[Tensor]:
    """Yield every tensor of a part or of a model's outputs, however nested; anything else is passed over."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for item in part.values():
            yield from tensors_of(item)
    elif isinstance(part, list | tuple):
        for item in part:
            yield from tensors_of(item)


def first_tensor(part: object, who: str) -> Tensor:
    """Return the first tensor of a part."""
    found = next(tensors_of(part), None)
    if found is None:
        raise ConfigTypeError(
            f"{who} found no tensor in its part of the batch, a {type(part).__name__}. Give another input_key."
        )
    return found


def take_rows(part: object, index: Tensor) -> Batch:
    """Return the rows that `index` names, of every tensor."""
    return map_tensors(lambda tensor: tensor.index_select(0, index.to(tensor.device)), part)


def check_images(x: object, who: str) -> None:
    """Reject what is no batch of images: height and width are the last two dimensions."""
    if not isinstance(x, Tensor) or x.ndim < 3:
        shape = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ConfigTypeError(f"{who} works on images, (N, C, H, W) or (C, H, W); got {shape}. Give another input_key.")


def check_floating(x: Tensor, who: str) -> None:
    """Reject whole numbers where values are mixed: half of a token id is no token id."""
    if not x.is_floating_point():
        raise ConfigTypeError(
            f"{who} mixes values, which needs floating-point inputs; got {str(x.dtype).removeprefix('torch.')}. Convert images "
            "with x.float() / 255; token ids cannot be mixed."
        )


def is_image_like(target: object, image: Tensor) -> bool:
    """Return whether a target has the height and width of the images, as segmentation masks do."""
    return isinstance(target, Tensor) and target.ndim > 2 and target.shape[-2:] == image.shape[-2:]
