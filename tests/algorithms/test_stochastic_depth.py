"""Blocks are skipped as often as asked, whole or by sample, and scaled in evaluation."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.algorithms.sam import SAM
from drivetrain.algorithms.stochastic_depth import (
    BlockStochasticModule,
    StochasticDepth,
    apply_stochastic_depth,
    set_drop_rates,
    stochastic_blocks,
)
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.train.trainer import Trainer
from tests.algorithms.surgery_models import ConvNet, TextNet, images, texts


class Bottleneck(nn.Module):
    """The block of a deep ResNet, with the attribute names that torchvision uses."""

    def __init__(self, inputs, width, outputs, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else None

    def branch(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))

    def forward(self, x):
        return self.relu(self.branch(x) + (x if self.downsample is None else self.downsample(x)))


def make_resnet():
    torch.manual_seed(0)
    return nn.Sequential(Bottleneck(4, 2, 8, 2), Bottleneck(8, 2, 8), Bottleneck(8, 2, 8))


class Half(nn.Module):
    """A block that is easy to check: x becomes x + w."""

    def __init__(self):
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.weight


def make_stack(blocks=4):
    return nn.Sequential(*(Half() for _ in range(blocks)))


@pytest.mark.parametrize(("distribution", "expected"), [("linear", [0.2, 0.4, 0.6, 0.8]), ("uniform", [0.8] * 4)])
def test_rates_follow_the_distribution(distribution, expected):
    net = make_stack()
    apply_stochastic_depth(net, drop_rate=0.8, drop_distribution=distribution)
    assert [block.drop_rate for block in net] == pytest.approx(expected)
    assert all(isinstance(block, BlockStochasticModule) for block in net)


def test_a_dropped_block_returns_its_input_and_costs_nothing():
    net = make_stack(2)
    apply_stochastic_depth(net, drop_rate=1.0, drop_distribution="uniform")
    x = torch.randn(3, 4)
    assert net(x) is x
    set_drop_rates(list(net), 0.0, "uniform")
    torch.testing.assert_close(net(x), x + 2)


def test_evaluation_scales_the_change_of_each_block():
    net = make_stack(2)
    apply_stochastic_depth(net, drop_rate=0.5)
    x = torch.randn(3, 4)
    torch.testing.assert_close(net.eval()(x), x + 0.75 + 0.5)


def test_blocks_are_dropped_as_often_as_asked():
    net, generator = make_stack(3), torch.Generator().manual_seed(0)
    apply_stochastic_depth(net, drop_rate=0.6, generator=generator)
    runs, x = 600, torch.zeros(1, 4)
    dropped = torch.zeros(3)
    for _ in range(runs):
        net(x)
        dropped += torch.tensor([float(block.is_dropped) for block in net])
    rates = torch.tensor([0.2, 0.4, 0.6])
    assert ((dropped / runs - rates).abs() < 3.5 * (rates * (1 - rates) / runs).sqrt()).all()


def test_samples_have_their_own_choice_and_are_not_rescaled():
    net = make_stack(1 + 1)
    apply_stochastic_depth(net, stochastic_method="sample", drop_rate=0.5, drop_distribution="uniform")
    x = torch.zeros(2000, 4)
    out = net(x)
    assert set(out.unique().tolist()) == {0.0, 1.0, 2.0}
    assert (out == out[:, :1]).all()
    assert out.mean().item() == pytest.approx(1.0, abs=0.08)
    torch.testing.assert_close(net.eval()(x), torch.ones_like(x))


@pytest.mark.parametrize("target", ["ResNetBottleneck", "auto", "Bottleneck", Bottleneck])
def test_bottlenecks_skip_their_branch_only(target):
    net, plain = make_resnet(), make_resnet()
    apply_stochastic_depth(net, target, drop_rate=1.0, drop_distribution="uniform")
    x = torch.randn(2, 4, 8, 8).relu()
    first = plain[0].relu(plain[0].downsample(x))
    torch.testing.assert_close(net(x), first)
    set_drop_rates(list(net), 0.4, "uniform")
    net.eval(), plain.eval()
    expected = x
    for block in plain:
        identity = expected if block.downsample is None else block.downsample(expected)
        expected = block.relu(0.6 * block.branch(expected) + identity)
    torch.testing.assert_close(net(x), expected)
    set_drop_rates(list(net), 0.0, "uniform")
    torch.testing.assert_close(net.train()(x), plain.train()(x))


def test_auto_leaves_blocks_alone_that_change_the_shape():
    class Basic(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.conv, self.conv2 = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Conv2d(outputs, outputs, 1)

        def forward(self, x):
            return self.conv2(self.conv(x))

    net = nn.Sequential(Basic(4, 4, 1), Basic(4, 8, 2), Basic(8, 8, 1))
    apply_stochastic_depth(net)
    assert stochastic_blocks(net) == [net[0], net[2]]
    assert [block.drop_rate for block in stochastic_blocks(net)] == pytest.approx([0.1, 0.2])


def test_names_and_keys_stay():
    net = TextNet()
    keys = list(net.state_dict())
    apply_stochastic_depth(net)
    assert list(net.state_dict()) == keys and isinstance(net.encoder.layers[0], nn.TransformerEncoderLayer)
    assert len(stochastic_blocks(net)) == 2


def test_a_block_that_changes_the_shape_is_named_when_it_runs():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    apply_stochastic_depth(net, nn.Linear, drop_rate=0.0001)
    with pytest.raises(TypeError, match="cannot skip Linear"):
        net(torch.randn(2, 4))


class InTuple(Half):
    """A block of a transformer: it returns a tuple, in which nothing, None or its attention weights follow the result."""

    def __init__(self, others):
        super().__init__()
        self.others, self.runs = others, 0
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, mask=None):
        self.runs += 1
        return (x + nn.functional.dropout(self.norm(x), 0.1) * 0 + self.weight, *self.others)


class Pile(nn.Module):
    def __init__(self, others):
        super().__init__()
        self.blocks = nn.ModuleList(InTuple(others) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x, *others = block(x, mask=None)
            assert tuple(others) == self.blocks[0].others
        return x


@pytest.mark.parametrize(("others", "runs"), [((), 1), ((None, None), 1), ((torch.ones(1), None), 3)])
def test_blocks_that_return_tuples_are_skipped(others, runs):
    """A skipped block runs once, to learn what it returns; always where that is more than its result."""
    net = Pile(others)
    settings = {"drop_rate": 1.0, "drop_distribution": "uniform", "generator": torch.Generator()}
    apply_stochastic_depth(net, InTuple, **settings)  # "auto" would try the blocks out
    x = torch.randn(2, 4)
    numbers, buffers = torch.get_rng_state(), [buffer.clone() for buffer in net.buffers()]
    for _ in range(2):
        assert torch.equal(net(x), x)
    assert [block.runs for block in net.blocks] == [runs] * 3
    if runs == 1:
        assert torch.equal(torch.get_rng_state(), numbers) and all(map(torch.equal, net.buffers(), buffers))
    set_drop_rates(list(net.blocks), 0.5, "uniform")
    torch.testing.assert_close(net.eval()(x), x + 1.5)


@pytest.mark.parametrize("others", [(), (None,), (torch.ones(1),)])
def test_a_tuple_is_recomputed_and_compiled_like_a_tensor(others):
    net = Pile(others)
    apply_stochastic_depth(net, drop_rate=0.6, drop_distribution="uniform", generator=torch.Generator().manual_seed(3))
    twin, compiled = copy.deepcopy(net), copy.deepcopy(net)
    checkpoint_blocks(twin, "InTuple")
    compiled.compile(backend="eager")
    x = torch.randn(2, 4, requires_grad=True)  # where every block is skipped, too, there is something to differentiate
    for _ in range(3):
        a, b = net(x), twin(x)
        torch.testing.assert_close(a, b)
        a.sum().backward(), b.sum().backward()
        assert compiled(x).shape == x.shape
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    torch._dynamo.reset()


def test_rate_zero_has_no_effect():
    with pytest.warns(NoEffectWarning, match="skips nothing"):
        apply_stochastic_depth(make_stack(), drop_rate=0.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"drop_rate": 1.2},
        {"drop_rate": -0.1},
        {"stochastic_method": "blocks"},
        {"drop_distribution": "linaer"},
        {"stochastic_method": "sample", "drop_warmup": 0.1},
        {"drop_warmup": 1.5},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError):
        StochasticDepth(**settings)


def test_an_unknown_block_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="ConvBlock"):
        apply_stochastic_depth(ConvNet(), "ConvBlok")


@pytest.mark.parametrize("target", ["ResNetBottleneck", Bottleneck], ids=["name", "class"])
def test_a_kind_of_block_that_does_not_occur_is_warned_about(target):
    model = ConvNet()
    with pytest.warns(NoEffectWarning, match=r"found no (ResNetBottleneck|Bottleneck) in ConvNet"):
        apply_stochastic_depth(model, target)
    assert stochastic_blocks(model) == []


def test_before_the_first_batch_of_a_warm_up_nothing_is_scaled():
    model = TextNet().eval()
    tokens = texts().tensors[0][:2]
    expected = model(tokens)
    Trainer(model, None, None, callbacks=(), algorithms=[StochasticDepth(drop_rate=0.5, drop_warmup=0.5)])
    torch.testing.assert_close(model.eval()(tokens), expected)


@pytest.mark.parametrize("warmup", [0.1, "0.5dur", "4ba", "1ep"])
def test_warm_up_reaches_the_rate(warmup):
    model = TextNet()
    algorithm = StochasticDepth(drop_rate=0.4, drop_distribution="uniform", drop_warmup=warmup)
    rates = []

    class Watch:
        def batch_end(self, state, logger):
            rates.append(stochastic_blocks(state.model)[0].drop_rate)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[Watch()], algorithms=[algorithm])
    trainer.train(texts(), num_epochs=10, per_device_batch_size=8)
    assert rates[0] == 0 and rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.4)


def test_warm_up_follows_the_elapsed_fraction():
    state = State(model=make_stack(2), seed=0, max_duration="10ba")
    engine = Engine(state, plugins=[StochasticDepth(drop_rate=0.8, drop_warmup=0.5)])
    engine.fire(Event.INIT)
    seen = []
    for _ in range(7):
        engine.fire(Event.BATCH_START)
        seen.append(state.model[1].drop_rate)
        state.clock.next_batch(samples=1)
    assert seen == pytest.approx([0.8 * min(1, batch / 5) for batch in range(7)])


def test_recomputation_meets_the_same_choice():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 1), *ConvNet().blocks)
    apply_stochastic_depth(net, drop_rate=0.6, drop_distribution="uniform", generator=torch.Generator().manual_seed(3))
    twin = copy.deepcopy(net)
    checkpoint_blocks(twin, "ConvBlock")
    x = images().tensors[0]
    for _ in range(4):
        a, b = net(x), twin(x)
        torch.testing.assert_close(a, b)
        a.square().sum().backward(), b.square().sum().backward()
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_blocks_compiled_by_themselves_are_still_skipped():
    net = make_stack(2)
    apply_stochastic_depth(net, drop_rate=1.0, drop_distribution="uniform")
    for block in net:
        block.compile(backend="eager")
    x = torch.randn(2, 4)
    assert net(x) is x
    set_drop_rates(list(net), 0.0, "uniform")
    torch.testing.assert_close(net(x), x + 2)
    torch._dynamo.reset()


class Own(nn.Module):
    """A class that torch does not define: some versions compile the blocks of a plain `nn.Sequential` one by one."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return self.blocks(x)


