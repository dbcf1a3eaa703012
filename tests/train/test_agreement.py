"""What ranks see for themselves (clocks, signals, files, answers of user functions) never makes one of them leave the others."""

import itertools
import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from drivetrain.algorithms import EMA
from drivetrain.core import time as core_time
from drivetrain.core.errors import ConfigError, StopTrainingError
from drivetrain.train.callbacks import TrainerCallback
from tests.train.tasks import make_data, make_trainer, train, weights


class Evaluations(TrainerCallback):
    """Notes after which batches the model was evaluated."""

    def __init__(self):
        self.batches = []

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.batches.append(trainer.state.clock.batch)


def uneven_clocks():
    """Let the clocks of the ranks begin years apart and run at different speeds: so many seconds with every look."""
    rank = dist.get_rank()
    ticks = itertools.count(1e9 * rank, 1.0 + 6.0 * rank)
    return mock.patch.object(core_time, "perf_counter", side_effect=ticks)


def run_by_the_clock(arguments, folder=None):
    looks = Evaluations()
    trainer = make_trainer(callbacks=[looks], seed=1)
    if folder is not None:
        arguments = {**arguments, "checkpoint_dir": folder, "keep_checkpoints": 100}
    if "eval_interval" in arguments:
        arguments = {**arguments, "eval_dataset": make_data(8)}
    with uneven_clocks():
        train(trainer, make_data(32), per_device_batch_size=4, **arguments)
    names = None if folder is None else sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-"))
    return trainer.state.clock.batch, trainer.state.clock.total_wct, looks.batches, names, weights(trainer.model)


def test_ranks_whose_clocks_differ_end_a_run_limited_by_time_at_the_same_batch(world2):
    first, second = world2(run_by_the_clock, {"num_epochs": None, "max_duration": "100s"})
    assert first[:4] == second[:4] and 2 < first[0] < 100 and first[1] >= 100
    assert all(map(torch.equal, first[4], second[4]))


def test_ranks_whose_clocks_differ_save_after_the_same_batches(world2, tmp_path):
    arguments = {"num_epochs": 4, "checkpoint_every": "40s"}
    first, second = world2(run_by_the_clock, arguments, str(tmp_path))
    assert first[:4] == second[:4] and first[0] == 16
    assert len(first[3]) > 1


def test_ranks_whose_clocks_differ_evaluate_after_the_same_batches(world2):
    first, second = world2(run_by_the_clock, {"num_epochs": 4, "eval_interval": "40s"})
    assert first[:4] == second[:4] and first[0] == 16
    assert 2 < len(first[2]) < 16


