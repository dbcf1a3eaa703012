"""Adaptive gradient clipping (Brock et al., 2021, arXiv 2102.06171) under its own name."""

from torch import nn

from drivetrain.algorithms.gradient_clipping import GradientClipping, apply_gradient_clipping


def apply_agc(model: nn.Module, clipping_threshold: float = 0.01) -> None:
    """Clip the gradient of every output unit to a share of the norm of its weights."""
    apply_gradient_clipping(model, "adaptive", clipping_threshold)


class AGC(GradientClipping):
    """Adaptive gradient clipping: `GradientClipping("adaptive", threshold)`."""

    def __init__(self, clipping_threshold: float = 0.01):
        super().__init__("adaptive", clipping_threshold)
