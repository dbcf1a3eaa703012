"""The list of kinds, and the walks over all items of a Context."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from drivetrain.context.coders import PLAIN
from drivetrain.context.containers import DataclassKind, DictKind, ListKind, NamedTupleKind, SetKind, TupleKind
from drivetrain.context.kinds import Kind
from drivetrain.context.optimizers import Names
from drivetrain.context.stateful import ContextKind, ModuleKind, ObjectKind, OptimizerKind
from drivetrain.context.values import CodedKind, GeneratorKind, OtherKind, PlainKind, TensorKind
from drivetrain.core.containers import join_path
from drivetrain.module.wrapping import named_clean_parameters

PLAIN_KIND, MODULE_KIND, OTHER_KIND = PlainKind(), ModuleKind(), OtherKind()
KINDS: tuple[Kind, ...] = (
    ContextKind(),
    MODULE_KIND,
    OptimizerKind(),
    TensorKind(),
    GeneratorKind(),
    CodedKind(),
    PLAIN_KIND,
    ObjectKind(),  # before the containers: a dict or dataclass that saves itself is asked to
    NamedTupleKind(),
    DataclassKind(),
    DictKind(),
    ListKind(),
    TupleKind(),
    SetKind(),
    OTHER_KIND,
)
"""In order of precedence."""


def kind_of(item: object) -> Kind:
    """Return the handler of an item."""
    if type(item) in PLAIN:
        return PLAIN_KIND
    return next(kind for kind in KINDS if kind.holds(item))


def everything(item: object, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Kind, Any]]:
    """Yield path, kind and value of an item and of all that is inside it, each object once."""
    if type(item) in PLAIN:
        yield path, PLAIN_KIND, item
        return
    seen = set() if seen is None else seen
    if id(item) in seen:
        return
    seen.add(id(item))
    kind = kind_of(item)
    yield path, kind, item
    for name, child in kind.children(item):
        yield from everything(child, join_path(path, name), seen)


def walk(item: object) -> Iterator[tuple[str, Kind, Any]]:
    """Yield path, kind and value of all that is inside an item and is not a container."""
    return (entry for entry in everything(item) if not entry[1].is_container)


def holds_state(item: object) -> bool:
    """Return whether something with state of its own is in an item."""
    return any(kind.has_state(part) for _, kind, part in everything(item))


def parameter_names(root: object) -> Names:
    """Return the name of every parameter in the modules of a Context, and of trained tensors that are items themselves."""
    names: dict[int, str] = {}
    for path, kind, item in walk(root):
        if kind is MODULE_KIND:
            for name, parameter in named_clean_parameters(item):
                names.setdefault(id(parameter), join_path(path, name))
        elif isinstance(item, Tensor):
            names.setdefault(id(item), path)
    return names
