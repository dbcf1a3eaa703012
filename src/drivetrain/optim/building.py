"""Makes the torch optimizer of a unit from a name and a configuration, and checks what a user passes to the unit.

A name is imported, never evaluated, and what it names must be an Optimizer class. Six arguments can be shared: a value given to
the unit wins, then the one shared by set or Trainer, then the default. So "not given" must differ from "given, and equal to the
default"; `Default` is that difference.
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.core.arguments import check_count, check_flag, check_number
from drivetrain.core.errors import ConfigError, ConfigTypeError, did_you_mean, nearest_name, unknown_name
from drivetrain.core.types import Settings
from drivetrain.module.optimizers import requires_closure, start_momentum
from drivetrain.module.wrapping import clean_key

# ---------------------------------------------------------------------- which parameters a unit owns
#
# An entry is the name of a module (`encoder`, `encoder.layers.0`), of a parameter (`encoder.bias`) or a shell pattern (`*.bias`,
# `decoder.layers.[01]`), matched against both. `_rest_` is everything that no other unit of the set owns.

REST = "_rest_"
Names = str | Sequence[str] | None


def all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every name and parameter of a model without wrapper prefixes; a shared parameter appears under each name."""
    return [(clean_key(model, name), p) for name, p in model.named_parameters(remove_duplicate=False)]


def as_list(name: str, value: Names) -> list[str] | None:
    """Return the entries of an argument that is a name or a list of names; None stays None."""
    if value is None:
        return None
    entries = [value] if isinstance(value, str) else list(value)
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ConfigError(f"{name}={value!r}: expected a name or a list of names, got {entry!r}.")
    if not entries:
        raise ConfigError(f"{name}={value!r}: the list is empty. Remove it to train the whole model, or name modules.")
    return entries


def select(named: Sequence[tuple[str, nn.Parameter]], entries: Iterable[str], where: str) -> dict[int, nn.Parameter]:
    """Return the parameters that the entries name, by identity; an entry that names nothing is an error."""
    chosen: dict[int, nn.Parameter] = {}
    for entry in entries:
        found = {id(p): p for name, p in named if names_parameter(entry, name)}
        if not found:
            names = [name for name, _ in named]
            modules = {name[:at] for name in names for at, mark in enumerate(name) if mark == "."}
            near = nearest_name(entry, sorted({*modules, *names}, key=lambda name: (name.count("."), name)))
            hint = f" Nearest: {near!r}." if near else ""
            first_level = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise ConfigError(
                f"{where}: {entry!r} is not a module or parameter of the model.{hint} First level: {first_level}."
            )
        chosen |= found
    return chosen


def names_parameter(entry: str, name: str) -> bool:
    """Return whether an entry names this parameter or a module that holds it.

    >>> names_parameter("encoder", "encoder.layers.0.bias"), names_parameter("*.bias", "encoder.bias")
    (True, True)
    """
    if entry == name or name.startswith(entry + "."):
        return True
    if not any(mark in entry for mark in "*?["):
        return False
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), entry) for length in range(1, len(parts) + 1))


def own_parameters(
    model: nn.Module, updated: list[str] | None, excluded: list[str] | None, taken: Mapping[int, str]
) -> dict[str, nn.Parameter]:
    """Return a unit's parameters by name, each once, in model order; `taken` holds what other units own, for `_rest_`."""
    named = all_names(model)
    if updated is None:
        chosen = {id(p): p for _, p in named}
    else:
        chosen = select(named, [entry for entry in updated if entry != REST], "updated_modules")
        if REST in updated:
            chosen.update((id(p), p) for _, p in named if id(p) not in taken)
    if excluded:
        for key in select(named, excluded, "excluded_modules"):
            chosen.pop(key, None)
    if not chosen:
        what = f"updated_modules={updated!r}" + (f" without excluded_modules={excluded!r}" if excluded else "")
        raise ConfigError(f"{what}: no parameter is left for the optimizer.")
    return {name: p for name, p in named if chosen.pop(id(p), None) is not None}


