"""What to run first where there is a CUDA device: `pytest -m gpu tests/test_first_on_gpu.py`. Each test is short and has a plain reference.

The reference is a loop without this library on the same device in float64, or the same run resumed, or on other devices.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.algorithms import TorchCompile
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context
from drivetrain.core.errors import StopTrainingError, UnsupportedMethodError
from drivetrain.optim import ConstantLr
from drivetrain.runtime.launch import launch
from drivetrain.train.callbacks import TerminateOnNaNCallback, TrainerCallback
from drivetrain.train.joint_step import JointForm
from drivetrain.train.trainer import Trainer
from tests.train.tasks import Lines, Losses, make_data, make_model, train, weights
from tests.train.test_distributed import run_global

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DOUBLE, SIZE = torch.float64, 8


def plain_loop(model, optimizer, data, accumulation=1, clip=None, bad=()):
    """Train one epoch, batch after batch, and return the losses."""
    x, y = (tensor.cuda() for tensor in data.tensors)
    losses = []
    for update in range(math.ceil(len(x) / SIZE / accumulation)):
        rows = slice(update * SIZE * accumulation, (update + 1) * SIZE * accumulation)
        for first in range(rows.start, min(rows.stop, len(x)), SIZE):
            loss = F.cross_entropy(model(x[first : first + SIZE]), y[first : first + SIZE])
            losses.append(loss.item())
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if update not in bad:
            optimizer.step()
        optimizer.zero_grad()
    return losses


class Spoil(TrainerCallback):
    """Puts NaN into a gradient of these batches, without waiting."""

    def __init__(self, *batches):
        self.batches = batches

    def after_backward(self, state, logger):
        if state.clock.batch in self.batches:
            next(state.model.parameters()).grad.view(-1)[:1].fill_(math.nan)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2}, {"microbatch_size": 3}, {"gradient_clip_norm": 0.1}]
)
def test_the_trainer_trains_as_a_plain_loop(name, settings):
    data, model, reference = make_data(72, dtype=DOUBLE), make_model(dtype=DOUBLE), make_model(dtype=DOUBLE).cuda()
    trainer = Trainer(model, nn.CrossEntropyLoss(), OPTIMIZERS[name](model.parameters()), callbacks=(), strict=True)
    history = train(trainer, data, **settings)
    accumulation, clip = settings.get("gradient_accumulation_steps", 1), settings.get("gradient_clip_norm")
    losses = plain_loop(reference, OPTIMIZERS[name](reference.parameters()), data, accumulation, clip)
    torch.testing.assert_close(weights(model), weights(reference))
    assert history.get_latest_metric("train_loss_epoch") == pytest.approx(sum(losses) / len(losses))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [(0,), (0, 1), (3,), (8,)])
def test_updates_that_are_not_finite_leave_weights_and_momentum_alone(name, bad):
    data, model, reference = make_data(72, dtype=DOUBLE), make_model(dtype=DOUBLE), make_model(dtype=DOUBLE).cuda()
    torch.full((1 << 16,), 1e30, device="cuda", dtype=DOUBLE)  # what is left in memory that a momentum may be made in
    optimizer = OPTIMIZERS[name](model.parameters())
    train(Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[Spoil(*bad)]), data)
    plain_loop(reference, OPTIMIZERS[name](reference.parameters()), data, bad=bad)
    torch.testing.assert_close(weights(model), weights(reference))


def test_a_fused_unit_whose_first_update_is_skipped_follows_a_plain_loop():
    data, model, reference = (
        make_data(24, dtype=DOUBLE),
        make_model(dtype=DOUBLE).cuda(),
        make_model(dtype=DOUBLE).cuda(),
    )
    torch.full((1 << 16,), 1e30, device="cuda", dtype=DOUBLE)
    unit = ConstantLr("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}, model, grad_clip=None)
    x, y = (tensor.cuda() for tensor in data.tensors)
    for batch, factor in enumerate((math.nan, 1.0, 1.0)):
        rows = slice(batch * SIZE, (batch + 1) * SIZE)
        unit.step(F.cross_entropy(model(x[rows]), y[rows]) * factor)
    plain_loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), data, bad=(0,))
    assert unit.skipped_steps == 1
    torch.testing.assert_close(weights(model), weights(reference))


def test_float16_with_a_fused_momentum_survives_overflows_of_the_first_updates():
    results = []
    for fused in (False, True):
        model = make_model()
        torch.full((1 << 16,), 1e30, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), precision="fp16")
        trainer.runtime.scaler.load_state_dict({**trainer.runtime.scaler.state_dict(), "scale": 2.0**20})
        train(trainer, make_data(96))
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_logged_losses_and_rates_belong_to_their_steps():
    lines, losses, model = Lines(), Losses(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[losses], loggers=[lines])
    train(trainer, make_data(80), log_every=1, create_scheduler_fn=schedule)
    assert lines.series("train_loss_step") == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses.values, 1)
    ]
    assert [step for step, _ in lines.series("lr/group0")] == list(range(1, 11))
    assert all({"train_loss_step", "lr/group0"} <= row.keys() for _, row in lines.lines if "lr/group0" in row)


class OwnLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x, y):
        return {"loss": F.cross_entropy(self.inner(x), y)}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.filterwarnings("ignore")
def test_losses_of_recorded_models_are_those_of_a_plain_loop(mode):
    torch._dynamo.reset()
    data, model, reference = make_data(160), OwnLoss(), OwnLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, None, optimizer, callbacks=(), algorithms=[TorchCompile(mode, regional=False)])
    history = train(trainer, data, eval_dataset=data)
    losses = plain_loop(reference.inner, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    assert history.get_latest_metric("train_loss_epoch") == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    x, y = (tensor.cuda() for tensor in data.tensors)
    assert history.get_latest_metric("eval_loss_epoch") == pytest.approx(reference(x, y)["loss"].item(), rel=1e-4)
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"microbatch_size": 4}])
@pytest.mark.filterwarnings("ignore")
def test_one_compiled_graph_of_model_and_loss_trains_as_a_plain_loop(settings):
    torch._dynamo.reset()
    data, model, reference = make_data(64, dtype=DOUBLE), make_model(dtype=DOUBLE), make_model(dtype=DOUBLE).cuda()
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=0.1), [("native_dynamo", {"scope": "model"})]
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), strategy=plan)
    train(trainer, data, eval_dataset=data, **settings)
    assert isinstance(trainer.run.loss.form, JointForm)
    accumulation = settings.get("gradient_accumulation_steps", 1)
    plain_loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data, accumulation)
    torch.testing.assert_close(weights(model), weights(reference))


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"microbatch_size": 4}])
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_model_does_not_accumulate(settings):
    model = make_model()
    compiled = [TorchCompile("reduce-overhead", regional=False)]
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), callbacks=(), algorithms=compiled
    )
    with pytest.raises(UnsupportedMethodError, match="no-cudagraphs"):
        train(trainer, **settings)


def test_a_strict_run_that_is_stopped_inside_a_step_can_be_read_and_saved(tmp_path):
    class Stops(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            if trainer.state.clock.batch == 6:
                raise StopTrainingError("inside a step")

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=[TerminateOnNaNCallback(), Stops()], strict=True
    )
    train(trainer, make_data(96), checkpoint_dir=tmp_path, checkpoint_every="2ba")
    assert torch.cuda.get_sync_debug_mode() == 0 and trainer.last_checkpoint is not None


class Pull(TrainerCallback):
    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == 7:
            raise RuntimeError("plug")


def with_dropout(folder, device, callbacks=(), **kwargs):
    model = make_model(dropout=0.5, dtype=DOUBLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=1, device=device)
    train(trainer, make_data(80, dtype=DOUBLE), checkpoint_dir=folder, checkpoint_every="1ba", **kwargs)
    return [weight.cpu() for weight in weights(model)]


@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=two_devices)])
def test_dropout_goes_on_where_it_stopped_on_any_device(device, tmp_path):
    expected = with_dropout(tmp_path / "whole", device)
    with pytest.raises(RuntimeError, match="plug"):
        with_dropout(tmp_path / "broken", device, [Pull()])
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(with_dropout(tmp_path / "broken", device, resume_from="auto"), expected)


@two_devices
def test_a_run_goes_on_on_another_device(tmp_path):
    expected = with_dropout(tmp_path / "whole", "cuda:1")
    with pytest.raises(RuntimeError, match="plug"):
        with_dropout(tmp_path / "broken", "cuda:1", [Pull()])
    torch.testing.assert_close(with_dropout(tmp_path / "broken", "cuda:0", resume_from="auto"), expected)


@two_devices
def test_a_hand_written_loop_on_the_second_device_resumes_with_its_generators(tmp_path):
    def session():
        torch.manual_seed(0)
        ctx = Context(model=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))).cuda(1)
        return ctx

    ctx, x = session(), torch.ones(64, 4, device="cuda:1")
    ctx.noise = torch.Generator("cuda:1").manual_seed(3)
    with Checkpointer(ctx, dir=tmp_path) as keeper:
        keeper.save("one")
        expected = ctx.model(x), torch.rand(4, generator=ctx.noise, device="cuda:1")
    other = session()
    other.noise = torch.Generator("cuda:1")
    with Checkpointer(other, dir=tmp_path) as keeper:
        keeper.restore()
    torch.testing.assert_close((other.model(x), torch.rand(4, generator=other.noise, device="cuda:1")), expected)


@two_devices
@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_devices_train_as_one(accumulation):
    expected_weights, expected_metrics, expected_outputs, _ = run_global(accumulation=accumulation)
    for rank_weights, metrics, outputs, kind in launch(run_global, 2, args=(35, accumulation)):
        torch.testing.assert_close([w.cpu() for w in rank_weights], [w.cpu() for w in expected_weights])
        torch.testing.assert_close(outputs.cpu(), expected_outputs.cpu())
        assert (
            kind == "Sequential"
            and {name: pytest.approx(values) for name, values in expected_metrics.items()} == metrics
        )


def test_a_loss_with_class_weights_is_moved_without_the_default_callbacks():
    model, loss = make_model(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    trainer = Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    train(trainer, make_data(16))
    trainer.evaluate(make_data(16), per_device_batch_size=8)
    assert loss.weight.is_cuda
