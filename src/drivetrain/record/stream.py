"""Rows in the order of recording, from the call that records them to the sinks.

A row waits until its value has left the device. `turn` sends what has collected on its way and delivers what has arrived, without
waiting; `flush` waits. Sinks are opened with the first row, so a Recorder that is never used leaves no trace, and one that is
given a saved state first opens them as a resume.
"""

import atexit
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from drivetrain.core.errors import ConfigTypeError
from drivetrain.record.buffer import Arrival, BufferSlot, DeviceBuffer, read_histogram
from drivetrain.record.images import Picture, encode_image
from drivetrain.record.jsonl import FILE_NAME, JsonlSink
from drivetrain.record.sink import GuardedSink, Resume, Row
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.ranks import get_rank, is_distributed

_GLANCE = 0.05  # seconds between looks for values that are on their way


class Stream:
    """What one Recorder has recorded and not yet delivered, and where it goes."""

    def __init__(
        self,
        folder: Path,
        journal: JsonlSink,
        outlets: list[GuardedSink],
        every: float,
        keeps_files: bool,
        settings: Mapping[str, object],
    ):
        self.folder, self.journal, self.outlets = folder, journal, outlets
        self.settings = settings
        """Parameters of the run, for sinks that show them."""
        self.buffer = DeviceBuffer()
        self.rows: list[Row] = []
        self.last: dict[str, float] = {}
        self.due = 0.0
        self.is_silent = self.is_closed = False
        self.wants_steps = any(outlet.takes("step") for outlet in outlets)
        """Whether a sink needs every step."""
        self.restored: Resume | None = None
        self.restored_runs: dict[str, str] = {}
        self._every, self._keeps_files = every, keeps_files
        self._on_the_way: deque[tuple[list[Row], Arrival]] = deque()
        self.is_open = False
        self._resume: Resume | None = None
        self._process = os.getpid()
        self._told: set[str] = set()
        self._pictures: dict[tuple[str, str], int] = {}
        self._pictures_step = -1

    def writes(self) -> bool:
        """Return whether this process writes: rank 0 does, also before the group exists, and workers forked from it do not."""
        if self.is_silent or os.getpid() != self._process:
            return False
        world = None if is_distributed() else launched_world()
        return get_rank() == 0 if world is None else world.rank == 0

    def turn(self) -> None:
        """Send what has collected, deliver what has arrived, wait for nothing."""
        self.show()
        if self._on_the_way:
            self.due = time.monotonic() + _GLANCE
        else:
            self._make_durable()

    def show(self) -> None:
        """Deliver what has arrived to sinks that live from step to step; nothing is made durable."""
        if not self._on_the_way:
            self._send()
        self._deliver(wait=False)

    def read(self) -> None:
        """Deliver everything recorded; here the host waits for the device."""
        self._send()
        self._deliver(wait=True)

    def flush(self) -> None:
        """Deliver everything recorded and let every sink make it durable."""
        self.read()
        self._make_durable()

    def _make_durable(self) -> None:
        self.due = time.monotonic() + self._every
        for outlet in self.outlets:
            outlet.flush()

    def silence(self) -> None:
        """Write nothing from now on; what was recorded before is still written."""
        self.flush()
        self.close_sinks()
        self.is_silent, self.wants_steps = True, False

    def close_sinks(self) -> None:
        """Close every sink; the next row opens them again."""
        self.is_open = False
        atexit.unregister(self.close)
        for outlet in self.outlets:
            outlet.close()

    def close(self) -> None:
        """Flush and close; what a Recorder's end does, also at the end of the program."""
        if self.is_closed or os.getpid() != self._process:
            return
        try:
            self.flush()
        finally:
            self.is_closed = True
            self.close_sinks()

    def position(self) -> int | None:
        """Return how many lines of the journal are kept, None when that is not known."""
        if self.is_open:
            return self.journal.lines
        return None if self.restored is None else self.restored.lines

    def run_ids(self) -> dict[str, str]:
        """Return what external trackers call this run."""
        known = {outlet.name: getattr(outlet.sink, "run_id", None) for outlet in self.outlets if outlet.is_open}
        return self.restored_runs | {name: run_id for name, run_id in known.items() if run_id}

    def _send(self) -> None:
        if self.rows:
            self._on_the_way.append((self.rows, self.buffer.send()))
            self.rows = []

    def _deliver(self, wait: bool) -> None:
        while self._on_the_way:
            rows, arrival = self._on_the_way[0]
            if wait:
                arrival.wait()
            elif not arrival.is_ready():
                return
            self._on_the_way.popleft()
            writes = self.writes()
            offset = time.time() - time.monotonic()
            rows = [self._read(row, offset, writes) for row in rows]
            arrival.release()
            if writes:
                self._open_sinks(rows)
                for outlet in self.outlets:
                    outlet.deliver(rows)

    def _read(self, row: Row, offset: float, writes: bool) -> Row:
        """Return a row with its value on the host and the time of day."""
        kind, tag, value, step, moment = row
        if kind == "scalar":
            if type(value) is BufferSlot:
                value = value.read()
                value = int(value) if type(value) is bool else value
            self.last[tag] = value
        elif not writes:
            pass
        elif kind == "histogram":
            value = read_histogram(*value)
        elif kind in ("image", "figure"):
            png = value if isinstance(value, bytes) else encode_image(value, tag, self._told)
            value = Picture(png=png, path=self._picture_path(kind, tag, step) if self._keeps_files else None)
        return Row(kind, tag, value, step, moment + offset)

    def _picture_path(self, kind: str, tag: str, step: int) -> str:
        if step != self._pictures_step:
            self._pictures, self._pictures_step = {}, step
        repeat = self._pictures.get((kind, tag), 0)
        self._pictures[kind, tag] = repeat + 1
        return picture_path(kind, tag, step, repeat)

    def _open_sinks(self, rows: list[Row]) -> None:
        if not self.is_open:
            self.folder.mkdir(parents=True, exist_ok=True)
            journal = self.folder / FILE_NAME
            if journal.exists() and journal.stat().st_size:  # an earlier life of this run was here
                self._resume = self.restored or Resume(step=rows[0].step)
            else:
                self._resume = None
                self.restored_runs = {}  # those are runs of another folder: a new run starts new ones
        for outlet in self.outlets:  # a tracker that could not be reached is tried again
            if not outlet.is_open:
                run_id = getattr(outlet.sink, "run_id", None) or self.restored_runs.get(outlet.name)
                outlet.open(self.folder, self._resume and replace(self._resume, run_id=run_id))
                if outlet.is_open and outlet.wants_settings and self.settings:
                    outlet.deliver([Row("params", "params", self.settings, rows[0].step, rows[0].time)])
        if not self.is_open:
            # Before what a tracker has registered to end itself: the last registered runs first.
            atexit.register(self.close)
        self.is_open = True


