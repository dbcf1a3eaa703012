"""Evaluations inside an epoch and on several sets: what they record, who acts on them, and how they resume."""

import math
import os
import signal
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.train.callbacks import (
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from drivetrain.train.settings import TrainerPlaceholderValues
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_trainer, train, weights

LOSSES = [3.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


class Scripted(Trainer):
    """Evaluates to the losses of a list, one after the other."""

    losses = LOSSES
    evaluations = 0

    def calculate_eval_batch_loss(self, batch):
        return {"loss": torch.tensor(self.losses[self.evaluations]), "model_outputs": None, "batch_size": 8}

    def eval_epoch_end(self):
        self.evaluations += 1


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).float().mean()


def test_evaluations_inside_an_epoch_are_a_series_with_their_steps():
    trainer = make_trainer(metrics={"accuracy": accuracy})
    history = train(trainer, make_data(48), num_epochs=2, eval_dataset=make_data(16), eval_interval="2ba")
    assert history.get_metric_steps("intermediate_eval_loss") == [2, 4, 8, 10]
    assert history.get_metric_steps("intermediate_eval_accuracy") == [2, 4, 8, 10]
    assert history.get_metric_steps("eval_loss_epoch") == [6, 12]  # epochs have one value each, as ever
    assert all(map(math.isfinite, history.get_metric_values("intermediate_eval_loss")))


@pytest.mark.parametrize("metric", ["eval_loss_epoch", "intermediate_eval_loss"])
def test_early_stopping_counts_evaluations_inside_an_epoch(metric):
    stopping = EarlyStoppingCallback(early_stopping_patience=2, watch_metric=metric)
    trainer = make_trainer(cls=Scripted, callbacks=[stopping])
    train(trainer, make_data(80), eval_dataset=make_data(8), eval_interval="2ba")  # 3, 2, 4, 5: two without improvement
    assert trainer.state.clock.batch == 8 and stopping.best_metric == 2.0


def test_a_look_in_between_does_not_count_for_an_epochs_metric():
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make_trainer(cls=Scripted, callbacks=[StepBasedEvaluationCallback(2), stopping])
    train(trainer, make_data(80), eval_dataset=make_data(8))
    assert trainer.state.clock.batch == 10 and stopping.early_stopping_patience_counter == 0
    stopping = EarlyStoppingCallback(early_stopping_patience=1, watch_metric="intermediate_eval_loss")
    trainer = make_trainer(cls=Scripted, callbacks=[StepBasedEvaluationCallback(2), stopping])
    train(trainer, make_data(80), eval_dataset=make_data(8))
    assert trainer.state.clock.batch == 6  # 3, 2, 4


def test_the_best_model_of_an_evaluation_inside_an_epoch_is_saved_and_loaded(tmp_path):
    seen = {}

    class Look(TrainerCallback):
        def batch_end(self, state, logger):
            seen[state.clock.batch] = weights(state.model)

    best = SaveBestModelCallback(tmp_path / "best.pt")
    trainer = make_trainer(cls=Scripted, callbacks=[Look(), best])
    train(trainer, make_data(64), eval_dataset=make_data(8), eval_interval="2ba")
    assert (best.best_metric, best.best_metric_epoch, best.best_metric_step) == (2.0, 1, 4)
    assert all(map(torch.equal, weights(trainer.model), seen[4]))
    assert torch.load(tmp_path / "best.pt", weights_only=True)["eval_loss_epoch"] == 2.0


def test_a_metric_that_a_callback_records_later_in_the_evaluation_is_seen_at_once(tmp_path):
    class Mine(TrainerCallback):
        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("mine", 1.0 / trainer.state.clock.batch)

    best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="mine")
    trainer = make_trainer(callbacks=[best, Mine()])  # the one that watches comes first
    train(trainer, make_data(48), eval_dataset=make_data(8), eval_interval="4ba")
    assert best.best_metric == 1 / 6


@pytest.mark.parametrize("metric", ["eval_loss_epoch", "intermediate_eval_loss"])
def test_a_plateau_schedule_sees_evaluations_inside_an_epoch(metric):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)

    trainer = make_trainer(cls=Scripted, lr=1.0)
    train(
        trainer, make_data(64), eval_dataset=make_data(8), eval_interval="2ba", create_scheduler_fn=scheduler,
        scheduler_metric=metric,
    )  # fmt: skip
    worse = 2 if metric == "eval_loss_epoch" else 1  # 3, 2, 4 inside the epoch, 5 at its end
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5**worse


