"""What is printed."""

import torch

from drivetrain.train.callbacks import LogMetricsCallback, PrintProgressCallback, TrainerCallback
from tests.train.tasks import make_data, make_trainer, train


class Collect(LogMetricsCallback):
    def __init__(self):
        self.logged = []

    def log_metrics(self, trainer, metrics):
        self.logged.append(sorted(metrics))


class Extra(TrainerCallback):
    def on_train_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("constrained", 1.0)
        trainer.run_history.update_metric("train_extra", 2)


def test_training_metrics_follow_training_and_the_others_an_evaluation():
    collect = Collect()
    train(make_trainer(callbacks=[Extra(), collect]), eval_dataset=make_data(8))
    assert collect.logged == [["train_extra", "train_loss_epoch"], ["constrained", "eval_loss_epoch"]]


def test_an_evaluation_inside_an_epoch_logs_its_own_metrics_only():
    collect = Collect()
    trainer = make_trainer(callbacks=[collect], metrics={"m": lambda outputs, targets: 1.0})
    train(trainer, eval_dataset=make_data(8), num_epochs=2, eval_interval="2ba")
    assert collect.logged.count(["intermediate_eval_loss", "intermediate_eval_m"]) >= 2


def test_asking_for_an_unknown_metric_does_not_disturb_the_log():
    class Ask(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            trainer.run_history.get_metric_values("ghost")

    collect = Collect()
    train(make_trainer(callbacks=[Ask(), collect]))
    assert collect.logged == [["train_loss_epoch"]]


def test_metrics_are_printed_by_name_and_value(capsys):
    train(make_trainer(callbacks=[Extra(), LogMetricsCallback()]), eval_dataset=make_data(8))
    lines = capsys.readouterr().out.splitlines()
    assert "train_extra: 2" in lines
    assert "constrained: 1" in lines
    assert any(line.startswith("eval_loss_epoch: 1.") for line in lines)


def test_values_are_printed_with_as_many_digits_as_people_read(capsys):
    class Values(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("train_rate", 0.30000001192092896)
            trainer.run_history.update_metric("train_small", torch.tensor(1.2345e-9))
            trainer.run_history.update_metric("train_tokens", 123456789.0)

    train(make_trainer(callbacks=[Values(), LogMetricsCallback()]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["train_rate: 0.3", "train_small: 1.2345e-09", "train_tokens: 123456789"]


def test_runs_and_epochs_are_announced(capsys):
    trainer = make_trainer(callbacks=[PrintProgressCallback()])
    train(trainer, eval_dataset=make_data(8), num_epochs=2)
    trainer.evaluate()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        "Starting training run", "Starting epoch 1", "Starting evaluation", "Starting epoch 2", "Starting evaluation",
        "Finishing training run", "Starting evaluation run", "Starting evaluation", "Finishing evaluation run",
    ]  # fmt: skip
