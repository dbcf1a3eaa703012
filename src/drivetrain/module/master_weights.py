"""Train copies of a model's parameters: in float32 where the model has 16 bits (Micikevicius et al., 2018), or in host memory where the
device has no room for the optimizer's state (Ren et al., 2021, ZeRO-Offload, arXiv 2101.06840).

The optimizer holds the copies; its class becomes a generated subclass that takes gradients from the model's parameters before a step
and writes the new values back after it. Small updates, which half precision would round away, add up in the copies. Copies on the host are
updated there: gradients come down and parameters go up in transfers that are all started before the first is waited for.

A copy of the parameter's own type holds nothing that the parameter does not, so it is not saved. Copies are refreshed when somebody else
has written into the parameters. So states pass freely between runs with and without copies.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MasterCopies:
    """Makes an optimizer of copies serve the model's own parameters."""

    _served: list[tuple[nn.Parameter, nn.Parameter]]
    """Pairs of the model's parameter and its copy."""
    _versions: dict[int, int]
    """How often each parameter had been written to when its copy last agreed with it."""
    _buffers: dict[int, Tensor]
    """Where the gradient of a copy on the host lands."""

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Give every copy the gradient of its parameter; the host waits once, where copies are on the host."""
        moved: set[torch.device] = set()
        for parameter, master in self._served:
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                master.grad = None
            elif master.device == grad.device:
                master.grad = grad.to(master.dtype)
            else:
                master.grad = self._buffer(master)
                master.grad.copy_(grad, non_blocking=True)
                moved.add(grad.device)
        for device in moved:
            if device.type != "cpu":
                torch.get_device_module(device).current_stream(device).synchronize()

    def _buffer(self, master: Tensor) -> Tensor:
        key = id(master)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(master, requires_grad=False, pin_memory=master.is_pinned())
        return self._buffers[key]

    @torch.no_grad()
    def step(self, *args: object, **kwargs: object) -> Any:
        """Update the copies and write them back."""
        self._follow_parameters()
        if any(parameter.grad is not None for parameter, _ in self._served):
            self.collect_gradients()
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        self._write_back()
        return result

    def _write_back(self) -> None:
        """Give every parameter the value of its copy."""
        for parameter, master in self._served:
            parameter.copy_(master, non_blocking=True)
            self._versions[id(parameter)] = parameter._version

    def _follow_parameters(self) -> None:
        """Refresh copies of parameters that somebody else has written to: weights that were loaded, swapped or clamped.

        Entries that still are the rounded copy keep the copy's precision.
        """
        for parameter, master in self._served:
            if parameter._version != self._versions.get(id(parameter)):
                value = parameter.to(master.device)
                master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the copies and of the model."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for parameter, _ in self._served:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with each copy that is more precise than its parameter beside what is kept about it."""
        state = super().state_dict()  # type: ignore[misc]
        masters, wider = self._masters(), {id(m) for p, m in self._served if p.dtype != m.dtype}
        kept = {
            index: {**state["state"].get(index, {}), "master": master.detach()}
            for index, master in enumerate(masters)
            if id(master) in wider
        }
        return {**state, "state": {**state["state"], **kept}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the copies, and the model's parameters from them; copies that the state has not follow the parameters."""
        masters = self._masters()
        for parameter, master in self._served:
            master.copy_(parameter)
        rest = {}
        for index, entries in state["state"].items():
            if "master" in entries and index < len(masters):
                masters[index].copy_(entries["master"])
            entries = {name: value for name, value in entries.items() if name != "master"}
            if entries:
                rest[index] = entries
        super().load_state_dict({**state, "state": rest})  # type: ignore[misc]
        self._write_back()

    def _masters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]  # type: ignore[attr-defined]


def served_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer trains: a model's own also where it holds copies of them."""
    originals = {id(master): parameter for parameter, master in getattr(optimizer, "_served", ())}
    return [originals.get(id(p), p) for group in optimizer.param_groups for p in group["params"]]


_generated: dict[type, type] = {}


def host_copy(value: Tensor, dtype: torch.dtype, pin_memory: bool) -> Tensor:
    """Return a copy of a tensor in host memory, in pages that the device can read by itself where that is asked for."""
    copy = torch.empty_like(value, dtype=dtype, device="cpu", requires_grad=False, pin_memory=pin_memory)
    return copy.copy_(value.detach())


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

    def replaced_group(group: object) -> object:
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
    optimizer.__dict__ |= {"_served": served, "_buffers": {}, "_versions": {id(p): p._version for p, _ in served}}
    return optimizer
