"""Finding runs that were named on the command line."""

from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.errors import ExperimentError, nearest_name
from drivetrain.experiment.records import RunRecord, find_runs, is_run, read_run

DEFAULT_PLACE = "output"


def find_run(given: str) -> RunRecord:
    """Return the run in a folder; a file or checkpoint inside it will do, too."""
    path = Path(given)
    for folder in (path, *path.parents[:3]):
        if is_run(folder):
            return read_run(folder)
    if not path.exists():
        near = (
            nearest_name(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else None
        )
        hint = f" Did you mean {path.parent / near}?" if near else ""
        raise ExperimentError(f"there is no run {given}: the path does not exist.{hint} `drivetrain ls` lists runs.")
    return read_run(path)  # which says what is missing


def find_all_runs(given: Sequence[str]) -> list[RunRecord]:
    """Return the runs named; a folder that holds runs, such as that of a sweep, stands for all of them."""
    found: dict[Path, RunRecord] = {}
    for name in given:
        path = Path(name)
        inside = list(find_runs(path)) if path.is_dir() and not is_run(path) else []
        for record in inside or [find_run(name)]:
            found.setdefault(record.folder.resolve(), record)
    return list(found.values())
