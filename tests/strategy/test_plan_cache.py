"""Found plans are kept for the next start, and used only where all that they depend on is as it was."""

import functools
import json
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.experiment.cli.verbs import run_command
from drivetrain.strategy.search import find, plan_cache
from drivetrain.strategy.search.constraints import SearchConstraints
from drivetrain.strategy.search.plan_cache import cache_plan, cached_plans, clear_plans, find_cached_plan, plan_file
from drivetrain.strategy.value import Strategy
from tests.strategy.test_search import make_quick
from tests.strategy.trial_tasks import make_task

CPU = torch.device("cpu")
UNTIMED = SearchConstraints(time_limit=0, excluded=frozenset({"compile", "checkpoint", "micro_batch"}))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(plan_cache.SWITCH, "1")
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def found(task=None, constraints=UNTIMED):
    task = make_task() if task is None else task
    return find_cached_plan(plan_file(task, CPU, 1, constraints), task, CPU, 1, constraints)


def kept(**values):
    plan = Strategy(["checkpoint"], predicted={"peak_bytes": 1000.0} | values)
    cache_plan(plan_file(make_task(), CPU, 1, UNTIMED), plan, make_task(), CPU, 1)
    return plan


def test_the_second_search_returns_what_the_first_has_found(monkeypatch, own_cache):
    make_quick(monkeypatch)
    lines = []
    first = find.find_plan(make_task(), device=CPU, world=1, constraints=UNTIMED)
    monkeypatch.setattr(find._Search, "run", lambda search: pytest.fail("it searches again"))
    second = find.find_plan(make_task(), device=CPU, world=1, constraints=UNTIMED, on_progress=lines.append)
    assert second == first and second.predicted == first.predicted and second.search == first.search
    assert "--clear" in second.explain() and 2 <= len(lines) <= 6 and lines[0].startswith("plan: ")
    (file,) = own_cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    monkeypatch.setenv(plan_cache.SWITCH, "0")
    with pytest.raises(pytest.fail.Exception, match="searches again"):
        find.find_plan(make_task(), device=CPU, world=1, constraints=UNTIMED)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def loss(self, batch, output):
        return self.factor * nn.functional.mse_loss(output, batch["y"])


def make_loss(factor, kind):
    if kind == "closure":
        return lambda batch, output: factor * nn.functional.mse_loss(output, batch["y"])
    if kind == "partial":
        return functools.partial(make_loss, factor)
    return Scaled(factor).loss


@pytest.mark.parametrize("kind", ["closure", "partial", "method"])
def test_what_is_equal_has_one_file_and_what_differs_another(kind):
    def path(task, constraints=UNTIMED, world=1):
        return plan_file(task, CPU, world, constraints)

    task = make_task(loss_func=make_loss(2.0, kind))
    same = path(task)
    assert path(make_task(loss_func=make_loss(2.0, kind))) == same
    frozen = make_task(loss_func=make_loss(2.0, kind))
    frozen.model.head.bias.requires_grad_(False)
    shorter = {name: tensor[:, :1] for name, tensor in task.samples.items()}
    others = [
        path(make_task(loss_func=make_loss(3.0, kind))),
        path(replace(task, global_batch_size=8)),
        path(replace(task, samples=shorter)),
        path(replace(task, optim_args={"lr": 0.2})),
        path(replace(task, model=nn.Sequential(nn.Linear(8, 1)))),
        path(frozen),
        path(task, replace(UNTIMED, numerics="exact")),
        path(task, replace(UNTIMED, time_limit=5)),
        path(task, world=2),
    ]
    assert len({same, *others}) == 1 + len(others)


def noisy(batch, output, **settings):
    return output.mean()


def with_default(factor):
    def loss(batch, output, *, factor=factor):
        return factor * output.mean()

    return loss


def typed_in(text):
    held = {"nn": nn, "__name__": "notebook"}
    exec(text, held)
    return held["it"]


def notebook_model(factor, is_inherited=False):
    base = f"class Base(nn.Linear):\n  def forward(self, x): return super().forward(x) * {factor}\n"
    child = "class it(Base):\n  def more(self): return 1\n" if is_inherited else "it = Base\n"
    return typed_in(base + child)(2, 2)


def with_attribute(**values):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, value in values.items():
        setattr(model[0], name, value)
    model.itself = [model]  # what a module holds may lead back to it
    return model