def follow_a_schedule_by_time():
    from drivetrain.compat.composer_schedulers import LinearScheduler

    rates = []

    class Rates(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    trainer = make_trainer(callbacks=[Rates()], seed=1)
    with uneven_clocks():
        train(
            trainer,
            make_data(32),
            num_epochs=None,
            per_device_batch_size=4,
            max_duration="200s",
            create_scheduler_fn=LinearScheduler(),
        )
    return rates, weights(trainer.model)


def test_a_schedule_that_follows_the_clock_gives_all_ranks_the_same_rates(world2):
    (rates, a), (others, b) = world2(follow_a_schedule_by_time)
    assert rates == others and len(set(rates)) > 2
    assert all(map(torch.equal, a, b))


def decide_on_one_rank(how):
    """Let something that only one rank sees decide, in the ways a user can write it."""
    rank, looks = dist.get_rank(), Evaluations()

    class Alone(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            if rank != 1 or trainer.state.clock.batch != 2:
                return
            if how == "stop_training":
                trainer.state.stop_training()
            elif how == "max_duration":
                trainer.state.max_duration = "6ba"
            elif how == "request_stop":
                trainer.request_stop("rank 1 only")
            elif how == "raise":
                raise StopTrainingError("rank 1 only")

    def ask(state, event):
        return rank == 1 and state.clock.batch in (2, 7)

    arguments = {"eval_interval": ask, "eval_dataset": make_data(8)} if how == "eval_interval" else {}
    trainer = make_trainer(callbacks=[Alone(), looks], seed=1)
    train(trainer, make_data(32), num_epochs=3, per_device_batch_size=4, **arguments)
    return trainer.state.clock.batch, looks.batches


def test_an_end_that_one_rank_sets_ends_all_of_them(world2):
    for how, last in (("stop_training", (3, 4)), ("max_duration", (6,)), ("request_stop", (3, 4)), ("raise", (3, 4))):
        (first, _), (second, _) = world2(decide_on_one_rank, how)
        assert first == second and first in last, how


def test_a_function_that_says_when_to_evaluate_is_asked_on_all_ranks_and_one_yes_counts(world2):
    first, second = world2(decide_on_one_rank, "eval_interval")
    assert first == second == (12, [2, 7])


def evaluate_unequal_loaders():
    looks, data = Interrupt(0, 0, 0), make_data(8 + 24 * dist.get_rank())
    trainer = make_trainer(seed=1, callbacks=[looks])
    train(trainer, make_data(16), num_epochs=2, per_device_batch_size=4, eval_dataset=data)
    return trainer.state.clock.batch, len(looks.seen)


def test_a_rank_with_fewer_evaluation_batches_waits_for_the_others(world2):
    assert world2(evaluate_unequal_loaders) == [(4, 2), (4, 8)]


def train_unequal_loaders():
    with pytest.raises(ConfigError, match="rank 0: 2, rank 1: 4"):
        train(make_trainer(seed=1), make_data(16 + 16 * dist.get_rank()), per_device_batch_size=4)
    return True


def test_training_loaders_of_different_lengths_are_rejected_before_the_first_step(world2):
    assert world2(train_unequal_loaders) == [True, True]


class Interrupt(TrainerCallback):
    """Sends a signal to its own process during an evaluation batch."""

    def __init__(self, number, rank, at_batch):
        self.number, self.rank, self.at_batch = number, rank, at_batch
        self.seen = []

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        self.seen.append(trainer.state.clock.batch)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == self.rank and trainer.state.clock.batch == self.at_batch and self.number:
            os.kill(os.getpid(), self.number)
            self.number = 0


def interrupted_evaluation(folder, rank, at_batch, averages=False, **arguments):
    """Train with a signal in an evaluation; then resume from what was saved, and compare with a run that was left alone."""
    arguments = {"num_epochs": 3, "per_device_batch_size": 4, "eval_dataset": make_data(64), **arguments}

    def run(number, resume=None):
        callback = Interrupt(number, rank, at_batch)
        algorithms = [EMA("4ba", update_interval="1ba")] if averages else []
        trainer = make_trainer(seed=1, callbacks=[callback], algorithms=algorithms)
        keeping = {} if resume is None else {"checkpoint_dir": folder, "checkpoint_every": None, "resume_from": "auto"}
        ended = None
        try:
            train(trainer, make_data(32), **keeping, **arguments)
        except SystemExit as stop:
            ended = stop.code
        history = trainer.run_history
        values = {name: list(history.get_metric_values(name)) for name in history.get_metric_names()}
        return ended, callback.seen, trainer.state.clock.batch, values, weights(trainer.model)

    cut, again, whole = run(signal.SIGTERM, "auto"), run(0, "auto"), run(0)
    assert all(map(torch.equal, again[4], whole[4]))
    assert again[3] == whole[3]
    assert cut[0] == 128 + signal.SIGTERM and again[0] is None
    assert cut[1] + again[1] != cut[1] and again[1][0] == at_batch  # the evaluation is made again
    return cut[2], len(cut[1])


@pytest.mark.parametrize(("at_batch", "arguments"), [(16, {}), (4, {"eval_interval": "4ba"}), (16, {"averages": True})])
def test_a_signal_cuts_an_evaluation_short_and_the_resumed_run_makes_it_again(tmp_path, at_batch, arguments):
    batches, evaluated = interrupted_evaluation(tmp_path, 0, at_batch, **arguments)
    before = 0 if "eval_interval" in arguments else at_batch // 8 - 1
    assert batches == at_batch and evaluated == before * 16 + 1


@pytest.mark.parametrize(("at_batch", "arguments"), [(8, {}), (2, {"eval_interval": "2ba"})])
def test_a_signal_to_one_rank_cuts_the_evaluation_of_all_short(world2, tmp_path, at_batch, arguments):
    first, second = world2(interrupted_evaluation, str(tmp_path), 1, at_batch, **arguments)
    before = at_batch // 4 - 1 if not arguments else 0
    assert first == second and first[0] == at_batch
    assert before * 8 < first[1] <= before * 8 + 3


def save_the_best_by_ones_own_metric(folder):
    """Watch a metric whose values differ between ranks."""
    from drivetrain.train.callbacks import EarlyStoppingCallback, SaveBestModelCallback

    rank = dist.get_rank()

    class Own(TrainerCallback):
        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("own", trainer.state.clock.epoch * (1 - 2 * rank))

    best = SaveBestModelCallback(f"{folder}/best.pt", watch_metric="own", greater_is_better=True)
    early = EarlyStoppingCallback(1, watch_metric="own", greater_is_better=True)
    trainer = make_trainer(seed=1, callbacks=[Own(), best, early])
    train(trainer, make_data(16), num_epochs=3, per_device_batch_size=4, eval_dataset=make_data(8))
    return trainer.state.clock.epoch, best.best_metric, early.best_metric


def test_the_best_model_is_rank_0s_and_an_early_stop_any_ranks(world2, tmp_path):
    first, second = world2(save_the_best_by_ones_own_metric, str(tmp_path))
    assert first[:2] == second[:2] == (2, 2)  # rank 1's metric falls, and its early stop ends all


def test_a_stop_at_the_end_of_an_epoch_takes_no_further_batch():
    class Stop(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.state.stop_training()

    trainer = make_trainer(callbacks=[Stop()])
    train(trainer, num_epochs=3, eval_dataset=make_data(8))
    assert trainer.state.clock.batch == 3 and len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 1
