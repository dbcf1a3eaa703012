"""The folder of one run: its name and its small files, written so that no reader ever sees half of one.

The manifest records what the run was made of (command, origins of parameters, code, packages, machine), the status its progress.
The log has one handler for its file and one for the console, there while the run lasts: the root logger gets them and, for that time,
a level that lets messages of level INFO through (DEBUG with `--debug`); afterwards it is as it was.
"""

import functools
import json
import logging
import os
import random
import re
import string
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.core.display import SafeOutput, printable_lines
from drivetrain.core.errors import ExperimentError, ParameterError
from drivetrain.core.files import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    absolute,
    load_json,
    open_regular,
    read_limited,
    replace_bytes,
)
from drivetrain.core.plain import plain
from drivetrain.core.secret import hide
from drivetrain.core.types import Settings
from drivetrain.runtime.run import ExperimentRun

PARAMETERS, MANIFEST, STATUS = "parameters.yaml", "manifest.json", "status.json"
LOG, METRICS = "log.txt", "metrics.jsonl"
SWEEPS, JOURNAL = "sweeps", "sweep.jsonl"
"""The folder of an experiment's sweeps, and the file of each."""
REMARKS = "remarks.json"
"""Tags and a note that somebody gave a run."""
ARTIFACTS = "artifacts"
JSON_LIMIT = 64 * 2**20
"""Bytes of a manifest or status; what is larger is not one of ours, and is not read."""
SCHEMA = 1
SOURCE_LIMIT = 64 * 2**20
MAX_DIFF = 500_000
"""Characters of a git diff that are kept; generated files can have millions."""
PACKAGE_LINE = re.compile(r"^(Name|Version): *(.*?)\r?$", re.MULTILINE)
HEARTBEAT_SECONDS = 10.0


def fresh_name() -> str:
    """Return the UTC time and six random characters, the name of a run folder."""
    suffix = "".join(random.SystemRandom().choice(string.digits + string.ascii_lowercase) for _ in range(6))
    return time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime()) + "_" + suffix


def run_path(output_dir: str | os.PathLike[str], experiment: str, run_name: str | None = None) -> Path:
    """Return the path of a new run folder, without making it."""
    name = fresh_name() if run_name is None else run_name
    if (
        name in ("", ".", "..", SWEEPS)
        or any(sign in name for sign in "/\\\0")
        or len(name.encode(errors="replace")) > 200
    ):
        raise ParameterError(
            f"run_name: {name!r} cannot name a folder. Give one plain name, such as 'baseline'; set the folder with --output-dir."
        )
    return absolute(output_dir).resolve() / experiment / name


def check_is_new(folder: Path) -> None:
    """Raise where the folder of a new run exists already."""
    if folder.exists() or folder.is_symlink():
        raise ExperimentError(
            f"the run folder {folder} already exists. Choose another --run-name, or resume that run with --resume {folder}."
        )


def make_folder(folder: Path) -> None:
    """Make a run folder that must not exist yet; only its owner may look into it."""
    check_is_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE_FOLDER)
    except OSError as error:
        raise ExperimentError(
            f"cannot create the run folder {folder}: {error}. Choose another --output-dir."
        ) from error


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Replace a JSON file in one go."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step; only its owner may read a new one, because it may hold parameters."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"), mode=PRIVATE_FILE, durable=False)


def read_json(path: Path) -> Settings:
    """Return the mapping in a JSON file; one that is missing or damaged reads as empty."""
    try:
        data = load_json(read_limited(path, JSON_LIMIT).decode("utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_parameters(folder: Path, values: Mapping[str, object]) -> None:
    """Write all values in a form that `--params-file` reads back."""
    from drivetrain.core.yaml import dump_yaml

    write_text(folder / PARAMETERS, dump_yaml({name: plain(value) for name, value in values.items()}))


def describe_run(source: Path | None, hidden: Iterable[str], **fields: object) -> dict[str, object]:
    """Return the manifest of a run that begins now: the fields given, and what is known of its code and machine.

    `hidden` are secret texts, which uncommitted changes of the code may hold too.
    """
    import platform

    here = ""
    with suppress(FileNotFoundError):  # removed since this process started
        here = os.getcwd()
    git = _git(str(source.parent) if source else here)
    return {
        "schema": SCHEMA,
        **fields,
        "source": source and str(source),
        "source_sha256": hash_source(source),
        "started": time.time(),
        "plan": None,
        "resumed": [],
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "folder": here,
        },
        "git": None if git is None else {name: hide(text, hidden) for name, text in git.items()},
        "packages": _packages(),
    }


def hash_source(path: str | Path | None) -> str | None:
    """Return the SHA-256 of a source file, None where it cannot be read."""
    import hashlib

    try:
        return None if path is None else hashlib.sha256(read_limited(Path(path).resolve(), SOURCE_LIMIT)).hexdigest()
    except OSError:
        return None


def add_to_manifest(folder: Path, **fields: object) -> None:
    """Set some fields of a run's manifest, such as the plan its strategy chose."""
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | fields)


