"""Changes to optimizers: fused kernels, a state that is split over ranks, and copies of parameters that are trained instead."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only

from drivetrain.core.types import StateDict
from drivetrain.module.wrapping import COPIES
from drivetrain.runtime.device import PINNED


def requires_closure(optimizer: object) -> bool:
    """Return whether the `step` of an optimizer or its class needs a closure, as LBFGS's does."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    closure = inspect.signature(cls.step).parameters.get("closure") if issubclass(cls, Optimizer) else None
    return closure is not None and closure.default is closure.empty


# ---------------------------------------------------------------------- fused kernels: one launch for all parameters


def is_fused_wrong(build: object, parameters: Iterable[Tensor]) -> bool:
    """Return whether torch's fused kernel leaves parameters as they are: that of SGD does on the CPU in 16 bits (torch 2.13)."""
    is_sgd = isinstance(build, type) and issubclass(build, SGD)
    return is_sgd and any(p.device.type == "cpu" and p.is_floating_point() and p.itemsize == 2 for p in parameters)


def use_fused_kernels(optimizer: Optimizer) -> bool:
    """Switch an optimizer that has not stepped yet to its fused kernel, in place; return whether it changed.

    An optimizer without such a kernel, one whose owner chose another, and one with parameters it cannot take are left alone.
    """
    groups = optimizer.param_groups
    is_torch = type(optimizer).__module__.startswith("torch.optim.")
    if not is_torch or "fused" not in optimizer.defaults or any(group.get("fused") is not None for group in groups):
        return False
    if any(group.get("foreach") or group.get("differentiable") or group.get("capturable") for group in groups):
        return False
    parameters = [p for group in groups for p in group["params"]]
    if (
        optimizer.state
        or not all(p.is_floating_point() for p in parameters)
        or is_fused_wrong(type(optimizer), parameters)
    ):
        return False
    try:
        # torch knows which kernels it has: it rejects what it cannot do while building.
        type(optimizer)(parameters, lr=groups[0]["lr"], fused=True)  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError):
        return False
    for group in groups:
        group["fused"], group["foreach"] = True, False
    optimizer.defaults["fused"] = True
    _take_flags(optimizer)
    start_momentum(optimizer)
    return True


def _take_flags(optimizer: Optimizer) -> None:
    """Let a flag on the device skip updates, and a gradient scaler leave unscaling to the kernel, where `start_momentum` fills momenta."""
    optimizer._step_supports_amp_scaling = not any(group.get("dampening") for group in optimizer.param_groups)  # type: ignore[attr-defined]


def start_momentum(optimizer: Optimizer) -> None:
    """Make a fused SGD start every parameter's momentum as zeros before its first step.

    Torch makes it at a parameter's first gradient, without values: the fused kernel fills it, but not where a flag on the device skips
    the update. The kernel also fails when parameters get their first gradients in different steps. With dampening the first gradient
    counts in full, so zeros would be another beginning; there the host reads the flag.
    """
    if type(optimizer) is not SGD or not any(group.get("fused") for group in optimizer.param_groups):
        return
    _take_flags(optimizer)
    if _fill_momentum in optimizer._optimizer_load_state_dict_post_hooks.values():
        return

    def before_first_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        _fill_momentum(optimizer)
        handle.remove()

    handle = optimizer.register_step_pre_hook(before_first_step)
    optimizer.register_load_state_dict_post_hook(_fill_momentum)


@torch.no_grad()
def _fill_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                kept = optimizer.state[parameter]
                if kept.get("momentum_buffer") is None:
                    kept["momentum_buffer"] = torch.zeros_like(parameter)


# ---------------------------------------------------------------------- a state split over ranks (Rajbhandari et al., 2020, ZeRO stage 1)
#
# torch's ZeroRedundancyOptimizer must be asked to gather its state before it can be saved. Here `state_dict()` does it: every rank calls
# it, as with every state that is split, and gets the state that an optimizer on one process would have. Loading takes such a state,
# from any number of ranks and from runs that did not split at all.


def split_optimizer(
    build: Callable[..., Optimizer],
    groups: Any,
    settings: Mapping[str, object],
    process_group: dist.ProcessGroup | None,
) -> Optimizer:
    """Return `build(groups, **settings)` with its state split over the ranks of a group."""
    return _split_class()(list(groups), optimizer_class=build, process_group=process_group, **settings)


@cache
def _split_class() -> Callable[..., Optimizer]:
    """Return the class; it is made when it is first needed, because a run on one process does not load torch's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class SplitOptimizer(ZeroRedundancyOptimizer):
        """Splits the state of an optimizer over ranks, and gathers it to be saved."""

        def _verify_same_dense_param_type(self) -> None:
            """Accept several types: only buckets, which are not used here, would need one."""

        def state_dict(self) -> dict[str, object]:
            """Return the whole state, on the host; all ranks must call this together."""
            self._sync_param_groups(self.param_groups, self.optim.param_groups)  # type: ignore[attr-defined]
            own = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), self.optim.state_dict())
            parts: list[object] = [None] * self.world_size
            # Pickled: tensors of any number, and whatever a user's optimizer keeps in its groups.
            dist.all_gather_object(parts, own, group=self.process_group)
            self._all_state_dicts = parts
            try:
                return super().state_dict()
            finally:
                self._all_state_dicts = []

        def load_state_dict(self, state_dict: StateDict) -> None:
            """Take this rank's part of a whole state."""
            whole = {**state_dict, "state": dict(state_dict["state"])}  # torch empties what is not this rank's
            self.optim.state.clear()  # torch only adds to it
            super().load_state_dict(whole)
            self.state.clear()  # a second copy, which torch keeps and never updates
            for group in self.optim.param_groups:
                if group.get("fused") or group.get("capturable"):  # whose kernels read the step count on the device
                    for parameter in group["params"]:
                        kept = self.optim.state.get(parameter, {})
                        if isinstance(kept.get("step"), Tensor):
                            kept["step"] = kept["step"].to(parameter.device)

    return SplitOptimizer


