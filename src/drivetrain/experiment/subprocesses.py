"""Subprocesses of a run: `launch_subprocess` runs the same experiment again, in the same folder, with its own `local_rank`."""

from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment import proxies
from drivetrain.experiment.processes import ExperimentReference, leave_launched_world, reference_to, start_process
from drivetrain.experiment.resolve import Resolved, given_in_python
from drivetrain.experiment.running import run_experiment
from drivetrain.runtime.run import current_run

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment


def run_in_new_process(experiment: "Experiment", params: dict[str, Any]) -> BaseProcess:
    """Start an experiment in a new process; its parameters and the way to find it are checked before."""
    experiment.resolve(params)
    return start_process(_run_params, reference_to(experiment), params)


def launch_subprocess(**additional_params: object) -> BaseProcess:
    """Run the current experiment's main function in another process, with the same parameters and folder.

    It has the same seed too; give it its own with `launch_subprocess(random_seed=new_seed())`.
    """
    run = current_run()
    if run is None:
        raise ExperimentError("launch_subprocess() works inside a running experiment only; none is running here.")
    if is_subprocess():
        raise AssertionError("a subprocess cannot launch further subprocesses; launch them in the main process.")
    experiment: Experiment = proxies.target(proxies.current_experiment)
    number = int(proxies.target(proxies.subprocess_counter)) + 1
    resolved = Resolved(dict(run.params), dict(run.origins), run.secrets, run.public)
    own = {"subprocess": str(proxies.target(proxies.params_file)), "local_rank": number}
    for name, given in given_in_python(additional_params | own, experiment.parameters).items():
        resolved.values[name] = experiment.parameters[name].read(given.value, is_text=False, where="launch_subprocess")
        resolved.origins[name] = "run"
    process = start_process(_run_resolved, reference_to(experiment), resolved, ends_with_run=True)
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


def _run_params(reference: ExperimentReference, params: dict[str, Any]) -> None:
    leave_launched_world()
    reference.load().run(params)


def _run_resolved(reference: ExperimentReference, resolved: Resolved) -> None:
    leave_launched_world()
    run_experiment(reference.load(), resolved)
