"""`drivetrain doctor`: check this machine, a run, or whether a program resumes exactly."""

import argparse
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drivetrain.core.display import format_bytes
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.experiment.cli.output import Check, own_command, print_checks
from drivetrain.experiment.cli.runs import find_run
from drivetrain.experiment.command_line import JSON, argument
from drivetrain.experiment.records import DEFAULT_PLACE, FAILED, INTERRUPTED, LOST, RUNNING, RunRecord
from drivetrain.experiment.reports.gather import RunData, duration, gather_run, moment, tail
from drivetrain.experiment.run_folder import MANIFEST, PARAMETERS, STATUS, read_json
from drivetrain.runtime.limits import memory_kills, number_after

REQUIRED = ("torch", "numpy", "PyYAML", "rich", "safetensors", "pydantic")
OPTIONAL = {
    "scikit-learn": "the demo's data",
    "matplotlib": "figures and plots of schedules",
    "tensorboard": "recording for TensorBoard",
    "wandb": "recording to Weights & Biases",
    "trackio": "recording to trackio",
    "mlflow-skinny": "recording to MLflow",
    "optuna": "sweeps with TPE and pruning",
    "submitit": "sweeps on SLURM",
    "ray": "sweeps on a Ray cluster",
    "torchmetrics": "metrics from torchmetrics",
    "torchvision": "some augmentations and models",
    "transformers": "training Hugging Face models",
    "timm": "timm's models",
}
"""Packages that are loaded only by what needs them, and what each is for."""

LEAST_TORCH = (2, 11)
LEAST_DISK = 2_000_000_000
LEAST_SHARED_MEMORY = 256_000_000
GROUP_NAME = "gloo"

STALE_SECONDS = 60.0
"""A live run renews its heartbeat every ten seconds."""

CAUSES = (
    (
        r"OutOfMemoryError|out of memory|Cannot allocate memory|std::bad_alloc",
        "memory ran out",
        "use a smaller batch, microbatch_size=..., or a larger machine",
    ),
    (r"No space left on device|ENOSPC|Disk quota exceeded", "the disk was full", "make room, then resume"),
    (
        r"DataLoader worker .* is killed|Bus error|unable to .* shared memory",
        "a data worker died, usually from too little shared memory",
        "use fewer workers, or give /dev/shm more room",
    ),
    (
        r"NCCL|Connection closed by peer|Connection reset by peer|Watchdog caught collective",
        "another process or the network between them failed",
        "see the logs of the other ranks, log.rank-N.txt",
    ),
    (
        r"NonFinite(Loss|State)?Error|is NaN|non-finite",
        "the loss became NaN or infinite, or gradients or weights did",
        "lower the learning rate, clip gradients, look at the data",
    ),
)
"""A pattern in a log, what it means, and what to do."""

CHECK_HELP = "run TARGET for N steps, and again with a kill half-way, and compare"
OPTIONS_HELP = "options of the experiment TARGET"
ARGUMENTS = {
    "doctor": [
        argument("--resume-check", type=int, metavar="N", help=CHECK_HELP),
        argument("--output-dir", default=DEFAULT_PLACE, help="where runs will be written (default: %(default)s)"),
        JSON,
        argument("subject", nargs="?", metavar="RUN|TARGET", help="the folder of a run, or file.py:name"),
        argument("options", nargs=argparse.REMAINDER, metavar="--option VALUE", help=OPTIONS_HELP),
    ]
}


def doctor(arguments: argparse.Namespace) -> int:
    """Run the requested checks; return 1 if one fails."""
    subject = arguments.subject
    if arguments.resume_check is not None:
        from drivetrain.experiment.cli.resume_check import check_resume

        if subject is None:
            raise ConfigError(
                "--resume-check needs a TARGET: an experiment, or a function that returns a Trainer, such as train.py:build."
            )
        return print_checks(check_resume(subject, arguments.resume_check, arguments.options), as_json=arguments.json)
    if arguments.options:
        raise ConfigError(
            f"{arguments.options[0]!r} is not a known option. Options come before RUN, or belong to --resume-check N TARGET."
        )
    if subject is None:
        checks = itertools.chain(_packages(), _devices(), _processes(), _places(arguments.output_dir), _tools())
        return print_checks(checks, as_json=arguments.json)
    if not os.path.isdir(subject) and (subject.endswith(".py") or ":" in subject):
        raise ConfigError(
            f"{subject} is not a run folder. To check whether a program resumes exactly: drivetrain doctor --resume-check 20 {subject}"
        )
    return print_checks(check_run(find_run(subject)), as_json=arguments.json)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Check]:
    from drivetrain import __version__

    python = ".".join(map(str, sys.version_info[:3]))
    yield Check(sys.version_info >= (3, 11), "Python", f"{python}, {sys.executable}", "")
    yield Check(True, "drivetrain", f"{__version__}, {Path(__file__).parents[2]}")
    for package in REQUIRED:
        version = _version(package)
        remedy = "" if version else f"pip install {package}"
        yield Check(version is not None, package, version or "not installed, and it is required", remedy)
    version = _version("torch")
    parts = (version or "").partition("+")[0].split(".")[:2]
    if version is not None and tuple(int(part) for part in parts if part.isdecimal()) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        yield Check(False, "torch", f"{version} is older than {least}", f"pip install 'torch>={least}'")
    for package, purpose in OPTIONAL.items():
        version = _version(package) or (_version("mlflow") if package.startswith("mlflow") else None)
        found = f"{version} ({purpose})" if version else f"not installed ({purpose})"
        yield Check(True if version else None, package, found, "" if version else f"pip install {package}")


