"""The state of an optimizer: torch's form, with the names of the parameters next to their numbers.

Torch numbers parameters by their order. Names let a state find its parameters when the order has changed, and let
files that are keyed by name alone be read. Loading copies, so that the given state is not trained along, and keeps
every value's type: torch would round a float32 momentum to a bfloat16 parameter's precision, and a resumed run would
differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import nearest_name
from drivetrain.core.types import Settings, StateDict
from drivetrain.module.distributed_tensors import fit_tensor, is_dtensor
from drivetrain.runtime.coders import is_made_of_tensors

Names = Mapping[int, str]
"""Names of parameters by their identity."""
_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize")
"""Settings of torch's optimizers that do not change the mathematics, and that not every version has."""


def is_torch_form(state: object) -> bool:
    """Return whether a state has torch's form. Some wrappers have one of their own, which only they can read."""
    return isinstance(state, Mapping) and {"state", "param_groups"} <= set(state)


def save_optimizer(optimizer: Optimizer, names: Names) -> StateDict:
    """Return torch's form of the state; groups whose parameters all have names get `param_names`."""
    state = optimizer.state_dict()
    if not is_torch_form(state):
        return state
    groups = []
    for saved, live in zip(state["param_groups"], optimizer.param_groups):
        own = [names.get(id(parameter)) for parameter in live["params"]]
        known = {} if "param_names" in saved or None in own else {"param_names": own}
        groups.append({**saved, **known})
    return {**state, "param_groups": groups}


def fit_optimizer(
    optimizer: Optimizer, saved: StateDict, names: Names
) -> tuple[list[str], Callable[[Collection[str]], list[str]] | None]:
    """Return what keeps a saved state from fitting, and what loads the rest of it; None where nothing of it can be loaded.

    What loads it takes the names of parameters that have another shape now, and returns those whose state it left out.
    """
    groups, live_groups = list(saved["param_groups"]), optimizer.param_groups
    settings_here = getattr(optimizer, "defaults", {}).keys() & {key for group in live_groups for key in group}
    absent = settings_here - {*_FLAGS, *(key for group in groups for key in group)}
    if len(absent) > 1:  # a newer torch may have added one
        settings = ", ".join(sorted(map(str, absent)))
        return [f"saved by another kind of optimizer than {type(optimizer).__name__}: it has no {settings}"], None
    if len(groups) != len(live_groups):
        problem = f"saved {len(groups)} parameter groups, this optimizer has {len(live_groups)}"
        return [problem + ("; add the others before loading" if len(groups) > len(live_groups) else "")], None
    live = [parameter for group in live_groups for parameter in group["params"]]
    keys = [key for group in groups for key in group["params"]]
    saved_names = _saved_names(groups)
    if saved_names is None or (live_names := _live_names(optimizer, names, saved_names)) is None:
        sizes = [(len(group["params"]), len(own["params"])) for group, own in zip(groups, live_groups)]
        problems = [
            f"saved {count} parameters in group {index}, this optimizer has {own} there"
            for index, (count, own) in enumerate(sizes)
            if count != own
        ]
        if problems:
            return problems, None
    else:
        problems = [f"no state was saved for the parameter {name}" for name in live_names if name not in saved_names]
        for name in saved_names:
            if name not in live_names:
                near = nearest_name(name, live_names)
                hint = f" (nearest: {near})" if near else ""
                problems.append(f"the saved parameter {name} is not in this optimizer{hint}")
        by_name = dict(zip(saved_names, keys))
        keys = [by_name.get(name) for name in live_names]
        groups = _in_order_of(live_groups, groups, keys)

    def load(unfitting: Collection[str]) -> list[str]:
        left_out = {id(p): names[id(p)] for p in live if names.get(id(p)) in unfitting}
        wanted = [None if id(p) in left_out else key for key, p in zip(keys, live)]
        _load(optimizer, {**saved, "param_groups": groups}, wanted, live)
        return list(left_out.values())

    return problems, load


def _in_order_of(live: Sequence[Settings], saved: list[Settings], keys: Sequence[object]) -> list[Settings]:
    """Return the saved groups in the order of the live ones where each of those holds the parameters of a saved one."""
    by_members = {frozenset(group["params"]): group for group in saved}
    rest = iter(keys)
    ordered = [by_members.get(frozenset(islice(rest, len(group["params"])))) for group in live]
    found = [group for group in ordered if group is not None]
    return found if len(found) == len(by_members) == len(saved) else saved


