"""What an optimization method is: a name, a configuration, a stage, and one transform of a Context.

`parse` turns whatever a user or a file wrote into the method's frozen `Config`; `check` refuses what cannot work, before anything is
touched; `apply` does it. A configuration holds plain hashable values only, so a plan can be compared, hashed and written as JSON.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from drivetrain.core.errors import DrivetrainWarning, MethodConfigError, unknown_name

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext

Numerics = Literal["exact", "tf32", "mixed", "low"]
"""How far results may drift: not at all beyond rounding, TF32 products, 16-bit autocast, or 16-bit and 8-bit weights."""


class Stage(IntEnum):
    """When a method acts. The order is fixed; the order in which a user lists methods has no meaning."""

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
    """Nothing to set."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a plan is to be applied; what checks may look at."""

    device: torch.device
    world: int
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the mesh's axes."""
    names: frozenset[str] = frozenset()
    """Methods of the plan."""
    model: nn.Module | None = None

    def axis(self, name: str) -> int:
        """Return the size of an axis, 1 where there is none."""
        return self.axes.get(name, 1)


class Method:
    """The base of all methods; it accepts everything, changes nothing, and is overridden where that is wrong."""

    name: ClassVar[str]
    group: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = Stage.MODULE
    Config: ClassVar[type] = NoConfig
    conflicts: ClassVar[Mapping[str, str]] = {}
    """Methods that cannot stand beside this one, each with what to do."""
    needs_processes: ClassVar[bool] = False
    """Whether the method has no meaning on one process."""
    short: ClassVar[str | None] = None
    """The key that a bare value sets."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Other spellings of keys, from libraries that people come from."""
    deaf: ClassVar[tuple[str, ...]] = ()
    """Keys of those libraries that have no meaning here: they warn, by name."""
    why: ClassVar[str] = ""
    """What the method is good for, in half a sentence; `explain()` shows it."""

    # What the user wrote.

    def parse(self, config: Any = None) -> Any:
        """Return the `Config` for None, a dict, a `Config`, or the short form."""
        if isinstance(config, self.Config):
            return config
        if config is None:
            config = {}
        elif not isinstance(config, Mapping):
            if self.short is None:
                raise self.bad("config", config, "None or a dict" if self._keys() else "no configuration at all")
            config = {self.short: config}
        values: dict[str, Any] = {}
        for key, value in config.items():
            if key in self.deaf:
                warnings.warn(
                    f"{self.name}: the key {key!r} has no effect here and is left out.", DrivetrainWarning, stacklevel=4
                )
                continue
            name = self.renamed.get(key, key)
            if name not in self._keys():
                raise MethodConfigError(unknown_name("key", key, [*self._keys(), *self.renamed], where=self.name))
            values[name] = frozen(value)
        return self.Config(**self.read(values))

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check and convert the values of the keys that were given."""
        return values

    def plain(self, config: Any) -> dict[str, Any]:
        """Return a configuration as JSON holds it; `parse` turns it back into an equal one."""
        return {item.name: thawed(getattr(config, item.name)) for item in dataclasses.fields(config)}

    def _keys(self) -> list[str]:
        return [item.name for item in dataclasses.fields(self.Config)]

    def bad(self, key: str, given: Any, expected: str) -> MethodConfigError:
        """Return the error for a value that this method does not understand."""
        return MethodConfigError(f"{self.name}: {key}={given!r} is not understood; expected {expected}.")

    def expand(self, config: Any) -> dict[str, Any] | None:
        """Return the methods that this one stands for, each with what `parse` takes; None for a method of its own."""
        return None

    # Whether it can work.

    def check(self, config: Any, site: Site) -> None:
        """Raise where the method cannot run with this configuration; nothing has been changed yet."""

    def requires(self, profile: Any, device: torch.device, world: int) -> str | None:
        """Say why the method cannot be used on a device, or None."""
        return None

    def is_redundant(self, config: Any, site: Site) -> str | None:
        """Say why the method would do nothing in this place, or None; a redundant method is dropped with this reason."""
        if self.needs_processes and site.world == 1:
            return "it has no meaning on one process"
        return None

    # What a search asks.

    def candidates(self, profile: Any, device: torch.device, world: int) -> list[Any]:
        """Return the configurations that a search may try."""
        return [self.Config()] if self.requires(profile, device, world) is None else []

    def estimate(self, cost: Any, config: Any) -> Any:
        """Return the predicted cost with this method."""
        return cost

    # What it does.

    def stage_of(self, config: Any, site: Site) -> Stage:
        """Return when the method acts in this place."""
        return self.stage

    def apply(self, ctx: "PlanContext", config: Any) -> None:
        """Change the context."""

    def reason(self, config: Any) -> str:
        """Say in half a sentence what the method does here."""
        return self.why


def frozen(value: Any) -> Any:
    """Return a value with lists as tuples and mappings as tuples of pairs, so that it can be hashed."""
    if isinstance(value, Mapping):
        return tuple((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return value


def thawed(value: Any) -> Any:
    """Return a frozen value as JSON holds it."""
    return [thawed(item) for item in value] if isinstance(value, tuple) else value


def is_whole(value: Any, least: int = 1) -> bool:
    """Say whether a value is a whole number of at least `least`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def qualified_name(cls: type) -> str:
    """Return a class's full name, as a plan writes it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def as_selectors(value: Any) -> Any:
    """Return classes as their full names, so that a plan holds text only; everything else stays."""
    if isinstance(value, tuple | list):
        return tuple(map(as_selectors, value))
    return qualified_name(value) if isinstance(value, type) else value


def selected(model: nn.Module, value: Any) -> Any:
    """Return selectors with the full names of this model's classes turned into those classes; nothing is imported."""
    from drivetrain.module.classes import written_class

    classes = {qualified_name(cls): cls for module in model.modules() for cls in written_class(module).__mro__}
    if isinstance(value, tuple):
        return [classes.get(item, item) if isinstance(item, str) else item for item in value]
    return classes.get(value, value) if isinstance(value, str) else value
