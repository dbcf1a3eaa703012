"""The training loop against hand-written ones."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.algorithms import MixUp
from drivetrain.core.errors import ConfigError, NonFiniteLossError, StopTrainingError
from drivetrain.train.callbacks import TerminateOnNaNCallback, TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Lines, Losses, make_data, make_model, make_trainer, train, weights


def plain_loop(model, data, batches, lr=0.1, epochs=1, clip=None):
    """What a user writes by hand: SGD with momentum over the given row slices."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for rows in batches:
            x, y = (tensor[rows] for tensor in data.tensors)
            loss = nn.functional.cross_entropy(model(x), y)
            losses.append(loss.item())
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def slices(rows, size):
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def test_losses_and_weights_equal_a_hand_written_loop_bit_for_bit():
    data, losses = make_data(30), Losses()
    trainer = make_trainer(callbacks=[losses])
    train(trainer, data, num_epochs=3)
    model = make_model()
    expected = plain_loop(model, data, slices(30, 8), epochs=3)
    assert losses.values == expected
    assert all(map(torch.equal, weights(trainer.model), weights(model)))


def test_clipping_by_norm_equals_a_hand_written_loop():
    data = make_data()
    trainer = make_trainer()
    train(trainer, data, gradient_clip_norm=0.05)
    model = make_model()
    plain_loop(model, data, slices(24, 8), clip=0.05)
    assert all(map(torch.equal, weights(trainer.model), weights(model)))
    assert trainer.last_grad_norm > 0.05


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_batch_size": 8, "gradient_accumulation_steps": 4},
        {"per_device_batch_size": 32, "microbatch_size": 8},
        {"per_device_batch_size": 32, "microbatch_size": 5},
        {"per_device_batch_size": 16, "microbatch_size": 3, "gradient_accumulation_steps": 2},
    ],
)
def test_accumulated_gradients_equal_full_batch_gradients(settings):
    data, double = make_data(160, dtype=torch.float64), torch.float64
    whole, split = make_trainer(make_model(dtype=double)), make_trainer(make_model(dtype=double))
    train(whole, data, num_epochs=4, per_device_batch_size=32)
    train(split, data, num_epochs=4, **settings)
    for a, b in zip(weights(whole.model), weights(split.model)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_short_last_window_is_the_mean_over_its_own_samples():
    data, double = make_data(35, dtype=torch.float64), torch.float64  # batches of 8, 8, 8, 8, 3
    seen = []

    class Look(TrainerCallback):
        def after_train_batch(self, state, logger):
            seen.append([p.grad.clone() for p in state.model.parameters()])

    trainer = make_trainer(make_model(dtype=double), lr=0.0, callbacks=[Look()])
    train(trainer, data, gradient_accumulation_steps=4)
    assert len(seen) == 2
    model = make_model(dtype=double)
    for gradients, rows in zip(seen, (slice(0, 32), slice(32, 35))):
        x, y = (tensor[rows] for tensor in data.tensors)
        expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        for ours, theirs in zip(gradients, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-14)


def test_unequal_token_counts_are_weighted_by_their_counts():
    data, double = make_data(16, dtype=torch.float64), torch.float64

    class Weighted(Trainer):
        def calculate_train_batch_loss(self, batch):
            x, y = batch
            keep = torch.arange(len(x)) < (2 if self.state.step == 0 else 6)  # 2 items, then 6
            outputs = self.forward(x[keep])
            loss = self.compute_loss(outputs, y[keep])
            return {"loss": loss, "model_outputs": outputs, "batch_size": len(x), "num_items": int(keep.sum())}

    trainer = make_trainer(make_model(dtype=double), lr=0.1, cls=Weighted)
    train(trainer, data, gradient_accumulation_steps=2)
    model = make_model(dtype=double)
    x, y = data.tensors
    rows = torch.tensor([0, 1, 8, 9, 10, 11, 12, 13])
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    for a, b in zip(weights(trainer.model), weights(model)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_the_epoch_loss_does_not_depend_on_accumulation():
    histories = [train(make_trainer(lr=0.0), gradient_accumulation_steps=steps) for steps in (1, 3)]
    first, second = (history.get_latest_metric("train_loss_epoch") for history in histories)
    assert first == pytest.approx(second, rel=1e-6)


def test_clipping_runs_once_per_update():
    class Counting(Trainer):
        clips = 0

        def _clip_gradients(self):
            self.clips += 1
            super()._clip_gradients()

    trainer = make_trainer(cls=Counting)
    train(trainer, make_data(64), gradient_accumulation_steps=4, gradient_clip_value=0.1)
    assert trainer.clips == 2


def test_the_first_limit_reached_ends_the_run():
    trainer = make_trainer()
    train(trainer, make_data(64), num_epochs=1, max_num_train_steps=20)
    assert trainer.state.clock.step == 8
    trainer = make_trainer()
    train(trainer, make_data(64), num_epochs=9, max_num_train_steps=11)
    assert trainer.state.clock.step == 11


@pytest.mark.parametrize(("duration", "batches"), [("2ep", 6), ("5ba", 5), ("33sp", 5), (1, 3), ("4st", 4)])
def test_max_duration_is_counted_in_its_unit(duration, batches):
    trainer = make_trainer()
    train(trainer, num_epochs=None, max_duration=duration)
    assert trainer.state.clock.batch == batches


def test_the_order_of_hooks_and_events_is_the_documented_one():
    seen = []

    def recorded(name):
        def hook(self, *args, **kwargs):
            seen.append(name)
            return getattr(Trainer, name)(self, *args, **kwargs)

        return hook

    Spelled = type("Spelled", (Trainer,), {name: recorded(name) for name in HOOKS})

    class Watcher(TrainerCallback):
        def run_event(self, event, state, logger):
            seen.append(event.name)

    trainer = make_trainer(cls=Spelled, callbacks=[Watcher()])
    seen.clear()
    train(trainer, make_data(8), eval_dataset=make_data(8))
    assert seen == EXPECTED


def test_the_loop_calls_overridden_hooks_and_else_the_stepper_with_the_same_result():
    class Same(Trainer):
        def backward_step(self, loss):
            super().backward_step(loss)

        def optimizer_step(self):
            super().optimizer_step()

        def scheduler_step(self):
            super().scheduler_step()

        def optimizer_zero_grad(self):
            super().optimizer_zero_grad()

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    plain, same = make_trainer(), make_trainer(cls=Same)
    for trainer in (plain, same):
        train(trainer, make_data(24), num_epochs=2, create_scheduler_fn=schedule)
    stepper, calls = plain.run.stepper, plain._choose_calls()
    assert (calls.backward, calls.step, calls.clear) == (torch.Tensor.backward, stepper.step, stepper.clear)
    calls = same._choose_calls()
    assert (calls.backward, calls.step, calls.clear) == (
        same.backward_step,
        same.optimizer_step,
        same.optimizer_zero_grad,
    )
    assert not hasattr(plain, "_calls")  # bound methods would hold the trainer
    assert all(map(torch.equal, weights(plain.model), weights(same.model)))
    assert plain.optimizer.param_groups[0]["lr"] == same.optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize(("interval", "times"), [("step", 6), ("epoch", 2)])
def test_a_scheduler_step_of_ones_own_needs_no_scheduler(interval, times):
    class Own(Trainer):
        calls = 0

        def scheduler_step(self):
            self.calls += 1

    trainer = make_trainer(cls=Own)
    train(trainer, make_data(24), num_epochs=2, scheduler_interval=interval)
    assert trainer.calls == times


def test_a_guest_who_comes_during_the_run_is_heard():
    seen = []

    class Late(TrainerCallback):
        def after_forward(self, state, logger):
            seen.append(state.clock.batch)

    class Door(TrainerCallback):
        def batch_end(self, state, logger):
            if state.clock.batch == 2:
                trainer.callback_handler.add_callback(Late())

    trainer = make_trainer(callbacks=[Door()])
    train(trainer, make_data(40))
    assert seen == [2, 3, 4]


def test_a_guest_who_comes_during_an_evaluation_is_heard_afterwards():
    seen = []

    class Late(TrainerCallback):
        def after_forward(self, state, logger):
            seen.append(state.clock.batch)

    class Door(TrainerCallback):
        def eval_start(self, state, logger):
            if state.clock.epoch == 1:
                trainer.callback_handler.add_callback(Late())

    trainer = make_trainer(callbacks=[Door()])
    train(trainer, make_data(16), num_epochs=2, eval_dataset=make_data(8), eval_interval="1ep")
    assert seen == [2, 3]  # the second epoch's batches


def test_an_optimizer_that_clears_its_own_way_is_asked_to():
    cleared = []

    class Counting(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            cleared.append(set_to_none)
            super().zero_grad(set_to_none)

    model = make_model()
    trainer = Trainer(model, nn.functional.cross_entropy, Counting(model.parameters(), lr=0.1), callbacks=())
    train(trainer, make_data(16))
    assert cleared == [True, True, True]  # before the first step, and after each
    trainer = make_trainer()
    train(trainer, make_data(16))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_hook_put_on_the_instance_is_called():
    trainer, called = make_trainer(), []
    trainer.optimizer_step = lambda: (called.append(1), trainer.optimizer.step())
    train(trainer, make_data(16))
    assert len(called) == trainer.state.clock.step == 2


HOOKS = {
    "training_run_start", "train_epoch_start", "calculate_train_batch_loss", "backward_step", "optimizer_step", "scheduler_step",
    "optimizer_zero_grad", "train_epoch_end", "eval_epoch_start", "calculate_eval_batch_loss", "eval_epoch_end",
    "training_run_epoch_end", "training_run_end",
}  # fmt: skip
EXPECTED = [
    "BEFORE_LOAD",
    "AFTER_LOAD",
    "training_run_start",
    "FIT_START",
    "train_epoch_start",
    "EPOCH_START",
    "BEFORE_DATALOADER",
    "AFTER_DATALOADER",
    "BATCH_START",
    "BEFORE_TRAIN_BATCH",
    "BEFORE_FORWARD",
    "calculate_train_batch_loss",
    "AFTER_FORWARD",
    "BEFORE_LOSS",
    "AFTER_LOSS",
    "STEP_OUTPUT",
    "BEFORE_BACKWARD",
    "backward_step",
    "AFTER_BACKWARD",
    "AFTER_TRAIN_BATCH",
    "BEFORE_STEP",
    "optimizer_step",
    "AFTER_STEP",
    "scheduler_step",
    "optimizer_zero_grad",
    "BATCH_END",
    "BATCH_CHECKPOINT",
    "train_epoch_end",
    "EPOCH_END",
    "EVAL_BEFORE_ALL",
    "eval_epoch_start",
    "EVAL_START",
    "EVAL_BATCH_START",
    "EVAL_BEFORE_FORWARD",
    "calculate_eval_batch_loss",
    "EVAL_AFTER_FORWARD",
    "EVAL_BATCH_END",
    "eval_epoch_end",
    "EVAL_END",
    "EVAL_AFTER_ALL",
    "training_run_epoch_end",
    "EPOCH_CHECKPOINT",
    "training_run_end",
    "FIT_END",
]


def test_a_stop_raised_in_a_callback_ends_the_run_in_good_order():
    class Stopper(TrainerCallback):
        ended = []

        def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):
            if step == 1:
                raise StopTrainingError("enough")

        def on_stop_training_error(self, trainer, **kwargs):
            self.ended.append("stop")

        def on_training_run_end(self, trainer, **kwargs):
            self.ended.append("end")

    trainer = make_trainer(callbacks=[Stopper()])
    train(trainer, num_epochs=5)
    assert Stopper.ended == ["stop", "end"]
    assert trainer.state.clock.batch == 1


def test_a_non_finite_loss_raises_after_an_orderly_end():
    ended = []

    class End(TrainerCallback):
        def on_training_run_end(self, trainer, **kwargs):
            ended.append(True)

    class Broken(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (math.nan if self.state.step == 2 else 1.0)}

    trainer = make_trainer(cls=Broken, callbacks=[TerminateOnNaNCallback(), End()])
    with pytest.raises(NonFiniteLossError) as caught:
        train(trainer)
    assert ended and caught.value.epoch == 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_any_other_error_reaches_the_user_unchanged_and_guests_are_told():
    told = []

    class Listener(TrainerCallback):
        def on_exception(self, trainer, exception, **kwargs):
            told.append(exception)

        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            self.mispelt_attribute

    with pytest.raises(AttributeError, match="mispelt_attribute") as caught:
        train(make_trainer(callbacks=[Listener()]))
    assert told == [caught.value]


def test_train_evaluate_and_train_again():
    trainer = make_trainer()
    train(trainer, num_epochs=2)
    first = trainer.evaluate(make_data(), per_device_batch_size=7)
    assert set(first) == {"evaluation_loss"}
    history = train(trainer, num_epochs=1)
    assert len(history.get_metric_values("train_loss_epoch")) == 1
    assert isinstance(trainer.model, nn.Sequential)


def test_a_second_run_without_a_scheduler_has_a_constant_rate():
    trainer = make_trainer()
    train(trainer, create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.1 * 0.5**3)
    train(trainer)
    assert trainer.optimizer.param_groups[0]["lr"] == rate


def test_evaluation_counts_every_sample_once_and_restores_modes_and_generators():
    data = make_data(11)
    trainer = make_trainer(make_model(dropout=0.5))
    trainer.model[0].eval()
    modes = [module.training for module in trainer.model.modules()]
    state = torch.get_rng_state()
    result = trainer.evaluate(data, per_device_batch_size=4)
    trainer.model.eval()
    expected = nn.functional.cross_entropy(trainer.model(data.tensors[0]), data.tensors[1]).item()
    trainer.model.train()
    assert result["evaluation_loss"] == pytest.approx(expected, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    trainer.model[0].eval()
    assert [module.training for module in trainer.model.modules()] == modes


def test_metrics_and_logged_values_are_weighted_means():
    data = make_data(11)

    class Logging(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            self.state.batch_output = output
            self.log("rows", float(len(batch[1])))
            return output

    trainer = make_trainer(cls=Logging, metrics={"accuracy": lambda out, y: (out.argmax(-1) == y).float().mean()})
    history = train(trainer, data, eval_dataset=data, per_device_batch_size=4)
    outputs = trainer.predict(data, per_device_batch_size=3)
    expected = (outputs.argmax(-1) == data.tensors[1]).float().mean().item()
    assert history.get_latest_metric("eval_accuracy_epoch") == pytest.approx(expected)
    assert history.get_latest_metric("train_rows_epoch") == pytest.approx((4 * 4 + 4 * 4 + 3 * 3) / 11)


def test_predictions_come_in_dataset_order_each_once():
    data = make_data(11)
    trainer = make_trainer()
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(data.tensors[0])
    torch.testing.assert_close(trainer.predict(data, per_device_batch_size=4), expected)


def test_eval_interval_inside_an_epoch_restores_train_mode_and_keeps_one_entry_per_epoch():
    seen = []

    class Look(TrainerCallback):
        def on_eval_epoch_end(self, trainer, is_intermediate, **kwargs):
            seen.append((trainer.state.clock.batch, is_intermediate))

        def batch_start(self, state, logger):
            assert state.model.training

    trainer = make_trainer(callbacks=[Look()])
    history = train(trainer, make_data(48), eval_dataset=make_data(), eval_interval="2ba")
    assert seen == [(2, True), (4, True), (6, False)]
    assert len(history.get_metric_values("eval_loss_epoch")) == 1


def test_loaders_without_a_length_and_batch_samplers_train():
    class Stream(IterableDataset):
        def __iter__(self):
            x, y = make_data(20).tensors
            yield from zip(x, y)

    trainer = make_trainer()
    train(trainer, Stream(), train_dataloader_kwargs={"num_workers": 0}, gradient_accumulation_steps=2)
    assert (trainer.state.clock.batch, trainer.state.clock.step) == (3, 2)
    trainer = make_trainer()
    sampler = [[0, 1], [5, 3, 2]]
    train(trainer, train_dataloader_kwargs={"batch_sampler": sampler})
    assert trainer.state.clock.sample == 5


def test_a_ready_loader_is_used_as_it_is():
    data = make_data()
    loader, losses = DataLoader(data, batch_size=6), Losses()
    trainer = make_trainer(callbacks=[losses])
    trainer.train(loader, num_epochs=1)
    assert trainer._train_dataloader is loader
    assert losses.values == plain_loop(make_model(), data, slices(24, 6))


def test_fast_dev_run_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from drivetrain.train.callbacks import SaveBestModelCallback

    trainer = make_trainer(callbacks=[SaveBestModelCallback()])
    train(trainer, num_epochs=50, eval_dataset=make_data(), fast_dev_run=True, checkpoint_dir=tmp_path / "c")
    assert trainer.state.clock.batch == 1
    assert list(tmp_path.iterdir()) == []


def test_overfit_batches_trains_and_evaluates_on_the_same_first_batches():
    seen = []

    class Look(TrainerCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append(("train", batch[1].tolist()))

        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            seen.append(("eval", batch[1].tolist()))

    trainer = make_trainer(callbacks=[Look()])
    train(trainer, overfit_batches=2, num_epochs=2, train_dataloader_kwargs=None)
    labels = make_data().tensors[1]
    once = [labels[:8].tolist(), labels[8:16].tolist()]
    assert seen == [("train", o) for o in once] * 1 + [("eval", o) for o in once] + [("train", o) for o in once] + [
        ("eval", o) for o in once
    ]


def test_lr_find_puts_everything_back():
    torch.manual_seed(3)
    trainer = make_trainer()
    train(trainer)
    before = (
        weights(trainer.model),
        torch.get_rng_state(),
        trainer.optimizer.state_dict()["state"][0]["momentum_buffer"].clone(),
    )
    names = list(trainer.run_history.get_metric_names())
    result = trainer.lr_find(make_data(), num_steps=40, max_lr=10.0, per_device_batch_size=4)
    assert len(result.lrs) == len(result.losses) and result.suggestion is not None
    assert all(map(torch.equal, weights(trainer.model), before[0]))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(trainer.optimizer.state_dict()["state"][0]["momentum_buffer"], before[2])
    assert list(trainer.run_history.get_metric_names()) == names and trainer.optimizer.param_groups[0]["lr"] == 0.1


def test_sanity_evaluation_leaves_history_and_generators_alone():
    torch.manual_seed(5)
    plain, checked = make_trainer(make_model(dropout=0.5)), make_trainer(make_model(dropout=0.5))
    torch.manual_seed(5)
    a = train(plain, eval_dataset=make_data())
    torch.manual_seed(5)
    b = train(checked, eval_dataset=make_data(), sanity_eval_batches=2)
    assert a.get_metric_values("eval_loss_epoch") == b.get_metric_values("eval_loss_epoch")
    assert all(map(torch.equal, weights(plain.model), weights(checked.model)))


def test_bf16_runs_the_model_under_autocast_and_gives_overridden_hooks_float32():
    dtypes = []

    class Look(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.forward(batch[0])
            dtypes.append(outputs.dtype)
            return {"loss": self.compute_loss(outputs, batch[1]), "model_outputs": outputs, "batch_size": len(batch[1])}

    train(make_trainer(cls=Look, precision="bf16"))
    assert set(dtypes) == {torch.float32}
    trainer = make_trainer(precision="bf16")
    history = train(trainer)
    assert trainer.state.outputs.dtype is torch.bfloat16
    assert math.isfinite(history.get_latest_metric("train_loss_epoch"))


def test_the_composer_form_works():
    data = make_data()
    trainer = make_trainer(
        train_dataloader=DataLoader(data, batch_size=8),
        eval_dataloader=DataLoader(data, batch_size=8),
        max_duration="2ep",
        device="cpu",
        seed=1,
    )
    history = trainer.fit()
    assert len(history.get_metric_values("eval_loss_epoch")) == 2


def test_draws_inside_train_follow_the_users_seed():
    drawn = []

    class Draw(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            drawn.append(torch.rand(1).item())

    for seed in (0, 123):
        trainer = make_trainer(callbacks=[Draw()])
        torch.manual_seed(seed)
        train(trainer)
    assert drawn[0] != drawn[1]


def test_a_dict_batch_meets_a_model_with_its_own_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, labels):
            logits = self.layer(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    x, y = make_data().tensors
    data = [{"x": x[k], "labels": y[k]} for k in range(len(x))]
    model = Model()
    trainer = Trainer(
        model,
        None,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=(),
        metrics={"mean": lambda out, y: out.mean()},
    )
    history = trainer.train(
        data,
        num_epochs=1,
        eval_dataset=data,
        train_dataloader_kwargs={"num_workers": 0},
        eval_dataloader_kwargs={"num_workers": 0},
    )
    assert {"train_loss_epoch", "eval_loss_epoch", "eval_mean_epoch"} <= set(history.get_metric_names())


def test_seed_spellings_of_callbacks_are_called():
    calls = []

    class Old(TrainerCallback):
        def on_train_run_begin(self, trainer, **kwargs):
            calls.append("run begin")

        def on_train_epoch_begin(self, trainer, **kwargs):
            calls.append("epoch begin")

        def on_train_step_begin(self, trainer, **kwargs):
            calls.append("step begin")

        def on_eval_epoch_begin(self, trainer, **kwargs):
            calls.append("eval begin")

        def on_train_run_end(self, trainer, **kwargs):
            calls.append("run end")

    train(make_trainer(callbacks=[Old()]), make_data(8), eval_dataset=make_data(8))
    assert calls == ["run begin", "epoch begin", "step begin", "eval begin", "run end"]


def test_the_constructor_accepts_anything():
    trainer = Trainer("a", "b", "c")
    assert (trainer.model, trainer.loss_func, trainer.optimizer) == ("a", "b", "c")


def test_a_tensor_dataset_needs_no_workers():
    trainer = make_trainer()
    trainer.train_dataset = TensorDataset(torch.zeros(3))
    kwargs = trainer.get_default_train_dl_kwargs(4)
    assert set(kwargs) == {"shuffle", "pin_memory", "batch_size", "num_workers", "worker_init_fn"}
    assert kwargs["num_workers"] == 0 and kwargs["shuffle"] is True


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_scheduler_of_composers_form_follows_the_run(ratio):
    from drivetrain.optim import LinearScheduler

    rates = []

    class Rates(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    trainer = make_trainer(callbacks=[Rates()], scale_schedule_ratio=ratio)
    train(trainer, make_data(40), num_epochs=None, max_duration="4ep", create_scheduler_fn=LinearScheduler())
    steps = int(20 * ratio)
    assert rates == pytest.approx([0.1 * (1 - k / steps) for k in range(steps)])


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("interruption", ["window", "error"])
def test_gradients_of_an_interrupted_run_do_not_reach_the_next_one(interruption, is_set):
    class Fail(TrainerCallback):
        def after_backward(self, state, logger):
            if interruption == "error" and trainer.callback_handler.callbacks:
                raise RuntimeError("in the middle of a step")

    def make(model, callbacks=()):
        rates = (0.1, 0.05)
        optimizers = [torch.optim.SGD(part.parameters(), lr=lr) for part, lr in zip((model[0], model[3]), rates)]
        groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip((model[0], model[3]), rates)]
        optimizer = dict(zip("ab", optimizers)) if is_set else torch.optim.SGD(groups)
        return make_trainer(model, optimizer=optimizer, callbacks=callbacks)

    trainer = make(make_model(), [Fail()])
    with pytest.raises(RuntimeError) if interruption == "error" else nullcontext():
        train(trainer, num_epochs=None, max_duration="1ba", gradient_accumulation_steps=2)
    trainer.callback_handler.clear_callbacks()
    plain = make_model()
    plain.load_state_dict(trainer.model.state_dict())
    train(trainer, gradient_accumulation_steps=2)
    train(make(plain), gradient_accumulation_steps=2)
    assert all(map(torch.equal, weights(trainer.model), weights(plain)))


def test_lr_find_counts_updates_and_logs_and_saves_nothing(tmp_path):
    logger, data = Lines(), make_data()
    trainer = make_trainer(loggers=[logger], algorithms=[MixUp()], seed=1)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    result = trainer.lr_find(loader, num_steps=15, gradient_accumulation_steps=2, checkpoint_dir=tmp_path / "a")
    assert len(result.lrs) == len(result.losses) == 15 and not logger.lines and not (tmp_path / "a").exists()
    trainer.train(loader, num_epochs=2)
    other = make_trainer(algorithms=[MixUp()], seed=1)
    other.train(DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)), num_epochs=2)
    assert all(map(torch.equal, weights(trainer.model), weights(other.model)))
    with pytest.raises(ConfigError, match="one torch optimizer"):
        Trainer(make_model(), nn.CrossEntropyLoss(), None, callbacks=()).lr_find(data)


def test_loggers_do_not_see_the_sanity_evaluation():
    logger = Lines()
    train(make_trainer(loggers=[logger]), eval_dataset=make_data(), sanity_eval_batches=1)
    assert not logger.series("intermediate_eval_loss") and logger.series("eval_loss_epoch")


def test_evaluate_inside_a_run_keeps_the_run():
    class Test(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            found.append(trainer.evaluate(make_data(8), collate_fn=torch.utils.data.default_collate))

    found: list[dict[str, float]] = []
    trainer, plain = make_trainer(callbacks=[Test()]), make_trainer()
    history = train(trainer, num_epochs=2, eval_dataset=make_data(16))
    expected = train(plain, num_epochs=2, eval_dataset=make_data(16))
    assert [set(one) for one in found] == [{"evaluation_loss"}] * 2 and trainer.run_config == plain.run_config
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert history.get_metric_values(name) == expected.get_metric_values(name)
