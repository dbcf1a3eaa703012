"""Replace layers of a model by others, and update its optimizers accordingly.

The walk first decides everything and changes nothing. Then it exchanges modules, then parameters in the optimizers. If an
optimizer cannot take the new parameters, the modules are restored, so a failed call leaves model and optimizers unchanged.
Replacements build their own weights (in the `from_*` constructor of each layer). Here they only receive device, dtype, training
mode and `requires_grad` of the layer that they replace.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigTypeError
from drivetrain.module.wrapping import wrapping_of

ReplacementFunction = Callable[[nn.Module, int], nn.Module | None]
"""Takes a module and its index among the instances of its policy's class; returns its replacement, or None to keep it."""

Optimizers = Optimizer | Iterable[Optimizer] | None
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]

_Named = tuple[str | None, nn.Parameter]

_MAX_DEPTH_OF_REPLACEMENTS = 50


def replace_module_classes(
    module: nn.Module,
    policies: Mapping[type[nn.Module], ReplacementFunction],
    optimizers: Optimizers = None,
    recurse_on_replacements: bool = False,
    indices: MutableMapping[type[nn.Module], int] | None = None,
) -> dict[nn.Module, nn.Module]:
    """Replace descendants of `module` by class and return the pairs old to new.

    Children are visited depth first in definition order; the first policy whose class matches decides. A module used in several places is
    asked about once and replaced everywhere. `indices` holds the next index per policy class and is updated, so that several calls can go
    on counting. With `recurse_on_replacements` the policies also see the replacements and what is inside them.

    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    >>> pairs = replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()})
    >>> type(model[0]).__name__, len(pairs)
    ('GELU', 1)
    """
    check_unwrapped(module, f"replacing layers of {type(module).__name__}")
    optimizer_list = _as_list(optimizers)
    counters = indices if indices is not None else {}
    for cls in policies:
        counters.setdefault(cls, 0)
    walk = _Walk(policies, recurse_on_replacements, counters, fallback=_first_device(module))
    walk.visit_children(module)

    before, members = set(module.parameters()), set(module.modules())
    final = {old: walk.decided[old] for old in walk.pairs if old in members}  # replacements of replacements left out
    for parent, name, _, new in walk.sites:
        parent._modules[name] = new
    try:
        _update_optimizers(module, final, before, optimizer_list)
    except RuntimeError:
        for parent, name, old, _ in walk.sites:
            parent._modules[name] = old
        raise
    return walk.pairs