def find_optimizer(optim_type: object) -> Callable[..., Optimizer]:
    """Return the optimizer class of a name (torch.optim, then drivetrain.optim, then a dotted path), or the maker given."""
    found: Any = optim_type
    if isinstance(optim_type, str):
        packages = (torch.optim, importlib.import_module("drivetrain.optim"))
        found = next((getattr(package, optim_type) for package in packages if hasattr(package, optim_type)), None)
        if found is None and "." in optim_type:
            found = import_dotted(optim_type, "optim_type")
        if found is None:
            named = {
                name: getattr(package, name) for package in packages for name in dir(package) if name[:1].isupper()
            }
            names = [name for name, value in named.items() if _is_subclass(value, Optimizer)]
            raise ConfigError(
                f"optim_type={optim_type!r}: no optimizer has this name.{did_you_mean(optim_type, names)} Valid: {', '.join(names)}, or a "
                "dotted path."
            )
    if not callable(found):
        raise ConfigError(
            f"optim_type={optim_type!r}: expected a name such as 'AdamW', an Optimizer class or a function."
        )
    if isinstance(optim_type, str | type):
        name = optim_type if isinstance(optim_type, str) else optim_type.__name__
        check_class(found, Optimizer, f"optim_type={name!r}", "torch.optim.Optimizer")
        _check_no_closure(found, name)
    return found


def check_class(value: object, base: type, given: str, wanted: str) -> None:
    """Reject what is not a subclass of `base`."""
    if not _is_subclass(value, base):
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise ConfigError(f"{given} is {what}; expected a subclass of {wanted}.")


def _is_subclass(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base


def build_optimizer(
    optim_type: object,
    optim_conf: Mapping[str, object],
    own: Mapping[str, nn.Parameter],
    groups: Sequence[Mapping[str, object]],
) -> Optimizer:
    """Return the optimizer over a unit's own parameters, its groups made by name pattern."""
    maker = find_optimizer(optim_type)
    label = optim_type if isinstance(optim_type, str) else getattr(optim_type, "__name__", repr(optim_type))
    if "params" in optim_conf:
        raise ConfigError("optim_conf: 'params' comes from updated_modules and cannot be set.")
    check_keywords(partial(maker, None), optim_conf, f"optim_conf: {label}")
    others = [name for name, p in own.items() if p.ndim != 2]
    if others and maker is torch.optim.Muon:
        raise ConfigError(
            f"optim_type={label!r} updates matrices only, and {len(others)} of {len(own)} parameters are not matrices "
            f"({', '.join(others[:5])}). Use 'MuonHybrid', which gives the others to AdamW, or name matrices in updated_modules."
        )
    arguments = _named_groups(own, groups, with_names=getattr(maker, "takes_names", False))
    try:
        optimizer = maker(arguments, **copy.deepcopy(dict(optim_conf)))  # a rate may be a tensor, which schedules fill
    except (ValueError, TypeError) as problem:
        raise ConfigError(f"optim_conf={dict(optim_conf)!r}: {label} rejected it: {problem}") from problem
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optim_type={label!r} made a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    start_momentum(optimizer)
    for made in optimizer.param_groups:
        if not isinstance(made.get("lr", 0.0), torch.Tensor):
            check_number("lr", made.get("lr", 0.0), at_least=0, owner=label)
    _check_no_closure(optimizer, type(optimizer).__name__)
    for key in (key for group in groups for key in group):
        if key != "match" and key not in optimizer.defaults:
            raise ConfigError(unknown_name("option", key, list(optimizer.defaults), where=f"param_groups of {label}"))
    return optimizer


def check_groups(groups: object) -> list[Settings]:
    """Return the `param_groups` argument as a list of mappings with `match`, or raise an error that names the problem."""
    if groups is None:
        return []
    if isinstance(groups, (Mapping, str)) or not isinstance(groups, Sequence):
        raise ConfigError(
            f"param_groups={groups!r}: expected a list such as [{{'match': '*.bias', 'weight_decay': 0.0}}]."
        )
    for group in groups:
        if not isinstance(group, Mapping) or "match" not in group or "params" in group:
            raise ConfigError(
                f"param_groups: {group!r} needs 'match' (a pattern or a list) and options of the optimizer."
            )
        as_list("param_groups.match", group["match"])
    return [dict(group) for group in groups]


def import_dotted(path: str, where: str) -> Any:
    """Import what a dotted path names, a class or function inside a module."""
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(f"{where}={path!r}: expected a dotted path such as 'package.module.Name'.")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            value: Any = importlib.import_module(module_name)
        except ImportError as problem:
            is_absent = isinstance(problem, ModuleNotFoundError) and problem.name is not None
            if is_absent and f"{module_name}.".startswith(f"{problem.name}."):
                continue
            raise ConfigError(f"{where}={path!r}: importing {module_name!r} failed: {problem}") from problem
        for part in parts[length:]:
            if not hasattr(value, part):
                hint = did_you_mean(part, dir(value))
                raise ConfigError(f"{where}={path!r}: {module_name!r} has no {part!r}.{hint}")
            value = getattr(value, part)
        return value
    raise ConfigError(f"{where}={path!r}: there is no module {parts[0]!r}.")


def _check_no_closure(optimizer: Optimizer | type[Optimizer], name: str) -> None:
    is_made = isinstance(optimizer, Optimizer)  # algorithms look up classes too
    if requires_closure(optimizer) or (is_made and getattr(optimizer, "needs_closure", False)):
        raise ConfigError(
            f"optim_type={name!r} evaluates the loss itself (step needs a closure), which a unit does not "
            "support. Use another optimizer, or pass the torch optimizer directly to the Trainer."
        )


def _named_groups(
    own: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]], *, with_names: bool
) -> list[Settings]:
    """Split own parameters over groups: the first match wins, what is left comes first as the default group."""
    left = dict(own)
    made: list[tuple[dict[str, nn.Parameter], Mapping[str, Any]]] = []
    for group in groups:
        entries = as_list("param_groups.match", group["match"]) or []
        chosen = select(list(own.items()), entries, "param_groups.match")
        matched = {name: p for name, p in left.items() if id(p) in chosen}
        if not matched:
            raise ConfigError(
                f"param_groups: everything that {group['match']!r} matches is in an earlier group already."
            )
        left = {name: p for name, p in left.items() if name not in matched}
        made.append((matched, {key: value for key, value in group.items() if key != "match"}))
    if left:
        made.insert(0, (left, {}))
    return [{"params": list(own.items() if with_names else own.values()), **options} for own, options in made]


