"""An experiment in other processes: how they find it, how workers are launched, and how subprocesses end with the run.

A new process receives names, not functions: it imports the module, or loads the file, and takes the experiment from there. Whether
that works is checked here, before anything is started. Under torchrun, accelerate launch or srun nothing is launched: the process
joins the world it is in.
"""

import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ExperimentError
from drivetrain.core.types import Settings
from drivetrain.experiment.command_line import importing
from drivetrain.experiment.resolve import NEVER, Resolved
from drivetrain.experiment.run_folder import check_is_new, run_path
from drivetrain.runtime.environment import MPI_VARIABLES, in_launched_process

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

LAUNCH_VARIABLES = {name for names in MPI_VARIABLES for name in names}.union(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE SLURM_PROCID".split()
)
"""What a launcher sets for one process, and not for processes that this one starts."""

STOP_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
WAIT_SECONDS = 30.0
END_SECONDS = 5.0

_started: list[BaseProcess] = []


@dataclass(frozen=True)
class ExperimentReference:
    """Where an experiment is defined."""

    module: str
    file: str | None
    """Set where the module cannot be imported by its name."""
    attribute: str

    def load(self) -> "Experiment":
        """Return the experiment, importing its module if that has not happened yet."""
        module = sys.modules.get(self.module)
        if module is None:
            with importing():
                module = load_file(self.file, self.module) if self.file else importlib.import_module(self.module)
        found: Experiment = getattr(module, self.attribute)
        return found


def load_file(file: str, name: str) -> ModuleType:
    """Load a Python file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ExperimentError(f"{file} cannot be loaded as a Python file. Give a path that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module


def reference_to(experiment: "Experiment") -> ExperimentReference:
    """Return how another process finds the experiment; an `ExperimentError` explains why it cannot."""
    name = experiment.main_function.__module__
    module = sys.modules.get(name)
    names = {} if module is None else vars(module)
    likely = experiment.main_function.__name__
    attribute = next((entry for entry in (likely, *names) if names.get(entry) is experiment), None)
    way_out = "Define it at the top level of a module or script."
    if attribute is None:
        raise ExperimentError(
            f"the experiment {experiment.name!r} cannot be found by a new process: it is not an attribute of its module "
            f"{name!r} (it was defined inside a function?). {way_out}"
        )
    file = getattr(module, "__file__", None)
    if name == "__main__" and not (file and Path(file).is_file()):
        raise ExperimentError(
            f"the experiment {experiment.name!r} was defined in a notebook or at a prompt, where a new process cannot find it. {way_out}"
        )
    if name == "__main__" or _is_importable(name, file):
        return ExperimentReference(name, None, attribute)
    if not (file and Path(file).is_file()):
        raise ExperimentError(f"the module {name!r} of experiment {experiment.name!r} has no file to load. {way_out}")
    return ExperimentReference(name, str(Path(file).resolve()), attribute)


def _is_importable(name: str, file: str | None) -> bool:
    """Return whether importing the name gives this very file; a module loaded by hand may share its name with another."""
    try:
        top = importlib.util.find_spec(name.partition(".")[0])
        spec = importlib.util.find_spec(name) if top is not None else None
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None or (file is not None and spec.origin is not None and Path(spec.origin) != Path(file)):
        return False
    # find_spec answers from sys.modules first, so the search path is asked as well.
    parent = name.rpartition(".")[0]
    search_path = getattr(sys.modules[parent], "__path__", None) if parent else None
    return importlib.machinery.PathFinder.find_spec(name, search_path) is not None


def must_launch(resolved: Resolved) -> bool:
    """Return whether workers have to be started for this run."""
    return bool(resolved.values["distributed"]) and resolved.values["subprocess"] is None and not in_launched_process()


def launch_experiment(
    worker: Callable[..., object],
    experiment: "Experiment",
    resolved: Resolved,
    options: Settings,
    when_ready: Callable[[], object],
) -> Any:
    """Call `worker(experiment or reference, resolved, options)` on each process and return what rank 0 of this node returned."""
    from drivetrain.runtime.launch import WorkerFailed, launch

    values = resolved.values
    if options.get("folder") is None and values["resume"] == NEVER and values["node_rank"] == 0:
        # Named here, by the node of rank 0, so that a group that is started again finds the folder of its first attempt.
        folder = run_path(values["output_dir"], experiment.name, values["run_name"])
        check_is_new(folder)
        options = options | {"folder": folder}
    chosen = any(resolved.is_declared(name) for name in ("master_addr", "master_port"))
    try:
        experiment_or_names: Experiment | ExperimentReference = reference_to(experiment)
    except ExperimentError:  # workers that are forked can be given the experiment itself
        experiment_or_names = experiment
    try:
        results = launch(
            worker,
            values["nproc_per_node"],
            args=(experiment_or_names, resolved, options),
            nnodes=values["nnodes"],
            node_rank=values["node_rank"],
            master_addr=values["master_addr"],
            master_port=values["master_port"] if chosen or values["nnodes"] != 1 else None,
            max_restarts=values["max_restarts"],
        )
    except WorkerFailed as failure:
        when_ready()  # there were workers, so nothing prevented them
        if failure.exit_code in STOP_STATUSES:
            raise SystemExit(failure.exit_code) from None
        if options.get("folder") is not None:
            failure.add_note(f"run folder: {Path(options['folder'])}")
        raise
    return results[0]


def start_process(target: Callable[..., object], *args: object, ends_with_run: bool = False) -> BaseProcess:
    """Start a new interpreter that calls a module-level function."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    if ends_with_run:
        _started.append(process)
    return process


def end_subprocesses() -> None:
    """Wait for the subprocesses of the run that ends; terminate those that take too long, then kill them."""
    processes = [process for process in _started if process.is_alive()]
    _started.clear()
    for seconds, act in ((WAIT_SECONDS, "terminate"), (END_SECONDS, "kill"), (END_SECONDS, "")):
        deadline = time.monotonic() + seconds
        while processes and (left := deadline - time.monotonic()) > 0:
            try:
                wait([process.sentinel for process in processes], timeout=left)
            except KeyboardInterrupt:  # nobody wants to wait any longer
                for process in processes:
                    process.terminate()
                raise
            processes = [process for process in processes if process.is_alive()]
        for process in processes if act else []:
            getattr(process, act)()


def leave_launched_world() -> None:
    """Remove a launcher's variables, which this process inherited: it is not a rank of the parent's group."""
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