def test_a_compiled_model_is_compiled_once_for_all_choices_and_rates():
    from torch._dynamo.testing import CompileCounter

    net, counter = Own(make_stack(3)), CompileCounter()
    apply_stochastic_depth(net, drop_rate=0.5, drop_distribution="uniform")
    net.compile(backend=counter)
    x = torch.zeros(2, 4)
    seen = set()
    for step in range(20):
        set_drop_rates(list(net.blocks), 0.3 + 0.01 * step, "uniform")
        seen.add(net(x)[0, 0].item())
    assert counter.frame_count == 1 and len(seen) > 1
    torch._dynamo.reset()


def draw_choices(seed):
    model = make_stack(6)
    Engine(State(model=model, seed=seed), plugins=[StochasticDepth(drop_rate=0.5)]).fire(Event.INIT)
    choices = []
    for _ in range(4):
        model(torch.zeros(1, 4))
        choices.append([block.is_dropped for block in model])
    return choices


def test_all_ranks_skip_the_same_blocks(world2):
    first, second = world2(draw_choices, 7)
    assert first == second == draw_choices(7) != draw_choices(8)


def train_in_ddp(rank_data):
    from drivetrain.module.ddp import wrap_ddp
    from drivetrain.runtime.ranks import get_rank

    torch.manual_seed(0)
    model = ConvNet()
    algorithm = StochasticDepth(drop_rate=0.7)
    Engine(State(model=model, seed=1), plugins=[algorithm]).fire(Event.INIT)
    wrapped = wrap_ddp(model, find_unused_parameters=algorithm.find_unused_parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = (tensor[get_rank() :: 2] for tensor in rank_data)
    for _ in range(5):
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_skipped_blocks_do_not_disturb_the_averaging_of_gradients(world2):
    first, second = world2(train_in_ddp, images().tensors)
    assert all(map(torch.equal, first, second))


def test_a_class_is_saved_by_its_name():
    assert StochasticDepth(Bottleneck).config()["target_layer_name"] == "Bottleneck"


def test_a_pass_that_is_repeated_skips_the_same_blocks():
    seen = []
    model = TextNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithms = [StochasticDepth(drop_rate=0.5, drop_distribution="uniform"), SAM()]
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=algorithms, seed=1)
    model.register_forward_hook(lambda *_: seen.append([block.is_dropped for block in stochastic_blocks(model)]))
    trainer.train(texts(), num_epochs=2, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
    assert seen[::2] == seen[1::2] and len({tuple(choice) for choice in seen}) > 1


def test_a_compiled_loss_which_is_tried_out_first_leaves_the_choices_as_they_are():
    def choices(loss):
        model, seen = TextNet(), []
        algorithms = [StochasticDepth(drop_rate=0.5, drop_distribution="uniform")]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, loss, optimizer, callbacks=(), algorithms=algorithms, seed=1, device="cpu")
        note = lambda trainer: seen.append([block.is_dropped for block in stochastic_blocks(model)])
        trainer.optimizer_step = lambda: note(trainer)
        trainer.train(texts(), num_epochs=3, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
        return seen

    compiled = nn.CrossEntropyLoss()
    compiled.compile(backend="eager")
    assert choices(compiled) == choices(nn.CrossEntropyLoss())


def test_a_state_of_another_number_of_ranks_keeps_the_choices_of_all_alike():
    def prepared():
        model = TextNet()
        state = State(model=model, rank_zero_seed=3, algorithms=[StochasticDepth(drop_rate=0.5)])
        Engine(state, plugins=state.algorithms).fire(Event.INIT)
        return state, model

    state, model = prepared()
    model(texts().tensors[0][:2])
    saved = state.state_dict()
    expected = state.generators["StochasticDepth"].get_state()
    other, _ = prepared()  # whose generator, as on a new rank, starts elsewhere
    saved["generators"] = {}
    other.generators["StochasticDepth"].manual_seed(99)
    other.load_state_dict(saved, strict=False)
    assert torch.equal(other.generators["StochasticDepth"].get_state(), expected)
