"""Train wide linear layers in 8-bit floating point; the arithmetic is in `drivetrain.module.fp8`."""

from collections.abc import Sequence

import torch
from torch import nn

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, model_of, torch_optimizers, warn_no_effect
from drivetrain.context.state import State
from drivetrain.core import Event, Logger
from drivetrain.module.fp8 import Recipe, check_fp8, convert_linears_to_fp8, supports_fp8


def apply_fp8_linear(
    model: nn.Module,
    recipe: Recipe = "tensorwise",
    min_features: int = 2048,
    skip: Sequence[str] = ("head",),
    device: torch.device | str | None = None,
    optimizers: Optimizers = None,
) -> None:
    """Replace the wide linear layers of a model, if its device (or the one given, where it will be) multiplies in 8 bits."""
    check_fp8("apply_fp8_linear", recipe, min_features)
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if not supports_fp8(device):
        warn_no_effect(f"FP8Linear needs a CUDA device of compute capability 8.9 or newer; the model is on {device}.")
        return
    if not convert_linears_to_fp8(model, recipe, min_features, skip, optimizers):
        warn_no_effect(
            f"FP8Linear found no Linear in {type(model).__name__} whose sizes are multiples of 16 and at least {min_features} "
            f"(min_features), apart from names with {', '.join(map(repr, skip)) or 'nothing'} in them (skip)."
        )


class FP8Linear(ModelSurgery):
    """Lets the wide linear layers of the model multiply in 8 bits; compile the model too, or the scaling costs what is gained."""

    after = ("GatedLinearUnits",)

    def __init__(self, recipe: Recipe = "tensorwise", min_features: int = 2048, skip: Sequence[str] = ("head",)):
        check_fp8("FP8Linear", recipe, min_features)
        self.recipe, self.min_features, self.skip = recipe, min_features, tuple(skip)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        apply_fp8_linear(model, self.recipe, self.min_features, self.skip, state.device, torch_optimizers(state))
