"""Experiments that tests run in other processes, which import them from here."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from drivetrain.experiment import experiment, launch_subprocess, local_rank, new_seed, output_dir, parameter, report
from drivetrain.runtime import all_gather_values, current_run, get_num_processes, get_rank


@experiment
def describe(tag: str = "none", random_seed: int | None = None):
    """Say where and with what this runs."""
    run = current_run()
    return {
        "tag": tag,
        "folder": str(run.folder),
        "seed": run.seed,
        "rank": get_rank(),
        "world": get_num_processes(),
        "folders": all_gather_values(str(run.folder)),
        "seeds": all_gather_values(run.seed),
        "first": [random.random(), torch.rand(1).item()],
    }


@experiment
def fails_on_rank_one():
    if get_rank() == 1:
        raise ValueError("rank 1 has bad data")
    all_gather_values(0)


@experiment
def dies_once(marker: str = "marker"):
    """Rank 1 kills itself in the first attempt; the second one answers."""
    marked = Path(marker)
    all_gather_values(0)  # by now rank 0 has written down that there is a run
    if get_rank() == 1 and not marked.exists():
        marked.touch()
        os.kill(os.getpid(), 9)
    return {
        "folder": str(current_run().folder),
        "resume": current_run().params["resume"],
        "ranks": all_gather_values(get_rank()),
    }


@parameter(name="seconds", type=float, default=0.0)
@experiment
def with_subprocesses(params):
    """Start two subprocesses that write a while after the main process has come to its end."""
    if local_rank() == 0:
        for _ in range(2):
            launch_subprocess(random_seed=new_seed())
    else:
        time.sleep(params["seconds"])
    output_dir.joinpath(f"rank-{local_rank()}.txt").write_text(str(params["random_seed"]))


@experiment
def on_gpu(x: int = 0, seconds: float = 0.0):
    """Note which GPUs this trial sees, and when."""
    began = time.time()
    if x == 2:
        raise ValueError("two is not a good number")
    time.sleep(seconds)
    note = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "began": began, "ended": time.time()}
    Path(output_dir, "note.json").write_text(json.dumps(note))
    return float(x)


@experiment
def dies(x: int = 0):
    os.kill(os.getpid(), 9)


@experiment
def reports(lr: float = 0.1):
    """Report ten times; a sweep may give it up before."""
    for step in range(10):
        report(lr, step)
    return lr


def closure():
    @experiment
    def inside():
        pass

    return inside


@experiment
def sleeps(x: int = 0, pid_file: str = ""):
    """Start a process that lives long, and wait for it where x is 1."""
    if x == 1:
        child = subprocess.Popen(["sleep", "600"])
        Path(pid_file).write_text(str(child.pid))
        child.wait()
    return float(x)


_calls = 0


@experiment
def speaks(x: int = 0):
    """Print to both streams, also a bar and half a line, and count the calls in this process."""
    global _calls
    _calls += 1
    print(f"{x} says {os.environ.get('SAMPLE_WORD')}")
    print(f"{x} warns", file=sys.stderr)
    print("\r10%\r100%")
    sys.stdout.write("half a line")
    Path(output_dir, "loaded.txt").write_text(str("wave" in sys.modules))
    return float(_calls)
