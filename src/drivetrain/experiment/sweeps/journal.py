"""The journal of a sweep: one line for everything that happens, on the disk before the next thing does.

It is only ever appended to. A line that a crash cut short is ignored, so the sweep can be continued from any moment.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError
from drivetrain.core.files import PRIVATE_FILE, is_regular, load_json, open_regular, read_end, read_limited
from drivetrain.core.types import Settings
from drivetrain.experiment.run_folder import JOURNAL, plain
from drivetrain.experiment.sweeps.trial import ASKED, ENDS, RUNNING, Trial

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

    def write(self, event: str, **fields: object) -> None:
        """Append one event and wait until the disk has it."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **{k: plain(v) for k, v in fields.items()}})
        self._stream.write(line.encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def settle(self, trial: Trial) -> None:
        """Append how a trial, or one attempt at it, ended."""
        names = ("index", "status", "value", "values", "metrics", "run_dir", "error", "seconds", "attempts")
        self.write(trial.status, **{name: getattr(trial, name) for name in names if name != "status"})

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_journal(folder: Path) -> tuple[Settings, list[Trial]]:
    """Return the sweep's settings and its trials as the journal last saw them."""
    path = folder / JOURNAL
    if not is_regular(path):
        raise ExperimentError(f"{folder} is not the folder of a sweep: it has no {JOURNAL}.")
    header: Settings = {}
    trials: dict[int, Trial] = {}
    try:
        lines = read_limited(path, JOURNAL_LIMIT).splitlines()
    except OSError as error:
        raise ExperimentError(f"the journal {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = load_json(line)
        except ValueError:  # cut short by a crash
            continue
        try:
            if isinstance(entry, dict):
                _apply(entry, header, trials)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ExperimentError(
                f"{path}, line {number}: {line[:80]!r} is not an event of a sweep ({error}). Remove the line to read the others."
            ) from None
    if not header:
        raise ExperimentError(f"{path} does not begin with the settings of a sweep, so it cannot be read.")
    return header, [trials[index] for index in sorted(trials)]


def _apply(entry: Settings, header: Settings, trials: dict[int, Trial]) -> None:
    """Follow one event; an entry of another type than we write is an error."""
    event = entry.get("event")
    if event == "sweep" and not header:
        header.update(entry)
    elif event == ASKED:
        index = _typed(entry, "index", int)
        trials[index] = Trial(index, _typed(entry, "params", dict))
    elif event in ("started", *ENDS) and (index := _typed(entry, "index", int)) in trials:
        folder, value = _typed(entry, "run_dir", str, ""), _typed(entry, "value", int | float, None)
        trials[index] = Trial(
            index,
            trials[index].params,
            status=RUNNING if event == "started" else event,
            run_dir=Path(folder) if folder else None,
            attempts=_typed(entry, "attempts", int, trials[index].attempts),
            value=None if value is None else float(value),
            values={name: float(value) for name, value in _typed(entry, "values", dict, {}).items()},
            error=_typed(entry, "error", str | None, None),
            metrics={name: float(value) for name, value in _typed(entry, "metrics", dict, {}).items()},
            seconds=float(_typed(entry, "seconds", int | float, 0.0)),
        )


def _typed(entry: Settings, name: str, kind: Any, *default: Any) -> Any:
    """Return a field of an entry that has the type we write; a missing one, or null, is the default if there is one."""
    value = entry.get(name)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, str) and "\0" in value):
        raise TypeError(f"{name} is {value!r}")
    return value
