"""The life of a run: folder, lock, log, seed, hooks, the main function, and an end that always comes.

After any failure the process is as it was before and can start the next run. On several processes rank 0 decides about
folder, seed and parameters, and the others receive what it decided, or why it could not. A subprocess of a run calls the same function
again, in the same folder.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.display import printable
from drivetrain.core.errors import ExperimentError, ResumeError
from drivetrain.core.locking import RUN_LOCK, FolderLock
from drivetrain.core.plain import error_text, is_plain, plain
from drivetrain.core.secret import hide, mask_command
from drivetrain.core.types import Settings
from drivetrain.experiment import processes, proxies, resume, run_folder
from drivetrain.experiment.parameters import BOOKKEEPING, wants_cpu
from drivetrain.experiment.plugins import app
from drivetrain.experiment.processes import ExperimentReference
from drivetrain.experiment.records import is_run, read_run
from drivetrain.experiment.resolve import AUTO, NEVER, Resolved, absent_fields, given_in_python
from drivetrain.experiment.summaries import summary_of
from drivetrain.experiment.sweeps.trial import TrialPruned
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.run import ExperimentRun, current_run, set_current_run

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

logger = logging.getLogger("drivetrain")


@dataclass
class AgreedStart:
    """What rank 0 decided and broadcast to the other ranks."""

    folder: Path
    resolved: Resolved
    beginning: resume.RunStart
    problem: Exception | None = None


@dataclass
class RunOutcome:
    """How the main function ended."""

    result: Any = None
    error: BaseException | None = None
    state: str = "finished"
    exit_code: int = 0

    @property
    def is_pruned(self) -> bool:
        """Whether the sweep stopped it early."""
        return isinstance(self.error, TrialPruned)

    @property
    def sentence(self) -> str | None:
        """The error as one text; being stopped by a signal is a state, not an error."""
        stopped = self.state == "interrupted" and isinstance(self.error, SystemExit | KeyboardInterrupt)
        return None if self.error is None or stopped else error_text(self.error)

    def outcome(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


def run_experiment(
    experiment: "Experiment",
    resolved: Resolved,
    *,
    argv: list[str] | None = None,
    force: bool = False,
    folder: Path | None = None,
    trial: Settings | None = None,
    when_ready: Callable[[], object] = lambda: None,
) -> Any:
    """Run an experiment with resolved parameters and return what its main function returned.

    `folder` is a run folder chosen by the caller; a run that is there already is continued. `trial` names the trial and its
    sweep this is. `when_ready` is called once nothing prevents the run any more.
    """
    active = current_run()
    if active is not None:
        raise ExperimentError(
            f"cannot run {experiment.name!r}: {active.name or active.folder!r} is still active in this process, and a process "
            "runs one experiment at a time. Wait until it ends, or use run_in_new_process(...)."
        )
    options = {"argv": argv, "force": force, "folder": folder, "trial": trial}
    if processes.must_launch(resolved):
        if folder is None and resolved.values["node_rank"] == 0:  # now: workers fail with a traceback
            resume.look_ahead(experiment, resolved, force=force)
        return processes.launch_experiment(_run_worker, experiment, resolved, options, when_ready)
    if resolved.values["subprocess"] is not None:
        when_ready()
        return _run_subprocess(experiment, resolved)
    _check_device(resolved)
    joined = _join_world(resolved)
    start, lock = _agree_on_start(experiment, resolved, force=force, folder=folder)
    record = start.beginning.record
    if record is not None and start.beginning.is_finished:
        if _rank() == 0:
            lossy = (
                " (parts of what it returned are stored as text)"
                if record.status.get("result_is_complete") is False
                else ""
            )
            print(printable(f"already finished: {record.folder}{lossy}"))
        result = record.result
    else:
        when_ready()
        result = _run_in(experiment, start, lock, argv=argv, trial=trial)
    if joined:  # after an error peers may never answer, so then the group is left as it is
        from drivetrain.runtime.group import destroy_group

        destroy_group()
    return result


def _run_worker(experiment: "Experiment | ExperimentReference", resolved: Resolved, options: Settings) -> object:
    found = experiment.load() if isinstance(experiment, ExperimentReference) else experiment
    return run_experiment(found, resolved, **options)


def _check_device(resolved: Resolved) -> None:
    """Raise where a requested device does not exist, before anything is made."""
    values = resolved.values
    asked = values["device"] if values["device"] not in (None, "auto") else None
    if asked is None and values["cuda"] and _insists_on_cuda(resolved):
        asked = "cuda"
    if asked is not None:
        from drivetrain.runtime.device import choose_device

        choose_device(asked)


def _insists_on_cuda(resolved: Resolved) -> bool:
    """Return whether CUDA was requested by hand; the parameter file of an earlier run lists it with every other value."""
    return resolved.origins.get("cuda") in ("cli", "run")


def _new_run(experiment: "Experiment", folder: Path, resolved: Resolved) -> ExperimentRun:
    values, origins = resolved.values, dict(resolved.origins)
    if not _insists_on_cuda(resolved):
        origins["cuda"] = "default"
    return ExperimentRun(
        folder=folder,
        seed=values["random_seed"],
        params=values,
        name=experiment.name,
        origins=origins,
        secrets=resolved.secrets,
        public=resolved.public,
        bookkeeping=BOOKKEEPING,
        hidden=resolved.hidden(),
    )


def _join_world(resolved: Resolved) -> bool:
    """Join the processes a launcher started together with this one; True if the group was made here."""
    if launched_world() is None:
        return False
    from drivetrain.runtime.group import init_distributed
    from drivetrain.runtime.ranks import is_distributed

    if is_distributed():
        return False
    init_distributed(backend="gloo" if wants_cpu(resolved.values) else None)
    return True


def _rank() -> int:
    from drivetrain.runtime.ranks import get_rank

    return get_rank()


def _agree_on_start(
    experiment: "Experiment", resolved: Resolved, *, force: bool, folder: Path | None
) -> tuple[AgreedStart, FolderLock | None]:
    """Choose and lock the folder on rank 0, and broadcast the decision."""
    from drivetrain.runtime.collectives import broadcast_from_master, why_not_shared

    start, lock = AgreedStart(Path(), resolved, resume.RunStart()), None
    if _rank() == 0:
        try:
            if folder is None:
                start.beginning = resume.choose_run_start(
                    experiment, resolved, force=force, restarted=_num_restarts() > 0
                )
            elif is_run(folder):
                start.beginning = resume.continue_run(read_run(folder), resolved, experiment.parameters, force=force)
            if start.beginning.record is not None:
                start.folder = start.beginning.record.folder
            else:
                path = folder or run_folder.run_path(
                    resolved.values["output_dir"], experiment.name, resolved.values["run_name"]
                )
                start.folder = Path(path)
                if folder is None or not start.folder.is_dir():  # an attempt that died at once has left it empty
                    run_folder.make_folder(start.folder)
                (start.folder / run_folder.ARTIFACTS).mkdir(exist_ok=True)
            if not start.beginning.is_finished:
                own = FolderLock(start.folder)
                if not own.acquire():
                    raise ResumeError(
                        f"the run {start.folder} is in use: {own.holder} holds its lock. Wait until it ends."
                    )
                lock = own
        except Exception as error:
            start.problem = error
    agreed: AgreedStart = broadcast_from_master(start)
    problem = agreed.problem
    if problem is None and not agreed.beginning.is_finished and (why := why_not_shared(agreed.folder, RUN_LOCK)):
        problem = ExperimentError(f"the run folder {agreed.folder} cannot be used: {why} (--output-dir).")
    if problem is not None:
        if lock is not None:
            lock.release()
            if agreed.beginning.record is None:  # it was made here: a name that was given can be used again
                with suppress(OSError):
                    (agreed.folder / run_folder.ARTIFACTS).rmdir()
                    agreed.folder.rmdir()
        raise problem
    return agreed, lock


def _num_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _run_in(
    experiment: "Experiment",
    start: AgreedStart,
    lock: FolderLock | None,
    *,
    argv: list[str] | None,
    trial: Settings | None,
) -> object:
    """Run the main function in its folder, under its lock, log and status."""
    values, record = start.resolved.values, start.beginning.record
    rank = _rank()
    run = _new_run(experiment, start.folder, start.resolved)
    if record is not None:
        run.restore = resume.restorer_for(start.folder, start.beginning.checkpoint)
        values["resume"] = AUTO if values["resume"] == NEVER else values["resume"]
    elif values["checkpoint"] is not None:
        run.restore = resume.loader_of(values["checkpoint"])
    with lock or nullcontext(), _current(run):
        if rank == 0:
            _write_record(experiment, start, argv, trial)
        with (
            run_folder.run_log(start.folder, rank, debug=values["debug"], hidden=run.hidden),
            run_folder.StatusFile(start.folder, run, _num_restarts()) if rank == 0 else nullcontext() as status,
        ):
            for note in (*start.beginning.notes, f"run folder: {start.folder}"):
                logger.info("%s", note)
            is_alone = launched_world() is None and not values["distributed"]
            if is_alone and values["nproc_per_node"] != 1 and run.origins["nproc_per_node"] in ("cli", "run"):
                logger.warning("nproc_per_node has no effect without --distributed: this is one process.")
            ending = _live(experiment, run)
            if status is not None:
                # Written now, so that listing runs need not read all their rows.
                summary_of(start.folder / run_folder.METRICS)
                result = ending.result
                fields = {"result": plain(result), "result_is_complete": is_plain(result)}
                fields |= {"pruned": True} if ending.is_pruned else {}
                error = ending.sentence and hide(ending.sentence, run.hidden)
                try:
                    status.end(ending.state, exit_code=ending.exit_code, error=error, **fields)
                except OSError as problem:  # a full disk must hide neither result nor error
                    logger.error("how the run ended cannot be written: %s", problem)
    return ending.outcome()


@contextmanager
def _current(run: ExperimentRun) -> Iterator[None]:
    """Make a run the active one of this process within the block."""
    set_current_run(run)
    try:
        yield
    finally:
        set_current_run(None)


def _write_record(experiment: "Experiment", start: AgreedStart, argv: list[str] | None, trial: Settings | None) -> None:
    """Write down what the run is made of; a continued run keeps its record and adds to it."""
    resolved, record = start.resolved, start.beginning.record
    # A secret that was not set comes from the code again; one that was set is masked.
    kept = {
        name: None if name in resolved.secrets and not resolved.is_declared(name) else value
        for name, value in resolved.shown().items()
    }
    run_folder.write_parameters(start.folder, kept)
    argv = mask_command(sys.argv if argv is None else argv, resolved.secrets, resolved.hidden())
    if record is not None:
        resumed = [*record.manifest.get("resumed", []), {"argv": argv, "notes": start.beginning.notes}]
        run_folder.add_to_manifest(start.folder, resumed=resumed)
        return
    from drivetrain.runtime.ranks import get_num_processes

    world = launched_world()
    notes = list(start.beginning.notes)
    if world is not None:
        notes.append(
            f"started by a launcher ({world.launcher}): nproc_per_node, nnodes, node_rank, master_* had no effect."
        )
    manifest = run_folder.describe_run(
        experiment.source,
        resolved.hidden(),
        experiment=experiment.name,
        function=experiment.function_name,
        identity=resume.identity(resolved, experiment.parameters),
        seed=resolved.values["random_seed"],
        argv=argv,
        origins=dict(resolved.origins),
        processes=get_num_processes(),
        launcher=None if world is None else world.launcher,
        trial=trial,
        notes=notes,
        directions=experiment.directions,
        devices=_devices(resolved.values),
    )
    run_folder.write_json(start.folder / run_folder.MANIFEST, manifest)


def _devices(values: Settings) -> list[str]:
    import torch

    if wants_cpu(values) or not torch.cuda.is_available():
        return ["cpu"]
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _live(experiment: "Experiment", run: ExperimentRun) -> RunOutcome:
    """Seed, call hooks and main, and end everything that belongs to the run."""
    from drivetrain.runtime.seeds import set_deterministic, set_seed

    ending = RunOutcome()
    try:
        set_deterministic(run.params["deterministic"])
        set_seed(run.seed)
        bind_proxies(experiment, run)
        app.before_experiment(experiment, run.params)
        ending.result = experiment.signature.call(run.params, run.origins)
    except BaseException as error:
        ending = _outcome_of_main(error, run)
    problems: list[BaseException | None] = [run.end()]
    endings: list[Callable[[], object]] = [
        getattr(run.recorder, "close", lambda: None),
        lambda: app.after_experiment(ending.error),
        processes.end_subprocesses,
        lambda: set_deterministic("off"),
    ]
    for act in endings:
        try:
            act()
        except BaseException as error:
            problems.append(error)
    first = next((entry for entry in problems if entry is not None), None)
    if first is not None and ending.error is None:
        ending = _outcome_of_main(first, run)
    if ending.state == "failed":
        # Python prints the traceback on the console; the log keeps it as well.
        logger.error("%s: failed", experiment.name, exc_info=ending.error, extra={"file_only": True})
    else:
        logger.info("%s: %s", experiment.name, "pruned" if ending.is_pruned else ending.state)
    return ending


def _outcome_of_main(error: BaseException, run: ExperimentRun) -> RunOutcome:
    if isinstance(error, SystemExit) and error.code in (0, None):
        return RunOutcome()
    if isinstance(error, TrialPruned):
        return RunOutcome(error=error)
    if isinstance(error, KeyboardInterrupt):
        return RunOutcome(error=error, state="interrupted", exit_code=128 + signal.SIGINT)
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    stopped = run.interrupted or code in processes.STOP_STATUSES
    return RunOutcome(error=error, state="interrupted" if stopped else "failed", exit_code=code)


def bind_proxies(experiment: "Experiment", run: ExperimentRun) -> None:
    """Bind the live names, such as `params`, to this run."""
    bind, subprocess = proxies.bind, run.params["subprocess"]
    bind(proxies.current_experiment, experiment)
    bind(proxies.params, run.params)
    bind(proxies.output_dir, run.folder)
    bind(proxies.params_file, run.folder / run_folder.PARAMETERS if subprocess is None else Path(subprocess))
    bind(proxies.random_gen, run.random_gen)
    bind(proxies.subprocess_counter, 0)


def _run_subprocess(experiment: "Experiment", resolved: Resolved) -> object:
    """Run the main function in the folder of the process that started this one."""
    values = resolved.values
    folder = Path(values["subprocess"]).parent
    run = _new_run(experiment, folder, resolved)
    with _current(run), run_folder.run_log(folder, values["local_rank"], debug=values["debug"], hidden=run.hidden):
        ending = _live(experiment, run)
    return ending.outcome()


def new_seed(nbits: int = 32) -> int:
    """Return the next random number of the run's own generator, for seeding others; it starts from `random_seed`."""
    return int(proxies.target(proxies.random_gen).getrandbits(nbits))


