import copy

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.module.compilation import compile_loss, compile_module, set_recompile_limit
from tests.module import models

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


class CountingBackend:
    """Runs graphs as they are and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


def compiled_modules(model):
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def gpt():
    torch.manual_seed(0)
    return models.GPT2(depth=3)


@pytest.mark.parametrize("scope", ["auto", "block", "model"])
def test_outputs_and_gradients_equal_eager_and_no_key_changes(scope):
    plain, model = gpt(), gpt()
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    assert compile_module(model, scope, backend="aot_eager") is model
    assert [n for n, _ in model.named_parameters()] == names and list(model.state_dict()) == keys
    blocks = [f"transformer.h.{i}" for i in range(3)]
    assert compiled_modules(model) == ([""] if scope == "model" else blocks)
    for network in (plain, model):
        network(TOKENS).square().mean().backward()
    for expected, parameter in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_repeated_blocks_share_one_compilation():
    backend = CountingBackend()
    model = compile_module(gpt(), backend=backend)
    torch.testing.assert_close(model(TOKENS), gpt()(TOKENS))
    assert backend.graphs == 1


def test_a_model_without_repeated_blocks_is_compiled_whole():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert compiled_modules(compile_module(model, backend="eager")) == [""]
    assert compiled_modules(compile_module(copy.deepcopy(model), "block", backend="eager")) == [""]


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


TORCHS_OWN = {
    "sequential": (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()), "model", 1),
    "linear": (lambda: nn.Linear(16, 16), "model", 1),
    "encoder": (encoder, "model", 1),
    "encoder's layers": (encoder, "block", 2),  # the first one's input needs no gradient
}


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_modules_of_torch_s_own_classes_are_compiled_too(name):
    build, scope, graphs = TORCHS_OWN[name]
    backend, plain = CountingBackend(), build()
    compiled = copy.deepcopy(plain)
    compile_module(compiled, scope, backend=backend)
    x = torch.randn(2, 5, 16)
    assert_same_training(plain, compiled, x)
    assert backend.graphs == graphs and list(compiled.state_dict()) == list(plain.state_dict())
    again = copy.deepcopy(compiled)  # a copy is not compiled, as torch's own copies are not
    again(x)
    assert backend.graphs == graphs


def assert_same_training(plain, compiled, x):
    for model in (plain, compiled):
        model(x).square().sum().backward()
    for one, other in zip(plain.parameters(), compiled.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_classes_of_torch_s_own_do_not_use_up_each_other_s_compilations():
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 2
    backend, x = CountingBackend(), torch.randn(2, 16)
    modules = [nn.Linear(16, 4), nn.Linear(16, 4, bias=False), nn.Sequential(nn.ReLU()), nn.LayerNorm(16), nn.GELU()]
    for module in modules:
        compile_module(module, "model", backend=backend)(x)
    assert backend.graphs == len(modules)


def test_a_loss_of_torch_s_own_is_compiled_too():
    backend = CountingBackend()
    loss = compile_loss(nn.MSELoss(), backend=backend)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert loss(x, y) == nn.MSELoss()(x, y) and backend.graphs == 1 and isinstance(loss, nn.MSELoss)


def test_checkpointed_blocks_compile_and_give_the_same_gradients():
    plain, model = gpt(), gpt()
    checkpoint_blocks(model)
    compile_module(model, "block", backend="aot_eager", fullgraph=True)
    for network in (plain, model):
        network(TOKENS).square().mean().backward()
    for expected, parameter in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.slow
def test_the_recompile_limit_makes_room_for_blocks_of_many_shapes():
    import torch._dynamo

    set_recompile_limit(2)
    backend = CountingBackend()
    torch.manual_seed(0)
    model = models.ResNet(depths=(2, 2, 2)).eval()
    x = torch.randn(1, 3, 8, 8)
    expected = model(x)
    compile_module(model, "block", backend=backend)
    assert torch._dynamo.config.recompile_limit == 12
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert backend.graphs >= 6  # the first block of each stage and the others, none left uncompiled


def test_the_limit_is_returned_and_restored():
    old = set_recompile_limit(50)
    assert set_recompile_limit(old) == 50
    with pytest.raises(ConfigError, match="at least 1"):
        set_recompile_limit(0)


def test_an_unknown_scope_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'block'"):
        compile_module(gpt(), "blok")


def compile_distributed_models():
    """Compiled inside DDP, around DDP and under fully_shard: compiled code runs, gradients are those of the plain
    model."""
    import torch.distributed as dist

    from drivetrain.module.ddp import wrap_ddp
    from drivetrain.module.sharding import shard_fully
    from drivetrain.module.wrapping import clean_state_dict

    rank, counts = dist.get_rank(), []
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(rank))
    plain = gpt()
    for other in range(2):
        batch = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(other))
        (plain(batch).square().mean() / 2).backward()
    expected = [p.grad for p in plain.parameters()]

    def inside_ddp(backend):
        return wrap_ddp(compile_module(gpt(), "block", backend=backend))

    def around_ddp(backend):
        return compile_module(wrap_ddp(gpt()), "model", backend=backend)

    def in_a_shell(backend):
        return torch.compile(wrap_ddp(gpt()), backend=backend)

    def sharded(backend):
        return shard_fully(compile_module(gpt(), "block", backend=backend))

    for build in (inside_ddp, around_ddp, in_a_shell, sharded):
        torch._dynamo.reset()
        backend = CountingBackend()
        model = build(backend)
        assert list(clean_state_dict(model)) == list(plain.state_dict())
        model(tokens).square().mean().backward()
        for parameter, grad in zip(model.parameters(), expected):
            actual = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-6)
        counts.append(backend.graphs)
    torch._dynamo.reset()
    return counts


@pytest.mark.slow
def test_compilation_works_with_every_kind_of_wrapping(world2):
    counts = world2(compile_distributed_models, timeout=200)
    assert counts[0] == counts[1] and all(count > 0 for count in counts[0]), counts
