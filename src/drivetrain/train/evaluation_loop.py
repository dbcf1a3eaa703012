"""Evaluation, inside a training run and on its own, and what an epoch records."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.core.event import Event
from drivetrain.core.intervals import Interval
from drivetrain.core.time import Clock, TimeUnit
from drivetrain.module.accumulation import Count
from drivetrain.train import loaders
from drivetrain.train.callbacks.watching import MetricWatch
from drivetrain.train.checks import check_batch_output
from drivetrain.train.evaluation import evaluation_mode, kept_history
from drivetrain.train.evaluation_state import EvaluationState
from drivetrain.train.items import LossCounting, without_empty
from drivetrain.train.logbook import Logbook
from drivetrain.train.meeting import TrainerMeeting
from drivetrain.train.metrics import MetricSet
from drivetrain.train.tracking import LossTracker, reduce_means


class EvaluationLoop(TrainerMeeting):
    """Evaluates, and records what was measured."""

    logbook: Logbook
    _eval_dataloader: Any
    _loss_tracker: LossTracker
    _train_metrics: MetricSet
    _eval_metrics: MetricSet
    _count_items: Callable[[Any], Count] | str | None
    _eval_items: dict[str | None, LossCounting]  # by the name of the evaluation set
    _plateau_watch: MetricWatch
    _batches_per_epoch: int | None = None
    _eval_every: Callable[[Clock], bool] | None = None  # whether to evaluate after a batch; None: only after epochs
    _evaluation_state = EvaluationState()  # of the run
    _eval_interval: Interval | None = None  # what `_eval_every` asks, where it is no function of the user's
    _eval_after_epoch = False
    _unfinished: Literal["", "evaluation", "epoch"] = ""  # saved with the state: what a resumed run does first
    _eval_set: str | None = None  # the name of the evaluation set in hand, where there are several

    # ------------------------------------------------------------------ evaluation

    @property
    def evaluates_inside_epochs(self) -> bool:
        """Whether `eval_interval` asks for evaluations inside epochs, which then count as much as those after an epoch."""
        return self._eval_every is not None

    def _run_evaluation(self) -> None:
        """Evaluate outside a training run."""
        self.evaluation_run_start()
        self._fire.eval_standalone_start()
        self._run_eval_epoch(self._eval_dataloader, is_training=False)
        self.evaluation_run_end()
        self._fire.eval_standalone_end()

    def _run_eval_epoch(self, dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once over the data, every sample counted once; what training needs is restored afterwards.

        Of several evaluation sets each is evaluated on its own, with its name in those of the metrics: `eval_<set>_loss_epoch`.
        """
        if isinstance(dl, loaders.EvaluationLoaders):
            finished = self._evaluation_state.finished if is_training and self._is_running else []
            try:
                for self._eval_set, loader in dl.items():
                    if self._eval_set not in finished:
                        self._run_eval_epoch(loader, is_training, is_intermediate)
                        if self._evaluation_was_cut:
                            return
                        finished.append(self._eval_set)
                finished.clear()
            finally:
                self._eval_set = None
            return
        if is_training and self._is_running:
            with self._evaluation_state.counting(self._eval_set or "", dl) as was_cut:
                self._evaluate_set(dl, "eval", is_intermediate)
                if self._evaluation_was_cut:
                    was_cut.append(True)
        else:
            self._evaluate_set(dl, "eval" if is_training else "evaluation", is_intermediate)

    def _evaluate_set(self, dl: Any, prefix: str, is_intermediate: bool) -> None:
        """Evaluate once over one evaluation set."""
        state, fire = self.state, self._fire
        counting = self._eval_items.setdefault(self._eval_set, LossCounting(self._count_items))
        self._evaluation_was_cut = False
        with evaluation_mode(self, is_intermediate, dl, self._eval_set):
            fire.eval_before_all()
            self._between_steps(self.eval_epoch_start)
            fire.eval_start()
            move = loaders.mover(self, dl)
            with torch.no_grad():
                for batch in self._until_signal(dl) if self._is_running else dl:
                    state.batch, state.batch_output = batch if move is None else move(batch), None
                    fire.eval_batch_start()
                    fire.eval_before_forward()
                    if counting.is_decided:
                        output = self.calculate_eval_batch_loss(state.batch)
                    else:
                        output = counting.watched(self, self.calculate_eval_batch_loss, state.batch, dl)
                    check_batch_output(output, self)
                    is_padding = loaders.is_padding(dl)
                    if counting.is_needed:
                        self._loss_tracker.is_sum = counting.is_sum
                        output = self._counted(counting, output, is_padding, is_part=True)
                    if self._generate is not None:  # also of padding: ranks of a sharded model generate in step
                        output = {**output, "generated": self.calculate_generation_batch(state.batch)}
                    state.batch_output = output
                    size = 0 if is_padding else output["batch_size"]
                    self._update_loss_tracker(output["loss"].detach(), output.get("num_items", size) if size else 0)
                    if self._eval_metrics and size:
                        self._eval_metrics.update(*self.get_metric_inputs(state.batch, output), size)
                    fire.eval_batch_end()
            if self._evaluation_was_cut:
                return
            self._add_epoch_loss_to_run_history(self._metric_name(prefix, "loss", is_intermediate))
            self._record_epoch_metrics(prefix, is_intermediate)
            self._between_steps(self.eval_epoch_end)
            fire.eval_end()
            fire.eval_after_all()
            self._record_means(prefix, is_intermediate)

    def _evaluate_if_due(self, is_due: Callable[[Clock], bool]) -> None:
        """Evaluate inside an epoch; where the epoch's last batch is done, its own evaluation comes next."""
        clock = self.state.clock
        if is_due(clock):
            if clock.batch_in_epoch == self._batches_per_epoch:
                self._eval_after_epoch = True
            else:
                self._unfinished = "evaluation"
                self._run_intermediate_evaluation()
                if not self._evaluation_was_cut:
                    self._unfinished = ""
                self._meet()

    def _run_intermediate_evaluation(self) -> None:
        """Evaluate between two steps; then a plateau schedule and the callbacks that watch a metric act on it."""
        self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
        if self._evaluation_was_cut:
            return
        if self.evaluates_inside_epochs and isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._step_plateau(inside_epoch=True)
        self._between_steps(partial(self.engine.call, "on_intermediate_evaluation_end"))

    def _run_sanity_evaluation(self) -> None:
        """Evaluate a few batches before training, so that a mistake there shows in seconds; nothing is kept."""
        assert self.settings is not None
        with kept_history(self), self._evaluation_state.kept():
            limited = loaders.limit(self._eval_dataloader, self.settings.sanity_eval_batches)
            self._run_eval_epoch(limited, is_intermediate=True)

    def _evaluation_is_due(self, at_end: bool) -> bool:
        """Whether to evaluate after this epoch: when its interval says so, and at the end of the run."""
        assert self.settings is not None
        every, due = self.settings.eval_time, self._eval_after_epoch
        self._eval_after_epoch = False
        if due:
            return True
        if every is None:
            due = bool(self.settings.eval_interval(self.state, Event.EPOCH_END))  # type: ignore[operator]
            if self._vote is not None:
                self._ask_all(yes=due)
                due = self._vote.says_yes
            return due
        if every.value <= 0:
            return False
        return at_end or (every.unit is TimeUnit.EPOCH and self.state.clock.epoch % int(every.value) == 0)

    # ------------------------------------------------------------------ keeping account

    def _counted(
        self, counting: LossCounting, output: dict[str, Any], is_padding: bool, is_part: bool
    ) -> dict[str, Any]:
        """Return the output of a loss hook with the number of items that its loss is a mean over, unless it says so itself."""
        items = output.get("num_items")
        if items is None:
            items = counting.count(self.state.batch)
        if isinstance(items, Tensor) and items.is_cpu:
            items = items.item()  # on the host already: nothing waits
        items = 0 if is_padding else items
        loss = without_empty(output["loss"], items) if is_part and not counting.is_sum else output["loss"]
        return {**output, "loss": loss, "num_items": items}

    def _update_loss_tracker(self, loss: Tensor, batch_size: Count) -> None:
        self._loss_tracker.update(loss, batch_size)

    def _add_epoch_loss_to_run_history(self, name: str) -> None:
        """Record the mean loss over all samples of all processes; reading it is where the host waits."""
        self.logbook.record(name, self._loss_tracker.average_over_ranks())

    def _record_epoch_metrics(self, prefix: str, is_intermediate: bool = False) -> None:
        """Record the epoch's metrics and what `log()` collected."""
        metrics = self._train_metrics if prefix == "train" else self._eval_metrics
        self._record_means(prefix, is_intermediate, metrics.compute() if metrics else None)
        if self._units is not None and prefix == "train":
            for name, value in self._units.metrics().items():
                self.logbook.record(name, float(value))

    def _record_means(
        self, prefix: str, is_intermediate: bool = False, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Record metrics and what `log()` has collected since the last time.

        Plugins may call `log()` when an epoch ends, after its means were recorded: that belongs to the same epoch.
        """
        values = {**(metrics or {}), **reduce_means(self._logged)}
        self._logged.clear()
        for name, value in values.items():
            self.logbook.record(self._metric_name(prefix, name, is_intermediate), value)

    def _metric_name(self, prefix: str, name: str, is_intermediate: bool) -> str:
        """Return the name under which the history keeps a metric of a phase."""
        name = name if self._eval_set is None else f"{self._eval_set}_{name}"
        if is_intermediate:
            return f"intermediate_eval_{name}"
        return f"{prefix}_{name}" if prefix == "evaluation" else f"{prefix}_{name}_epoch"

    def _step_epoch_scheduler(self) -> None:
        """Step a scheduler that counts epochs; one that watches a metric gets it."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._step_plateau()
        elif self.scheduler is not None:
            self.scheduler_step()

    def _step_plateau(self, inside_epoch: bool = False) -> None:
        """Step a scheduler that watches a metric, if there is a new value of it."""
        value = self._plateau_watch.agreed_value(self, inside_epoch)
        if value is not None:
            self.scheduler.step(value)
