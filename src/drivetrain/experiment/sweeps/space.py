"""Which values a sweep tries: a list of parameter dicts, or a range for each parameter."""

import copy
import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from drivetrain.core.errors import ParameterError, unknown_name
from drivetrain.core.plain import ADDRESS, plain
from drivetrain.core.secret import MASK
from drivetrain.core.types import Settings
from drivetrain.experiment.parameters import ParameterSet
from drivetrain.experiment.resolve import full_names, given_in_python
from drivetrain.experiment.sweeps.trial import without_secrets

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

OWN_FOLDER = ("run_name", "resume", "subprocess", "local_rank")
"""Parameters that a sweep sets itself: it gives every trial its folder."""


class Axis:
    """The values of one parameter, in all points or only where other parameters have certain values."""

    conditions: Mapping[str, tuple[object, ...]] = {}
    """Values of other parameters for which this one is varied; otherwise it has its default."""

    def when(self, conditions: Mapping[str, object] | None = None, /, **named: object) -> Self:
        """Return the axis for points in which other parameters have these values, one or several each.

        >>> Uniform(0.5, 0.99).when(optimizer="sgd")
        Uniform(low=0.5, high=0.99).when(optimizer='sgd')
        """
        given = {**(conditions or {}), **named}
        if not given:
            raise ParameterError("when() has no conditions. Name other parameters, as in when(optimizer='sgd').")
        twin = copy.copy(self)
        as_tuple = lambda value: tuple(value) if isinstance(value, list | tuple) else (value,)
        values = {name.replace("-", "_"): as_tuple(value) for name, value in given.items()}
        object.__setattr__(twin, "conditions", {**self.conditions, **values})
        return twin

    def applies(self, point: Mapping[str, object]) -> bool:
        """Return whether the parameter is varied where others have the values of a point."""
        return all(name in point and point[name] in values for name, values in self.conditions.items())

    def _shown(self, own: str) -> str:
        """Return the axis as it is written, with its conditions."""
        shown = [f"{name}={(one[0] if len(one) == 1 else list(one))!r}" for name, one in self.conditions.items()]
        return f"{own}.when({', '.join(shown)})" if shown else own

    def grid(self) -> Sequence[object] | None:
        """Return all values, None where there is no end of them."""
        return None

    def draw(self, generator: random.Random) -> object:
        """Return one value at random."""
        raise NotImplementedError

    def examples(self) -> Sequence[object]:
        """Return values by which the axis can be checked against its parameter; those it was made with."""
        return self.grid() or ()


class Choice(Axis):
    """One of the values given: `Choice("sgd", "adam")`."""

    def __init__(self, *values: object):
        if not values:
            raise ParameterError("Choice() has no values. Give at least one, as in Choice(1, 2, 4).")
        self.values = values

    def grid(self) -> Sequence[object]:
        return self.values

    def draw(self, generator: random.Random) -> object:
        return generator.choice(self.values)

    def __repr__(self) -> str:
        return self._shown(f"Choice({', '.join(map(repr, self.values))})")


@dataclass(frozen=True, repr=False)
class _Range(Axis):
    low: float
    high: float

    def __post_init__(self) -> None:
        finite = all(isinstance(end, int | float) and math.isfinite(end) for end in (self.low, self.high))
        if not finite or not self.low < self.high:
            raise ParameterError(
                f"{type(self).__name__}({self.low!r}, {self.high!r}): expected two finite numbers, the smaller one first."
            )

    def examples(self) -> Sequence[float]:
        return (self.low, self.high)

    def __repr__(self) -> str:
        return self._shown(f"{type(self).__name__}(low={self.low!r}, high={self.high!r})")


class Uniform(_Range):
    """Any number between two, each as likely: `Uniform(0.0, 0.5)`."""

    def draw(self, generator: random.Random) -> float:
        return generator.uniform(self.low, self.high)


