"""Layer freezing: which layers, when, and that the optimizer stays aligned."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.layer_freezing import LayerFreezing, freeze_layers
from drivetrain.algorithms.weight_standardization import apply_weight_standardization
from drivetrain.core.event import Event
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import Log, Watch, image_data, train
from tests.train.tasks import make_data, make_trainer
from tests.train.tasks import train as train_plain


def test_the_function_freezes_in_order_and_takes_parameters_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert freeze_layers(model, optimizer, 0.5) == (0, 0.0)
    depth, fraction = freeze_layers(model, optimizer, 0.84, freeze_level=1.0)
    assert depth == 2 and fraction == pytest.approx(0.68)
    frozen = [*model[0].parameters(), *model[1][0].parameters()]
    assert not any(p.requires_grad or p.grad is not None or p in optimizer.state for p in frozen)
    held = optimizer.param_groups[0]["params"]
    assert len(held) == 4 and all(p.requires_grad and p in optimizer.state for p in held)
    assert freeze_layers(model, [optimizer], 1.0) == (3, 1.0) and model[2].weight.requires_grad


def test_a_run_freezes_more_and_more_and_logs_it():
    log, algorithm = Log(), LayerFreezing(0.25, 0.8)
    depths = Watch(Event.EPOCH_START, lambda state: sum(not p.requires_grad for p in state.model.parameters()))
    trainer = conv_run(algorithm, callbacks=[depths], loggers=[log])
    train(trainer, image_data(), num_epochs=8)
    # Conv, batch norm, conv; the head is never frozen. Fractions 0.8 (e - 0.25) / 0.75 of 3 layers, rounded down.
    expected = [2 * int(round(3 * 0.8 * max(0.0, e / 8 - 0.25) / 0.75, 9)) for e in range(8)]
    assert depths.values == expected and max(expected) > 0
    logged = [m for m in log.metrics if "layer_freezing/layers_frozen" in m]
    assert logged[-1]["layer_freezing/percentage_frozen"] == pytest.approx(0.8)
    assert len(trainer.optimizer.param_groups[0]["params"]) == 8  # the class leaves the groups alone


def test_frozen_weights_stay_and_the_others_move():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    trainer = make_trainer(model, algorithms=[LayerFreezing(0.0)])
    seen = Watch(Event.EPOCH_START, lambda state: [p.detach().clone() for p in state.model.parameters()])
    trainer.callback_handler.add_callback(seen)
    train_plain(trainer, make_data(), num_epochs=4)  # of two layers one is frozen after the second epoch
    second, third, fourth = seen.values[1:]
    assert all(map(torch.equal, third[:2], fourth[:2])) and not torch.equal(second[0], third[0])
    assert not any(map(torch.equal, third[2:], fourth[2:]))


def freeze_on_rank():
    from tests.train.tasks import make_data, make_model, make_trainer, train

    trainer = make_trainer(make_model(), algorithms=[LayerFreezing(0.0, 1.0)], seed=1)
    kinds = Watch(Event.EPOCH_START, lambda state: type(state.model).__name__)
    trainer.callback_handler.add_callback(kinds)
    train(trainer, make_data(), num_epochs=3, per_device_batch_size=4)
    frozen = [not p.requires_grad for p in trainer.model.parameters()]
    return kinds.values, frozen, [p.detach() for p in trainer.model.parameters()]


def test_two_processes_freeze_alike_and_stay_alike(world2):
    (kinds, frozen, first), (_, _, second) = world2(freeze_on_rank)
    assert set(kinds) == {"TransparentDDP"} and frozen == [True, True, False, False]
    assert all(map(torch.equal, first, second))


def test_bad_settings_are_refused():
    for arguments in ({"freeze_start": 1.5}, {"freeze_level": -1}, {"freeze_start": 1}):
        with pytest.raises(ValueError, match="LayerFreezing"):
            LayerFreezing(**arguments)


def test_a_tied_weight_trains_as_long_as_the_last_layer():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert freeze_layers(model, optimizer, 1.0) == (2, 1.0)
    assert model[2].weight.requires_grad and not model[1].weight.requires_grad
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model[2].parameters()}


def test_a_parametrized_layer_is_frozen_as_one():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1, bias=False), nn.Flatten(), nn.Linear(3, 2))
    apply_weight_standardization(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert freeze_layers(model, optimizer, 0.5, freeze_start=0) == (1, 0.5)
    names = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert names == ["0.bias", "0.parametrizations.weight.original"]
    assert freeze_layers(model, optimizer, 1.0) == (2, 1.0) and len(optimizer.param_groups[0]["params"]) == 2
