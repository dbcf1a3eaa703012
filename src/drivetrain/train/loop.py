"""The loop: epochs of steps, evaluations between them, and how a run ends.

What can be decided once is decided before the first step (`setup.py`), so these methods show what happens, in order, and nothing
else. `drivetrain.core.event.Event` draws the same loop with its events.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import StopTrainingError, TrainingStopped
from drivetrain.core.event import Event
from drivetrain.module.accumulation import Count
from drivetrain.module.ddp import averaging_missed, check_reduced
from drivetrain.runtime.signals import SAVE_SIGNAL
from drivetrain.runtime.workers import report_failure
from drivetrain.train import loaders, resuming, setup
from drivetrain.train.accelerator import overrides_runtime
from drivetrain.train.agreement import STOP
from drivetrain.train.arguments import check_batch_output, check_loss, warn_of_sample_weights
from drivetrain.train.batches import BatchOutput, batch_size_of, join_batch_outputs, split_batch
from drivetrain.train.evaluation import EvaluationLoop, discarded_history
from drivetrain.train.failures import explain_failure
from drivetrain.train.items import Part, items_of
from drivetrain.train.loaders import CountingLoader


class StepCalls(NamedTuple):
    """The functions that a step calls: the user's hook if there is one, else what the Trainer's hook would call."""

    backward: Callable[[Tensor], None]
    is_weighted: bool
    """Whether `backward` gets a loss that is weighted and marked where it is not finite; else `should_step` tests the loss itself."""
    clip: Callable[[], None] | None
    step: Callable[[], object]
    schedule: Callable[[], None] | None
    is_own_schedule: bool  # whether `schedule` is called without a scheduler, too
    clear: Callable[[], None]
    track: Callable[[Tensor, Count], None] | None  # the user's own way to track a loss


class TrainerLoop(EvaluationLoop):
    """Runs the loop of a Trainer."""

    last_grad_norm: Tensor | None
    update_plugins: Callable[[], None]  # a method of `Trainer`
    _calls: StepCalls  # of the current epoch; they refer to the trainer, so they are deleted at its end

    def _run_to_end(self) -> None:
        """Run the training, and always end in good order."""
        run, agreement = self.run, self.run.agreement
        own = setup.preparing_epochs(self) if self.overrides("_run_training") else nullcontext()
        with with_attributes(run, is_running=True), self._reporting_errors(), own:
            self._run_training()
            resuming.finish(run, self.state, self.logbook)
            run.fire = self.engine.on
        if isinstance(agreement.stop, TrainingStopped):
            raise agreement.stop
        if agreement.stop is not None:
            agreement.stop.__traceback__ = None  # its frames hold the Trainer

    def _run_training(self) -> None:
        """Run epochs until a limit or a stop."""
        run, state, agreement = self.run, self.state, self.run.agreement
        settings, limits, plan = run.require_settings(), agreement.limits, run.evaluation
        try:
            self.training_run_start()
            run.fire.fit_start()
            setup.prepare_loop(self)
            if settings.sanity_eval_batches and run.data.evaluation is not None:
                with discarded_history(self.logbook), plan.state.kept():
                    few = loaders.limit(run.data.evaluation, settings.sanity_eval_batches)
                    self._run_eval_epoch(few, is_intermediate=True)  # a mistake there shows in seconds
            self._handle_requests()
            if plan.unfinished == "epoch":  # the run was stopped during the evaluation at an epoch's end
                resuming.apply_restored_rng(run)
                self._finish_epoch(ended=limits.reached(state.clock))
            if settings.resume_from is not None and not self._has_work():
                self.print(
                    "Nothing is left to train: this run has reached its end. Set a later one, such as num_epochs."
                )
            while self._has_work():
                if self._finish_epoch(self._train_epoch(self._run_train_epoch, self._train_dataloader)):
                    break
            resuming.apply_restored_rng(run)  # of a run that had already ended
        except (StopTrainingError, TrainingStopped) as stop:
            agreement.check_all_ranks_stop(stop, type(self).__name__)
            agreement.stop = stop
        run.inside_step = False
        if agreement.stop is not None:
            self.print(f"Training stopped: {agreement.stop}")
            run.fire.stop()
        self.training_run_end()
        run.fire.fit_end()

    def _has_work(self) -> bool:
        """Return whether there are steps to run, or at least the end of an epoch that was interrupted."""
        run, clock = self.run, self.state.clock
        is_cut = bool(clock.batch_in_epoch) and run.evaluation.unfinished != "nothing"
        return is_cut or not run.agreement.limits.reached(clock)

    def _train_epoch(self, run_train_epoch: Callable[[Iterable[object]], object], loader: Iterable[object]) -> bool:
        """Prepare and run a training epoch, and record it; True means that the run has reached an end inside the epoch."""
        run, clock = self.run, self.state.clock
        run.evaluation.begin_epoch()
        if clock.batch_in_epoch == 0:
            run.measures.tracker.reset()
            run.measures.train_metrics.reset()
            loaders.set_epoch(loader, clock.epoch)
        own_loop = CountingLoader(self, loader)  # a subclass may write out the loop over the batches
        epoch, run.epoch_is_recorded = clock.epoch, False
        self._calls = self._choose_calls()
        try:
            ended = bool(run_train_epoch(own_loop)) or own_loop.ended
            own_loop.close()
        finally:
            del self._calls
        if clock.epoch == epoch and not ended:
            clock.next_epoch()
        if not run.epoch_is_recorded:
            self._record_epoch_metrics("train")
        self._record_means("train")
        return ended

    def _finish_epoch(self, ended: bool) -> bool:
        """Evaluate when due, and end the epoch; a run that is stopped here begins here when it is resumed."""
        run, clock = self.run, self.state.clock
        plan, limits = run.evaluation, run.agreement.limits
        plan.unfinished = "epoch"
        if not ended:
            self._handle_requests()
        if run.data.evaluation is not None and self._evaluation_is_due(at_end=ended or limits.reached(clock)):
            self._evaluate_until_signal()
        plan.end_epoch(ended)
        if run.require_settings().scheduler_interval == "epoch":
            run.stepper.was_skipped = False  # the epoch counts, whatever became of its last update
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self._step_plateau()
            else:
                self.scheduler_step()
        run.agreement.call(self.training_run_epoch_end)
        run.fire.epoch_checkpoint()
        self.run_history._increment_epoch()
        if run.checkpoints is not None:
            run.checkpoints.at_epoch_end(ended or limits.reached(clock))
        self._handle_requests()
        return ended

    def _choose_calls(self) -> StepCalls:
        """Decide once, before the first step of an epoch, what the loop calls."""
        run, runtime = self.run, self.runtime
        settings, stepper = run.require_settings(), run.stepper
        clips = settings.gradient_clip_norm is not None or settings.gradient_clip_value is not None
        is_single = run.units is None and not any(overrides_runtime(runtime, name) for name in ("backward", "step"))
        is_own_backward = not is_single or self.overrides("backward_step")
        is_own_step = not is_single or run.repeat.is_wanted or self.overrides("optimizer_step")
        is_weighted = is_own_backward or not stepper.is_simple or not stepper.guard.is_immediate
        return StepCalls(
            backward=self.backward_step if is_own_backward else stepper.backward if is_weighted else Tensor.backward,
            is_weighted=is_weighted,
            clip=self._clip_gradients if clips or self.overrides("_clip_gradients") else None,
            step=self.optimizer_step if is_own_step else stepper.step,
            schedule=self.scheduler_step if run.schedules_each_step else None,
            is_own_schedule=self.overrides("scheduler_step"),
            clear=self.optimizer_zero_grad if self.overrides("optimizer_zero_grad") else stepper.clear,
            track=self._update_loss_tracker if self.overrides("_update_loss_tracker") else None,
        )

    def _run_train_epoch(self, train_dl: Iterable[object]) -> bool:
        """Train once over the data, with the hooks and events around it; True means that a limit or a stop ended the run."""
        run, clock = self.run, self.state.clock
        run.agreement.call(self.train_epoch_start)
        run.fire.epoch_start()
        if clock.batch_in_epoch == 0:
            setup.read_epoch_length(run.data)
        ended = self._resume_inside_epoch()
        if run.good is not None:
            run.good.begin()
        ended = ended or self._run_steps(train_dl.loader if isinstance(train_dl, CountingLoader) else train_dl)
        if not ended or clock.batch_in_epoch == run.data.batches_per_epoch:
            clock.next_epoch()
        run.agreement.call(self.train_epoch_end)
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        self._record_epoch_metrics("train")
        run.epoch_is_recorded = True
        run.fire.epoch_end()
        return ended

    def _resume_inside_epoch(self) -> bool:
        """Set the generators of a resumed run as they were, and make the evaluation that was due when it was saved.

        True means that the run has no step left, only the end of its last epoch.
        """
        plan, clock = self.run.evaluation, self.state.clock
        resuming.apply_restored_rng(self.run)
        if self.run.agreement.limits.reached(clock):
            return True
        if plan.unfinished == "evaluation":
            self._evaluate_if_due(lambda clock: True)
        elif plan.interval is not None and clock.batch_in_epoch:
            self._evaluate_if_due(plan.interval.due)
        return False

    def _run_steps(self, train_dl: Iterable[object]) -> bool:
        """Run the loop over the batches; True means that a limit or a stop ended the run."""
        run, state = self.run, self.state
        fire, stepper = run.fire, run.stepper
        guard, window = stepper.guard, stepper.window
        for state.batch, last in self._batches(train_dl):  # on the device already, one batch ahead
            if guard.batches_to_skip:  # after a rollback: the batch is counted only
                guard.batches_to_skip -= 1
                state.clock.next_batch(*run.data.count(state.batch, None, window.world), False)
                if self._at_boundary():
                    return True
                continue
            run.inside_step = True
            fire.after_dataloader()
            fire.batch_start()
            if not stepper.is_simple:
                stepper.begin(last)
            if window.opens:
                fire.before_train_batch()
                if guard.has_statistics:
                    guard.open()
            self._perform_forward_and_backward_passes(state.batch, state.step)
            closes = window.closes
            if closes:
                self._update()
            if self._finish_batch(closes):
                return True
        return False

    def _finish_batch(self, closes: bool) -> bool:
        """Count a batch and do what is due between two batches; True ends the run."""
        run, state = self.run, self.state
        data, fire = run.data, run.fire
        # A subclass that makes the passes itself may keep its output to itself.
        samples, tokens = data.count(state.batch, state.batch_output, run.stepper.window.world)
        state.clock.next_batch(samples, tokens, closes)
        fire.batch_end()
        run.inside_step = False
        fire.batch_checkpoint()
        # A plugin may have shortened the run, or requested a stop.
        agreement = run.agreement
        is_asked = agreement.signals.requested or agreement.stop is not None
        if is_asked or run.has_boundary_work or state._max_duration is not agreement.limits.planned:
            return self._at_boundary()
        return False

    def _perform_forward_and_backward_passes(self, batch: object, step: int) -> None:
        """Compute the loss of a batch and its gradients; gradients synchronise only where the window closes."""
        run = self.run
        if run.repeat.is_wanted:
            run.repeat.remember(run, self.state, batch)
        if run.microbatch_size is not None:
            self._perform_micro_batches(batch)
        elif run.is_ddp:
            with self._in_ddp(run.stepper.synchronises):  # around the forward too: DDP decides there
                self._backward(self._forward_and_loss())
        else:
            self._backward(self._forward_and_loss())
        stepper = run.stepper
        if not stepper.is_simple and stepper.synchronises and stepper.window.closes:
            stepper.finish()  # here too, because a subclass may write out what comes next

    def _in_ddp(self, synchronises: bool) -> AbstractContextManager[None]:
        """Return the context of a forward and backward pass of a DDP model."""
        if not synchronises:
            return self.model.no_sync()
        if self.run.units is not None:
            return nullcontext()
        return averaging_missed(self.model, watches_backward=self.overrides("backward_step"))

    def _forward_and_loss(self, announce: bool = True) -> BatchOutput:
        """Run the loss hook on `state.batch` with the events around it, and track the loss."""
        run, state = self.run, self.state
        fire, counting = run.fire, run.measures.train_items
        state.losses = state.batch_output = None
        fire.before_forward()
        if counting.is_decided:
            output = self.calculate_train_batch_loss(state.batch)
        else:
            output = self._watch_first_loss()
        if run.loss.is_first:
            check_batch_output(output, self)
            run.data.count_tokens = loaders.token_counter(state.batch)
        is_padding = run.data.may_pad and run.data.is_padding()
        if counting.is_needed:
            output = self._counted(counting, output, is_padding, is_part=not run.stepper.window.is_plain)
        loss = state.loss = output["loss"]
        state.batch_output = output
        fire.after_loss()
        if state.loss is not loss:
            loss = state.loss
            state.batch_output = output = {**output, "loss": loss}
        size: int = 0 if is_padding else output["batch_size"]
        track = self._calls.track or run.measures.tracker.update
        track(loss, output.get("num_items", size) if size else 0)
        if run.measures.has_train_metrics and size:
            run.measures.train_metrics.update(*self.get_metric_inputs(state.batch, output), size)
        if announce:
            fire.step_output()
        return output

    def _watch_first_loss(self) -> BatchOutput:
        """Run the loss hook on the first batch, and find what its loss is a mean over."""
        run, batch = self.run, self.state.batch
        counting, window = run.measures.train_items, run.stepper.window
        output = counting.watched(self, self.calculate_train_batch_loss, batch, run.data.train)
        if window.world > 1:
            counting.agree()
        if window.is_plain:
            counting.prefer_samples(batch)
        run.stepper.use_sums(counting.is_sum)
        run.measures.tracker.is_sum = counting.is_sum
        return output

    def _backward(self, output: BatchOutput) -> None:
        run, calls, loss = self.run, self._calls, self.state.loss
        run.fire.before_backward()
        if run.loss.is_first:
            check_loss(loss, self)
            warn_of_sample_weights(run, output)
        calls.backward(self._weighted(loss, output) if calls.is_weighted else loss)
        run.fire.after_backward()
        run.loss.is_first = False

    def _weighted(self, loss: Tensor, output: BatchOutput) -> Tensor:
        """Return the loss weighted by its share of the window's items; its gradients are NaN where it is not finite."""
        run = self.run
        stepper, part, is_split = run.stepper, run.part, run.microbatch_size is not None
        if stepper.guard.is_active:
            loss = stepper.guard.mark(loss)
        if stepper.window.is_plain:
            return loss
        if output.get("num_items_in_batch") is not None:  # the caller has normalised over all ranks
            return stepper.weigh_normalised(loss)
        info = None if run.data.source is None else run.data.source.batch_info
        items, everywhere = items_of(output, info, stepper.window.world, is_split)
        reference = items * part.parts if output.get("num_items") is not None else part.rows or items
        return stepper.weigh(
            loss, items, everywhere, reference=reference, is_last_part=part.is_last, is_whole=not is_split
        )

    def _update(self) -> None:
        """Gradients are complete: finish, clip, test, step, schedule, clear."""
        run, calls = self.run, self._calls
        fire, stepper = run.fire, run.stepper
        guard = stepper.guard
        if run.is_ddp:
            check_reduced(self.model)
        if not stepper.is_simple:
            stepper.finish()
        if calls.clip is not None:
            calls.clip()
        fire.after_train_batch()
        fire.before_step()
        stepper.was_skipped = False
        is_admitted = not guard.is_active or guard.should_step(
            self.last_grad_norm if run.norm_is_tested else None, None if calls.is_weighted else self.state.loss
        )
        if is_admitted:
            calls.step()
        else:
            stepper.end_skipped_update()
        fire.after_step()
        if is_admitted and calls.schedule is not None and (self.state.schedulers or calls.is_own_schedule):
            calls.schedule()
        calls.clear()
        if not stepper.is_simple:
            stepper.end()
        if is_admitted and guard.is_immediate and not guard.verdict:
            return
        verdict = guard.close(stepper.skipped_units() if is_admitted else None)
        if verdict and run.recovery is not None:
            run.recovery.act_on(verdict)

    def _batches(self, loader: Iterable[object]) -> Iterator[tuple[object, bool]]:
        """Yield each batch with whether it is the epoch's last; loaders without a length are read ahead where a window must know that."""
        state, clock, fire, data = self.state, self.state.clock, self.run.fire, self.run.data
        limit, source = data.batches_per_epoch, data.source if data.reads_index else None
        move = loaders.mover(self.device, loader)
        fire.before_dataloader()
        if limit is None:
            ahead = 0 if self.run.stepper.is_simple else 1
            rest = self._rest_of_epoch(loader, ahead)
            for batch, last in loaders.look_ahead(rest, clock.batch_in_epoch, ahead):
                state.step = clock.batch_in_epoch
                yield (batch if move is None else move(batch)), last
                fire.before_dataloader()
            return
        if clock.batch_in_epoch >= limit:
            return
        batches, is_saved = iter(self._rest_of_epoch(loader)), loaders.saves_itself(loader)
        for batch in batches:
            state.step = step = clock.batch_in_epoch
            if source is not None:
                state.sample_index = source.sample_index
            last = step + 1 >= limit
            if last and is_saved:
                next(batches, None)  # from here on its state is that of an epoch that has ended
            yield (batch if move is None else move(batch)), last
            if last:
                return
            fire.before_dataloader()

    def _rest_of_epoch(self, loader: Iterable[object], ahead: int = 0) -> Iterable[object]:
        replay = self.run.data.replay
        return loader if replay is None else replay.batches(loader, self.state.clock, ahead=ahead)

    def _at_boundary(self) -> bool:
        """Between two steps: agree, evaluate, save, handle signals and limits; True ends the run."""
        run, clock = self.run, self.state.clock
        agreement, plan, window = run.agreement, run.evaluation, run.stepper.window
        is_due = plan.is_due
        if is_due is not None and plan.interval is None and agreement.vote is not None:
            # The answer of a user's function is about this batch, so that of all ranks is waited for.
            request = agreement.request(yes=is_due(clock))
            answer = agreement.vote.any_rank_votes_yes
            is_due = lambda clock: answer
        else:
            request = agreement.after_batch()
        is_open = bool(window.count) and run.units is None
        if request and is_open and agreement.waits_for_window_end(request, window.length - window.count):
            request = 0  # requested again after the next batch
        ended = agreement.limits.reached_inside_epoch(clock)
        if is_due is not None and not ended and request in (0, SAVE_SIGNAL):
            self._evaluate_if_due(is_due)
        elif is_due is not None and not ended and plan.interval is None and is_due(clock):
            plan.unfinished = "evaluation"  # comes after resuming; an interval is asked again then
        if run.checkpoints is not None:
            run.checkpoints.at_batch_end(ended)
        if run.good is not None:
            run.good.at_boundary()
        if request:
            self._handle(request)
        return ended

    def _perform_micro_batches(self, batch: object) -> None:
        """Split one batch, accumulate its gradients, and show plugins the whole batch once, before the last backward."""
        run, state, synchronises = self.run, self.state, self.run.stepper.synchronises
        rows, outputs, whole = batch_size_of(None, batch), [], None
        parts = split_batch(batch, run.microbatch_size or 1, rows)
        for index, part in enumerate(parts):
            state.batch, is_last = part, index == len(parts) - 1
            run.part = Part(len(parts), is_last, rows)
            with self._in_ddp(synchronises and is_last) if run.is_ddp else nullcontext():
                output = self._forward_and_loss(announce=False)
                outputs.append(output)
                if is_last:
                    joins = self.engine.listens(Event.STEP_OUTPUT)
                    whole = join_batch_outputs(outputs, run.measures.train_items.is_sum, joins)
                    state.batch, state.batch_output = batch, whole
                    run.fire.step_output()
                    state.batch, state.batch_output = part, output  # its weight is that of its own items
                self._backward(output)
        state.batch, state.batch_output = batch, whole

    def _handle_requests(self) -> None:
        """Act on a stop or a signal of any rank, outside a step, on all ranks at the same place."""
        if request := self.run.agreement.request():
            resuming.apply_restored_rng(self.run, before_first_step=True)
            self._handle(request)

    def _handle(self, request: int) -> None:
        """Stop because a rank requested it, or act on a signal any rank received."""
        agreement = self.run.agreement
        if request == STOP:
            agreement.is_reached = True
            raise agreement.stop or StopTrainingError("another process requested a stop")
        assert self.run.checkpoints is not None
        resuming.handle_signal(request, agreement.signals, self.run.checkpoints)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Explain an error and report it to every plugin, which then closes what it holds."""
        run = self.run
        try:
            yield
        except BaseException as error:
            run.inside_step = False
            batch = self.state.clock.batch if run.is_running and not run.loss.is_first else 0
            explained = explain_failure(error, self.get_model(), self.loss_func, batch)
            run.agreement.vote, run.fire, self.model = None, self.engine.on, self.get_model()
            self.callback_handler.call_event("on_exception", self, exception=explained)
            self.engine.close_plugins()
            if run.checkpoints is not None:
                run.checkpoints.settle()
            if run.is_running:
                signals = run.agreement.signals
                report_failure(explained, lambda: signals.requested is not None)
            if explained is error:
                raise
            raise explained from error
