"""Containers in general: the items of dicts, lists, tuples, namedtuples and dataclasses, and new ones of the same type.

Also attributes and environment variables that have other values inside a block."""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

T = TypeVar("T")


def join_path(path: str, name: object) -> str:
    """Return the path of an item: `join_path("history", 0)` is `"history.0"`."""
    return f"{path}.{name}" if path else str(name)


def is_namedtuple(value: object) -> bool:
    """Return whether a value is a namedtuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_dataclass(value: object) -> bool:
    """Return whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def field_values(value: object) -> dict[str, object]:
    """Return the fields of a dataclass instance that have been set."""
    fields = dataclasses.fields(cast(Any, value))
    return {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}


def replace_fields(value: T, changes: Mapping[str, object]) -> T:
    """Return a copy of a dataclass instance with fields changed, frozen or not, without running its constructor."""
    clone = copy.copy(value)
    for name, change in changes.items():
        object.__setattr__(clone, name, change)
    return clone


@contextmanager
def with_attributes(owner: object, *kept: str, **values: object) -> Iterator[None]:
    """Give an object other values inside the block. Afterwards restore those, and attributes that are only named."""
    before = {name: getattr(owner, name) for name in (*kept, *values)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def with_environment(**values: str) -> Iterator[None]:
    """Set environment variables inside the block; what it starts inherits them. Afterwards restore those before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def same_tuple(like: tuple[object, ...], items: list[object]) -> Any:
    """Return a tuple of the type of `like`, which may be a namedtuple, with other items."""
    kind = cast(Any, type(like))
    return kind._make(items) if is_namedtuple(like) else kind(items)


def map_items(value: object, change: Callable[[Any], object]) -> Any:
    """Return a container of the same type with `change` applied to each item; any other value is returned as it is.

    >>> map_items({"a": 1, "b": 2}, str), map_items((1, 2), str), map_items("text", str.upper)
    ({'a': '1', 'b': '2'}, ('1', '2'), 'text')
    """
    if isinstance(value, tuple):
        return same_tuple(value, [change(item) for item in value])
    if isinstance(value, list):
        changed = [change(item) for item in value]
        if type(value) is list:
            return changed
        copied = copy.copy(value)
        copied[:] = changed
        return copied
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        copied_mapping = copy.copy(value)  # keeps the factory of a defaultdict and the attributes of a subclass
        for key, item in value.items():
            copied_mapping[key] = change(item)
        return copied_mapping
    if is_dataclass(value):
        return replace_fields(value, {name: change(item) for name, item in field_values(value).items()})
    return value


def leaves(value: object, kind: type[T]) -> Iterator[T]:
    """Yield the values of one type inside nested mappings, lists, tuples and dataclasses, in order.

    >>> list(leaves({"a": 1, "pair": (2, ["text", 3])}, int))
    [1, 2, 3]
    """
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item, kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, kind)
    elif is_dataclass(value):
        for item in field_values(value).values():
            yield from leaves(item, kind)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item and whether it is the last, by reading one ahead.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    """
    iterator = iter(items)
    for current in iterator:
        for following in iterator:
            yield current, False
            current = following
        yield current, True
