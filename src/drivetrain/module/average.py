"""The averaged weights of a model: exponential averages (Polyak & Juditsky, 1992) and equal-weight means (SWA, Izmailov et al., 2018).

The shadow holds trainable parameters and persistent buffers. Floating values are averaged; counters are copied, and so are buffers with
infinite entries, which masks have. Averages of parameters in half precision are kept in float32, because a small step would be rounded
away. Only the first update waits for the device.

Swapping exchanges contents, not storage: optimizers, captured CUDA graphs, flattened recurrent weights and sharded parameters rely on the
addresses. It costs three copies of the weights, through a buffer of bounded size.
"""

import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from drivetrain.core.errors import StateError, nearest_name
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import fit_tensor, is_dtensor, local_part
from drivetrain.module.finite import nonfinite_names
from drivetrain.module.wrapping import clean_key, is_fully_sharded, unwrap
from drivetrain.runtime.device import waiting_allowed

_SWAP_BYTES = 8 << 20  # the largest temporary copy made while swapping, unless one tensor is larger
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class AveragedWeights:
    """A shadow copy of a model's weights, or the average of a saved state, that is updated from the model and can be swapped with it.

    >>> model = nn.Linear(1, 1)
    >>> average = AveragedWeights(model)
    >>> average.update_lerp(model, 0.01)      # shadow += 0.01 * (model - shadow)
    >>> average.swap(model)                   # evaluate with the average ...
    >>> average.swap(model)                   # ... and train on
    """

    def __init__(self, model: nn.Module, state: Mapping[str, object] | None = None):
        self.num_updates = 0
        """How many updates were made; in an equal-weight mean the next one has the weight 1 / (num_updates + 1)."""
        self.is_swapped = False
        """Whether the model holds the average now, and the shadow the training weights."""
        self._kept: dict[str, Tensor] = {}  # half-precision training weights while the model holds the average
        self._view: _View | None = None
        self._plan: _Plan | None = None
        self._known: frozenset[str] = frozenset()  # also what is frozen now and may be trained later
        self._shadow: dict[str, Tensor] = {}
        self._fit_to(self._view_of(model).named())
        if state is not None:
            self.load_state_dict(state)

    def update_mean(self, model: nn.Module) -> None:
        """Add the model to an equal-weight mean. The first call replaces the copy made at the start."""
        self.update_lerp(model, 1.0 / (self.num_updates + 1))

    @torch.no_grad()
    def update_lerp(self, model: nn.Module, weight: float) -> None:
        """Move the shadow towards the model: shadow += weight * (model - shadow)."""
        if self.is_swapped:
            raise StateError("the model holds the averaged weights now; call swap(model) before updating the average.")
        view = self._view_of(model)
        plan = self._plan
        if plan is None or not plan.still_holds(view.tensors()):
            live = view.named()
            self._fit_to(live)
            plan = self._plan = _Plan(live, self._shadow)
        for averages, values in plan.groups:
            local = [local_part(value) for value in values] if plan.has_shards else values
            torch._foreach_lerp_(averages, local, weight)
        for average, value in plan.singles:
            # One by one, so that only one converted or moved copy exists at a time.
            average.lerp_(local_part(value).to(average), weight)
        for average, value in plan.counters:
            average.copy_(local_part(value))
        self.num_updates += 1

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights and the average in place; a second call exchanges them back."""
        live = self._view_of(model).named()
        self._fit_to(live)
        alike: list[tuple[Tensor, Tensor]] = []
        for name, shadow in self._shadow.items():
            ours, theirs = local_part(shadow), local_part(live[name])
            if ours.dtype == theirs.dtype:
                alike.append((ours, theirs))
            elif self.is_swapped:
                theirs.copy_(self._kept.pop(name))
            else:
                self._kept[name] = theirs.clone()
                theirs.copy_(ours)
        for chunk in _chunks(alike):
            averages, values = [pair[0] for pair in chunk], [pair[1] for pair in chunk]
            held = [tensor.clone() for tensor in averages]
            torch._foreach_copy_(averages, values)
            torch._foreach_copy_(values, held)
        self.is_swapped = not self.is_swapped

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Write the averaged weights into a model, this one or another of the same structure."""
        if self.is_swapped:
            raise StateError("the averaged weights are in the model they were swapped into; call swap(model) first.")
        live = _View(model).named()
        for name, shadow in self._shadow.items():
            local_part(live[name]).copy_(local_part(fit_tensor(shadow, live[name])))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and averaged tensor."""
        yield from self._shadow.items()

    def to(self, device: torch.device | str) -> Self:
        """Move the shadow to a device and return it. On the host it uses no device memory, but each update copies the weights."""
        self._shadow = {name: tensor.to(device) for name, tensor in self._shadow.items()}
        self._kept = {name: tensor.to(device) for name, tensor in self._kept.items()}
        self._plan = None
        return self

    def state_dict(self) -> StateDict:
        """Return the number of updates and the averaged tensors by name."""
        if self.is_swapped:
            raise StateError("the model holds the averaged weights now; call swap(model) before saving.")
        return {"num_updates": self.num_updates, "shadow": dict(self._shadow)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved averages. Names and shapes must match the model; the tensors may be sharded or full."""
        saved = state["shadow"]
        faults = [f"{name}: missing" for name in self._shadow if name not in saved]
        for name, value in saved.items():
            expected = self._shadow.get(name)
            if name not in self._known:
                near = nearest_name(name, self._known)
                faults.append(f"{name}: not a weight of this model" + (f" (nearest: {near})" if near else ""))
            elif expected is not None and expected.shape != value.shape:
                faults.append(f"{name}: given shape {tuple(value.shape)}, expected {tuple(expected.shape)}")
        if faults:
            raise StateError("the saved average does not fit the model; nothing was loaded.\n  " + "\n  ".join(faults))
        for name, value in saved.items():
            if name in self._shadow:
                local_part(self._shadow[name]).copy_(local_part(fit_tensor(value, self._shadow[name])))
            else:  # frozen when this shadow was made, trained when the saved one was
                self._shadow[name] = value.detach().clone()
        self.num_updates, self.is_swapped, self._plan = int(state["num_updates"]), False, None
        self._kept.clear()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_view": None, "_plan": None}  # a copy does not copy the model

    def _view_of(self, model: nn.Module) -> "_View":
        if self._view is None or not self._view.shows(unwrap(model)):
            self._view, self._plan = _View(model), None
        return self._view

    def _fit_to(self, live: Mapping[str, Tensor]) -> None:
        """Adopt what is trained or was replaced since the last time, and shard the shadow if the model has been sharded since."""
        self._known = frozenset(live)
        for name in self._shadow.keys() - live.keys():
            del self._shadow[name]
        for name, tensor in live.items():
            shadow = self._shadow.get(name)
            if shadow is None or shadow.shape != tensor.shape:
                if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                    copy = tensor.detach().clone()
                    self._shadow[name] = copy.float() if copy.dtype in _LOW_PRECISION else copy
            elif is_dtensor(tensor) is not is_dtensor(shadow):
                self._shadow[name] = fit_tensor(shadow, tensor)


