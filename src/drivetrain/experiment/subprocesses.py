"""Processes that a run starts, and how they end with it.

`launch_subprocess` runs the same experiment once more, in the same folder, with a `local_rank` of its own. When the run ends
they get time to finish, are then asked to end, and at last killed; children that somebody else started are left alone.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment import proxies
from drivetrain.experiment.references import Reference, reference_to
from drivetrain.experiment.resolve import Resolved, given_in_python, resolve
from drivetrain.experiment.standard import LAUNCH_VARIABLES
from drivetrain.runtime.run import current_run

WAIT_SECONDS = 30.0
END_SECONDS = 5.0

_started: list[BaseProcess] = []


def start_process(target: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start a fresh interpreter that calls a module-level function."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


def run_in_new_process(experiment: Any, params: dict[str, Any]) -> BaseProcess:
    """Start an experiment in a process of its own; names and the way to find it are checked before."""
    resolve(experiment.parameters, given_in_python(params, experiment.parameters), experiment.defaults)
    return start_process(_run_params, reference_to(experiment), dict(params))


def launch_subprocess(**additional_params: Any) -> BaseProcess:
    """Run the current experiment's main function in another process, with the same parameters and folder.

    It has the same seed too; give it its own with `launch_subprocess(random_seed=new_seed())`.
    """
    run = current_run()
    if run is None:
        raise ExperimentError("launch_subprocess() works inside a running experiment only; none is running here.")
    if is_subprocess():
        raise AssertionError("a subprocess cannot launch further subprocesses; launch them in the main process.")
    experiment = proxies.target(proxies.current_experiment)
    number = int(proxies.target(proxies.subprocess_counter)) + 1
    resolved = Resolved(dict(run.params), dict(run.origins), run.secrets, run.public)
    place = {"subprocess": str(proxies.target(proxies.params_file)), "local_rank": number}
    for name, given in given_in_python(additional_params | place, experiment.parameters).items():
        resolved.values[name] = experiment.parameters[name].read(given.value, is_text=False, where="launch_subprocess")
        resolved.origins[name] = "run"
    process = start_process(_run_resolved, reference_to(experiment), resolved)
    proxies.bind(proxies.subprocess_counter, number)
    _started.append(process)
    return process


def is_subprocess() -> bool:
    """Say whether `launch_subprocess` started this process."""
    return proxies.target(proxies.params)["subprocess"] is not None


def local_rank() -> int:
    """Return this process's number: 0, or the running number of a subprocess; under distribution its local rank."""
    number = int(proxies.target(proxies.params)["local_rank"])
    if number == 0:
        from drivetrain.runtime.ranks import get_local_rank

        return get_local_rank()
    return number


def end_subprocesses() -> None:
    """Wait for the subprocesses of the run that ends; ask those that take too long to end, then kill them."""
    processes = [process for process in _started if process.is_alive()]
    _started.clear()
    for seconds, act in ((WAIT_SECONDS, "terminate"), (END_SECONDS, "kill"), (END_SECONDS, None)):
        deadline = time.monotonic() + seconds
        while processes and (left := deadline - time.monotonic()) > 0:
            wait([process.sentinel for process in processes], timeout=left)
            processes = [process for process in processes if process.is_alive()]
        for process in processes:
            if act is not None:
                getattr(process, act)()


def leave_launched_world() -> None:
    """Forget what a launcher told the parent: this process is none of the ranks."""
    for name in (*LAUNCH_VARIABLES, "SLURM_PROCID"):
        os.environ.pop(name, None)


def _run_params(reference: Reference, params: dict[str, Any]) -> None:
    leave_launched_world()
    reference.load().run(params)


def _run_resolved(reference: Reference, resolved: Resolved) -> None:
    from drivetrain.experiment.running import run_experiment

    leave_launched_world()
    run_experiment(reference.load(), resolved)
