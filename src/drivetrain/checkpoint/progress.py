"""The progress of a run, also after a restore, and whether another save is due.

A State has a clock that counts every unit. A hand-written loop has no clock: then calls of `Checkpointer.step()` count as batches
and as optimizer steps, an integer attribute `epoch` of the Context counts epochs, and seconds are measured.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.layout import Manifest
from drivetrain.checkpoint.reader import Rejected
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Interval, Time, TimeUnit, unit_field
from drivetrain.core.types import Settings, StateDict
from drivetrain.runtime.collectives import start_agree_any
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.runtime.seeds import restore_rng

_continued: "weakref.WeakKeyDictionary[object, Mapping[str, float]]" = weakref.WeakKeyDictionary()
"""Counters of restored sources: a Checkpointer created afterwards continues from them."""


class Progress:
    """The counters of a run, read from its clock or kept here."""

    def __init__(self, source: object):
        self._source = source
        self.num_calls = 0
        """Calls of `step()`, including those before a resume."""
        self._earlier_seconds = 0.0
        self._started = time.monotonic()
        with suppress(TypeError):  # a source that cannot be a key is never in there
            self.load(_continued.get(source, {}))

    def check_unit(self, wanted: Time, where: str) -> None:
        """Raise for a time in a unit that is not counted here."""
        if self._read(wanted.unit) is None:
            known = [unit for unit in TimeUnit if self._read(unit) is not None]
            raise ConfigError(
                f"{where}: '{wanted}' cannot be counted. A Context without a clock counts "
                f"{', '.join(unit.value for unit in known)} (calls of step() are batches, an integer `epoch` in the "
                "Context counts epochs); a State with a clock counts all units."
            )

    def follows_wall_clock(self, unit: TimeUnit) -> bool:
        """Return whether a unit is counted by this rank's own clock: seconds, and shares of a run with a length in seconds."""
        whole = getattr(self._source, "max_duration", None)
        if unit is TimeUnit.DURATION and isinstance(whole, Time):
            unit = whole.unit
        return unit is TimeUnit.SECOND

    def value(self, unit: TimeUnit) -> float:
        """Return the time since the start of the run in one unit."""
        return self._read(unit) or 0

    def snapshot(self) -> dict[str, float]:
        """Return the known counters, for the manifest."""
        values = {unit.value: self._read(unit) for unit in TimeUnit}
        return {unit: value for unit, value in values.items() if value is not None}

    def resume(self, saved: Mapping[str, float]) -> None:
        """Continue from the counters of a checkpoint, and make later ones of the same source do so too."""
        with suppress(TypeError):
            _continued[self._source] = dict(saved)
        self.load(saved)

    def load(self, saved: Mapping[str, float]) -> None:
        """Load saved counters."""
        self.num_calls = int(saved.get("ba", 0))
        self._earlier_seconds = float(saved.get("sec", 0.0))
        self._started = time.monotonic()

    def checkpoint_id(self) -> str:
        """Return a name for the current position: `ep3-ba1200` if epochs are counted, else `ba1200`."""
        epoch = self._read(TimeUnit.EPOCH)
        batch = f"ba{int(self.value(TimeUnit.BATCH))}"
        return batch if epoch is None else f"ep{int(epoch)}-{batch}"

    def _read(self, unit: TimeUnit) -> float | None:
        clock = getattr(self._source, "clock", None)
        if unit is TimeUnit.DURATION:
            elapsed = getattr(self._source, "get_elapsed_duration", lambda: None)()
            return elapsed.value if isinstance(elapsed, Time) else elapsed
        if unit is TimeUnit.SECOND:
            elapsed = self._earlier_seconds + time.monotonic() - self._started
            return max(elapsed, getattr(clock, "total_wct", 0.0))
        if clock is not None:
            return getattr(clock, unit_field(unit), None)
        if unit in (TimeUnit.BATCH, TimeUnit.STEP):
            return self.num_calls
        epoch = getattr(self._source, "epoch", None)
        return epoch if unit is TimeUnit.EPOCH and type(epoch) is int else None


class Schedule:
    """An interval that all ranks of a run agree on.

    Counters are equal on all ranks. Wall-clock time is rank 0's, which the others receive one step later.
    """

    def __init__(self, every: Time | None, progress: Progress):
        self._interval, self._progress = None if every is None else Interval(every), progress
        self._pending: Callable[[], bool] | None = None
        self.reset()

    def reset(self) -> None:
        """Count from the current position, after a restore."""
        if self._interval is not None:
            self._interval.count_from(self._progress.value(self._interval.every.unit))

    def is_due(self) -> bool:
        """Return whether a multiple was passed. Call it at a step boundary, on every rank."""
        if self._interval is None:
            return False
        unit = self._interval.every.unit
        due = self._interval.passes(self._progress.value(unit))
        if get_num_processes() > 1 and self._progress.follows_wall_clock(unit):
            agreed = self.finish()
            self._pending = start_agree_any(due and is_master())
            return agreed
        return due

    def finish(self) -> bool:
        """Wait for the result of the pending reduction, so that none is left when the group is destroyed."""
        pending, self._pending = self._pending, None
        return pending is not None and pending()


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored state."""

    path: Path
    manifest: Manifest | None = None
    """None for a file written by another program."""
    rejected: tuple[Rejected, ...] = ()
    """Newer checkpoints that were skipped, each with the reason."""
    parameters: Settings = field(default_factory=dict)
    """Parameters of the run that wrote it, empty outside a run."""
    rng: StateDict | None = field(default=None, repr=False)
    """This rank's random states."""
    device: torch.device | None = field(default=None, repr=False)
    """Whose they are, on an accelerator."""
    report: Any = field(default=None, repr=False)
    """The report of the Context's load."""

    @property
    def id(self) -> str:
        """The id under which it was saved."""
        return self.path.stem if self.manifest is None else self.manifest.id

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.manifest is None else self.manifest.step

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return 0 if self.manifest is None else self.manifest.epoch

    @property
    def samples(self) -> int:
        """Samples seen."""
        return 0 if self.manifest is None else self.manifest.samples

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics at the time of the save."""
        return {} if self.manifest is None else dict(self.manifest.metrics)

    @property
    def elapsed(self) -> float:
        """Seconds the run had taken."""
        return 0.0 if self.manifest is None else float(self.manifest.progress.get("sec", 0.0))

    def apply_rng(self) -> None:
        """Restore the random generators again, just before the first step that continues the run."""
        if self.rng is not None:
            restore_rng(self.rng, self.device)
