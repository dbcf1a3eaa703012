"""The loop on a CUDA device: no host waits, scaled float16, exact resume."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.core.errors import NonFiniteError
from drivetrain.record import Recorder, read_metrics
from drivetrain.train.callbacks import (
    DEFAULT_CALLBACKS,
    LossSpike,
    LRMonitor,
    ProgressBarCallback,
    TerminateOnNaNCallback,
    ThroughputMonitor,
    TrainerCallback,
)
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Lines, make_data, make_model, make_trainer, train, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class NoWaiting(TrainerCallback):
    """Makes every host-device synchronisation inside steps an error, from the third step on."""

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch_in_epoch == 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self, trainer, **kwargs):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_clip_norm": 0.5},
        {"microbatch_size": 3},
        {"max_num_train_steps": 30},
    ],
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_steps_do_not_wait_for_the_device(settings, precision, tmp_path):
    class Watched(Trainer):
        def _run_steps(self, train_dl):
            try:
                return super()._run_steps(train_dl)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    callbacks = [*DEFAULT_CALLBACKS, ThroughputMonitor(), LRMonitor(), NoWaiting()]
    lines, recorder = Lines(), Recorder(tmp_path, tensorboard=False)
    trainer = make_trainer(cls=Watched, callbacks=callbacks, precision=precision, loggers=[lines, recorder])
    data, order = make_data(160), {"shuffle": True}
    history = train(trainer, data, num_epochs=2, log_every=3, train_dataloader_kwargs=order, **settings)
    recorder.close()
    assert next(trainer.model.parameters()).is_cuda
    logged = lines.series("train_loss_step")  # as numbers, in order, each with the step it belongs to
    assert len(logged) == trainer.state.clock.step // 3 and all(type(loss) is float for _, loss in logged)
    rows = [row for row in read_metrics(tmp_path, kind="scalar") if row["tag"] == "train_loss_step"]
    assert [(row["step"], row["value"]) for row in rows] == logged
    assert history.get_latest_metric("train_loss_epoch") > 0


def test_float16_scales_and_skips_overflowing_updates():
    rates = []

    class Overflow(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            factor = 1e30 if self.state.step == 1 else 1.0
            return {**output, "loss": output["loss"].float() * factor}

        def scheduler_step(self):
            super().scheduler_step()
            rates.append(self.optimizer.param_groups[0]["lr"])

    trainer = make_trainer(cls=Overflow, precision="fp16")
    train(trainer, make_data(40), create_scheduler_fn=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    assert trainer._accelerator.scaler is not None
    assert rates[1] == rates[0] and rates[2] < rates[1]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_nan_is_found_within_two_steps():
    from drivetrain.core.errors import NonFiniteLossError

    class Broken(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (float("nan") if self.state.step == 3 else 1.0)}

    trainer = make_trainer(cls=Broken, callbacks=[TerminateOnNaNCallback()])
    with pytest.raises(NonFiniteLossError):
        train(trainer, make_data(160))
    assert trainer.state.clock.batch <= 6


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    class Pull(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            if trainer.state.clock.batch == 7:
                raise RuntimeError("plug")

    def run(folder, callbacks=(), **kwargs):
        model = make_model(dropout=0.3)
        trainer = Trainer(
            model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=callbacks, seed=1
        )
        trainer.train(
            make_data(40),
            num_epochs=3,
            per_device_batch_size=8,
            checkpoint_dir=folder,
            checkpoint_every="1ba",
            **kwargs,
        )
        return weights(trainer.model)

    expected = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="plug"):
        run(tmp_path / "broken", [Pull()])
    assert all(map(torch.equal, run(tmp_path / "broken", resume_from="auto"), expected))


def test_the_bar_shows_values_without_waiting(capsys):
    trainer = make_trainer(callbacks=[ProgressBarCallback(plain_interval=1e-6)])
    train(trainer, make_data(64))
    assert "loss" in capsys.readouterr().out


def test_auto_microbatches_are_found_where_the_whole_batch_does_not_fit():
    class Hungry(nn.Module):
        """Needs a gigabyte for every row."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            big = self.scale * torch.ones(len(x), 2**28, device=x.device)
            return x[:, :3] * big.exp().mean(1, keepdim=True)

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    rows = int(free / 2**30 / 2) * 2
    model = Hungry()
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=())
    trainer.train(make_data(rows), num_epochs=1, per_device_batch_size=rows, microbatch_size="auto")
    assert trainer.run.microbatch_size is not None and 1 <= trainer.run.microbatch_size < rows


