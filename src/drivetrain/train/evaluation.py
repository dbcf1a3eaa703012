"""Evaluation, inside a training run and separately, and what an epoch records.

An evaluation interrupts training and must not affect it: modes, batch, events and random states are restored afterwards.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.context.moving import move_to_device
from drivetrain.context.state import State
from drivetrain.core.containers import leaves, map_items, with_attributes
from drivetrain.core.engine import Engine
from drivetrain.core.errors import BatchOutputError, ConfigError, warn
from drivetrain.core.event import Event
from drivetrain.core.time import Clock, TimeUnit
from drivetrain.module.accumulation import Count
from drivetrain.module.compilation import copied, replays_graphs
from drivetrain.module.loss_items import without_empty
from drivetrain.module.probing import attributes_set
from drivetrain.runtime.ranks import is_distributed
from drivetrain.runtime.seeds import preserve_rng_state
from drivetrain.train import loaders
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.arguments import check_batch_output
from drivetrain.train.batches import BatchOutput, RaggedRows, find_inputs, join_outputs, join_parts, map_tensors
from drivetrain.train.hooks import TrainerHooks
from drivetrain.train.items import LossCounting
from drivetrain.train.logbook import Logbook
from drivetrain.train.run import LossStep, Run
from drivetrain.train.tracking import InMemoryRunHistory, LossTracker, of_data_ranks, reduce_means

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


@contextmanager
def evaluation_mode(run: Run, state: State, is_intermediate: bool, loader: object) -> Iterator[None]:
    """Give an evaluation its own loss tracker and events. Restore modes, batch and random states, also after an error."""
    training_data = (state.dataloader, state.dataloader_label, state.dataloader_len)
    with (
        preserve_rng_state(),
        with_attributes(run, is_evaluating=True),
        with_attributes(run.measures, tracker=LossTracker(), logged={}),
        with_attributes(state, "batch", "batch_output", "outputs", "loss", is_intermediate=is_intermediate),
        own_events(run.loss, Event.EVAL_AFTER_FORWARD),
        restored_modes(state.model),
        evaluating_optimizer(next(iter(state.optimizers), None)),
    ):
        run.measures.eval_metrics.reset()
        state.set_dataloader(loader, run.evaluation.set_name or "eval")
        try:
            yield
        finally:
            state.set_dataloader(*training_data)


def own_events(step: LossStep, after_forward: Event) -> AbstractContextManager[None]:
    """Make `forward` fire the event of this phase, and the loss fire none."""
    return with_attributes(step, after_forward=after_forward.value, before_loss=False)


@contextmanager
def outside_run(trainer: "Trainer") -> Iterator[None]:
    """Evaluate separately, also from a callback of a training run, whose data, configuration and wrapped model are kept."""
    run = trainer.run
    if not run.is_running:
        yield
        return
    with (
        with_attributes(trainer, "eval_dataset", "collate_fn", "model"),
        with_attributes(run, "config", is_running=False),
        with_attributes(run.data, "evaluation", "eval_kwargs"),
        with_attributes(run.measures, "eval_items"),
    ):
        yield


def restored_modes(model: object) -> AbstractContextManager[None]:
    """Restore every module's training flag."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    return attributes_set((module, "training", module.training) for module in modules)


@contextmanager
def evaluating_optimizer(optimizer: Any) -> Iterator[None]:
    """Switch an optimizer with modes (schedule-free) to evaluation, so that the evaluation weights are used."""
    has_modes = callable(getattr(type(optimizer), "eval", None)) and callable(getattr(type(optimizer), "train", None))
    was_training = getattr(optimizer, "training", True)
    if has_modes:
        optimizer.eval()
    try:
        yield
    finally:
        if has_modes and was_training:
            optimizer.train()


def discarded_history(logbook: Logbook) -> AbstractContextManager[None]:
    """Record into a temporary history that is discarded afterwards, and nothing with the loggers."""
    return with_attributes(logbook, history=InMemoryRunHistory(), loggers=[])


