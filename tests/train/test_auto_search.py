"""The automatic mode as users meet it: `auto_accelerate` without a plan, and `Trainer(strategy="auto")`."""

import importlib.util
import json
import pickle
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.core.errors import (
    BatchSizeError,
    ConfigError,
    DrivetrainWarning,
    PlanInfeasible,
    UnknownMethodError,
    UnsupportedMethodError,
)
from drivetrain.strategy.search import find
from drivetrain.strategy.value import Failure, Strategy
from drivetrain.train.auto import auto_accelerate
from drivetrain.train.planning import constraints_of, make_task, request_of
from drivetrain.train.settings import TrainSettings
from drivetrain.train.trainer import Trainer
from tests.strategy.tasks import ADAM, loss_func, make_data, make_model, plain_losses
from tests.strategy.test_search import make_quick
from tests.train.tasks import make_data as make_pairs
from tests.train.tasks import make_model as make_classifier
from tests.train.tasks import make_trainer, weights

ROOT = Path(__file__).parents[2]
FEW = ["compile", "checkpoint", "micro_batch"]


@pytest.fixture(autouse=True)
def quick_search(monkeypatch):
    make_quick(monkeypatch)
    monkeypatch.setattr(find, "_SIMULATED", 1)


def call(**kwargs):
    defaults = {
        "model": make_model(), "optim_func": torch.optim.AdamW, "dataset": make_data(), "loss_func": loss_func,
        "model_input_format": "unpack_dict", "optim_args": ADAM, "dataloader_args": {"batch_size": 8, "num_workers": 0},
        "device": "cpu", "time_limit": 0, "excluded": FEW,
    }  # fmt: skip
    return auto_accelerate(**{**defaults, **kwargs})


def follow(result):
    losses = []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, "cpu")
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_found_plan_trains_like_the_plain_loop_and_is_saved(tmp_path):
    status, result, plan = call(
        save_strategy_to_file=tmp_path / "plan.json", lr_scheduler_cls=torch.optim.lr_scheduler.ConstantLR,
        lr_scheduler_args={"factor": 1.0}, numerics="exact",
    )  # fmt: skip
    assert status and plan.evidence == "simulated" and result.lr_scheduler is not None
    expected, _ = plain_losses()
    assert follow(result) == pytest.approx(expected, rel=1e-4)
    kept = Strategy.load(tmp_path / "plan.json")
    assert kept == plan and kept.search["candidates"] > 0 and kept.fingerprint["global_batch"] == 8


def test_wishes_are_obeyed_and_two_calls_share_nothing():
    args = {"batch_size": 8, "num_workers": 0}
    _, _, first = call(included=["checkpoint"], excluded=["compile"], dataloader_args=args)
    assert "checkpoint" in first
    _, _, second = call(excluded=["half", "checkpoint", "compile"], dataloader_args=args)
    assert "checkpoint" not in second and args == {"batch_size": 8, "num_workers": 0}


def test_samples_without_a_dataset_are_enough_to_plan():
    assert call(dataset=make_data(3), plan_only=True)[2].batch.global_size == 8  # fewer samples than a batch go round
    sample = make_data(1)[0]
    status, result, plan = call(dataset=None, dataloader_args=None, sample_batch=sample, batch_size=64, plan_only=True)
    assert status and result is None and plan.batch.global_size == 64


def test_what_does_not_fit_is_an_outcome_and_the_model_is_as_it_was():
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    status, result, plan = call(model=model, memory_budget=1000)
    assert not status and result is None and plan.failure.shortfall_bytes > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_presets_are_planned_for_without_the_hardware():
    status, result, plan = call(
        plan_only=True, world_size=8, device="h100", dataloader_args={"batch_size": 256}, excluded=None
    )
    assert status and result is None and plan.batch.global_size == 256
    assert dict(plan.mesh).get("data", 1) * dict(plan.mesh).get("zero", 1) <= 8 and "native_dynamo" in plan
    with pytest.raises(ConfigError, match="h100"):
        call(plan_only=True, device="h1000")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"dataloader_args": {"batch_size": "8"}}, BatchSizeError, "whole number"),
        ({"excluded": ["nope"]}, UnknownMethodError, "nope"),
        ({"numerics": "loose"}, ConfigError, "numerics"),
        ({"memory_budget": "much"}, ConfigError, "memory_budget"),
        ({"time_limit": -3}, ConfigError, "time_limit"),
        ({"world_size": 4}, ConfigError, "together with plan_only=True"),
        ({"world_size": 0, "plan_only": True}, ConfigError, "whole number"),
    ],
)
def test_wrong_wishes_raise_before_anything_happens(kwargs, error, message):
    with pytest.raises(error, match=message):
        call(**kwargs)


