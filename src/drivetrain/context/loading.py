"""Taking the state of a Context in one walk, and restoring it in two steps: first find everything that does not fit, then change something.

The first step walks live items and saved states together and notes each problem under its full path. If there is
none, or if only what fits is wanted, the second step restores: objects that load themselves, because they may still
raise (those are restored to what they were), then modules, then optimizers, then plain values.

At the end are the list of kinds and the walks over all items.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.context.containers import DataclassKind, DictKind, ListKind, NamedTupleKind, SetKind, TupleKind
from drivetrain.context.kinds import ItemHolder, Kind, Restore, keep
from drivetrain.context.optimizers import Names
from drivetrain.context.stateful import ContextKind, ModuleKind, ObjectKind, OptimizerKind
from drivetrain.context.values import CodedKind, GeneratorKind, OtherKind, PlainKind, TensorKind
from drivetrain.core.containers import join_path
from drivetrain.core.errors import DrivetrainError, StateError, nearest_name, warn
from drivetrain.core.plain import plain_text
from drivetrain.core.types import Item, Saved
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.wrapping import FaultKind, named_clean_parameters
from drivetrain.runtime.codec import Packer, Unpacker, classes_in, needs_class, pack, unpack
from drivetrain.runtime.coders import NOT_STATE, PLAIN, tag_of, tagged
from drivetrain.runtime.ranks import is_master


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load restored, and what it had to leave."""

    restored: tuple[str, ...] = ()
    """Names of the Context whose state was restored without a problem."""
    missing: tuple[str, ...] = ()
    """Paths without a saved state; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """Paths in the saved state that the Context does not have."""
    unfitting: tuple[str, ...] = ()
    """Paths, each with the reason why its state could not be loaded."""
    without_state: tuple[str, ...] = ()
    """Items for which the saved state is None: nothing was saved for them."""

    @property
    def is_complete(self) -> bool:
        """Whether everything was restored."""
        return not (self.missing or self.unexpected or self.unfitting)

    def __str__(self) -> str:
        lines = [f"restored: {', '.join(self.restored) or 'nothing'}"]
        for title, entries in (
            ("missing (in the Context, without a saved state)", self.missing),
            ("unexpected (saved, not in the Context)", self.unexpected),
            ("unfitting", self.unfitting),
            ("without state", self.without_state),
        ):
            if entries:
                lines.append(f"{title}:\n    " + "\n    ".join(entries))
        return "\n  ".join(lines)


class _Fault(NamedTuple):
    kind: FaultKind
    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.reason else self.path


class _SelfLoad(NamedTuple):
    path: str
    item: Item
    state: Any


class Loading:
    """One `load_state_dict` in progress."""

    def __init__(self, root: ItemHolder, strict: bool):
        self.strict = strict
        self._root = root
        self._faults: list[_Fault] = []
        self._without_state: list[str] = []
        self._self_loads: list[_SelfLoad] = []
        self.modules: list[Callable[[], object]] = []
        self.optimizers: list[Callable[[], Any]] = []

    @cached_property
    def parameter_names(self) -> Names:
        """Names of all parameters in the Context, by identity."""
        return parameter_names(self._root)

    @cached_property
    def _classes(self) -> list[type]:
        """Classes of which the Context holds a value: those, and only those, can be rebuilt."""
        items = [item for _, _, item in everything(self._root)]
        keys = [key for item in items if isinstance(item, dict) for key in item]
        return [type(value) for value in (*items, *keys) if needs_class(value)]

    # What the kinds ask while fitting.

    def fit(self, item: object, saved: object, path: str, kind: Kind | None = None) -> Restore:
        """Compare one item with its saved state and return what restores it."""
        kind = kind or kind_of(item)
        if tag_of(saved) == NOT_STATE:
            self.lacks_state(item, path)
            return keep(item)
        if saved is None:  # it replaces a value; for an item with its own state it means that none was saved
            if holds_state(item):
                self._without_state.append(path)
                return keep(item)
            return keep(item if kind.saves_itself else None)
        try:
            return kind.fit(item, saved, self, path)
        except (StateError, KeyError, TypeError, ValueError) as error:  # the last three: a damaged or forged state
            return self.add_mismatch(path, item, saved, str(error) if isinstance(error, StateError) else repr(error))

    def build(self, saved: object, path: str) -> Restore:
        """Return what makes a saved value that has no live counterpart, on the Context's device."""
        is_optimizer = isinstance(saved, dict) and set(saved) == {"state", "param_groups"}
        if is_optimizer or hasattr(saved, "_metadata"):  # nothing can be built from these
            self.note("unexpected", path, "the state of a module or optimizer, but the Context has none")
            return keep(None)
        device = self._root._device
        try:
            return keep(Unpacker(self._classes, lambda tensor: tensor.to(device, copy=True)).unpack(saved))
        except StateError as error:
            self.note("unfitting", path, str(error))
            return keep(None)

    def unpack(self, saved: object, live: Callable[[], Any] | None = None) -> Any:
        """Return the value behind a packed one; classes come from the Context, then from what `live` returns."""
        try:
            return Unpacker(self._classes).unpack(saved)
        except StateError:
            if live is None:
                raise
            return Unpacker([*self._classes, *classes_in(live())]).unpack(saved)

    def lacks_state(self, item: object, path: str) -> bool:
        """Note an item with state of its own that has no saved one; return whether it is one."""
        found = holds_state(item)
        if found:
            self.note("missing", path)
        return found

    def is_stateless(self, item: Item) -> bool:
        """Return whether an item needs no saved state: functions, datasets, modules without parameters or buffers."""
        kind = kind_of(item)
        return kind is OTHER_KIND or (kind is MODULE_KIND and not kind.has_state(item))

    def try_to_load(self, path: str, item: object, state: object) -> None:
        """Let an object load its state in the second step."""
        self._self_loads.append(_SelfLoad(path, item, state))

    def add_mismatch(self, path: str, item: object, saved: object, reason: str | None = None) -> Restore:
        """Note a state that an item cannot take, and keep the item."""
        kind = kind_of(item)
        wanted = f"a {type(item).__name__}" if kind is PLAIN_KIND else f"a {kind.name} ({type(item).__name__})"
        self.note("unfitting", path, reason or f"saved {_describe(saved)}, expected {wanted}")
        return keep(item)

    def note(self, kind: FaultKind, path: str, reason: str = "", valid: Iterable[str] = ()) -> None:
        """Keep one problem for the report."""
        near = nearest_name(path.rpartition(".")[2], valid)
        self._faults.append(_Fault(kind, path, reason or (f"nearest is {near!r}" if near else "")))

    def mismatched_paths(self) -> set[str]:
        """Return the paths whose states could not be loaded."""
        return {fault.path for fault in self._faults if fault.kind == "unfitting"}

    # The second step.

    def finish(self, restore: Restore) -> LoadReport:
        """Restore what fits, or raise one error with everything that does not."""
        if self.strict and self._faults:
            raise StateError(self._message())
        done = self._load_objects()
        try:
            for load in (*self.modules, *self.optimizers):
                load()
            restore()
        except Exception:
            _restore_all(done)
            raise
        finally:  # they refer to this object, and would keep the whole state until a garbage collection
            self.modules, self.optimizers = [], []
        if self._without_state:
            warn(
                f"the saved state has None for {', '.join(self._without_state)}: nothing was saved for them, so they keep their current "
                "values."
            )
        return self._report()

    def _load_objects(self) -> list[_SelfLoad]:
        """Let objects load themselves; return how to undo it. If one raises in strict mode, all are restored."""
        done: list[_SelfLoad] = []
        errors: list[Exception] = []
        # Loaders come last: the data that a position is checked against may be an item that loads itself, such as a replay buffer.
        for load in sorted(self._self_loads, key=lambda load: isinstance(load.item, torch.utils.data.DataLoader)):
            before = None
            if not _is_foreign_loader(load.item):
                state = pack(load.item.state_dict(), special=_leave_out, tensor=lambda tensor: tensor.detach().clone())
                before = load._replace(state=state)
            try:
                load.item.load_state_dict(load.state)
                done += [before] if before else []
            except Exception as error:  # whatever a foreign object raises, it says that the state does not fit
                _restore_all([before] if before else [])
                error.add_note(f"(while loading {load.path})")
                errors.append(error)
                self.note("unfitting", load.path, f"{type(error).__name__}: {plain_text(error)}")
        if errors and self.strict:
            _restore_all(done)
            if len(errors) == 1 and isinstance(errors[0], DrivetrainError):
                raise errors[0]
            raise StateError(self._message()) from errors[0]
        return done

    def _report(self) -> LoadReport:
        paths = [*(fault.path for fault in self._faults), *self._without_state]
        troubled = {path.partition(".")[0] for path in paths}
        names = [name for name, item in self._root._saved_items().items() if not self.is_stateless(item)]
        faults = {
            kind: tuple(str(fault) for fault in self._faults if fault.kind == kind) for kind in get_args(FaultKind)
        }
        restored = tuple(name for name in names if name not in troubled)
        return LoadReport(restored=restored, without_state=tuple(self._without_state), **faults)

    def _message(self) -> str:
        report = str(self._report()).partition("\n  ")[2]
        return (
            f"the saved state does not fit this {type(self._root).__name__}; nothing was changed.\n  {report}\n"
            "Give the Context the same names and kinds of items before loading, or restore what fits with "
            "load_state_dict(state, strict=False). To begin a new run from the weights alone: "
            "model.load_state_dict(drivetrain.load_checkpoint(path)['model']), without ['model'] for a file that holds only weights."
        )


