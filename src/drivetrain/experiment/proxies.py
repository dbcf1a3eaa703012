"""Names that always mean the present run: `params`, `output_dir` and the like can be imported once, at the top.

Each is bound to its value when a run starts and keeps it after the run has ended. Before the first run any use is an error.
"""

import copy
import operator
import os
from typing import Any

from drivetrain.core.errors import ExperimentError

_UNBOUND = object()


class Proxy:
    """A live name for a value that is set later."""

    __slots__ = ("_name", "_value")

    def __init__(self, name: str):
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_value", _UNBOUND)

    def __getattr__(self, name: str) -> Any:
        return getattr(target(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(target(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(target(self), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(target(self))

    def __dir__(self) -> list[str]:
        return dir(target(self))

    def __repr__(self) -> str:
        value = object.__getattribute__(self, "_value")
        name = object.__getattribute__(self, "_name")
        return f"<{name}: no experiment has been started>" if value is _UNBOUND else repr(value)

    def __format__(self, spec: str) -> str:
        return format(target(self), spec)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return target(self)(*args, **kwargs)

    def __copy__(self) -> object:
        return copy.copy(target(self))

    def __reduce_ex__(self, protocol: object) -> Any:
        return _itself, (target(self),)


class PathProxy(Proxy):
    """A live name for a path: `open()` and `os.listdir()` take it. (They would take a number too, so no other proxy is a path.)"""

    __slots__ = ()

    def __fspath__(self) -> str:
        return os.fspath(target(self))


class NumberProxy(Proxy):
    """A live name for a whole number."""

    __slots__ = ()

    def __index__(self) -> int:
        return operator.index(target(self))


def _itself(value: object) -> object:
    return value


def target(proxy: Proxy) -> Any:
    """Return the value behind a proxy."""
    value = object.__getattribute__(proxy, "_value")
    if value is _UNBOUND:
        name = object.__getattribute__(proxy, "_name")
        raise ExperimentError(f"there is no {name} outside a running experiment. Use it inside one.")
    return value


def bind(proxy: Proxy, value: object) -> None:
    """Set the value behind a proxy."""
    object.__setattr__(proxy, "_value", value)


def _forward(name: str, function: Any) -> None:
    def method(self: Proxy, *args: Any) -> Any:
        return function(target(self), *(target(arg) if issubclass(type(arg), Proxy) else arg for arg in args))

    method.__name__ = name
    setattr(Proxy, name, method)


# Python looks special methods up on the type, so each one is forwarded by name.
for _name in "lt le eq ne gt ge getitem setitem delitem contains".split():
    _forward(f"__{_name}__", getattr(operator, f"__{_name}__"))
for _function in (str, len, iter, bool, int, float, hash):
    _forward(f"__{_function.__name__}__", _function)
for _name in "add sub mul truediv floordiv mod pow and or xor".split():
    _operation = getattr(operator, f"__{_name}__")
    _forward(f"__{_name}__", _operation)
    _forward(f"__r{_name}__", lambda value, other, operation=_operation: operation(other, value))

current_experiment = Proxy("current_experiment")
params = Proxy("params")
output_dir = PathProxy("output_dir")
params_file = PathProxy("params_file")
random_gen = Proxy("random_gen")
subprocess_counter = NumberProxy("subprocess_counter")
