"""Reading what runs left behind: for resuming, for sweeps, and for commands that list, show and compare runs."""

import io
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.core.files import is_real_folder, is_regular, load_json, open_regular, read_limited
from drivetrain.core.locking import is_locked
from drivetrain.core.plain import is_number
from drivetrain.core.types import Settings
from drivetrain.experiment.run_folder import (
    JOURNAL,
    JSON_LIMIT,
    LOG,
    MANIFEST,
    METRICS,
    PARAMETERS,
    REMARKS,
    STATUS,
    SWEEPS,
    read_json,
    write_json,
)

DEFAULT_PLACE = "output"
"""Where runs are by default."""
STATES = RUNNING, FINISHED, PRUNED, FAILED, INTERRUPTED, LOST = (
    "running finished pruned failed interrupted lost".split()
)
START_ONLY = frozenset(("resume", "run_name", "params_file", "subprocess", "local_rank"))
"""Parameters of one start of a program: never read from a file, and not shown among the parameters of a run."""

FIELDS: dict[str, type | types.UnionType] = {
    **dict.fromkeys(("experiment", "source", "source_sha256", "function", "state", "error"), str),
    **dict.fromkeys(("started", "heartbeat", "seconds"), int | float),
    **dict.fromkeys(("processes", "step", "restarts", "exit_code"), int),
    **dict.fromkeys(("argv", "resumed", "devices"), list),
    **dict.fromkeys(("origins", "trial", "host", "git", "packages", "directions"), dict),
}
"""The types of the entries of a manifest or status that readers rely on."""


