"""The model is compiled once, in place, after everything that changes it."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms import BlurPool, LowPrecisionGroupNorm, MixUp, ProgressiveResizing, TorchCompile
from drivetrain.core.event import Event
from drivetrain.module.wrapping import wrapping_of
from drivetrain.train.trainer import Trainer
from drivetrain.train.verification import verify_resume
from tests.algorithms.surgery_models import ConvNet, TextNet, images, texts


@pytest.fixture(autouse=True)
def fresh_compiler():
    limit = torch._dynamo.config.recompile_limit if hasattr(torch, "_dynamo") else None
    yield
    torch._dynamo.reset()
    if limit is not None:
        torch._dynamo.config.recompile_limit = limit


def build(model=None, algorithms=(), precision=None, **settings):
    torch.manual_seed(0)
    model = ConvNet() if model is None else model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plugins = [TorchCompile(backend="eager", **settings), *algorithms]
    given = {"callbacks": (), "algorithms": plugins, "seed": 3, "precision": precision}
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, **given)


def compiled(model):
    return [name for name, module in model.named_modules() if wrapping_of(module) == "module.compile()"]


@pytest.mark.parametrize(
    ("regional", "where"),
    [
        ("auto", ["encoder.layers.0", "encoder.layers.1"]),
        (True, ["encoder.layers.0", "encoder.layers.1"]),
        (False, [""]),
    ],
)
def test_blocks_or_the_whole_are_compiled_in_place(regional, where):
    trainer = build(TextNet, regional=regional)
    keys = list(trainer.model.state_dict())
    trainer.train(texts(), num_epochs=1, per_device_batch_size=8)
    assert compiled(trainer.model) == where and list(trainer.model.state_dict()) == keys
    trainer.train(texts(), num_epochs=1, per_device_batch_size=8)


def test_training_is_what_it_is_without():
    ends = []
    for plugins in ([], None):
        trainer = build()
        if plugins is not None:
            trainer.engine.set_plugins(plugins)
        trainer.train(images(), num_epochs=2, per_device_batch_size=8)
        ends.append(list(trainer.model.parameters()))
    for p, q in zip(*ends):
        torch.testing.assert_close(p, q)


def test_it_acts_after_load_and_after_all_surgery():
    plugins = [LowPrecisionGroupNorm(apply_at="after_load"), BlurPool(min_channels=8)]
    trainer = build(algorithms=plugins, precision="bf16")
    order = [str(plugin) for plugin in trainer.engine.listeners(Event.AFTER_LOAD)]
    assert order == ["LowPrecisionGroupNorm", "TorchCompile"]
    assert [event for event in Event if TorchCompile().match(event, None)] == [Event.AFTER_LOAD]
    trainer.train(images(), num_epochs=1, per_device_batch_size=8)


def test_a_batch_algorithm_causes_no_graph_break():
    trainer = build(algorithms=[MixUp(0.2)], regional=False, fullgraph=True)
    trainer.train(images(), num_epochs=1, per_device_batch_size=8)


def test_resume_is_exact():
    assert verify_resume(lambda: build(TextNet), texts(), num_steps=4, per_device_batch_size=8).is_exact


def test_announced_sizes_get_room_and_too_many_a_warning():
    trainer = build(algorithms=[ProgressiveResizing(size_increment=32)], regional=False)
    announced = ProgressiveResizing(size_increment=32).count_shapes()
    trainer.engine.fire(Event.AFTER_LOAD)
    assert torch._dynamo.config.recompile_limit >= 2 * announced
    many = build(algorithms=[ProgressiveResizing(size_increment=1)], regional=False)
    with pytest.warns(UserWarning, match="input sizes"):
        many.engine.fire(Event.AFTER_LOAD)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="reduce-overhead"):
        TorchCompile(mode="reduce_overhead")
    with pytest.raises(ValueError, match="regional"):
        TorchCompile(regional="blocks")


def train_blurred(rank_seed):
    model = ConvNet()
    torch.manual_seed(rank_seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plugins = [BlurPool(min_channels=8), TorchCompile(backend="eager")]
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=plugins, seed=3, device="cpu")
    trainer.train(images(), num_epochs=1, per_device_batch_size=4)
    return [p.detach().sum().item() for p in trainer.model.parameters()]


@pytest.mark.filterwarnings("default")
def test_blur_pool_and_compilation_train_on_two_processes(world2):
    first, second = world2(train_blurred, 0)
    assert first == second
