"""Callbacks that end a run."""

import math

import pytest
import torch

from drivetrain.core.errors import NonFiniteLossError, StopTrainingError
from drivetrain.train.callbacks import EarlyStoppingCallback, TerminateOnNaNCallback, TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train, weights


class Script(TrainerCallback):
    """Records given values as a metric, one per epoch."""

    def __init__(self, *values, name="score"):
        self.values, self.name = list(values), name

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric(self.name, self.values.pop(0))


def run(values, *callbacks, num_epochs=None, **kwargs):
    trainer = make_trainer(callbacks=[Script(*values), *callbacks])
    train(trainer, eval_dataset=make_data(8), num_epochs=num_epochs or len(values), **kwargs)
    return trainer


def epochs_run(trainer):
    return len(trainer.run_history.get_metric_values("train_loss_epoch"))


@pytest.mark.parametrize(
    ("values", "greater", "threshold", "patience", "expected"),
    [
        ([3, 2, 1, 0], False, 0.01, 1, 4),  # always better
        ([3, 2, 2.5, 0], False, 0.01, 1, 3),  # worse
        ([3, 2, 1.995, 0], False, 0.01, 1, 3),  # better, but not by more than the threshold
        ([1, 2, 3, 3], True, 0.01, 1, 4),
        ([1, 2, 1, 5, 4, 4], True, 0.01, 2, 6),  # an improvement starts the count again
        ([3, math.nan, 1], False, 0.01, 1, 2),  # a NaN is no improvement
        ([1.0, 0.995, 0.99, 0.985], False, 0.01, 3, 4),  # small gains add up against the best: 0.985 is better by 0.015
    ],
)
def test_a_run_stops_when_patience_is_at_its_end(values, greater, threshold, patience, expected):
    stopping = EarlyStoppingCallback(patience, threshold, watch_metric="score", greater_is_better=greater)
    assert epochs_run(run(values, stopping)) == expected


def test_a_stopped_run_ends_in_good_order():
    log = []

    class Ends(TrainerCallback):
        def on_stop_training_error(self, trainer, **kwargs):
            log.append("stop")

        def on_training_run_end(self, trainer, **kwargs):
            log.append("end")

    run([1, 1, 1], EarlyStoppingCallback(watch_metric="score"), Ends())
    assert log == ["stop", "end"]


def test_a_second_run_counts_afresh_unless_told_otherwise():
    for reset, expected in ((True, [1.0, 5.0]), (False, [1.0])):
        stopping = EarlyStoppingCallback(watch_metric="score", reset_on_train=reset)
        trainer = run([1.0], stopping)
        trainer.callback_handler.callbacks[0].values = [5.0]
        train(trainer, eval_dataset=make_data(8))
        assert [stopping.best_metric] == expected[-1:]


def test_epochs_without_an_evaluation_do_not_count():
    stopping = EarlyStoppingCallback(2, watch_metric="score")
    trainer = run([1.0, 1.0, 0.5], stopping, num_epochs=6, eval_interval="2ep")
    assert epochs_run(trainer) == 6
    assert stopping.early_stopping_patience_counter == 0


def test_a_metric_that_is_never_recorded_is_an_error_after_the_first_evaluation():
    with pytest.raises(ValueError, match="Did you mean 'score'"):
        run([1.0, 1.0], EarlyStoppingCallback(watch_metric="scoer"))


def test_a_restored_callback_goes_on_counting():
    first = EarlyStoppingCallback(3, watch_metric="score")
    run([1.0, 1.0, 1.0], first)
    second = EarlyStoppingCallback(3, watch_metric="score")
    second.load_state_dict(first.state_dict())
    assert (second.best_metric, second.early_stopping_patience_counter) == (1.0, 2)


@pytest.mark.parametrize("wrong", [{"early_stopping_patience": 0}, {"early_stopping_threshold": -1.0}])
def test_wrong_settings_of_early_stopping_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EarlyStoppingCallback(**wrong)


class Exploding(Trainer):
    """The loss of batch 2 of epoch 2 is not finite."""

    value = math.nan

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.run_history.current_epoch == 2 and self.state.clock.batch_in_epoch == 2:
            output["loss"] = output["loss"] * self.value
        return output


