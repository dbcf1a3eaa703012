"""Sweeps: check what a user gave, choose sampler and executor, and run the loop; continue one from its journal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drivetrain.core.arguments import check_choice, check_count
from drivetrain.core.errors import ConfigError, ParameterError, SweepError, unknown_name
from drivetrain.core.locking import FolderLock
from drivetrain.core.plain import plain
from drivetrain.core.time import Time, TimeUnit, ensure_time
from drivetrain.core.types import Settings
from drivetrain.experiment.directions import direction_of
from drivetrain.experiment.resolve import full_names
from drivetrain.experiment.run_folder import SWEEPS, fresh_name, make_folder
from drivetrain.experiment.sweeps.executors import Executor, InlineExecutor, TrialWork, visible_gpus
from drivetrain.experiment.sweeps.loop import OnChange, SweepLoop
from drivetrain.experiment.sweeps.result import Goal, SweepResult
from drivetrain.experiment.sweeps.samplers import (
    NAMES,
    GridSampler,
    OptunaConfig,
    OptunaSampler,
    RandomSampler,
    Sampler,
)
from drivetrain.experiment.sweeps.space import ParameterSpace, check_space, make_space, space_from
from drivetrain.experiment.sweeps.trial import SCHEMA, Trial, read_journal, without_secrets

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

EXECUTORS = ("inline", "pool", "submitit", "ray")
SAME = ("experiment", "space", "params", "sampler", "seed", "objective", "direction")
"""What must be the same when a sweep is resumed."""


def sweep(
    experiment: "Experiment",
    space: object,
    *,
    sampler: str | Sampler | OptunaConfig = "grid",
    executor: str | Executor = "inline",
    n_trials: int | None = None,
    objective: str | Sequence[str] | None = None,
    direction: str | Sequence[str] | None = None,
    params: Mapping[str, object] | None = None,
    seed: int = 0,
    num_processes: int | None = None,
    gpus_per_trial: int | None = None,
    retries: int = 0,
    trial_timeout: float | str | Time | None = None,
    on_failure: Literal["raise", "return"] = "raise",
    resume: str | Path | None = None,
    on_change: OnChange | None = None,
) -> SweepResult:
    """Run an experiment once for every set of parameters that a sampler proposes.

    Args:
        experiment: the experiment.
        space: a list of parameter dicts, or `{name: Choice(...) | Uniform(a, b) | LogUniform(a, b) | IntRange(a, b)}`, each of these
            also with `.when(other=value)`.
        sampler: `"grid"`, `"random"`, `"optuna"`, an `OptunaConfig`, or a `Sampler`.
        executor: `"inline"`, `"pool"`, `"submitit"`, `"ray"`, or an `Executor`.
        n_trials: how many trials; a grid has its own number.
        objective: the entry of the returned dict, or of the Recorder's summary, to compare, or several; None compares the returned number.
        direction: `"min"` or `"max"`, or one for each objective; None is the direction that the experiment declares for the objective, or
            that its name gives (`"accuracy"` is maximized), else `"min"`.
        params: parameters that are the same for all trials.
        seed: seed of the sampler; a trial whose `random_seed` is not given has one derived from this seed and its index.
        num_processes: trials at a time.
        gpus_per_trial: GPUs that each trial sees.
        retries: how often a failed trial runs again.
        trial_timeout: seconds, or a text such as `"30m"`, after which a trial is ended with the processes it started, and not tried
            again. Not for the inline executor.
        on_failure: `"raise"` a `SweepError` at the end, or `"return"`. Only a misspelled objective stops the others.
        resume: folder of a sweep to continue.
        on_change: called with the result so far after every change.
    """
    check_choice("on_failure", on_failure, ["raise", "return"])
    check_count("retries", retries, at_least=0)
    fixed, wanted = full_names(params or {}, experiment.parameters), make_space(space, experiment.parameters)
    goal = make_goal(experiment, objective, direction, resume)
    check_space(experiment, wanted, fixed)
    sampler = _with_study_name(sampler, resume)
    chosen = make_sampler(sampler, wanted, n_trials=n_trials, seed=seed, directions=goal.directions)
    runner = make_executor(executor, num_processes, gpus_per_trial)
    timeout = _time_limit(trial_timeout, executor, runner)
    start = {"num_processes": num_processes, "gpus_per_trial": gpus_per_trial, "retries": retries}
    secrets = experiment.parameters.secrets
    header = {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "space": wanted.describe(secrets),
        "params": plain(without_secrets(fixed, secrets)),
        "sampler": sampler_name(sampler),
        "seed": seed,
        **goal.as_data,
        "values": wanted.as_data(secrets),
        "n_trials": n_trials,
        "optuna": sampler.as_data() if isinstance(sampler, OptunaConfig) else None,
        "start": {"executor": executor if isinstance(executor, str) else None, "trial_timeout": timeout, **start},
    }
    trials = [] if resume is None else _earlier_trials(Path(resume), header)
    folder = Path(resume).resolve() if resume is not None else _new_folder(experiment, wanted, fixed)
    with FolderLock(folder) as lock:
        if not lock.acquire():
            raise ConfigError(f"the sweep {folder} is still running: {lock.holder}. Wait until it ends.")
        work = TrialWork(experiment, fixed, folder.name, timeout=timeout, seed=seed)
        known = {trial.index: trial for trial in trials}
        loop = SweepLoop(work, chosen, runner, goal, folder, known, retries, on_change)
        result = loop.run(header if resume is None else None)
    if result.failed and on_failure == "raise":
        listing = "\n".join(f"  trial {trial.index} {result.shown(trial)}: {trial.error}" for trial in result.failed)
        raise SweepError(
            f"{len(result.failed)} of {len(result)} trials failed; the others are complete. Sweep folder: {result.folder}\n{listing}",
            result,
        )
    return result


def continue_sweep(
    experiment: "Experiment",
    folder: Path,
    *,
    params: Mapping[str, object] | None = None,
    on_change: OnChange | None = None,
) -> SweepResult:
    """Continue a sweep with the settings in its journal; `params` are those that it does not hold: secrets."""
    header, _ = read_journal(folder)
    space = space_from(header.get("values"), experiment, header.get("space"))
    start: Settings = header.get("start") or {}
    fixed = {**(header.get("params") or {}), **(params or {})}
    masks = [name for name in fixed if name in experiment.parameters.secrets and name not in (params or {})]
    if masks:
        raise ParameterError(
            f"the sweep {folder} does not store the value of {masks[0]}, a secret. Set it again: --set {masks[0]}=..."
        )
    if space is None or start.get("executor") not in EXECUTORS or header.get("sampler") not in NAMES:
        raise ParameterError(
            f"the sweep {folder} cannot be continued from its journal alone: its space, sampler or executor is a Python object of the "
            f"program, or an older version wrote it. Run the program again with sweep(..., resume={str(folder)!r}), or "
            f"`drivetrain sweep ... --resume {folder}`."
        )
    sampler = OptunaConfig.from_data(header["optuna"]) if header.get("optuna") else header["sampler"]
    names = ("n_trials", "objective", "direction", "seed")
    ways = ("executor", "num_processes", "gpus_per_trial", "retries", "trial_timeout")
    stored = {name: source[name] for source, own in ((header, names), (start, ways)) for name in own if name in source}
    return sweep(experiment, space, sampler=sampler, params=fixed, resume=folder, on_change=on_change, **stored)


def run_parameter_sweep(
    experiment: "Experiment",
    list_of_params: Sequence[Mapping[str, object]],
    max_num_processes: int = 1,
    num_gpus_per_process: int | None = None,
    *,
    retries: int = 0,
    on_failure: Literal["raise", "return"] = "raise",
) -> SweepResult:
    """Run an experiment once for each dict of parameters, in up to `max_num_processes` processes at a time."""
    return sweep(
        experiment,
        list(list_of_params),
        executor="pool",
        num_processes=max_num_processes,
        gpus_per_trial=num_gpus_per_process,
        retries=retries,
        on_failure=on_failure,
    )


def make_sampler(
    sampler: str | Sampler | OptunaConfig,
    space: ParameterSpace,
    *,
    n_trials: int | None,
    seed: int,
    directions: Sequence[str],
) -> Sampler:
    """Return the requested sampler: by name, by Optuna's configuration, or as an object."""
    if isinstance(sampler, Sampler) or hasattr(sampler, "ask"):
        return sampler  # type: ignore[return-value]
    if n_trials is not None:
        check_count("n_trials", n_trials, error=ParameterError)
    name = sampler_name(sampler)
    if name == "grid":
        return GridSampler(space, n_trials)
    if n_trials is None:
        raise ParameterError(
            f"sampler {name!r} has no natural end. Give the number of trials: n_trials=20 (--trials 20)."
        )
    if name == "random":
        return RandomSampler(space, n_trials, seed)
    config = None if isinstance(sampler, str) else sampler
    return OptunaSampler(space, n_trials, seed=seed, direction=directions, config=config)