class NoWaitingInSteps(TrainerCallback):
    """Makes every wait for the device inside a step an error, from the third step on."""

    def batch_start(self, state, logger):
        if state.clock.batch >= 2:
            torch.cuda.set_sync_debug_mode("error")

    def batch_end(self, state, logger):
        torch.cuda.set_sync_debug_mode("default")

    def on_training_run_end(self, trainer, **kwargs):
        torch.cuda.set_sync_debug_mode("default")


class SpoilGradient(TrainerCallback):
    """Puts NaN into a gradient of these batches, without waiting."""

    def __init__(self, *batches):
        self.batches = batches

    def after_backward(self, state, logger):
        if state.clock.batch in self.batches:
            next(state.model.parameters()).grad.view(-1)[:1].fill_(float("nan"))


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_that_is_not_finite_is_left_out_without_waiting(fused):
    model, reference = make_model(), make_model().cuda()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in (model, reference)]
    trainer = make_trainer(model, optimizer=optimizers[0], callbacks=[SpoilGradient(5), NoWaitingInSteps()])
    history = train(trainer, make_data(96))
    x, y = (tensor.cuda() for tensor in make_data(96).tensors)
    for batch in range(12):
        nn.functional.cross_entropy(reference(x[batch * 8 : batch * 8 + 8]), y[batch * 8 : batch * 8 + 8]).backward()
        if batch != 5:
            optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(map(torch.equal, weights(model), weights(reference)))
    assert history.get_metric_values("nonfinite_update") == [8 if fused else 6]  # known two updates later


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_bad_update_of_a_fused_optimizer_stops_or_rolls_back_two_updates_later(action):
    model = make_model()
    trainer = make_trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        callbacks=[SpoilGradient(5), NoWaitingInSteps()],
    )
    if action == "stop":
        with pytest.raises(NonFiniteError):
            train(trainer, make_data(96), nonfinite=action)
        assert trainer.state.clock.step == 7
    else:
        train(trainer, make_data(96), nonfinite=action)
        assert trainer.state.clock.step == 12
    assert all(bool(w.isfinite().all()) for w in weights(model))


def test_a_loss_spike_is_left_out_without_waiting():
    torch.manual_seed(0)
    data, model = make_data(96), nn.Linear(6, 3)
    data.tensors[0][64:72] *= 1e3
    reference = copy.deepcopy(model).cuda()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (model, reference)]
    callbacks = [LossSpike(min_losses=4), NoWaitingInSteps()]
    history = train(make_trainer(model, optimizer=optimizers[0], callbacks=callbacks), data)
    x, y = (tensor.cuda() for tensor in data.tensors)
    for batch in range(12):
        if batch != 8:
            nn.functional.cross_entropy(
                reference(x[batch * 8 : batch * 8 + 8]), y[batch * 8 : batch * 8 + 8]
            ).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert all(map(torch.equal, weights(model), weights(reference)))
    assert len(history.get_metric_values("loss_spike")) == 1


def test_numbers_recorded_on_the_device_arrive_in_the_history_without_a_wait(tmp_path):
    from drivetrain.train.run_history import InMemoryRunHistory

    history, number = InMemoryRunHistory(), torch.zeros((), device="cuda")
    history.update_metric("first", number)  # makes the buffer's memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3000):
            number += 1
            history.update_metric("count", number)
            history.update_metric("host", 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values = history.get_metric_values("count")
    assert [value.item() for value in values] == list(range(1, 3001))
    assert values[0].device.type == "cpu" and values[0].dtype == torch.float32
    reference, write = history.prepare_side_file(tmp_path)
    write()
    restored = InMemoryRunHistory()
    with history.referring_to(reference), restored.reading_from(tmp_path):
        restored.load_state_dict(history.state_dict())
    assert torch.equal(torch.stack(restored.get_metric_values("count")), torch.stack(values))
