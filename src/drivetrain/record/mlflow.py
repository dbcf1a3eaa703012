"""MLflow through its client, which leaves the program's own active run alone.

Without a tracking address all runs are kept in one folder store, `mlruns` in the working directory, as `mlflow ui` expects it.
"""

import importlib.util
import logging
import os
import time as clock
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import MissingExtra
from drivetrain.record.images import Picture
from drivetrain.record.sink import Resume
from drivetrain.record.stream import picture_path, safe_name
from drivetrain.runtime.run import current_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

DEFAULT_STORE = "mlruns"

_LARGEST_BATCH = 1000  # what a server takes in one call
_LARGEST_SETTINGS = 100  # parameters or tags in one call
_LONGEST_PARAM = 6000
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

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Start a run, or continue the one that was saved."""
        from mlflow import MlflowClient

        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or Path(DEFAULT_STORE).resolve().as_uri()
        with _folder_store_allowed():
            client = MlflowClient(tracking_uri=uri)
            self.run_id = None if resume is None else _continued(client, resume.run_id)
            if self.run_id is None:
                number = _experiment_id(client, self._experiment or _own_experiment())
                tags = {"drivetrain.folder": str(folder)}
                self.run_id = client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        self._client = client

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""
        from mlflow.entities import Metric

        self._metrics.append(Metric(_key(tag), float(value), int(time * 1000), step))

    def image(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take an image."""
        self._keep_file(picture.path or picture_path("image", tag, step), picture.png)

    def figure(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take a figure."""
        self._keep_file(picture.path or picture_path("figure", tag, step), picture.png)

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
            self._client.log_batch(self.run_id, metrics=batch)

    def close(self) -> None:
        """Send what is waiting and end the run."""
        if self._client is not None:
            client, run_id = self._client, self.run_id
            try:
                self.flush()
            finally:
                self._client = None
                client.set_terminated(run_id, end_time=int(clock.time() * 1000))

    def _keep_file(self, path: str, content: bytes) -> None:
        import tempfile

        folder, name = os.path.split(path)
        with tempfile.TemporaryDirectory() as aside:
            file = Path(aside) / name
            file.write_bytes(content)
            self._client.log_artifact(self.run_id, str(file), folder)


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


def _own_experiment() -> str:
    run = current_run()
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or (run.name if run is not None else "") or "drivetrain"


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
    name = "MLFLOW_ALLOW_FILE_STORE"
    before = os.environ.get(name)
    os.environ.setdefault(name, "true")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ[name]


def _key(tag: str) -> str:
    """Return a tag with the characters that MLflow allows."""
    if all(char.isalnum() or char in _ALSO_ALLOWED for char in tag) and ".." not in tag and not tag.startswith("/"):
        return tag
    return safe_name(tag).replace("%", ":")