class _View:
    """Where a model keeps its parameters and persistent buffers, so that reading them all costs little."""

    def __init__(self, model: nn.Module):
        root = unwrap(model)
        self.model = weakref.ref(root)
        self.sharded = [module for module in root.modules() if is_fully_sharded(module)]
        self.branches = [module._modules for module in root.modules() if module._modules]
        self.children = self._present_children()
        self.names: list[str] = []
        self.places: list[tuple[dict[str, Tensor | None], str]] = []
        seen: set[int] = set()
        for path, module in root.named_modules():
            prefix = clean_key(root, path)
            for home in (module._parameters, module._buffers):
                for key, tensor in home.items():
                    if tensor is None or id(tensor) in seen or key in module._non_persistent_buffers_set:
                        continue
                    seen.add(id(tensor))  # tied tensors are averaged once
                    self.names.append(f"{prefix}.{key}" if prefix else key)
                    self.places.append((home, key))

    def shows(self, root: nn.Module) -> bool:
        """Return whether this is a view of that model, and of the model as it is: it may have been sharded, or layers replaced."""
        is_same = self.model() is root and bool(self.sharded) == is_fully_sharded(root)
        return is_same and self._present_children() == self.children

    def _present_children(self) -> list[nn.Module | None]:
        return [child for branch in self.branches for child in branch.values()]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are in place now."""
        for module in self.sharded:
            # After a forward pass without backward some parameters are still gathered; writing to those would be lost.
            module.reshard()  # type: ignore[operator]
        return [home[key] for home, key in self.places]  # type: ignore[misc]  # those that were there

    def named(self) -> dict[str, Tensor]:
        """Return the same by name."""
        return dict(zip(self.names, self.tensors()))


class _Plan:
    """The tensors of an update, sorted by how they are treated."""

    def __init__(self, live: Mapping[str, Tensor], shadow: Mapping[str, Tensor]):
        self.live = list(live.values())
        self.frozen = [tensor for name, tensor in live.items() if name not in shadow]
        self.singles: list[tuple[Tensor, Tensor]] = []  # of another type or device than their average
        self.counters: list[tuple[Tensor, Tensor]] = []
        self.has_shards = False
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        buffers = ((name, tensor) for name, tensor in live.items() if not isinstance(tensor, nn.Parameter))
        with waiting_allowed():  # once; inf - inf would be NaN
            infinite = set(nonfinite_names(buffers))
        for name, tensor in live.items():
            if name not in shadow:
                continue
            average, value = local_part(shadow[name]), local_part(tensor)
            self.has_shards |= value is not tensor
            if name in infinite or not _has_mean(average):
                self.counters.append((average, tensor))
            elif (average.device, average.dtype) != (value.device, value.dtype):
                self.singles.append((average, tensor))
            else:
                averages, values = groups.setdefault((average.device, average.dtype), ([], []))
                averages.append(average)
                values.append(tensor)
        self.groups = list(groups.values())  # one device and type each

    def still_holds(self, live: list[Tensor]) -> bool:
        """Return whether these are the same tensors where they were, and nothing has been unfrozen."""
        return (
            all(map(operator.is_, live, self.live))
            and all(values[0].device == averages[0].device for averages, values in self.groups)
            and not any(tensor.requires_grad for tensor in self.frozen)
        )


def _has_mean(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers that can be averaged; counters, sparse and 8-bit buffers cannot."""
    is_number = tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1)
    return is_number and tensor.layout is torch.strided


def _chunks(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Cut a list into parts whose copies stay below the size of the swap buffer."""
    chunk: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        size += pair[0].numel() * pair[0].element_size()
        if chunk and size > _SWAP_BYTES:
            yield chunk
            chunk, size = [], pair[0].numel() * pair[0].element_size()
        chunk.append(pair)
    if chunk:
        yield chunk