class Watch(TrainerCallback):
    def __init__(self):
        self.log = []

    def before_backward(self, state, logger):
        self.log.append("backward")

    def on_training_run_end(self, trainer, **kwargs):
        self.log.append("end")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_in_good_order_and_then_raises(value):
    nan, watch = TerminateOnNaNCallback(), Watch()
    trainer = make_trainer(cls=Exploding, callbacks=[nan, watch])
    trainer.value = value
    with pytest.raises(NonFiniteLossError, match=rf"the loss is {value} in training, epoch 2, batch 2") as caught:
        train(trainer, num_epochs=3)
    assert (caught.value.step, caught.value.epoch, caught.value.where) == (2, 2, "training")
    assert nan.triggered
    assert watch.log == ["backward"] * 5 + ["end"]  # on a CPU the bad loss is not back-propagated
    assert all(weight.isfinite().all() for weight in weights(trainer.model))


def test_the_run_may_stop_without_an_error():
    nan = TerminateOnNaNCallback(action="stop")
    trainer = make_trainer(cls=Exploding, callbacks=[nan])
    train(trainer, num_epochs=3)
    assert nan.triggered
    assert trainer.state.clock.batch == 5


def test_a_loss_that_is_no_number_in_evaluation_is_found_too():
    class BadEvaluation(Trainer):
        def calculate_eval_batch_loss(self, batch):
            output = super().calculate_eval_batch_loss(batch)
            return {**output, "loss": output["loss"] * math.nan}

    trainer = make_trainer(cls=BadEvaluation, callbacks=[TerminateOnNaNCallback()])
    with pytest.raises(NonFiniteLossError, match="in validation"):
        train(trainer, eval_dataset=make_data(8))
    with pytest.raises(NonFiniteLossError, match="in validation"):
        trainer.evaluate(make_data(8))


def test_a_bad_loss_is_found_among_micro_batches():
    with pytest.raises(NonFiniteLossError):
        train(make_trainer(cls=Exploding, callbacks=[TerminateOnNaNCallback()]), num_epochs=2, microbatch_size=4)


def test_the_check_works_on_its_own():
    nan = TerminateOnNaNCallback(action="stop")
    nan.check_for_nan_after_batch({"loss": torch.tensor([1.0, 2.0])}, step="training")
    assert not nan.triggered
    with pytest.raises(StopTrainingError, match="the loss is nan in training"):
        nan.check_for_nan_after_batch({"loss": torch.tensor([1.0, math.nan])}, step="training")


def test_an_unknown_action_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'raise'"):
        TerminateOnNaNCallback(action="rais")


def _stop_on_one_rank():
    from drivetrain.runtime.ranks import get_rank

    class Mine(Exploding):
        value = math.nan if get_rank() == 1 else 1.0

    torch.manual_seed(0)
    trainer = make_trainer(cls=Mine, callbacks=[TerminateOnNaNCallback(action="stop")])
    train(trainer, make_data(96), num_epochs=3)  # 6 batches an epoch on each rank; the ninth is bad on one
    return trainer.state.clock.batch


def test_a_bad_loss_on_one_rank_ends_all_ranks(world2):
    first, second = world2(_stop_on_one_rank)
    assert first == second
    assert 8 <= first <= 10


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_device_the_news_is_at_most_two_steps_late_and_nothing_waits():
    class Late(Watch):
        def on_train_step_start(self, trainer, **kwargs):
            if trainer.state.clock.batch_in_epoch == 1:  # the first batch is looked at, and waited for
                torch.cuda.set_sync_debug_mode("error")

        def on_stop_training_error(self, trainer, **kwargs):
            torch.cuda.set_sync_debug_mode("default")

    class OnDevice(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (math.nan if self.state.clock.batch_in_epoch == 20 else 1.0)}

    watch, model = Late(), make_model().cuda()
    data = torch.utils.data.TensorDataset(*(tensor.cuda() for tensor in make_data(400).tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)  # one that skips on the device
    trainer = make_trainer(
        model, cls=OnDevice, optimizer=optimizer, callbacks=[watch, TerminateOnNaNCallback()], device="cuda"
    )
    try:
        with pytest.raises(NonFiniteLossError) as caught:
            train(trainer, torch.utils.data.DataLoader(data, batch_size=8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert caught.value.step == 20
    assert watch.log.count("backward") <= 23
