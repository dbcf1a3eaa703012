"""The loop: epochs of steps, evaluations between them, and how all of it comes to an end.

What can be decided once is decided before the first step (`setup.py`), so these methods say what happens, in order, and nothing else.
`drivetrain.core.event.Event` draws the same loop with its events.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor

from drivetrain.core.engine import Engine, Fire
from drivetrain.core.errors import DistributedError, StopTrainingError, TrainingStopped
from drivetrain.core.event import Event
from drivetrain.core.time import TimeUnit
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.signals import StopSignals
from drivetrain.train import loaders, resuming, setup
from drivetrain.train.batches import batch_size_of, join_outputs, split_batch
from drivetrain.train.callbacks.watching import MetricWatch
from drivetrain.train.checks import check_batch_output, check_loss, warn_of_sample_weights
from drivetrain.train.evaluation import evaluation_mode, kept_history
from drivetrain.train.hooks import TrainerHooks
from drivetrain.train.logbook import Logbook
from drivetrain.train.metrics import MetricSet
from drivetrain.train.plain_hooks import PlainHooks
from drivetrain.train.settings import RunLimits
from drivetrain.train.stopping import STOP, StopVote
from drivetrain.train.tracking import LossTracker, reduce_means


class TrainerLoop(TrainerHooks):
    """Turns the loop of a Trainer."""

    engine: Engine
    logbook: Logbook
    last_grad_norm: Tensor | None
    _train_dataloader: Any
    _eval_dataloader: Any
    _loss_tracker: LossTracker
    _train_metrics: MetricSet
    _eval_metrics: MetricSet
    _has_train_metrics: bool
    _keeper: Any
    _vote: StopVote | None
    _first_batch = False
    _inside_step = False
    _resume_next: Any = None  # a training state loaded by hand, from which the next train() goes on
    _restored_rng: Any = None
    _ddp = False
    _microbatch_size: int | None = None
    _batches_per_epoch: int | None = None
    _schedules_each_step = True
    _signals: StopSignals
    _limits: RunLimits
    _eval_every: Callable[[Any], bool] | None = None
    _eval_after_epoch = False
    # Whether these seams do anything; a subclass that overrides one is always called.
    _clips = _tracks_its_own_way = True
    _boundary_work = True  # whether anything but a signal or a stop can need the host between two batches
    _plain = PlainHooks()  # none, until a run has been looked at

    # ------------------------------------------------------------------ the training run

    def _run_training(self) -> None:
        """Turn epochs until a limit, a stop or an error; always end in good order."""
        state, fire = self.state, self._fire
        try:
            self._is_running = True
            try:
                self.training_run_start()
                fire.fit_start()
                setup.prepare_loop(self)
                if self.settings and self.settings.sanity_eval_batches and self._eval_dataloader is not None:
                    self._run_sanity_evaluation()
                self._agree_to_stop()
                while not self._limits.reached(state.clock):
                    if self._run_epoch():
                        break
            except (StopTrainingError, TrainingStopped) as stop:
                self._refuse_to_leave_alone(stop)
                self._stop = stop
            self._inside_step = False
            if self._stop is not None:
                self.print(f"Training stopped: {self._stop}")
                fire.stop()
            self.training_run_end()
            fire.fit_end()
            resuming.finish(self)
        except BaseException as error:
            self._inside_step = False
            self._close_after(error)
            raise
        finally:
            self._is_running = False
        if isinstance(self._stop, TrainingStopped):
            raise self._stop

    def _run_epoch(self) -> bool:
        """Train over the data once, evaluate when due; True means that the run has reached an end inside the epoch."""
        clock, fire = self.state.clock, self._fire
        if clock.batch_in_epoch == 0:
            self._loss_tracker.reset()
            self._train_metrics.reset()
            loaders.set_epoch(self._train_dataloader, clock.epoch)
        self._between_steps(self.train_epoch_start)
        fire.epoch_start()
        resuming.apply_restored_rng(self)
        ended = self._run_train_epoch(self._train_dataloader)
        if not ended or clock.batch_in_epoch == self._batches_per_epoch:
            clock.next_epoch()
        self._between_steps(self.train_epoch_end)
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        self._record_epoch_metrics("train")
        fire.epoch_end()
        self._record_means("train")
        ended = ended or self._agree_to_stop()
        if self._eval_dataloader is not None and self._evaluation_is_due(at_end=ended or self._limits.reached(clock)):
            self._run_eval_epoch(self._eval_dataloader)
        if self.settings and self.settings.scheduler_interval == "epoch":
            self._step_epoch_scheduler()
        self._between_steps(self.training_run_epoch_end)
        fire.epoch_checkpoint()
        self.run_history._increment_epoch()
        if self._keeper is not None:
            self._keeper.at_epoch_end(ended or self._limits.reached(clock))
        return self._agree_to_stop() or ended

    def _run_train_epoch(self, train_dl: Any) -> bool:
        """Turn the loop once over the data; True means that a limit or a stop ended the run."""
        state, clock, gradients, fire = self.state, self.state.clock, self._gradients, self._fire
        source, signals, limits, world = self._sample_source, self._signals, self._limits, gradients.window.world
        for state.batch, last in self._batches(train_dl):  # on the device already, one batch ahead
            self._inside_step = True
            fire.after_dataloader()
            fire.batch_start()
            if not gradients.is_simple:
                gradients.open(last)
            if gradients.window.opens:
                fire.before_train_batch()
            if self._plain.passes:
                self._backward(self._forward_and_loss())
            else:
                self._perform_forward_and_backward_passes(state.batch, state.step)
            closes = gradients.window.closes
            if closes:
                self._update()
            info = None if source is None else source.batch_info
            samples = state.batch_output["batch_size"] * world if info is None else info.global_size
            clock.next_batch(samples, 0 if self._count_tokens is None else self._tokens(state.batch), closes)
            fire.batch_end()
            self._inside_step = False
            fire.batch_checkpoint()
            # A guest may have shortened the run, or asked to stop.
            is_asked = signals.requested or self._stop is not None or state._max_duration is not limits.planned
            if (is_asked or self._boundary_work) and self._at_boundary():
                return True
        return False

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Compute the loss of a batch and its gradients; gradients synchronise only where the window closes."""
        if self._repeat.is_wanted:
            self._repeat.remember(batch)
        if self._microbatch_size is not None:
            self._perform_micro_batches(batch)
        elif self._ddp and not self._gradients.synchronises:
            with self.model.no_sync():  # around the forward too: DDP decides there
                self._backward(self._forward_and_loss())
        else:
            self._backward(self._forward_and_loss())

    def _forward_and_loss(self, announce: bool = True) -> dict[str, Any]:
        """Run the loss hook on `state.batch` with the events around it, and track the loss."""
        state, fire = self.state, self._fire
        state.losses = state.batch_output = None
        fire.before_forward()
        output = self.calculate_train_batch_loss(state.batch)
        if self._first_batch:
            check_batch_output(output, self)
            self._count_tokens = loaders.token_counter(state.batch)
        state.batch_output, state.loss = output, output["loss"]
        fire.after_loss()
        if state.loss is not output["loss"]:
            state.batch_output = output = {**output, "loss": state.loss}
        size = 0 if self._may_pad and self._is_padding() else output["batch_size"]
        track = self._update_loss_tracker if self._tracks_its_own_way else self._loss_tracker.update
        track(state.loss, size)
        if self._has_train_metrics and size:
            self._train_metrics.update(*self.get_metric_inputs(state.batch, output), size)
        if announce:
            fire.step_output()
        return output

    def _backward(self, output: Mapping[str, Any]) -> None:
        self._fire.before_backward()
        loss = self.state.loss
        if self._first_batch:
            check_loss(loss, self)
            warn_of_sample_weights(self, output)
        gradients = self._gradients
        if self._plain.backward:
            loss.backward()
        else:
            self.backward_step(loss if gradients.is_simple else gradients.weigh(loss, output))
        self._fire.after_backward()
        self._first_batch = False

    def _update(self) -> None:
        """Gradients are complete: correct, clip, step, schedule, clear."""
        fire, state, plain = self._fire, self.state, self._plain
        if not self._gradients.is_simple:
            self._gradients.finish()
        if self._clips:
            self._clip_gradients()
        fire.after_train_batch()
        fire.before_step()
        if plain.step:
            state.optimizers[0].step()
        else:
            self.optimizer_step()
        fire.after_step()
        if self._schedules_each_step and (state.schedulers or not plain.schedule):
            self.scheduler_step()
        if plain.clear:
            for group in state.optimizers[0].param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.optimizer_zero_grad()
        if not self._gradients.is_simple:
            self._gradients.close()

    def _batches(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Yield each batch with whether it is the epoch's last; loaders without a length are read one batch ahead."""
        state, clock, fire, limit = self.state, self.state.clock, self._fire, self._batches_per_epoch
        move = loaders.mover(self, loader)
        fire.before_dataloader()
        if limit is None:
            for batch, last in loaders.look_ahead(loader):
                state.step = clock.batch_in_epoch
                yield (batch if move is None else move(batch)), last
                fire.before_dataloader()
            return
        if clock.batch_in_epoch >= limit:
            return
        for batch in loader:
            state.step = step = clock.batch_in_epoch
            if self._wants_index:
                state.sample_index = self._sample_source.sample_index
            last = step + 1 >= limit
            yield (batch if move is None else move(batch)), last
            if last:
                return
            fire.before_dataloader()

    def _at_boundary(self) -> bool:
        """Between two steps: save, evaluate, obey signals and limits; True ends the run."""
        clock = self.state.clock
        wish = self._signals.requested or (STOP if self._stop is not None else 0)
        if self._vote is not None:
            earlier = self._vote.close()  # what anyone wished at the start of this step
            self._vote.open(wish)
            wish = earlier
        ended = self._limits.reached_inside_epoch(clock, self.state.max_duration)
        if self._keeper is not None:
            self._keeper.at_batch_end(ended)
        if wish:
            self._obey(wish)
        if self._eval_every is not None and not ended and self._eval_every(clock):
            if clock.batch_in_epoch == self._batches_per_epoch:
                self._eval_after_epoch = True  # the epoch is done: its own evaluation comes next
            else:
                self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
        return ended

    # ------------------------------------------------------------------ accumulation

    def _clip_gradients(self) -> None:
        """Clip once per update, by norm or by value."""
        settings = self.settings
        if settings is None:
            return
        if settings.gradient_clip_norm is not None and self._units is None:  # units clip by norm themselves
            self.last_grad_norm = self._accelerator.clip_grad_norm_(self._parameters(), settings.gradient_clip_norm)
        elif settings.gradient_clip_value is not None:
            self._accelerator.clip_grad_value_(self._parameters(), settings.gradient_clip_value)

    def _parameters(self) -> list[Tensor]:
        if self._units is not None:
            return self._units.due_parameters()
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _perform_micro_batches(self, batch: Any) -> None:
        """Split one batch, accumulate its gradients, and show guests the whole batch once, before the last backward."""
        state, synchronises = self.state, self._gradients.synchronises
        parts, outputs, whole = split_batch(batch, self._microbatch_size or 1), [], None
        self._gradients.refer_to(batch_size_of(None, batch))
        for index, part in enumerate(parts):
            state.batch, is_last = part, index == len(parts) - 1
            with ExitStack() as stack:
                if self._ddp and not (synchronises and is_last):
                    stack.enter_context(self.model.no_sync())
                output = self._forward_and_loss(announce=False)
                outputs.append(output)
                if is_last:
                    state.batch, state.batch_output = batch, (whole := self._join(outputs))
                    self._fire.step_output()
                    state.batch, state.batch_output = part, output  # its weight is that of its own items
                self._backward(output)
        state.batch, state.batch_output = batch, whole

    def _join(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the outputs of the micro-batches as those of the whole batch; joined only if somebody listens."""
        sizes = [output["batch_size"] for output in outputs]
        loss = sum(output["loss"].detach() * size for output, size in zip(outputs, sizes)) / max(1, sum(sizes))
        whole = {"loss": loss, "model_outputs": None, "batch_size": sum(sizes)}
        if self.engine.listens(Event.STEP_OUTPUT):
            names = [name for name in outputs[0] if name not in ("loss", "batch_size")]
            whole.update((name, join_outputs([output[name] for output in outputs])) for name in names)
        return whole

    # ------------------------------------------------------------------ evaluation

    def _run_evaluation(self) -> None:
        """Evaluate outside a training run."""
        self.evaluation_run_start()
        self._fire.eval_standalone_start()
        self._run_eval_epoch(self._eval_dataloader, is_training=False)
        self.evaluation_run_end()
        self._fire.eval_standalone_end()

    def _run_eval_epoch(self, dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate once over the data, every sample counted once; what training needs is put back afterwards."""
        state, fire = self.state, self._fire
        name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch" if is_training else "evaluation_loss"
        prefix = "eval" if is_training else "evaluation"
        with evaluation_mode(self, is_intermediate):
            fire.eval_before_all()
            self._between_steps(self.eval_epoch_start)
            fire.eval_start()
            move = loaders.mover(self, dl)
            with torch.no_grad():
                for batch in dl:
                    state.batch, state.batch_output = batch if move is None else move(batch), None
                    fire.eval_batch_start()
                    fire.eval_before_forward()
                    output = self.calculate_eval_batch_loss(state.batch)
                    check_batch_output(output, self)
                    state.batch_output = output
                    size = 0 if loaders.is_padding(dl) else output["batch_size"]
                    self._update_loss_tracker(output["loss"].detach(), size)
                    if self._eval_metrics and size:
                        self._eval_metrics.update(*self.get_metric_inputs(state.batch, output), size)
                    fire.eval_batch_end()
            self._add_epoch_loss_to_run_history(name)
            recorded = self._record_epoch_metrics(prefix, is_intermediate)
            self._between_steps(self.eval_epoch_end)
            fire.eval_end()
            fire.eval_after_all()
            recorded += self._record_means(prefix, is_intermediate)
            if is_intermediate:  # shown and sent to the loggers, but an epoch's history has one entry per epoch
                for metric in (name, *recorded):
                    self.run_history.delete_metric(f"{self.run_history.metric_name_prefix}{metric}")

    def _run_sanity_evaluation(self) -> None:
        """Evaluate a few batches before training, so that a mistake there shows in seconds; nothing is kept."""
        assert self.settings is not None
        with kept_history(self):
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
            return bool(self.settings.eval_interval(self.state, Event.EPOCH_END))  # type: ignore[operator]
        if every.value <= 0:
            return False
        return at_end or (every.unit is TimeUnit.EPOCH and self.state.clock.epoch % int(every.value) == 0)

    # ------------------------------------------------------------------ keeping account

    def _update_loss_tracker(self, loss: Tensor, batch_size: int) -> None:
        self._loss_tracker.update(loss, batch_size)

    def _add_epoch_loss_to_run_history(self, name: str) -> None:
        """Record the mean loss over all samples of all processes; reading it is where the host waits."""
        self.logbook.record(name, self._loss_tracker.average_over_ranks())

    def _record_epoch_metrics(self, prefix: str, is_intermediate: bool = False) -> list[str]:
        """Record the epoch's metrics and what `log()` collected; return their names."""
        metrics = self._train_metrics if prefix == "train" else self._eval_metrics
        recorded = self._record_means(prefix, is_intermediate, metrics.compute() if metrics else None)
        if self._units is not None and prefix == "train":
            for name, value in self._units.metrics().items():
                self.logbook.record(name, float(value))
        return recorded

    def _record_means(
        self, prefix: str, is_intermediate: bool = False, metrics: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Record metrics and what `log()` has collected since the last time; return their names.

        Guests may call `log()` when an epoch ends, after its means were recorded: that belongs to the same epoch.
        """
        ending = "" if prefix == "evaluation" else "_epoch"
        stem = "intermediate_eval" if is_intermediate else prefix
        values = {**(metrics or {}), **reduce_means(self._logged)}
        self._logged.clear()
        names = {f"{stem}_{name}{'' if is_intermediate else ending}": value for name, value in values.items()}
        for name, value in names.items():
            self.logbook.record(name, value)
        return list(names)

    def _is_padding(self) -> bool:
        """Whether the batch in hand only keeps this rank in step with others that still have samples."""
        return self._sample_source.batch_info.size == 0

    def _tokens(self, batch: Any) -> int:
        """Return how many tokens of all processes the batch holds."""
        assert self._count_tokens is not None
        return self._count_tokens(batch) * self._gradients.window.world

    _plateau_watch: MetricWatch
    _count_tokens: Callable[[Any], int] | None = None
    _sample_source: Any = None
    _wants_index = _may_pad = False

    def _step_epoch_scheduler(self) -> None:
        """Step a scheduler that counts epochs; one that watches a metric gets it."""
        assert self.settings is not None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            value = self._plateau_watch.new_value(self)
            if value is not None:  # an epoch without an evaluation tells it nothing
                self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler_step()

    # ------------------------------------------------------------------ stopping

    def _obey(self, wish: int) -> None:
        """Stop because a rank asked for it, or act on a signal any rank received."""
        if wish == STOP:
            self._stop_together()
        resuming.obey_signal(self, wish)

    def _stop_together(self) -> NoReturn:
        """Raise what ends the run, on all ranks at the same place."""
        self._has_agreed = True
        raise self._stop or StopTrainingError("another process asked to stop")

    _has_agreed = False

    def _refuse_to_leave_alone(self, stop: Exception) -> None:
        """Turn a stop that not all ranks raise into an error, which ends the others too instead of leaving them to wait."""
        if self._vote is not None and not self._has_agreed and not self._vote.everyone_leaves():
            raise DistributedError(
                f"rank {get_rank()}: a hook of {type(self).__name__} raised {type(stop).__name__} ({stop}) inside a step or an evaluation "
                "of several processes, which the others cannot leave with it. Call trainer.request_stop(reason) there instead: all "
                "ranks then stop after the step. A callback may raise it."
            ) from stop

    def _between_steps(self, hook: Callable[[], Any]) -> None:
        """Call a hook outside the steps; on several processes a stop that it raises waits until all ranks meet."""
        if self._vote is None:
            hook()
        else:
            self._together(hook)

    def _agree_to_stop(self) -> bool:
        """Outside a step: raise on all ranks if any of them wants to stop."""
        wants = self._stop is not None
        if self._vote is not None:
            wants = self._vote.now(STOP if wants else 0) == STOP
        if wants:
            self._stop_together()
        return False

    def _fire_of_all_ranks(self) -> Fire:
        """Return the events for a run on several processes, where no rank may leave alone."""
        if self._guarded_fire is None:
            self._guarded_fire = self.engine.guarded(self._together)
        return self._guarded_fire

    _guarded_fire: Fire | None = None

    def _together(self, run: Callable[[], Any]) -> None:
        """Run the guests of an event on one of several processes: a stop is noted, and acted on where all ranks meet."""
        try:
            run()
        except (StopTrainingError, TrainingStopped) as stop:
            self._stop = self._stop or stop

    def _close_after(self, error: BaseException) -> None:
        """Tell every guest about an error and let it close what it holds; the error itself goes on unchanged."""
        self._vote, self._fire, self.model = None, self.engine.on, self.get_model()
        self.callback_handler.call_event("on_exception", self, exception=error)
        self.engine.close_plugins()
        if self._keeper is not None:
            self._keeper.wait()
