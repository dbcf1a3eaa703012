"""SAM in the Trainer: the second pass is the first one again, at other weights."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.gradient_clipping import GradientClipping
from drivetrain.algorithms.label_smoothing import LabelSmoothing
from drivetrain.algorithms.mixup import MixUp
from drivetrain.algorithms.sam import SAM, SAMOptimizer
from drivetrain.core.event import Event
from drivetrain.optim import ConstantLr, OptimSet
from drivetrain.train.trainer import Trainer
from tests.algorithms.optimizer_tasks import conv_run, resumed_equals_uninterrupted
from tests.algorithms.tasks import Watch, image_data, same, train, weights
from tests.train.tasks import make_data, make_model


def plain_run(*algorithms, cls=Trainer, optimizer=None, **kwargs):
    model = make_model(dtype=torch.float64)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return cls(model, nn.CrossEntropyLoss(), optimizer, (), algorithms=algorithms, **kwargs)


def go(trainer, **kwargs):
    kwargs = {"num_epochs": 2, "per_device_batch_size": 8, "train_dataloader_kwargs": {"shuffle": False}, **kwargs}
    return trainer.train(make_data(dtype=torch.float64), **kwargs)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_run_equals_a_loop_written_by_hand(accumulation, interval):
    trainer = plain_run(SAM(rho=0.2, interval=interval))
    go(trainer, gradient_accumulation_steps=accumulation)
    model, (x, y) = make_model(dtype=torch.float64), make_data(dtype=torch.float64).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    windows = [slice(start, min(start + 8 * accumulation, 24)) for start in range(0, 24, 8 * accumulation)] * 2
    for step, rows in enumerate(windows, 1):
        gradient = lambda rows=rows: torch.autograd.grad(
            nn.functional.cross_entropy(model(x[rows]), y[rows]), list(model.parameters())
        )
        g1 = gradient()
        if step % interval == 0:
            norm = torch.cat([g.flatten() for g in g1]).norm()
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p, g in zip(model.parameters(), g1):
                    p.add_(0.2 * g / (norm + 1e-12))
            g1 = gradient()
            with torch.no_grad():
                for p, old in zip(model.parameters(), before):
                    p.copy_(old)
        for p, g in zip(model.parameters(), g1):
            p.grad = g
        optimizer.step()
    for ours, theirs in zip(trainer.model.parameters(), model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Seen(nn.Module):
    """A loss that remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, outputs, targets):
        self.calls.append((outputs.detach().clone(), targets.detach().clone()))
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("mix", [MixUp(1.0), MixUp(1.0, interpolate_loss=True), LabelSmoothing(0.3)])
def test_both_passes_see_the_identical_mixed_batch_and_dropout(mix):
    trainer = conv_run(SAM(rho=0.0), mix)
    trainer.loss_func = loss = Seen()
    train(trainer, image_data(), num_epochs=1)
    loss.calls = [call for call in loss.calls if len(call[0]) == 6]  # without the trial on two rows
    per_pass = 2 if getattr(mix, "interpolate_loss", False) else 1
    assert len(loss.calls) == 4 * 2 * per_pass
    for start in range(0, len(loss.calls), 2 * per_pass):
        for first, second in zip(loss.calls[start : start + per_pass], loss.calls[start + per_pass :]):
            assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("extra", [(), (MixUp(0.4),), (GradientClipping("norm", 0.1),)])
def test_a_radius_of_zero_is_the_base_optimizer_bit_for_bit(extra):
    runs = []
    for algorithms in ((SAM(rho=0.0), *extra), extra):
        runs.append(conv_run(*algorithms))  # seeds the process, so the one before must be done
        train(runs[-1], image_data(), eval_dataset=image_data(6), gradient_accumulation_steps=2, microbatch_size=3)
    sharp, plain = runs
    assert same(weights(sharp.model), weights(plain.model))  # buffers too: statistics come from the first pass only
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert list(sharp.run_history.get_metric_values(name)) == list(plain.run_history.get_metric_values(name))


