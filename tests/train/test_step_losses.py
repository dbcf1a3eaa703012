"""Losses every few updates, as loggers receive them."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from drivetrain.core.errors import ConfigError
from drivetrain.experiment import experiment
from drivetrain.record import Recorder, read_metrics
from drivetrain.runtime import current_run
from drivetrain.train.callbacks import LRMonitor, TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Lines, make_data, make_model, make_trainer, train

DOUBLE = torch.float64


def named(outputs, targets):
    """Two losses by name; what is trained on is their sum."""
    return {"ce": functional.cross_entropy(outputs, targets), "norm": 0.01 * outputs.pow(2).mean()}


def by_hand(every, epochs=2, rows=44, size=8, accumulation=1):
    """Return the mean of each named loss over every so many updates, weighted by samples, of a plain loop."""
    model, (x, y) = make_model(dtype=DOUBLE), make_data(rows, dtype=DOUBLE).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, waiting, batches, updates = [], [], 0, 0
    for _ in range(epochs):
        starts = list(range(0, rows, size))
        for first in range(0, len(starts), accumulation):
            window = starts[first : first + accumulation]
            items = sum(min(size, rows - start) for start in window)
            optimizer.zero_grad()
            for start in window:
                part = y[start : start + size]
                losses = named(model(x[start : start + size]), part)
                (sum(losses.values()) * len(part) / items).backward()
                waiting.append((len(part), {name: float(loss.detach()) for name, loss in losses.items()}))
            optimizer.step()
            batches, updates = batches + len(window), updates + 1
            if updates % every == 0:
                count = sum(weight for weight, _ in waiting)
                means = {name: sum(w * losses[name] for w, losses in waiting) / count for name in losses}
                found.append((batches, means))
                waiting = []
    return found


def run(every, accumulation=1, folder=None, stop_at=None, cls=Trainer, loss=named, **kwargs):
    """Train with a logger and return the lines that it received of single steps."""
    lines, model = Lines(), make_model(dtype=DOUBLE)
    callbacks = [] if stop_at is None else [Pull(stop_at)]
    keeping = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False} if folder else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = cls(model, loss, optimizer, callbacks=callbacks, loggers=[lines], seed=0)
    kwargs = {"num_epochs": 2, "global_batch_size": 8, **keeping, **kwargs}
    with contextlib.suppress(Pulled):
        trainer.train(
            make_data(44, dtype=DOUBLE),
            gradient_accumulation_steps=accumulation,
            log_every=every,
            train_dataloader_kwargs={"shuffle": False},
            **kwargs,
        )
    return [(step, metrics) for step, metrics in lines.lines if any(name.endswith("_step") for name in metrics)]


class Pulled(Exception):
    pass


class Pull(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self.at:
            raise Pulled


def check(lines, expected):
    assert [step for step, _ in lines] == [step for step, _ in expected]
    for (_, ours), (_, theirs) in zip(lines, expected):
        assert ours["train_ce_step"] == pytest.approx(theirs["ce"], rel=1e-12)
        assert ours["train_norm_step"] == pytest.approx(theirs["norm"], rel=1e-12)
        assert ours["train_loss_step"] == pytest.approx(theirs["ce"] + theirs["norm"], rel=1e-12)
        assert all(type(value) is float for value in ours.values())


@pytest.mark.parametrize(("accumulation", "microbatch_size"), [(1, None), (3, None), (2, 3)])
def test_means_and_names_are_those_of_a_hand_written_loop(accumulation, microbatch_size):
    lines = run(2, accumulation, microbatch_size=microbatch_size)
    expected = by_hand(2, accumulation=accumulation)
    assert len(expected) >= 2
    check(lines, expected)


def test_two_processes_log_the_mean_over_the_samples_of_both(world2):
    expected = by_hand(4)
    for lines in world2(run, 4):
        check(lines, expected)


def late_name(outputs, targets):
    """The second process has one more loss, from the fourth batch on."""
    losses = named(outputs, targets)
    late_name.calls = getattr(late_name, "calls", 0) + 1
    if torch.distributed.get_rank() == 1 and late_name.calls > 3:
        losses["late"] = 0 * losses["ce"] + 2.0
    return losses


def run_with_a_late_name():
    late_name.calls = 0
    return run(2, loss=late_name)


def test_a_loss_that_only_one_process_has_is_logged_on_all_of_them(world2):
    first, second = world2(run_with_a_late_name)
    assert first == second
    assert next(metrics["train_late_step"] for _, metrics in first if "train_late_step" in metrics) == 2.0


def run_with_a_logger_on_one_rank():
    lines = Lines()
    loggers = [lines] if torch.distributed.get_rank() == 1 else []
    train(make_trainer(loggers=loggers), make_data(32), log_every=1, per_device_batch_size=4)
    return lines.series("train_loss_step")


def test_a_logger_on_one_of_two_processes_gets_the_mean_of_both(world2):
    alone = Lines()
    train(make_trainer(loggers=[alone]), make_data(32), log_every=1, per_device_batch_size=8)
    first, second = world2(run_with_a_logger_on_one_rank)
    assert first == []
    assert [step for step, _ in second] == [1, 2, 3, 4]
    assert [loss for _, loss in second] == pytest.approx(
        [loss for _, loss in alone.series("train_loss_step")], abs=1e-6
    )


@pytest.mark.parametrize("at", [3, 4, 7])
def test_a_resumed_run_keeps_rhythm_and_partial_mean(tmp_path, at):
    whole = run(4)
    before = run(4, folder=tmp_path, stop_at=at)
    after = run(4, folder=tmp_path, resume_from="auto")
    assert len(whole) == 3
    assert before + after == whole


def test_two_processes_go_on_with_the_partial_mean_of_one(world2, tmp_path):
    before = run(4, folder=tmp_path, stop_at=6)
    for after in world2(run, 4, folder=tmp_path, resume_from="auto"):
        check(before + after, by_hand(4))


def test_a_sum_is_logged_as_the_mean_over_updates():
    lines = run(2, accumulation=2, loss=nn.CrossEntropyLoss(reduction="sum"), num_epochs=1, max_num_train_steps=2)
    model, (x, y) = make_model(dtype=DOUBLE), make_data(44, dtype=DOUBLE).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for start in (0, 16):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[start : start + 16]), y[start : start + 16], reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert lines[0][1]["train_loss_step"] == pytest.approx(sum(losses) / 2)


def test_learning_rates_come_along_unless_a_monitor_logs_them():
    lines = run(3, create_scheduler_fn=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    assert [metrics["lr/group0"] for _, metrics in lines] == pytest.approx([0.1 * 0.5**k for k in (3, 6, 9, 12)])
    monitored = Lines()
    train(make_trainer(loggers=[monitored], callbacks=[LRMonitor("100ba")]), log_every=1)
    assert monitored.series("train_loss_step") and not monitored.series("lr/group0")


@pytest.mark.parametrize(("every", "steps"), [("2ba", [2, 4]), ("1ep", [5]), ("0.4dur", [2, 4]), (None, []), (0, [])])
def test_an_interval_is_a_time(every, steps):
    lines = Lines()
    train(make_trainer(loggers=[lines]), make_data(40), log_every=every)
    assert [step for step, _ in lines.series("train_loss_step")] == steps


def test_every_fiftieth_update_is_logged_where_nothing_is_said():
    lines = Lines()
    history = train(make_trainer(loggers=[lines]), make_data(101), per_device_batch_size=1)
    assert [step for step, _ in lines.series("train_loss_step")] == [50, 100]
    assert not [name for name in history.get_metric_names() if name.endswith("_step")]


def test_nothing_is_attached_without_a_logger_and_after_a_run_with_one():
    trainer = make_trainer()
    train(trainer, log_every=1)
    assert trainer.run.measures.step_losses is None
    lines = Lines()
    trainer = make_trainer(loggers=[lines])
    train(trainer, log_every=1)
    assert len(lines.series("train_loss_step")) == 3
    train(trainer, log_every=None)
    assert len(lines.series("train_loss_step")) == 3
    assert trainer.run.measures.step_losses is None and not trainer.engine.plugins


@pytest.mark.parametrize("every", [-1, "often", "-2ba", float("nan")])
def test_other_intervals_are_rejected(every):
    with pytest.raises(ConfigError, match="log_every="):
        train(make_trainer(), log_every=every)


def test_a_sweep_of_the_learning_rate_logs_no_steps():
    lines = Lines()
    make_trainer(loggers=[lines]).lr_find(make_data(), num_steps=60)
    assert not lines.series("train_loss_step")


@experiment
def learn():
    Recorder(tensorboard=True, console=True)  # the run's own; the Trainer finds it
    model = make_model()
    trainer = Trainer(model, named, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    trainer.train(make_data(), num_epochs=1, log_every=1)
    return str(current_run().folder)


def test_all_sinks_of_an_experiment_receive_the_losses_by_name(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(learn.run(output_dir=str(tmp_path)))
    rows = [row for row in read_metrics(folder, kind="scalar") if row["tag"] == "train_ce_step"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    curves = EventAccumulator(str(folder / "tb"))
    curves.Reload()
    assert [event.value for event in curves.Scalars("train_ce_step")] == pytest.approx([row["value"] for row in rows])
    printed = [line for line in capsys.readouterr().out.splitlines() if "train_ce_step" in line]
    assert len(printed) >= 2 and all("train_norm_step" in line and "lr/group0" in line for line in printed)
