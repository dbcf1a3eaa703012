"""Samplers propose the trials of a sweep: in order, at random, or by what earlier trials showed (`optuna_search`)."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, ParameterError, unknown_name
from drivetrain.experiment.run_folder import plain
from drivetrain.experiment.sweeps.space import ParameterSpace
from drivetrain.experiment.sweeps.trial import Trial

if TYPE_CHECKING:
    from drivetrain.experiment.sweeps.optuna_search import OptunaConfig

NAMES = ("grid", "random", "optuna")


class Sampler:
    """Proposes trials and receives their results."""

    total: int | None = None
    """How many trials it will propose, None where it does not know."""

    def begin(self, sweep: str) -> None:
        """Prepare for one sweep, named by its folder."""

    def ask(self) -> Trial | None:
        """Return the next trial, None when there are no more."""
        raise NotImplementedError

    def tell(self, trial: Trial) -> None:
        """Receive a trial that ended."""

    def replay(self, trial: Trial) -> None:
        """Receive a trial that an earlier part of the sweep proposed, in the order of proposing."""

    def should_prune(self, trial: Trial, value: float, step: int) -> bool:
        """Return whether to stop a running trial early."""
        return False


class GridSampler(Sampler):
    """Every point once, in order."""

    def __init__(self, space: ParameterSpace, n_trials: int | None = None):
        self._points = space.grid()[:n_trials]
        self.total = len(self._points)
        self._next = 0

    def ask(self) -> Trial | None:
        """Return the next point."""
        if self._next >= len(self._points):
            return None
        self._next += 1
        return Trial(self._next - 1, dict(self._points[self._next - 1]))

    def replay(self, trial: Trial) -> None:
        """Skip a point; its values are those of the space, which a journal may hold in a plainer form."""
        if trial.index < len(self._points):
            trial.params = dict(self._points[trial.index])
        self._next = max(self._next, trial.index + 1)


class RandomSampler(Sampler):
    """Independent draws; trial number n is the same for the same seed, whatever happened before it."""

    total: int

    def __init__(self, space: ParameterSpace, n_trials: int, seed: int = 0):
        self._space, self.total, self._seed = space, n_trials, seed
        self._next = 0

    def ask(self) -> Trial | None:
        """Draw the next point."""
        if self._next >= self.total:
            return None
        self._next += 1
        return Trial(self._next - 1, self._draw(self._next - 1))

    def replay(self, trial: Trial) -> None:
        """Count a trial that was drawn before, and check that it was drawn from here."""
        if plain(self._draw(trial.index)) != plain(trial.params):
            raise ParameterError(f"the sweep's trial {trial.index} has other parameters than this seed and space give.")
        self._next = max(self._next, trial.index + 1)

    def _draw(self, index: int) -> dict[str, Any]:
        from drivetrain.runtime.seeds import derive_seed

        generator = random.Random(derive_seed(self._seed, "trial", index))
        if self._space.points is not None:
            return dict(generator.choice(self._space.points))
        return self._space.walk(lambda name, axis: axis.draw(generator))


def make_sampler(
    sampler: "str | Sampler | OptunaConfig",
    space: ParameterSpace,
    *,
    n_trials: int | None,
    seed: int,
    directions: Sequence[str],
) -> Sampler:
    """Return the sampler a user asked for: by name, by Optuna's configuration, or as an object."""
    if isinstance(sampler, Sampler) or hasattr(sampler, "ask"):
        return sampler  # type: ignore[return-value]
    if n_trials is not None and (type(n_trials) is not int or n_trials < 1):
        raise ParameterError(f"n_trials: {n_trials!r} is not a number of trials. Give a whole number from 1 on.")
    name = sampler_name(sampler)
    if name == "grid":
        return GridSampler(space, n_trials)
    if n_trials is None:
        raise ParameterError(f"sampler {name!r} has no natural end. Give the number of trials: n_trials=20.")
    if name == "random":
        return RandomSampler(space, n_trials, seed)
    from drivetrain.experiment.sweeps.optuna_search import OptunaSampler

    config = None if isinstance(sampler, str) else sampler
    return OptunaSampler(space, n_trials, seed=seed, direction=directions, config=config)


def sampler_name(sampler: "str | Sampler | OptunaConfig") -> str:
    """Return the name of a sampler as the journal holds it."""
    if isinstance(sampler, str):
        if sampler not in NAMES:
            raise ParameterError(unknown_name("sampler", sampler, NAMES))
        return sampler
    if isinstance(sampler, Sampler) or hasattr(sampler, "ask"):
        return type(sampler).__name__
    from drivetrain.experiment.sweeps.optuna_search import OptunaConfig

    if not isinstance(sampler, OptunaConfig):
        raise ConfigError(f"sampler={sampler!r}: expected one of {', '.join(NAMES)}, an OptunaConfig or a Sampler.")
    return "optuna"
