"""Batch size warm-up: windows grow, and the learning rate with them."""

import pytest
import torch

from drivetrain.algorithms.batch_size_warmup import BatchSizeWarmup, learning_rate_factor
from drivetrain.core.event import Event
from tests.algorithms.tasks import PullPlug, Watch, conv_trainer, image_data, same, train, weights


def run(algorithm, **kwargs):
    windows = Watch(Event.AFTER_TRAIN_BATCH, lambda state: state.gradients.window.count)
    rates = Watch(Event.BATCH_END, lambda state: state.optimizers[0].param_groups[0]["lr"])
    stepped = []
    trainer = conv_trainer(algorithm, callbacks=[windows, rates])
    original = trainer.optimizer.step
    trainer.optimizer.step = lambda *a, **k: (
        stepped.append(trainer.optimizer.param_groups[0]["lr"]),
        original(*a, **k),
    )[1]
    train(trainer, image_data(60), num_epochs=1, per_device_batch_size=1, gradient_accumulation_steps=8, **kwargs)
    return windows.values, stepped, rates.values


def test_windows_grow_to_the_full_length():
    lengths, stepped, rates = run(BatchSizeWarmup(0.25, "0.5dur", "sqrt"))
    assert lengths[:-1] == sorted(lengths[:-1]) and lengths[0] == 2 and max(lengths) == 8 and sum(lengths) == 60
    assert set(rates) == {0.05}  # between steps nobody sees the factor
    assert stepped[0] == pytest.approx(0.05 * 0.5) and stepped[-1] == pytest.approx(0.05)


def test_the_rate_follows_the_rule():
    assert [learning_rate_factor(0.25, rule) for rule in ("sqrt", "linear", "none")] == [0.5, 0.25, 1.0]
    assert set(run(BatchSizeWarmup(0.25, "30ba", "none"))[1]) == {0.05}


def test_a_recursive_scheduler_is_not_disturbed():
    seen = Watch(Event.BATCH_END, lambda state: (state.clock.step, state.optimizers[0].param_groups[0]["lr"]))
    train(
        conv_trainer(BatchSizeWarmup(0.5, "0.5dur"), callbacks=[seen]),
        image_data(),
        num_epochs=1,
        per_device_batch_size=2,
        gradient_accumulation_steps=4,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    assert len({step for step, _ in seen.values}) > 3
    assert all(rate == pytest.approx(0.05 * 0.5**step) for step, rate in seen.values)


def test_it_needs_windows():
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        train(conv_trainer(BatchSizeWarmup()), image_data())
    for arguments in ({"initial": 2}, {"lr_rule": "square"}):
        with pytest.raises(ValueError, match="BatchSizeWarmup"):
            BatchSizeWarmup(**arguments)


def test_a_window_that_was_open_in_the_warmup_resumes_exactly(tmp_path):
    def trained(*callbacks, **kwargs):
        settings = {"num_epochs": 1, "per_device_batch_size": 2, "gradient_accumulation_steps": 3, **kwargs}
        trainer = conv_trainer(BatchSizeWarmup(0.3, "4ba"), callbacks=callbacks)
        train(trainer, image_data(16), **settings)
        return weights(trainer.model)

    whole = trained()
    keeping = {"checkpoint_dir": tmp_path, "checkpoint_every": "1ba", "async_checkpoint": False}
    with pytest.raises(RuntimeError, match="plug"):
        trained(PullPlug(3), **keeping)  # windows of 1, 1, 2: the third has one batch
    assert same(trained(resume_from="auto", **keeping), whole)