def test_watching_a_training_metric_waits_for_the_epoch():
    stopping = EarlyStoppingCallback(watch_metric="train_loss_epoch", early_stopping_threshold=0.0)
    trainer = make_trainer(cls=Scripted, callbacks=[stopping])
    train(trainer, make_data(48), eval_dataset=make_data(8), eval_interval="2ba")
    assert stopping.best_metric is not None


def test_an_intermediate_metric_that_never_comes_is_named():
    trainer = make_trainer(callbacks=[EarlyStoppingCallback(watch_metric="intermediate_eval_loss")])
    with pytest.raises(ValueError, match="intermediate_eval_loss"):
        train(trainer, eval_dataset=make_data(8))
    rare = make_trainer(callbacks=[EarlyStoppingCallback(watch_metric="intermediate_eval_loss")])
    train(rare, num_epochs=2, eval_dataset=make_data(8), eval_interval="5ba")  # not in the first epoch of 3 batches
    assert rare.state.clock.batch == 6


def test_the_average_of_the_weights_is_evaluated_inside_an_epoch_too(tmp_path):
    average = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    trainer = make_trainer(callbacks=[average])
    history = train(trainer, make_data(48), eval_dataset=make_data(8), eval_interval="2ba")
    assert history.get_metric_steps("ema_model_intermediate_eval_loss") == [2, 4]
    assert history.get_metric_steps("ema_model_eval_loss_epoch") == [6]
    values = [
        *history.get_metric_values("ema_model_intermediate_eval_loss"),
        history.get_latest_metric("ema_model_eval_loss_epoch"),
    ]
    assert average.best_metric == min(values)


# ---------------------------------------------------------------------- resuming


def run_with_plateau(folder, epochs=2, callbacks=(), **kwargs):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    stopping = EarlyStoppingCallback(early_stopping_patience=50)
    trainer = make_trainer(callbacks=[stopping, *callbacks], lr=0.5)
    history = train(
        trainer, make_data(48), num_epochs=epochs, eval_dataset=make_data(16), eval_interval="2ba",
        create_scheduler_fn=scheduler, checkpoint_dir=folder, checkpoint_every="1ba", keep_checkpoints=100,
        async_checkpoint=False, **kwargs,
    )  # fmt: skip
    return trainer, history, stopping


@pytest.mark.parametrize("batch", [3, 4, 5, 6])
def test_a_run_resumed_at_an_evaluation_inside_an_epoch_goes_on_bit_for_bit(tmp_path, batch):
    whole, expected, counts = run_with_plateau(tmp_path / "whole")
    folder = next((tmp_path / "whole").rglob(f"*ep0-ba{batch}*"))
    resumed, history, count = run_with_plateau(tmp_path / "resumed", resume_from=folder)
    assert all(map(torch.equal, weights(resumed.model), weights(whole.model)))
    assert repr(history) == repr(expected)
    assert count.early_stopping_patience_counter == counts.early_stopping_patience_counter


def test_an_evaluation_that_a_limit_left_out_comes_after_resuming(tmp_path):
    whole, expected, _ = run_with_plateau(tmp_path / "whole", epochs=1)
    run_with_plateau(tmp_path / "cut", epochs=1, max_num_train_steps=4)
    resumed, history, _ = run_with_plateau(tmp_path / "cut", epochs=1, resume_from="auto")
    assert history.get_metric_steps("intermediate_eval_loss") == expected.get_metric_steps("intermediate_eval_loss")
    assert all(map(torch.equal, weights(resumed.model), weights(whole.model)))


def test_an_evaluation_that_a_signal_left_out_comes_after_resuming(tmp_path):
    class Interrupt(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            if trainer.state.clock.batch == 3:  # the fourth batch, after which an evaluation is due
                os.kill(os.getpid(), signal.SIGTERM)

    whole, expected, _ = run_with_plateau(tmp_path / "whole", epochs=1)
    with pytest.raises(SystemExit):
        run_with_plateau(tmp_path / "cut", epochs=1, callbacks=[Interrupt()])
    resumed, history, _ = run_with_plateau(tmp_path / "cut", epochs=1, resume_from="auto")
    assert repr(history) == repr(expected)
    assert all(map(torch.equal, weights(resumed.model), weights(whole.model)))


def test_an_evaluation_at_the_end_of_an_epoch_that_a_signal_cut_short_is_made_again(tmp_path):
    class Interrupt(TrainerCallback):
        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            if trainer.state.clock.batch == 3 and not trainer.state.is_intermediate:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks, **kwargs):
        trainer = make_trainer(callbacks=callbacks)
        return train(trainer, num_epochs=3, eval_dataset=make_data(16), eval_interval="3ba", **kwargs)

    with pytest.raises(SystemExit):
        run(Interrupt(), checkpoint_dir=tmp_path)
    assert repr(run(checkpoint_dir=tmp_path, resume_from="auto")) == repr(run())


