"""The best value of a metric so far, for callbacks that save or stop by it."""

import math
import re
from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.train.run_history import RunHistory


class MetricWatch:
    """Looks at a metric once per recorded value and remembers the best; NaN is never the best."""

    def __init__(self, metric: str, greater_is_better: bool):
        self.metric, self.greater_is_better = metric, greater_is_better
        self.best: float | None = None
        inside_epoch = re.sub("eval_(.+)_epoch$", r"intermediate_eval_\1", metric)
        self._names = tuple(dict.fromkeys((metric, inside_epoch)))
        self._num_seen: dict[str, int] = {}

    def start(self, history: RunHistory, forget: bool) -> None:
        """Begin a run: values recorded before it are not new."""
        self._num_seen = {name: history._num_values(name) for name in self._names}
        if forget:
            self.best = None

    def new_value(self, trainer: Any, inside_epoch: bool = False) -> float | None:
        """Return the value recorded since the last call, or None; a metric that will never come is a ValueError.

        Where `eval_interval` evaluates inside epochs, a metric such as `eval_loss_epoch` has those values too.
        """
        history, value = trainer.run_history, None
        names = self._names if trainer.evaluates_inside_epochs else self._names[:1]
        recorded = [name for name in names if name in history.get_metric_names()]
        if not recorded and not inside_epoch and not _evaluation_is_to_come(trainer, self.metric):
            history.get_latest_metric(self.metric)  # raises, with the recorded names
        for name in recorded:
            count = history._num_values(name)
            if count != self._num_seen.get(name, 0):
                self._num_seen[name], value = count, float(history.get_latest_metric(name))
        return value

    def agreed_value(self, trainer: Any, inside_epoch: bool = False) -> float | None:
        """Return rank 0's `new_value` on every rank, for what all ranks do or none; every rank must call this."""
        value = failure = None
        try:
            value = self.new_value(trainer, inside_epoch)
        except ValueError as error:
            failure = error
        value, problem = broadcast_from_master((value, None if failure is None else str(failure)))
        if problem is not None:
            raise failure or ValueError(problem)
        return value

    def improvement(self, value: float) -> float:
        """Return by how much a value beats the best: inf where there is none yet, nan for a NaN."""
        if math.isnan(value):
            return math.nan
        if self.best is None:
            return math.inf
        return value - self.best if self.greater_is_better else self.best - value

    def state_dict(self) -> dict[str, float | None]:
        """Return the best value."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Take the best value back."""
        self.best = state["best"]


def _evaluation_is_to_come(trainer: Any, metric: str) -> bool:
    """Whether a metric may be missing only because the first evaluation has not been due yet."""
    if trainer._eval_dataloader is None or metric.startswith("train"):
        return False
    names = trainer.run_history.get_metric_names()
    if "intermediate_eval_" in metric:
        may_come = trainer.evaluates_inside_epochs or any(
            hasattr(callback, "eval_every_n_steps") for callback in trainer.callback_handler
        )
        return may_come and not any(name.startswith("intermediate_eval_") for name in names)
    return not any(name.startswith("eval_") for name in names)
