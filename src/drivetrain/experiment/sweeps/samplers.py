"""Samplers propose the trials of a sweep: in order, at random, or by what earlier trials showed.

The last is Optuna (Akiba et al., 2019): a tree-structured Parzen estimator proposes, a pruner stops bad trials early.
"""

import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError, ParameterError, needs_package, unknown_name
from drivetrain.core.plain import plain
from drivetrain.core.secret import MASK
from drivetrain.core.types import Settings
from drivetrain.experiment.sweeps.space import Axis, Choice, IntRange, LogUniform, ParameterSpace, Uniform
from drivetrain.experiment.sweeps.trial import FINISHED, PRUNED, Trial

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import CategoricalChoiceType

NAMES = ("grid", "random", "optuna")
PASSWORD = re.compile(r"(?<=://)([^:/@\s]*):[^@\s]*(?=@)")
PRUNERS = ("median", "hyperband", "halving", "percentile", "none")


class Sampler:
    """Proposes trials and receives their results."""

    total: int | None = None
    """How many trials it will propose, None if unknown."""

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


class _CountingSampler(Sampler):
    """Proposes a known number of trials, each by its index."""

    total: int
    _next = 0

    def ask(self) -> Trial | None:
        """Return the next trial."""
        if self._next >= self.total:
            return None
        self._next += 1
        return Trial(self._next - 1, self._propose(self._next - 1))

    def replay(self, trial: Trial) -> None:
        """Count a trial that was proposed before."""
        self._next = max(self._next, trial.index + 1)

    def _propose(self, index: int) -> Settings:
        raise NotImplementedError


class GridSampler(_CountingSampler):
    """Every point once, in order."""

    def __init__(self, space: ParameterSpace, n_trials: int | None = None):
        self._points = space.grid()[:n_trials]
        self.total = len(self._points)

    def replay(self, trial: Trial) -> None:
        """Skip a point; its values are those of the space, which a journal may hold in a plainer form."""
        super().replay(trial)
        if trial.index < self.total:
            trial.params = self._propose(trial.index)

    def _propose(self, index: int) -> Settings:
        return dict(self._points[index])


class RandomSampler(_CountingSampler):
    """Independent draws; trial number n depends only on the seed."""

    def __init__(self, space: ParameterSpace, n_trials: int, seed: int = 0):
        self._space, self.total, self._seed = space, n_trials, seed

    def replay(self, trial: Trial) -> None:
        """Count a trial that was drawn before, and check that it was drawn from here."""
        super().replay(trial)
        if plain(self._propose(trial.index)) != plain(trial.params):
            raise ParameterError(
                f"the sweep's trial {trial.index} has different parameters from those that this seed and space produce."
            )

    def _propose(self, index: int) -> Settings:
        from drivetrain.runtime.seeds import derive_seed

        generator = random.Random(derive_seed(self._seed, "trial", index))
        if self._space.points is not None:
            return dict(generator.choice(self._space.points))
        return self._space.walk(lambda name, axis: axis.draw(generator))


@dataclass(frozen=True, kw_only=True)
class OptunaConfig:
    """How Optuna searches, and where it keeps its study."""

    pruner: str = "median"
    """What stops trials early by their reports: median, hyperband, halving (successive), percentile (the best quarter continues), none."""
    storage: str | None = None
    """A database address such as `sqlite:///study.db`, or the path of a file (`study.db`, or `study.log` for Optuna's journal); sweeps
    with one storage and study name search together. None keeps the study in memory."""
    study_name: str | None = None
    """Name of the study; None: a new one for each sweep."""

    def __post_init__(self) -> None:
        if self.pruner not in PRUNERS:
            raise ConfigError(unknown_name("pruner", self.pruner, PRUNERS))
        for name in ("storage", "study_name"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r}: expected text, or None.")
        if self.study_name is not None and self.storage is None:
            raise ConfigError(
                f"study_name={self.study_name!r} without a storage has no effect: the study is kept in memory. Give storage=..."
            )

    def as_data(self) -> dict[str, str | None]:
        """Return plain values; the password of a database is masked."""
        return asdict(self) | {"storage": self.storage and PASSWORD.sub(rf"\1:{MASK}", self.storage)}

    @classmethod
    def from_data(cls, data: Mapping[str, str | None]) -> "OptunaConfig":
        """Return the configuration that a journal holds; None of it may be masked."""
        if MASK in str(data.get("storage")):
            raise ParameterError(
                "the sweep does not store the password of its storage. Run the program again with sweep(..., resume=...)."
            )
        return cls(**{name: value for name, value in data.items() if value is not None})

    def make_pruner(self) -> "optuna.pruners.BasePruner":
        """Return Optuna's pruner."""
        from optuna import pruners

        makers: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
            "median": pruners.MedianPruner,
            "hyperband": pruners.HyperbandPruner,
            "halving": pruners.SuccessiveHalvingPruner,
            "percentile": lambda: pruners.PercentilePruner(25.0),
            "none": pruners.NopPruner,
        }
        return makers[self.pruner]()

    def make_storage(self) -> "optuna.storages.BaseStorage | None":
        """Return Optuna's storage; a path becomes a SQLite database or, if it ends in .log, Optuna's journal."""
        if self.storage is None:
            return None
        from optuna import storages

        path = Path(self.storage).resolve()
        if "://" not in self.storage and path.suffix == ".log":
            from optuna.storages.journal import JournalFileBackend

            return storages.JournalStorage(JournalFileBackend(str(path)))
        from sqlalchemy.engine import make_url
        from sqlalchemy.pool import NullPool, QueuePool

        address = self.storage if "://" in self.storage else f"sqlite:///{path}"
        url = make_url(address)
        # A file is closed after each query. A database in memory, which has another pool, would be lost.
        is_file = url.get_backend_name() == "sqlite" and url.get_dialect().get_pool_class(url) is QueuePool
        return storages.RDBStorage(address, engine_kwargs={"poolclass": NullPool} if is_file else None)