def count_module_instances(module: nn.Module, cls_or_tuple: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Return how many distinct descendants of `module`, itself excluded, are of the given class or classes."""
    return sum(isinstance(child, cls_or_tuple) for child in module.modules() if child is not module)


def check_unwrapped(model: nn.Module, who: str) -> None:
    """Reject a model that a wrapper, sharding or compilation already relies on as it is."""
    for name, child in model.named_modules():
        kind = wrapping_of(child)
        if kind is not None:
            where = f"its submodule {name!r}" if name else "the model"
            raise ConfigTypeError(
                f"{who}: {where} is already wrapped ({kind}). Change layers first, then wrap, shard or compile."
            )


def _first_device(module: nn.Module) -> torch.device | None:
    return next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)


@dataclass
class _Walk:
    """One pass over the tree that asks the policies and notes what goes where."""

    policies: Mapping[type[nn.Module], ReplacementFunction]
    recurse: bool
    indices: MutableMapping[type[nn.Module], int]
    fallback: torch.device | None
    pairs: dict[nn.Module, nn.Module] = field(default_factory=dict)
    sites: list[tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list)  # parent, name, old, new
    decided: dict[nn.Module, nn.Module] = field(default_factory=dict)  # module: what is in its place at the end

    def visit_children(self, parent: nn.Module, depth: int = 0) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            if child not in self.decided:
                self.decided[child] = child  # a module that contains itself is not asked twice
                self.decided[child] = self._decide(child, depth)
            if self.decided[child] is not child:
                self.sites.append((parent, name, child, self.decided[child]))

    def _decide(self, module: nn.Module, depth: int) -> nn.Module:
        training = module.training  # a policy that wraps the module may change it
        cls = next((cls for cls in self.policies if isinstance(module, cls)), None)
        replacement = None
        if cls is not None:
            self.indices[cls] += 1
            replacement = self.policies[cls](module, self.indices[cls] - 1)
        if replacement is None or replacement is module:
            self.visit_children(module, depth)
            return module
        _match_device_and_dtype(module, replacement, training, self.fallback)
        self.pairs[module] = replacement
        if not self.recurse:
            return replacement
        if depth >= _MAX_DEPTH_OF_REPLACEMENTS:
            raise RuntimeError(
                f"recurse_on_replacements does not end: {type(replacement).__name__} was replaced inside its own "
                f"replacement {depth} times. Return None from the policy for modules it has made itself."
            )
        return self._decide(replacement, depth + 1)


def _match_device_and_dtype(old: nn.Module, new: nn.Module, training: bool, fallback: torch.device | None) -> None:
    """Give `new` the device, dtype, training mode and `requires_grad` that `old` has in the model."""
    device = _first_device(old) or fallback
    dtypes = {p.dtype for p in old.parameters() if p.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None  # a mixed module says nothing about its successor's dtype
    if device is not None or dtype is not None:
        new.to(device=device, dtype=dtype)

    kept = set(old.modules())
    for child in new.modules():
        if child not in kept:  # parts taken over from the old module keep their own mode
            child.training = training

    flags = {name: p.requires_grad for name, p in old.named_parameters()}
    is_frozen = bool(flags) and not any(flags.values())
    for name, parameter in new.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(flags.get(name, parameter.requires_grad and not is_frozen))


def update_params_in_optimizer(old_params: Parameters, new_params: Parameters, optimizers: Optimizers) -> None:
    """Remove the old parameters and their state from the optimizers and add the new ones to the same group.

    A parameter that is in both lists stays where it is. Each list may hold parameters or `(name, parameter)` pairs;
    names are needed only for optimizers that were built from named parameters.
    """
    _exchange([_plan_exchange(_named(old_params), _named(new_params), _as_list(optimizers))])


class _Exchange(NamedTuple):
    """What leaves which group, and what enters one of them."""

    removed: list[tuple[Optimizer, dict, nn.Parameter]]
    target: tuple[Optimizer, dict] | None
    added: Sequence[_Named]


def _as_list(optimizers: Optimizers) -> list[Optimizer]:
    if optimizers is None:
        return []
    found = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizers holds a {type(one).__name__}; expected torch optimizers. Pass the optimizer inside it."
            )
    return found


def _named(params: Parameters) -> list[_Named]:
    return [item if isinstance(item, tuple) else (None, item) for item in params]


def _position(parameters: list[nn.Parameter], wanted: nn.Parameter) -> int | None:
    return next((index for index, parameter in enumerate(parameters) if parameter is wanted), None)


def _find(parameter: nn.Parameter, optimizers: list[Optimizer]) -> tuple[Optimizer, dict] | None:
    groups = ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)
    return next((home for home in groups if _position(home[1]["params"], parameter) is not None), None)


def _plan_exchange(old: Sequence[_Named], new: Sequence[_Named], optimizers: list[Optimizer]) -> _Exchange:
    """Find out what has to change, and reject what cannot be decided."""
    old_ids, new_ids = {id(p) for _, p in old}, {id(p) for _, p in new}
    added = [(name, p) for name, p in new if id(p) not in old_ids]
    removed = []
    for parameter in [p for _, p in old if id(p) not in new_ids]:
        home = _find(parameter, optimizers)
        if home is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} is to be removed, but it is not in any of the {len(optimizers)} "
                "optimizers given. Pass the optimizer that trains it, or make the optimizer after the surgery."
            )
        removed.append((*home, parameter))
    if not added:
        return _Exchange(removed, None, [])

    # Where nothing leaves (a layer wrapped inside its replacement) the parameters that stay say which group it is.
    staying = [home for _, p in old if id(p) in new_ids and (home := _find(p, optimizers)) is not None]
    homes = {id(group): (optimizer, group) for optimizer, group in [(o, g) for o, g, _ in removed] or staying}
    if not old:  # a layer without parameters: there may be only one place to go
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        homes = {id(groups[0][1]): groups[0]} if len(groups) == 1 else {}
    if not homes:
        raise RuntimeError(
            f"{len(added)} new parameters are to be added, but no old parameter is in an optimizer, so their group is "
            "unknown. Make the optimizer after the surgery, or add them with add_param_group."
        )
    if len(homes) > 1:
        raise RuntimeError(
            f"the old parameters are in {len(homes)} different parameter groups, so it is unknown which of them the "
            f"{len(added)} new ones belong to. Replace layers before splitting the parameters into groups."
        )
    (target,) = homes.values()
    if "param_names" in target[1] and any(name is None for name, _ in added):
        raise RuntimeError(
            "the optimizer keeps parameter names, so the new parameters need names too: pass (name, parameter) pairs."
        )
    return _Exchange(removed, target, added)


def _exchange(plans: list[_Exchange]) -> None:
    """Carry out plans that have been found possible."""
    for plan in plans:
        place = None
        for optimizer, group, parameter in plan.removed:
            index = _position(group["params"], parameter)
            if index is None:  # left with an earlier plan that shares it
                continue
            place = index if place is None else place
            del group["params"][index]
            if "param_names" in group:
                del group["param_names"][index]
            optimizer.state.pop(parameter, None)
        if plan.target is None:
            continue
        _, group = plan.target
        # The new ones are where the old ones were: the order an optimizer made after the surgery would have.
        place = len(group["params"]) if place is None else place
        added = [(name, p) for name, p in plan.added if _position(group["params"], p) is None]
        group["params"][place:place] = [p for _, p in added]
        if "param_names" in group:
            group["param_names"][place:place] = [name for name, _ in added]


def _update_optimizers(
    model: nn.Module, pairs: dict[nn.Module, nn.Module], before: set[nn.Parameter], optimizers: list[Optimizer]
) -> None:
    """Exchange the parameters of replaced modules, except those that other parts of the model still use."""
    if not optimizers:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    plans = []
    for old, new in pairs.items():
        held = [p for p in old.parameters() if p in before]
        known = [(None, p) for p in held if p.requires_grad or _find(p, optimizers) is not None]
        still_used = [(names[p], p) for _, p in known if p in names]
        fresh = [(names[p], p) for p in new.parameters() if p in names and p not in before]
        if not known and not any(p.requires_grad for _, p in fresh):
            continue  # a frozen layer outside every optimizer, replaced by a frozen one
        plans.append(_plan_exchange(known, still_used + fresh, optimizers))
    _exchange(plans)
