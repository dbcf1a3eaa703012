"""EMA: the average is the formula's, is what is evaluated, and never gets in the way of training."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.algorithms.ema import EMA, compute_ema
from drivetrain.core.event import Event
from drivetrain.module.average import AveragedWeights
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import ConvNet, Watch, image_data, same, train, weights


def named(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_the_function_averages_weights_and_floating_buffers_and_copies_counters():
    model, average = ConvNet(), ConvNet()
    model.features[1].num_batches_tracked.fill_(7)
    model.head.requires_grad_(False)
    before, live = named(average), named(model)
    compute_ema(model, average, smoothing=0.9)
    for name, value in average.state_dict().items():
        if name.startswith("head"):
            assert torch.equal(value, before[name])  # what is not trained has no average
        elif name.endswith("num_batches_tracked"):
            assert value == 7
        else:
            torch.testing.assert_close(value, 0.9 * before[name] + 0.1 * live[name])
    shadow = AveragedWeights(model)
    compute_ema(ConvNet(), shadow, smoothing=0.5)
    assert shadow.num_updates == 1


@pytest.mark.parametrize(("interval", "every"), [(None, 1), ("3ba", 3)])
def test_the_average_of_a_run_equals_the_formula(interval, every):
    ema = EMA("10ba", update_interval=interval)
    history = Watch(Event.BATCH_END, lambda state: {n: p.double() for n, p in named(state.model).items()})
    trainer = conv_run(ema, callbacks=[history])
    train(trainer, image_data(), num_epochs=3)
    smoothing, average = 2 ** (-every / 10), history.values[0]  # a copy of the first, whatever the interval
    for batch, seen in enumerate(history.values, 1):
        if batch > 1 and batch % every == 0:
            average = {n: smoothing * average[n] + (1 - smoothing) * seen[n] for n in seen}
    for name, value in ema.inference_weights(trainer.state).items():
        if name.endswith("num_batches_tracked"):
            assert value == history.values[every * (len(history.values) // every) - 1][name]
        else:
            torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-6)


def test_evaluation_and_prediction_see_the_average_and_training_goes_on_unchanged():
    ema = EMA(None, smoothing=0.7)
    seen = Watch(Event.EVAL_BATCH_START, lambda state: weights(state.model))
    trainer = conv_run(ema, callbacks=[seen])
    train(trainer, image_data(), eval_dataset=image_data(6), num_epochs=2)
    plain = conv_run()
    train(plain, image_data(), num_epochs=2)
    assert same(weights(trainer.model), weights(plain.model))
    averaged = ema.get_ema_model(ConvNet())
    assert same(seen.values[-1], weights(averaged)) and not same(seen.values[-1], weights(plain.model))
    assert same(weights(ema.get_training_model(ConvNet())), weights(plain.model))
    outputs = trainer.predict(image_data(6))
    torch.testing.assert_close(outputs, averaged.eval()(image_data(6).tensors[0]))
    assert same(weights(trainer.model), weights(plain.model))


@pytest.mark.parametrize("interval", [None, "3ba"])
def test_it_begins_at_its_start(interval):
    ema = EMA(None, smoothing=0.5, ema_start="0.5dur", update_interval=interval)
    started = Watch(Event.BATCH_CHECKPOINT, lambda state: ema.ema_started)
    train(conv_run(ema, callbacks=[started]), image_data(), num_epochs=2)
    assert started.values == [False] * 3 + [True] * 5


def test_epochs_after_a_checkpoint_on_the_last_batch_average_training_weights(tmp_path):
    kept = Watch(Event.EPOCH_END, lambda state: weights(state.model))
    ema = EMA("1ep")
    trainer = conv_run(ema, callbacks=[kept])
    train(
        trainer,
        image_data(),
        num_epochs=2,
        eval_dataset=image_data(6),
        checkpoint_dir=tmp_path,
        checkpoint_every="4ba",
        async_checkpoint=False,
    )
    expected = [torch.lerp(a.double(), b.double(), 0.5) for a, b in zip(*kept.values)]
    for value, wanted in zip(weights(ema.get_ema_model(ConvNet())), expected):
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)


def test_steps_are_counted_once_per_window():
    ema = EMA("2st")
    train(conv_run(ema), image_data(), num_epochs=1, gradient_accumulation_steps=2)
    assert ema.state_dict()["average"]["num_updates"] == 1  # two windows: a copy, and one update


def test_an_evaluation_that_breaks_off_leaves_the_training_weights():
    ema = EMA(None, smoothing=0.5)

    class Broken(nn.CrossEntropyLoss):
        def forward(self, x, y):
            if not torch.is_grad_enabled():
                raise RuntimeError("no evaluation today")
            return super().forward(x, y)

    trainer = conv_run(ema)
    trainer.loss_func = Broken()
    last = Watch(Event.EPOCH_END, lambda state: weights(state.model))
    trainer.callback_handler.add_callback(last)
    with pytest.raises(RuntimeError, match="no evaluation"):
        train(trainer, image_data(), eval_dataset=image_data(6), num_epochs=1)
    assert same(weights(trainer.model), last.values[-1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"smoothing": 0.9}, "both"),
        ({"half_life": None}, "neither"),
        ({"half_life": "10ba", "update_interval": "1ep"}, "units"),
        ({"half_life": "0.1dur"}, "expected batches"),
        ({"half_life": None, "smoothing": 1.5}, "from 0 to 1"),
        ({"half_life": "0ba"}, "expected batches"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        EMA(**arguments)


def test_asking_for_an_average_that_is_not_there_says_so():
    with pytest.raises(ValueError, match="no model yet"):
        EMA().get_ema_model(ConvNet())
    ema = EMA()
    conv_run(ema)
    copied = copy.deepcopy(ema.config())
    assert copied["half_life"] == "1000ba" and EMA(None, smoothing=0.99).smoothing == 0.99


def test_complex_weights_are_averaged():
    model, average = nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2, dtype=torch.complex64)
    expected = 0.75 * average.weight + 0.25 * model.weight
    compute_ema(model, average, smoothing=0.75)
    torch.testing.assert_close(average.weight, expected)
