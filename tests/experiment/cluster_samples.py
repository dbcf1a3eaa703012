"""Experiments that tests run as jobs of a cluster."""

import os
import signal
import time
from pathlib import Path

import torch

from drivetrain.experiment import experiment, output_dir, report
from drivetrain.runtime.signals import StopSignals


@experiment
def eventful(x: int = 0, markers: str = "."):
    """End well for 0, get killed once for 1, fail for 2, be stopped in good order once for 3."""
    marker = Path(markers, str(x))
    first, _ = not marker.exists(), marker.touch()
    if x == 1 and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if x == 2:
        raise ValueError("two is not a good number")
    if x == 3 and first:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR2)  # what SLURM sends before the time limit
            deadline = time.monotonic() + 10
            while signals.requested is None and time.monotonic() < deadline:
                time.sleep(0.01)
            signals.clear()
        raise SystemExit(143)
    return {"value": x + torch.rand(1).item(), "visible": str(os.environ.get("CUDA_VISIBLE_DEVICES"))}


@experiment
def waits(x: int = 0, until: str = "never"):
    """Wait for a file."""
    Path(output_dir, "pid").write_text(str(os.getpid()))
    while not Path(until).exists():
        time.sleep(0.05)
    return x


@experiment
def hopeless(x: int = 0):
    """Report until the sweep has had enough."""
    for step in range(2000):
        report(1.0, step)
        time.sleep(0.01)
    return x
