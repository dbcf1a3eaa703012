"""Images of either kind: PIL's, which are only known where a program has brought PIL, and tensors."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor


def is_pil(image: Any) -> bool:
    """Return whether this is a PIL image; a program that has not imported PIL has none."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def as_tensor(image: Any) -> Tensor:
    """Return a PIL image as a tensor (C, H, W) of its own values."""
    import numpy as np
    import torch

    values = torch.from_numpy(np.array(image))
    return values.unsqueeze(0) if values.ndim == 2 else values.permute(2, 0, 1)


def as_pil(values: Tensor, mode: str) -> Any:
    """Return a tensor (C, H, W) as a PIL image."""
    from PIL import Image

    array = values[0] if values.shape[0] == 1 else values.permute(1, 2, 0)
    image = Image.fromarray(array.contiguous().numpy())
    return image if image.mode == mode else image.convert(mode)


def on_tensor(function: Callable[[Tensor], Tensor], image: Any) -> Any:
    """Apply a function of tensors to an image of either kind and return that kind."""
    return as_pil(function(as_tensor(image)), image.mode) if is_pil(image) else function(image)