def tied(is_tied):
    model = with_attribute()
    if is_tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("field", "make", "values"),
    [
        ("model", lambda n: with_attribute(repeats=n), (1, 2)),
        ("model", lambda n: with_attribute(config={"depths": [n]}), (1, 2)),
        ("model", lambda n: with_attribute(buffer=nn.Buffer(torch.zeros(n), persistent=False)), (1, 2)),
        ("model", tied, (False, True)),
        ("model", notebook_model, (1, 2)),
        ("model", functools.partial(notebook_model, is_inherited=True), (1, 2)),
        ("loss_func", lambda n: typed_in(f"def it(batch, output): return output.mean() * {n}"), (1, 2)),
        ("loss_func", lambda dtype: functools.partial(noisy, dtype=dtype), (torch.float32, torch.bfloat16)),
        ("loss_func", with_default, (1, 2)),
        ("optim_args", lambda value: {"lr": value}, (np.float32(0.1), np.float32(0.2))),
    ],
    ids="attribute config buffer tied code bases function dtype default numpy".split(),
)
def test_what_a_model_or_a_function_holds_and_does_is_a_part_of_it(field, make, values):
    paths = [plan_file(replace(make_task(), **{field: make(value)}), CPU, 1, UNTIMED) for value in (*values, *values)]
    assert paths[:2] == paths[2:] and paths[0] != paths[1]


def test_a_file_that_is_damaged_not_private_or_too_large_for_the_memory_counts_as_none(monkeypatch, own_cache):
    plan = kept()
    assert found() == plan
    (file,) = own_cache.iterdir()
    text = file.read_text()
    held = json.loads(text)
    changed = json.dumps(held | {"plan": held["plan"].replace("1000.0", '"many"')})
    for wrong in ("", "[]", text[:-10], json.dumps(held | {"plan": "{}"}), changed, json.dumps({"format": 2})):
        file.write_text(wrong)
        assert found() is None, wrong
    file.write_text(text)
    file.chmod(0o666)
    assert found() is None
    file.chmod(0o600)
    assert found() == plan
    monkeypatch.setattr(plan_cache, "memory_bytes", lambda device: (2000, 1000))
    assert found() is None


def test_plans_for_another_place_and_failed_ones_are_not_kept(monkeypatch, own_cache):
    assert plan_file(make_task(), CPU, 1, replace(UNTIMED, plan_only=True)) is None
    assert not own_cache.exists()
    make_quick(monkeypatch)
    assert find.find_plan(make_task(), device=CPU, world=1, constraints=replace(UNTIMED, memory_budget=1000)).failure
    assert not own_cache.exists()


def test_the_command_lists_and_clears_kept_plans(capsys):
    assert run_command(["plan", "--list"]) == 0 and "no cached plans" in capsys.readouterr().out
    kept()
    assert run_command(["plan", "--list"]) == 0
    assert "Net, batch 16, 1 x " in capsys.readouterr().out.replace("\n", "")
    assert run_command(["plan", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["model"] == "Net"
    assert len(cached_plans()) == 1
    assert run_command(["plan", "--clear"]) == 0 and "1 cached plans removed" in capsys.readouterr().out
    assert cached_plans() == [] and clear_plans() == 0
    assert run_command(["plan"]) != 0 and "expected one factory" in capsys.readouterr().err


class CountsItsCalls:
    def __init__(self):
        self.calls = 0

    def __call__(self, batch, output):
        self.calls += 1
        return nn.functional.mse_loss(output, batch["y"])


def test_a_loss_that_counts_its_calls_is_the_same_loss_at_the_next_start(monkeypatch):
    make_quick(monkeypatch)
    find.find_plan(make_task(loss_func=CountsItsCalls()), device=CPU, world=1, constraints=UNTIMED)
    monkeypatch.setattr(find._Search, "run", lambda search: pytest.fail("it searches again"))
    find.find_plan(make_task(loss_func=CountsItsCalls()), device=CPU, world=1, constraints=UNTIMED)


class Nameless:
    def __repr__(self):
        raise RuntimeError("no name yet")

    def __getstate__(self):
        raise RuntimeError("no state yet")


def test_an_object_that_cannot_be_described_is_searched_for_without_the_cache():
    task = make_task()
    task.model.part = {Nameless()}
    assert plan_file(task, CPU, 1, UNTIMED) is None and found(task) is None
