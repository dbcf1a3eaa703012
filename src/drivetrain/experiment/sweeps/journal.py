"""The journal of a sweep: one line for everything that happens, on the disk before the next thing does.

It is only ever appended to. A line that a crash cut short is ignored, and so the sweep can be taken up from any moment.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError
from drivetrain.core.files import PRIVATE_FILE, is_regular, open_regular, read_end, read_limited
from drivetrain.experiment.run_folder import plain
from drivetrain.experiment.sweeps.trial import ASKED, FAILED, FINISHED, PRUNED, RUNNING, Trial

JOURNAL = "sweep.jsonl"
SCHEMA = 1
JOURNAL_LIMIT = 2**30
"""Bytes; a sweep of a million trials has less."""


class Journal:
    """Appends events to a sweep's file."""

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        self._stream = os.fdopen(descriptor, "ab")
        if read_end(self._path, 1) not in (b"", b"\n"):
            self._stream.write(b"\n")  # after a line that was cut short

    def write(self, event: str, **fields: Any) -> None:
        """Append one event and wait until the disk has it."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **{k: plain(v) for k, v in fields.items()}})
        self._stream.write(line.encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def settle(self, trial: Trial) -> None:
        """Append how a trial, or one attempt at it, ended."""
        names = ("index", "status", "value", "metrics", "run_dir", "error", "seconds", "attempts")
        self.write(trial.status, **{name: getattr(trial, name) for name in names if name != "status"})

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_journal(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
    """Return the sweep's settings and its trials as the journal last saw them."""
    path = folder / JOURNAL
    if not is_regular(path):
        raise ExperimentError(f"{folder} is not the folder of a sweep: it has no {JOURNAL}.")
    header: dict[str, Any] = {}
    trials: dict[int, Trial] = {}
    try:
        lines = read_limited(path, JOURNAL_LIMIT).splitlines()
    except OSError as error:
        raise ExperimentError(f"the journal {path} cannot be read: {error}") from error
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            _apply(entry, header, trials)
    if not header:
        raise ExperimentError(f"{path} does not begin with the settings of a sweep, so it cannot be read.")
    return header, [trials[index] for index in sorted(trials)]


def _apply(entry: dict[str, Any], header: dict[str, Any], trials: dict[int, Trial]) -> None:
    event, index = entry.get("event"), entry.get("index")
    if event == "sweep" and not header:
        header.update(entry)
    elif event == ASKED:
        trials[int(index)] = Trial(int(index), dict(entry["params"]))  # type: ignore[arg-type]
    elif event in ("started", FINISHED, FAILED, PRUNED) and index in trials:
        trial = trials[index]
        trial.status = RUNNING if event == "started" else str(event)
        trial.run_dir = Path(entry["run_dir"]) if entry.get("run_dir") else None
        trial.attempts = int(entry.get("attempts", trial.attempts))
        for name in ("value", "error"):
            setattr(trial, name, entry.get(name))
        trial.metrics = dict(entry.get("metrics") or {})
        trial.seconds = float(entry.get("seconds") or 0.0)
