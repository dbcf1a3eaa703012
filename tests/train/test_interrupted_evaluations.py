"""A signal at any event of a run that evaluates: the run goes on as if it had not come, with every value recorded and read once."""

import os
import signal

import pytest
import torch

from drivetrain.callbacks import EarlyStoppingCallback, ModelEmaCallback, StepBasedEvaluationCallback, TrainerCallback
from drivetrain.runtime.signals import StopSignals
from tests.train.tasks import make_data, make_model, make_trainer, train

CHOSEN = ("batch_end", "epoch_end", "eval_batch_end", "eval_end", "epoch_checkpoint")


class Send(TrainerCallback):
    """Sends a signal at one of the chosen events of a run."""

    def __init__(self, number=None, at=0):
        self.number, self.at, self.passed = number, at, 0

    def run_event(self, event, state, logger):
        if event.value in CHOSEN and StopSignals.active() is not None:
            self.passed += 1
            if self.passed == self.at:
                os.kill(os.getpid(), self.number)


class EvaluatesAll(TrainerCallback):
    """Evaluates on all sets again, inside the evaluation of one."""

    def on_eval_epoch_end(self, trainer, is_intermediate=False, **kwargs):
        history = trainer.run_history
        if not is_intermediate and not history.metric_name_prefix:
            history.set_metric_name_prefix("again_")
            trainer.evaluate_during_training(trainer.run.data.evaluation)
            history.set_metric_name_prefix("")


def run(folder, send, sets=False, callbacks=(), watch="eval_loss_epoch", **kwargs):
    """Return everything that a run ends with, and whether a signal has ended it."""
    metric = "eval_a_loss_epoch" if sets else watch
    ema = ModelEmaCallback(0.5, save_path=folder / "ema.pt", callbacks=[send], watch_metric=f"ema_model_{metric}")
    if watch.startswith("train"):
        ema = ModelEmaCallback(0.5, save_path=folder / "ema.pt", callbacks=[send])
    early = EarlyStoppingCallback(100, 0.2, watch_metric=metric)
    trainer = make_trainer(
        make_model(dropout=0.3), callbacks=[early, ema, *(make() for make in callbacks), send], seed=1
    )
    data, stopped = ({"a": make_data(8), "b": make_data(16)} if sets else make_data(16)), False
    try:
        train(
            trainer, num_epochs=2, eval_dataset=data, checkpoint_dir=folder / "checkpoints", checkpoint_every=None,
            resume_from="auto", async_checkpoint=False, scheduler_metric=metric, eval_dataloader_kwargs={"num_workers": 0},
            create_scheduler_fn=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.2), **kwargs,
        )  # fmt: skip
    except SystemExit:
        stopped = True
    history = trainer.run_history
    result = {
        "history": {name: list(history.get_metric_values(name)) for name in sorted(history.get_metric_names())},
        "weights": [parameter.tolist() for parameter in trainer.get_model().parameters()],
        "average": [weight.tolist() for weight in ema.ema_model.parameters()],
        "early": early.state_dict(),
        "best": ema.best_metric,
        "scheduler": trainer.scheduler.state_dict(),
        "epoch": history.current_epoch,
    }
    return result, stopped


RUNS = {
    "after epochs": {},
    "inside epochs": {"eval_interval": "2ba"},
    "by a function": {"eval_interval": lambda state, event: state.clock.batch % 2 == 0},
    "by a callback": {"callbacks": [lambda: StepBasedEvaluationCallback(2)]},
    "several sets": {"sets": True},
    "several sets inside epochs": {"sets": True, "eval_interval": "2ba"},
    "all sets inside one": {"sets": True, "callbacks": [EvaluatesAll]},
    "a metric of training": {"watch": "train_loss_epoch"},
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["stop", "save"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_signal_at_any_event_changes_nothing(tmp_path, kind, number):
    before = signal.signal(signal.SIGTERM, lambda *given: None)  # one that comes after the end is sent again
    try:
        count = Send()
        whole, _ = run(tmp_path / "whole", count, **RUNS[kind])
        for at in range(1, count.passed + 1):
            folder = tmp_path / str(at)
            result, stopped = run(folder, Send(number, at), **RUNS[kind])
            assert not stopped or number == signal.SIGTERM
            if stopped:
                result, _ = run(folder, Send(), **RUNS[kind])
            assert result == whole, f"{kind}: a signal at event {at}"
    finally:
        signal.signal(signal.SIGTERM, before)