class Default(NamedTuple):
    """The value of an argument that was not given; shows as that value."""

    value: object

    def __repr__(self) -> str:
        return repr(self.value)


SHARED: dict[str, Any] = {  # typed Any so that signatures can state the type of the value a caller passes
    "distributed": Default(False),
    "use_amp": Default(True),
    "accum_grad": Default(1),
    "ft_factor": Default(1.0),
    "grad_clip": Default(1.0),
    "grad_norm_type": Default(2.0),
}
UNCHANGED: Any = Default(None)

NONFINITE = ("skip", "raise", "ignore")


def check_shared(name: str, value: object) -> Any:
    """Return the value of a shared argument, or raise an error."""
    if name in ("distributed", "use_amp"):
        return check_flag(name, value)
    if name == "accum_grad":
        return check_count(name, value)
    if name == "grad_clip" and value is None:
        return None
    hint = " (None switches clipping off)" if name == "grad_clip" else ""
    return check_number(name, value, above=0, infinite=name == "grad_norm_type", hint=hint)


def check_keywords(
    function: Callable[..., object], given: Mapping[str, object], owner: str, also_valid: Iterable[str] = ()
) -> None:
    """Check keywords against a signature; an unknown or missing one is a TypeError with the nearest name."""
    accepted, required = keywords_of(function)
    if accepted is not None:
        for name in given:
            if name not in accepted:
                choices = [*accepted, *also_valid]
                hint = did_you_mean(name, choices)
                raise ConfigTypeError(
                    f"{owner} takes no argument {name!r}.{hint} Its arguments: {', '.join(choices) or 'none'}."
                )
    for name in required:
        if name not in given:
            raise ConfigTypeError(f"{owner} needs the argument {name!r}, which was not given.")


def keywords_of(function: Callable[..., object]) -> tuple[list[str] | None, list[str]]:
    """Return the keywords a bound function accepts (None: any) and those it requires."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return (None if takes_any else [p.name for p in named]), [p.name for p in named if p.default is p.empty]


def one_of_two_names(conf: dict[str, object], alias: str, name: str, value: object) -> Any:
    """Take an alias out of `conf`; given under both names with different values is an error."""
    if alias not in conf:
        return value
    other = conf.pop(alias)
    if value is not None and value != other:
        raise ConfigError(f"{name}={value!r} and {alias}={other!r} are two names of one argument and differ. Use one.")
    return other
