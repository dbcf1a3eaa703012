"""Compiler, 8-bit layers, chunked losses and the benchmark of them: what plans do to the arithmetic itself."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.auto import auto_accelerate
from drivetrain.core.errors import ConflictError, MethodConfigError, UnsupportedMethodError
from drivetrain.module.fp8 import Float8Linear
from drivetrain.strategy import Strategy
from drivetrain.strategy.methods.precision import Fp8
from drivetrain.strategy.registry import find_method
from drivetrain.train.trainer import Trainer
from tests.strategy.tasks import ADAM, VOCAB, WIDTH, loss_func, make_data, make_model, plain_losses
from tests.strategy.test_semantics import check_against_plain, follow, follow_all

compiler_noise = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")


def means(losses):
    return [total / weight for total, weight in losses]


# Chunked cross entropy.


@compiler_noise
@pytest.mark.parametrize(
    "plan",
    [
        ["chunked_cross_entropy"],
        [("chunked_cross_entropy", 7), ("micro_batch", 4)],
        [("chunked_cross_entropy", {"chunk": 16}), ("compile", "aot_eager")],
        [("chunked_cross_entropy", 5), "checkpoint", "fused_optimizer", "cpu_offload"],
    ],
)
def test_a_chunked_loss_follows_the_plain_curve(plan):
    torch._dynamo.reset()
    losses, parameters = follow(plan)
    expected, theirs = plain_losses()
    assert means(losses) == pytest.approx(expected, rel=1e-5)
    for name, value in theirs.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=1e-4)


def test_it_keeps_half_precision_and_autocast_close():
    for plan in ([("amp_native", "bf16")], [("half", "bf16")]):
        plain, chunked = means(follow(plan)[0]), means(follow([*plan, ("chunked_cross_entropy", 8)])[0])
        assert chunked == pytest.approx(plain, rel=2e-2)


def test_it_passes_the_dry_run_and_says_what_it_does():
    _, result, plan = auto_accelerate(
        make_model(), torch.optim.AdamW, make_data(32), loss_func, None, "unpack_dict", ADAM, device="cpu",
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=["chunked_cross_entropy"],
    )  # fmt: skip
    assert any("dry run: loss" in reason for reason in plan.reasons) and "'head' is part of the loss" in plan.explain()
    batch = next(iter(result.dataloader))
    assert result.model(**batch).shape[-1] == WIDTH and result.model.eval()(**batch).shape[-1] == VOCAB


CHUNKED_PLANS = {"ddp": ["parallel_mode", ("chunked_cross_entropy", 5)], "zero1": ["zero1", "chunked_cross_entropy"]}


def test_two_processes_agree_on_a_chunked_loss(world2):
    check_against_plain(world2(follow_all, CHUNKED_PLANS, timeout=120), CHUNKED_PLANS)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def classes():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(12, (48,), generator=generator))


@compiler_noise
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), F.cross_entropy])
@pytest.mark.parametrize("plan", [["chunked_cross_entropy"], ["chunked_cross_entropy", ("compile", "aot_eager")]])
def test_the_trainer_trains_and_evaluates_with_a_chunked_loss(loss, plan):
    torch._dynamo.reset()
    found = []
    for strategy in (None, plan):
        model = Classifier()
        trainer = Trainer(
            model, copy.deepcopy(loss), torch.optim.AdamW(model.parameters(), **ADAM), callbacks=(), strategy=strategy
        )
        for _ in range(2):  # a second run finds the loss as the first left it
            trainer.train(classes(), num_epochs=1, per_device_batch_size=8, eval_dataset=classes())
        history = trainer.run_history
        found.append([history.get_latest_metric(name) for name in ("train_loss_epoch", "eval_loss_epoch")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def accelerate(plan, model=None, loss=loss_func, data=None, **kwargs):
    return auto_accelerate(
        make_model() if model is None else model, torch.optim.AdamW, make_data(16) if data is None else data, loss, None, "unpack_dict",
        ADAM, dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu", **kwargs,
    )  # fmt: skip


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, tokens, labels=None):
        return 2 * self.inner(tokens)


def test_a_chunked_loss_that_cannot_work_is_refused():
    with pytest.raises(UnsupportedMethodError, match="does not return the unchanged output of a linear layer"):
        accelerate(["chunked_cross_entropy"], Scaled(), ignore_dryrun_on_load_strategy=True)
    with pytest.raises(UnsupportedMethodError, match="there is none"):
        accelerate(["chunked_cross_entropy"], loss=None)
    with pytest.raises(UnsupportedMethodError, match="has no linear layer"):
        accelerate(["chunked_cross_entropy"], nn.Sequential(nn.Conv1d(1, 1, 1)))
    with pytest.raises(UnsupportedMethodError, match="needs a few samples"):
        auto_accelerate(make_model(), loss_func=loss_func, load_strategy=["chunked_cross_entropy"], device="cpu")
    with pytest.raises(ConflictError, match="find_unused_parameters"):
        accelerate(["chunked_cross_entropy"], find_unused_parameters=True, ignore_dryrun_on_load_strategy=True)
    with pytest.raises(ConflictError, match="split over ranks"):
        Strategy(["fsdp", "chunked_cross_entropy"]).validate(make_model(), device="cpu", world_size=2)
    with pytest.raises(MethodConfigError, match="number of rows"):
        Strategy([("chunked_cross_entropy", 0)])


# 8-bit layers.


def test_fp8_takes_the_head_when_it_is_named():
    for config, expected in (
        (None, []),
        ({"include": "head"}, ["head"]),
        ({"include": ["up", "head"], "exclude": []}, ["blocks.0.up", "blocks.1.up", "head"]),
        ({"min_features": 16}, 12 * [""]),
    ):
        method, model = Fp8(), make_model()
        parsed = method.parse(config)
        notes = []
        method.apply(type("Context", (), {"model": model, "note": notes.append}), parsed)
        names = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
        assert len(names) == len(expected) and (not all(expected) or names == expected)
        assert model.head.weight is model.embedding.weight
        assert notes == [f"fp8: {len(names)} linear layers" + (f" ({', '.join(names)})" if 0 < len(names) < 5 else "")]


def test_fp8_says_which_names_it_knows():
    with pytest.raises(MethodConfigError, match="'haed' matches no linear layer of TinyGPT.*blocks.0.attention.q"):
        find_method("fp8").check(Fp8().parse({"include": "haed"}), type("Site", (), {"model": make_model()}))
    with pytest.raises(MethodConfigError, match="HYBRID"):
        Strategy([("fp8", {"format": "HYBRIT"})])
    assert Strategy([("fp8", {"format": "e4m3"})])[0][1].format == "E4M3"
    for key in ("margin", "interval", "amax_history_len", "amax_compute_algo"):
        with pytest.warns(UserWarning, match=f"'{key}' has no effect"):
            Strategy([("fp8", {key: 1})])


@pytest.mark.parametrize("format", ["HYBRID", "E4M3"])
def test_gradients_have_the_type_of_the_format(format):
    torch.manual_seed(0)
    exact = nn.Linear(32, 32)
    low = Float8Linear.from_linear(exact, format=format)
    grads = []
    for layer in (exact, low):
        x = torch.ones(4, 32, requires_grad=True)
        (layer(x) * torch.linspace(0, 1, 32)).sum().backward()
        grads.append(x.grad)
    error = (grads[0] - grads[1]).norm() / grads[0].norm()
    assert 0 < error < (0.1 if format == "HYBRID" else 0.05)


# The compiler.


@compiler_noise
def test_graph_breaks_are_counted_and_named():
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, tokens, labels=None):
            torch._dynamo.graph_break()
            return self.inner(tokens)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        @torch._dynamo.disable
        def forward(self, tokens, labels=None):
            return self.inner(tokens)

    cases = [
        (make_model(), "compile: no graph breaks"),
        (Breaking(), "compile: 1 graph break ("),
        (Hidden(), "compile: no graph was made"),
    ]
    for model, expected in cases:
        torch._dynamo.reset()
        _, result, _ = accelerate(
            [("compile", {"backend": "aot_eager", "include_loss": False})], model, ignore_dryrun_on_load_strategy=True
        )
        batch = next(iter(result.dataloader))
        result.loss_func(batch, result.model(**batch)).backward()
        assert any(note.startswith(expected) for note in result.notes), result.notes


@compiler_noise
def test_a_trial_with_a_small_batch_does_not_make_the_size_a_variable():
    from torch._dynamo import register_backend
    from torch._dynamo.backends.registry import _COMPILER_FNS

    seen = []

    def remember(graph, inputs):
        seen.append([value for value in inputs if not isinstance(value, torch.Tensor)])
        return graph.forward

    torch._dynamo.reset()
    register_backend(remember, name="remember_sizes")
    try:
        _, result, _ = accelerate([("compile", "remember_sizes")], data=make_data(24))  # the trial has 8 samples
        trials = len(seen)
        result.model(torch.zeros(12, 8, dtype=torch.long))
    finally:
        _COMPILER_FNS.pop("remember_sizes")
    assert trials and len(seen) > trials and not any(seen)


@pytest.mark.filterwarnings("ignore:left out of the plan")
def test_cuda_graphs_bring_the_compiler():
    from drivetrain.strategy.resolve import resolve_plan

    alone = resolve_plan(Strategy(["cuda_graphs"]), device="cpu", world=1)
    assert [method.name for _, method, _ in alone.steps] == ["native_dynamo"]  # there is nothing to record on a CPU
    assert alone.dropped[0][0] == "cuda_graphs"
    own = resolve_plan(Strategy(["cuda_graphs", ("compile", "aot_eager")]), device="cpu", world=1)
    assert own.config("native_dynamo").backend == "aot_eager"


@pytest.mark.parametrize("other", ["data", "sequence"])
def test_channels_last_is_rejected_where_gradients_are_averaged_by_sharding(other):
    from drivetrain.strategy.resolve import resolve_plan

    methods = ["tensor_parallel", *(["sequence_parallel"] if other == "sequence" else [])]
    plan = Strategy([("parallel_mode", [("tensor", 2), (other, 2)]), *methods, "channels_last"])
    with pytest.raises(ConflictError, match="channels_last and data or sequence ranks with a 'tensor' axis"):
        resolve_plan(plan, device="cpu", world=4)


def test_sixteen_bit_parameters_on_the_cpu_are_not_given_to_torch_s_fused_sgd():
    model = Classifier().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 6, dtype=torch.bfloat16)
    data, before = TensorDataset(inputs, torch.arange(8) % 3), [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(model, F.cross_entropy, optimizer, callbacks=(), strategy=["fused_optimizer"])
    trainer.train(data, num_epochs=1, per_device_batch_size=8)
    assert not any(map(torch.equal, model.parameters(), before))
    assert any("does not update 16-bit parameters" in reason for reason in trainer.plan.reasons)


@compiler_noise
def test_the_trainer_compiles_the_loss_too():
    torch._dynamo.reset()
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        model = Classifier()
        trainer = Trainer(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), strategy=[("compile", "eager")]
        )
        trainer.train(classes(), num_epochs=1, per_device_batch_size=8)
        if isinstance(loss, nn.Module):
            assert trainer.loss_func is loss and loss._compiled_call_impl is not None
        else:
            assert trainer.loss_func is not loss


# The benchmark.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_runs_in_small_and_every_variant_learns_the_same(tmp_path, capsys):
    from benchmarks import gpt2

    variants = gpt2.main(["plan", "trainer", "chunked", "fp8_head"], steps=20, smoke=True, folder=tmp_path)
    written = json.loads((tmp_path / "gpt2.json").read_text())
    assert written["variants"] == json.loads(json.dumps(variants)) and list(variants) == [
        "hand",
        "plan",
        "trainer",
        "chunked",
    ]
    assert "fp8" in written["sittings"][0]["left_out"]["fp8_head"]  # no 8-bit products on a CPU
    hand = variants["hand"]["loss_curve"]
    assert hand[1] < hand[0]
    assert variants["plan"]["loss"] == variants["trainer"]["loss"] == pytest.approx(hand[1], rel=1e-3)
    assert variants["chunked"]["loss"] == pytest.approx(hand[1], rel=1e-2)
    later = gpt2.main(["half"], steps=20, limit=-1, smoke=True, folder=tmp_path)  # no time for it
    sittings = json.loads((tmp_path / "gpt2.json").read_text())["sittings"]
    assert list(later) == list(variants) and sittings[1]["left_out"] == {"half": "no time left"}


def test_models_of_the_benchmark_learn_and_can_be_built_elsewhere():
    import pickle
    from functools import partial

    from benchmarks.models import SPECS, loss_func, make_batch, make_model

    for name in SPECS:
        build = pickle.loads(pickle.dumps(partial(make_model, name, tiny=True)))
        model, batch = build(), make_batch(name, 4, tiny=True)
        assert all(map(torch.equal, model.parameters(), make_model(name, tiny=True).parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(8):
            loss = loss_func(batch, model(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], name
