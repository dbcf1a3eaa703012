"""What an optimization method is: a name, a configuration, a stage, one transform of a Context, and all else that is known about it.

`parse` turns what a user or a file wrote into the method's frozen `Config`, which holds only plain hashable values, so that a plan can be
compared, hashed and written as JSON. `check` rejects what cannot work, before anything changes. `apply` changes the Context.

Search, trials and simulation know no method by name. They ask each method for its options, for the combinations it fits into, for
its effect on memory and time, and for what a simulation or a trial must know about it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, MethodConfigError, StrategyError, did_you_mean, unknown_name, warn
from drivetrain.core.types import Settings
from drivetrain.module.blocks import select_modules
from drivetrain.module.wrapping import user_class
from drivetrain.runtime.codec import names_in_scripts
from drivetrain.runtime.coders import class_name

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.batching import BatchSplit
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.profile.values import ModelProfile
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.cost import Cost
    from drivetrain.strategy.search.space import SearchScope

Numerics = Literal["exact", "tf32", "mixed", "low"]
"""How much results may change: only by rounding, TF32 products, 16-bit autocast, or 16-bit and 8-bit weights."""


Positive = Annotated[int, "at least 1"]
"""The type of a setting that is a whole number of at least 1."""
Function = Annotated[Any, "a function"]
"""The type of a setting that is a function, which a plan file cannot store."""
C = TypeVar("C")
"""The class of a method's configurations."""
Option = tuple[tuple[str, Any], ...]
"""One choice of a search: methods with their configurations. The empty option leaves the methods out."""


class Stage(IntEnum):
    """When a method is applied. The order is fixed; the order in which a user lists methods has no meaning."""

    MESH = 1
    MODULE = 2
    PIPELINE = 3
    TENSOR = 4
    SEQUENCE = 5
    CHECKPOINT = 6
    COMPILE_BLOCKS = 7
    SHELL = 8
    COMPILE_MODEL = 10
    OPTIMIZER = 11
    STEP = 12


@dataclass(frozen=True, kw_only=True)
class NoConfig:
    """A configuration without fields."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a plan is to be applied: what checks may read."""

    device: torch.device
    world: int
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the mesh's axes."""
    names: frozenset[str] = frozenset()
    """Methods of the plan."""
    model: nn.Module | None = None

    def axis(self, name: str) -> int:
        """Return the size of an axis, 1 if the mesh does not have it."""
        return self.axes.get(name, 1)