def test_watchers_see_one_pass():
    watches = {
        event: Watch(event, lambda state: 1) for event in (Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.STEP_OUTPUT)
    }
    backward = Watch(Event.AFTER_BACKWARD, lambda state: state.loss.item())
    trainer = conv_run(SAM(rho=0.5), callbacks=[*watches.values(), backward])
    after = Watch(Event.BATCH_END, lambda state: state.loss.item())
    trainer.callback_handler.add_callback(after)
    train(trainer, image_data(), num_epochs=1)
    assert [len(watch.values) for watch in watches.values()] == [4, 4, 4] and backward.values == after.values
    assert isinstance(trainer.optimizer, SAMOptimizer) and trainer.state.clock.batch == 4


def test_a_loss_of_zero_does_not_skip_the_step():
    trainer = plain_run(SAM())
    trainer.loss_func = lambda outputs, targets: outputs.sum() * 0.0
    go(trainer, num_epochs=1)
    assert trainer.optimizer.param_groups[0]["sam_step"] == 3


def test_clipping_applies_to_the_gradient_that_is_stepped_with():
    norms = []
    trainer = conv_run(SAM(rho=0.3), GradientClipping("norm", 0.01), optimizer="SGD")
    train(trainer, image_data(), num_epochs=1)
    inside = trainer.optimizer.base_optimizer
    inside.register_step_pre_hook(
        lambda o, *_: norms.append(nn.utils.get_total_norm([p.grad for p in o.param_groups[0]["params"]]).item())
    )
    train(trainer, image_data(), num_epochs=1)  # a second run wraps nothing twice
    assert trainer.optimizer.base_optimizer is inside and norms == pytest.approx([0.01] * 4, rel=1e-3)


@pytest.mark.parametrize("at", [5, 7])
def test_a_run_broken_off_inside_a_window_repeats_all_of_it(at, tmp_path):
    make = lambda **kw: conv_run(SAM(rho=0.3, interval=2), MixUp(), optimizer="AdamW", **kw)
    assert resumed_equals_uninterrupted(make, tmp_path, at=at, gradient_accumulation_steps=3)


def test_gradients_that_overflow_skip_the_step_and_lower_the_scale():
    class Explodes(nn.Module):
        """Overflows in the second pass of the second step only."""

        calls = 0

        def forward(self, outputs, targets):
            Explodes.calls += 1
            loss = nn.functional.cross_entropy(outputs, targets)
            return loss * float("inf") if Explodes.calls == 4 else loss

    seen = []
    trainer = plain_run(SAM(rho=0.2))
    trainer.loss_func = Explodes()
    scaler = trainer._accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.callback_handler.add_callback(
        Watch(
            Event.AFTER_STEP,
            lambda s: seen.append(
                (scaler.get_scale(), weights(s.model), trainer._accelerator.optimizer_step_was_skipped)
            ),
        )
    )
    go(trainer, num_epochs=1)
    assert [scale for scale, *_ in seen] == [1024.0, 512.0, 512.0] and [skipped for *_, skipped in seen] == [
        False,
        True,
        False,
    ]
    assert same(seen[0][1], seen[1][1]) and not same(seen[1][1], seen[2][1])
    unscaled = plain_run(SAM(rho=0.2))
    unscaled.loss_func = nn.CrossEntropyLoss()
    go(unscaled, num_epochs=1, max_num_train_steps=1)
    for ours, theirs in zip(seen[0][1], weights(unscaled.model)):
        torch.testing.assert_close(ours, theirs)


def test_units_are_refused_by_name():
    model = make_model()
    units = OptimSet(main=ConstantLr("SGD", {"lr": 0.1}, model))
    trainer = Trainer(model, nn.CrossEntropyLoss(), units, (), algorithms=[SAM()])
    with pytest.raises(ValueError, match="SAM works with a single torch optimizer; this run has OptimSet"):
        trainer.train(make_data(), num_epochs=1)


def run_on_rank():
    trainer = plain_run(SAM(rho=0.3), seed=3)
    go(trainer, per_device_batch_size=4, gradient_accumulation_steps=2)
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_two_processes_take_the_steps_of_one(world2):
    alone = plain_run(SAM(rho=0.3), seed=3)
    go(alone, gradient_accumulation_steps=2)
    for parameters in world2(run_on_rank):
        for ours, theirs in zip(parameters, alone.model.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
