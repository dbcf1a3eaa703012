"""Trainers that write out the loop, or the passes of one batch, as subclasses of pytorch-accelerated's Trainer do."""

import pytest
import torch

from drivetrain.train.callbacks import LogMetricsCallback, ProgressBarCallback, TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Losses, make_data, make_trainer, train, weights


class OwnEpoch(Trainer):
    """Calls hooks and callbacks around a loop of its own."""

    def _run_train_epoch(self, train_dl):
        self.train_epoch_start()
        self._loss_tracker.reset()
        self.callback_handler.call_event("on_train_epoch_start", self)
        window = self.run_config.gradient_accumulation_steps
        for step, batch in enumerate(train_dl):
            self.callback_handler.call_event("on_train_step_start", self)
            self._perform_forward_and_backward_passes(batch, step)
            if (step + 1) % window == 0 or step + 1 == len(train_dl):
                self.optimizer_step()
                self.scheduler_step()
                self.optimizer_zero_grad()
        self.train_epoch_end()
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        self.callback_handler.call_event("on_train_epoch_end", self)


class OwnPasses(Trainer):
    """Makes forward and backward of a batch itself, and keeps the output to itself."""

    def _perform_forward_and_backward_passes(self, batch, step):
        output = self.calculate_train_batch_loss(batch)
        self._update_loss_tracker(output["loss"], output["batch_size"])
        self.callback_handler.call_event("on_train_step_end", self, batch=batch, batch_output=output, step=step)
        self.backward_step(output["loss"] / self.run_config.gradient_accumulation_steps)


class OwnBoth(OwnPasses, OwnEpoch):
    pass


