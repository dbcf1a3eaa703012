"""Reading what runs left behind: for resuming, for sweeps, and for commands that list, show and compare runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.experiment.locking import is_locked
from drivetrain.experiment.run_folder import LOG, MANIFEST, METRICS, PARAMETERS, STATUS, read_json

RUNNING, FINISHED, FAILED, INTERRUPTED, LOST = "running", "finished", "failed", "interrupted", "lost"
STATES = (RUNNING, FINISHED, FAILED, INTERRUPTED, LOST)


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
        """running, finished, failed, interrupted; or lost: it says running, and no process does."""
        state = str(self.status.get("state", RUNNING))
        return LOST if state == RUNNING and not self.is_live else state

    @property
    def origins(self) -> dict[str, str]:
        """Where each parameter's value came from."""
        return dict(self.manifest.get("origins") or {})

    @property
    def started(self) -> float:
        """When the run began, in seconds since 1970."""
        return float(self.manifest.get("started") or 0.0)

    @property
    def result(self) -> Any:
        """What the main function returned, as far as JSON can say it."""
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
    """Say whether a folder is that of a run."""
    return (folder / MANIFEST).is_file() and (folder / PARAMETERS).is_file()


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder; damaged files read as empty, a folder that is no run is an error."""
    folder = Path(folder)
    if not is_run(folder):
        raise ExperimentError(
            f"{folder} is not the folder of a run: it has no {MANIFEST} and {PARAMETERS}. Give a folder such as "
            "output/<experiment>/<time>_<suffix>."
        )
    from drivetrain.core.yaml import load_yaml

    try:
        parameters = load_yaml(folder / PARAMETERS)
    except ConfigError:
        parameters = {}
    return RunRecord(
        folder=folder,
        parameters=parameters,
        manifest=read_json(folder / MANIFEST),
        is_live=is_locked(folder),  # before the status: a run that ends in between then shows its end
        status=read_json(folder / STATUS),
    )


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
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _run_folders(entry, depth - 1)