class EvaluationLoop(TrainerHooks):
    """Evaluates, and records the results."""

    engine: Engine
    _handle_requests: Callable[[], None]  # a method of `TrainerLoop`

    @property
    def evaluates_inside_epochs(self) -> bool:
        """Whether `eval_interval` requests evaluations inside epochs, which then count like those after an epoch."""
        return self.run.evaluation.is_due is not None

    def _run_evaluation(self) -> None:
        """Evaluate outside a training run."""
        self.evaluation_run_start()
        self.run.fire.eval_standalone_start()
        self._run_eval_epoch(self._eval_dataloader, is_training=False)
        self.evaluation_run_end()
        self.run.fire.eval_standalone_end()

    def evaluate_during_training(self, loader: Iterable[object], is_intermediate: bool = False) -> None:
        """Evaluate once over a loader as a part of the run, from a callback. A signal waits until it is done."""
        self._run_eval_epoch(loader, is_intermediate=is_intermediate)

    def _run_eval_epoch(self, dl: Iterable[object], is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once over the data, every sample counted once; what training needs is restored afterwards.

        Of several evaluation sets each is evaluated on its own, with its name in those of the metrics: `eval_<set>_loss_epoch`.
        """
        run, plan = self.run, self.run.evaluation
        may_be_cut = plan.may_be_cut and not run.is_evaluating  # not one that a plugin makes inside it
        if isinstance(dl, loaders.EvaluationLoaders):
            finished = plan.state.finished if may_be_cut else []
            with with_attributes(plan, "set_name"):
                for name, loader in dl.items():
                    if name not in finished:
                        plan.set_name = name
                        self._run_eval_epoch(loader, is_training, is_intermediate)
                        if may_be_cut and plan.was_cut:
                            return
                        finished.append(name)
            finished.clear()
        elif is_training and run.is_running:
            with plan.state.counting(plan.set_name or "", dl) as was_cut:
                self._evaluate_set(dl, "eval", is_intermediate, may_be_cut)
                if may_be_cut and plan.was_cut:
                    was_cut.append(True)
                    plan.after_epoch = not is_intermediate  # a resumed run makes it again
        else:
            self._evaluate_set(dl, "eval" if is_training else "evaluation", is_intermediate)

    def _evaluate_set(self, dl: Iterable[object], prefix: str, is_intermediate: bool, may_be_cut: bool = False) -> None:
        """Evaluate once over one evaluation set."""
        run, state, fire = self.run, self.state, self.run.fire
        plan, call = run.evaluation, run.agreement.call
        counting = run.measures.eval_items.setdefault(plan.set_name, LossCounting(run.shared.options.count_items))
        with evaluation_mode(run, state, is_intermediate, dl):
            tracker = run.measures.tracker
            fire.eval_before_all()
            call(self.eval_epoch_start)
            fire.eval_start()
            move = loaders.mover(self.device, dl)
            with torch.no_grad():
                for batch in self._until_signal(dl) if may_be_cut else dl:
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
                    size: int = 0 if is_padding else output["batch_size"]
                    self._update_loss_tracker(output["loss"].detach(), output.get("num_items", size) if size else 0)
                    if run.measures.eval_metrics and size:
                        run.measures.eval_metrics.update(*self.get_metric_inputs(state.batch, output), size)
                    fire.eval_batch_end()
            if may_be_cut and plan.was_cut:
                for event in (Event.EVAL_END, Event.EVAL_AFTER_ALL):  # the training weights are what is saved
                    for plugin in reversed(state.algorithms):
                        if plugin.match(event, state):
                            plugin.apply(event, state, self.logbook)
                return
            self._add_epoch_loss_to_run_history(self._metric_name(prefix, "loss", is_intermediate))
            self._record_epoch_metrics(prefix, is_intermediate)
            call(self.eval_epoch_end)
            fire.eval_end()
            fire.eval_after_all()
            self._record_means(prefix, is_intermediate)

    def _until_signal(self, batches: Iterable[object]) -> Generator[object, None, None]:
        self.run.evaluation.was_cut = yield from self.run.agreement.until_signal(batches)

    def _evaluate_if_due(self, is_due: Callable[[Clock], bool]) -> None:
        """Evaluate inside an epoch; where the epoch's last batch is done, its own evaluation comes next."""
        plan, clock = self.run.evaluation, self.state.clock
        if not is_due(clock):
            return
        if clock.batch_in_epoch == self.run.data.batches_per_epoch:
            plan.after_epoch = True
            return
        plan.unfinished = "evaluation"
        self._evaluate_until_signal(is_intermediate=True)
        self._act_on_evaluation()
        plan.unfinished = ""
        self._handle_requests()

    def _evaluate_until_signal(self, is_intermediate: bool = False) -> None:
        """Make an evaluation of the run itself. A signal cuts it short, and ends the run here."""
        plan = self.run.evaluation
        plan.was_cut = False
        with with_attributes(plan, may_be_cut=True):
            self._run_eval_epoch(self._eval_dataloader, is_intermediate=is_intermediate)
        if plan.was_cut:
            self._handle_requests()

    def evaluate_between_steps(self) -> None:
        """Evaluate between two steps, from a callback; a plateau schedule and the callbacks that watch a metric act on it."""
        self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
        self._act_on_evaluation()

    def _act_on_evaluation(self) -> None:
        if self.evaluates_inside_epochs and isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._step_plateau(inside_epoch=True)
        self.run.agreement.call(partial(self.engine.call, "on_intermediate_evaluation_end"))

    def _evaluation_is_due(self, at_end: bool) -> bool:
        """Return whether to evaluate after this epoch: when its interval is due, and at the end of the run."""
        settings, plan = self.run.require_settings(), self.run.evaluation
        every, due = settings.eval_time, plan.after_epoch
        plan.after_epoch = False
        if due:
            return True
        if callable(decide := settings.eval_interval):
            return self.run.agreement.any_rank_votes_yes(bool(decide(self.state, Event.EPOCH_END)))
        if every is None or every.value <= 0:
            return False
        return at_end or (every.unit is TimeUnit.EPOCH and self.state.clock.epoch % int(every.value) == 0)

    # ------------------------------------------------------------------ recording

    def _counted(self, counting: LossCounting, output: BatchOutput, is_padding: bool, is_part: bool) -> BatchOutput:
        """Return the output of a loss hook with the number of items that its loss is a mean over, unless it has that itself."""
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
        measures = self.run.measures
        metrics = measures.train_metrics if prefix == "train" else measures.eval_metrics
        self._record_means(prefix, is_intermediate, metrics.compute() if metrics else None)
        if self.run.units is not None and prefix == "train":
            for name, value in self.run.units.metrics().items():
                self.logbook.record(name, float(value))

    def _record_means(
        self, prefix: str, is_intermediate: bool = False, metrics: Mapping[str, object] | None = None
    ) -> None:
        """Record metrics and what `log()` has collected since the last time; plugins may call it when the epoch has ended."""
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

    def _step_plateau(self, inside_epoch: bool = False) -> None:
        """Step a scheduler that watches a metric, if there is a new value of it."""
        value = self.run.evaluation.plateau.agreed_value(self, inside_epoch)
        if value is not None:
            self.scheduler.step(value)


# ---------------------------------------------------------------------- prediction


def run_prediction(
    trainer: "Trainer",
    loader: Iterable[object],
    to_cpu: bool,
    padding_value: float | None = None,
    generates: bool = False,
) -> Any:
    """Run the prediction loop and concatenate its outputs or generated sequences."""
    state, fire, parts = trainer.state, trainer.run.fire, []
    move, is_overwritten = loaders.mover(trainer.device, loader), replays_graphs(trainer.model)
    with (
        preserve_rng_state() if trainer.run.is_running else nullcontext(),  # a callback predicts without a trace
        with_attributes(state, "batch", "batch_output", "outputs"),
        own_events(trainer.run.loss, Event.PREDICT_AFTER_FORWARD),
        # Inputs without targets.
        with_attributes(trainer.run.loss, find_form=find_inputs, form=None, form_type=None, own_loss=None),
        restored_modes(trainer.model),
        evaluating_optimizer(trainer.optimizer),
    ):
        if isinstance(trainer.model, nn.Module):
            trainer.model.eval()
        fire.predict_start()
        with torch.no_grad():
            for batch in loader:
                state.batch = batch if move is None else move(batch)
                fire.predict_batch_start()
                fire.predict_before_forward()
                if generates:
                    output: BatchOutput = {"model_outputs": trainer.calculate_generation_batch(state.batch)}
                else:
                    output = trainer.calculate_predict_batch(state.batch)
                if not isinstance(output, dict) or "model_outputs" not in output:
                    raise BatchOutputError("calculate_predict_batch must return a dict with 'model_outputs'.")
                state.batch_output = output
                rows = join_outputs([_with_rows(output["model_outputs"], trainer.device)])
                rows = _in_dataset_order(trainer.runtime, loader, rows)
                parts.append(move_to_device("cpu", rows) if to_cpu else copied(rows) if is_overwritten else rows)
                fire.predict_batch_end()
        fire.predict_end()
    if not parts:
        raise ConfigError("predict() has no samples: the dataset is empty, or limit_batches is too small.")
    return join_parts(parts, partial(_joined, padding_value=padding_value))


def _in_dataset_order(runtime: TrainerRuntime, loader: object, rows: object) -> object:
    """Join this batch's outputs of all data ranks: a global batch is contiguous, rank after rank, so joining keeps the order."""
    if not is_distributed():
        return rows
    own = map_tensors(lambda leaf: leaf[:0], rows) if loaders.is_padding(loader) else rows
    shapes = of_data_ranks([tuple(leaf.shape) for leaf in leaves(own, Tensor)])
    if all(shape[1:] == first[1:] for of_rank in shapes for shape, first in zip(of_rank, shapes[0])):
        return runtime.gather(own)
    # Rows of different shapes travel padded to the largest, and are cut to their own shapes afterwards.
    largest = [tuple(map(max, zip(*(shape[1:] for shape in of_leaf)))) for of_leaf in zip(*shapes)]
    sizes = iter(largest)
    gathered = runtime.gather(map_tensors(lambda leaf: _padded(leaf, next(sizes), 0), own))
    of_leaves = iter(list(zip(*shapes)))
    return map_tensors(lambda leaf: _cut(leaf, next(of_leaves)), gathered)


def _padded(rows: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """Return rows of a larger shape, filled with a value."""
    if tuple(rows.shape[1:]) == shape:
        return rows
    filled = rows.new_full((len(rows), *shape), value)
    filled[(slice(None), *(slice(size) for size in rows.shape[1:]))] = rows
    return filled


def _cut(rows: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor | RaggedRows:
    """Give the rows of each rank their own shape back."""
    if all(shape[1:] == shapes[0][1:] for shape in shapes):
        return rows
    parts = rows.split([shape[0] for shape in shapes])
    return RaggedRows(
        row[tuple(slice(size) for size in shape[1:])] for part, shape in zip(parts, shapes) for row in part
    )


def _with_rows(value: object, device: torch.device) -> object:
    """Give numbers and tensors without dimensions one row, so that a value per batch, such as a loss, is kept for every batch."""
    if isinstance(value, Tensor):
        return value if value.dim() else value.reshape(1)
    if isinstance(value, bool | int | float):
        return torch.tensor([value], device=device)
    return map_items(value, partial(_with_rows, device=device))


def _joined(parts: list[Any], place: str, padding_value: float | None) -> object:
    """Join one entry of the outputs of all batches along its first dimension. Rows of different shapes become a list, or are padded."""
    first = parts[0]
    if isinstance(first, Tensor | RaggedRows):
        if all(isinstance(part, Tensor) and part.shape[1:] == parts[0].shape[1:] for part in parts):
            return torch.cat(parts)
        rows = [row for part in parts for row in part]
        if padding_value is None or len({row.ndim for row in rows}) != 1:
            return rows
        largest = tuple(map(max, zip(*(row.shape for row in rows))))
        return torch.cat([_padded(row.unsqueeze(0), largest, padding_value) for row in rows])
    try:
        if all(part is first or part == first for part in parts[1:]):
            return first
    except (RuntimeError, ValueError):  # arrays, whose comparison is an array
        pass
    warn(
        f"predict(): {place} (a value of type {type(first).__name__}) differs from batch to batch and cannot be joined, so it is None "
        "in the result. Override calculate_predict_batch to return what you need as tensors."
    )
    return None
