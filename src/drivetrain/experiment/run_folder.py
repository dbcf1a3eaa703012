"""The folder of one run: its name, its small files, and how they are written so that no reader ever sees half of one."""

import enum
import json
import os
import random
import string
import time
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError, ParameterError
from drivetrain.core.files import PRIVATE_FILE, PRIVATE_FOLDER, read_limited, replace_bytes

PARAMETERS, MANIFEST, STATUS, LOG, METRICS = (
    "parameters.yaml",
    "manifest.json",
    "status.json",
    "log.txt",
    "metrics.jsonl",
)
SWEEPS = "sweeps"
ARTIFACTS = "artifacts"
JSON_LIMIT = 64 * 2**20
"""Bytes of a manifest or status; what is larger is not one of ours, and is not read."""


def fresh_name() -> str:
    """Return the UTC time and six random characters, the name of a run folder."""
    suffix = "".join(random.SystemRandom().choice(string.digits + string.ascii_lowercase) for _ in range(6))
    return time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime()) + "_" + suffix


def run_path(output_dir: str | os.PathLike[str], experiment: str, run_name: str | None = None) -> Path:
    """Return the path of a new run folder, without making it."""
    if run_name is not None and (
        run_name in ("", ".", "..", SWEEPS) or any(sign in run_name for sign in "/\\\0") or len(run_name) > 200
    ):
        raise ParameterError(
            f"run_name: {run_name!r} cannot name a folder. Give one plain name, such as 'baseline'; the place is --output-dir."
        )
    return Path(output_dir).resolve() / experiment / (fresh_name() if run_name is None else run_name)


def refuse_existing(folder: Path) -> None:
    """Refuse to begin a new run in a folder that is there already."""
    if folder.exists() or folder.is_symlink():
        raise ExperimentError(
            f"the run folder {folder} exists already. Choose another --run-name, or continue that run with --resume {folder}."
        )


def make_folder(folder: Path) -> None:
    """Make a run folder that must not exist yet; only its owner may look into it."""
    refuse_existing(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE_FOLDER)
    except OSError as error:
        raise ExperimentError(
            f"the run folder {folder} cannot be made: {error}. Choose another --output-dir."
        ) from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a JSON file in one go."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step; only its owner may read a new one, because it may hold parameters."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"), mode=PRIVATE_FILE, durable=False)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; one that is missing or damaged reads as empty."""
    try:
        data = json.loads(read_limited(path, JSON_LIMIT).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def write_parameters(folder: Path, values: Mapping[str, Any]) -> None:
    """Write all values in a form that `--params-file` reads back."""
    from drivetrain.core.yaml import dump_yaml

    write_text(folder / PARAMETERS, dump_yaml({name: plain(value) for name, value in values.items()}))


def plain(value: Any) -> Any:
    """Return a value as JSON and YAML can write it; what they cannot express becomes text.

    >>> plain({"path": Path("a"), "betas": (0.9, 0.99)})
    {'path': 'a', 'betas': [0.9, 0.99]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, bool | int | float | str):  # subclasses, such as a numpy float
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    number = _number(value)
    return str(value) if number is None else number


def is_plain(value: Any) -> bool:
    """Say whether `plain` keeps everything of a value, so that it can be given back later."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str) or _number(value) is not None


def _number(value: Any) -> int | float | None:
    """Return the number in a one-element tensor or array, None for anything else."""
    if isinstance(value, date | timedelta) or not hasattr(value, "item") or not hasattr(value, "dtype"):
        return None
    try:
        number = value.item()
    except (ValueError, RuntimeError, TypeError):
        return None
    return number if isinstance(number, int | float) else None