@pytest.mark.slow
def test_a_given_plan_is_finetuned_within_its_methods():
    start = [("checkpoint", {"mode": "full"}), ("micro_batch", 2)]
    status, result, plan = call(load_strategy=start, finetune_strategy=True, excluded=None)
    assert status and set(plan.opt_names()) == {"checkpoint", "micro_batch"}
    assert plan.search["candidates"] > 4 and follow(result)
    _, _, tuned = call(load_strategy=[("checkpoint", None, True), ("micro_batch", 2)], excluded=None)
    assert tuned.batch.micro == 2 and tuned.search is not None


# ---------------------------------------------------------------------------------------- the Trainer


def auto_trainer(cls=Trainer, model=None, **kwargs):
    return make_trainer(model=model, cls=cls, strategy="auto", strategy_time_limit=0, device="cpu", seed=1, **kwargs)


def run(trainer, **kwargs):
    trainer.train(
        make_pairs(),
        num_epochs=1,
        per_device_batch_size=8,
        train_dataloader_kwargs={"shuffle": True, "num_workers": 0},
        **kwargs,
    )
    return weights(trainer.get_model())


def test_the_trainer_finds_its_plan_and_ends_with_the_plain_weights(tmp_path, monkeypatch):
    expected = run(make_trainer(device="cpu", seed=1))
    trainer = auto_trainer()
    found = run(trainer, checkpoint_dir=tmp_path)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert trainer.plan.search["candidates"] > 1 and trainer.plan.evidence in ("simulated", "modelled")
    kept = json.loads((tmp_path / "strategy.json").read_text())
    assert kept["search"]["candidates"] == trainer.plan.search["candidates"]

    def refuse(*args, **kwargs):
        raise AssertionError("a resumed run must not search")

    monkeypatch.setattr(find, "find_plan", refuse)
    again = auto_trainer()
    again.train(
        make_pairs(),
        num_epochs=2,
        per_device_batch_size=8,
        train_dataloader_kwargs={"num_workers": 0},
        checkpoint_dir=tmp_path,
        resume_from="auto",
    )
    assert again.plan == trainer.plan
    with pytest.raises(AssertionError, match="must not search"):
        run(auto_trainer(strict=True))


def test_a_run_that_resumes_on_a_world_that_its_plan_does_not_fit_trains_without_it(tmp_path):
    where = {"per_device_batch_size": 8, "train_dataloader_kwargs": {"num_workers": 0}, "checkpoint_dir": tmp_path}
    auto_trainer().train(make_pairs(), num_epochs=1, **where)
    Strategy(["fused_optimizer"], mesh=[("tensor", 2), ("data", 1)]).save(tmp_path / "strategy.json")
    again = auto_trainer()
    with pytest.warns(DrivetrainWarning, match="a world of 1 cannot hold the axes tensor 2"):
        again.train(make_pairs(), num_epochs=2, resume_from="auto", **where)
    assert again.plan.opt_names() == [] and again.state.timestamp.epoch == 2


def failing(outcome):
    """Return a search that ends in one of the ways in which none finds a plan."""

    def find_plan(task, **how):
        if outcome == "raises":
            raise ZeroDivisionError("a defect of the search")
        nearest = Strategy(["checkpoint"])
        kind, near = ("infeasible", nearest) if outcome == "nothing fits" else ("error", None)
        failure = Failure(kind=kind, message=f"{outcome}: this is why.", nearest=near)
        plan = Strategy(["checkpoint"], failure=failure, rejected=("eager: error (why)",))
        return plan.require_success() if how["constraints"].strict else plan

    return find_plan


@pytest.mark.parametrize("outcome", ["raises", "every trial failed", "nothing fits"])
def test_a_search_without_a_plan_does_not_end_a_training(outcome, monkeypatch):
    expected = run(make_trainer(device="cpu", seed=1))
    monkeypatch.setattr(find, "find_plan", failing(outcome))
    trainer = auto_trainer()
    with pytest.warns(DrivetrainWarning, match="a defect of the search|this is why") as caught:
        found = run(trainer)
    assert len(caught) == 1
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)
    assert trainer.plan.opt_names() == (["checkpoint"] if outcome == "nothing fits" else [])
    assert trainer.plan.failure is None
    assert ("a defect of the search" if outcome == "raises" else "this is why") in trainer.plan.explain(1000)
    with pytest.raises((PlanInfeasible, ZeroDivisionError)):
        run(auto_trainer(strict=True))


def test_auto_accelerate_changes_nothing_where_every_trial_failed(monkeypatch):
    monkeypatch.setattr(find, "find_plan", failing("every trial failed"))
    with pytest.warns(DrivetrainWarning, match="trains without one"):
        status, result, plan = call()
    assert status and len(plan) == 0 and plan.failure is None and plan.rejected == ("eager: error (why)",)
    expected, _ = plain_losses()
    assert follow(result) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(PlanInfeasible, match="this is why"):
        call(strict=True)


class OwnLoss(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch)


def test_hooks_that_only_a_trainer_can_run_are_not_tried_and_that_is_said():
    trainer = auto_trainer(OwnLoss)
    trainer.strategy_time_limit = 30
    run(trainer)
    assert trainer.plan.evidence != "measured"
    assert any("overrides calculate_train_batch_loss" in reason for reason in trainer.plan.reasons)


