"""More evaluations, and shorter ones."""

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.train.callbacks import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ProgressBarCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
    with_limit_from_environment,
)
from drivetrain.train.loaders import LimitBatches
from drivetrain.train.schedulers import CosineLrScheduler
from tests.train.tasks import make_data, make_trainer, train


class Count(TrainerCallback):
    """Counts the batches of each evaluation and of each training epoch."""

    def __init__(self):
        self.evaluations, self.trained, self.training_flags = [], [0], []

    def on_train_step_end(self, trainer, **kwargs):
        self.trained[-1] += 1
        self.training_flags.append(trainer.model.training)

    def on_train_epoch_end(self, trainer, **kwargs):
        self.trained.append(0)

    def on_eval_epoch_start(self, trainer, is_intermediate, **kwargs):
        self.evaluations.append([trainer.state.clock.batch, is_intermediate, 0])

    def on_eval_step_end(self, trainer, **kwargs):
        self.evaluations[-1][2] += 1


def test_an_evaluation_runs_after_every_nth_finished_batch_of_the_run():
    count = Count()
    trainer = make_trainer(callbacks=[StepBasedEvaluationCallback(2), count])
    history = train(trainer, make_data(40), num_epochs=2, eval_dataset=make_data(8))  # 5 batches an epoch
    intermediate = [batch for batch, is_intermediate, _ in count.evaluations if is_intermediate]
    assert intermediate == [2, 4, 6, 8, 10]
    assert all(count.training_flags)  # the model trains on in training mode
    assert history.get_metric_steps("intermediate_eval_loss") == [2, 4, 6, 8, 10]
    assert len(history.get_metric_values("train_loss_epoch")) == 2


def test_evaluations_inside_an_epoch_do_not_change_training():
    plain, watched = make_trainer(), make_trainer(callbacks=[StepBasedEvaluationCallback(1)])
    expected = train(plain, eval_dataset=make_data(8)).get_metric_values("train_loss_epoch")
    assert train(watched, eval_dataset=make_data(8)).get_metric_values("train_loss_epoch") == expected


def test_evaluating_by_steps_needs_data_to_evaluate_on():
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        train(make_trainer(callbacks=[StepBasedEvaluationCallback(1)]))
    with pytest.raises(ConfigError, match="eval_every_n_steps=0"):
        StepBasedEvaluationCallback(0)


@pytest.mark.parametrize(("intermediate_only", "expected"), [(True, [12, 24]), (False, [12, 12])])
def test_limited_evaluations_run_so_many_batches(intermediate_only, expected):
    count = Count()
    limit = LimitEvalStepsCallback(12, limit_intermediate_only=intermediate_only)
    trainer = make_trainer(callbacks=[limit, StepBasedEvaluationCallback(3), count])
    train(trainer, eval_dataset=make_data(24), per_device_batch_size=8, eval_dataloader_kwargs={"batch_size": 1})
    assert [steps for *_, steps in count.evaluations] == expected


def test_a_stand_alone_evaluation_is_limited_too_and_the_next_training_is_not():
    count = Count()
    trainer = make_trainer(callbacks=[LimitEvalStepsCallback(2, limit_intermediate_only=False), count])
    trainer.evaluate(make_data(32), per_device_batch_size=8)
    train(trainer, make_data(40))
    assert count.evaluations[0][2] == 2
    assert count.trained[0] == 5


def test_the_bar_counts_the_limited_batches(capsys):
    trainer = make_trainer(callbacks=[LimitEvalStepsCallback(2, False), ProgressBarCallback()])
    trainer.evaluate(make_data(32), per_device_batch_size=8)
    assert "evaluation  2/2" in capsys.readouterr().out


def _evaluated_steps():
    count = Count()
    trainer = make_trainer(callbacks=[LimitEvalStepsCallback(4, False), count])
    trainer.evaluate(make_data(64), per_device_batch_size=4)
    try:
        make_trainer(callbacks=[LimitEvalStepsCallback(1, False)]).evaluate(make_data(64))
    except ConfigError as error:
        return count.evaluations[0][2], str(error)


def test_the_number_of_steps_is_shared_by_the_processes(world2):
    for steps, message in world2(_evaluated_steps):
        assert steps == 2
        assert "Use at least 2" in message


# ---------------------------------------------------------------------------------------------- fewer batches


def test_a_limit_cuts_training_and_evaluation_and_the_schedule_counts_what_is_run():
    count = Count()
    trainer = make_trainer(callbacks=[LimitBatchesCallback(5), count])
    train(
        trainer,
        make_data(80),
        num_epochs=2,
        eval_dataset=make_data(80),
        gradient_accumulation_steps=4,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(),
    )
    assert count.trained[:2] == [5, 5]
    assert [steps for *_, steps in count.evaluations] == [5, 5]
    assert trainer.run_config.num_local_update_steps_per_epoch == 2
    assert trainer.scheduler.total_iterations == 4
    assert trainer.state.clock.step == 4  # windows of 4 and 1 in each epoch


def test_a_limit_above_the_length_changes_nothing():
    trainer = make_trainer(callbacks=[LimitBatchesCallback(7)])
    train(trainer, make_data(40), gradient_accumulation_steps=4)
    assert (trainer.run_config.num_local_update_steps_per_epoch, trainer.state.clock.step) == (2, 2)


def test_the_environment_puts_the_limit_first():
    with LimitBatches(2):
        trainer = make_trainer(callbacks=[ProgressBarCallback])
    first = trainer.callback_handler.callbacks[0]
    assert isinstance(first, LimitBatchesCallback)
    assert first.num_batches == 2
    assert not any(isinstance(one, LimitBatchesCallback) for one in make_trainer().callback_handler.callbacks)


def test_the_users_own_limit_wins_over_the_environment():
    with LimitBatches(2):
        (own,) = with_limit_from_environment([LimitBatchesCallback(5)])
    assert own.num_batches == 5


def test_a_stand_alone_evaluation_is_cut_too():
    count = Count()
    make_trainer(callbacks=[LimitBatchesCallback(2), count]).evaluate(make_data(40), per_device_batch_size=8)
    assert count.evaluations[0][2] == 2


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="num_batches=0"):
        LimitBatchesCallback(0)