class OptunaSampler(_CountingSampler):
    """Ask an Optuna study; a study of your own brings its own sampler and pruner.

    `direction` is that of each objective. With several objectives Optuna does not prune.
    """

    def __init__(
        self,
        space: ParameterSpace,
        n_trials: int,
        *,
        seed: int = 0,
        direction: str | Sequence[str] = "min",
        study: "optuna.Study | None" = None,
        config: OptunaConfig | None = None,
    ):
        with needs_package("optuna", "optuna", "sampler 'optuna'"):
            import optuna
        if space.points is not None:
            raise ParameterError(
                "sampler 'optuna' searches ranges, not a list of points. Give a dict such as {'lr': LogUniform(1e-4, 1e-1)}."
            )
        self._space, self.total = space, n_trials
        directions = [direction] if isinstance(direction, str) else list(direction)
        self.study = study if study is not None else _new_study(config or OptunaConfig(), seed, directions)
        self._prunes = len(self.study.directions) == 1
        self._states = optuna.trial.TrialState
        self._sweep = ""
        self._asked: dict[int, optuna.Trial] = {}
        self._steps: dict[int, set[int]] = {}
        self._stored: dict[int, optuna.trial.FrozenTrial] = {}

    def begin(self, sweep: str) -> None:
        """Find the trials that an earlier part of the sweep has put into the storage."""
        self._sweep = sweep
        for entry in self.study.get_trials(deepcopy=False):
            if entry.user_attrs.get("sweep") == sweep:
                self._stored[entry.user_attrs["trial"]] = entry

    def _propose(self, index: int) -> Settings:
        return self._suggest_all(self.study.ask(), index)

    def tell(self, trial: Trial) -> None:
        """Report to the study how a trial ended; a trial without a usable value counts as failed."""
        asked = self._asked.pop(trial.index, None)
        if asked is not None and trial.status == FINISHED and trial.objectives:
            self.study.tell(asked, trial.objectives)
        elif asked is not None:
            self.study.tell(asked, state=self._states.PRUNED if trial.status == PRUNED else self._states.FAIL)

    def replay(self, trial: Trial) -> None:
        """Put an earlier trial into the study; one that still has to run is asked for with its old parameters."""
        import optuna

        super().replay(trial)
        stored = self._stored.get(trial.index)
        if stored is not None:
            if not stored.state.is_finished():
                self._asked[trial.index] = optuna.Trial(self.study, stored._trial_id)
                self._steps[trial.index] = set(stored.intermediate_values)
                if trial.is_over:
                    self.tell(trial)
            return
        if not trial.is_over or (trial.status == FINISHED and trial.objectives):
            self.study.enqueue_trial({name: self._position(name, value) for name, value in trial.params.items()})
            self._suggest_all(self.study.ask(), trial.index)
        if trial.is_over:
            self.tell(trial)

    def should_prune(self, trial: Trial, value: float, step: int) -> bool:
        """Pass a report on and ask the study's pruner; a step reported twice counts once."""
        asked = self._asked.get(trial.index)
        if not self._prunes or asked is None or step in self._steps.setdefault(trial.index, set()):
            return False
        self._steps[trial.index].add(step)
        asked.report(value, step)
        return bool(asked.should_prune())

    def _suggest_all(self, asked: "optuna.Trial", index: int) -> dict[str, object]:
        asked.set_user_attr("sweep", self._sweep)
        asked.set_user_attr("trial", index)
        self._asked[index] = asked
        return self._space.walk(lambda name, axis: _suggest(asked, name, axis))

    def _position(self, name: str, value: object) -> "CategoricalChoiceType":
        axis = self._space.axes.get(name)
        if isinstance(axis, Choice):
            return [plain(choice) for choice in axis.values].index(plain(value))
        assert isinstance(value, int | float)
        return value


def _suggest(asked: "optuna.Trial", name: str, axis: Axis) -> object:
    if isinstance(axis, LogUniform | Uniform):
        return asked.suggest_float(name, axis.low, axis.high, log=isinstance(axis, LogUniform))
    if isinstance(axis, IntRange):
        return asked.suggest_int(name, int(axis.low), int(axis.high))
    if isinstance(axis, Choice):
        # By place, because Optuna takes only simple values as categories.
        return axis.values[asked.suggest_categorical(name, range(len(axis.values)))]
    raise ParameterError(f"sampler 'optuna' does not support the axis {axis!r} of {name}.")


def _new_study(config: OptunaConfig, seed: int, directions: Sequence[str]) -> "optuna.Study":
    """Make or load a study, quietly: the sweep has its own line for every trial."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Trials that still run count as bad ones, so that parallel proposals differ; Optuna calls this experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            study = optuna.create_study(
                storage=config.make_storage(),
                study_name=config.study_name,
                load_if_exists=True,
                directions=["minimize" if good == "min" else "maximize" for good in directions],
                sampler=sampler,
                pruner=config.make_pruner(),
            )
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"storage={config.storage!r}: Optuna cannot use it: {error}") from error
    except Exception as error:  # of the database driver, whose errors have no common class
        if config.storage is None:
            raise
        shown = config.as_data()["storage"]
        raise ConfigError(f"storage={shown!r}: Optuna cannot use it: {type(error).__name__}: {error}") from None
    finally:
        optuna.logging.set_verbosity(before)
    if len(study.directions) != len(directions):
        raise ConfigError(
            f"the study {config.study_name!r} has {len(study.directions)} objectives, this sweep has {len(directions)}. Give another "
            "study_name."
        )
    return study