# ---------------------------------------------------------------------- several sets


def two_sets():
    return {"clean": make_data(16), "noisy": make_data(24)}


def test_each_of_several_evaluation_sets_has_metrics_of_its_own():
    trainer = make_trainer(metrics={"accuracy": accuracy})
    history = train(trainer, make_data(32), eval_dataset=two_sets(), eval_interval="2ba")
    assert set(history.get_metric_names()) == {
        "train_loss_epoch", "eval_clean_loss_epoch", "eval_clean_accuracy_epoch", "eval_noisy_loss_epoch",
        "eval_noisy_accuracy_epoch", "intermediate_eval_clean_loss", "intermediate_eval_clean_accuracy",
        "intermediate_eval_noisy_loss", "intermediate_eval_noisy_accuracy",
    }  # fmt: skip
    both = trainer.evaluate(two_sets())
    alone = {name: trainer.evaluate(data)["evaluation_loss"] for name, data in two_sets().items()}
    assert {name: both[f"evaluation_{name}_loss"] for name in alone} == alone
    assert {name: history.get_latest_metric(f"eval_{name}_loss_epoch") for name in alone} == alone
    assert set(both) == {f"evaluation_{name}_{metric}" for name in alone for metric in ("loss", "accuracy")}


def test_an_interval_of_zero_evaluates_never():
    history = train(make_trainer(), make_data(8), num_epochs=2, eval_dataset=make_data(8), eval_interval=0)
    assert set(history.get_metric_names()) == {"train_loss_epoch"}


def test_evaluate_goes_on_with_the_sets_of_the_training_run():
    trainer = make_trainer()
    train(trainer, eval_dataset=two_sets())
    assert set(trainer.evaluate()) == {"evaluation_clean_loss", "evaluation_noisy_loss"}
    assert list(trainer.eval_dataset) == ["clean", "noisy"]


def test_evaluate_returns_its_own_numbers_only():
    trainer = make_trainer()
    trainer.evaluate(two_sets())
    numbers = trainer.evaluate(make_data(10), reset_run_history=False)
    assert set(numbers) == {"evaluation_loss"}
    again = trainer.evaluate(make_data(10), reset_run_history=False)  # the same name once more
    assert again == numbers and len(trainer.run_history.get_metric_values("evaluation_loss")) == 2


