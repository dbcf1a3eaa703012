"""The constraints of a search, checked once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drivetrain.core.display import parse_size
from drivetrain.core.errors import ConfigError, ConflictError, UnknownMethodError
from drivetrain.strategy.device_spec import DeviceSpec
from drivetrain.strategy.registry import expand_names, find_method, group_names
from drivetrain.strategy.value import Strategy

NUMERICS = {"exact": ("exact",), "mixed": ("exact", "tf32", "mixed"), "low": ("exact", "tf32", "mixed", "low")}
"""For each ceiling, the kinds of methods that a search may use."""


@dataclass(frozen=True, kw_only=True)
class SearchConstraints:
    """The limits of a search."""

    time_limit: float = 120.0
    """Seconds for all of it; 0 measures nothing."""
    numerics: str = "mixed"
    memory_budget: float | int | str = 0.92
    """A share of the free memory, bytes, or a text such as "16GiB"."""
    excluded: frozenset[str] = frozenset()
    """Names of methods and groups that are never used."""
    included: tuple[Any, ...] = ()
    """Names of methods or groups, or `(name, config)`; each is in the result, of a group at least one."""
    start: Strategy | None = None
    """A plan whose methods and axes are kept, and whose settings are searched."""
    plan_only: bool = False
    spec: DeviceSpec | None = None
    """The device to plan for, if it is not this machine's."""
    strict: bool = False
    allow_batch_rounding: bool = False

    def __post_init__(self) -> None:
        limit = self.time_limit
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 <= limit < math.inf:
            raise ConfigError(f"time_limit={limit!r}: expected seconds, 0 for a search that measures nothing.")
        if self.numerics not in NUMERICS:
            raise ConfigError(f"numerics={self.numerics!r}: expected {', '.join(map(repr, NUMERICS))}.")
        parse_memory(self.memory_budget)
        unwanted = self.unwanted()
        for name in self._included_names():
            members = expand_names([name])
            if not (name in group_names() and members - unwanted):
                _reject_both(members & unwanted)
        if self.start is not None:
            _reject_excluded(self.start, unwanted)

    def unwanted(self) -> set[str]:
        """Return the names of the methods that must not be used."""
        return expand_names(self.excluded)

    def wanted(self) -> list[frozenset[str]]:
        """Return sets of names. A plan must have at least one name of each set."""
        return [frozenset(expand_names([name]) - self.unwanted()) for name in self._included_names()]

    def _included_names(self) -> list[str]:
        return [item[0] if isinstance(item, tuple | list) else item for item in self.included]

    def configured(self) -> dict[str, Any]:
        """Return the settings of the methods that were included with settings."""
        found = {}
        for item in self.included:
            if isinstance(item, tuple | list) and len(item) > 1 and item[1] is not None:
                try:
                    method = find_method(item[0])
                except UnknownMethodError:
                    raise ConfigError(
                        f"included={item!r}: {item[0]!r} is a group, and groups have no settings. Name one of its methods."
                    ) from None
                found[method.name] = method.parse(item[1])
        return found


def with_included(plan: Strategy, included: Iterable[object] | None, excluded: Iterable[str] | None) -> Strategy:
    """Return a plan with everything that must be in it. An excluded method in it raises."""
    wanted = [item if isinstance(item, tuple | list) else (item,) for item in included or ()]
    unwanted = expand_names(excluded or ())
    _reject_both(expand_names(item[0] for item in wanted) & unwanted)
    _reject_excluded(plan, unwanted)
    for item in wanted:
        members = expand_names(item[:1])
        if members & set(plan.opt_names()):
            continue
        if item[0] in group_names() and len(members) > 1:
            raise ConfigError(
                f"included={item[0]!r} is a group, and the plan has none of its methods: {', '.join(sorted(members))}. Name one of them."
            )
        plan = plan.add_opt(item)
    return plan


def _reject_both(names: Iterable[str]) -> None:
    if names:
        raise ConflictError(f"{', '.join(sorted(names))}: both included and excluded. Remove it from one of the lists.")


def _reject_excluded(plan: Strategy, unwanted: set[str]) -> None:
    present = [name for name in plan.opt_names() if name in unwanted]
    if present:
        raise ConflictError(
            f"{', '.join(present)}: excluded, but in the plan that load_strategy gives. Remove it from one of them."
        )


def parse_memory(value: float | int | str) -> float | int:
    """Return a share of memory (a float of at most 1) or a number of bytes.

    >>> parse_memory("16GiB"), parse_memory(0.5)
    (17179869184, 0.5)
    """
    if isinstance(value, str):
        size = parse_size(value)
        if size is not None:
            return size
    elif (isinstance(value, float) and 0 < value <= 1) or (type(value) is int and value > 0):
        return value
    raise ConfigError(
        f"memory_budget={value!r}: expected a fraction of the free memory (a float up to 1), a number of bytes, or a text such as '16GiB'."
    )


def budget_bytes(value: float | int | str, free: float) -> float:
    """Return how many bytes a plan may need on one rank."""
    parsed = parse_memory(value)
    return parsed * free if isinstance(parsed, float) else float(parsed)
