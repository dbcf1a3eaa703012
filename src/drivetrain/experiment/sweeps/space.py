"""Which values a sweep tries: a list of parameter dicts, or a range for each parameter."""

import itertools
import json
import math
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from drivetrain.core.errors import ParameterError
from drivetrain.core.secret import MASK, masked
from drivetrain.experiment.resolve import given_in_python
from drivetrain.experiment.run_folder import plain

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

OWN_FOLDER = ("run_name", "resume", "subprocess", "local_rank")
"""Parameters that a sweep sets itself: it gives every trial its folder."""


class Axis:
    """The values of one parameter."""

    def grid(self) -> Sequence[Any] | None:
        """Return all values, None where there is no end of them."""
        return None

    def draw(self, generator: random.Random) -> Any:
        """Return one value at random."""
        raise NotImplementedError

    def examples(self) -> Sequence[Any]:
        """Return values by which the axis can be checked against its parameter."""
        raise NotImplementedError

    @property
    def arguments(self) -> list[Any]:
        """What the axis was made with."""
        return list(self.examples())


class Choice(Axis):
    """One of the values given: `Choice("sgd", "adam")`."""

    def __init__(self, *values: object):
        if not values:
            raise ParameterError("Choice() has no values. Give at least one, as in Choice(1, 2, 4).")
        self.values = values

    def grid(self) -> Sequence[Any]:
        return self.values

    def draw(self, generator: random.Random) -> Any:
        return generator.choice(self.values)

    def examples(self) -> Sequence[Any]:
        return self.values

    def __repr__(self) -> str:
        return f"Choice({', '.join(map(repr, self.values))})"


@dataclass(frozen=True)
class _Range(Axis):
    low: float
    high: float

    def __post_init__(self) -> None:
        finite = all(isinstance(end, int | float) and math.isfinite(end) for end in (self.low, self.high))
        if not finite or not self.low < self.high:
            raise ParameterError(
                f"{type(self).__name__}({self.low!r}, {self.high!r}): expected two finite numbers, the smaller one first."
            )

    def examples(self) -> Sequence[Any]:
        return (self.low, self.high)


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


def param_matrix(**values: object) -> list[dict[str, Any]]:
    """Return every combination: a list or tuple is an axis, anything else a constant; the last name changes fastest.

    >>> param_matrix(a=[1, 2], b="x")
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    axes = [value if isinstance(value, list | tuple) else [value] for value in values.values()]
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*axes)]


@dataclass(frozen=True)
class ParameterSpace:
    """What a sweep may try: either fixed points, or an axis for each parameter."""

    points: tuple[dict[str, Any], ...] | None
    axes: dict[str, Axis]

    def grid(self) -> list[dict[str, Any]]:
        """Return all points, in keyword order; a continuous axis has no grid."""
        if self.points is not None:
            return [dict(point) for point in self.points]
        endless = [name for name, axis in self.axes.items() if axis.grid() is None]
        if endless:
            raise ParameterError(
                f"sampler 'grid' cannot list all values of {', '.join(endless)} ({self.axes[endless[0]]!r}). Give a Choice, or "
                "use sampler='random' with n_trials=..."
            )
        return param_matrix(**{name: list(axis.grid() or ()) for name, axis in self.axes.items()})

    def describe(self, secrets: Container[str] = ()) -> list[Any]:
        """Return what makes two spaces the same, in plain values; secrets are masked."""
        if self.points is not None:
            shown = [
                {name: masked(value, is_secret=name in secrets) for name, value in point.items()}
                for point in self.points
            ]
            return [sorted((name, repr(value)) for name, value in point.items()) for point in shown]
        return [[name, MASK if name in secrets else repr(axis)] for name, axis in self.axes.items()]

    def as_data(self, secrets: Container[str] = ()) -> dict[str, Any] | None:
        """Return plain values from which `space_from` makes the space again, None where it holds secrets or other objects."""
        if self.points is not None:
            points = [plain(point) for point in self.points]
            return None if any(name in secrets for point in points for name in point) else {"points": points}
        if any(name in secrets or type(axis).__name__ not in AXES for name, axis in self.axes.items()):
            return None
        return {"axes": [[name, type(axis).__name__, plain(axis.arguments)] for name, axis in self.axes.items()]}


def space_from(data: object, experiment: "Experiment", described: object) -> object | None:
    """Return the space that a journal holds, as it was: with plain values or with values of the parameters' types; None if neither fits."""
    for is_typed in (False, True):

        def value_of(name: str, value: Any, is_typed: bool = is_typed) -> Any:
            return experiment.parameters[name].read(value, is_text=False, where="sweep") if is_typed else value

        try:
            space: Any = _rebuilt(data, value_of)
            if json.loads(json.dumps(make_space(space).describe(experiment.parameters.secrets))) == described:
                return cast(object, space)
        except (ParameterError, KeyError, TypeError, ValueError, AttributeError):
            continue
    return None


def _rebuilt(data: Any, value_of: Callable[[str, Any], Any]) -> Any:
    if "points" in data:
        return [{name: value_of(name, value) for name, value in point.items()} for point in data["points"]]
    space = {}
    for name, kind, values in data["axes"]:
        space[name] = AXES[kind](*(value_of(name, value) if kind == "Choice" else value for value in values))
    return space


def make_space(space: object) -> ParameterSpace:
    """Read what a user gave: a list of dicts, or a mapping of names to axes, lists and constants."""
    if isinstance(space, Mapping):
        if not space:
            raise ParameterError(
                "the space of a sweep is empty. Give at least one parameter, as in {'lr': Choice(0.1, 0.2)}."
            )
        return ParameterSpace(None, {str(name): _axis(value) for name, value in space.items()})
    points = list(space) if isinstance(space, list | tuple) else None
    if not points or not all(isinstance(point, Mapping) for point in points):
        raise ParameterError(
            f"the space of a sweep cannot be {space!r}. Expected a list of parameter dicts (see param_matrix), or a dict such as "
            "{'lr': LogUniform(1e-4, 1e-1)}."
        )
    return ParameterSpace(tuple(dict(point) for point in points), {})


def _axis(value: object) -> Axis:
    if isinstance(value, Axis):
        return value
    return Choice(*value) if isinstance(value, list | tuple) else Choice(value)


def check_space(experiment: "Experiment", space: ParameterSpace, fixed: Mapping[str, object]) -> None:
    """Check every name and example value against the experiment's parameters, before the first trial."""
    samples: list[Mapping[str, Any]] = [fixed, *(space.points or ())]
    samples += [{name: value} for name, axis in space.axes.items() for value in axis.examples()]
    for sample in samples:
        for name, given in given_in_python(sample, experiment.parameters, "sweep").items():
            if name in OWN_FOLDER:
                raise ParameterError(
                    f"sweep: {name} is set by the sweep itself, which gives every trial its own folder."
                )
            if given.value is not None:
                experiment.parameters[name].read(given.value, is_text=False, where="sweep")
