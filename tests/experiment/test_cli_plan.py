"""`drivetrain plan`: a plan for a machine that is not here, its file, and what is said about bad input."""

import json

import pytest

from drivetrain.experiment.cli.verbs import run_command
from drivetrain.strategy.value import Strategy

HERE = "tests.experiment.planned"
QUICKLY = ["--time-limit", "1", "--device", "h100-80g"]


def plan(*words):
    return run_command(["plan", *words])


def test_a_plan_is_found_explained_and_written(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan(f"{HERE}:arguments", "--world-size", "4", *QUICKLY, "--out", str(file)) == 0
    told = capsys.readouterr().out
    assert "Plan of" in told and f"written to {file}" in told
    found = Strategy.load(file)
    assert found.batch.global_size == 16 and found.batch.data_ranks == 4
    assert found.evidence in ("simulated", "modelled")
    assert plan("show", str(file)) == 0
    assert capsys.readouterr().out.splitlines()[0] == told.splitlines()[1]  # after what the factory printed


def test_json_is_all_that_is_printed_and_the_batch_size_is_the_commands(capsys):
    words = [f"{HERE}:arguments", "--world-size", "2", "--batch-size", "32", "--numerics", "exact", *QUICKLY, "--json"]
    assert plan(*words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["failure"] is None and data["plan"]["batch"]["global_size"] == 32
    assert not {"amp_native", "half", "fp8"} & {method["name"] for method in data["plan"]["methods"]}


def test_nothing_fits_is_status_three_with_the_shortfall(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan(f"{HERE}:arguments", *QUICKLY, "--memory-budget", "1KiB", "--out", str(file)) == 3
    told = capsys.readouterr().out
    assert "short by" in told and not file.exists()


@pytest.mark.slow
def test_a_trainer_gets_the_plan_of_its_own_loop(capsys):
    assert plan(f"{HERE}:trainer", "--world-size", "2", *QUICKLY, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plan"]["batch"]["global_size"] == 16  # eight of its loader on each of two processes
    assert not {"tensor_parallel", "pipeline_parallel"} & {method["name"] for method in data["plan"]["methods"]}


def test_plans_are_compared(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    Strategy(["parallel_mode", "fsdp"]).save(first)
    Strategy(["parallel_mode", ("amp_native", "bf16")]).save(second)
    assert plan("diff", str(first), str(second)) == 0
    assert capsys.readouterr().out.splitlines() == ["- fsdp", "+ amp_native dtype='bfloat16'"]
    assert plan("diff", str(first), str(first)) == 0
    assert "are equivalent" in capsys.readouterr().out
    assert plan("diff", str(first), str(second), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 2
    assert plan("show", str(first), "--json") == 0
    assert [method["name"] for method in json.loads(capsys.readouterr().out)["plan"]["methods"]] == [
        "parallel_mode",
        "fsdp",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([HERE], "Name the one"),
        ([f"{HERE}:argument"], "Did you mean 'arguments'"),
        ([f"{HERE}:something_else"], "returned a int"),
        ([f"{HERE}:misspelt", *QUICKLY], "time_limit"),
        ([f"{HERE}:trainer_without_data", *QUICKLY], "train_dataloader="),
        ([f"{HERE}:arguments", "--device", "h10"], "h100"),
        ([f"{HERE}:arguments", "--world-size", "0"], "at least 1"),
        ([f"{HERE}:arguments", *QUICKLY, "--memory-budget", "lots"], "memory_budget"),
        (["show", "no_such_file.json"], "no file"),
        (["show"], "show FILE"),
        (["diff", "a.json"], "diff FILE FILE"),
    ],
)
def test_bad_input_is_status_two_and_says_what_to_do(words, said, capsys):
    assert plan(*words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_plans_a_small_transformer_for_many_devices(capsys):
    from tests.test_examples import load

    example = load("plan_seven_billion")
    size = example.Size(vocabulary=128, width=64, hidden=128, heads=4, blocks=4, length=16)
    plans = example.main(worlds=(8,), size=size, batch_size=16, time_limit=5)
    assert "8 x h100-80g" in capsys.readouterr().out
    assert plans[8].failure is None and plans[8].batch.global_size == 16


def test_the_example_has_seven_billion_parameters_and_no_memory():
    from tests.test_examples import load

    model = load("plan_seven_billion").training()["model"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616
    assert all(parameter.is_meta for parameter in model.parameters())
