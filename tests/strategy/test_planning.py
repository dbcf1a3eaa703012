"""`Trainer(strategy=...)` trains by a plan and ends with the plain trainer's weights."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError, ConflictError, UnsupportedMethodError
from drivetrain.module.wrapping import is_fully_sharded, is_wrapped, named_clean_parameters
from drivetrain.strategy.methods.native_dynamo import CudaGraphs
from drivetrain.strategy.value import Strategy
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.planning import apply_strategy
from drivetrain.train.trainer import Trainer


class Runtime(TrainerRuntime):
    def prepare_model(self, model):
        return model if is_wrapped(model) else super().prepare_model(model)


class PlannedTrainer(Trainer):
    """Calls the planner where the Trainer's preparation does."""

    def _create_accelerator(self):
        return Runtime(self._options.device, self._options.precision)

    def _prepare_model_optimizer_and_dataloaders(self):
        apply_strategy(self)
        super()._prepare_model_optimizer_and_dataloaders()


def make_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(strategy, runs=1, precision=None, algorithms=(), **kwargs):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = PlannedTrainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=(), strategy=strategy, precision=precision, device="cpu", seed=1,
        algorithms=algorithms,
    )  # fmt: skip
    for _ in range(runs):
        trainer.train(data(), num_epochs=2, global_batch_size=8, train_dataloader_kwargs={"num_workers": 0}, **kwargs)
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named_clean_parameters(trainer.model)
    }
    return trainer, weights


PLANS = {
    "checkpoint": ["checkpoint"],
    "ddp, micro, fused": [("parallel_mode", {"bucket_cap_mb": 1}), ("micro_batch", 2), "fused_optimizer"],
    "accumulation": [("micro_batch", {"accumulation": 2})],
    "zero1": ["zero1"],
    "fsdp": ["fsdp"],
    "fsdp, checkpoint, micro": ["fsdp", "checkpoint", ("micro_batch", 1)],
    "compile": [("compile", "eager")],
}


def follow_all(names):
    results = {}
    for name in names:
        torch._dynamo.reset()
        trainer, weights = train(PLANS[name], runs=2)
        results[name] = weights, is_fully_sharded(trainer.model), trainer.plan.opt_names()
    return results


QUICK = ["ddp, micro, fused", "zero1", "fsdp, checkpoint, micro"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([name for name in PLANS if name not in QUICK], id="rest", marks=pytest.mark.slow),
    ],
)
def test_plans_end_with_the_plain_trainers_weights(world2, names):
    _, expected = train(None, runs=2)
    alone = follow_all(["checkpoint", "accumulation", "compile"])
    for results in (alone, *world2(follow_all, names)):
        for name, (weights, sharded, methods) in results.items():
            assert sharded == ("fsdp" in name) and len(methods) == len(PLANS[name])
            for key, value in weights.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=f"{name} {key}")


def test_precision_comes_from_the_plan():
    trainer, weights = train([("amp_native", "bf16")])
    _, expected = train(None, precision="bf16")
    assert trainer._accelerator.precision.name == "bf16"
    assert all(torch.equal(weights[key], expected[key]) for key in weights)
    half, _ = train([("half", "bf16")])
    assert next(half.model.parameters()).dtype == torch.bfloat16
    history = half.run_history.get_metric_values("train_loss_epoch")
    assert history[-1] < history[0]


def test_the_plan_is_kept_beside_the_run(tmp_path):
    train(["checkpoint"], checkpoint_dir=tmp_path)
    assert Strategy.load(tmp_path / "strategy.json") == Strategy(["checkpoint"])


class TorchCompile:
    """Stands for the algorithm of that name."""

    events = frozenset()

    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        raise AssertionError


@pytest.mark.parametrize(
    ("strategy", "kwargs", "error", "message"),
    [
        ([("amp_native", "bf16")], {"precision": "fp16"}, ConfigError, "differ"),
        (["half"], {"precision": "bf16"}, ConfigError, "differ"),
        ([("micro_batch", 2)], {"microbatch_size": 2}, ConfigError, "both split"),
        (["compile"], {"algorithms": [TorchCompile()]}, ConflictError, "TorchCompile"),
        (["compil"], {}, ConfigError, "Did you mean 'compile'"),
    ],
)
def test_contradictions_are_refused(strategy, kwargs, error, message):
    with pytest.raises(error, match=message):
        train(strategy, **kwargs)


def test_an_optimizer_with_state_is_not_thrown_away():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    trainer = PlannedTrainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=(), strategy=["fused_optimizer"], device="cpu"
    )
    with pytest.raises(ConfigError, match="already has state"):
        trainer.train(data(), num_epochs=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("plan", [["cuda_graphs"], [("native_dynamo", {"mode": "max-autotune"})]])
@pytest.mark.parametrize(
    ("settings", "more"),
    [({"gradient_accumulation_steps": 2}, []), ({"microbatch_size": 4}, []), ({}, [("micro_batch", {"size": 4})])],
)
def test_recorded_kernels_are_refused_where_gradients_accumulate(plan, settings, more, monkeypatch):
    monkeypatch.setattr(CudaGraphs, "requires", lambda self, profile, device, world: None)
    model = make_model()
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), callbacks=(), strategy=plan + more
    )
    with pytest.raises(UnsupportedMethodError, match="with gradient accumulation give wrong gradients"):
        trainer.train(data(), num_epochs=1, **settings)
