"""The sinks of other programs: TensorBoard, Weights & Biases, trackio and MLflow.

TensorBoard's events are built here rather than with `torch.utils.tensorboard`: the values of one step share an event, times are those
of the recording, and pictures, which are PNG already, need no imaging package. A resume gives TensorBoard the step from which on it
should forget what it has read.

One adapter serves Weights & Biases and trackio. A W&B run has an id and lets a metric be the axis of the others, a trackio run is known
by its name and takes any step. Our own step is the axis because W&B drops rows whose step lies before its last one, as after a resume.

MLflow is used through its client, which leaves the program's own active run alone. Without a tracking address all runs are kept in one
folder store, `mlruns` in the working directory, as `mlflow ui` expects it.
"""

import importlib
import importlib.util
import io
import logging
import os
import time as clock
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.containers import with_environment
from drivetrain.core.errors import ConfigError, MissingExtra, unknown_name
from drivetrain.core.files import make_inner_folder
from drivetrain.core.plain import encodable
from drivetrain.core.types import Settings
from drivetrain.record.buffer import Histogram
from drivetrain.record.images import Picture
from drivetrain.record.sink import Resume
from drivetrain.record.stream import picture_path, safe_name
from drivetrain.runtime.run import current_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "tb"
_QUEUE = 1000  # events that may wait for the writer's thread


def has_tensorboard() -> bool:
    """Return whether tensorboard can be used."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardSink:
    """Writes event files to `tb/`; settings become TensorBoard's hyperparameters as well as a text."""

    wants_settings = True

    def __init__(self) -> None:
        if not has_tensorboard():
            raise MissingExtra("tensorboard", "tensorboard", "Recorder(tensorboard=True)")
        self._writer: Any = None

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Begin a new event file; after a resume it marks the steps that are void."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2
        self._tensor, self._shape = tensor_pb2.TensorProto, tensor_shape_pb2.TensorShapeProto
        if encodable(str(folder)) != str(folder):
            logger.warning(
                "TensorBoard cannot write to %r, whose name is not UTF-8; the other files have it all.", str(folder)
            )
            return
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
        if self._writer is not None:
            self._writer.add_event(self._event(step=step, wall_time=time, summary=self._summary.Summary(value=values)))


def _field(value: object) -> dict[str, bool | float | str]:
    """Return a setting as the field of protobuf's `Value` for its type."""
    if isinstance(value, bool):
        return {"bool_value": value}
    return {"number_value": value} if isinstance(value, int | float) else {"string_value": str(value)}


