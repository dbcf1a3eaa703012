"""What a run folder holds, as plain values: the record, curves, pictures, checkpoints and the end of the log.

Nothing here fails because a run did: a file that is missing or damaged becomes a note.
"""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.display import format_duration
from drivetrain.core.errors import CheckpointError, StateError
from drivetrain.core.files import is_real_folder, is_regular, read_end
from drivetrain.core.types import Settings
from drivetrain.experiment.directions import direction_of, first_declared
from drivetrain.experiment.parameters import BOOKKEEPING
from drivetrain.experiment.records import RunRecord, read_run
from drivetrain.experiment.reports.curves import Curve, MetricsCurves
from drivetrain.experiment.summaries import read_added

PICTURE_FOLDERS = ("images", "figures")
PICTURE_TYPES = {f".{kind}": f"image/{kind}" for kind in ("png", "jpeg", "gif", "webp")} | {".jpg": "image/jpeg"}
SEED = "random_seed"
LOG_LINES = 40
LOG_TAIL = 64 * 1024
"""Bytes from the end of a log in which its last lines are looked for."""


def environment_of(manifest: Mapping[str, Any]) -> Settings:
    """Return the rows of the environment table."""
    host, packages, git = (manifest.get(part) or {} for part in ("host", "packages", "git"))
    return {
        "host": host.get("name"),
        "system": host.get("system"),
        "processor": host.get("processor"),
        "CPUs": host.get("cpus"),
        "devices": ", ".join(map(str, manifest.get("devices") or [])),
        "processes": manifest.get("processes"),
        "launcher": manifest.get("launcher"),
        "Python": host.get("python"),
        "torch": packages.get("torch"),
        "drivetrain": packages.get("drivetrain"),
        "seed": manifest.get("seed"),
        "commit": git.get("commit"),
        "branch": git.get("branch"),
        "source": manifest.get("source"),
        "command": " ".join(map(str, manifest.get("argv") or [])),
    }


@dataclass(frozen=True, kw_only=True)
class PictureFile:
    """An image or figure file of a run."""

    path: Path
    tag: str
    step: int | None


@dataclass(frozen=True, kw_only=True)
class CheckpointLine:
    """One checkpoint as tables show it."""

    name: str
    progress: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    size: int = 0
    problem: str | None = None
    """Why it cannot be used; None when it is valid as far as it was checked."""
    is_best: bool = False
    is_last: bool = False


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything a report or a table shows about one run."""

    record: RunRecord
    recorded: MetricsCurves = field(default_factory=MetricsCurves)
    pictures: tuple[PictureFile, ...] = ()
    checkpoints: tuple[CheckpointLine, ...] = ()
    log_tail: str = ""
    directions: dict[str, str] = field(default_factory=dict)
    """Metrics whose good direction was declared."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""

    @property
    def name(self) -> str:
        """Experiment and folder, which together name a run."""
        return f"{self.record.experiment}/{self.record.folder.resolve().name}"

    @property
    def curves(self) -> dict[str, Curve]:
        """The curve of each metric."""
        return self.recorded.curves

    def metrics(self) -> dict[str, Settings]:
        """Return last and best value of every metric; the best is None where the direction is unknown."""
        found = {}
        for tag, own in self.recorded.tags.items():
            best, best_step = own.best(tag, self.directions)
            found[tag] = {"last": own.last, "best": best, "best_step": best_step, "count": own.count}
        return found


def gather_run(
    folder: str | Path,
    *,
    verify: str = "size",
    directions: Mapping[str, str] | None = None,
    known: MetricsCurves | None = None,
) -> RunData:
    """Read a run folder; `verify` is how carefully checkpoints are checked: off, size or full.

    With what is `known` of its metrics, only rows that were added since are read.
    """
    record, notes = read_run(folder), list[str]()
    recorded = MetricsCurves() if known is None else known
    try:
        recorded = read_added(recorded, record.metrics_path)
    except FileNotFoundError:
        recorded = MetricsCurves()
    except (OSError, StateError) as error:  # what comes before a damaged row is kept
        notes.append(f"the metrics cannot be read: {error}")
    return RunData(
        record=record,
        recorded=recorded,
        pictures=tuple(find_pictures(record.folder)),
        checkpoints=tuple(read_checkpoints(record.checkpoints_path, verify)),
        log_tail=tail(record.log_path),
        directions=first_declared(directions or {}, recorded.directions, record.directions),
        notes=tuple(notes),
    )


