"""The one stream of metrics: what is recorded reaches the run history and every logger.

Algorithms and monitors call `log_metrics`; epoch means come through `record`. A logger is any object with `log_metrics(metrics,
step=...)`, or a sink with `scalar(tag, value)` such as the `Recorder`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from drivetrain.core.time import Clock
from drivetrain.runtime.readback import AsyncReadback
from drivetrain.runtime.run import current_run
from drivetrain.train.run_history import RunHistory


class Logbook:
    """Feeds the run history and the loggers of one trainer."""

    def __init__(self, history: RunHistory, clock: Clock, loggers: Collection[Any]):
        run = current_run()
        recorder = None if run is None else run.recorder  # inside an experiment metrics go to its recorder too
        self.history = history
        """Where values are recorded; another one may take its place."""
        self._clock = clock
        self._readback = AsyncReadback()
        self._arriving: dict[str, float] = {}
        self.loggers = [*loggers, *([recorder] if recorder is not None and recorder not in loggers else [])]

    def record(self, name: str, value: Any) -> None:
        """Keep one value of an epoch: in the history under its prefixed name, and with every logger."""
        self.wait_for_steps()
        self.history.update_metric(name, value)
        self._send({f"{self.history.metric_name_prefix}{name}": value})

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep values of this moment; tensors stay on the device until a logger reads them."""
        for name, value in metrics.items():
            self.history.update_metric(name, value.detach() if isinstance(value, Tensor) else value)
        self._send(metrics, step)

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Send values of one step to the loggers only: a history of every step would grow without end.

        A sink reads a device by itself, later. Any other logger gets numbers, with their step, when they have arrived.
        """
        step = self._clock.batch
        sinks = [logger for logger in self.loggers if hasattr(logger, "scalar")]
        self._send(metrics, step, sinks)
        if len(sinks) < len(self.loggers):
            self._readback.max_lag = 2 * len(metrics)
            for place, (name, value) in enumerate(metrics.items(), start=1):
                self._readback.push(value, (step, name, place == len(metrics)))
            self._deliver(self._readback.poll())

    def wait_for_steps(self) -> None:
        """Give the loggers what is still on its way from the device; this synchronizes the host."""
        self._deliver(self._readback.drain())

    def _deliver(self, arrived: list[tuple[Any, float]]) -> None:
        for (step, name, is_last), value in arrived:
            self._arriving[name] = value
            if is_last:
                metrics, self._arriving = self._arriving, {}
                self._send(metrics, step, [logger for logger in self.loggers if not hasattr(logger, "scalar")])

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Send to the loggers how the run is set up."""
        for logger in self.loggers:
            for method in ("log_hyperparameters", "params"):
                if hasattr(logger, method):
                    getattr(logger, method)(dict(hyperparameters))
                    break

    def log_images(self, images: Any, name: str = "images", step: int | None = None) -> None:
        """Send images to the loggers that take them."""
        for logger in self.loggers:
            if hasattr(logger, "log_images"):
                logger.log_images(images, name=name, step=step)
            elif hasattr(logger, "image"):
                logger.image(name, images)

    def flush(self) -> None:
        """Let every logger write what it holds."""
        self.wait_for_steps()
        for logger in self.loggers:
            if callable(getattr(logger, "flush", None)):
                logger.flush()

    def _send(
        self, metrics: Mapping[str, Any], step: int | None = None, loggers: Collection[Any] | None = None
    ) -> None:
        loggers = self.loggers if loggers is None else loggers
        if not loggers:
            return
        step = self._clock.batch if step is None else step
        for logger in loggers:
            if hasattr(logger, "log_metrics"):
                logger.log_metrics(dict(metrics), step=step)
            elif hasattr(logger, "scalar"):
                if hasattr(logger, "count"):
                    logger.count = step
                for name, value in metrics.items():
                    logger.scalar(name, value)
