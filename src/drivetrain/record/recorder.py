"""The Recorder: one object that a program gives its measurements.

A call costs microseconds and never waits for the device: values stay there, in a buffer, and are read together every few seconds
(`buffer`, `stream`). Files are written by rank 0 alone, however many processes call it.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.arguments import naming
from drivetrain.core.errors import ConfigError, ConfigTypeError, ExperimentError, StateError, unknown_name
from drivetrain.core.files import absolute
from drivetrain.core.plain import encodable, plain
from drivetrain.core.secret import masked
from drivetrain.core.time import TimeUnit, ensure_time
from drivetrain.core.types import StateDict
from drivetrain.record.buffer import count_values
from drivetrain.record.images import check_figure, check_image, encode_figure
from drivetrain.record.jsonl import CsvSink, JsonlSink
from drivetrain.record.sink import ConsoleSink, GuardedSink, Resume, Row
from drivetrain.record.stream import Stream, check_tag
from drivetrain.record.trackers import MlflowSink, TensorBoardSink, WandbSink, has_tensorboard
from drivetrain.runtime.ranks import is_master
from drivetrain.runtime.run import current_run

_NAMED_SINKS: dict[str, Callable[[], object]] = {
    "wandb": WandbSink,
    "trackio": lambda: WandbSink("trackio"),
    "mlflow": MlflowSink,
}
_LARGEST_INT = 2**1000  # beyond it a whole number has no float, which most sinks keep
_open_folders: "weakref.WeakValueDictionary[Path, Recorder]" = weakref.WeakValueDictionary()


class Recorder:
    """Records numbers, images, figures, histograms and texts of a run.

    Args:
        output_dir: folder of the files; that of the current run by default, where a second Recorder gets a folder of its own.
        tensorboard: write event files; `"auto"` if the package is installed.
        file: write `scalars.csv` and images.
        console: print one line at each `step()`.
        sinks: names (`"wandb"`, `"trackio"`, `"mlflow"`) and objects with some of a sink's methods.
        flush_every: how often values are read from the device and written.

    >>> import tempfile
    >>> recorder = Recorder(tempfile.mkdtemp(), tensorboard=False)
    >>> for loss in (0.5, 0.25):
    ...     recorder.scalar("train/loss", loss)
    ...     recorder.step()
    >>> recorder.count, recorder.last("train/loss")
    (2, 0.25)
    >>> recorder.close()
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        tensorboard: bool | Literal["auto"] = "auto",
        file: bool = True,
        console: bool = False,
        *,
        sinks: Iterable[object] = (),
        flush_every: str | float | timedelta = "5s",
    ):
        journal = JsonlSink()
        outlets = [GuardedSink(journal)]
        if file:
            outlets.append(GuardedSink(CsvSink()))
        if tensorboard != "auto" and not isinstance(tensorboard, bool):
            raise ConfigError(f"tensorboard={tensorboard!r} is not valid; expected True, False or 'auto'.")
        if tensorboard is True or (tensorboard == "auto" and has_tensorboard()):
            outlets.append(GuardedSink(TensorBoardSink()))
        if console:
            outlets.append(GuardedSink(ConsoleSink()))
        outlets += [GuardedSink(sink) for sink in _made_sinks(sinks)]
        every = _seconds(flush_every)
        self._folder = _claimed_folder(output_dir)
        _open_folders[self._folder] = self
        run = current_run()
        self._count = 0
        self._recorded = False  # something, since the last step
        self._tags: set[str] = set()
        settings: dict[str, object] = {}
        if run is not None and run.recorder is None:
            run.recorder = self
            settings = plain(run.shown(run.settings))
        self._stream = Stream(self._folder, journal, outlets, every, bool(file), settings)
        # A tracker starts with the first step: it cannot start threads and processes any more when a short program ends.
        has_tracker = any(getattr(outlet.sink, "remote", False) for outlet in outlets)
        self._stream.due = 0.0 if has_tracker else time.monotonic() + every
        # Whatever is still on the device is written when the Recorder is dropped, or when the program ends.
        self._finalizer = weakref.finalize(self, self._stream.close)

    # ------------------------------------------------------------------ steps

    @property
    def count(self) -> int:
        """The step that what is recorded belongs to."""
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        if count == self._count:
            return
        if isinstance(count, bool) or not hasattr(count, "__index__") or count.__index__() < 0:
            raise ConfigTypeError(f"count = {count!r} is not valid; expected a whole number of at least 0.")
        self._end_step(int(count))

    def step(self) -> None:
        """End a step: `count` grows by one."""
        self._end_step(self._count + 1)

    def _end_step(self, next_count: int) -> None:
        stream = self._stream
        ended, self._count = self._count, next_count
        if stream.wants_steps and self._recorded:
            stream.rows.append(Row("step", "", None, ended, time.monotonic()))
            stream.show()
        self._recorded = False
        if time.monotonic() >= stream.due:
            stream.turn()

    # ------------------------------------------------------------------ recording

    def scalar(self, tag: str, value: object) -> None:
        """Record one number; a tensor is copied on its device and read later."""
        if tag not in self._tags:
            self._tags.add(check_tag(tag))
        if isinstance(value, Tensor):
            value = self._taken(tag, value)
        elif type(value) is not float:
            value = _number(tag, value)
        self._add("scalar", tag, value)

    def scalars(self, values: Mapping[str, object]) -> None:
        """Record several numbers."""
        for tag, value in values.items():
            self.scalar(tag, value)

    def figure(self, tag: str, fig: object) -> None:
        """Record a matplotlib Figure as it looks now."""
        check_tag(tag)
        check_figure(fig)
        if self._stream.writes():
            self._add("figure", tag, encode_figure(fig))

    def image(self, tag: str, image: object) -> None:
        """Record an image: PIL, or a tensor or array (H, W), (C, H, W), (H, W, C) of bytes or of floats in [0, 1]."""
        check_tag(tag)
        checked = check_image(image)
        if self._stream.writes():
            is_tensor = isinstance(checked, Tensor)
            self._add("image", tag, self._stream.buffer.keep(checked) if is_tensor else checked.copy())

    def histogram(self, tag: str, values: object, bins: int = 64) -> None:
        """Record how the values of a tensor or array are spread; counted on its device."""
        check_tag(tag)
        values = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values), device="cpu")
        counted = count_values(values, bins)
        if self._stream.writes():
            self._add("histogram", tag, tuple(map(self._stream.buffer.keep, counted)))

    def text(self, tag: str, text: str) -> None:
        """Record a text."""
        check_tag(tag)
        if not isinstance(text, str):
            raise ConfigTypeError(f"text({tag!r}) was given a {type(text).__name__}; expected a str.")
        self._add("text", tag, encodable(text))

    def params(self, params: Mapping[str, object]) -> None:
        """Record the settings of the run."""
        values, run = _plain_mapping("params", params), current_run()
        self._add("params", "params", masked(values) if run is None else run.shown(values))

    def summary(self, values: Mapping[str, object]) -> None:
        """Record results of the run; tensors are read at once, which waits for their device."""
        self._add("summary", "summary", _plain_mapping("summary", values))

    def direction(self, tag: str, good: Literal["min", "max"]) -> None:
        """Declare whether small ("min") or large ("max") values of a metric are good; reports then show its best value."""
        if good not in ("min", "max"):
            raise ConfigError(unknown_name("direction", good, ["min", "max"]))
        self._add("direction", check_tag(tag), good)

    def last(self, tag: str) -> float:
        """Return the number recorded last under `tag` by this process; waits for the device."""
        self._stream.read()
        if tag not in self._stream.last:
            raise ConfigError(unknown_name("tag", tag, self._stream.last or ["(nothing recorded yet)"]))
        return self._stream.last[tag]

    # ------------------------------------------------------------------ what loggers of a Trainer are called

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Record numbers at a step."""
        if step is not None:
            self.count = step
        self.scalars(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Record the settings of the run."""
        self.params(hyperparameters)

    def log_images(self, images: Any, name: str = "images", step: int | None = None) -> None:
        """Record one image, or a batch or list of them under numbered tags."""
        if step is not None:
            self.count = step
        if isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4:
            for place, image in enumerate(images):
                self.image(f"{name}/{place}", image)
        else:
            self.image(name, images)

    # ------------------------------------------------------------------ life

    @property
    def output_dir(self) -> Path:
        """The folder that the files go to."""
        return self._folder

    def silence(self) -> None:
        """Write nothing from now on, for good; `last` still works."""
        self._stream.silence()

    def ddp(self) -> Self:
        """Become one of several processes: all but rank 0 fall silent."""
        if not is_master():
            self.silence()
        return self

    def flush(self) -> None:
        """Write everything recorded so far; waits for the device."""
        self._stream.flush()

    def close(self) -> None:
        """Write everything and close the files; nothing can be recorded afterwards."""
        self._finalizer()
        if _open_folders.get(self._folder) is self:
            del _open_folders[self._folder]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def state_dict(self) -> StateDict:
        """Return count, last values, position in the journal and ids of external runs; everything recorded is written first."""
        if not self._stream.is_closed:
            self.flush()
        return {
            "count": self._count,
            "last": dict(self._stream.last),
            "lines": self._stream.position(),
            "runs": self._stream.run_ids(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: rows written after it was saved are superseded."""
        count = state.get("count")
        if type(count) is not int or count < 0:
            raise StateError(f"the state of a Recorder has count={count!r}; expected a whole number of at least 0.")
        stream = self._stream
        if stream.is_open or stream.restored is not None:  # end this life first, also one that has written nothing yet
            stream.flush()
            stream.close_sinks()
        stream.restored = Resume(step=count, lines=state.get("lines"))
        stream.restored_runs = dict(state.get("runs") or {})
        stream.last = dict(state.get("last") or {})
        self._count, self._recorded = count, False

    # ------------------------------------------------------------------ within

    def _add(self, kind: str, tag: str, value: object) -> None:
        stream, now = self._stream, time.monotonic()
        if stream.is_closed:
            raise ExperimentError(
                f"{kind}({tag!r}): this Recorder is closed. Record before close() and before its run ends, or create a new one."
            )
        stream.rows.append(Row(kind, tag, value, self._count, now))
        self._recorded = True
        if now >= stream.due:
            stream.turn()

    def _taken(self, tag: str, value: Tensor) -> object:
        """Return the number of a CPU tensor, or a copy of a device tensor that is read later."""
        if value.numel() != 1:
            raise ConfigError(
                f"scalar({tag!r}) was given a tensor of shape {tuple(value.shape)}; expected one element. Record its mean(), or use "
                "histogram() for the spread."
            )
        if value.is_complex():
            raise ConfigError(f"scalar({tag!r}) was given a complex number; record its real part or its size (abs).")
        if value.is_meta:
            raise ConfigError(f"scalar({tag!r}) was given a tensor on the meta device, which has no value.")
        if hasattr(value, "full_tensor"):
            raise ConfigError(
                f"scalar({tag!r}) was given a distributed tensor; record value.full_tensor(), computed on every rank."
            )
        if value.device.type == "cpu":
            number = value.item()
            return int(number) if type(number) is bool else number
        return self._stream.buffer.put(value)


def _number(tag: str, value: object) -> float | int:
    is_array = hasattr(value, "item") and getattr(value, "size", None) in (1, None)
    number = value.item() if is_array else value  # type: ignore[attr-defined]
    if isinstance(number, Integral) and abs(int(number)) < _LARGEST_INT:
        return int(number)
    if isinstance(number, Real) and not isinstance(number, Integral):
        return float(number)
    given = f"an array of shape {value.shape}" if hasattr(value, "shape") else f"{value!r}"
    raise ConfigTypeError(f"scalar({tag!r}) was given {given}; expected one number.")


def _plain_mapping(name: str, values: object) -> dict[str, object]:
    if not isinstance(values, Mapping):
        raise ConfigTypeError(f"{name}() was given a {type(values).__name__}; expected a dict of names and values.")
    return plain(values)


def _made_sinks(sinks: object) -> list[object]:
    if isinstance(sinks, str) or not isinstance(sinks, Iterable):
        raise ConfigTypeError(f"sinks={sinks!r} is not valid; expected a list or tuple, such as sinks=({sinks!r},).")
    made = []
    for sink in sinks:
        if isinstance(sink, str):
            if sink not in _NAMED_SINKS:
                raise ConfigError(unknown_name("sink", sink, _NAMED_SINKS, where="sinks"))
            sink = _NAMED_SINKS[sink]()
        made.append(sink)
    return made


def _seconds(flush_every: object) -> float:
    with naming("flush_every", flush_every):
        every = ensure_time(flush_every, TimeUnit.SECOND)  # type: ignore[arg-type]
    if every.unit is not TimeUnit.SECOND or every.value < 0:
        raise ConfigError(f"flush_every={flush_every!r} is not valid; expected a time of at least 0, such as '5s'.")
    return float(every.value)


def _claimed_folder(output_dir: str | Path | None) -> Path:
    """Return the folder of a new Recorder, which no other open one writes to."""
    if output_dir is not None:
        folder = absolute(output_dir)
        if folder in _open_folders:
            raise ConfigError(
                f"output_dir={str(output_dir)!r} belongs to a Recorder that is still open. Use that one, close() it, or give this one "
                "another folder."
            )
        return folder
    run = current_run()
    if run is None:
        raise ExperimentError(
            "Recorder() needs a folder to write to, and no experiment is running. Pass one, Recorder('runs/first'), or create it inside an "
            "experiment."
        )
    place = run.next_index("recorder")
    folder = (run.folder if place == 0 else run.folder / f"recorder-{place}").absolute()
    earlier = _open_folders.get(folder)
    if earlier is not None:  # of the same run before it was resumed in this process
        earlier.close()
    return folder