class Method(Generic[C]):
    """The base of all methods. It accepts everything and changes nothing; methods override what differs."""

    name: ClassVar[str]
    group: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    numerics: ClassVar[Numerics] = "exact"
    changes_gradient: ClassVar[bool] = False
    """Whether it changes what is trained, as adapters do: then only the loss must match the plain model, not the gradients."""
    stage: ClassVar[Stage] = Stage.MODULE
    Config: ClassVar[type] = NoConfig
    conflicts: ClassVar[Mapping[str, str]] = {}
    """Methods that cannot be used together with this one, each with what to do."""
    is_alone_in_group: ClassVar[bool] = False
    """Whether a plan has at most one method of the group."""
    lays_out_mesh: ClassVar[bool] = False
    """Whether its configuration has the `axes` and the `rank_order` of the mesh."""
    needs_processes: ClassVar[bool] = False
    """Whether the method has no meaning on one process."""
    short: ClassVar[str | None] = None
    """The key that a bare value sets."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Other names of keys, from other libraries."""
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of other libraries that have no effect here: each warns by name."""
    why: ClassVar[str] = ""
    """What the method does, as a short phrase; `explain()` shows it."""

    # What the user wrote.

    def parse(self, config: Any = None) -> C:
        """Return the `Config` for None, a dict, a `Config`, or the short form."""
        if isinstance(config, self.Config):
            return config  # type: ignore[return-value]
        if config is None:
            config = {}
        elif not isinstance(config, Mapping):
            if self.short is None:
                raise self.bad(
                    "config", config, "None or a dict" if dataclasses.fields(self.Config) else "no configuration at all"
                )
            config = {self.short: config}
        values: Settings = {}
        items = {item.name: item for item in dataclasses.fields(self.Config)}
        for key, value in config.items():
            if key in self.ignored_keys:
                warn(f"{self.name}: the key {key!r} has no effect and is ignored.")
                continue
            name = self.renamed.get(key, key)
            if name not in items:
                raise MethodConfigError(unknown_name("key", key, [*items, *self.renamed], where=self.name))
            values[name] = frozen(value)
        values = self.read(values)
        for name, value in values.items():
            self._check_type(items[name], value)
        return self.Config(**values)

    def read(self, values: Settings) -> Settings:
        """Convert the values that were given, and check what the types of the fields do not say."""
        return values

    def _check_type(self, item: "dataclasses.Field[Any]", given: object) -> None:
        """Reject a value of another type than bool, str, `Positive`, `Function` or a Literal, where that is the type of its field."""
        kinds = [kind for kind in get_args(item.type) if kind is not NoneType]
        may_be_none = NoneType in get_args(item.type)
        kind = kinds[0] if may_be_none and len(kinds) == 1 else item.type
        if given is item.default or (given is None and may_be_none):
            return
        if kind == Function and not callable(given):
            shown = f"{self.name}: {item.name}={given!r}"
            raise MethodConfigError(
                f"{shown} is not a function. A plan file cannot store one; pass the plan as a list."
            )
        expected, choices = None, get_args(kind) if get_origin(kind) is Literal else ()
        if choices and given not in choices:
            *first, last = map(repr, choices)
            expected = f"{', '.join(first)} or {last}" if first else last
        elif kind is bool and not isinstance(given, bool):
            expected = "True or False"
        elif kind is str and not isinstance(given, str):
            expected = "a text"
        elif kind == Positive and not is_whole(given):
            expected = "a whole number of at least 1"
        if expected is not None:
            expected += ", or None" if may_be_none else ""
            raise MethodConfigError(f"{self.bad(item.name, given, expected)}{did_you_mean(given, choices)}")

    def plain(self, config: C) -> Settings:
        """Return a configuration as JSON values. `parse` turns it back into an equal one."""
        return {item.name: to_json_value(getattr(config, item.name)) for item in dataclasses.fields(config)}  # type: ignore[arg-type]

    def selectors(
        self, key: str, given: object, expected: str = "classes or names of modules"
    ) -> str | tuple[str, ...]:
        """Return one selector of modules or several, with classes as their full names, so that a plan holds only text."""
        several = given if isinstance(given, tuple) else (given,)
        names = tuple(class_name(one) if isinstance(one, type) else one for one in several)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise self.bad(key, given, expected)
        return names if isinstance(given, tuple) else names[0]

    def bad(self, key: str, given: object, expected: str) -> MethodConfigError:
        """Return the error for an invalid value."""
        return MethodConfigError(f"{self.name}: {key}={given!r} is not valid; expected {expected}.")

    def expand(self, config: C) -> Settings | None:
        """Return the methods that this one combines, each with the value for its `parse`; None if it combines none."""
        return None

    # Whether it can work.

    def check(self, config: C, site: Site) -> None:
        """Raise if the method cannot run with this configuration. Nothing has changed yet."""

    def require_axis(self, site: Site, size: int = 2) -> None:
        """Raise unless the mesh has the method's axis; `size` is an example of one."""
        if site.axis(str(self.axis)) == 1:
            example = f"('parallel_mode', [({self.axis!r}, {size}), ('data', 1)])"
            raise StrategyError(f"{self.name}: the mesh has no {self.axis!r} axis. Add {example} or another size.")

    def clash(self, config: C, others: Mapping[str, Any], device: torch.device) -> str | None:
        """Return why the configuration contradicts that of another method, and what to do; None if it does not."""
        return None

    def requires(self, profile: "ModelProfile | None", device: torch.device, world: int) -> str | None:
        """Return why the method cannot be used on a device, or None."""
        return None

    def is_redundant(self, config: C, site: Site) -> str | None:
        """Return why the method would have no effect here, or None. A redundant method is dropped with this reason."""
        if self.needs_processes and site.world == 1:
            return "it needs more than one process"
        return None

    # What a search asks.

    dimension: ClassVar[str | None] = None
    """Methods of one dimension are alternatives to each other; None: the method has its own dimension."""
    is_searched: ClassVar[bool] = True
    """Whether a search chooses it; otherwise it is used only if it is included."""
    stays_idle: ClassVar[bool] = False
    """Whether it stays in a plan that includes it although it has no effect there."""
    axis: ClassVar[str | None] = None
    """The axis of the mesh that this method alone uses."""
    shards_axis: ClassVar[str | None] = None
    """The axis along which it splits parameters and gradients that data ranks share."""
    splits_optimizer: ClassVar[bool] = False
    """Whether it splits nothing but the optimizer's state over data ranks."""
    copies_parameters: ClassVar[bool] = False
    """Whether the optimizer may train copies of the parameters instead of them."""
    unproved_on: ClassVar[frozenset[str]] = frozenset()
    """Kinds of devices on which it helps only sometimes, so that it is not chosen without a trial."""
    is_minor: ClassVar[bool] = False
    """Whether two plans that differ only in it give the same information in a trial."""
    is_simple: ClassVar[bool] = False
    """Whether it does not count as a method when ties are broken by the number of methods."""
    must_win: ClassVar[bool] = False
    """Whether the fastest plan is also tried without it, before it is chosen."""

    def local_candidates(self, device: torch.device, world: int) -> tuple[C, ...]:
        """Return configurations that depend on this process, such as its CPUs. All ranks use the result of rank 0."""
        return ()

    def options(self, scope: "SearchScope") -> list[Option]:
        """Return what a search may do with the method. Leaving it out is added unless the method must be used.

        A method that states no effect on cost is offered only where it must be used: it could only make a plan less simple.
        """
        states_effect = any(getattr(type(self), name) is not getattr(Method, name) for name in ("affect", "estimate"))
        if not scope.must(self.name) and not (states_effect and scope.usable(self)):
            return []
        configs = scope.kept(self.name) or [*scope.base(self.name), self.parse(None)]
        return [((self.name, config),) for config in dict.fromkeys(configs)]

    def may_be_left_out(self, scope: "SearchScope") -> bool:
        """Return whether a search also compares plans without the method."""
        return True

    def flag_options(self, scope: "SearchScope", is_sensible: bool) -> list[Option]:
        """Return the single option of a method without settings, if it is sensible and possible here."""
        is_offered = scope.must(self.name) or (is_sensible and scope.usable(self))
        return [((self.name, scope.config(self)),)] if is_offered else []

    def axis_sizes(self, scope: "SearchScope") -> list[int]:
        """Return sizes of the method's axis that the model and the machine allow, without 1."""
        return []

    def axis_options(self, scope: "SearchScope", size: int, micro: int, accumulation: int) -> list[Option]:
        """Return the options on a mesh with the method's axis. An empty result rejects the mesh for this batch split."""
        return [((self.name, scope.config(self)),)]

    def splits(self, scope: "SearchScope", per_rank: int) -> list[tuple[int, int]] | None:
        """Return pairs of micro-batch and accumulation for a rank's part of a batch; None if the method does not split batches."""
        return None

    def implied(self, candidate: "Candidate") -> Settings | None:
        """Return the settings that a candidate's mesh and batch split imply; None if they do not need the method."""
        return None

    def settled(self, config: C, candidate: "Candidate") -> C:
        """Return a plan's configuration as a search would write it, with open settings filled in."""
        return config

    def fits(self, config: C, candidate: "Candidate") -> str | None:
        """Return why a search should not use the method in this combination, or None.

        It is asked when the combination has the methods that come earlier in the registry, and again when it has all. The first reason is
        final, so a method that needs another one is registered after it.
        """
        return None

    def affect(self, effects: "Effects", config: C) -> None:
        """Change the numbers that memory and time are predicted from."""

    def estimate(self, cost: "Cost", config: C) -> "Cost":
        """Return the predicted cost with this method, where `affect` cannot express its effect."""
        return cost

    def amount(self, config: C) -> int:
        """Return how much memory the method saves, to order the options of its dimension; 0 if they are not ordered."""
        return 0

    short_label: ClassVar[str | None] = None
    """The label where it does not depend on the configuration; None: the name."""

    def label(self, config: C) -> str:
        """Return the method in one or two words for tables; empty if the mesh or the precision already names it."""
        return self.name if self.short_label is None else self.short_label

    # What a new world, a simulation or a trial asks.

    not_simulated: ClassVar[str | None] = None
    """Why the method is not simulated on fake tensors; None: it is."""
    prevents_simulation: ClassVar[str | None] = None
    """Why a plan with the method cannot be simulated on fake tensors."""
    compiles: ClassVar[bool] = False
    """Whether the first steps compile."""
    records_kernels: ClassVar[bool] = False
    """Whether kernels are recorded and write every gradient into the same memory."""
    warm_up_steps: ClassVar[int] = 0
    """Additional steps before the timing is representative."""
    leaves_no_trace: ClassVar[bool] = False
    """Whether a process can be reused after a trial, when its settings are restored and its memory is released."""
    sets_update_loop: ClassVar[bool] = False
    """Whether it decides how the optimizer iterates over the parameters."""

    def scaled_to(self, config: C, axes: Mapping[str, int], batch: "BatchSplit | None") -> C:
        """Return the configuration for another mesh and batch split."""
        return config

    def batch_split(self, config: C) -> tuple[int | None, int | None] | None:
        """Return the micro-batch and accumulation that a configuration sets; None if the method does not split batches."""
        return None

    def simulated(self, config: C) -> C:
        """Return the configuration that replaces this one on fake tensors."""
        return config

    def period(self, config: C) -> int | None:
        """Return after how many blocks its effect repeats; None if a model with few blocks cannot represent one with many."""
        return 1

    def pinned(self, config: C, names: Iterable[str], units: tuple[str, ...], repeated: tuple[str, ...]) -> Option:
        """Return the method with "auto" replaced by names of units or repeated blocks. `names` are the methods of the plan."""
        return ((self.name, config),)

    def on_host(self, config: C, is_sharded: bool) -> tuple[str, ...]:
        """Return the categories of memory that the method keeps on the host."""
        return ()

    def sample_multiple(self, config: C, site: Site) -> int:
        """Return what the number of samples of one pass must be a multiple of."""
        return 1

    # What it does.

    def select(self, model: nn.Module, what: object) -> list[tuple[str, nn.Module]]:
        """Return names and modules of the model that selectors name, as `select_modules` does."""
        with config_errors():
            return select_modules(model, selected(model, what), where=self.name)

    def stage_of(self, config: C, site: Site) -> Stage:
        """Return when the method is applied here."""
        return self.stage

    def apply(self, ctx: "Application", config: C) -> None:
        """Change the Context."""

    def reason(self, config: C) -> str:
        """Return in a few words what the method does here."""
        return self.why


@contextmanager
def config_errors(where: str = "") -> Iterator[None]:
    """Raise a ConfigError of what a method calls as a MethodConfigError, with `where` before its message."""
    try:
        yield
    except ConfigError as error:
        raise MethodConfigError(f"{where}{error}") from error


def frozen(value: object) -> Any:
    """Return a value with lists as tuples, mappings as tuples of pairs and numbers of numpy as Python's, so that it can be hashed."""
    if isinstance(value, Mapping):
        return tuple((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def to_json_value(value: object) -> Any:
    """Return a frozen value as JSON values."""
    return [to_json_value(item) for item in value] if isinstance(value, tuple) else value


def is_whole(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer of at least `least`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def selected(model: nn.Module, value: object) -> Any:
    """Return selectors with full class names replaced by the classes of this model. Nothing is imported."""
    kinds = {cls for module in model.modules() for cls in user_class(module).__mro__}
    classes = {name: cls for cls in kinds for name in names_in_scripts(cls)}
    if isinstance(value, tuple):
        return [classes.get(item, item) if isinstance(item, str) else item for item in value]
    return classes.get(value, value) if isinstance(value, str) else value
