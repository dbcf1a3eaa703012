"""One adapter for Weights & Biases and for trackio, which speaks the same language.

Where the two differ, the run is asked what it can do: a W&B run has an id and lets a metric be the axis of the others, a trackio run
is known by its name and takes any step. Making our own step the axis matters after a resume: W&B drops rows whose step
lies before its last one.
"""

import importlib
import importlib.util
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drivetrain.core.errors import ConfigError, MissingExtra, unknown_name
from drivetrain.core.types import Settings
from drivetrain.record.buffer import Histogram
from drivetrain.record.images import Picture
from drivetrain.record.sink import Resume

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
