"""Samplers propose the trials of a sweep: in order, at random, or by what earlier trials showed (`optuna_search`)."""

import random

from drivetrain.core.errors import ParameterError
from drivetrain.core.types import Settings
from drivetrain.experiment.run_folder import plain
from drivetrain.experiment.sweeps.space import ParameterSpace
from drivetrain.experiment.sweeps.trial import Trial

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

    def _draw(self, index: int) -> Settings:
        from drivetrain.runtime.seeds import derive_seed

        generator = random.Random(derive_seed(self._seed, "trial", index))
        if self._space.points is not None:
            return dict(generator.choice(self._space.points))
        return self._space.walk(lambda name, axis: axis.draw(generator))