def _with_study_name(sampler: str | Sampler | OptunaConfig, resume: str | Path | None) -> str | Sampler | OptunaConfig:
    """Return the sampler; a study that is stored gets the name it has in the sweep that is resumed, or a new one."""
    if not isinstance(sampler, OptunaConfig) or sampler.storage is None or sampler.study_name is not None:
        return sampler
    earlier = {} if resume is None else read_journal(Path(resume))[0].get("optuna") or {}
    return replace(sampler, study_name=earlier.get("study_name") or fresh_name())


def sampler_name(sampler: str | Sampler | OptunaConfig) -> str:
    """Return the name of a sampler as the journal holds it."""
    if isinstance(sampler, str):
        if sampler not in NAMES:
            raise ParameterError(unknown_name("sampler", sampler, NAMES))
        return sampler
    if isinstance(sampler, Sampler) or hasattr(sampler, "ask"):
        return type(sampler).__name__
    if not isinstance(sampler, OptunaConfig):
        raise ConfigError(f"sampler={sampler!r}: expected one of {', '.join(NAMES)}, an OptunaConfig or a Sampler.")
    return "optuna"


def make_executor(executor: str | Executor, num_processes: int | None, gpus_per_trial: int | None) -> Executor:
    """Return the requested executor, by name or as an object."""
    if not isinstance(executor, str):
        return executor
    if executor == "pool":
        from drivetrain.experiment.sweeps.pool import PoolExecutor

        if num_processes is None:
            num_processes = 1 if gpus_per_trial is None else len(visible_gpus()) or 1
        return PoolExecutor(num_processes, gpus_per_trial)
    if executor == "submitit":
        from drivetrain.experiment.sweeps.cluster import SubmititConfig, SubmititExecutor

        at_a_time = SubmititConfig.num_processes if num_processes is None else num_processes
        return SubmititExecutor(SubmititConfig(num_processes=at_a_time, gpus_per_trial=gpus_per_trial))
    if executor == "ray":
        from drivetrain.experiment.sweeps.cluster import RayConfig, RayExecutor

        return RayExecutor(RayConfig(num_processes=num_processes, gpus_per_trial=gpus_per_trial))
    if executor not in EXECUTORS:
        raise ConfigError(unknown_name("executor", executor, EXECUTORS))
    if num_processes not in (None, 1) or gpus_per_trial is not None:
        raise ConfigError(
            "executor 'inline' runs one trial at a time in this process. Use executor='pool' for several."
        )
    return InlineExecutor()