def _is_foreign_loader(item: object) -> bool:
    """Return whether this is a data loader of the user's. Asked for its state it begins an iteration, which may ignore a loaded one."""
    is_data = isinstance(item, Container) or hasattr(item, "__getitem__")
    return isinstance(item, Iterable) and not is_data and not type(item).__module__.startswith("drivetrain.")


def _leave_out(item: object, path: str) -> Saved:
    return tagged(NOT_STATE, None) if kind_of(item).saves_itself else NotImplemented


def _restore_all(loads: list[_SelfLoad]) -> None:
    for load in loads:
        # An object may raise here too. What matters is the first error, and that is being raised.
        with suppress(Exception):
            load.item.load_state_dict(unpack(load.state, load.item.state_dict()))


def _describe(saved: object) -> str:
    if tag_of(saved) is not None:
        return f"a {tag_of(saved)}"
    if isinstance(saved, torch.Tensor):
        return f"a tensor of shape {tuple(saved.shape)}"
    text = repr(saved)
    return f"{type(saved).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


class Saving(Packer):
    """One `state_dict()` in progress; `full` gathers sharded tensors on the CPU of rank 0."""

    def __init__(self, root: ItemHolder, full: bool = False):
        super().__init__(None, _gathered if full else torch.Tensor.detach)
        self._root = root

    @cached_property
    def parameter_names(self) -> Names:
        """Names of all parameters in the Context, by identity."""
        return parameter_names(self._root)

    def warn_unknown(self, path: str, item: object) -> None:
        """Name an object that cannot be saved, once for each Context."""
        if path in self._root._warned:
            return
        self._root._warned = self._root._warned | {path}
        advice = (
            "use drivetrain.SmartDataLoader, which saves its position in the data"
            if isinstance(item, torch.utils.data.DataLoader)
            else "give it state_dict() and load_state_dict(state)"
        )
        warn(
            f"{path} is a {type(item).__name__}, which has no state to save. To save it, {advice}; if this is intended, "
            f"call exclude({path.partition('.')[0]!r}) or begin its name with an underscore."
        )

    def pack_special(self, item: object, path: str) -> Saved:
        """Ask an item that has state of its own for it."""
        kind = kind_of(item)
        return kind.save(item, self, path) if kind.saves_itself else NotImplemented


