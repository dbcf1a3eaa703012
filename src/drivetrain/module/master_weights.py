"""Train float32 copies of half-precision parameters (Micikevicius et al., 2018).

The optimizer holds the copies; its class becomes a generated subclass that takes gradients from the model's parameters before a step
and writes the new values back after it. Small updates, which half precision would round away, add up in the copies.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MasterCopies:
    """Makes an optimizer of float32 copies serve the model's own parameters."""

    _served: list[tuple[nn.Parameter, nn.Parameter]]
    """Pairs of the model's parameter and its copy."""

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Give every copy the gradient of its parameter in float32."""
        for parameter, master in self._served:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the copies and write them back."""
        if any(parameter.grad is not None for parameter, _ in self._served):
            self.collect_gradients()
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        for parameter, master in self._served:
            parameter.copy_(master)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the copies and of the model."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for parameter, _ in self._served:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with each copy beside what is kept about it."""
        state = super().state_dict()  # type: ignore[misc]
        masters = self._masters()
        kept = {
            index: {**state["state"].get(index, {}), "master": masters[index].detach()} for index in range(len(masters))
        }
        return {**state, "state": {**state["state"], **kept}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the copies, and the model's parameters from them."""
        masters = self._masters()
        rest = {}
        for index, entries in state["state"].items():
            if "master" in entries and index < len(masters):
                masters[index].copy_(entries["master"])
            entries = {name: value for name, value in entries.items() if name != "master"}
            if entries:
                rest[index] = entries
        super().load_state_dict({**state, "state": rest})  # type: ignore[misc]
        for parameter, master in self._served:
            parameter.copy_(master)

    def _masters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]  # type: ignore[attr-defined]


_generated: dict[type, type] = {}


def with_master_weights(
    build: Callable[..., Optimizer], masters: Mapping[int, nn.Parameter], groups: Any, settings: Mapping[str, Any]
) -> Optimizer:
    """Return `build(groups, **settings)` with every parameter replaced by its copy; `masters` maps identities to copies."""
    served: list[tuple[nn.Parameter, nn.Parameter]] = []

    def replaced(parameter: Any) -> Any:
        if isinstance(parameter, tuple):
            return (parameter[0], replaced(parameter[1]))
        master = masters.get(id(parameter))
        if master is None:
            return parameter
        served.append((parameter, master))
        return master

    def replaced_group(group: Any) -> Any:
        if not isinstance(group, Mapping):
            return replaced(group)
        held = group["params"]
        held = [held] if isinstance(held, Tensor) else held
        return {**group, "params": [replaced(parameter) for parameter in held]}

    items: Iterable[Any] = groups
    optimizer = build([replaced_group(item) for item in items], **settings)
    cls = type(optimizer)
    if cls not in _generated:
        _generated[cls] = type(f"MasterCopies{cls.__name__}", (MasterCopies, cls), {"__module__": cls.__module__})
    optimizer.__class__ = _generated[cls]
    optimizer.__dict__["_served"] = served
    return optimizer
