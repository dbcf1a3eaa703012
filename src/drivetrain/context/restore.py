"""What `autotransform` does: restore, move, distribute, and restore random states, in this order.

Reading checkpoints belongs to a folder above this one, so the run carries the reader: whoever starts a run that
begins from a checkpoint puts a function into `run.restore`. It is given the Context, loads it, and returns the random
states to continue with, or None. They are applied last, because moving and distributing draw random numbers and
reseed.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from drivetrain.context.table import OTHER_KIND, walk
from drivetrain.core.errors import ExperimentError, ResumeError
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.group import join_launched_world
from drivetrain.runtime.ranks import is_distributed
from drivetrain.runtime.run import Run, current_run
from drivetrain.runtime.seeds import restore_rng

if TYPE_CHECKING:
    from drivetrain.context.context import Context

log = logging.getLogger("drivetrain")


class Restorer(Protocol):
    """Loads a Context from the run's checkpoint."""

    def __call__(self, context: "Context") -> Mapping[str, Any] | None:
        """Load the Context and return what `capture_rng` had returned, or None to leave random states alone."""


def follow_run(context: "Context") -> None:
    """Bring a Context to where the current run wants it; outside a run its device is chosen, and the launcher's world is joined."""
    run = current_run()
    device = wanted_device(run)
    join_launched_world(device)
    random_states = None if run is None else _restore(context, run)
    context.to(device)
    if is_distributed() or (run is not None and run.params.get("distributed")):
        context.ddp()
    if random_states is not None:
        restore_rng(random_states)


def _restore(context: "Context", run: Run) -> Mapping[str, Any] | None:
    restorer: Restorer | None = getattr(run, "restore", None)
    if restorer is None:
        if run.params.get("checkpoint") is not None:
            raise ExperimentError(
                f"the run was given checkpoint={run.params['checkpoint']!r}, but nothing that reads it: run.restore is None. "
                "Start the run through drivetrain.experiment, or load it with ctx.load_state_dict(load_checkpoint(...))."
            )
        return None
    if run.params.get("resume", "never") not in ("never", None):
        check_exact(context)
    return restorer(context)


def check_exact(context: "Context") -> None:
    """Reject a resume of a Context with a loader without state, whose position in the data is not known."""
    lost = [
        path
        for path, kind, item in walk(context)
        if kind is OTHER_KIND and isinstance(item, torch.utils.data.DataLoader)
    ]
    if lost:
        raise ResumeError(
            f"{', '.join(lost)}: a loader without state cannot continue at the sample where the run stopped. Use "
            "drivetrain.SmartDataLoader, or begin a new run from the weights with --checkpoint."
        )


def wanted_device(run: Run | None) -> torch.device:
    """Return the device a run asks for: `device`, else CUDA as `cuda` says; a default falls back to the CPU, a request fails."""
    params = {} if run is None else run.params
    if params.get("device", "auto") not in (None, "auto"):
        return choose_device(params["device"])
    if not params.get("cuda", True):
        return torch.device("cpu")
    asked = run is not None and run.origins.get("cuda", "default") not in ("default", "defaults")
    device = choose_device("cuda" if asked else "auto")
    if run is not None and device.type == "cpu":
        log.info("No accelerator found: running on the CPU.")
    return device