def _gathered(tensor: torch.Tensor) -> torch.Tensor | None:
    full = tensor.detach()
    if is_dtensor(full):
        full = full.full_tensor()  # type: ignore[attr-defined]
    return full.cpu() if is_master() else None  # the others only take part


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
_COMMON = (*(kind() for kind in PLAIN - {type(None)}), None, {}, [], (), set(), torch.empty(0, device="cpu"))
_KINDS_OF_TYPES = {type(item): next(kind for kind in KINDS if kind.holds(item)) for item in _COMMON}


def kind_of(item: object) -> Kind:
    """Return the handler of an item."""
    return _KINDS_OF_TYPES.get(type(item)) or next(kind for kind in KINDS if kind.holds(item))


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
    """Return the name of every parameter in the modules of a Context, of the copies that optimizers train instead, and of trained tensors
    that are items themselves.
    """
    names: dict[int, str] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for path, kind, item in walk(root):
        if kind is MODULE_KIND:
            for name, parameter in named_clean_parameters(item):
                names.setdefault(id(parameter), join_path(path, name))
        elif isinstance(item, Tensor):
            names.setdefault(id(item), path)
        elif isinstance(item, Optimizer):
            copies += getattr(item, "_served", ())
    return names | {id(copy): names[id(parameter)] for parameter, copy in copies if id(parameter) in names}
