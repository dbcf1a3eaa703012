"""What `drivetrain doctor RUN` finds: whether a run's files are whole, and what it died of."""

import math
import platform
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from drivetrain.core.quantities import shown_bytes
from drivetrain.experiment.cli.output import Check
from drivetrain.experiment.records import FAILED, FINISHED, INTERRUPTED, LOST, RUNNING, RunRecord
from drivetrain.experiment.reports.gather import RunData, duration, gather_run, moment, tail
from drivetrain.experiment.run_folder import MANIFEST, PARAMETERS, STATUS, read_json

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
        "a data worker died, usually of too little shared memory",
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
"""What a log says, what that means, and what to do."""


def check_run(record: RunRecord) -> Iterator[Check]:
    """Yield one check after the other."""
    run = gather_run(record.folder, verify="full")
    for name in (MANIFEST, STATUS, PARAMETERS):
        path = record.folder / name
        readable = bool(read_json(path)) if name.endswith(".json") else bool(record.parameters)
        found = (
            "readable" if readable else "missing or damaged" if not path.exists() or path.stat().st_size else "empty"
        )
        yield Check(readable, name, found)
    yield from _metrics(run)
    yield from _checkpoints(run)
    yield _state(record)
    if record.state in (FAILED, LOST, INTERRUPTED):
        yield from causes_of_death(run)
        yield _way_on(run)


def _metrics(run: RunData) -> Iterator[Check]:
    count = sum(len(points) for points in run.series.values())
    problem = "; ".join(run.notes)
    yield Check(not problem, "metrics", problem or f"{count} values of {len(run.series)} metrics")
    for tag, points in run.series.items():
        bad = next((step for step, value in points if not math.isfinite(value)), None)
        if bad is not None:
            remedy = (
                "lower the learning rate, clip gradients, look at the data of that step"
                if "loss" in tag.lower()
                else ""
            )
            yield Check(False, tag, f"not finite from step {bad:g} on", remedy)


def _checkpoints(run: RunData) -> Iterator[Check]:
    for line in run.checkpoints:
        good = line.problem is None
        found = f"{shown_bytes(line.size)}, every hash matches" if good else f"damaged: {line.problem}"
        yield Check(good, line.name, found, "" if good else "it is passed over when the run is resumed; delete it")
    if not run.checkpoints:
        yield Check(None, "checkpoints", "none")
    left = sorted(run.record.checkpoints_path.glob(".tmp-*"))
    if left and not run.record.is_live:
        names = ", ".join(path.name for path in left)
        yield Check(None, "half a checkpoint", f"{names}: the run died while saving", "the next start removes it")


def _state(record: RunRecord) -> Check:
    status, state = record.status, record.state
    age = time.time() - float(status.get("heartbeat") or 0)
    if state == FINISHED:
        return Check(True, "state", f"finished after {duration(status.get('seconds'))}")
    if state == RUNNING:
        stale = age > STALE_SECONDS
        found = f"running, last sign of life {duration(max(age, 0))} ago, step {status.get('step')}"
        return Check(not stale, "state", found, "it may hang: py-spy dump --pid shows where" if stale else "")
    last = f", last sign of life {moment(float(status.get('heartbeat') or 0))}, step {status.get('step')}"
    return Check(False, "state", state + last)


def causes_of_death(run: RunData) -> Iterator[Check]:
    """Yield what ended a run, the surest evidence first."""
    record, status = run.record, run.record.status
    code = status.get("exit_code")
    if record.state == INTERRUPTED:
        name = (
            signal.Signals(code - 128).name
            if isinstance(code, int) and code - 128 in set(signal.Signals)
            else "a signal"
        )
        yield Check(None, "cause", f"stopped in good order by {name}: somebody, or a scheduler, asked it to end")
        return
    evidence = "\n".join([str(status.get("error") or ""), *(tail(path) for path in _logs(record.folder))])
    known = [(cause, remedy) for pattern, cause, remedy in CAUSES if re.search(pattern, evidence, re.IGNORECASE)]
    for cause, remedy in known:
        yield Check(False, "cause", cause, remedy)
    if status.get("error"):
        yield Check(False, "error", str(status["error"]))
    elif record.state == LOST and not known:
        yield Check(False, "cause", _silent_death(record))


def _silent_death(record: RunRecord) -> str:
    """Say what may have ended a process that could write nothing any more."""
    heartbeat = float(record.status.get("heartbeat") or 0)
    if (record.manifest.get("host") or {}).get("name") == platform.node():
        booted = _boot_time()
        if booted is not None and booted > heartbeat:
            return f"this machine was restarted at {moment(booted)}, after the last sign of life"
        kills = _memory_kills()
        if kills:
            return f"killed without a word; here the kernel has ended {kills} process(es) for want of memory, perhaps this one"
    free = shutil.disk_usage(record.folder).free
    if free < 100_000_000:
        return f"it ended without a word, and the disk has only {shown_bytes(free)} left"
    return "killed without a word: SIGKILL (by hand, a scheduler, or the kernel for want of memory), a crash, or a power cut"


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("log*.txt"))


def _boot_time() -> float | None:
    try:
        found = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return float(found[1]) if found else None


def _memory_kills() -> int:
    """Return how many processes of this control group the kernel ended because memory ran out."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/sys/fs/cgroup/memory.events").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _way_on(run: RunData) -> Check:
    valid = [line for line in run.checkpoints if line.problem is None]
    if not valid:
        return Check(None, "way on", "no valid checkpoint: the run can only be begun again")
    return Check(True, "way on", f"{valid[-1].name} is valid", f"drivetrain resume {run.record.folder}")
