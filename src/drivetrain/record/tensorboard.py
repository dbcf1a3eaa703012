"""TensorBoard event files, written with tensorboard's own file writer.

Events are built here rather than with `torch.utils.tensorboard`: the values of one step share an event, times are those of the
recording, and pictures, which are PNG already, need no imaging package. A resume gives TensorBoard from which step on it should
forget what it has read.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.errors import MissingExtra
from drivetrain.core.files import make_inner_folder
from drivetrain.record.buffer import Histogram
from drivetrain.record.images import Picture
from drivetrain.record.sink import Resume

FOLDER = "tb"
_QUEUE = 1000  # events that may wait for the writer's thread


def is_installed() -> bool:
    """Return whether tensorboard can be used."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardSink:
    """Writes event files to `tb/`; settings become TensorBoard's hyperparameters as well as a text."""

    wants_settings = True

    def __init__(self) -> None:
        if not is_installed():
            raise MissingExtra("tensorboard", "tensorboard", "Recorder(tensorboard=True)")
        self._writer: Any = None

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Begin a new event file; after a resume it marks the steps that are void."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2
        self._tensor, self._shape = tensor_pb2.TensorProto, tensor_shape_pb2.TensorShapeProto
        make_inner_folder(folder, folder / FOLDER)
        self._writer = EventFileWriter(str(folder / FOLDER), max_queue_size=_QUEUE)
        if resume is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(step=resume.step, file_version="brain.Event:2"))
            self._writer.add_event(self._event(step=resume.step, session_log=start))

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Take the numbers of one step."""
        made = self._summary.Summary.Value
        self._add([made(tag=tag, simple_value=float(value)) for tag, value in values.items()], step, time)

    def image(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take a picture."""
        width, height = picture.size
        image = self._summary.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=picture.png)
        self._add([self._summary.Summary.Value(tag=tag, image=image)], step, time)

    figure = image

    def histogram(self, tag: str, histogram: Histogram, step: int, time: float) -> None:
        """Take a histogram."""
        proto = self._summary.HistogramProto(
            min=histogram.low,
            max=histogram.high,
            num=sum(histogram.counts),
            sum=histogram.total,
            sum_squares=histogram.total_of_squares,
            bucket_limit=histogram.edges[1:],
            bucket=histogram.counts,
        )
        self._add([self._summary.Summary.Value(tag=tag, histo=proto)], step, time)

    def text(self, tag: str, text: str, step: int, time: float) -> None:
        """Take a text."""
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        shape = self._shape(dim=[self._shape.Dim(size=1)])
        tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add([self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)], step, time)

    def params(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take the settings of the run: as a table of text, and as the hyperparameters of TensorBoard's HParams page."""
        from google.protobuf.struct_pb2 import Value
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        self.text("params", _table(values), step, time)
        given = {name: Value(**_field(value)) for name, value in values.items() if value is not None}
        started = plugin_data_pb2.SessionStartInfo(start_time_secs=time, hparams=given)
        content = plugin_data_pb2.HParamsPluginData(session_start_info=started)
        summary = metadata.create_summary_metadata(content)
        tag = metadata.SESSION_START_INFO_TAG
        self._add([self._summary.Summary.Value(tag=tag, metadata=summary, tensor=metadata.NULL_TENSOR)], step, time)

    def summary(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take results of the run, as a table of text."""
        self.text("summary", _table(values), step, time)

    def flush(self) -> None:
        """Write what is waiting."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, values: list[Any], step: int, time: float) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time, summary=self._summary.Summary(value=values)))


def _field(value: object) -> dict[str, bool | float | str]:
    """Return a setting as the field of protobuf's `Value` for its type."""
    if isinstance(value, bool):
        return {"bool_value": value}
    return {"number_value": value} if isinstance(value, int | float) else {"string_value": str(value)}


def _table(values: Mapping[str, object]) -> str:
    rows = [f"| {name} | {value} |".replace("\n", " ") for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])
