"""Algorithms by name, so that a checkpoint can ask for those without which its model cannot be loaded.

A checkpoint holds, for each algorithm, its class name and its constructor's arguments as JSON holds them. That is all that is
needed to make it again, and nothing in a file is ever executed: a name that is not listed here is an error.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from drivetrain.algorithms.catalogue import ALGORITHMS, offered
from drivetrain.core.errors import ConfigError, ConfigTypeError, unknown_name
from drivetrain.core.one_of import OneOf
from drivetrain.core.plugin import Plugin
from drivetrain.core.types import Settings

P = TypeVar("P", bound=type[Plugin])

_registered: dict[str, type[Plugin]] = {}


def register(cls: P) -> P:
    """Let checkpoints name an algorithm of one's own; can be used as a decorator.

    Two classes of one name would make files ambiguous, so the second one is rejected.
    """
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ConfigTypeError(f"register({cls!r}): expected a class derived from Algorithm.")
    name = cls.__name__
    known = _registered.get(name)
    if name in _modules() or (known is not None and known is not cls):
        raise ConfigError(f"register: there is an algorithm of the name {name!r} already. Rename the class.")
    _registered[name] = cls
    return cls


def names() -> list[str]:
    """Return the name of every algorithm that can be created."""
    return sorted({OneOf.__name__, *_modules(), *_registered})


def find(name: str) -> type[Plugin]:
    """Return the class of that name."""
    if name == OneOf.__name__:
        return OneOf
    if name in _registered:
        return _registered[name]
    modules = _modules()
    if name not in modules:
        raise ConfigError(unknown_name("algorithm", name, names()) + " One of your own needs registry.register(cls).")
    module, private = modules[name]
    return getattr(importlib.import_module(module), private)


def create(name: str, config: Mapping[str, object]) -> Plugin:
    """Return the algorithm of that name made with the arguments that its `config()` returned.

    >>> create("LabelSmoothing", {"smoothing": 0.2, "target_key": 1})
    LabelSmoothing(smoothing=0.2, target_key=1)
    """
    cls = find(name)
    parameters = inspect.signature(cls).parameters
    args: list[Any] = []
    kwargs: Settings = {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument, value in config.items():
        if argument not in parameters and not takes_any:
            raise ConfigError(unknown_name("argument", argument, parameters, where=name))
        revived = _revived(value, f"{name}({argument}=...)")
        if argument in parameters and parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(revived)
        else:
            kwargs[argument] = revived
    return cls(*args, **kwargs)


def restore_required(
    saved: Iterable[Mapping[str, Any]], live: Sequence[Plugin] = (), exclude: Iterable[str] = ()
) -> list[Plugin]:
    """Return, newly made, the saved algorithms that the saved model cannot do without and that are not among `live`.

    `saved` are entries as the State saves them: `name`, `config`, `required`. An algorithm named in `exclude` is left out.
    """
    present = [type(plugin).__name__ for plugin in live]
    left_out = set(exclude)
    made: list[Plugin] = []
    for entry in saved:
        name = entry["name"]
        if name in present:
            present.remove(name)
        elif entry.get("required") and name not in left_out:
            made.append(create(name, entry["config"]))
    return made


def _modules() -> dict[str, tuple[str, str]]:
    """Return the module of every listed algorithm that is there, and its name in it."""
    homes: dict[str, tuple[str, str]] = {}
    for module, entries in offered(ALGORITHMS).items():
        for entry in entries:
            public, _, private = entry.partition("=")
            homes[public] = (module, private or public)
    return homes


def _revived(value: object, where: str) -> Any:
    """Return an argument as the constructor wants it: members are made again, what JSON could not hold is rejected."""
    if isinstance(value, Mapping):
        if set(value) == {"__repr__"}:
            raise ConfigError(
                f"{where}: the saved value was {value['__repr__']}, which a file cannot bring back. Create the algorithm "
                "yourself and give it to the Trainer before loading."
            )
        if set(value) == {"name", "config"}:
            return create(value["name"], value["config"])
        return {key: _revived(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_revived(item, where) for item in value]
    return value