def _saved_names(groups: Sequence[Settings]) -> list[str] | None:
    """Return the names in a saved state, in its order, or None when it only has numbers."""
    names: list[str] = []
    for group in groups:
        own: Sequence[str] = group["param_names"] if "param_names" in group else group["params"]
        if len(own) != len(group["params"]) or not all(isinstance(name, str) for name in own):
            return None
        names += own
    return names


def _live_names(optimizer: Optimizer, names: Names, saved: list[str]) -> list[str] | None:
    """Return the live parameters' names in the style of the saved ones: the optimizer's own, with or without the item's name."""
    own = _saved_names(optimizer.param_groups)
    full = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    if own is None and (None in full or len(set(full)) != len(full)):
        return None
    known = [name for name in full if name is not None]
    inner = [name.partition(".")[2] for name in known]
    styles = [style for style in (own, known, inner) if style is not None and len(style) == len(full)]
    best = max(styles, key=lambda style: len(set(style) & set(saved)))
    return best if len(set(best)) == len(best) else None


def _load(optimizer: Optimizer, saved_state: StateDict, keys: Sequence[object], live: Sequence[Tensor]) -> None:
    """Give every parameter its copy of the state and every group its settings, through the optimizer's own method."""
    state: Mapping[object, Mapping[object, object]] = saved_state["state"]
    groups: list[Settings] = saved_state["param_groups"]
    follows = _follows_parameters(optimizer)
    fresh: dict[object, dict[object, object]] = {}
    for number, (key, parameter) in enumerate(zip(keys, live)):
        if key in state:
            fresh[number] = {name: _copy_for(value, parameter, name, follows) for name, value in state[key].items()}
    known = {key for group in groups for key in group["params"]}
    # Torch allows state that belongs to no parameter.
    fresh |= {
        key: dict(entries) if isinstance(entries, Mapping) else entries
        for key, entries in state.items()
        if key not in known
    }
    rest, settings = iter(range(len(live))), []
    for saved, own in zip(groups, optimizer.param_groups):
        settings.append({**_settings(saved, own), "params": list(islice(rest, len(own["params"])))})
    optimizer.load_state_dict({**saved_state, "state": fresh, "param_groups": settings})
    if type(optimizer).state_dict is Optimizer.state_dict:  # what was saved is the state itself
        for number, parameter in enumerate(live):
            state_of = optimizer.state.get(parameter, {})
            for name, value in fresh.get(number, {}).items():
                if name != "step" and name in state_of:
                    state_of[name] = _with_types_of(value, state_of[name])


def _follows_parameters(optimizer: object) -> bool:
    """Return whether this is an optimizer of torch, a subclass of one or around one: its state has the layout of its parameters."""
    while (inner := getattr(optimizer, "base_optimizer", None)) is not None:
        optimizer = inner
    kinds = [cls for cls in type(optimizer).__mro__ if cls is not Optimizer]
    return any(cls.__module__.startswith("torch.optim") for cls in kinds)


def _settings(saved: Mapping[str, object], live: Mapping[str, object]) -> Settings:
    """Return a group's saved settings; tuples that went through JSON become tuples again, live extras stay."""
    result = {name: value for name, value in live.items() if name not in ("params", "param_names")}
    for name, value in saved.items():
        if name in ("params", "param_names"):
            continue
        if isinstance(live.get(name), tuple) and isinstance(value, list):
            value = tuple(value)
        result[name] = value.clone() if isinstance(value, Tensor) else value
    if "param_names" in live:
        result["param_names"] = live["param_names"]
    return result


def _with_types_of(saved: object, loaded: object) -> object:
    """Return a value as the optimizer took it, but tensors that it cast to another type as they were saved."""
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _with_types_of(saved[key], item) if key in saved else item for key, item in loaded.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(map(_with_types_of, saved, loaded))
    is_cast = isinstance(saved, Tensor) and isinstance(loaded, Tensor) and saved.dtype != loaded.dtype
    return saved if is_cast else loaded


def _copy_for(value: object, parameter: Tensor, name: object, follows: bool) -> object:
    """Return a copy of a state value where its parameter is: on its device, and sharded as it is if of its shape.

    If the state `follows` its parameter, it is laid out in memory as that is, which torch's fused kernels rely on.
    """
    if isinstance(value, dict):
        return {key: _copy_for(item, parameter, key, follows) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_for(item, parameter, None, follows) for item in value)
    if not isinstance(value, Tensor):
        return value
    if is_made_of_tensors(value):
        return value.to(parameter.device)
    if value.shape == parameter.shape and (is_dtensor(value) or is_dtensor(parameter)):
        return fit_tensor(value, parameter).clone()
    if name == "step":
        return value.clone()
    if value.shape == parameter.shape and (follows or value.is_contiguous()):
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device, copy=True)
