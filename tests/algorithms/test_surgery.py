"""What holds for every algorithm that changes a model: when it acts, what it leaves alone, and that training goes on exactly."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from drivetrain import algorithms
from drivetrain.algorithms import SqueezeExcite, registry
from drivetrain.algorithms.alibi import AlibiBias
from drivetrain.algorithms.gated_linear_units import GatedProjection
from drivetrain.algorithms.stochastic_depth import stochastic_blocks
from drivetrain.algorithms.surgery import torch_optimizers
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigTypeError, NoEffectWarning, PluginConflictError
from drivetrain.core.event import Event
from drivetrain.module.surgery import count_module_instances
from drivetrain.train.trainer import Trainer
from drivetrain.train.verification import verify_resume
from tests.algorithms.surgery_models import CASES, ConvNet, TextNet, images, label, texts

every_case = pytest.mark.parametrize("case", CASES, ids=label)
# One of each kind: a new module in front of others, one that replaces a norm, random choices, weights computed anew.
COMPILED = {"SqueezeExcite", "LowPrecisionLayerNorm", "StochasticDepth", "WeightStandardization"}
first_cases = {case.name: case for case in reversed(CASES)}
compiled_cases = pytest.mark.parametrize(  # the compiler takes long, and goes another way for other kinds only
    "case",
    [
        case if case is first_cases[case.name] and case.name in COMPILED else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
    ids=label,
)
NEW_PARAMETERS = ("SqueezeExcite", "Factorize", "GatedLinearUnits")


def operated(case, optimizer=None, seed=0):
    """Return a model that the case's algorithm has changed."""
    model = case.build(seed)
    state = State(model=model, seed=3, optimizers=() if optimizer is None else (optimizer(model),))
    Engine(state, plugins=[case.algorithm()]).fire(Event.INIT)
    return state


def build_trainer(case, **kwargs):
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kwargs = {"precision": case.precision, "seed": 5, "callbacks": (), **kwargs}
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, algorithms=[case.algorithm()], **kwargs)


@every_case
def test_it_acts_at_its_events_and_no_others(case):
    algorithm, state = case.algorithm(), State(model=case.build())
    assert [event.value for event in Event if algorithm.match(event, state)] == [
        event.value for event in Event if event.value in case.events
    ]


@every_case
def test_the_model_learns_with_it(case):
    trainer = build_trainer(case)
    history = trainer.train(case.data(), num_epochs=6, per_device_batch_size=8)
    losses = history.get_metric_values("train_loss_epoch")
    assert losses[-1] < losses[0]


@every_case
def test_a_resumed_run_is_bit_exact(case):
    verdict = verify_resume(lambda: build_trainer(case), case.data(), num_steps=6, per_device_batch_size=8)
    assert verdict.is_exact, str(verdict)


@every_case
def test_a_second_application_changes_nothing(case):
    state = operated(case, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    before, held = [*state.model.named_modules()], list(state.optimizers[0].param_groups[0]["params"])
    Engine(state, plugins=[case.algorithm()]).fire(Event.INIT)
    assert [*state.model.named_modules()] == before
    assert all(a is b for a, b in zip(held, state.optimizers[0].param_groups[0]["params"], strict=True))


@every_case
def test_the_optimizer_holds_exactly_the_models_parameters(case):
    state = operated(case, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    (group,) = state.optimizers[0].param_groups
    trained = {id(p) for p in state.model.parameters() if p.requires_grad}
    assert {id(p) for p in group["params"]} == trained
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.01)


@every_case
def test_optimizer_state_of_kept_parameters_stays(case):
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(case.sample()).float().square().sum().backward()
    optimizer.step()
    kept = {p: optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state}
    Engine(State(model=model, seed=0, optimizers=(optimizer,)), plugins=[case.algorithm()]).fire(Event.INIT)
    still_there = [p for p in model.parameters() if p in kept]
    assert still_there
    assert all(optimizer.state[p]["momentum_buffer"] is kept[p] for p in still_there)
    if case.name not in NEW_PARAMETERS:
        assert len(still_there) == len(kept)


@every_case
def test_it_works_with_two_optimizers(case):
    model = case.build()
    head = [p for name, p in model.named_parameters() if name.startswith("head")]
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizers = (torch.optim.SGD(body, lr=0.1), torch.optim.Adam(head, lr=0.1))
    Engine(State(model=model, seed=0, optimizers=optimizers), plugins=[case.algorithm()]).fire(Event.INIT)
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


@every_case
def test_the_state_dict_goes_into_another_changed_model(case):
    first, second = operated(case, seed=0).model, operated(case, seed=1).model
    second.load_state_dict(first.state_dict())
    x = case.sample()
    assert torch.equal(first.eval()(x), second.eval()(x))


@every_case
def test_a_deep_copy_computes_the_same_by_itself(case):
    model = operated(case).model
    twin = copy.deepcopy(model)
    x = case.sample()
    assert torch.equal(model.eval()(x), twin.eval()(x))
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    assert not shared
    twin.train()(x)


@compiled_cases
def test_the_compiled_model_computes_the_same(case):
    model = operated(case).model
    x = case.sample()
    model.eval()
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    model.train()
    compiled(x).float().square().sum().backward()
    assert sum(p.grad is not None for p in model.parameters()) > 1
    torch._dynamo.reset()


@compiled_cases
def test_the_exported_model_computes_the_same(case):
    model = operated(case).model.eval()
    x = case.sample()
    expected = model(x)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), expected)


