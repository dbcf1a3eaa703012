"""The average of the weights beside training."""

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.train.callbacks import ModelEmaCallback, TrainerCallback
from drivetrain.train.callbacks.ema import ModelEma
from tests.train.tasks import make_data, make_model, make_trainer, train, weights


class EveryUpdate(TrainerCallback):
    def __init__(self):
        self.weights = []

    def batch_end(self, state, logger):
        if state.clock.step > len(self.weights):
            self.weights.append(weights(state.model))


def averaged(start, updates, decay):
    average = start
    for new in updates:
        average = [decay * a + (1 - decay) * b for a, b in zip(average, new)]
    return average


def close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_average_is_updated_after_every_optimizer_step(tmp_path, accumulation):
    ema, every = ModelEmaCallback(decay=0.8, save_path=tmp_path / "ema.pt"), EveryUpdate()
    trainer = make_trainer(callbacks=[every, ema])
    start = weights(trainer.model)
    train(trainer, eval_dataset=make_data(8), num_epochs=2, gradient_accumulation_steps=accumulation)
    assert len(every.weights) == 6 // accumulation + (accumulation == 2)  # windows of 2 and 1 in each epoch
    close(weights(ema.ema_model.module), averaged(start, every.weights, 0.8))


def test_once_per_epoch_is_the_older_rule(tmp_path):
    ema, every = ModelEmaCallback(decay=0.8, save_path=tmp_path / "ema.pt", update_interval="1ep"), EveryUpdate()
    trainer = make_trainer(callbacks=[every, ema])
    start = weights(trainer.model)
    train(trainer, eval_dataset=make_data(8), num_epochs=2)
    close(weights(ema.ema_model.module), averaged(start, [every.weights[2], every.weights[5]], 0.8))


def test_the_average_is_evaluated_under_its_prefix_and_the_model_is_put_back(tmp_path):
    ema = ModelEmaCallback(decay=0.8, save_path=tmp_path / "ema.pt")
    trainer = make_trainer(callbacks=[ema], metrics={"first": lambda outputs, targets: outputs[:, 0].mean()})
    model, data = trainer.model, make_data(8)
    history = train(trainer, eval_dataset=data, num_epochs=2)
    assert trainer.model is model
    assert trainer.callback_handler.callbacks == (ema,)
    assert trainer.run_history.metric_name_prefix == ""
    for name in ("eval_loss_epoch", "ema_model_eval_loss_epoch", "ema_model_eval_first_epoch"):
        assert len(history.get_metric_values(name)) == 2
    with torch.no_grad():
        expected = nn.functional.cross_entropy(ema.ema_model.module(data.tensors[0]), data.tensors[1])
    assert history.get_latest_metric("ema_model_eval_loss_epoch") == pytest.approx(float(expected), rel=1e-6)


def test_the_best_average_is_saved_and_not_loaded(tmp_path):
    ema = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt")
    trainer = make_trainer(callbacks=[ema])
    train(trainer, eval_dataset=make_data(8), num_epochs=3)
    content = torch.load(tmp_path / "ema.pt", weights_only=True)
    assert set(content) == {"model_state_dict", "ema_model_eval_loss_epoch"}
    best = min(trainer.run_history.get_metric_values("ema_model_eval_loss_epoch"))
    assert content["ema_model_eval_loss_epoch"] == best == ema.best_metric
    saved = make_model()
    saved.load_state_dict(content["model_state_dict"])
    assert not all(map(torch.equal, weights(saved), weights(trainer.model)))


def test_without_evaluation_the_average_is_saved_after_every_epoch(tmp_path):
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", evaluate_during_training=False)
    trainer = make_trainer(callbacks=[ema])
    train(trainer, num_epochs=2)
    saved = make_model()
    saved.load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True)["model_state_dict"])
    close(weights(saved), weights(ema.ema_model.module))


def test_only_the_given_callbacks_attend_the_extra_evaluation(tmp_path):
    class Count(TrainerCallback):
        def __init__(self):
            self.count = 0

        def on_eval_epoch_end(self, trainer, **kwargs):
            self.count += 1

    class Inner(Count):
        pass

    outer, inner = Count(), Inner()
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", callbacks=[inner])
    train(make_trainer(callbacks=[ema, outer]), eval_dataset=make_data(8), num_epochs=2)
    assert (outer.count, inner.count) == (2, 2)


def test_evaluate_before_and_after_training_leaves_the_average_alone(tmp_path):
    trainer = make_trainer(callbacks=[ModelEmaCallback(save_path=tmp_path / "ema.pt")])
    assert set(trainer.evaluate(make_data(8))) == {"evaluation_loss"}
    train(trainer, eval_dataset=make_data(8))
    assert set(trainer.evaluate(make_data(8))) == {"evaluation_loss"}


def test_an_error_in_the_extra_evaluation_restores_model_callbacks_and_prefix(tmp_path):
    class Fail(TrainerCallback):
        def on_eval_epoch_start(self, trainer, **kwargs):
            raise RuntimeError("no evaluation today")

    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", callbacks=[Fail()])
    trainer = make_trainer(callbacks=[ema])
    model = trainer.model
    with pytest.raises(RuntimeError, match="no evaluation today"):
        train(trainer, eval_dataset=make_data(8))
    assert trainer.model is model
    assert trainer.callback_handler.callbacks == (ema,)
    assert trainer.run_history.metric_name_prefix == ""


def test_counters_of_batch_norms_are_copied(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    train(make_trainer(model, callbacks=[ema]), eval_dataset=make_data(8), num_epochs=2)
    assert ema.ema_model.module[1].num_batches_tracked == 6


def test_evaluations_inside_an_epoch_are_of_the_model_alone(tmp_path):
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    history = train(make_trainer(callbacks=[ema]), eval_dataset=make_data(8), eval_interval="1ba")
    assert len(history.get_metric_values("ema_model_eval_loss_epoch")) == 1


def test_a_resumed_run_continues_the_average(tmp_path):
    def make(name):
        ema = ModelEmaCallback(decay=0.8, save_path=tmp_path / f"{name}.pt")
        return make_trainer(callbacks=[ema]), ema

    settings = {"eval_dataset": make_data(8)}
    whole, whole_ema = make("whole")
    train(whole, num_epochs=3, **settings)
    first, _ = make("first")
    train(first, num_epochs=2, checkpoint_dir=tmp_path / "run", **settings)
    second, second_ema = make("second")
    train(second, num_epochs=3, checkpoint_dir=tmp_path / "run", resume_from="auto", **settings)
    assert all(map(torch.equal, weights(second_ema.ema_model.module), weights(whole_ema.ema_model.module)))


def test_another_class_may_keep_the_average(tmp_path):
    class Mine(ModelEma):
        pass

    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", model_ema=Mine)
    train(make_trainer(callbacks=[ema]), eval_dataset=make_data(8))
    assert isinstance(ema.ema_model, Mine)


def test_a_decay_outside_zero_to_one_is_refused():
    with pytest.raises(ConfigError, match="decay=2"):
        ModelEmaCallback(decay=2)


def test_strict_mode_accepts_what_the_callback_declares(tmp_path):
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    train(make_trainer(callbacks=[ema], strict=True), eval_dataset=make_data(8))


def test_a_mask_of_infinite_numbers_is_copied():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    model = Masked()
    average = ModelEma(model, decay=0.5)
    average.update(model)
    assert torch.equal(average.module.mask, model.mask)
