"""A sample of the zoo: unusual models train as by hand, resume exactly, and every method works with them or is rejected with a reason."""

import importlib.util

import pytest

from benchmarks.zoo import checks, from_transformers, own_models
from benchmarks.zoo.__main__ import main, table

OWN = {entry.name: entry for entry in own_models.ENTRIES}
SAMPLE = (
    "lstm", "graph", "detector", "branching", "dataclass output", "tied", "counting", "bags", "spectrum", "double",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_trains_as_by_hand_and_resumes_exactly(name):
    assert checks.check_trains(OWN[name]) == "ok"
    assert checks.check_resumes(OWN[name]) == "ok"


@pytest.mark.parametrize("name", ["lstm", "branching", "bags", "spectrum"])
@pytest.mark.parametrize("method", ["checkpoint", "fused_optimizer", "half"])
def test_a_method_works_with_a_model_or_is_rejected(name, method):
    assert checks.check_method(OWN[name], method).startswith(("ok", "rejected: "))


@pytest.mark.parametrize("name", ["dict output", "bags"])
def test_the_automatic_mode_trains_a_model_without_measuring(name):
    assert checks.check_automatic(OWN[name], seconds=0.0) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_the_automatic_mode_trains_every_model_of_the_zoo(name):
    assert checks.check_automatic(OWN[name]) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_every_method_works_with_a_model_of_the_zoo_or_is_rejected(name):
    found = {method: checks.check_method(OWN[name], method) for method in checks.METHODS}
    assert {method: o for method, o in found.items() if not o.startswith(("ok", "rejected: ", "not comparable"))} == {}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("entry", from_transformers.ENTRIES, ids=lambda entry: entry.name)
def test_a_model_of_transformers_trains_as_by_hand_and_compiles(entry):
    assert checks.check_trains(entry) == "ok"
    assert checks.check_method(entry, "native_dynamo").startswith(("ok", "rejected: "))


def test_a_wrong_movement_is_found():
    task = OWN["tied"].build()
    expected = checks.weights(checks.hand_written(task))
    found = {name: value.clone() for name, value in expected.items()}
    assert checks.difference(task, expected, found, checks.CLOSE) == (0.0, "")
    found["body.bias"] += 0.01 * (expected["body.bias"] - task.model.body.bias.detach())
    apart, name = checks.difference(task, expected, found, checks.CLOSE)
    assert name == "body.bias" and apart == pytest.approx(0.01, rel=0.05)


def test_the_program_names_an_unknown_model_and_writes_a_table(capsys):
    with pytest.raises(SystemExit):
        main(["no such model"])
    assert "no model is named 'no such model'" in capsys.readouterr().err
    text = table(
        {"a": {"trains": "ok", "half": "rejected: too small"}, "b": {"trains": "ok", "half": "rejected: too small"}}
    )
    assert "| a | 1 | 1 r |" in text and "| half | too small | a, b |" in text and "none failed" in text