def main_metric(series: Iterable[str]) -> str | None:
    """Return the most informative metric of a run: of evaluation rather than training, and a score rather than a loss."""

    def rank(tag: str) -> tuple[bool, bool, str]:
        words = tag.lower()
        evaluated = any(word in words for word in ("eval", "val", "test"))
        scored = direction_of(tag) == "max"
        return not evaluated, not (scored or "loss" in words), words if scored else "~" + words

    return min(series, key=rank, default=None)


def common_objective(of_sweeps: Iterable[str | None]) -> str | None:
    """Return the objective of the sweeps that runs belong to, None where not all belong to one, or they differ."""
    names = set(of_sweeps)
    return names.pop() if len(names) == 1 else None


def find_pictures(folder: Path) -> list[PictureFile]:
    """Return the pictures of a run, tag by tag, the newest of each first."""
    from urllib.parse import unquote

    found = []
    for kind in PICTURE_FOLDERS:
        for path in sorted((folder / kind).rglob("*")) if is_real_folder(folder / kind) else ():
            if path.suffix.lower() in PICTURE_TYPES and is_regular(path):
                relative = path.relative_to(folder / kind)
                step = relative.stem.partition("-")[0]
                name = relative.parent.as_posix() if len(relative.parts) > 1 else relative.stem
                tag = unquote(name.replace(".", "/"))  # the recorder made the name from it
                found.append(PictureFile(path=path, tag=tag, step=int(step) if step.isdecimal() else None))
    return sorted(found, key=lambda picture: (picture.tag, -(picture.step or 0), picture.path.name))


def read_checkpoints(directory: Path, verify: str = "size") -> list[CheckpointLine]:
    """Return the checkpoints of a run in order of sequence, damaged ones last with the reason."""
    from drivetrain.checkpoint.layout import (
        BEST,
        LAST,
        check_verify,
        checkpoint_folders,
        problem_with,
        read_manifest,
        read_pointer,
    )

    pointers: dict[str, Path | None] = {}
    for pointer in (LAST, BEST):
        with suppress(CheckpointError):  # reported where checkpoints are verified
            pointers[pointer] = read_pointer(directory, pointer)
    good: list[tuple[int, CheckpointLine]] = []
    bad: list[CheckpointLine] = []
    for folder in checkpoint_folders(directory):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            bad.append(CheckpointLine(name=folder.name, problem=str(error)))
            continue
        line = CheckpointLine(
            name=folder.name,
            progress=dict(manifest.progress),
            metrics=dict(manifest.metrics),
            size=manifest.size,
            problem=None if verify == "off" else problem_with(folder, check_verify(verify)),
            is_last=folder == pointers.get(LAST),
            is_best=folder == pointers.get(BEST),
        )
        good.append((manifest.sequence, line))
    return [line for _, line in sorted(good, key=lambda entry: entry[0])] + bad


def tail(path: Path) -> str:
    """Return the last lines of a text file; nothing when there is none."""
    with suppress(OSError):
        return "\n".join(read_end(path, LOG_TAIL).decode(errors="replace").splitlines()[-LOG_LINES:])
    return ""


def differs(values: Sequence[object]) -> bool:
    """Return whether not all values are the same."""
    return any(value != values[0] for value in values[1:])


def distinguishing_parameters(record: RunRecord) -> dict[str, Any]:
    """Return the parameters that can make a difference: not where and how the run happens, and a seed only if it was given."""
    own = {name: value for name, value in record.settings.items() if name not in BOOKKEEPING}
    if record.origins.get(SEED, "default") in ("default", "sweep"):
        own.pop(SEED, None)
    return own


def differing(mappings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the entries that differ between mappings, with one value for each of them."""
    names = dict.fromkeys(name for own in mappings for name in own)
    columns = {name: [own.get(name) for own in mappings] for name in names}
    return {name: values for name, values in columns.items() if differs(values)}


def short(value: float) -> str:
    """Return a number in few characters.

    >>> short(0.1), short(12500.0), short(3e-05), short(1e6)
    ('0.1', '12.5k', '3e-05', '1M')
    """
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}" if abs(value) < 1e13 else f"{value:.3g}"
    return f"{value:.4g}"


def moment(seconds: float) -> str:
    """Return a time since 1970 as UTC text."""
    with suppress(OverflowError, ValueError, OSError):  # of a damaged file
        if seconds:
            return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return "unknown"


def duration(seconds: float | None) -> str:
    """Return a duration as text; None is unknown."""
    return "unknown" if seconds is None else format_duration(seconds)