class LogUniform(_Range):
    """Any number between two, each order of magnitude as likely: `LogUniform(1e-4, 1e-1)`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise ParameterError(f"LogUniform({self.low!r}, {self.high!r}): both ends must be above zero. Use Uniform.")

    def draw(self, generator: random.Random) -> float:
        drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)


class IntRange(_Range):
    """Any whole number from one to another, both included: `IntRange(1, 8)`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.low, int) or not isinstance(self.high, int):
            raise ParameterError(f"IntRange({self.low!r}, {self.high!r}): expected whole numbers.")

    def grid(self) -> Sequence[int]:
        return range(int(self.low), int(self.high) + 1)

    def draw(self, generator: random.Random) -> int:
        return generator.randint(int(self.low), int(self.high))


AXES: dict[str, Callable[..., Axis]] = {kind.__name__: kind for kind in (Choice, Uniform, LogUniform, IntRange)}


def param_matrix(**values: object) -> list[Settings]:
    """Return every combination: a list or tuple is an axis, anything else a constant; the last name changes fastest.

    >>> param_matrix(a=[1, 2], b="x")
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    axes = [value if isinstance(value, list | tuple) else [value] for value in values.values()]
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*axes)]


@dataclass(frozen=True)
class ParameterSpace:
    """What a sweep may try: either fixed points, or an axis for each parameter."""

    points: tuple[Settings, ...] | None
    axes: dict[str, Axis]

    def walk(self, choose: Callable[[str, Axis], object]) -> Settings:
        """Return a point: `choose` gives the value of each parameter that applies, those that conditions name first."""
        found: Settings = {}
        for name in self.order:
            if self.axes[name].applies(found):
                found[name] = choose(name, self.axes[name])
        return {name: found[name] for name in self.axes if name in found}

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """The parameters in keyword order, save that each comes after those that its conditions name."""
        done: dict[str, None] = {}

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                raise ParameterError(f"the conditions of {' -> '.join((*path, name))} form a cycle.")
            for other, values in self.axes[name].conditions.items():
                if other not in self.axes:
                    raise ParameterError(f"{name}: {unknown_name('parameter of this space', other, self.axes)}")
                choices = self.axes[other].grid()
                for value in values:
                    if choices is not None and value not in choices:
                        raise ParameterError(
                            f"{name}: it is varied only where {other}={value!r}, a value that {other} never takes: {self.axes[other]!r}."
                        )
                visit(other, (*path, name))
            done.setdefault(name)

        for name in self.axes:
            visit(name, ())
        return tuple(done)

    def grid(self) -> list[Settings]:
        """Return all points, in keyword order; a continuous axis has no grid."""
        if self.points is not None:
            return [dict(point) for point in self.points]
        endless = [name for name, axis in self.axes.items() if axis.grid() is None]
        if endless:
            raise ParameterError(
                f"sampler 'grid' cannot list all values of {', '.join(endless)} ({self.axes[endless[0]]!r}). Give a Choice, or "
                "use sampler='random' with n_trials=..."
            )
        points: list[Settings] = [{}]
        for name in self.order:
            axis = self.axes[name]
            points = [
                {**point, **more}
                for point in points
                for more in ([{name: value} for value in axis.grid() or ()] if axis.applies(point) else [{}])
            ]
        return [{name: point[name] for name in self.axes if name in point} for point in points]

    def describe(self, secrets: Collection[str] = ()) -> list[object]:
        """Return what makes two spaces the same, in plain values; secrets are masked."""
        text_of = lambda value: ADDRESS.sub("", repr(value))
        if self.points is not None:
            shown = [without_secrets(point, secrets) for point in self.points]
            return [sorted((name, text_of(value)) for name, value in point.items()) for point in shown]
        return [[name, MASK if _is_secret(name, secrets) else text_of(axis)] for name, axis in self.axes.items()]

    def as_data(self, secrets: Collection[str] = ()) -> Settings | None:
        """Return plain values from which `space_from` makes the space again, None where it holds secrets or other objects."""
        names = self.axes if self.points is None else [name for point in self.points for name in point]
        if any(_is_secret(name, secrets) for name in names):
            return None
        if self.points is not None:
            return plain({"points": self.points})
        if any(type(axis).__name__ not in AXES for axis in self.axes.values()):
            return None
        axes = self.axes.items()
        return plain({"axes": [[name, type(axis).__name__, axis.examples(), axis.conditions] for name, axis in axes]})


def _is_secret(name: str, secrets: Collection[str]) -> bool:
    """Return whether a parameter is a secret, or a group of parameters that has one."""
    return any(f"{secret}.".startswith(f"{name}.") for secret in secrets)


def space_from(data: object, experiment: "Experiment", described: object) -> object | None:
    """Return the space that a journal holds, as it was: with plain values or with values of the parameters' types; None if neither fits."""
    for is_typed in (False, True):

        def value_of(name: str, value: object, is_typed: bool = is_typed) -> object:
            return experiment.parameters[name].read(value, is_text=False, where="sweep") if is_typed else value

        try:
            space = _rebuilt(data, value_of)
            made = make_space(space, experiment.parameters)
            if json.loads(json.dumps(made.describe(experiment.parameters.secrets))) == described:
                return space
        except (ParameterError, KeyError, TypeError, ValueError, AttributeError):
            continue
    return None