def make_goal(experiment: "Experiment", objective: object, direction: object, resume: str | Path | None = None) -> Goal:
    """Return the objectives of a sweep with their directions: as given, as in the sweep that is resumed, or as their names say."""
    names = _texts("objective", objective)
    given = _texts("direction", direction)
    for good in given:
        if good not in ("min", "max"):
            raise ConfigError(unknown_name("direction", good, ["min", "max"]))
    if len(set(names)) < len(names):
        raise ConfigError(f"objective={objective!r}: an objective is given twice.")
    expected = max(1, len(names))
    if given and len(given) != expected:
        raise ConfigError(
            f"direction={direction!r} has {len(given)} entries for {expected} objectives. Give one for each, or None where the name "
            "shows the direction."
        )
    if not given and resume is not None:
        earlier = Goal.from_data(names or None, read_journal(Path(resume))[0].get("direction"))
        given = earlier.directions if earlier.is_consistent else ()
    usual = tuple(direction_of(name, experiment.directions) or "min" for name in names) or ("min",)
    return Goal(names=names, directions=given or usual)


def _texts(name: str, given: object) -> tuple[str, ...]:
    values = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(value, str) and value for value in values) or (given is not None and not values):
        raise ConfigError(f"{name}={given!r}: expected a name, or a list of names.")
    return values


def _new_folder(experiment: "Experiment", space: ParameterSpace, fixed: Mapping[str, object]) -> Path:
    """Make the folder of a new sweep, in the output folder that its trials are given."""
    first = dict(space.points[0]) if space.points else {name: axis.examples()[0] for name, axis in space.axes.items()}
    output_dir = experiment.resolve({**fixed, **first}).values["output_dir"]
    folder = Path(output_dir).resolve() / experiment.name / SWEEPS / fresh_name()
    make_folder(folder)
    return folder


def _earlier_trials(folder: Path, header: Mapping[str, object]) -> list[Trial]:
    """Return the trials of the sweep that is resumed, which must be the same sweep."""
    earlier, trials = read_journal(folder)
    now = json.loads(json.dumps(header))
    for name in SAME:
        if earlier.get(name) != now[name]:
            raise ParameterError(
                f"the sweep {folder} was made with {name}={earlier.get(name)!r}, now it is {now[name]!r}. Resume it with the same value, "
                "or start a new one."
            )
    return trials


def _time_limit(timeout: float | str | Time | None, executor: object, runner: Executor) -> float | None:
    """Return the time limit of a trial in seconds."""
    if timeout is None:
        return None
    try:
        limit = ensure_time(timeout, TimeUnit.SECOND)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"trial_timeout={timeout!r}: {error}") from error
    if limit.unit is not TimeUnit.SECOND or not 0 < limit.value < float("inf"):
        raise ConfigError(
            f"trial_timeout={timeout!r}: expected seconds above 0, a text such as '30m' or '2h', or None."
        )
    if not getattr(runner, "ends_trials", False):
        raise ConfigError(
            f"trial_timeout={timeout!r}: the executor {executor!r} cannot end a trial. Use executor='pool', which runs each "
            "trial in its own process."
        )
    return float(limit.value)
