"""One experiment on several processes: this process becomes the agent, and the main function runs in its workers.

Under torchrun, accelerate launch or srun nothing is started: the process joins the world it is in.
"""

import signal
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment.references import Reference, reference_to
from drivetrain.experiment.resolve import Resolved
from drivetrain.experiment.resume import NEVER
from drivetrain.experiment.run_folder import refuse_existing, run_path
from drivetrain.runtime.environment import in_launched_process

STOP_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def must_launch(resolved: Resolved) -> bool:
    """Say whether workers have to be started for this run."""
    return bool(resolved.values["distributed"]) and resolved.values["subprocess"] is None and not in_launched_process()


def wants_cpu(values: dict[str, Any]) -> bool:
    """Say whether a run keeps to the CPU, whatever else there is."""
    device = values["device"]
    return str(device) == "cpu" or (device in (None, "auto") and not values["cuda"])


def launch_experiment(experiment: Any, resolved: Resolved, options: dict[str, Any]) -> Any:
    """Run an experiment on the workers its parameters ask for and return what rank 0 of this node returned."""
    from drivetrain.runtime.launch import WorkerFailed, launch

    values = resolved.values
    if options.get("folder") is None and values["resume"] == NEVER:
        # Named here, so that a group that is started again finds the folder of its first attempt.
        folder = run_path(values["output_dir"], experiment.name, values["run_name"])
        if values["node_rank"] == 0:  # node 0 makes it, so the others may find it made
            refuse_existing(folder)
        options = options | {"folder": folder}
    single = (
        values["nnodes"] == 1 and not resolved.is_declared("master_addr") and not resolved.is_declared("master_port")
    )
    try:
        results = launch(
            _run_worker,
            values["nproc_per_node"],
            args=(_portable(experiment), resolved, options),
            nnodes=values["nnodes"],
            node_rank=values["node_rank"],
            master_addr=values["master_addr"],
            master_port=None if single else values["master_port"],
            max_restarts=values["max_restarts"],
        )
    except WorkerFailed as failure:
        if failure.exit_code in STOP_STATUSES:
            raise SystemExit(failure.exit_code) from None
        if options.get("folder") is not None:
            failure.add_note(f"run folder: {Path(options['folder'])}")
        raise
    return results[0]


def _portable(experiment: Any) -> Any:
    """Return names by which workers find the experiment; without any it is passed as it is, which needs forking."""
    try:
        return reference_to(experiment)
    except ExperimentError:
        return experiment


def _run_worker(experiment: Any, resolved: Resolved, options: dict[str, Any]) -> Any:
    from drivetrain.experiment.running import run_experiment

    found = experiment.load() if isinstance(experiment, Reference) else experiment
    return run_experiment(found, resolved, **options)
