"""Evaluation, inside a training run and on its own, and what an epoch records.

An evaluation interrupts training and must leave no trace in it: modes, batch, events and random numbers are restored afterwards.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from drivetrain.core.time import Clock, TimeUnit
from drivetrain.module.accumulation import Count
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train import loaders
from drivetrain.train.checks import check_batch_output
from drivetrain.train.failures import explain_failure
from drivetrain.train.hooks import TrainerHooks
from drivetrain.train.items import LossCounting, without_empty
from drivetrain.train.logbook import Logbook
from drivetrain.train.metrics import MetricSet
from drivetrain.train.settings import TrainerOptions
from drivetrain.train.tracking import InMemoryRunHistory, LossTracker, reduce_means

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


@contextmanager
def evaluation_mode(
    trainer: "EvaluationLoop", is_intermediate: bool, loader: object, set_name: str | None
) -> Iterator[None]:
    """Give an evaluation its own loss tracker and events; restore modes, batch and random numbers, also after an error."""
    state, run = trainer.state, trainer.run
    measures = run.measures
    tracker, logged = measures.tracker, measures.logged
    training_data = (state.dataloader, state.dataloader_label, state.dataloader_len)
    before = (state.batch, state.batch_output, state.outputs, state.loss, state.is_intermediate)
    was_evaluating, generators = run.is_evaluating, capture_rng()
    measures.tracker, measures.logged, run.is_evaluating = LossTracker(), {}, True
    trainer._eval_metrics.reset()
    state.is_intermediate = is_intermediate
    state.set_dataloader(loader, set_name or "eval")
    try:
        with (
            own_events(trainer, Event.EVAL_AFTER_FORWARD),
            restored_modes(state.model),
            evaluating_optimizer(trainer.optimizer),
        ):
            yield
    finally:
        measures.tracker, measures.logged, run.is_evaluating = tracker, logged, was_evaluating
        state.batch, state.batch_output, state.outputs, state.loss, state.is_intermediate = before
        state.set_dataloader(*training_data)
        restore_rng(generators)


@contextmanager
def report_errors(trainer: "Trainer") -> Iterator[None]:
    """Explain an error, and let every plugin know of it and close what it holds."""
    try:
        yield
    except BaseException as error:
        explained = explain_failure(error, trainer.get_model(), trainer.loss_func, 0)
        trainer._close_after(explained)
        if explained is error:
            raise
        raise explained from error


@contextmanager
def own_events(trainer: TrainerHooks, after_forward: Event) -> Iterator[None]:
    """Let `forward` fire the event of this phase, and the loss fire none."""
    step = trainer.run.loss
    before = step.after_forward, step.before_loss
    step.after_forward, step.before_loss = after_forward.value, False
    try:
        yield
    finally:
        step.after_forward, step.before_loss = before


@contextmanager
def restored_modes(model: object) -> Iterator[None]:
    """Restore every module's training flag."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating_optimizer(optimizer: Any) -> Iterator[None]:
    """Switch an optimizer with modes (schedule-free) to evaluation: the weights are evaluated, not trained."""
    has_modes = callable(getattr(type(optimizer), "eval", None)) and callable(getattr(type(optimizer), "train", None))
    was_training = getattr(optimizer, "training", True)
    if has_modes:
        optimizer.eval()
    try:
        yield
    finally:
        if has_modes and was_training:
            optimizer.train()


@contextmanager
def discarded_history(logbook: Logbook) -> Iterator[None]:
    """Record into a history that is thrown away afterwards."""
    history, logbook.history = logbook.history, InMemoryRunHistory()
    try:
        yield
    finally:
        logbook.history = history


