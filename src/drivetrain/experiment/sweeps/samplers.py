"""Samplers propose the trials of a sweep: in order, at random, or by what earlier trials showed.

The last is Optuna (Akiba et al., 2019): a tree-structured Parzen estimator proposes, a median rule stops bad trials early.
"""

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

from drivetrain.core.errors import MissingExtra, ParameterError, unknown_name
from drivetrain.experiment.run_folder import plain
from drivetrain.experiment.sweeps.space import Choice, IntRange, LogUniform, ParameterSpace, Uniform
from drivetrain.experiment.sweeps.trial import FINISHED, PRUNED, Trial

NAMES = ("grid", "random", "optuna")


class Sampler:
    """Proposes trials and receives their results."""

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

    def __init__(self, space: ParameterSpace, n_trials: int, seed: int = 0):
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


class OptunaSampler(Sampler):
    """Ask an Optuna study; a study of your own brings its own sampler and pruner."""

    def __init__(
        self, space: ParameterSpace, n_trials: int, *, seed: int = 0, direction: str = "min", study: Any = None
    ):
        try:
            import optuna
        except ImportError as error:
            raise MissingExtra("optuna", "optuna", "sampler 'optuna'") from error
        if space.points is not None:
            raise ParameterError(
                "sampler 'optuna' searches ranges, not a list of points. Give a dict such as {'lr': LogUniform(1e-4, 1e-1)}."
            )
        self._optuna, self._space, self._n_trials = optuna, space, n_trials
        self.study = study if study is not None else _new_study(optuna, seed, direction)
        self._next = 0
        self._asked: dict[int, Any] = {}
        self._steps: dict[int, set[int]] = {}

    def ask(self) -> Trial | None:
        """Let the study propose the next trial."""
        if self._next >= self._n_trials:
            return None
        asked = self.study.ask()
        params = {name: self._suggest(asked, name) for name in self._space.axes}
        self._asked[self._next] = asked
        self._next += 1
        return Trial(self._next - 1, params)

    def tell(self, trial: Trial) -> None:
        """Tell the study how a trial ended; a trial without a usable value counts as failed."""
        asked = self._asked.pop(trial.index, None)
        if asked is None:
            return
        states = self._optuna.trial.TrialState
        if trial.status == PRUNED:
            self.study.tell(asked, state=states.PRUNED)
        elif trial.status == FINISHED and trial.value is not None and not math.isnan(trial.value):
            self.study.tell(asked, trial.value)
        else:
            self.study.tell(asked, state=states.FAIL)

    def replay(self, trial: Trial) -> None:
        """Put an earlier trial into the study; one that still has to run is asked for with its old parameters."""
        self._next = max(self._next, trial.index + 1)
        if not trial.is_over:
            indices = {name: self._position(name, value) for name, value in trial.params.items()}
            self.study.enqueue_trial(indices)
            asked = self.study.ask()
            for name in self._space.axes:
                self._suggest(asked, name)
            self._asked[trial.index] = asked
        elif trial.status == FINISHED and trial.value is not None and not math.isnan(trial.value):
            self.study.add_trial(
                self._optuna.trial.create_trial(
                    params={name: self._position(name, value) for name, value in trial.params.items()},
                    distributions={name: self._distribution(name) for name in trial.params},
                    value=trial.value,
                )
            )

    def should_prune(self, trial: Trial, value: float, step: int) -> bool:
        """Pass a report on and ask the study's pruner; a step reported twice counts once."""
        asked = self._asked.get(trial.index)
        if asked is None or step in self._steps.setdefault(trial.index, set()):
            return False
        self._steps[trial.index].add(step)
        asked.report(value, step)
        return bool(asked.should_prune())

    def _suggest(self, asked: Any, name: str) -> Any:
        axis = self._space.axes[name]
        if isinstance(axis, LogUniform):
            return asked.suggest_float(name, axis.low, axis.high, log=True)
        if isinstance(axis, Uniform):
            return asked.suggest_float(name, axis.low, axis.high)
        if isinstance(axis, IntRange):
            return asked.suggest_int(name, int(axis.low), int(axis.high))
        if isinstance(axis, Choice):
            # By place, because Optuna takes only simple values as categories.
            return axis.values[asked.suggest_categorical(name, range(len(axis.values)))]
        raise ParameterError(f"sampler 'optuna' does not know the axis {axis!r} of {name}.")

    def _distribution(self, name: str) -> Any:
        axis, kinds = self._space.axes[name], self._optuna.distributions
        if isinstance(axis, Choice):
            return kinds.CategoricalDistribution(range(len(axis.values)))
        assert isinstance(axis, LogUniform | Uniform | IntRange)
        if isinstance(axis, IntRange):
            return kinds.IntDistribution(int(axis.low), int(axis.high))
        return kinds.FloatDistribution(axis.low, axis.high, log=isinstance(axis, LogUniform))

    def _position(self, name: str, value: object) -> Any:
        axis = self._space.axes.get(name)
        if not isinstance(axis, Choice):
            return value
        return [plain(choice) for choice in axis.values].index(plain(value))


def _new_study(optuna: Any, seed: int, direction: str) -> Any:
    """Make a study in memory, quietly: the sweep has its own line for every trial."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Trials that still run count as bad ones, so that parallel proposals differ; Optuna calls this experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return optuna.create_study(direction="minimize" if direction == "min" else "maximize", sampler=sampler)
    finally:
        optuna.logging.set_verbosity(before)


def make_sampler(
    sampler: "str | Sampler | Callable[..., Sampler]",
    space: ParameterSpace,
    *,
    n_trials: int | None,
    seed: int,
    direction: str,
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
        raise ParameterError(f"sampler {sampler!r} has no natural end. Give the number of trials: n_trials=20.")
    if sampler == "random":
        return RandomSampler(space, n_trials, seed)
    return OptunaSampler(space, n_trials, seed=seed, direction=direction)
