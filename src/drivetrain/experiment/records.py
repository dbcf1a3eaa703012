"""Reading what runs left behind: for resuming, for sweeps, and for commands that list, show and compare runs."""

import io
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.core.files import is_real_folder, is_regular, read_limited
from drivetrain.core.locking import is_locked
from drivetrain.experiment.run_folder import JSON_LIMIT, LOG, MANIFEST, METRICS, PARAMETERS, STATUS, read_json

RUNNING, FINISHED, FAILED, INTERRUPTED, LOST = "running", "finished", "failed", "interrupted", "lost"
START_ONLY = frozenset(("resume", "run_name", "params_file", "subprocess", "local_rank"))
"""Parameters of one start of a program: never read from a file, and not shown among the parameters of a run."""

STATES = (RUNNING, FINISHED, FAILED, INTERRUPTED, LOST)


MANIFEST_FIELDS: dict[str, type | types.UnionType] = {
    "experiment": str,
    "source": str,
    "source_sha256": str,
    "function": str,
    "started": int | float,
    "argv": list,
    "origins": dict,
    "processes": int,
    "trial": dict,
    "resumed": list,
    "host": dict,
    "devices": list,
    "git": dict,
    "packages": dict,
    "directions": dict,
}
STATUS_FIELDS: dict[str, type | types.UnionType] = {
    "state": str,
    "step": int,
    "started": int | float,
    "heartbeat": int | float,
    "seconds": int | float,
    "restarts": int,
    "exit_code": int,
    "error": str,
}
"""The types of the entries that readers rely on."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run folder, as it was when it was read."""

    folder: Path
    parameters: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    is_live: bool = False
    """A process holds the run's lock at this moment."""

    @property
    def experiment(self) -> str:
        """The experiment's name."""
        return str(self.manifest.get("experiment", self.folder.parent.name))

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted; or lost: its status is running, but no process holds its lock."""
        state = str(self.status.get("state", RUNNING))
        return LOST if state == RUNNING and not self.is_live else state

    @property
    def origins(self) -> dict[str, str]:
        """Where each parameter's value came from."""
        return {name: str(origin) for name, origin in (self.manifest.get("origins") or {}).items()}

    @property
    def directions(self) -> dict[str, str]:
        """Metrics whose good direction, "min" or "max", the experiment declares."""
        declared = self.manifest.get("directions") or {}
        return {name: good for name, good in declared.items() if good in ("min", "max")}

    @property
    def settings(self) -> dict[str, Any]:
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
        manifest=_well_formed(read_json(folder / MANIFEST), MANIFEST_FIELDS),
        is_live=is_locked(folder),  # before the status: a run that ends in between then shows its end
        status=_well_formed(read_json(folder / STATUS), STATUS_FIELDS),
    )


def _well_formed(content: dict[str, Any], fields: Mapping[str, type | types.UnionType]) -> dict[str, Any]:
    """Return what a file holds without the entries that have another type than we write, so that readers need no checks."""

    def fits(name: str, value: object) -> bool:
        if value is None or name not in fields:
            return True
        return isinstance(value, fields[name]) and not (isinstance(value, float) and not math.isfinite(value))

    return {name: value for name, value in content.items() if fits(name, value)}


def find_runs(place: str | Path, depth: int = 4) -> Iterator[RunRecord]:
    """Yield the runs in a folder and the folders within it, trials of sweeps included, oldest first."""
    records = [read_run(folder) for folder in _run_folders(Path(place), depth)]
    yield from sorted(records, key=lambda record: (record.started, record.folder.name))


def _run_folders(place: Path, depth: int) -> Iterator[Path]:
    if not place.is_dir():
        return
    if is_run(place):
        yield place
    elif depth > 0:
        for entry in sorted(place.iterdir()):
            if is_real_folder(entry) and not entry.name.startswith("."):
                yield from _run_folders(entry, depth - 1)
