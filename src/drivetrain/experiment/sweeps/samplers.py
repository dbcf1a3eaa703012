"""Who decides what is tried next: in order, at random, or (in a file of its own) by what has been learnt so far."""

import random
from collections.abc import Callable
from typing import Any

from drivetrain.core.errors import ParameterError, unknown_name
from drivetrain.experiment.run_folder import plain
from drivetrain.experiment.sweeps.space import Space
from drivetrain.experiment.sweeps.trial import Trial

NAMES = ("grid", "random", "optuna")


class Sampler:
    """Proposes trials and hears how they went."""

    def ask(self) -> Trial | None:
        """Return the next trial, None when there are no more."""
        raise NotImplementedError

    def tell(self, trial: Trial) -> None:
        """Hear how a trial ended."""

    def replay(self, trial: Trial) -> None:
        """Hear of a trial that an earlier part of the sweep asked for, in the order of asking."""

    def should_prune(self, trial: Trial, value: float, step: int) -> bool:
        """Say whether a running trial should be given up."""
        return False


class GridSampler(Sampler):
    """Every point once, in order."""

    def __init__(self, space: Space, n_trials: int | None = None):
        self._points = space.grid()[:n_trials]
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

    def __init__(self, space: Space, n_trials: int, seed: int = 0):
        self._space, self._n_trials, self._seed = space, n_trials, seed
        self._next = 0

    def ask(self) -> Trial | None:
        """Draw the next point."""
        if self._next >= self._n_trials:
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
        return {name: axis.draw(generator) for name, axis in self._space.axes.items()}


def make_sampler(
    sampler: "str | Sampler | Callable[..., Sampler]", space: Space, *, n_trials: int | None, seed: int, direction: str
) -> Sampler:
    """Return the sampler a user asked for, by name or as an object."""
    if isinstance(sampler, Sampler) or (not isinstance(sampler, str) and hasattr(sampler, "ask")):
        return sampler  # type: ignore[return-value]
    if n_trials is not None and (type(n_trials) is not int or n_trials < 1):
        raise ParameterError(f"n_trials: {n_trials!r} is not a number of trials. Give a whole number from 1 on.")
    if sampler == "grid":
        return GridSampler(space, n_trials)
    if sampler not in NAMES:
        raise ParameterError(unknown_name("sampler", sampler, NAMES))
    if n_trials is None:
        raise ParameterError(f"sampler {sampler!r} has no natural end. Say how many trials: n_trials=20.")
    if sampler == "random":
        return RandomSampler(space, n_trials, seed)
    from drivetrain.experiment.sweeps.optuna_sampler import OptunaSampler

    return OptunaSampler(space, n_trials, seed=seed, direction=direction)