class Carrying(nn.Module):
    """Returns its own loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Logits(nn.Module):
    """Takes no labels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "labels": torch.tensor(index % 2)}


@pytest.mark.parametrize("form", ["pair", "named", "carried"])
def test_the_task_computes_the_trainers_own_loss(form):
    model = {"pair": make_classifier, "named": Logits, "carried": Carrying}[form]()
    data = make_pairs() if form == "pair" else Named()
    trainer = Trainer(
        model, None if form == "carried" else nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        callbacks=(), device="cpu", seed=1,
    )  # fmt: skip
    trainer.train(data, num_epochs=1, per_device_batch_size=8, train_dataloader_kwargs={"num_workers": 0})
    task, obstacle = make_task(request_of(trainer))
    assert obstacle is None and task.global_batch_size == 8
    batch = task.batch(8)
    ours = task.loss(batch, task.call(trainer.model, batch))
    theirs = trainer.calculate_train_batch_loss(batch)["loss"]
    torch.testing.assert_close(ours, theirs)
    optimizer = task.recipe().make(trainer.model)
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["momentum"] == 0.9
    again = pickle.loads(pickle.dumps(task))
    torch.testing.assert_close(again.loss(batch, again.call(again.build(), batch)), theirs)


def test_what_the_trainer_says_bounds_its_plan():
    trainer = auto_trainer(precision="bf16")
    trainer.settings = TrainSettings(num_epochs=1, microbatch_size=4)
    found = constraints_of(request_of(trainer))
    assert found.included == (("amp_native", "bf16"),) and {"micro_batch", "tensor_parallel"} <= found.excluded
    exact = auto_trainer(precision="fp32")
    exact.settings = TrainSettings(num_epochs=1)
    assert constraints_of(request_of(exact)).numerics == "exact"


def test_data_that_reading_would_use_up_is_refused():
    with pytest.raises(ConfigError, match="consume them"):
        auto_trainer().train(iter([]), num_epochs=1)


def refuse_pipe():
    trainer = make_trainer(strategy=[("parallel_mode", [("pipe", 2)]), "pipeline_parallel"], device="cpu")
    try:
        trainer.train(make_pairs(), num_epochs=1)
    except UnsupportedMethodError as error:
        return str(error)


def search_in_the_trainer():
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        trainer = auto_trainer()
        found = run(trainer)
        try:
            call(dataloader_args={"batch_size": 9})
        except BatchSizeError as error:
            return found, trainer.plan.to_json(), str(error), refuse_pipe()


@pytest.mark.slow
def test_two_ranks_find_one_plan_for_the_trainer(world2):
    (ours, plan, error, pipe), (theirs, same, _, _) = world2(search_in_the_trainer, timeout=200)
    assert plan == same and dict(Strategy.from_json(plan).mesh) == {"data": 2}
    assert all(map(torch.equal, ours, theirs)) and "8 and 10" in error
    assert pipe is not None and "pipeline" in pipe


@pytest.mark.slow
def test_the_example_finds_a_plan_and_learns(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("example_search", ROOT / "examples" / "auto_accelerate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = module.main(epochs=2, plan="auto", save_to=tmp_path / "plan.json", time_limit=0)
    assert losses[1] < losses[0] and "chosen from" in capsys.readouterr().out


@pytest.mark.slow
def test_a_whole_search_stays_within_its_time():
    begin = time.monotonic()
    status, result, plan = call(time_limit=5, excluded=None)
    assert status and time.monotonic() - begin < 60  # ten on an idle machine
    assert follow(result) and plan.evidence in ("modelled", "simulated", "measured")


@pytest.mark.gpu
def test_a_gpu_search_finds_a_fast_verified_plan(monkeypatch):
    from drivetrain.strategy.profile.machine import profile_machine

    monkeypatch.setattr(find, "profile_machine", profile_machine)
    status, result, plan = call(
        device="cuda", time_limit=60, excluded=["compile"], dataset=make_data(64), model_fn=make_model
    )
    assert status and plan.evidence == "measured" and plan.measured["is_verified"]
    batch = result.prepare_input(next(iter(result.dataloader)), "cuda")
    result.loss_func(batch, result.model(**batch)).backward()


def train_on_rank_without_a_plan():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "find_plan", failing("raises"))
        plain = run(make_trainer(device="cpu", seed=1))
        trainer = auto_trainer()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run(trainer)
    texts = [str(warning.message) for warning in caught if "found no plan" in str(warning.message)]
    return plain, found, trainer.plan.opt_names(), len(texts)


def test_on_two_ranks_a_failed_search_leaves_data_parallel_training(world2):
    for rank, (plain, found, names, warned) in enumerate(world2(train_on_rank_without_a_plan)):
        assert names == ["parallel_mode"] and warned == (rank == 0)
        for ours, theirs in zip(found, plain):
            torch.testing.assert_close(ours, theirs)
