"""Words and numbers in the terminal: where the run is, and what its metrics are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.history_views import format_metric

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class LogMetricsCallback(TrainerCallback):
    """Shows the latest metrics: training's after the training epoch, all others after an evaluation.

    Override `log_metrics` to send them somewhere else.
    """

    _recorded_before: Mapping[str, int] = {}

    def on_train_epoch_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Log the metrics whose names begin with `train`."""
        self._log(trainer, [name for name in trainer.run_history.get_metric_names() if name.startswith("train")])

    def on_eval_epoch_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Note what was recorded before this evaluation."""
        self._recorded_before = _counts(trainer.run_history)

    def on_eval_epoch_end(self, trainer: "Trainer", is_intermediate: bool = False, **kwargs: Any) -> None:
        """Log the other metrics; of an evaluation inside an epoch, or of one of several evaluation sets, only its own."""
        counts = {name: count for name, count in _counts(trainer.run_history).items() if not name.startswith("train")}
        if is_intermediate or trainer.state.dataloader_label != "eval":
            self._log(trainer, [name for name in counts if counts[name] != self._recorded_before.get(name, 0)])
        else:
            self._log(trainer, [name for name in counts if "intermediate_eval_" not in name])

    def log_metrics(self, trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
        """Print each metric once per node."""
        for name, value in metrics.items():
            trainer.print(f"{name}: {format_metric(value)}")

    def _log(self, trainer: "Trainer", names: list[str]) -> None:
        self.log_metrics(trainer, {name: trainer.run_history.get_latest_metric(name) for name in names})


class PrintProgressCallback(TrainerCallback):
    """Prints when runs and epochs begin and end."""

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Say that training begins."""
        trainer.print("Starting training run")

    def on_train_epoch_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Say which epoch begins."""
        trainer.print(f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Say that an evaluation begins."""
        label = trainer.state.dataloader_label
        trainer.print("Starting evaluation" if label == "eval" else f"Starting evaluation on {label}")

    def on_training_run_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Say that training is over."""
        trainer.print("\nFinishing training run")

    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Say that `evaluate()` begins."""
        trainer.print("Starting evaluation run")

    def on_evaluation_run_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Say that `evaluate()` is over."""
        trainer.print("Finishing evaluation run")


def _counts(history: Any) -> dict[str, int]:
    return {name: history._num_values(name) for name in history.get_metric_names()}
