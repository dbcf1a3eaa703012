"""Schedule-free training: x is evaluated, y is trained, and batch norms fit x."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.schedule_free import ScheduleFree
from drivetrain.core.event import Event
from drivetrain.optim import AdamWScheduleFree
from drivetrain.train.trainer import Trainer
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import ConvNet, Watch, image_data, same, train, weights
from tests.train.tasks import make_data, make_model
from tests.train.tasks import train as train_plain


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def test_evaluation_sees_x_training_goes_on_from_y_and_the_run_ends_with_x():
    evaluated = Watch(Event.EVAL_BATCH_START, lambda state: weights(state.model))
    trained = Watch(Event.BATCH_START, lambda state: weights(state.model))
    trainer = conv_run(ScheduleFree("adamw", 0.02, warmup="3ba"), callbacks=[evaluated, trained])
    train(trainer, image_data(), eval_dataset=image_data(6), num_epochs=3)
    undisturbed = Watch(Event.BATCH_START, lambda state: weights(state.model))
    plain = conv_run(ScheduleFree("adamw", 0.02, warmup="3ba"), callbacks=[undisturbed])
    train(plain, image_data(), num_epochs=3)
    assert all(map(same, trained.values, undisturbed.values))  # weights and statistics
    assert same(weights(plain.model), weights(trainer.model)) and not trainer.optimizer.training
    assert all(map(torch.equal, parameters(trainer.model), evaluated.values[-1][:2]))
    with torch.no_grad():
        group, parameter = trainer.optimizer.param_groups[0], trainer.model.head.weight
        assert group["k"] == 12 and group["warmup_steps"] == 3
        x = parameter.detach().clone()
        trainer.optimizer.train()
        y, z = parameter, trainer.optimizer.state[parameter]["z"]
        torch.testing.assert_close(y.detach(), 0.1 * z + 0.9 * x)


def test_statistics_are_those_of_the_averaged_weights():
    trainer = conv_run(ScheduleFree("sgd", 0.2, bn_batches=2))
    train(trainer, image_data(), num_epochs=2, train_dataloader_kwargs={"shuffle": False})
    model = ConvNet()
    model.load_state_dict(trainer.model.state_dict())
    norm = model.features[1]
    norm.reset_running_stats()
    norm.momentum = None
    images = image_data().tensors[0]
    with torch.no_grad():
        for rows in (slice(0, 6), slice(6, 12)):
            model.features[1](model.features[0](images[rows]))
    torch.testing.assert_close(trainer.model.features[1].running_var, norm.running_var)
    torch.testing.assert_close(trainer.model.features[1].running_mean, norm.running_mean)


def test_a_model_without_batch_norms_equals_the_optimizer_given_directly():
    model = make_model()
    algorithm = ScheduleFree(lr=0.05, beta=0.8, beta2=0.9, weight_decay=0.1, r=1, weight_lr_power=1)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1.0), (), algorithms=[algorithm]
    )
    train_plain(trainer, make_data(), num_epochs=2)
    other = make_model()
    optimizer = AdamWScheduleFree(other.parameters(), 0.05, (0.8, 0.9), weight_decay=0.1, r=1, weight_lr_power=1)
    direct = Trainer(other, nn.CrossEntropyLoss(), optimizer, ())
    train_plain(direct, make_data(), num_epochs=2)
    optimizer.eval()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_scheduler_is_refused_before_the_first_step():
    trainer = conv_run(ScheduleFree(lr=0.1))
    before = weights(trainer.model)
    with pytest.raises(ValueError, match="ScheduleFree replaces the schedule"):
        train(trainer, image_data(), create_scheduler_fn=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    assert same(weights(trainer.model), before)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "adam"}, "adamw"),
        ({"warmup": "0.1dur"}, "batches or optimizer steps"),
        ({"bn_batches": -1}, "bn_batches"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ScheduleFree(**arguments)


def test_the_rate_of_the_replaced_optimizer_is_taken_over():
    assert conv_run(ScheduleFree("sgd")).optimizer.param_groups[0]["lr"] == 0.05
