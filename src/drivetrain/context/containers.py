"""Items that hold items: dicts, lists, tuples, sets, dataclasses and nested Contexts.

A change reaches every child and keeps the container's type; one that can be changed in place stays the same object,
because other code may hold it too. A saved container may be longer or shorter than the live one: plain children come
and go with it, children with state of their own must be on both sides.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from drivetrain.context.kinds import Kind, Restore, keep
from drivetrain.core.containers import field_values, is_dataclass, is_namedtuple, join_path, replace_fields, same_tuple
from drivetrain.core.types import Item, Saved
from drivetrain.runtime.coders import NOT_STATE, PLAIN, TAG, tag_of

if TYPE_CHECKING:
    from drivetrain.context.loading import Loading

Change = Callable[[Any], Any]


class DictKind(Kind):
    """Dicts and their subclasses."""

    name = "dict"
    is_container = True

    def holds(self, item: object) -> bool:
        return isinstance(item, dict)

    def children(self, item: dict[object, object]) -> Iterable[tuple[object, object]]:
        return list(item.items())

    def rebuild(self, item: dict[object, object], change: Change) -> dict[Any, Any]:
        for key, child in self.children(item):
            item[key] = change(child)
        return item

    def fit(self, item: dict[object, object], saved: Saved, loading: "Loading", path: str) -> Restore:
        if type(saved) is OrderedDict or (type(saved) is dict and TAG not in saved):
            entries: dict[object, object] = dict(saved)
        elif tag_of(saved) in ("dict", "ordered_dict", "counter"):
            entries = {loading.unpack(key): child for key, child in saved["value"]}  # the values are still packed
        else:
            return loading.add_mismatch(path, item, saved)
        restores: dict[object, Restore] = {}
        for key, child in entries.items():
            where = join_path(path, key)
            if key in item:
                restores[key] = loading.fit(item[key], child, where)
            elif tag_of(child) != NOT_STATE:
                restores[key] = loading.build(child, where)
        for key, child in item.items():
            if key not in entries and (loading.lacks_state(child, join_path(path, key)) or loading.is_stateless(child)):
                restores[key] = keep(child)

        def restore() -> dict[object, object]:
            restored = {key: put() for key, put in restores.items()}
            item.clear()
            for key, child in restored.items():  # one by one: Counter.update would add up
                item[key] = child
            return item

        return restore


class SequenceKind(Kind):
    """What lists and tuples share: children by position."""

    is_container = True

    def children(self, item: Item) -> Iterable[tuple[object, object]]:
        return list(enumerate(item))

    def with_children(self, item: Item, children: list[object]) -> Item:
        """Return the sequence with other children."""
        raise NotImplementedError

    def rebuild(self, item: Item, change: Change) -> Item:
        return self.with_children(item, [change(child) for child in item])

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        if type(saved) in (list, tuple):
            elements = list(saved)
        elif tag_of(saved) == "deque":
            elements = list(saved["value"]["items"])
        else:
            return loading.add_mismatch(path, item, saved)
        restore_elements = _fit_elements(list(item), elements, loading, path)
        return lambda: self.with_children(item, restore_elements())


class ListKind(SequenceKind):
    """Lists and deques."""

    name = "list"

    def holds(self, item: object) -> bool:
        return isinstance(item, list | deque)

    def with_children(self, item: Item, children: list[object]) -> Item:
        item.clear()
        item.extend(children)
        return item


class TupleKind(SequenceKind):
    """Tuples; they are made again only when a child changes."""

    name = "tuple"

    def holds(self, item: object) -> bool:
        return isinstance(item, tuple) and not is_namedtuple(item)

    def with_children(self, item: Item, children: list[object]) -> Item:
        is_same = len(children) == len(item) and all(new is old for new, old in zip(children, item))
        return item if is_same else same_tuple(item, children)


class NamedTupleKind(TupleKind):
    """Namedtuples, matched field by field."""

    name = "namedtuple"

    def holds(self, item: object) -> bool:
        return is_namedtuple(item)

    def children(self, item: Item) -> Iterable[tuple[object, object]]:
        return item._asdict().items()

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        restores = _fit_fields(item, item._asdict(), "namedtuple", saved, loading, path)
        if restores is None:
            return keep(item)
        return lambda: self.with_children(item, [restores[name]() for name in item._fields])


class DataclassKind(Kind):
    """Dataclass instances, field by field; a frozen one is replaced by a new one."""

    name = "dataclass"
    is_container = True

    def holds(self, item: object) -> bool:
        return is_dataclass(item)

    def children(self, item: object) -> Iterable[tuple[object, object]]:
        return field_values(item).items()

    def rebuild(self, item: object, change: Change) -> Item:
        return _set_fields(item, {name: change(child) for name, child in field_values(item).items()})

    def fit(self, item: object, saved: object, loading: "Loading", path: str) -> Restore:
        restores = _fit_fields(item, field_values(item), "dataclass", saved, loading, path)
        if restores is None:
            return keep(item)
        return lambda: _set_fields(item, {name: put() for name, put in restores.items()})


class SetKind(Kind):
    """Sets and frozensets; their elements are values."""

    name = "set"

    def holds(self, item: object) -> bool:
        return isinstance(item, set | frozenset)

    def children(self, item: Item) -> Iterable[tuple[object, object]]:
        return enumerate(item)

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        if tag_of(saved) not in ("set", "frozenset"):
            return loading.add_mismatch(path, item, saved)
        elements = loading.unpack(saved["value"])

        def restore() -> object:
            if isinstance(item, frozenset):
                return type(item)(elements)
            item.clear()
            item.update(elements)
            return item

        return restore


def _fit_elements(live: list[object], saved: list[object], loading: "Loading", path: str) -> Callable[[], list[object]]:
    """Fit position by position; further saved elements are built, further live ones must be without state."""
    elements = list(saved)
    pending: dict[int, Restore] = {}  # a long history of numbers needs no step of its own for each of them
    for index, child in enumerate(saved):
        beyond = index >= len(live)
        if type(child) not in PLAIN or not (beyond or type(child) is type(live[index])):
            where = join_path(path, index)
            pending[index] = loading.build(child, where) if beyond else loading.fit(live[index], child, where)
    for index in range(len(saved), len(live)):
        if type(live[index]) not in PLAIN and loading.lacks_state(live[index], join_path(path, index)):
            elements.append(live[index])

    def restore() -> list[object]:
        for index, put in pending.items():
            elements[index] = put()
        return elements

    return restore


def _fit_fields(
    item: Item, live: dict[str, object], tag: str, saved: Saved, loading: "Loading", path: str
) -> dict[str, Restore] | None:
    """Fit fields by name; None when the saved value is something else, which is noted."""
    if tag_of(saved) != tag:
        loading.add_mismatch(path, item, saved)
        return None
    fields = saved["value"]["fields"]
    if set(fields) != set(live):
        loading.add_mismatch(
            path, item, saved, f"saved fields {', '.join(fields)}; this {type(item).__name__} has {', '.join(live)}"
        )
        return None
    return {name: loading.fit(live[name], child, join_path(path, name)) for name, child in fields.items()}


def _set_fields(item: Item, values: dict[str, Item]) -> Item:
    changes = {name: value for name, value in values.items() if value is not getattr(item, name)}
    if not changes:
        return item
    if item.__dataclass_params__.frozen:
        return replace_fields(item, changes)
    for name, value in changes.items():
        setattr(item, name, value)
    return item