@lru_cache(maxsize=64)
def _sweep_directions(folder: Path) -> dict[str, str]:
    """Return the objectives of a sweep with their directions, from the first line of its journal; nothing where there is none."""
    try:
        with os.fdopen(open_regular(folder / JOURNAL, os.O_RDONLY), "rb") as stream:
            header = load_json(stream.readline(JSON_LIMIT))
    except (OSError, ValueError):
        return {}
    if not isinstance(header, dict):
        return {}
    names, good = header.get("objective") or "result", header.get("direction")
    pairs = zip(names, good) if isinstance(names, list) and isinstance(good, list) else [(names, good)]
    return {name: way for name, way in pairs if isinstance(name, str) and isinstance(way, str)}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run folder, as it was when it was read."""

    folder: Path
    parameters: Settings = field(default_factory=dict)
    manifest: Settings = field(default_factory=dict)
    status: Settings = field(default_factory=dict)
    is_live: bool = False
    """A process holds the run's lock at this moment."""

    @property
    def experiment(self) -> str:
        """The experiment's name."""
        return str(self.manifest.get("experiment", self.folder.parent.name))

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted; pruned: its sweep stopped it early; or lost: no process holds its lock."""
        state = str(self.status.get("state", RUNNING))
        if state == FINISHED and self.status.get("pruned") is True:
            return PRUNED
        return LOST if state == RUNNING and not self.is_live else state

    @property
    def origins(self) -> dict[str, str]:
        """Where each parameter's value came from."""
        return {name: str(origin) for name, origin in (self.manifest.get("origins") or {}).items()}

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do: it is finished, or its sweep stopped it."""
        return self.state in (FINISHED, PRUNED)

    @property
    def sweep_objective(self) -> str | None:
        """The objective of the sweep that the run belongs to, the first where it has several."""
        return next(iter(self._sweep_directions), None)

    @property
    def _sweep_directions(self) -> dict[str, str]:
        return _sweep_directions(self.folder.parent) if self.manifest.get("trial") else {}

    @property
    def directions(self) -> dict[str, str]:
        """Metrics whose good direction, "min" or "max", the experiment declares, or the sweep that the run belongs to."""
        declared = {**self._sweep_directions, **(self.manifest.get("directions") or {})}
        return {name: good for name, good in declared.items() if good in ("min", "max")}

    @property
    def settings(self) -> Settings:
        """The parameters without those that only name this start, such as `resume`."""
        return {name: value for name, value in self.parameters.items() if name not in START_ONLY}

    @property
    def started(self) -> float:
        """When the run began, in seconds since 1970."""
        return float(self.manifest.get("started") or 0.0)

    @property
    def result(self) -> Any:
        """What the main function returned, as far as JSON can hold it."""
        return self.status.get("result")

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that the main function returned; one that has no name is `result`."""
        entries = self.result if isinstance(self.result, dict) else {"result": self.result}
        return {str(name): value for name, value in entries.items() if is_number(value)}

    @property
    def metrics_path(self) -> Path:
        """The file of metrics, whether or not it exists."""
        return self.folder / METRICS

    @property
    def checkpoints_path(self) -> Path:
        """The folder of checkpoints, whether or not it exists."""
        return self.folder / "checkpoints"

    @property
    def log_path(self) -> Path:
        """The log of rank 0, whether or not it exists."""
        return self.folder / LOG


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return is_regular(folder / MANIFEST) and is_regular(folder / PARAMETERS)


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder; damaged files read as empty, a folder that is not a run is an error."""
    folder = Path(folder)
    if not is_run(folder):
        if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
            raise ExperimentError(f"{folder} cannot be read: it belongs to another user, who has not opened it.")
        raise ExperimentError(
            f"{folder} is not the folder of a run: it has no {MANIFEST} and {PARAMETERS}. Give a folder such as "
            "output/<experiment>/<time>_<suffix>."
        )
    from drivetrain.core.yaml import load_yaml

    try:
        parameters = load_yaml(io.BytesIO(read_limited(folder / PARAMETERS, JSON_LIMIT)))
    except (ConfigError, OSError):
        parameters = {}
    return RunRecord(
        folder=folder,
        parameters=parameters,
        manifest=_well_formed(read_json(folder / MANIFEST)),
        is_live=is_locked(folder),  # before the status: a run that ends in between then shows its end
        status=_well_formed(read_json(folder / STATUS)),
    )


def _well_formed(content: Settings) -> Settings:
    """Return what a file holds without the entries that have another type than we write, so that readers need no checks."""

    def fits(name: str, value: object) -> bool:
        if value is None or name not in FIELDS:
            return True
        return isinstance(value, FIELDS[name]) and not (isinstance(value, float) and not math.isfinite(value))

    return {name: value for name, value in content.items() if fits(name, value)}


def find_runs(place: str | Path, depth: int = 4) -> Iterator[RunRecord]:
    """Yield the runs in a folder and the folders within it, trials of sweeps included, oldest first."""
    records = []
    for folder in run_folders(Path(place), depth):
        with suppress(ExperimentError):  # it is removed at this moment
            records.append(read_run(folder))
    yield from sorted(records, key=lambda record: (record.started, record.folder.name))


def run_folders(place: Path, depth: int = 4, is_wanted: Callable[[Path], bool] = is_run) -> Iterator[Path]:
    """Yield the folders of the runs in a place, or other folders that are wanted, without reading them.

    Folders that this user may not look into, such as runs of others, are left out.
    """
    if not os.path.isdir(place):
        return
    if is_wanted(place):
        yield place
    elif depth > 0 and not is_run(place):
        entries = list[Path]()
        with suppress(PermissionError, FileNotFoundError, NotADirectoryError):
            entries = sorted(place.iterdir())
        for entry in entries:
            if is_real_folder(entry) and not entry.name.startswith("."):
                yield from run_folders(entry, depth - 1, is_wanted)


FRESH = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_([0-9a-z]{6})")
"""The name that a run or sweep folder gets by itself."""


def short_id(folder: Path) -> str:
    """Return a short name for a run or sweep folder: the random part of its name, `<sweep>/trial-0003` for a trial.

    >>> short_id(Path("output/digits/2026-01-31_12-00-00_ab12cd")), short_id(Path("output/digits/baseline"))
    ('ab12cd', 'baseline')
    """
    folder = Path(os.path.abspath(folder))
    found = FRESH.fullmatch(folder.name)
    own = found[1] if found else folder.name
    if folder.name.startswith("trial-") and folder.parent.parent.name == SWEEPS:
        return f"{short_id(folder.parent)}/{own}"
    return own


def find_by_id(place: Path, wanted: str) -> list[Path]:
    """Return the run and sweep folders in a place that a short id names; the first characters of one are enough if there are three."""
    ids = {folder: short_id(folder) for kind in (is_run, is_sweep) for folder in run_folders(place, is_wanted=kind)}
    same = [folder for folder, own in ids.items() if wanted in (own, folder.name)]
    return same or [folder for folder, own in ids.items() if len(wanted) >= 3 and own.startswith(wanted)]


def locate(given: str, output_dir: str = DEFAULT_PLACE) -> Path:
    """Return the path that a word names: a path, or a short id of a run or sweep in `output_dir` or after the folder it is in."""
    path = Path(given)
    if os.path.lexists(path):
        return path
    place = next((folder for folder in path.parents if os.path.isdir(folder)), Path())
    if place == Path(place.anchor):  # nothing of it exists
        place, wanted = Path(output_dir), given
    else:
        wanted = path.relative_to(place).as_posix()
    found = find_by_id(place, wanted)
    if len(found) > 1:
        several = "\n  ".join(map(str, found[:10]))
        raise ExperimentError(f"{given} names {len(found)} folders. Give more of the name, or the path:\n  {several}")
    return found[0] if found else path


def run_around(path: Path) -> Path | None:
    """Return the folder of the run that a path is, or is inside of."""
    return next((folder for folder in (path, *path.parents[:3]) if is_run(folder)), None)


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return is_regular(folder / JOURNAL) and not is_run(folder)


def read_remarks(folder: Path) -> tuple[list[str], str]:
    """Return the tags and the note of a run."""
    data = read_json(folder / REMARKS)
    tags, note = data.get("tags"), data.get("note")
    kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return kept, note if isinstance(note, str) else ""


def change_remarks(
    folder: Path, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None
) -> tuple[list[str], str]:
    """Add and remove tags of a run, set its note (`""` removes it), and return what it has then."""
    before, earlier = read_remarks(folder)
    dropped = set(remove)
    tags = [tag for tag in dict.fromkeys((*before, *add)) if tag not in dropped]
    kept = earlier if note is None else note
    if (tags, kept) != (before, earlier):
        try:
            write_json(folder / REMARKS, {"tags": tags, "note": kept})
        except OSError as error:
            raise ExperimentError(f"tags and note of {folder} cannot be written: {error}.") from error
    return tags, kept
