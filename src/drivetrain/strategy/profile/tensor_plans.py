"""Find out once how a model can be split: a search asks for it with every plan that has a `tensor` axis, and each answer takes seconds.

An answer also holds for a copy with fewer blocks, which is what simulations use: it has the same layers, only not all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from drivetrain.module import tensor_inference
from drivetrain.module.tensor_inference import InferredPlan

Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class _Known:
    """One answer, and what it was given for."""

    cls: type
    size: int
    shapes: Shapes
    plan: InferredPlan

    def holds_for(self, model: nn.Module, size: int, shapes: Shapes) -> bool:
        """Return whether a model has the same layers, or some of them."""
        return type(model) is self.cls and size == self.size and shapes.items() <= self.shapes.items()


@contextmanager
def remembered_tensor_plans() -> Iterator[None]:
    """Let `infer_tp_plan` remember its answers for a while; inside another such context, that one's memory is used."""
    infer = tensor_inference.infer_tp_plan
    if hasattr(infer, "known"):
        yield
        return
    known: list[_Known] = []

    def remembering(model: nn.Module, size: int) -> InferredPlan:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        found = next((one for one in known if one.holds_for(model, size, shapes)), None)
        if found is None:
            found = _Known(type(model), size, shapes, infer(model, size))
            known.append(found)
        present = {name for name, _ in model.named_modules()}
        styles = {name: style for name, style in found.plan.styles.items() if name in present}
        return InferredPlan(styles=styles, remarks=list(found.plan.remarks))

    remembering.known = known  # type: ignore[attr-defined]
    tensor_inference.infer_tp_plan = remembering
    try:
        yield
    finally:
        tensor_inference.infer_tp_plan = infer