def test_callbacks_and_hooks_meet_each_set_under_its_name(capsys):
    seen, built = [], []

    class Look(TrainerCallback):
        def on_eval_epoch_end(self, trainer, **kwargs):
            seen.append((trainer.state.dataloader_label, len(trainer.state.dataloader)))
            trainer.log("seen", 1.0, weight=1)

        def on_train_step_start(self, trainer, **kwargs):
            assert trainer.state.dataloader_label == "train"

    class Mine(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            built.append(len(self.eval_dataset))
            return DataLoader(self.eval_dataset, batch_size=4)

    callbacks = [PrintProgressCallback(), ProgressBarCallback(), Look(), LogMetricsCallback()]
    history = train(make_trainer(cls=Mine, callbacks=callbacks), eval_dataset=two_sets())
    assert built == [16, 24] and seen == [("clean", 4), ("noisy", 6)]
    assert history.get_metric_values("eval_noisy_seen_epoch") == [1.0]
    lines = capsys.readouterr().out.splitlines()
    words = [line.split(":")[0].split("  ")[0] for line in lines if "valuation on" in line or line.startswith("eval_")]
    assert words == [
        "Starting evaluation on clean", "evaluation on clean", "eval_clean_loss_epoch",
        "Starting evaluation on noisy", "evaluation on noisy", "eval_noisy_loss_epoch",
    ]  # fmt: skip


def test_limits_placeholders_and_averages_work_with_several_sets(tmp_path):
    seen = []

    class Count(TrainerCallback):
        def on_eval_step_end(self, trainer, **kwargs):
            seen.append(trainer.state.dataloader_label)

    def batches(callbacks, **kwargs):
        seen.clear()
        train(make_trainer(callbacks=[*callbacks, Count()]), eval_dataset=two_sets(), **kwargs)
        return seen.count("clean"), seen.count("noisy")

    assert batches([]) == (2, 3)
    assert batches([], limit_eval_batches=1) == batches([LimitBatchesCallback(1)]) == (1, 1)
    assert batches([LimitEvalStepsCallback(2, limit_intermediate_only=False)]) == (2, 2)
    assert batches([], sanity_eval_batches=1) == (3, 4)
    average = ModelEmaCallback(save_path=tmp_path / "ema.pt", watch_metric="ema_model_eval_noisy_loss_epoch")
    history = train(make_trainer(callbacks=[average]), eval_dataset=two_sets())
    for name in two_sets():
        assert len(history.get_metric_values(f"ema_model_eval_{name}_loss_epoch")) == 1
    lengths = []

    def scheduler(optimizer, length):
        lengths.append(length)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    train(
        make_trainer(), eval_dataset=two_sets(),
        create_scheduler_fn=partial(scheduler, length=TrainerPlaceholderValues.EVAL_DATALOADER_LEN),
    )  # fmt: skip
    assert lengths == [5]


@pytest.mark.parametrize("metric", ["eval_loss_epoch", "ema_model_eval_loss_epoch", "intermediate_eval_loss"])
def test_watching_a_metric_without_the_name_of_a_set_is_refused_with_the_right_names(metric, tmp_path):
    trainer = make_trainer(callbacks=[SaveBestModelCallback(tmp_path / "x.pt", watch_metric=metric)])
    right = metric.replace("eval_", "eval_noisy_")
    with pytest.raises(ValueError, match=rf"SaveBestModelCallback watches '{metric}'.*or '{right}'"):
        train(trainer, eval_dataset=two_sets())
    trainer = make_trainer(callbacks=[SaveBestModelCallback(tmp_path / "x.pt", watch_metric="eval_noisy_loss_epoch")])
    train(trainer, eval_dataset=two_sets())
    assert (tmp_path / "x.pt").exists()


def test_a_mapping_that_holds_no_named_sets_is_refused():
    for wrong in ({}, {0: make_data(8)}):
        with pytest.raises(ConfigError, match="datasets by name"):
            train(make_trainer(), eval_dataset=wrong)


def test_a_run_with_several_sets_resumes(tmp_path):
    whole, expected, _ = run_on_two_sets(tmp_path / "a", 3)
    run_on_two_sets(tmp_path / "b", 1)
    resumed, history, best = run_on_two_sets(tmp_path / "b", 3, resume_from="auto")
    assert all(map(torch.equal, weights(resumed.model), weights(whole.model)))
    assert repr(history) == repr(expected)
    assert best.best_metric == min(expected.get_metric_values("eval_noisy_loss_epoch"))


def run_on_two_sets(folder, epochs, **kwargs):
    best = SaveBestModelCallback(folder / "best.pt", watch_metric="eval_noisy_loss_epoch", load_saved_checkpoint=False)
    trainer = make_trainer(callbacks=[best])
    history = train(trainer, num_epochs=epochs, eval_dataset=two_sets(), checkpoint_dir=folder / "c", **kwargs)
    return trainer, history, best


def evaluate_inside_epochs_on_several_ranks():
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make_trainer(cls=Scripted, callbacks=[stopping], seed=1)
    history = train(trainer, make_data(160), eval_dataset=make_data(9), eval_interval="2ba")
    sets = make_trainer(seed=1).evaluate({"clean": make_data(9), "noisy": make_data(5)})
    return trainer.state.clock.batch, history.get_metric_steps("intermediate_eval_loss"), sets


def test_ranks_stop_together_at_an_evaluation_inside_an_epoch(world2):
    first, second = world2(evaluate_inside_epochs_on_several_ranks)
    assert first == second and first[:2] == (8, [2, 4, 6, 8])
    alone = make_trainer(seed=1).evaluate({"clean": make_data(9), "noisy": make_data(5)})
    assert first[2] == pytest.approx(alone)


def test_evaluation_data_that_can_be_read_only_once_is_named():
    batches = (make_data(8)[:] for _ in range(2))
    with pytest.warns(DrivetrainWarning, match="the evaluation data is a generator"):
        train(make_trainer(), num_epochs=2, eval_dataset=batches)
