"""SWA: the mean is the formula's, and batch norms fit it."""

import pytest
import torch
from torch.optim.swa_utils import update_bn

from drivetrain.algorithms.swa import SWA
from drivetrain.core.event import Event
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import Watch, image_data, same, train, weights


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def test_defaults_on_ten_epochs_average_before_the_end_and_measure_batch_norms():
    swa = SWA()
    # A callback sees an epoch's end after the algorithms, so the weights of the epoch are those of its last batch.
    last = Watch(Event.BATCH_END, lambda state: parameters(state.model))
    seen = Watch(Event.EVAL_BATCH_START, lambda state: weights(state.model))
    trainer = conv_run(swa, callbacks=[last, seen])
    train(trainer, image_data(), eval_dataset=image_data(6), num_epochs=10, train_dataloader_kwargs={"shuffle": False})
    epochs = last.values[3::4]
    expected = [torch.stack(tensors).double().mean(0) for tensors in zip(*epochs[6:9])]
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


def test_batches_are_averaged_and_training_goes_on_from_the_mean():
    swa = SWA("0.25dur", "0.75dur", "1ba")
    watch = Watch(Event.BATCH_END, lambda state: parameters(state.model))
    train(conv_run(swa, callbacks=[watch]), image_data(), num_epochs=2)
    # Batches 2 to 5 lie in [0.25, 0.75) of 8; batch 6 ends it, and callbacks see the mean then.
    expected = [torch.stack(tensors).double().mean(0) for tensors in zip(*watch.values[1:5])]
    for value, wanted in zip(watch.values[5], expected):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    assert not same(watch.values[6], watch.values[5])


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