@functools.cache
def _packages() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for distribution in importlib.metadata.distributions():
        # The two lines are looked for in the text, because parsing the whole of it takes a second for a hundred packages.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        head = dict(PACKAGE_LINE.findall(text.partition("\n\n")[0]))
        if head.get("Name"):
            found[head["Name"]] = head.get("Version", "")
    return dict(sorted(found.items(), key=lambda entry: entry[0].lower()))


@functools.cache
def _git(folder: str) -> dict[str, str] | None:
    """Return commit and uncommitted changes, None outside a repository; the code of a process does not change later."""
    import subprocess

    def output(*arguments: str) -> str:
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", folder, *arguments]
            return subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=10, check=True
            ).stdout
        return ""

    commit = output("rev-parse", "HEAD").strip()
    if not commit:
        return None
    diff = output("diff", "HEAD")
    if len(diff) > MAX_DIFF:
        diff = diff[:MAX_DIFF] + f"\n... {len(diff) - MAX_DIFF} more characters"
    return {"commit": commit, "branch": output("rev-parse", "--abbrev-ref", "HEAD").strip(), "diff": diff}


class StatusFile:
    """Keeps `status.json` of a run: running with a heartbeat, then finished, failed or interrupted."""

    def __init__(self, folder: Path, run: ExperimentRun, restarts: int = 0):
        self._path, self._run = folder / STATUS, run
        earlier = read_json(self._path)
        self._fields: Settings = {
            "state": "running",
            "step": earlier.get("step"),
            "started": earlier.get("started", time.time()),
            "heartbeat": time.time(),
            "seconds": 0.0,
            "restarts": max(restarts, int(earlier.get("restarts") or 0)),
            "exit_code": None,
            "error": None,
        }
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="drivetrain-heartbeat", daemon=True)
        self._write()
        self._thread.start()

    def __enter__(self) -> "StatusFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def end(self, state: str, *, exit_code: int, error: str | None = None, **fields: object) -> None:
        """Write how the run ended."""
        self.__exit__()
        self._fields |= {"state": state, "exit_code": exit_code, "error": error, **fields}
        self._write()

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a full disk must not end the run; the next beat tries again
                self._write()

    def _write(self) -> None:
        step = getattr(self._run.recorder, "count", None)
        if isinstance(step, int):
            self._fields["step"] = step
        self._fields |= {"heartbeat": time.time(), "seconds": round(self._run.elapsed, 3)}
        write_json(self._path, self._fields)


COLOURS = {"DEBUG": "35", "INFO": "34", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}


class LineFormatter(logging.Formatter):
    """One unwrapped line per record: time, level, rank, name, message."""

    converter = staticmethod(time.gmtime)

    def __init__(self, rank: int, *, shows_time: bool, colours: bool, hidden: Iterable[str] = ()):
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._hidden = tuple(hidden)
        self._rank, self._shows_time, self._colours = rank, shows_time, colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with its traceback, and without secrets."""
        return hide(super().format(record), self._hidden)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Put one line together."""
        level, message = f"[{record.levelname}]", record.message
        if self._colours and record.levelname in COLOURS:
            level = f"\033[{COLOURS[record.levelname]}m{level}\033[0m"
        if record.name.partition(".")[0] == "drivetrain":  # our own may carry names from files
            message = printable_lines(message)
        time = f"[{self.formatTime(record, self.datefmt)}]" if self._shows_time else ""
        rank = f"[RANK {self._rank}]" if self._rank else ""
        return " ".join([*filter(None, (time, level, rank)), f"[{record.name}]", message])


class _ConsoleHandler(logging.StreamHandler):
    """Writes to the present stderr, so that it survives a redirection."""

    stream = property(lambda self: sys.stderr, lambda self, value: None)


def log_file(folder: Path, rank: int) -> Path:
    """Return the log of one rank."""
    return folder / (LOG if rank == 0 else f"log.rank-{rank}.txt")


@contextmanager
def run_log(folder: Path, rank: int, *, debug: bool, hidden: Iterable[str] = ()) -> Iterator[None]:
    """Log to the run's folder, and on rank 0 to the console unless the program does that already; `hidden` texts are masked."""
    root = logging.getLogger()
    level = logging.DEBUG if debug else logging.INFO
    # A link in the file's place is not followed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    stream = open(  # noqa: SIM115
        log_file(folder, rank),
        "a",
        encoding="utf-8",
        errors="backslashreplace",
        opener=lambda path, _: open_regular(Path(path), flags, PRIVATE_FILE),
    )
    handlers: list[logging.Handler] = [logging.StreamHandler(SafeOutput(stream))]
    handlers[0].setFormatter(LineFormatter(rank, shows_time=True, colours=False, hidden=hidden))
    if rank == 0 and not root.handlers:
        console = _ConsoleHandler()
        console.addFilter(lambda record: not getattr(record, "file_only", False))
        colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        console.setFormatter(LineFormatter(rank, shows_time=False, colours=colours, hidden=hidden))
        handlers.append(console)
    level_before = root.level
    try:
        for handler in handlers:
            handler.setLevel(level)
            root.addHandler(handler)
        root.setLevel(min(level, level_before or level))
        yield
    finally:
        root.setLevel(level_before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        with suppress(OSError):  # a full disk must hide neither result nor error
            stream.close()