@every_case
def test_nothing_to_replace_is_said_once(case):
    state = State(model=nn.Sequential(nn.Bilinear(2, 2, 2)), seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine(state, plugins=[case.algorithm()]).fire(Event.INIT)
    assert [warning.category for warning in caught] == [NoEffectWarning]
    assert case.name in str(caught[0].message)


@every_case
def test_a_checkpoint_can_make_it_again(case):
    algorithm = case.algorithm()
    again = registry.create(case.name, algorithm.config())
    assert type(again) is type(algorithm) and again.config() == algorithm.config()
    assert again.events == algorithm.events


@every_case
def test_match_is_pure(case):
    algorithm, state = case.algorithm(), State(model=case.build(), seed=0)
    before = repr(vars(algorithm)), repr(state.model)
    for _ in range(100):
        for event in Event:
            algorithm.match(event, state)
    assert (repr(vars(algorithm)), repr(state.model)) == before


def train_all(indices):
    """Train with every algorithm on this rank; return a digest of each result."""
    ends = []
    for index in indices:
        trainer = build_trainer(CASES[index], device="cpu")
        trainer.train(CASES[index].data(), num_epochs=1, per_device_batch_size=4)
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    return ends


def test_two_processes_end_with_the_same_weights(world2):
    # Blocks skipped at random need DDP to look for unused parameters; their own test does that.
    indices = [index for index, case in enumerate(CASES) if case.name != "StochasticDepth"]
    first, second = world2(train_all, indices)
    for index, one, other in zip(indices, first, second):
        assert torch.equal(one, other), label(CASES[index])


@pytest.mark.gpu
@every_case
def test_it_trains_on_a_gpu_in_mixed_precision(case):
    trainer = build_trainer(case, device="cuda", precision="bf16")
    history = trainer.train(case.data(), num_epochs=3, per_device_batch_size=8)
    losses = history.get_metric_values("train_loss_epoch")
    assert losses[-1] < losses[0] and next(trainer.model.parameters()).is_cuda


def test_what_a_saved_model_needs_is_declared():
    needed = {case.name for case in CASES if case.algorithm().required_on_load()}
    assert needed == {case.name for case in CASES} - {"ChannelsLast"}
    assert registry.find("FP8Linear").required_on_load() and registry.find("NoOpModel").required_on_load()
    assert not registry.find("TorchCompile").required_on_load()


def test_a_wrapped_model_is_refused():
    for case in CASES:
        model = nn.Sequential(nn.DataParallel(case.build()))
        with pytest.raises(TypeError, match="wrapped"):
            Engine(State(model=model, seed=0), plugins=[case.algorithm()]).fire(Event.INIT)


def test_what_is_no_module_is_refused():
    with pytest.raises(ConfigTypeError, match="BlurPool"):
        Trainer(lambda x: x, nn.CrossEntropyLoss(), callbacks=(), algorithms=[CASES[0].algorithm()])


@pytest.mark.parametrize("form", ["set", "unit", "mapping"])
def test_units_find_the_new_parameters(form):
    from drivetrain.optim import NoamLr
    from drivetrain.optim.optim_set import OptimSet

    model = ConvNet()
    unit = NoamLr("SGD", {"lr": 1.0}, model, warmup_steps=8)
    given = {"set": lambda: OptimSet(main=unit), "unit": lambda: unit, "mapping": lambda: {"main": unit}}[form]()
    algorithm = SqueezeExcite(min_channels=8, latent_channels=2)
    trainer = Trainer(model, nn.CrossEntropyLoss(), given, callbacks=(), algorithms=[algorithm])
    assert {id(p) for p in unit.params} == {id(p) for p in model.parameters()}
    held = [p for group in unit.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    trainer.train(images(), num_epochs=1, per_device_batch_size=8)
    assert torch_optimizers(trainer.state) == []


EFFECTS = {
    "Alibi": lambda model: count_module_instances(model, AlibiBias),
    "BlurPool": lambda model: count_module_instances(model, (algorithms.BlurConv2d, algorithms.BlurMaxPool2d)),
    "ChannelsLast": lambda model: sum(
        p.shape[1] > 1 and not p.is_contiguous() for p in model.parameters() if p.ndim == 4 and p.shape[2] > 1
    ),
    "Factorize": lambda model: count_module_instances(
        model, (algorithms.FactorizedConv2d, algorithms.FactorizedLinear)
    ),
    "GatedLinearUnits": lambda model: count_module_instances(model, GatedProjection),
    "GhostBatchNorm": lambda model: count_module_instances(model, algorithms.GhostBatchNorm2d),
    "GyroDropout": lambda model: count_module_instances(model, algorithms.GyroDropoutLayer),
    "LowPrecisionGroupNorm": lambda model: count_module_instances(model, algorithms.LPGroupNorm),
    "LowPrecisionLayerNorm": lambda model: count_module_instances(model, algorithms.LPLayerNorm),
    "SqueezeExcite": lambda model: count_module_instances(model, algorithms.SqueezeExcite2d),
    "StochasticDepth": lambda model: len(stochastic_blocks(model)),
    "WeightStandardization": lambda model: sum(parametrize.is_parametrized(module) for module in model.modules()),
}
"""How much each algorithm has changed in a model."""
ONE_EACH = {case.name: case for case in reversed(CASES)}
ON_BOTH = ("Factorize", "GyroDropout", "StochasticDepth")


def test_every_surgery_algorithm_has_a_known_effect():
    assert set(EFFECTS) == set(ONE_EACH)


def effects_of(names, model):
    """Return how much each algorithm changed when all act, in this order, on one model in mixed precision."""
    state = State(model=model(), seed=3, precision="amp_bf16")
    Engine(state, plugins=[ONE_EACH[name].algorithm() for name in names]).fire(Event.INIT)
    state.model.eval()(images().tensors[0][:2] if model is ConvNet else texts().tensors[0][:2])
    return {name: EFFECTS[name](state.model) for name in names}


@pytest.mark.parametrize("model", [ConvNet, TextNet])
def test_each_pair_has_the_effects_of_both_in_either_order(model):
    names = [name for name, case in ONE_EACH.items() if case.model is model or name in ON_BOTH]
    alone = {name: effects_of([name], model)[name] for name in names}
    assert all(alone.values())
    for pair in itertools.permutations(names, 2):
        together = effects_of(pair, model)  # a warning would be an error here
        assert all(together[name] >= alone[name] for name in pair), (pair, together)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", ["KernelNorm", "Whitening"])
def test_what_writes_kernels_cannot_run_with_what_computes_them(name, order):
    pair = [getattr(algorithms, name)(), algorithms.WeightStandardization()]
    with pytest.raises(PluginConflictError, match=f"(?=.*{name})(?=.*WeightStandardization)"):
        Engine(State(model=ConvNet()), plugins=[pair[i] for i in order])


@pytest.mark.parametrize("name", ["Factorize", "GatedLinearUnits"])
def test_torchs_encoder_still_evaluates_without_its_fused_path(name):
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2))
    Engine(State(model=model, seed=0), plugins=[ONE_EACH[name].algorithm()]).fire(Event.INIT)
    encoder, x, padding = model[0].eval(), torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    expected = encoder(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected)


def test_several_algorithms_share_a_model():
    model = ConvNet()
    plugins = [
        algorithms.LowPrecisionGroupNorm(),
        algorithms.BlurPool(min_channels=8),
        algorithms.SqueezeExcite(min_channels=8, latent_channels=2),
        algorithms.GhostBatchNorm(4),
        algorithms.WeightStandardization(),
        algorithms.StochasticDepth(drop_rate=0.3),
        algorithms.ChannelsLast(),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=plugins, seed=1, precision="bf16"
    )
    order = [str(plugin) for plugin in trainer.engine.listeners(Event.INIT)]
    assert order.index("LowPrecisionGroupNorm") > order.index("StochasticDepth")
    trainer.train(CASES[0].data(), num_epochs=1, per_device_batch_size=8)
    before = [*model.named_modules()]
    Engine(trainer.state, plugins=[type(plugin)(**plugin.config()) for plugin in plugins]).fire(Event.INIT)
    assert [*model.named_modules()] == before
