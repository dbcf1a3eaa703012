"""SWA: the mean is the formula's, and batch norms fit it."""

import pytest
import torch
from torch.optim.swa_utils import update_bn

from drivetrain.algorithms.swa import SWA
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import Watch, image_data, make_state, same, train, weights


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def test_defaults_on_ten_epochs_average_the_last_four_and_measure_batch_norms():
    swa = SWA()
    # A callback sees an epoch's end after the algorithms, so the weights of the epoch are those of its last batch.
    last = Watch(Event.BATCH_END, lambda state: parameters(state.model))
    seen = Watch(Event.EVAL_BATCH_START, lambda state: weights(state.model))
    trainer = conv_run(swa, callbacks=[last, seen])
    train(trainer, image_data(), eval_dataset=image_data(6), num_epochs=10, train_dataloader_kwargs={"shuffle": False})
    epochs = last.values[3::4]
    expected = [torch.stack(tensors).double().mean(0) for tensors in zip(*epochs[6:])]
    assert swa.swa_completed
    for value, wanted in zip(parameters(trainer.model), expected):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    # The model was measured without dropout, which would add variance that evaluation does not have.
    reference = conv_run().model
    reference.load_state_dict(trainer.model.state_dict())
    reference.features[3].p = 0.0
    update_bn(torch.utils.data.DataLoader(image_data(), 6), reference)
    for name, value in trainer.model.features[1].named_buffers():
        torch.testing.assert_close(value, dict(reference.features[1].named_buffers())[name])
    assert same(seen.values[-1], weights(trainer.model))  # the last evaluation saw the same


class Composers:
    """The reference's arithmetic on weights seen at each event, in float64: averaged every `interval` events from the start on."""

    def __init__(self, interval, start, end, total):
        self.interval, self.start, self.end, self.total = interval, start, end, total
        self.seen, self.members, self.mean = 0, [], None

    def add(self, moment, values):
        if self.mean is not None or moment / self.total < self.start:
            return
        if self.seen % self.interval == 0:
            self.members.append([value.double() for value in values])
        self.seen += 1
        if moment / self.total >= self.end:
            self.mean = [torch.stack(tensors).mean(0) for tensors in zip(*self.members)]


@pytest.mark.parametrize(
    ("start", "end", "interval"), [(0.25, 0.75, 1), (0.25, 0.75, 2), (0.25, 0.75, 3), (0.3, 0.6, 1), (0.4, 0.9, 2)]
)
def test_batches_are_averaged_as_composer_does_and_training_goes_on_from_the_mean(start, end, interval):
    swa = SWA(f"{start}dur", f"{end}dur", f"{interval}ba")
    reference = Composers(interval, start, end, 12)
    before = Watch(Event.AFTER_STEP, lambda state: parameters(state.model))  # before the mean replaces them
    after = Watch(Event.BATCH_END, lambda state: parameters(state.model))
    train(conv_run(swa, callbacks=[before, after]), image_data(), num_epochs=3)
    for moment, values in enumerate(before.values, 1):
        reference.add(moment, values)
    swapped = next(moment for moment in range(1, 13) if moment / 12 >= end)
    for value, wanted in zip(after.values[swapped - 1], reference.mean, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    assert not same(after.values[swapped], after.values[swapped - 1])


@pytest.mark.parametrize(("epochs", "members"), [(4, 2), (5, 2), (10, 4)])
def test_the_weights_at_the_end_belong_to_the_mean(epochs, members):
    last = Watch(Event.AFTER_STEP, lambda state: parameters(state.model))
    trainer = conv_run(SWA(), callbacks=[last])
    train(trainer, image_data(), num_epochs=epochs)
    expected = [torch.stack(tensors).double().mean(0) for tensors in zip(*last.values[3::4][-members:])]
    for value, wanted in zip(parameters(trainer.model), expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("epochs", "members"), [(1, 1), (2, 1), (3, 1)])
def test_a_run_too_short_for_two_members_is_warned_about(epochs, members):
    last = Watch(Event.AFTER_STEP, lambda state: parameters(state.model))
    trainer = conv_run(SWA(), callbacks=[last])
    with pytest.warns(NoEffectWarning, match=f"SWA needs at least two .* gets {members} in a run of {epochs}ep"):
        train(trainer, image_data(), num_epochs=epochs)
    assert same(parameters(trainer.model), last.values[-1])


@pytest.mark.parametrize(
    ("settings", "duration", "members"),
    [
        ({}, "10ep", 4),
        ({}, "40ba", 4),
        ({}, "6ep", 2),
        ({"update_interval": "1ba"}, "10ba", 4),
        ({"update_interval": "5ba"}, "10ep", 3),
        ({"swa_start": "2ep", "swa_end": "4ep"}, "9ep", 3),
        ({"swa_start": "2ep", "swa_end": "4ep", "update_interval": "2ba"}, "9ep", 5),
        ({"swa_start": "5ep", "swa_end": "6ep"}, "3ep", 0),
        ({}, "10sec", None),
    ],
)
def test_members_are_counted_before_the_run(settings, duration, members):
    assert SWA(**settings)._count_members(make_state(max_duration=duration, length=4)) == members


@pytest.mark.parametrize(
    ("rate", "strategy", "share"), [(0.01, "linear", 0.5), (None, "linear", 0.5), (0.01, "cos", 0.5)]
)
def test_the_rate_moves_to_the_one_given_and_the_scheduler_rests(rate, strategy, share):
    swa = SWA("0.5dur", "1dur", "1ba", schedule_swa_lr=True, swa_lr=rate, anneal_steps=2, anneal_strategy=strategy)
    rates = Watch(Event.BATCH_END, lambda state: state.optimizers[0].param_groups[0]["lr"])
    trainer = conv_run(swa, callbacks=[rates])
    halve = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n)
    train(trainer, image_data(), num_epochs=2, create_scheduler_fn=halve)
    start = 0.05 * 0.5**4
    end = start if rate is None else rate
    assert rates.values[:3] == pytest.approx([0.025, 0.0125, 0.00625])
    assert rates.values[3:] == pytest.approx([start + share * (end - start), *[end] * 4])


def test_a_run_that_ends_early_still_gets_its_mean():
    swa = SWA("0.25dur", "0.9dur", "1ep")
    trainer = conv_run(swa)
    # Stopped inside the last epoch, before the end of averaging came.
    train(trainer, image_data(), num_epochs=4, max_num_train_steps=15)
    assert swa.swa_completed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"swa_start": "0.9dur", "swa_end": "0.5dur"}, "before the end"),
        ({"swa_start": "1ep", "swa_end": "0.5dur"}, "both"),
        ({"swa_start": "1ba", "swa_end": "5ba"}, "both"),
        ({"update_interval": "0.1dur"}, "batches or epochs"),
        ({"anneal_steps": 0}, "anneal_steps"),
        ({"anneal_strategy": "cosine"}, "cos"),
        ({"swa_lr": -1}, "at least 0"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        SWA(**arguments)
