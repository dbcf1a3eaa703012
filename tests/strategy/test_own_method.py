"""A method from outside takes part in everything, with no other file changed; and no other file knows a method by name."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import drivetrain.strategy
from drivetrain.core.errors import ConfigTypeError
from drivetrain.strategy.method import Method
from drivetrain.strategy.profile.simulate import simulate_plans
from drivetrain.strategy.registry import _methods, method_names, register_method
from drivetrain.strategy.search import find
from drivetrain.strategy.search.find import SearchConstraints, find_plan
from drivetrain.strategy.search.ranking import order, predict
from drivetrain.strategy.search.space import build_space
from tests.strategy.own_method import FlushDenormals
from tests.strategy.test_search import CPU, make_task, place

NAME = FlushDenormals.name
OTHERS = frozenset({"compile", "amp", "half", "checkpoint", "micro_batch", "fused_optimizer", "cpu_threads"})


@pytest.fixture
def flush():
    register_method(FlushDenormals)
    yield
    del _methods[NAME]


def test_a_search_proposes_a_method_from_outside_and_predicts_with_its_effect(flush):
    where = place(machine=CPU, batch=16)
    found = order(predict(c, where.profile, where.machine) for c in build_space(where).candidates)
    with_it = [item for item in found if NAME in item.candidate.names()]
    assert with_it and NAME in found[0].candidate.names() and "flush" in found[0].label
    assert not any(item.candidate.is_compiled for item in with_it)
    plain = predict(found[0].candidate.without([NAME]), where.profile, where.machine)
    assert plain.candidate in [item.candidate for item in found]
    assert found[0].cost.time["optimizer"] == pytest.approx(plain.cost.time["optimizer"] / 2)
    assert found[0].cost.time["compute"] < plain.cost.time["compute"]
    excluded = build_space(place(machine=CPU, batch=16, excluded=frozenset({"denormals"}))).candidates
    assert not any(NAME in c.names() for c in excluded)


def test_a_search_tries_a_method_from_outside_and_explains_it(flush, monkeypatch):
    monkeypatch.setattr(find._Search, "_profile_machine", lambda self: CPU)  # which takes longer than the trial
    constraints = SearchConstraints(time_limit=120.0, excluded=OTHERS, included=(NAME,))
    plan = find_plan(make_task(), device=torch.device("cpu"), world=1, constraints=constraints)
    assert plan.opt_names() == [NAME] and plan.evidence == "measured" and plan.measured["is_verified"]
    assert [item["plan"] for item in plan.search["measured"]] == ["fp32, flush, 8 x 1"]
    text = plan.explain(width=200)
    assert NAME in text and FlushDenormals.why in text


def test_a_simulation_says_why_it_leaves_a_method_from_outside_out(flush):
    space = build_space(place(machine=CPU, batch=8, excluded=OTHERS, included=(NAME,)))
    (found,) = simulate_plans(make_task(), [space.plan(space.candidates[0])], world=1, device_kind="cpu")
    assert found.failure is None and f"{NAME}: not simulated, it does not change memory" in found.notes


def _constants(tree: ast.AST) -> Iterator[str]:
    """Yield the words of texts that are values; docstrings and sentences are not."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = node.value.split()
            if all(word in method_names() for word in words):
                yield from words


def test_only_the_files_of_methods_know_methods_by_name():
    folder = Path(drivetrain.strategy.__file__).parent
    other_meanings = {
        ("mesh.py", "fsdp"),  # another word for an axis
        ("profile/step_memory.py", "fsdp"),  # torch's operators
        ("search/candidates.py", "fp8"),  # a short word for float8
    }
    rates_and_ceilings = {"tf32"}
    found = {
        (path.relative_to(folder).as_posix(), word)
        for path in folder.rglob("*.py")
        if path.parent.name != "methods"
        for word in _constants(ast.parse(path.read_text()))
        if word not in rates_and_ceilings
    }
    assert found == other_meanings


@dataclass
class Mutable:
    rank: int = 4


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"group": "mine"}, "name and group"),
        ({"name": "mine"}, "name and group"),
        ({"name": "mine", "group": "mine", "aliases": "loud"}, "tuple of texts"),
        ({"name": "mine", "group": "mine", "Config": Mutable}, "frozen dataclass"),
    ],
)
def test_an_incomplete_method_is_refused_when_it_is_registered(attributes, message):
    """Searches ask all methods for their groups, so one without would break every search."""
    before = method_names()
    with pytest.raises(ConfigTypeError, match=message):
        register_method(type("Incomplete", (Method,), attributes))
    assert method_names() == before
