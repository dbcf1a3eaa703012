"""One trial of a sweep: its parameters, how it went, and how it reports to the sweep while it runs; and the sweep's journal.

The journal has one line for everything that happens, on the disk before the next thing does. It is only ever appended to. A line that
a crash cut short is ignored, so the sweep can be continued from any moment.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError, ExperimentError
from drivetrain.core.files import PRIVATE_FILE, is_regular, load_json, read_limited
from drivetrain.core.plain import is_number, plain
from drivetrain.core.secret import masked
from drivetrain.core.types import Settings
from drivetrain.experiment.run_folder import JOURNAL
from drivetrain.record.jsonl import FileSink

ASKED, RUNNING, FINISHED, FAILED, PRUNED = "asked", "running", "finished", "failed", "pruned"
TIMED_OUT, INTERRUPTED = "timed out", "interrupted"
ENDS = (FINISHED, FAILED, PRUNED, TIMED_OUT)


@dataclass(repr=False)
class Trial:
    """A set of parameters that a sweep tries, and how it went."""

    index: int
    params: Settings
    status: str = ASKED
    value: float | None = None
    """The objective; None until it is known, and when there are several."""
    values: dict[str, float] = field(default_factory=dict)
    """The objectives by name, where there are several."""
    metrics: dict[str, float] = field(default_factory=dict)
    run_dir: Path | None = None
    error: str | None = None
    seconds: float = 0.0
    attempts: int = 0
    began: float | None = None
    """When the attempt that runs began, by this process's monotonic clock; None where none runs."""
    reported: tuple[int, float] | None = None
    """The step and value of its last report."""
    secrets: Collection[str] = field(default=(), compare=False)
    """Names of parameters that are not shown because of their declaration; their names and types may also make them secrets."""

    def __repr__(self) -> str:
        shown = f"{self.index}, {masked(without_secrets(self.params, self.secrets))}, {self.status!r}, value={self.values or self.value}"
        return f"Trial({shown}, run_dir={self.run_dir}, error={self.error!r})"

    @property
    def objectives(self) -> list[float]:
        """What trials are compared by; empty where there is nothing, or one is not a number."""
        found = list(self.values.values()) if self.values else [] if self.value is None else [self.value]
        return [] if any(math.isnan(value) for value in found) else found

    def begin(self, sweep_folder: Path, secrets: Collection[str] = ()) -> None:
        """Count a new attempt; the first retry continues from the trial's checkpoint, a further one begins from nothing."""
        self.secrets = secrets
        self.attempts += 1
        self.status, self.reported, self.began = RUNNING, None, time.monotonic()
        if self.run_dir is None or self.attempts > 2:
            suffix = f"-{self.attempts}" if self.attempts > 1 else ""
            self.run_dir = sweep_folder / f"trial-{self.index:04d}{suffix}"

    def settle(self, status: str, error: str | None, seconds: float, metrics: dict[str, float]) -> None:
        """Take how an attempt ended."""
        self.status, self.error, self.metrics, self.began = status, error, metrics, None
        self.seconds += seconds

    def judge(self, objectives: Sequence[str], result: object) -> None:
        """Take the objectives from the metrics, without a name the returned number; the trial fails where one is missing."""
        missing = [name for name in objectives if name not in self.metrics]
        if missing:
            known = ", ".join(self.metrics) or ("a number without a name" if is_number(result) else "no numbers")
            self.status = FAILED
            self.error = f"the experiment returned no objective {missing[0]!r} (returned: {known})."
        elif len(objectives) > 1:
            self.values = {name: self.metrics[name] for name in objectives}
        elif objectives:
            self.value = self.metrics[objectives[0]]
        elif is_number(result):
            self.value = float(result)

    def report(self, value: float, step: int) -> None:
        """Take a report."""
        self.reported = (step, value)

    def wait(self) -> None:
        """Be asked for again in a sweep that is resumed; an attempt that was interrupted is continued, and is no retry."""
        self.attempts -= self.status == RUNNING
        self.status = ASKED

    @property
    def elapsed(self) -> float:
        """Seconds of all attempts, up to this moment."""
        return self.seconds + (0.0 if self.began is None else time.monotonic() - self.began)

    @property
    def is_over(self) -> bool:
        """Nothing more will happen to it."""
        return self.status in ENDS


def without_secrets(values: Mapping[str, object], secrets: Collection[str], prefix: str = "") -> Settings:
    """Return parameters with secrets masked; also those within a group of parameters."""
    found: Settings = {}
    for key, value in values.items():
        name = prefix + key.replace("-", "_")
        if isinstance(value, Mapping) and any(secret.startswith(f"{name}.") for secret in secrets):
            found[key] = without_secrets(value, secrets, f"{name}.")
        else:
            found[key] = masked(value, is_secret=name in secrets)
    return found


@dataclass
class TrialOutcome:
    """How one attempt at a trial ended."""

    status: str
    result: Any = None
    error: str | None = None
    seconds: float = 0.0


class TrialPruned(DrivetrainError):
    """Ends a trial that its sweep stops early; it counts as neither failed nor complete."""


Channel = Callable[[float, int], bool]
"""Takes a value and its step and returns whether to stop the trial."""

_channel: Channel | None = None


def report(value: float, step: int) -> None:
    """Report the objective to the sweep, which may stop the trial early. Does nothing outside a sweep.

    A trial is stopped by a `TrialPruned` exception, so `finally` blocks run.
    """
    if _channel is not None and _channel(float(value), int(step)):
        raise TrialPruned(f"the sweep stopped this trial at step {step}, with the objective at {value}")


@contextmanager
def reporting_to(channel: Channel | None) -> Iterator[None]:
    """Send reports to a channel within the block."""
    global _channel
    before, _channel = _channel, channel
    try:
        yield
    finally:
        _channel = before


SCHEMA = 1
JOURNAL_LIMIT = 2**30
"""Bytes; a sweep of a million trials has less."""


class Journal(FileSink):
    """Appends events to a sweep's file."""

    def __init__(self, folder: Path):
        super().__init__()
        self._open(folder / JOURNAL, PRIVATE_FILE)

    def write(self, event: str, **fields: object) -> None:
        """Append one event and wait until the disk has it."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **{k: plain(v) for k, v in fields.items()}})
        self._waiting.append(line + "\n")
        self.flush(durable=True)

    def settle(self, trial: Trial) -> None:
        """Append how a trial, or one attempt at it, ended."""
        names = ("index", "value", "values", "metrics", "run_dir", "error", "seconds", "attempts")
        self.write(trial.status, **{name: getattr(trial, name) for name in names})


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
        numbers = lambda name: {key: float(number) for key, number in _typed(entry, name, dict, {}).items()}
        trials[index] = Trial(
            index,
            trials[index].params,
            status=RUNNING if event == "started" else event,
            run_dir=Path(folder) if folder else None,
            attempts=_typed(entry, "attempts", int, trials[index].attempts),
            value=None if value is None else float(value),
            values=numbers("values"),
            error=_typed(entry, "error", str | None, None),
            metrics=numbers("metrics"),
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
