"""Which parameters a unit owns: names, dotted names and patterns, looked up in the bare model.

An entry is the name of a module (`encoder`, `encoder.layers.0`), of a parameter (`encoder.bias`) or a shell pattern
(`*.bias`, `decoder.layers.[01]`), matched against both. `_rest_` is everything that no other unit of the set owns.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from drivetrain.core.errors import ConfigError, nearest_name
from drivetrain.module.wrapping import clean_key

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
        raise ConfigError(f"{name}={value!r}: the list is empty. Leave it out for the whole model, or name modules.")
    return entries


def select(named: Sequence[tuple[str, nn.Parameter]], entries: Iterable[str], where: str) -> dict[int, nn.Parameter]:
    """Return the parameters that the entries name, by identity; an entry that names nothing is an error."""
    chosen: dict[int, nn.Parameter] = {}
    for entry in entries:
        found = [p for name, p in named if names_parameter(entry, name)]
        if not found:
            raise ConfigError(unknown_module(entry, [name for name, _ in named], where))
        chosen.update((id(p), p) for p in found)
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


def unknown_module(entry: str, names: Sequence[str], where: str) -> str:
    """Return a message that nothing in the model is called like the entry, with the nearest name."""
    modules = {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 1)}
    first_level = list(dict.fromkeys(name.split(".")[0] for name in names))
    near = nearest_name(entry, sorted({*modules, *names}, key=lambda name: (name.count("."), name)))
    hint = f" Nearest: {near!r}." if near else ""
    return f"{where}: {entry!r} names no module or parameter of the model.{hint} First level: {', '.join(first_level)}."


def own_parameters(
    model: nn.Module,
    updated: list[str] | None,
    excluded: list[str] | None,
    taken: Mapping[int, str],
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
    own: dict[str, nn.Parameter] = {}
    for name, p in named:
        if chosen.pop(id(p), None) is not None:
            own[name] = p
    return own