def _devices() -> Iterator[Check]:
    import torch

    from drivetrain.runtime.device import choose_device, usable_cpus

    threads = os.environ.get("OMP_NUM_THREADS")
    extra = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Check(
        True, "CPUs", f"{usable_cpus()} usable of {os.cpu_count()}, torch uses {torch.get_num_threads()} threads{extra}"
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        built = torch.backends.cuda.is_built()
        remedy = "check the driver with nvidia-smi" if built else "install a build of torch with CUDA to use a GPU"
        yield Check(None, "accelerator", "none", remedy)
    elif accelerator.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found = f"{properties.name}, {format_bytes(properties.total_memory)}, compute capability {properties.major}.{properties.minor}"
            yield Check(True, f"cuda:{index}", found)
    else:
        yield Check(True, accelerator.type, f"{torch.accelerator.device_count()} device(s)")
    try:
        yield Check(True, "a run will use", str(choose_device("auto")))
    except DrivetrainError as error:
        yield Check(False, "a run will use", str(error))


def _processes() -> Iterator[Check]:
    import torch.distributed as dist

    from drivetrain.runtime.environment import launched_world

    try:
        world = launched_world()
    except DrivetrainError as error:
        yield Check(False, "launcher", str(error))
        return
    if world is None:
        yield Check(True, "launcher", "none: a run is one process unless you use --distributed or `drivetrain launch`")
    else:
        yield Check(True, "launcher", f"{world.launcher}: rank {world.rank} of {world.world_size}")
    if not dist.is_available():
        yield Check(False, "process group", "this build of torch has no torch.distributed", "install another build")
        return
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    backends = [name for name, is_there in available.items() if is_there]
    if dist.is_initialized():
        yield Check(True, "process group", f"{dist.get_backend()}, {dist.get_world_size()} processes")
        return
    try:
        dist.init_process_group(GROUP_NAME, store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = "set GLOO_SOCKET_IFNAME to the name of a network interface"
        yield Check(False, "process group", f"{GROUP_NAME} cannot start: {error}", remedy)
        return
    yield Check(True, "process group", f"{GROUP_NAME} starts; backends: {', '.join(backends)}")


def _places(output_dir: str) -> Iterator[Check]:
    place = Path(output_dir).resolve()
    existing = next(folder for folder in (place, *place.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    remedy = "make room, or choose another --output-dir" if free < LEAST_DISK else ""
    yield Check(free >= LEAST_DISK, "free disk", f"{format_bytes(free)} in {existing}", remedy)
    writable = os.access(existing, os.W_OK)
    remedy = "" if writable else "choose another --output-dir"
    yield Check(writable, "output folder", f"{place} can{'' if writable else 'not'} be written", remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        enough = free >= LEAST_SHARED_MEMORY
        remedy = "give the container more (docker run --shm-size 1g): data workers pass batches through it"
        found = f"{format_bytes(free)} free in {shared}"
        yield Check(enough or None, "shared memory", found, "" if enough else remedy)


def _tools() -> Iterator[Check]:
    for tool, purpose in {"git": "records commit and changes of a run", "c++": "torch.compile on the CPU"}.items():
        path = shutil.which(tool) or (shutil.which("g++") or shutil.which("clang++") if tool == "c++" else None)
        yield Check(True if path else None, tool, f"{path} ({purpose})" if path else f"not found ({purpose})")


def check_run(record: RunRecord) -> Iterator[Check]:
    """Yield one check after the other."""
    run = gather_run(record.folder, verify="full")
    for name in (MANIFEST, STATUS, PARAMETERS):
        path = record.folder / name
        readable = bool(read_json(path)) if name.endswith(".json") else bool(record.parameters)
        damage = "missing or damaged" if not path.exists() or path.stat().st_size else "empty"
        yield Check(readable, name, "readable" if readable else damage)
    yield from _metrics(run)
    yield from _checkpoints(run)
    yield _state(record)
    if record.state in (FAILED, LOST, INTERRUPTED):
        yield from find_end_causes(run)
        valid = [line.name for line in run.checkpoints if line.problem is None]
        command = f"{own_command()} resume {shlex.quote(str(record.folder))}"
        if valid:
            yield Check(True, "next", f"{valid[-1]} is valid", command)
        else:
            yield Check(None, "next", "no valid checkpoint: the run can only start from the beginning")


def _metrics(run: RunData) -> Iterator[Check]:
    count = sum(curve.count for curve in run.curves.values())
    problem = "; ".join(run.notes)
    yield Check(not problem, "metrics", problem or f"{count} values of {len(run.curves)} metrics")
    for tag, curve in run.curves.items():
        if curve.bad_step is not None:
            remedy = "lower the learning rate, clip gradients, look at the data of that step"
            is_loss = "loss" in tag.lower()
            yield Check(False, tag, f"not finite from step {curve.bad_step} on", remedy if is_loss else "")


def _checkpoints(run: RunData) -> Iterator[Check]:
    for line in run.checkpoints:
        good = line.problem is None
        found = f"{format_bytes(line.size)}, every hash matches" if good else f"damaged: {line.problem}"
        yield Check(good, line.name, found, "" if good else "it is skipped on resume; delete it")
    if not run.checkpoints:
        yield Check(None, "checkpoints", "none")
    left = sorted(run.record.checkpoints_path.glob(".tmp-*"))
    if left and not run.record.is_live:
        names = ", ".join(path.name for path in left)
        yield Check(None, "half a checkpoint", f"{names}: the run died while saving", "the next start removes it")


def _state(record: RunRecord) -> Check:
    status, state = record.status, record.state
    age = time.time() - float(status.get("heartbeat") or 0)
    if record.has_ended:
        return Check(True, "state", f"{state} after {duration(status.get('seconds'))}")
    if state == RUNNING:
        stale = age > STALE_SECONDS
        found = f"running, last heartbeat {duration(max(age, 0))} ago, step {status.get('step')}"
        return Check(not stale, "state", found, "it may hang: py-spy dump --pid shows where" if stale else "")
    last = f", last heartbeat {moment(float(status.get('heartbeat') or 0))}, step {status.get('step')}"
    return Check(False, "state", state + last)


def find_end_causes(run: RunData) -> Iterator[Check]:
    """Yield what ended a run, the surest evidence first."""
    record, status = run.record, run.record.status
    code = status.get("exit_code")
    if record.state == INTERRUPTED:
        names = {128 + entry.value: entry.name for entry in signal.Signals}
        name = names.get(code or 0, "a signal")
        yield Check(None, "cause", f"stopped cleanly by {name}: sent by a user or a scheduler")
        return
    logs = sorted(record.folder.glob("log*.txt"))
    evidence = "\n".join([str(status.get("error") or ""), *map(tail, logs)])
    known = [(cause, remedy) for pattern, cause, remedy in CAUSES if re.search(pattern, evidence, re.IGNORECASE)]
    for cause, remedy in known:
        yield Check(False, "cause", cause, remedy)
    if status.get("error"):
        yield Check(False, "error", str(status["error"]))
    elif record.state == LOST and not known:
        yield Check(False, "cause", _cause_without_message(record))


def _cause_without_message(record: RunRecord) -> str:
    """Return what may have ended a process that left no message."""
    heartbeat = float(record.status.get("heartbeat") or 0)
    if (record.manifest.get("host") or {}).get("name") == platform.node():
        booted = _boot_time()
        if booted > heartbeat > 0:
            return f"this machine was restarted at {moment(booted)}, after the last heartbeat"
        if kills := memory_kills():
            return f"killed without a message; the kernel has ended {kills} process(es) because memory ran out, perhaps this one"
    free = shutil.disk_usage(record.folder).free
    if free < 100_000_000:
        return f"it ended without a message, and the disk has only {format_bytes(free)} left"
    return "killed without a message: SIGKILL (by hand, a scheduler, or the kernel because memory ran out), a crash, or a power cut"


def _boot_time() -> int:
    return number_after(Path("/proc/stat"), "btime") or 0