_LONGEST = 200  # file systems allow 255 bytes, and a suffix may follow
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(?=\.|$)")  # device names, on one system at least


def check_tag(tag: object) -> str:
    """Return a tag that every sink can write, or raise an error that names the problem."""
    if not isinstance(tag, str) or not tag:
        raise ConfigTypeError(f"the tag is {tag!r}; expected a name such as 'train/loss'.")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise ConfigTypeError(
            f"the tag {tag!r} is not valid text ({error.reason}); it cannot be written as UTF-8."
        ) from None
    return tag


def safe_name(tag: str) -> str:
    """Return a tag as one file name.

    >>> safe_name("train/loss"), safe_name("../x"), safe_name('a,"b"')
    ('train.loss', '%2E%2E.x', 'a%2C%22b%22')
    """
    name = "".join(char if char.isalnum() or char in "_-" else "." if char == "/" else _escaped(char) for char in tag)
    if name.startswith("."):  # hidden, or the folder above
        name = "%2F" + name[1:]
    if name.endswith("."):
        name = name[:-1] + "%2F"
    if _RESERVED.match(name):
        name = _escaped(name[0]) + name[1:]
    if len(name.encode()) > _LONGEST:
        digest = hashlib.sha256(tag.encode()).hexdigest()[:16]
        name = name.encode()[: _LONGEST - 17].decode(errors="ignore") + "-" + digest
    return name


def picture_path(kind: str, tag: str, step: int, repeat: int = 0) -> str:
    """Return where a picture is kept within the output folder; `repeat` numbers those of one tag and step.

    >>> picture_path("image", "eval/sample", 12)
    'images/eval.sample/12.png'
    """
    return f"{kind}s/{safe_name(tag)}/{step}{f'-{repeat}' if repeat else ''}.png"


def _escaped(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())