def _rebuilt(data: Any, value_of: Callable[[str, object], object]) -> object:
    if "points" in data:
        return [{name: value_of(name, value) for name, value in point.items()} for point in data["points"]]
    space = {}
    for name, kind, values, *rest in data["axes"]:
        axis = AXES[kind](*(value_of(name, value) if kind == "Choice" else value for value in values))
        conditions = {
            other: [value_of(other, value) for value in given] for other, given in (rest[0] if rest else {}).items()
        }
        space[name] = axis.when(conditions) if conditions else axis
    return space


def make_space(space: object, parameters: ParameterSet) -> ParameterSpace:
    """Read what a user gave: a list of dicts, or a mapping of names to axes, lists and constants."""
    if isinstance(space, Mapping):
        if not space:
            raise ParameterError(
                "the space of a sweep is empty. Give at least one parameter, as in {'lr': Choice(0.1, 0.2)}."
            )
        axes = {}
        for name, value in full_names(space, parameters).items():
            values = value if isinstance(value, list | tuple) else [value]
            axes[name] = value if isinstance(value, Axis) else Choice(*values)
        return ParameterSpace(None, axes)
    points = list(space) if isinstance(space, list | tuple) else None
    if not points or not all(isinstance(point, Mapping) for point in points):
        raise ParameterError(
            f"the space of a sweep cannot be {space!r}. Expected a list of parameter dicts (see param_matrix), or a dict such as "
            "{'lr': LogUniform(1e-4, 1e-1)}."
        )
    return ParameterSpace(tuple(full_names(point, parameters) for point in points), {})


def check_space(experiment: "Experiment", space: ParameterSpace, fixed: Mapping[str, object]) -> None:
    """Check every name, condition and example value against the experiment's parameters, before the first trial."""
    _ = space.order
    samples: list[Mapping[str, object]] = [fixed, *(space.points or ())]
    # A draw as well: both ends of a range may be whole numbers.
    tried = {name: (*axis.examples(), axis.draw(random.Random(0))) for name, axis in space.axes.items()}
    samples += [{name: value} for name, values in tried.items() for value in values]
    for sample in samples:
        for name, given in given_in_python(sample, experiment.parameters, "sweep", takes_choices=True).items():
            if name in OWN_FOLDER:
                raise ParameterError(
                    f"sweep: {name} is set by the sweep itself, which gives every trial its own folder."
                )
            if name not in experiment.parameters:  # a choice of a config group, which needs the parameter file
                whole = {other: axis.examples()[0] for other, axis in space.axes.items()}
                experiment.resolve({**fixed, **whole, **sample})
            elif given.value is not None:
                experiment.parameters[name].read(given.value, is_text=False, where="sweep")