# ---------------------------------------------------------------------- copies of the parameters
#
# In float32 where the model has 16 bits (Micikevicius et al., 2018), or in host memory where the device has no room for the optimizer's
# state (Ren et al., 2021, ZeRO-Offload, arXiv 2101.06840). The optimizer holds the copies; its class becomes a generated subclass that
# takes gradients from the model's parameters before a step and writes the new values back after it. Transfers to and from copies on the
# host are all started before the first is waited for. A copy of the parameter's own type is not saved, and copies are refreshed when
# other code has written into the parameters, so states pass freely between runs with and without copies.


class MasterCopies:
    """Makes an optimizer of copies update the model's own parameters."""

    _served: list[tuple[nn.Parameter, nn.Parameter]]
    """Pairs of the model's parameter and its copy."""
    _versions: dict[int, int]
    """How often each parameter had been written to when its copy last agreed with it."""
    _buffers: dict[int, Tensor]
    """Where the gradient of a copy on the host lands."""

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Copy the gradient of each parameter to its copy. If copies are on the host, this synchronizes once."""
        moved: set[torch.device] = set()
        for parameter, master in self._served:
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                master.grad = None
            elif master.device == grad.device:
                master.grad = grad.to(master.dtype)
            else:
                master.grad = self._buffer(master).copy_(grad, non_blocking=grad.device.type in PINNED)
                if grad.device.type in PINNED:
                    moved.add(grad.device)
        for device in moved:
            torch.accelerator.current_stream(device).synchronize()

    def _buffer(self, master: Tensor) -> Tensor:
        if id(master) not in self._buffers:
            self._buffers[id(master)] = torch.empty_like(master, requires_grad=False, pin_memory=master.is_pinned())
        return self._buffers[id(master)]

    @torch.no_grad()
    def step(self, *args: object, **kwargs: object) -> object:
        """Update the copies and write them back to the parameters."""
        self._follow_parameters()
        if any(parameter.grad is not None for parameter, _ in self._served):
            self.collect_gradients()
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        self._write_back()
        return result

    def _write_back(self) -> None:
        """Give every parameter the value of its copy."""
        for parameter, master in self._served:
            parameter.copy_(master, non_blocking=parameter.device.type in PINNED)
            self._versions[id(parameter)] = parameter._version

    def _follow_parameters(self) -> None:
        """Refresh copies of parameters that other code has written to; unchanged entries keep the copy's precision."""
        for parameter, master in self._served:
            if parameter._version != self._versions.get(id(parameter)):
                value = parameter.to(master.device)
                master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the copies and of the model."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for parameter, _ in self._served:
            parameter.grad = None

    def state_dict(self) -> StateDict:
        """Return the optimizer's state, including each copy that is more precise than its parameter."""
        state = super().state_dict()  # type: ignore[misc]
        wider = {id(master) for parameter, master in self._served if parameter.dtype != master.dtype}
        kept = dict(state["state"])
        for index, master in enumerate(self._masters()):
            if id(master) in wider:
                kept[index] = {**kept.get(index, {}), "master": master.detach()}
        return {**state, "state": kept}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the copies, and the model's parameters from them. Copies that the state lacks follow the parameters."""
        masters = self._masters()
        self._follow_parameters()
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
    """Return the parameters that an optimizer trains: the model's own, also if it holds copies of them."""
    originals = {id(master): parameter for parameter, master in getattr(optimizer, "_served", ())}
    return [originals.get(id(p), p) for group in optimizer.param_groups for p in group["params"]]


@cache
def _master_class(cls: type) -> type:
    return type(f"MasterCopies{cls.__name__}", (MasterCopies, cls), {"__module__": cls.__module__})


def host_copy(value: Tensor, dtype: torch.dtype, pin_memory: bool) -> Tensor:
    """Return a copy of a tensor in host memory, pinned on request."""
    copy = torch.empty_like(value, dtype=dtype, device="cpu", requires_grad=False, pin_memory=pin_memory)
    return copy.copy_(value.detach())


def with_master_weights(
    build: Callable[..., Optimizer], masters: Mapping[int, nn.Parameter], groups: Any, settings: Mapping[str, object]
) -> Optimizer:
    """Return `build(groups, **settings)` with every parameter replaced by its copy; `masters` maps identities to copies."""
    served: list[tuple[nn.Parameter, nn.Parameter]] = []

    def replaced(parameter: Any) -> object:
        if isinstance(parameter, tuple):
            return (parameter[0], replaced(parameter[1]))
        master = masters.get(id(parameter))
        if master is None:
            return parameter
        served.append((parameter, master))
        COPIES[parameter] = weakref.ref(master)
        return master

    def replaced_group(group: object) -> object:
        if not isinstance(group, Mapping):
            return replaced(group)
        held = group["params"]
        held = [held] if isinstance(held, Tensor) else held
        return {**group, "params": [replaced(parameter) for parameter in held]}

    optimizer = build([replaced_group(item) for item in groups], **settings)
    optimizer.__class__ = _master_class(type(optimizer))  # type: ignore[arg-type]
    optimizer.__dict__ |= {"_served": served, "_buffers": {}, "_versions": {id(p): p._version for p, _ in served}}
    return optimizer