def _table(values: Mapping[str, object]) -> str:
    rows = [f"| {name} | {value} |".replace("\n", " ") for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


STEP = "step"
_PACKAGES = ("wandb", "trackio")


class WandbSink:
    """Sends rows to a run of W&B or trackio; further `settings` go to its `init`."""

    remote = True

    def __init__(
        self, package: Literal["wandb", "trackio"] = "wandb", *, project: str | None = None, **settings: object
    ):
        if package not in _PACKAGES:
            raise ConfigError(unknown_name("tracker", package, _PACKAGES))
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, package, f"the sink {package!r}")
        self.name, self.run_id = package, None
        self._project, self._settings = project, settings
        self._run: Any = None

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Start a run, or continue the one that was saved."""
        self._tracker = importlib.import_module(self.name)
        project = self._project or os.environ.get(f"{self.name.upper()}_PROJECT") or "drivetrain"
        settings = {"project": project, "name": folder.name} | self._settings
        if resume is not None and resume.run_id is not None:
            settings |= {"id" if self.name == "wandb" else "name": resume.run_id, "resume": "allow"}
        if self.name == "wandb":
            # Other runs of this process are not ours to end.
            settings = {"dir": str(folder), "reinit": "create_new"} | settings
        self._run = self._tracker.init(**settings)
        self.run_id = self._run.id if self.name == "wandb" else self._run.name
        self._has_axis = hasattr(self._run, "define_metric")
        if self._has_axis:
            self._run.define_metric(STEP, hidden=True)
            self._run.define_metric("*", step_metric=STEP)

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Take the numbers of one step."""
        self._log(dict(values), step)

    def image(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take a picture."""
        from PIL import Image

        self._log({tag: self._tracker.Image(Image.open(io.BytesIO(picture.png)))}, step)

    figure = image

    def histogram(self, tag: str, histogram: Histogram, step: int, time: float) -> None:
        """Take a histogram."""
        import numpy as np

        counted = (np.asarray(histogram.counts), np.asarray(histogram.edges))
        self._log({tag: self._tracker.Histogram(np_histogram=counted)}, step)

    def text(self, tag: str, text: str, step: int, time: float) -> None:
        """Take a text."""
        self._log({tag: text}, step)

    def params(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take the settings of the run."""
        config = self._run.config
        config.update(dict(values), **({"allow_val_change": True} if self.name == "wandb" else {}))

    def summary(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take results of the run; a tracker without a summary gets them as last values."""
        if hasattr(self._run, "summary"):
            self._run.summary.update(dict(values))
        else:
            self._log(dict(values), step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _log(self, values: Settings, step: int) -> None:
        if self._has_axis:
            self._run.log({STEP: step, **values})
        else:
            self._run.log(values, step=step)


logger = logging.getLogger(__name__)

DEFAULT_STORE = "mlruns"

_LARGEST_BATCH = 1000  # what a server takes in one call
_LARGEST_SETTINGS = 100  # parameters or tags in one call
_LONGEST_PARAM = 6000
_LONGEST_KEY = 250
_ALSO_ALLOWED = frozenset("_-. :/")


class MlflowSink:
    """Sends rows to an MLflow run, at `tracking_uri`, `MLFLOW_TRACKING_URI` or the folder `mlruns` in the working directory.

    `experiment` is MLflow's experiment; None is `MLFLOW_EXPERIMENT_NAME`, else the name of the experiment that runs, else "drivetrain".
    """

    remote = True
    name = "mlflow"

    def __init__(self, tracking_uri: str | None = None, *, experiment: str | None = None):
        if importlib.util.find_spec("mlflow") is None:
            raise MissingExtra("mlflow-skinny", "mlflow", "the sink 'mlflow'")
        self.run_id: str | None = None
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._metrics: list[object] = []
        self._has_failed = False

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Start a run, or continue the one that was saved."""
        from mlflow import MlflowClient

        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or Path(DEFAULT_STORE).resolve().as_uri()
        with _folder_store_allowed():
            client = MlflowClient(tracking_uri=uri)
            self.run_id = None if resume is None else _continued(client, resume.run_id)
            if self.run_id is None:
                run = current_run()
                own = os.environ.get("MLFLOW_EXPERIMENT_NAME") or (run.name if run is not None else "") or "drivetrain"
                number = _experiment_id(client, self._experiment or own)
                tags = {"drivetrain.folder": str(folder)}
                self.run_id = client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        self._client = client

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""
        from mlflow.entities import Metric

        self._metrics.append(Metric(_key(tag), float(value), int(time * 1000), step))

    def _picture(self, kind: str, tag: str, picture: Picture, step: int, time: float) -> None:
        import tempfile

        folder, name = os.path.split(picture.path or picture_path(kind, tag, step))
        with tempfile.TemporaryDirectory() as aside:
            file = Path(aside) / name
            file.write_bytes(picture.png)
            self._client.log_artifact(self.run_id, str(file), folder)

    image = partialmethod(_picture, "image")
    figure = partialmethod(_picture, "figure")

    def text(self, tag: str, text: str, step: int, time: float) -> None:
        """Take a text."""
        self._client.log_text(self.run_id, text, f"texts/{safe_name(tag)}/{step}.txt")

    def params(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take the settings of the run; one that has another value already is kept as a tag."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self.run_id).data.params
        texts = {_key(name): str(value)[:_LONGEST_PARAM] for name, value in values.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        changed = [RunTag(name, text) for name, text in texts.items() if known.get(name, text) != text]
        for start in range(0, max(len(new), len(changed)), _LARGEST_SETTINGS):
            part = slice(start, start + _LARGEST_SETTINGS)
            self._client.log_batch(self.run_id, params=new[part])
            self._client.log_batch(self.run_id, tags=changed[part])

    def summary(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take results of the run: numbers as metrics, the rest as tags."""
        from mlflow.entities import RunTag

        tags = []
        for name, value in values.items():
            if isinstance(value, int | float):
                self.scalar(name, value, step, time)
            else:
                tags.append(RunTag(_key(name), str(value)))
        self._client.log_batch(self.run_id, tags=tags)

    def flush(self) -> None:
        """Send what is waiting."""
        while self._metrics and self._client is not None:
            batch, self._metrics = self._metrics[:_LARGEST_BATCH], self._metrics[_LARGEST_BATCH:]
            try:
                self._client.log_batch(self.run_id, metrics=batch)
            except Exception:
                self._has_failed = not self._has_failed
                if self._has_failed:  # it is sent once more; after that the server may be rejecting what is in it
                    self._metrics = batch + self._metrics
                raise
            self._has_failed = False

    def close(self) -> None:
        """Send what is waiting and end the run."""
        if self._client is not None:
            client, run_id = self._client, self.run_id
            try:
                self.flush()
            finally:
                self._client = None
                client.set_terminated(run_id, end_time=int(clock.time() * 1000))


def _continued(client: "MlflowClient", run_id: str | None) -> str | None:
    """Return the run that goes on, None where the store does not have it: a run that is resumed elsewhere begins a new one."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        logger.warning(
            "mlflow: the store has no run %s, so a new one is started. To continue it, resume where %s is.",
            run_id,
            DEFAULT_STORE,
        )
        return None
    return run_id


def _experiment_id(client: "MlflowClient", name: str) -> str:
    """Return the id of MLflow's experiment, which is made where there is none; another process may be making it right now."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


@contextmanager
def _folder_store_allowed() -> Iterator[None]:
    """Give MLflow the consent that it asks for before it uses a folder store, and take it back; a database is the user's to choose."""
    consent = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "true")
    with with_environment(MLFLOW_ALLOW_FILE_STORE=consent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _key(tag: str) -> str:
    """Return a tag with the characters and the length that MLflow allows."""
    is_allowed = all(char.isalnum() or char in _ALSO_ALLOWED for char in tag)
    if is_allowed and len(tag) <= _LONGEST_KEY and ".." not in tag and not tag.startswith("/"):
        return tag
    return safe_name(tag).replace("%", ":")
