"""Search with Optuna (Akiba et al., 2019): a tree-structured Parzen estimator proposes, a median rule gives up early."""

import math
import warnings
from typing import Any

from drivetrain.core.errors import MissingExtra, ParameterError
from drivetrain.experiment.sweeps.samplers import Sampler
from drivetrain.experiment.sweeps.space import Choice, IntRange, LogUniform, Space, Uniform
from drivetrain.experiment.sweeps.trial import FINISHED, PRUNED, Trial


class OptunaSampler(Sampler):
    """Ask an Optuna study; a study of your own brings its own sampler and pruner."""

    def __init__(self, space: Space, n_trials: int, *, seed: int = 0, direction: str = "min", study: Any = None):
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

    def _position(self, name: str, value: Any) -> Any:
        axis = self._space.axes.get(name)
        if not isinstance(axis, Choice):
            return value
        from drivetrain.experiment.run_folder import plain

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
