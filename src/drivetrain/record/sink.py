"""What a sink is: any object with some of the methods below. Methods that it lacks are not called.

Rows reach a sink in the order in which they were recorded, on rank 0 only, as plain numbers, and some seconds after the call that
recorded them; `step` and `time` (seconds since 1970) are those of the call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drivetrain.record.histogram import Histogram
from drivetrain.record.images import Picture


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The folder holds rows of an earlier life of this run; those from here on are recorded again."""

    step: int
    """Rows of this step and later ones are superseded."""
    lines: int | None = None
    """How many lines of `metrics.jsonl` are kept, where the checkpoint knew it; more exact than the step."""
    run_id: str | None = None
    """What an external tracker calls this run."""


class Sink(Protocol):
    """The full set of methods. A class of yours needs no base; give it those it can serve.

    A sink with `scalars` gets the values of a step together and is not asked for `scalar`. A sink with `step` is served at every
    step rather than every few seconds. With the attribute `remote = True` no error of the sink ever reaches the training loop;
    otherwise that holds for `OSError` once it has been opened. An attribute `name` and `run_id` make a tracker's run resumable.
    A sink that is `remote`, or says `wants_settings = True`, gets the parameters of the experiment that runs when it is opened.
    """

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Begin, before the first row; again after `close` when a state is loaded."""

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Take the numbers of one step."""

    def image(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take an image."""

    def figure(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take a figure."""

    def histogram(self, tag: str, histogram: Histogram, step: int, time: float) -> None:
        """Take a histogram."""

    def text(self, tag: str, text: str, step: int, time: float) -> None:
        """Take a text."""

    def params(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take the settings of the run."""

    def summary(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take results of the run."""

    def direction(self, tag: str, good: str, step: int, time: float) -> None:
        """Take whether small ("min") or large ("max") values of a metric are good."""

    def step(self, step: int, time: float) -> None:
        """Hear that a step has ended."""

    def flush(self) -> None:
        """Make what was taken durable."""

    def close(self) -> None:
        """End."""


SINK_METHODS = tuple(name for name in vars(Sink) if not name.startswith("_"))


class Row(NamedTuple):
    """One thing that was recorded; `kind` is the name of the sink's method for it."""

    kind: str
    tag: str
    value: Any
    step: int
    time: float


def plain(value: object) -> Any:
    """Return a copy that consists of what JSON knows; anything else becomes its text. Tensors of one element are read."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item())
    return str(value)
