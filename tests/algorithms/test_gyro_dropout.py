"""Masks come from a fixed set, parts of a batch have their own, and choices stay as long as asked."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.gyro_dropout import GyroDropout, GyroDropoutLayer, apply_gyro_dropout
from drivetrain.algorithms.utils.run import num_batches
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from drivetrain.module.probing import keeps_shape
from drivetrain.train.trainer import Trainer
from tests.algorithms.surgery_models import ConvNet, images


@pytest.mark.parametrize("shape", [(8, 5), (7, 3, 4), (6, 2, 3, 3)])
def test_row_i_uses_mask_i_tau_over_b(shape):
    layer = GyroDropoutLayer(10, 10, p=0.4, sigma=6, tau=4)
    x = torch.ones(shape)
    out = layer(x)
    for row in range(shape[0]):
        mask = layer.masks[layer.picks[row * 4 // shape[0]]]
        torch.testing.assert_close(out[row], mask / 0.6)
    assert layer.masks.shape == (6, *shape[1:])


def test_choices_stay_for_the_interval():
    layer = GyroDropoutLayer(10, 4, p=0.5, sigma=10, tau=3)  # int(40 / 10) * 3 steps
    assert layer.interval == 12
    picks = []
    for _ in range(36):
        layer(torch.ones(6, 4))
        picks.append(tuple(layer.picks.tolist()))
    assert len(set(picks[:12])) == len(set(picks[12:24])) == 1
    assert len(set(picks)) == 3


def test_a_run_shorter_than_sigma_chooses_anew_each_step():
    assert GyroDropoutLayer(1, 3, sigma=256).interval == 1


def test_evaluation_passes_everything():
    x = torch.randn(3, 4)
    assert GyroDropoutLayer(1, 1).eval()(x) is x
    assert GyroDropoutLayer(1, 1, p=0.0)(x) is x
    assert not GyroDropoutLayer(1, 1, p=1.0)(x).any()


def test_another_feature_size_is_refused():
    layer = GyroDropoutLayer(1, 1)
    layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match="the same size"):
        layer(torch.ones(2, 5))


def test_masks_choice_and_count_are_part_of_the_state():
    first, second = GyroDropoutLayer(10, 10, sigma=4, tau=2), GyroDropoutLayer(10, 10, sigma=4, tau=2)
    x = torch.ones(6, 5)
    for _ in range(3):
        first(x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x)) and second._count == 4 and int(second.steps) == 4
    first.load_state_dict(GyroDropoutLayer(10, 10, sigma=4, tau=2).state_dict())
    assert first.masks is None


@pytest.mark.parametrize(
    ("duration", "length", "expected"), [("3ep", 8, 24), ("5ba", None, 5), ("4st", None, 8)], ids=["ep", "ba", "st"]
)
def test_the_length_of_the_run_is_counted_in_batches(duration, length, expected):
    state = State(max_duration=duration, dataloader_len=length)
    state.accumulation_steps = 2
    assert num_batches(state) == expected


def test_a_run_of_unknown_length_is_refused():
    state = State(model=ConvNet(), seed=0, max_duration="10sec")
    engine = Engine(state, plugins=[GyroDropout()])
    engine.fire(Event.INIT)
    with pytest.raises(ValueError, match="10sec"):
        engine.fire(Event.FIT_START)


def test_the_trainer_tells_the_layers_how_long_they_live():
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = GyroDropout(sigma=3, tau=2)
    Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=[algorithm]).train(
        images(), num_epochs=2, per_device_batch_size=5
    )
    assert model.dropout.total_iterations == 10 and int(model.dropout.steps) == 10


@pytest.mark.parametrize("settings", [{"microbatch_size": 2}, {"gradient_accumulation_steps": 2}, {}], ids=str)
@pytest.mark.parametrize("others", [[], ["SAM"], ["SelectiveBackprop"]], ids=str)
def test_a_batch_is_one_step_however_many_passes_it_takes(settings, others):
    from drivetrain import algorithms

    model, seen = ConvNet(), []
    extra = [getattr(algorithms, name)(**({} if name == "SAM" else {"start": 0, "end": 1})) for name in others]

    class Watch:
        def batch_end(self, state, logger):
            seen.append((int(model.dropout.steps), tuple(model.dropout.picks.tolist())))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugins = [GyroDropout(sigma=4, tau=3), *extra]  # int(12 / 4) * 3 = 9 steps
    Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[Watch()], algorithms=plugins, seed=2).train(
        images(), num_epochs=2, per_device_batch_size=4, **settings
    )
    assert [steps for steps, _ in seen] == list(range(1, 13))
    assert len({picks for _, picks in seen[:9]}) == len({picks for _, picks in seen[9:]}) == 1


def test_a_recomputed_block_meets_the_same_masks():
    from drivetrain.module.checkpointing import checkpoint_blocks

    torch.manual_seed(0)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)), nn.Linear(4, 2))
        if recompute:
            checkpoint_blocks(model, [model[0]])
        apply_gyro_dropout(model, 1, 4, sigma=4, tau=1)
        layer = next(module for module in model.modules() if isinstance(module, GyroDropoutLayer))
        layer.counts_passes = False
        x = torch.ones(3, 4)
        for step in range(4):
            torch.manual_seed(step)
            layer.choose(step)
            model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_the_function_takes_the_length_and_checks_its_settings():
    net = nn.Sequential(nn.Dropout(0.1))
    apply_gyro_dropout(net, 5, 6, p=0.2, sigma=3, tau=1)
    assert net[0].total_iterations == 30 and net[0].p == 0.2
    for settings in ({"p": 1.5}, {"sigma": 0}, {"tau": 0}):
        with pytest.raises(ValueError):
            GyroDropout(**settings)


def test_a_trial_on_fake_tensors_leaves_no_masks_behind():
    block = nn.Sequential(nn.Linear(4, 4), GyroDropoutLayer(1, 1, sigma=4, tau=2))
    assert keeps_shape(block) and block[1].masks is None
    assert block(torch.randn(2, 3, 4)).shape == (2, 3, 4)


def masks_of_a_run() -> list[torch.Tensor]:
    model = ConvNet()
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=(),
        algorithms=[GyroDropout(sigma=4, tau=3)],
        seed=2,
    )
    trainer.train(images(), max_duration="2ba", global_batch_size=4)
    return [model.dropout.masks, model.dropout.picks]


def test_all_ranks_train_the_same_subnetworks_as_one_process(world2):
    alone = masks_of_a_run()
    for ours in world2(masks_of_a_run):
        assert all(map(torch.equal, ours, alone))
