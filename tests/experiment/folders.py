"""Run folders made by hand, in the documented format, for tests of what reads them."""

import json
import math
import zlib
from pathlib import Path
from struct import pack

import yaml

from drivetrain.core.locking import FolderLock


def make_run(
    place: Path,
    name: str = "2026-01-31_12-00-00_ab12cd",
    *,
    experiment: str = "digits",
    state: str = "finished",
    lr: float = 0.1,
    steps: int = 50,
    started: float = 1_770_000_000.0,
    losses=None,
    error: str | None = None,
    diff: str = "",
    packages: dict | None = None,
    metrics: bool = True,
) -> Path:
    """Write the folder of a run that took `steps` steps, with losses and accuracies."""
    folder = place / experiment / name
    folder.mkdir(parents=True)
    parameters = {"lr": lr, "epochs": 3, "random_seed": 7, "output_dir": str(place), "resume": "never"}
    (folder / "parameters.yaml").write_text(yaml.safe_dump(parameters))
    manifest = {
        "schema": 1,
        "experiment": experiment,
        "source": None,
        "started": started,
        "identity": "x",
        "seed": 7,
        "argv": ["train.py", "--lr", str(lr)],
        "origins": {
            "lr": "cli",
            "epochs": "default",
            "random_seed": "default",
            "output_dir": "run",
            "resume": "default",
        },
        "processes": 1,
        "launcher": None,
        "trial": None,
        "plan": {"methods": ["amp_native"], "reason": "measured"},
        "notes": [],
        "resumed": [],
        "host": {"name": "box", "system": "Linux", "python": "3.11.2", "processor": "x86_64", "cpus": 2},
        "devices": ["cpu"],
        "git": {"commit": "0123456789abcdef", "branch": "main", "diff": diff},
        "packages": packages or {"torch": "2.11.0", "numpy": "2.0.0"},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    status = {
        "state": state,
        "step": steps,
        "started": started,
        "heartbeat": started + 30,
        "seconds": 30.5,
        "restarts": 0,
        "exit_code": {"finished": 0, "failed": 1, "interrupted": 143}.get(state),
        "error": error,
        "result": {"accuracy": 0.9},
    }
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "log.txt").write_text("[INFO] first line\n[INFO] last line\n")
    if metrics:
        write_metrics(folder, losses or [math.exp(-step / 20) * lr * 10 for step in range(steps)])
    return folder


def write_metrics(folder: Path, losses) -> None:
    """Write a loss at every step and an accuracy every tenth."""
    lines = []
    for step, loss in enumerate(losses):
        value = loss if math.isfinite(loss) else str(loss)
        lines.append({"step": step, "time": 1.0, "kind": "scalar", "tag": "train/loss", "value": value})
        if step % 10 == 9:
            accuracy = 1 - 1 / (step + 2)
            lines.append({"step": step, "time": 1.0, "kind": "scalar", "tag": "eval/accuracy", "value": accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_png(path: Path, size: int = 8) -> None:
    """Write a small grey picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = b"".join(b"\0" + bytes((x * y) % 256 for x in range(size)) for y in range(size))
    chunk = lambda kind, data: pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))
    header = pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(content)


def hold_lock(folder: Path) -> FolderLock:
    """Take the run's lock as a live process does."""
    lock = FolderLock(folder)
    assert lock.acquire()
    return lock