@pytest.mark.parametrize("cls", [OwnEpoch, OwnPasses, OwnBoth])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("smart", [True, False])
def test_an_own_loop_trains_as_the_trainers_does(cls, accumulation, smart, capsys):
    def run(cls):
        losses = Losses()
        trainer = make_trainer(cls=cls, callbacks=[losses, ProgressBarCallback(), LogMetricsCallback()])
        data = make_data(32) if smart else torch.utils.data.DataLoader(make_data(32), batch_size=8)
        history = train(
            trainer, data, num_epochs=2, eval_dataset=make_data(16), gradient_accumulation_steps=accumulation,
            eval_interval="2ba",
        )  # fmt: skip
        clock = trainer.state.clock
        counts = (clock.epoch, clock.batch, clock.step, clock.sample)
        return (
            weights(trainer.model),
            repr(history),
            losses.values,
            counts,
            capsys.readouterr().out.count("epoch 2/2  4/4"),
        )

    expected, history, losses, counts, lines = run(Trainer)
    own, own_history, own_losses, own_counts, own_lines = run(cls)
    for one, other in zip(own, expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert (own_history, own_counts, own_lines) == (history, counts, lines) and lines == 1
    assert own_losses == pytest.approx(losses)


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"microbatch_size": 3}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_short_windows_and_batches_of_an_own_loop_count_by_their_samples(settings, reduction):
    def run(cls):
        trainer = make_trainer(cls=cls)
        trainer.loss_func = torch.nn.CrossEntropyLoss(reduction=reduction)
        history = train(trainer, make_data(37), num_epochs=2, **settings)  # 5 batches, the last of 5 samples
        return weights(trainer.model), repr(history)

    (own, own_history), (expected, history) = run(OwnEpoch), run(Trainer)
    for one, other in zip(own, expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert own_history == history


class OwnRun(Trainer):
    """Writes out the epochs."""

    def _run_training(self):
        self.training_run_start()
        self.callback_handler.call_event("on_training_run_start", self)
        for _ in range(self.run_config.num_epochs):
            self._run_train_epoch(self._train_dataloader)
            self._run_eval_epoch(self._eval_dataloader)
            self.training_run_epoch_end()
            self.callback_handler.call_event("on_training_run_epoch_end", self)
            self.run_history._increment_epoch()
        self.training_run_end()
        self.callback_handler.call_event("on_training_run_end", self)


class OwnEvaluation(Trainer):
    """Writes out an evaluation."""

    def _run_eval_epoch(self, valid_dl, is_training=True, is_intermediate=False):
        self.eval_epoch_start()
        self._loss_tracker.reset()
        self.callback_handler.call_event("on_eval_epoch_start", self, is_intermediate=is_intermediate)
        accelerator, pads = self._accelerator, self._pad_uneven_eval_batches
        joined = accelerator.join_uneven_inputs([self.model], even_batches=pads)
        with accelerator.no_sync(self.model), joined, torch.no_grad():
            for batch in valid_dl:
                self.callback_handler.call_event("on_eval_step_start", self)
                output = self.calculate_eval_batch_loss(batch)
                self._update_loss_tracker(output["loss"], output["batch_size"])
                self.callback_handler.call_event("on_eval_step_end", self, batch=batch, batch_output=output)
        self.eval_epoch_end()
        self._add_epoch_loss_to_run_history("eval_loss_epoch")
        self.callback_handler.call_event("on_eval_epoch_end", self, is_intermediate=is_intermediate)


class OwnRunAndEpoch(OwnRun, OwnEpoch):
    pass


class AroundRun(Trainer):
    def _run_training(self):
        super()._run_training()


@pytest.mark.parametrize("cls", [OwnRun, OwnEvaluation, OwnRunAndEpoch, AroundRun])
def test_epochs_and_evaluations_of_an_own_run_are_those_of_the_trainer(cls):
    def run(cls):
        trainer = make_trainer(cls=cls)
        for _ in range(2):
            history = train(
                trainer, make_data(37), num_epochs=2, eval_dataset=make_data(21), gradient_accumulation_steps=2
            )
        assert "_run_train_epoch" not in vars(trainer) and not trainer.run.is_running
        return weights(trainer.model), repr(history), trainer.run_history.current_epoch

    (own, *own_facts), (expected, *facts) = run(cls), run(Trainer)
    for one, other in zip(own, expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert own_facts == facts


@pytest.mark.parametrize("cls", [OwnRun, OwnRunAndEpoch])
@pytest.mark.parametrize("every", ["1ep", "2ba"])
def test_an_own_run_saves_checkpoints_and_continues_from_them(cls, every, tmp_path):
    whole, first, second = (make_trainer(cls=cls) for _ in range(3))
    train(whole, num_epochs=3, eval_dataset=make_data(16))
    train(first, num_epochs=2, eval_dataset=make_data(16), checkpoint_dir=tmp_path, checkpoint_every=every)
    train(second, num_epochs=3, eval_dataset=make_data(16), checkpoint_dir=tmp_path, resume_from="auto")
    assert second.state.clock.batch == 9 and all(map(torch.equal, weights(second.model), weights(whole.model)))


def test_an_epoch_that_calls_the_trainers_own_is_recorded_once():
    class Around(Trainer):
        def _run_train_epoch(self, train_dl):
            assert len(train_dl) == 3 and train_dl.batch_size == 8
            return super()._run_train_epoch(train_dl)

    trainer = make_trainer(cls=Around, train_metrics={"one": lambda outputs, targets: 1.0})
    history = train(trainer, num_epochs=2)
    assert history.get_metric_values("train_one_epoch") == [1.0, 1.0]
    assert len(history.get_metric_values("train_loss_epoch")) == 2


def test_limits_and_checkpoints_reach_an_own_loop(tmp_path):
    whole = make_trainer(cls=OwnBoth)
    train(whole, make_data(40), num_epochs=2)
    first = make_trainer(cls=OwnBoth)
    train(first, make_data(40), num_epochs=2, max_num_train_steps=3, checkpoint_dir=tmp_path)
    assert first.state.clock.batch == 3
    second = make_trainer(cls=OwnBoth)
    train(second, make_data(40), num_epochs=2, checkpoint_dir=tmp_path, resume_from="auto")
    assert second.state.clock.batch == 10
    assert all(map(torch.equal, weights(second.model), weights(whole.model)))


def test_a_loop_that_is_left_early_counts_what_it_did_and_the_run_goes_on():
    class Left(OwnBoth):
        def _run_train_epoch(self, train_dl):
            for step, batch in enumerate(train_dl):
                self._perform_forward_and_backward_passes(batch, step)
                self.optimizer_step()
                if step == 1:
                    break

    trainer = make_trainer(cls=Left)
    train(trainer, make_data(40), num_epochs=3)
    assert (trainer.state.clock.epoch, trainer.state.clock.batch) == (3, 6)


def test_a_loop_that_says_it_reached_the_limit_ends_the_run():
    class Limited(OwnBoth):
        def _run_train_epoch(self, train_dl):
            super()._run_train_epoch(train_dl)
            return True

    trainer = make_trainer(cls=Limited)
    train(trainer, num_epochs=3)
    assert trainer.state.clock.batch == 3


def test_a_handler_is_made_from_the_trainers_callbacks_as_before():
    from drivetrain.train.callbacks import CallbackHandler

    class Extra(TrainerCallback):
        pass

    class Mine(Trainer):
        def _create_callback_handler(self):
            return CallbackHandler([*self._callbacks, Extra()])

    assert make_trainer(cls=Mine, callbacks=[Losses()]).callback_handler.callback_list == ["Losses", "Extra"]
