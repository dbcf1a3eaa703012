"""The loop of a sweep: samplers propose, executors run, the journal remembers."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from drivetrain.core.errors import ConfigError, ParameterError, SweepError, unknown_name
from drivetrain.core.files import is_regular, load_json, read_limited
from drivetrain.core.locking import FolderLock, is_locked
from drivetrain.core.secret import hide, masked
from drivetrain.core.time import Time, TimeUnit, ensure_time
from drivetrain.experiment.directions import direction_of
from drivetrain.experiment.run_folder import METRICS, SWEEPS, fresh_name, make_folder, plain
from drivetrain.experiment.sweeps.executors import Executor, InlineExecutor, TrialWork, visible_gpus
from drivetrain.experiment.sweeps.journal import SCHEMA, Journal, read_journal
from drivetrain.experiment.sweeps.result import SweepResult
from drivetrain.experiment.sweeps.samplers import NAMES, Sampler, make_sampler
from drivetrain.experiment.sweeps.space import ParameterSpace, check_space, make_space, space_from
from drivetrain.experiment.sweeps.trial import ASKED, FAILED, FINISHED, RUNNING, Trial, TrialOutcome

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

logger = logging.getLogger("drivetrain")

EXECUTORS = ("inline", "pool", "submitit", "ray")
ORPHAN_SECONDS = 45.0
"""How long a resumed sweep waits for a trial that outlived the process that had started it."""


def sweep(
    experiment: "Experiment",
    space: object,
    *,
    sampler: str | Sampler = "grid",
    executor: str | Executor = "inline",
    n_trials: int | None = None,
    objective: str | None = None,
    direction: Literal["min", "max"] | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    num_processes: int | None = None,
    gpus_per_trial: int | None = None,
    retries: int = 0,
    trial_timeout: float | str | Time | None = None,
    on_failure: Literal["raise", "return"] = "raise",
    resume: str | Path | None = None,
    on_change: Callable[[SweepResult], object] | None = None,
) -> SweepResult:
    """Run an experiment once for every set of parameters that a sampler proposes.

    Args:
        experiment: the experiment.
        space: a list of parameter dicts, or `{name: Choice(...) | Uniform(a, b) | LogUniform(a, b) | IntRange(a, b)}`.
        sampler: `"grid"`, `"random"`, `"optuna"`, or a `Sampler`.
        executor: `"inline"`, `"pool"`, `"submitit"`, `"ray"`, or an `Executor`.
        n_trials: how many trials; a grid has its own number.
        objective: the entry of the returned dict, or of the Recorder's summary, to compare; None compares the returned number.
        direction: `"min"` or `"max"`; None is the direction that the experiment declares for the objective, or that its name gives
            (`"accuracy"` is maximized), else `"min"`.
        params: parameters that are the same for all trials.
        seed: seed of the sampler; a trial whose `random_seed` is not given has one derived from this seed and its index.
        num_processes: trials at a time.
        gpus_per_trial: GPUs that each trial sees.
        retries: how often a failed trial runs again.
        trial_timeout: seconds, or a text such as `"30m"`, after which a trial is ended with the processes it started, and not tried
            again. Not for the inline executor.
        on_failure: `"raise"` a `SweepError` at the end, or `"return"`. A failed trial never stops the others.
        resume: folder of a sweep to continue.
        on_change: called with the result so far after every change.
    """
    if direction not in (None, "min", "max"):
        raise ConfigError(unknown_name("direction", direction, ["min", "max"]))
    if on_failure not in ("raise", "return"):
        raise ConfigError(unknown_name("choice", on_failure, ["raise", "return"], where="on_failure"))
    if type(retries) is not int or retries < 0:
        raise ConfigError(f"retries: {retries!r} is not a number of retries. Give 0 or more.")
    timeout = _seconds(trial_timeout)
    direction = direction or _usual_direction(experiment, objective, resume)
    fixed, wanted = dict(params or {}), make_space(space)
    check_space(experiment, wanted, fixed)
    chosen = make_sampler(sampler, wanted, n_trials=n_trials, seed=seed, direction=direction)
    runner = make_executor(executor, num_processes, gpus_per_trial)
    if timeout is not None and not getattr(runner, "ends_trials", False):
        raise ConfigError(
            f"trial_timeout={trial_timeout!r}: the executor {executor!r} cannot end a trial. Use executor='pool', which gives each "
            "trial a process of its own."
        )
    header = {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "space": wanted.describe(experiment.parameters.secrets),
        "params": plain(_shown(experiment, fixed)),
        "sampler": sampler if isinstance(sampler, str) else type(sampler).__name__,
        "seed": seed,
        "n_trials": n_trials,
        "objective": objective,
        "direction": direction,
        "values": wanted.as_data(experiment.parameters.secrets),
        "start": {
            "executor": executor if isinstance(executor, str) else None,
            "num_processes": num_processes,
            "gpus_per_trial": gpus_per_trial,
            "retries": retries,
            "trial_timeout": timeout,
        },
    }
    trials = [] if resume is None else _earlier_trials(Path(resume), header)
    folder = Path(resume) if resume is not None else _new_folder(experiment, wanted, fixed)
    with FolderLock(folder) as lock:
        if not lock.acquire():
            raise ConfigError(f"the sweep {folder} is still running: {lock.holder}. Wait for it to end.")
        loop = _Loop(
            experiment, fixed, folder, chosen, runner, trials, objective, direction, retries, on_change, timeout, seed
        )
        result = loop.run(header if resume is None else None)
    if result.failed and on_failure == "raise":
        listing = "\n".join(f"  trial {t.index} {result.shown(t)}: {t.error}" for t in result.failed)
        raise SweepError(
            f"{len(result.failed)} of {len(result)} trials failed; the others are complete. Sweep folder: {folder}\n{listing}",
            result,
        )
    return result


def continue_sweep(
    experiment: "Experiment",
    folder: Path,
    *,
    params: Mapping[str, Any] | None = None,
    on_change: Callable[[SweepResult], object] | None = None,
) -> SweepResult:
    """Continue a sweep with the settings in its journal; `params` are those that it does not hold: secrets."""
    header, _ = read_journal(folder)
    space = space_from(header.get("values"), experiment, header.get("space"))
    start: dict[str, Any] = header.get("start") or {}
    fixed = {**(header.get("params") or {}), **(params or {})}
    masks = [name for name in fixed if name in experiment.parameters.secrets and name not in (params or {})]
    if masks:
        raise ParameterError(
            f"the sweep {folder} does not hold the value of {masks[0]}, a secret. Give it again: --set {masks[0]}=..."
        )
    if space is None or start.get("executor") not in EXECUTORS or header.get("sampler") not in NAMES:
        raise ParameterError(
            f"the sweep {folder} cannot be continued from its journal alone: its space, sampler or executor is an object of the program, "
            f"or it was made by an older version. Run the program again with sweep(..., resume={str(folder)!r}), or "
            f"`drivetrain sweep ... --resume {folder}`."
        )
    return sweep(
        experiment,
        space,
        sampler=header["sampler"],
        n_trials=header.get("n_trials"),
        objective=header.get("objective"),
        direction=header.get("direction"),
        params=fixed,
        seed=header.get("seed", 0),
        resume=folder,
        on_change=on_change,
        executor=start["executor"],
        num_processes=start.get("num_processes"),
        gpus_per_trial=start.get("gpus_per_trial"),
        retries=start.get("retries", 0),
        trial_timeout=start.get("trial_timeout"),
    )


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


def make_executor(executor: str | Executor, num_processes: int | None, gpus_per_trial: int | None) -> Executor:
    """Return the executor a user asked for, by name or as an object."""
    if not isinstance(executor, str):
        return executor
    if executor == "pool":
        from drivetrain.experiment.sweeps.pool import PoolExecutor

        return PoolExecutor(
            num_processes or (1 if gpus_per_trial is None else len(visible_gpus()) or 1), gpus_per_trial
        )
    if executor == "submitit":
        from drivetrain.experiment.sweeps.submitit_executor import SubmititConfig, SubmititExecutor

        at_a_time = SubmititConfig.num_processes if num_processes is None else num_processes
        return SubmititExecutor(SubmititConfig(num_processes=at_a_time, gpus_per_trial=gpus_per_trial))
    if executor == "ray":
        from drivetrain.experiment.sweeps.ray_executor import RayConfig, RayExecutor

        return RayExecutor(RayConfig(num_processes=num_processes, gpus_per_trial=gpus_per_trial))
    if executor not in EXECUTORS:
        raise ConfigError(unknown_name("executor", executor, EXECUTORS))
    if num_processes not in (None, 1) or gpus_per_trial is not None:
        raise ConfigError(
            "executor 'inline' runs one trial at a time in this process. Use executor='pool' for several."
        )
    return InlineExecutor()


def _usual_direction(
    experiment: "Experiment", objective: str | None, resume: str | Path | None
) -> Literal["min", "max"]:
    """Return the direction of a sweep that was not given one: that of the sweep it continues, else that of its objective."""
    if resume is not None and (earlier := read_journal(Path(resume))[0].get("direction")) in ("min", "max"):
        return cast(Literal["min", "max"], earlier)
    return (direction_of(objective, experiment.directions) if objective else None) or "min"


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
    for name in ("experiment", "space", "params", "sampler", "seed", "objective", "direction"):
        if earlier.get(name) != now[name]:
            raise ParameterError(
                f"the sweep {folder} was made with {name}={earlier.get(name)!r}, now it is {now[name]!r}. Resume it as it was, or "
                "start a new one."
            )
    return trials


class _Loop:
    """One sweep at work."""

    def __init__(
        self,
        experiment: "Experiment",
        fixed: dict[str, Any],
        folder: Path,
        sampler: Sampler,
        executor: Executor,
        trials: list[Trial],
        objective: str | None,
        direction: str,
        retries: int,
        on_change: Callable[[SweepResult], object] | None,
        timeout: float | None,
        seed: int,
    ):
        self.folder, self.sampler, self.executor = folder, sampler, executor
        self.trials = {trial.index: trial for trial in trials}
        self.objective, self.direction, self.retries, self.on_change = objective, direction, retries, on_change
        self.work = TrialWork(experiment, fixed, folder.name, sampler.should_prune, timeout, seed)
        self.waiting: deque[Trial] = deque()
        self.running: dict[Future[TrialOutcome], Trial] = {}

    def run(self, header: Mapping[str, Any] | None) -> SweepResult:
        """Run until nothing is left to do."""
        self.journal = Journal(self.folder)
        try:
            if header is not None:
                self.journal.write("sweep", **header)
            self.executor.start(self.work)
            self._take_up()
            while self._fill() or self.running:
                done, _ = wait(self.running, return_when=FIRST_COMPLETED)
                for future in done:
                    self._settle(self.running.pop(future), future.result())
        finally:
            self.executor.close()
            self.journal.close()
        return self._result()

    def _take_up(self) -> None:
        """Go on where an earlier part of the sweep stopped: skip what is over, first run what was begun."""
        for trial in self.trials.values():
            self.sampler.replay(trial)
            if trial.status in (ASKED, RUNNING) or (trial.status == FAILED and trial.attempts <= self.retries):
                trial.status = ASKED
                self.waiting.append(trial)
                _wait_for_orphan(trial)

    def _fill(self) -> bool:
        """Start trials while there are free slots; False when none was left to start and none runs."""
        while len(self.running) < self.executor.slots:
            trial = self.waiting.popleft() if self.waiting else self.sampler.ask()
            if trial is None:
                break
            if trial.index not in self.trials:
                self.trials[trial.index] = trial
                self.journal.write(ASKED, index=trial.index, params=_shown(self.work.experiment, trial.params))
            self._begin(trial)
        return bool(self.running)

    def _begin(self, trial: Trial) -> None:
        trial.attempts += 1
        trial.status = RUNNING
        if trial.run_dir is None or trial.attempts > 2:
            # The first retry continues from the trial's checkpoint; if that fails too, the next begins from nothing.
            suffix = f"-{trial.attempts}" if trial.attempts > 1 else ""
            trial.run_dir = self.folder / f"trial-{trial.index:04d}{suffix}"
        self.journal.write("started", index=trial.index, attempts=trial.attempts, run_dir=trial.run_dir)
        self._changed()
        self.running[self.executor.submit(trial)] = trial

    def _settle(self, trial: Trial, outcome: TrialOutcome) -> None:
        trial.status, trial.error = outcome.status, self._without_secrets(trial, outcome.error)
        trial.seconds += outcome.seconds
        if outcome.status == FINISHED:
            assert trial.run_dir is not None
            trial.metrics = _numbers(outcome.result) | _summary(trial.run_dir / METRICS)
            trial.value = self._value(outcome.result, trial)
            if trial.value is None and self.objective is not None:
                known = ", ".join(trial.metrics) or "no numbers"
                trial.fail(f"the objective {self.objective!r} is missing from what the experiment returned ({known}).")
        self.journal.settle(trial)
        if trial.status == FAILED and trial.attempts <= self.retries:
            logger.warning("trial %d failed and is tried again: %s", trial.index, trial.error)
            self.waiting.append(trial)
        else:
            self.sampler.tell(trial)
        self._changed()

    def _without_secrets(self, trial: Trial, error: str | None) -> str | None:
        if error is None or not self.work.experiment.parameters.secrets:
            return error
        try:
            return hide(error, self.work.experiment.resolve(self.work.fixed | trial.params).hidden())
        except ParameterError:  # the trial failed because of it, before it could hold a secret
            return error

    def _value(self, result: object, trial: Trial) -> float | None:
        if self.objective is not None:
            return trial.metrics.get(self.objective)
        number = plain(result)
        return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None

    def _result(self) -> SweepResult:
        ordered = [self.trials[index] for index in sorted(self.trials)]
        secrets = self.work.experiment.parameters.secrets
        return SweepResult(ordered, direction=self.direction, folder=self.folder, secrets=secrets)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self._result())


def _seconds(timeout: float | str | Time | None) -> float | None:
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
    return float(limit.value)


def _shown(experiment: "Experiment", values: Mapping[str, object]) -> dict[str, Any]:
    secrets = experiment.parameters.secrets
    return {name: masked(value, is_secret=name in secrets) for name, value in values.items()}


def _wait_for_orphan(trial: Trial) -> None:
    """Let a trial end whose sweep was killed: its process notices, saves, and frees its lock."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while trial.run_dir is not None and is_locked(trial.run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)


def _numbers(result: object) -> dict[str, float]:
    found = plain(result) if isinstance(result, Mapping) else {}
    return {
        name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _summary(metrics: Path) -> dict[str, float]:
    """Return the Recorder's summary of a run: lines of kind `summary` with a tag and a value, or a dict of values."""
    found: dict[str, float] = {}
    if is_regular(metrics):
        for line in read_limited(metrics, None).splitlines():
            if b'"summary"' not in line:
                continue
            try:
                entry = load_json(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("kind") == "summary":
                value = entry.get("value")
                found |= _numbers(value if isinstance(value, Mapping) else {str(entry.get("tag")): value})
    return found
