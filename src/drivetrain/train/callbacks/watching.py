"""The best value of a metric so far, for callbacks that save or stop by it."""

import math
from collections.abc import Mapping
from typing import Any


class MetricWatch:
    """Looks at a metric once per recorded value and remembers the best; NaN is never the best."""

    def __init__(self, metric: str, greater_is_better: bool):
        self.metric, self.greater_is_better = metric, greater_is_better
        self.best: float | None = None
        self._num_seen = 0

    def start(self, trainer: Any, forget: bool) -> None:
        """Begin a run: values recorded before it are not news."""
        self._num_seen = len(list(trainer.run_history.get_metric_values(self.metric)))
        if forget:
            self.best = None

    def new_value(self, trainer: Any) -> float | None:
        """Return the value recorded since the last call, or None; a metric that will never come is a ValueError."""
        history = trainer.run_history
        if self.metric not in history.get_metric_names() and _evaluation_is_to_come(trainer, self.metric):
            return None
        latest = history.get_latest_metric(self.metric)  # raises for an unknown name, with the recorded ones
        count = len(list(history.get_metric_values(self.metric)))
        if count == self._num_seen:
            return None
        self._num_seen = count
        return float(latest)

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
    evaluated = any(name.startswith("eval_") for name in trainer.run_history.get_metric_names())
    return trainer._eval_dataloader is not None and not evaluated and not metric.startswith("train")