def run_in_new_process(experiment: "Experiment", params: Settings) -> BaseProcess:
    """Start an experiment in a new process; its parameters and the way to find it are checked before."""
    experiment.resolve(params)
    return processes.start_process(_run_params, processes.reference_to(experiment), params)


def launch_subprocess(**additional_params: object) -> BaseProcess:
    """Run the current experiment's main function in another process, with the same parameters and folder.

    It has the same seed too; give it its own with `launch_subprocess(random_seed=new_seed())`.
    """
    run = current_run()
    if run is None:
        raise ExperimentError("launch_subprocess() works only inside a running experiment, and none is running.")
    if is_subprocess():
        raise AssertionError("a subprocess cannot launch further subprocesses; launch them in the main process.")
    experiment: Experiment = proxies.target(proxies.current_experiment)
    number = int(proxies.target(proxies.subprocess_counter)) + 1
    resolved = Resolved(dict(run.params), dict(run.origins), run.secrets, run.public)
    own = {"subprocess": str(proxies.target(proxies.params_file)), "local_rank": number}
    for name, given in given_in_python(additional_params | own, experiment.parameters).items():
        if given.value is not None:
            parameter = experiment.parameters[name]
            resolved.values[name] = parameter.read(given.value, is_text=False, where="launch_subprocess")
            resolved.origins[name] = "run"
    absent = absent_fields(experiment.parameters, resolved)
    for name, parameter in experiment.parameters.items():
        if parameter.optional_within and resolved.values[name] is None and name not in absent:
            resolved.values[name] = parameter.make_default()
    process = processes.start_process(_run_resolved, processes.reference_to(experiment), resolved, ends_with_run=True)
    proxies.bind(proxies.subprocess_counter, number)
    return process


def is_subprocess() -> bool:
    """Return whether `launch_subprocess` started this process."""
    return proxies.target(proxies.params)["subprocess"] is not None


def local_rank() -> int:
    """Return this process's number: 0, or the running number of a subprocess; with several ranks its local rank."""
    number = int(proxies.target(proxies.params)["local_rank"])
    if number == 0:
        from drivetrain.runtime.ranks import get_local_rank

        return get_local_rank()
    return number


def _run_params(reference: ExperimentReference, params: Settings) -> None:
    processes.leave_launched_world()
    reference.load().run(params)


def _run_resolved(reference: ExperimentReference, resolved: Resolved) -> None:
    processes.leave_launched_world()
    run_experiment(reference.load(), resolved)