class EvaluationLoop(TrainerHooks):
    """Evaluates, and records what was measured."""

    engine: Engine
    _train_metrics: MetricSet
    _eval_metrics: MetricSet
    _options: TrainerOptions

    # ------------------------------------------------------------------ evaluation

    @property
    def evaluates_inside_epochs(self) -> bool:
        """Whether `eval_interval` asks for evaluations inside epochs, which then count as much as those after an epoch."""
        return self.run.evaluation.is_due is not None

    def _run_evaluation(self) -> None:
        """Evaluate outside a training run."""
        self.evaluation_run_start()
        self.run.fire.eval_standalone_start()
        self._run_eval_epoch(self._eval_dataloader, is_training=False)
        self.evaluation_run_end()
        self.run.fire.eval_standalone_end()

    def _run_eval_epoch(self, dl: object, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once over the data, every sample counted once; what training needs is restored afterwards.

        Of several evaluation sets each is evaluated on its own, with its name in those of the metrics: `eval_<set>_loss_epoch`.
        """
        plan, is_part_of_run = self.run.evaluation, is_training and self.run.is_running
        if isinstance(dl, loaders.EvaluationLoaders):
            finished = plan.state.finished if is_part_of_run else []
            try:
                for plan.set_name, loader in dl.items():
                    if plan.set_name not in finished:
                        self._run_eval_epoch(loader, is_training, is_intermediate)
                        if plan.was_cut:
                            return
                        finished.append(plan.set_name)
                finished.clear()
            finally:
                plan.set_name = None
            return
        if is_part_of_run:
            with plan.state.counting(plan.set_name or "", dl) as was_cut:
                self._evaluate_set(dl, "eval", is_intermediate)
                if plan.was_cut:
                    was_cut.append(True)
        else:
            self._evaluate_set(dl, "eval" if is_training else "evaluation", is_intermediate)

    def _evaluate_set(self, dl: Any, prefix: str, is_intermediate: bool) -> None:
        """Evaluate once over one evaluation set."""
        run, state, fire = self.run, self.state, self.run.fire
        plan, call = run.evaluation, run.agreement.call
        counting = run.measures.eval_items.setdefault(plan.set_name, LossCounting(self._options.count_items))
        plan.was_cut = False
        with evaluation_mode(self, is_intermediate, dl, plan.set_name):
            tracker = run.measures.tracker
            fire.eval_before_all()
            call(self.eval_epoch_start)
            fire.eval_start()
            move = loaders.mover(self.device, dl)
            with torch.no_grad():
                for batch in self._until_signal(dl) if run.is_running else dl:
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
                        tracker.is_sum = counting.is_sum
                        output = self._counted(counting, output, is_padding, is_part=True)
                    if run.generate is not None:  # also of padding: ranks of a sharded model generate in step
                        output = {**output, "generated": self.calculate_generation_batch(state.batch)}
                    state.batch_output = output
                    size = 0 if is_padding else output["batch_size"]
                    self._update_loss_tracker(output["loss"].detach(), output.get("num_items", size) if size else 0)
                    if self._eval_metrics and size:
                        self._eval_metrics.update(*self.get_metric_inputs(state.batch, output), size)
                    fire.eval_batch_end()
            if plan.was_cut:
                return
            self._add_epoch_loss_to_run_history(self._metric_name(prefix, "loss", is_intermediate))
            self._record_epoch_metrics(prefix, is_intermediate)
            call(self.eval_epoch_end)
            fire.eval_end()
            fire.eval_after_all()
            self._record_means(prefix, is_intermediate)

    def _until_signal(self, batches: Iterable[object]) -> Generator[Any, None, None]:
        self.run.evaluation.was_cut = yield from self.run.agreement.until_signal(batches)

    def _evaluate_if_due(self, is_due: Callable[[Clock], bool]) -> None:
        """Evaluate inside an epoch; where the epoch's last batch is done, its own evaluation comes next."""
        plan, clock = self.run.evaluation, self.state.clock
        if is_due(clock):
            if clock.batch_in_epoch == self.run.data.batches_per_epoch:
                plan.after_epoch = True
            else:
                plan.unfinished = "evaluation"
                self._run_intermediate_evaluation()
                if not plan.was_cut:
                    plan.unfinished = ""
                self._handle_requests()

    def _handle_requests(self) -> None:
        """Act on a stop or a signal of any rank, outside a step."""
        raise NotImplementedError  # `TrainerLoop` ends runs

    def _run_intermediate_evaluation(self) -> None:
        """Evaluate between two steps; then a plateau schedule and the callbacks that watch a metric act on it."""
        self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
        if self.run.evaluation.was_cut:
            return
        if self.evaluates_inside_epochs and isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._step_plateau(inside_epoch=True)
        self.run.agreement.call(partial(self.engine.call, "on_intermediate_evaluation_end"))

    def _run_sanity_evaluation(self, batches: int) -> None:
        """Evaluate a few batches before training, so that a mistake there shows in seconds; nothing is recorded."""
        with discarded_history(self.logbook), self.run.evaluation.state.kept():
            self._run_eval_epoch(loaders.limit(self._eval_dataloader, batches), is_intermediate=True)

    def _evaluation_is_due(self, at_end: bool) -> bool:
        """Return whether to evaluate after this epoch: when its interval says so, and at the end of the run."""
        settings, plan = self.run.require_settings(), self.run.evaluation
        every, due = settings.eval_time, plan.after_epoch
        plan.after_epoch = False
        if due:
            return True
        if callable(decide := settings.eval_interval):
            return self.run.agreement.says_yes(bool(decide(self.state, Event.EPOCH_END)))
        if every is None or every.value <= 0:
            return False
        return at_end or (every.unit is TimeUnit.EPOCH and self.state.clock.epoch % int(every.value) == 0)

    # ------------------------------------------------------------------ recording

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
        """Record the mean loss over all samples of all processes. This synchronizes the host."""
        self.logbook.record(name, self._loss_tracker.average_over_ranks())

    def _record_epoch_metrics(self, prefix: str, is_intermediate: bool = False) -> None:
        """Record the epoch's metrics and what `log()` collected."""
        metrics = self._train_metrics if prefix == "train" else self._eval_metrics
        self._record_means(prefix, is_intermediate, metrics.compute() if metrics else None)
        if self.run.units is not None and prefix == "train":
            for name, value in self.run.units.metrics().items():
                self.logbook.record(name, float(value))

    def _record_means(
        self, prefix: str, is_intermediate: bool = False, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Record metrics and what `log()` has collected since the last time.

        Plugins may call `log()` when an epoch ends, after its means were recorded: that belongs to the same epoch.
        """
        logged = self.run.measures.logged
        values = {**(metrics or {}), **reduce_means(logged)}
        logged.clear()
        for name, value in values.items():
            self.logbook.record(self._metric_name(prefix, name, is_intermediate), value)

    def _metric_name(self, prefix: str, name: str, is_intermediate: bool) -> str:
        """Return the name under which the history keeps a metric of a phase."""
        set_name = self.run.evaluation.set_name
        name = name if set_name is None else f"{set_name}_{name}"
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
        watch = self.run.evaluation.plateau
        value = None if watch is None else watch.agreed_value(self, inside_epoch)
        if value is not None:
            self.scheduler.step(value)
