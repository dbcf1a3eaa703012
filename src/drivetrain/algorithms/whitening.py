"""Whitening initialisation (Page, 2018; Jordan, 2024, arXiv 2404.00498): the first convolution is computed from the training images.

The arithmetic is `drivetrain.module.convolutions`'s; this class finds the images and the moment.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.parts import first_tensor
from drivetrain.context.batch import BatchKey, batch_get
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts, check_numbers
from drivetrain.core.errors import unknown_name
from drivetrain.module.convolutions import whiten_convolution
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import is_distributed


class Whitening(Algorithm):
    """Fills a convolution, by default the model's first, with whitening filters before the first step, and freezes its weight.

    It uses `num_images` training images. A resumed run keeps its weights.
    """

    allow_multiple = False
    events = frozenset({Event.INIT, Event.FIT_START})
    reads, writes = ("dataloader",), ("model",)
    after = ("DeviceResidentData", "#surgery")
    conflicts = {"WeightStandardization": "standardization would undo the whitening filters. Use one of them"}

    def __init__(self, layer: str | None = None, num_images: int = 5000, eps: float = 5e-4, input_key: BatchKey = 0):
        check_counts("Whitening", 1, num_images=num_images)
        check_numbers("Whitening", 0, eps=eps)
        self.layer, self.num_images, self.eps, self.input_key = layer, num_images, eps, input_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        convolution = self._find(unwrap(model_of(state, str(self))))
        if event is Event.INIT:
            convolution.weight.requires_grad_(False)  # now, so that wrappers are made without it
        elif state.clock.batch == 0:
            images = self._images(state).to(convolution.weight.device, torch.float32)
            whiten_convolution(convolution, images, self.eps)
            if is_distributed():
                torch.distributed.broadcast(convolution.weight, 0)  # eigenvectors have a sign of their own on each rank

    def _find(self, model: nn.Module) -> nn.Conv2d:
        named = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        if not named:
            raise ConfigError(f"Whitening found no 2-D convolution in {type(model).__name__}.")
        name = next(iter(named)) if self.layer is None else self.layer
        if name not in named:
            raise ConfigError(unknown_name("convolution", name, named, where="Whitening(layer=...)"))
        return named[name]

    def _images(self, state: State) -> Tensor:
        """Return training images from all over the data, which may be sorted by class."""
        loader: object = state.train_dataloader
        columns: Any = getattr(loader, "columns", None)
        dataset: Any = getattr(loader, "dataset", None)
        if columns is None and not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"Whitening reads training images by index, which a {type(loader).__name__} does not support. Give train() a dataset "
                "with an index."
            )
        size = len(columns if columns is not None else dataset)
        rows = torch.arange(min(self.num_images, size)) * size // min(self.num_images, size)
        if columns is not None:
            gather, _ = columns.gathers()
            return first_tensor(batch_get(gather(rows.to(columns.device)), self.input_key), str(self))
        return torch.stack([first_tensor(batch_get(dataset[row], self.input_key), str(self)) for row in rows.tolist()])
