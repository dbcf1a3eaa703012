"""The list of all methods, built-in and the user's, by name and alias.

Lists, files and searches all look methods up here, so a registered method can be used everywhere.
"""

from collections.abc import Iterable
from dataclasses import is_dataclass
from importlib import import_module
from typing import TypeVar

from drivetrain.core.errors import ConfigError, ConfigTypeError, UnknownMethodError, unknown_name
from drivetrain.strategy.method import Method
from drivetrain.strategy.methods import ROWS

M = TypeVar("M", bound="Method | type[Method]")

_methods: dict[str, Method] = {}
_aliases: dict[str, str] = {}


def register_method(method: M) -> M:
    """Add a method, as an instance or a class; can be used as a decorator."""
    found = method() if isinstance(method, type) else method
    if not isinstance(found, Method):
        raise ConfigTypeError(f"register_method({method!r}): expected a Method from drivetrain.strategy.method.")
    texts = (getattr(found, "name", None), getattr(found, "group", None), *found.aliases)
    if isinstance(found.aliases, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigTypeError(
            f"register_method({method!r}): expected a text as name and group, and a tuple of texts as aliases."
        )
    if not is_dataclass(found.Config) or found.Config.__hash__ is None:
        raise ConfigTypeError(
            f"register_method({method!r}): expected a frozen dataclass as Config, so that plans can be compared."
        )
    _load_built_in()
    _add(found)
    return method


def _add(method: Method) -> None:
    for name in (method.name, *method.aliases):
        if name in _methods or name in _aliases:
            raise ConfigError(f"register_method: the name {name!r} is taken. Choose another one.")
    _methods[method.name] = method
    _aliases.update(dict.fromkeys(method.aliases, method.name))


def find_method(name: object) -> Method:
    """Return the method with a name or alias.

    >>> find_method("fsdp2").name
    'fsdp'
    """
    _load_built_in()
    if isinstance(name, str) and (found := _methods.get(_aliases.get(name, name))) is not None:
        return found
    raise UnknownMethodError(unknown_name("method", name, [*_methods, *_aliases]))


def method_names() -> list[str]:
    """Return the name of every method, without aliases."""
    return [method.name for method in all_methods()]


def all_methods() -> list[Method]:
    """Return every method in the order of searches and tables."""
    _load_built_in()
    return list(_methods.values())


def mesh_method() -> Method:
    """Return the method whose configuration defines the mesh."""
    return next(method for method in all_methods() if method.lays_out_mesh)


def group_names() -> list[str]:
    """Return the names of all groups of methods."""
    return list(dict.fromkeys(method.group for method in all_methods()))


def expand_names(names: Iterable[object]) -> set[str]:
    """Return the canonical names of methods, with groups replaced by their methods."""
    result: set[str] = set()
    for name in names:
        members = {method.name for method in all_methods() if method.group == name}
        try:
            result |= members or {find_method(name).name}
        except UnknownMethodError:
            valid = [*_methods, *group_names()]
            raise UnknownMethodError(unknown_name("method or group", name, dict.fromkeys(valid))) from None
    return result


def _load_built_in() -> None:
    if not _methods:
        for file, cls in ROWS:
            _add(getattr(import_module(f"drivetrain.strategy.methods.{file}"), cls)())
