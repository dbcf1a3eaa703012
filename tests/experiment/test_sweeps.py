"""Sweeps: spaces, samplers, the loop, its journal and its result."""

import csv
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError, ExperimentError, ParameterError, SweepError
from drivetrain.experiment import (
    Choice,
    IntRange,
    LogUniform,
    Sampler,
    Trial,
    Uniform,
    experiment,
    find_runs,
    param_matrix,
    read_run,
    read_sweep,
    report,
    sweep,
)
from drivetrain.experiment.parameters import ParameterSet
from drivetrain.experiment.sweeps.space import make_space
from drivetrain.experiment.sweeps.sweeping import continue_sweep
from drivetrain.experiment.sweeps.trial import JOURNAL
from drivetrain.runtime import current_run

CALLS = []


@experiment
def bowl(lr: float = 0.1, size: int = 1, name: str = "a", fail: bool = False):
    """A function with its minimum at lr 0.3 and size 2."""
    CALLS.append((lr, size))
    if fail or name == "bad":
        raise ValueError(f"no {name}")
    return {"loss": (lr - 0.3) ** 2 + (size - 2) ** 2, "accuracy": 1 - lr}


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def place(tmp_path):
    return {"output_dir": str(tmp_path)}


def test_a_matrix_is_every_combination_in_keyword_order():
    assert param_matrix(int_param=[1, 2], str_param=("hello", "world"), constant=3) == [
        {"int_param": 1, "str_param": "hello", "constant": 3},
        {"int_param": 1, "str_param": "world", "constant": 3},
        {"int_param": 2, "str_param": "hello", "constant": 3},
        {"int_param": 2, "str_param": "world", "constant": 3},
    ]


def test_a_grid_runs_every_point_in_its_own_folder(tmp_path):
    result = sweep(bowl, {"lr": Choice(0.2, 0.3), "size": IntRange(1, 3)}, params=place(tmp_path), objective="loss")
    assert (
        [(t.params["lr"], t.params["size"]) for t in result]
        == CALLS
        == [(lr, s) for lr in (0.2, 0.3) for s in (1, 2, 3)]
    )
    assert (
        result.best.params == {"lr": 0.3, "size": 2}
        and result.best.value == 0.0
        and result.best.metrics["accuracy"] == 0.7
    )
    assert [t.index for t in result] == list(range(6)) and {t.status for t in result} == {"finished"}
    records = list(find_runs(tmp_path))
    assert [r.folder for r in records] == [t.run_dir for t in result]
    assert result.folder.parent == tmp_path / "bowl" / "sweeps" and records[3].manifest["trial"]["index"] == 3
    assert records[3].parameters["lr"] == 0.3 and records[3].origins["lr"] == "run"


def test_a_returned_number_is_the_objective(tmp_path):
    @experiment
    def number(x: float = 0.0):
        return x

    assert sweep(number, {"x": [1.0, -2.0, 3.0]}, params=place(tmp_path)).best.value == -2.0
    assert sweep(number, {"x": [1.0, -2.0, 3.0]}, params=place(tmp_path), direction="max").best.value == 3.0
    nan = sweep(number, {"x": [math.nan, 1.0]}, params=place(tmp_path))
    assert nan.best.value == 1.0 and nan.ranked[-1].index == 0


def test_the_summary_of_a_recorder_can_be_the_objective(tmp_path):
    @experiment
    def records(x: float = 0.0):
        from drivetrain.record.recorder import Recorder

        recorder = Recorder(tensorboard=False)
        recorder.summary({"final": x * 2})

    assert [t.value for t in sweep(records, {"x": [1.0, 2.0]}, params=place(tmp_path), objective="final")] == [2.0, 4.0]


def test_random_draws_depend_on_seed_and_number_only(tmp_path):
    space = {"lr": LogUniform(1e-4, 1e-1), "size": IntRange(1, 8), "name": Choice("a", "b")}
    first, again, other = (
        sweep(bowl, space, sampler="random", n_trials=5, seed=seed, params=place(tmp_path), objective="loss")
        for seed in (1, 1, 2)
    )
    assert [t.params for t in first] == [t.params for t in again] != [t.params for t in other]
    assert all(1e-4 <= t.params["lr"] <= 1e-1 and 1 <= t.params["size"] <= 8 for t in first)
    assert len({t.params["lr"] for t in first}) == 5


def test_log_uniform_gives_every_magnitude_its_share():
    generator = random.Random(0)
    draws = [LogUniform(1e-4, 1e-1).draw(generator) for _ in range(3000)]
    shares = [sum(low <= draw < low * 10 for draw in draws) / 3000 for low in (1e-4, 1e-3, 1e-2)]
    assert all(abs(share - 1 / 3) < 0.03 for share in shares)
    assert {IntRange(1, 3).draw(generator) for _ in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"space": {"lr": Uniform(0, 1)}}, "sampler 'grid' cannot list all values of lr"),
        ({"space": {"sise": [1]}}, "Did you mean 'size'"),
        ({"space": {"size": [1, 2.5]}}, "size cannot be 2.5"),
        ({"space": [{"size": 1}, {"size": "x"}]}, "size cannot be 'x'"),
        ({"space": {"size": IntRange(1, 3)}, "sampler": "random"}, "n_trials"),
        ({"space": {"size": [1]}, "sampler": "gird"}, "Did you mean 'grid'"),
        ({"space": {"size": [1]}, "executor": "pol"}, "Did you mean 'pool'"),
        ({"space": {"size": [1]}, "executor": "inline", "num_processes": 2}, "executor='pool'"),
        ({"space": {"size": [1]}, "executor": "pool", "num_processes": 0}, "at least 1"),
        ({"space": {"size": [1]}, "direction": "down"}, "unknown direction"),
        ({"space": {"size": [1]}, "retries": -1}, "retries"),
        ({"space": {"size": [1]}, "n_trials": 0, "sampler": "random"}, "n_trials"),
        ({"space": {"run_name": ["x"]}}, "set by the sweep itself"),
        ({"space": {}}, "empty"),
        ({"space": []}, "cannot be"),
        ({"space": 3}, "cannot be"),
        ({"space": {"size": [1]}, "params": {"fial": True}}, "Did you mean 'fail'"),
        ({"space": {"size": [1]}, "on_failure": "ignore"}, "on_failure"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(tmp_path, arguments, words):
    arguments = {"params": {}, **arguments}
    arguments["params"] = arguments["params"] | place(tmp_path)
    with pytest.raises(ConfigError, match=words):
        sweep(bowl, **arguments)
    assert not CALLS and not (tmp_path / "bowl").exists()


def test_ranges_are_checked():
    for make in (
        lambda: Uniform(1, 0),
        lambda: LogUniform(0, 1),
        lambda: IntRange(0.5, 2),
        lambda: Choice(),
        lambda: Uniform(0, math.inf),
    ):
        with pytest.raises(ParameterError):
            make()
    assert make_space({"a": 3, "b": (1, 2)}, ParameterSet()).grid() == [{"a": 3, "b": 1}, {"a": 3, "b": 2}]


def test_failures_stop_no_other_trial_and_are_named_at_the_end(tmp_path):
    with pytest.raises(SweepError, match=r"1 of 3 trials failed.*\n  trial 1 .*ValueError: no bad") as caught:
        sweep(bowl, {"name": ["a", "bad", "b"]}, params=place(tmp_path), objective="loss")
    result = caught.value.result
    assert [t.status for t in result] == ["finished", "failed", "finished"] and result.failed == [result[1]]
    assert "no bad" in result.table() and result.ranked[-1].index == 1
    calm = sweep(bowl, {"name": ["a", "bad"]}, params=place(tmp_path), objective="loss", on_failure="return")
    assert len(calm.failed) == 1
    with pytest.raises(ExperimentError, match="objective"):
        sweep(bowl, {"name": ["a"]}, params=place(tmp_path)).best


def test_a_missing_objective_fails_the_trial(tmp_path):
    with pytest.raises(SweepError, match=r"no objective 'seconds'.*loss, accuracy"):
        sweep(bowl, {"size": [1]}, params=place(tmp_path), objective="seconds")


def test_a_misspelled_objective_ends_the_sweep_after_the_first_trial(tmp_path):
    with pytest.raises(ParameterError, match=r"no objective 'acuracy'.*Did you mean objective='accuracy'"):
        sweep(bowl, {"size": [1, 2, 3]}, params=place(tmp_path), objective="acuracy")
    assert len(CALLS) == 1


def test_retries_continue_first_from_the_folder_then_begin_anew(tmp_path):
    folders = []

    @experiment
    def flaky(x: int = 0):
        folders.append(current_run().folder.name)
        if len(folders) < 3:
            raise ValueError("not yet")
        return 1.0

    (trial,) = sweep(flaky, {"x": [1]}, params=place(tmp_path), retries=2)
    assert trial.attempts == 3 and trial.value == 1.0 and folders == ["trial-0000", "trial-0000", "trial-0000-3"]
    with pytest.raises(SweepError):
        sweep(bowl, {"name": ["bad"]}, params=place(tmp_path), retries=1)


def test_an_interrupted_sweep_is_taken_up_where_it_stopped(tmp_path):
    calls = []

    @experiment
    def stops(x: int = 0, y: float = 0.0):
        calls.append(x)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return float(x)

    space = {"x": list(range(6))}
    with pytest.raises(KeyboardInterrupt):
        sweep(stops, space, params=place(tmp_path))
    (folder,) = (tmp_path / "stops" / "sweeps").iterdir()
    part = read_sweep(folder)
    assert [t.status for t in part] == ["finished"] * 3 + ["running"]
    with open(folder / JOURNAL, "a") as journal:
        journal.write('{"event": "finished", "ind')  # torn by a crash
    whole = sweep(stops, space, params=place(tmp_path), resume=folder)
    assert calls == [0, 1, 2, 3, 3, 4, 5] and [t.value for t in whole] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [t.value for t in read_sweep(folder)] == [t.value for t in whole]
    assert sweep(stops, space, params=place(tmp_path), resume=folder).best.index == 0 and len(calls) == 7
    with pytest.raises(ParameterError, match="was made with space="):
        sweep(stops, {"x": [1]}, params=place(tmp_path), resume=folder)
    with pytest.raises(ExperimentError, match="not the folder of a sweep"):
        sweep(stops, space, params=place(tmp_path), resume=tmp_path)


def test_any_object_that_asks_and_tells_is_a_sampler(tmp_path):
    class Halving(Sampler):
        def __init__(self):
            self.step, self.lr, self.told = 0, 0.8, []

        def ask(self):
            if self.step == 4:
                return None
            self.step += 1
            return Trial(self.step - 1, {"lr": self.lr, "size": 2})

        def tell(self, trial):
            self.told.append(trial.value)
            self.lr /= 2

    sampler = Halving()
    result = sweep(bowl, {"lr": Uniform(0, 1)}, sampler=sampler, params=place(tmp_path), objective="loss")
    assert [t.params["lr"] for t in result] == [0.8, 0.4, 0.2, 0.1] and sampler.told == [t.value for t in result]


def test_pruned_trials_are_neither_failed_nor_complete(tmp_path):
    class Impatient(Sampler):
        def __init__(self):
            self.left = [0.1, 0.9]

        def ask(self):
            return Trial(2 - len(self.left), {"lr": self.left.pop(0)}) if self.left else None

        def should_prune(self, trial, value, step):
            return value > 0.5 and step >= 2

    cleaned = []

    @experiment
    def reporting(lr: float = 0.1):
        try:
            for step in range(4):
                report(lr, step)
        finally:
            cleaned.append(lr)
        return lr

    result = sweep(reporting, {"lr": Uniform(0, 1)}, sampler=Impatient(), params=place(tmp_path))
    assert [t.status for t in result] == ["finished", "pruned"] and not result.failed and cleaned == [0.1, 0.9]
    assert reporting.run(place(tmp_path)) == 0.1  # outside a sweep nobody listens


def test_results_are_tables_files_and_pictures(tmp_path):
    seen = []
    space = {"lr": Choice(1e-3, 1e-2, 1e-1), "name": Choice("a", "b, with comma")}
    result = sweep(bowl, space, params=place(tmp_path), objective="loss", on_change=lambda r: seen.append(len(r)))
    assert result.table().splitlines()[1].startswith("4") and "b, with comma" in result.table()
    with open(result.to_csv(tmp_path / "sweep.csv"), newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["trial"]) for row in rows] == [t.index for t in result.ranked]
    assert rows[1]["params.name"] == "b, with comma" and float(rows[0]["metrics.accuracy"]) == 0.9
    pytest.importorskip("matplotlib")
    assert result.plot(tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert seen[-1] == 6 and len(result[1:3]) == 2
    with pytest.raises(ExperimentError, match="nothing to draw"):
        sweep(bowl, {"size": [1]}, params=place(tmp_path)).plot(tmp_path / "none.png")


def test_every_line_of_the_journal_is_whole(tmp_path):
    result = sweep(bowl, {"size": [1, 2]}, params=place(tmp_path), objective="loss")
    events = [json.loads(line)["event"] for line in (result.folder / JOURNAL).read_text().splitlines()]
    assert events == ["sweep", "asked", "started", "finished", "asked", "started", "finished"]


KILLED = """
import sys, time
from pathlib import Path
from drivetrain.experiment import experiment, sweep

@experiment
def slow(x: int = 0):
    with open(sys.argv[1] + "/calls.txt", "a") as stream:
        stream.write(f"{x}\\n")
    time.sleep(0.05)
    if x in (3, 9, 15):
        raise ValueError("a bad number")
    return float(x)

if __name__ == "__main__":
    resume = sys.argv[2] if len(sys.argv) > 2 else None
    sweep(slow, {"x": list(range(20))}, params={"output_dir": sys.argv[1]}, executor=EXECUTOR, resume=resume)
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "pool"])
def test_a_killed_sweep_is_completed_by_resuming(tmp_path, executor):
    script = tmp_path / "script.py"
    processes = ", num_processes=2" if executor == "pool" else ""
    script.write_text(KILLED.replace("EXECUTOR", repr(executor) + processes))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(script), str(tmp_path)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    parent = subprocess.Popen(line, env=env, **quiet)
    calls = tmp_path / "calls.txt"
    deadline = time.monotonic() + 120
    while not (calls.exists() and len(calls.read_text().splitlines()) >= 7) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    (folder,) = (tmp_path / "slow" / "sweeps").iterdir()
    unfinished = [t.index for t in read_sweep(folder) if not t.is_over]
    done = subprocess.run([*line, str(folder)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "SweepError: 3 of 20 trials failed" in done.stderr
    result = read_sweep(folder)
    assert [t.value for t in result] == [None if x in (3, 9, 15) else float(x) for x in range(20)]
    assert [t.index for t in result.failed] == [3, 9, 15]
    counts = [calls.read_text().split().count(str(x)) for x in range(20)]
    assert all(count == 1 or (count == 2 and x in unfinished) for x, count in enumerate(counts))
    assert all(Path(t.run_dir).is_dir() for t in result)


@experiment
def draws(lr: float = 0.1):
    """Return a random number, which only depends on the seed."""
    import torch

    return float(torch.rand(()))


def test_two_identical_sweeps_give_identical_results_and_their_trials_differ(tmp_path):
    run = lambda name, **more: sweep(
        draws,
        param_matrix(lr=[0.1, 0.1, 0.2]),
        params={"output_dir": str(tmp_path / name), **more.pop("params", {})},
        **more,
    )
    first, second, other = run("a", seed=5), run("b", seed=5), run("c", seed=6)
    values = [trial.value for trial in first]
    assert values == [trial.value for trial in second] and len(set(values)) == 3
    assert not set(values) & {trial.value for trial in other}
    record = read_run(first[0].run_dir)
    assert record.origins["random_seed"] == "sweep" and 0 <= record.parameters["random_seed"] < 2**32
    assert {trial.value for trial in run("d", params={"random_seed": 3})} == {
        run("e", params={"random_seed": 3})[0].value
    }


def test_the_direction_follows_from_the_objective_unless_it_is_given(tmp_path):
    space = {"lr": Choice(0.2, 0.3)}
    assert sweep(bowl, space, params=place(tmp_path), objective="accuracy").best.params["lr"] == 0.2
    assert sweep(bowl, space, params=place(tmp_path), objective="loss").best.params["lr"] == 0.3
    assert sweep(bowl, space, params=place(tmp_path), objective="accuracy", direction="min").best.params["lr"] == 0.3


def test_a_declared_direction_is_that_of_a_sweep(tmp_path):
    @experiment(directions={"cost": "max"})
    def odd(x: float = 1.0):
        return {"cost": x}

    assert sweep(odd, {"x": Choice(1.0, 2.0)}, params=place(tmp_path), objective="cost").best.params["x"] == 2.0


def test_a_sweep_of_the_earlier_default_is_resumed_in_its_own_direction(tmp_path):
    space = {"lr": Choice(0.2, 0.3)}
    first = sweep(bowl, space, params=place(tmp_path), objective="accuracy", direction="min")
    assert sweep(bowl, space, params=place(tmp_path), objective="accuracy", resume=first.folder).direction == "min"


@pytest.mark.parametrize(
    ("direction", "values", "message"),
    [
        (["min", "max", "min"], {}, "one direction"),
        ("upwards", {}, "'min' or 'max'"),
        ("min", {"a": 1.0, "b": 2.0}, r"2 objectives, but trial 0 has 1|1 objectives, but trial 0 has 2"),
    ],
)
def test_a_journal_whose_objectives_do_not_fit_is_rejected(direction, values, message, tmp_path):
    entries = [
        {
            "event": "sweep",
            "time": 1.0,
            "schema": 1,
            "experiment": "bowl",
            "space": {"lr": [0.1]},
            "direction": direction,
        },
        {"event": "asked", "time": 1.0, "index": 0, "params": {"lr": 0.1}},
        {"event": "finished", "time": 2.0, "index": 0, "value": 1.0, "values": values},
    ]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(ExperimentError, match=message):
        read_sweep(tmp_path)


@pytest.mark.parametrize(
    "space",
    [
        {"lr": Choice(0.2, 0.3), "size": IntRange(1, 2)},
        {"lr": [1, 0.5], "name": ["a", "b"]},
        [{"lr": 0.1, "size": 3}, {"name": "x"}],
    ],
)
def test_a_sweep_continues_from_its_journal_alone(tmp_path, space):
    first = sweep(bowl, space, params=place(tmp_path), objective="loss", seed=3)
    journal = first.folder / JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:4]))  # one trial is complete
    for trial in first[1:]:
        shutil.rmtree(trial.run_dir)
    CALLS.clear()
    result = continue_sweep(bowl, first.folder)
    assert [(t.params, t.value) for t in result] == [(t.params, t.value) for t in first]
    assert len(CALLS) == len(first) - 1


def test_a_random_sweep_continues_with_the_same_draws(tmp_path):
    space = {"lr": LogUniform(1e-3, 1.0), "size": IntRange(1, 9)}
    first = sweep(bowl, space, sampler="random", n_trials=4, params=place(tmp_path), objective="loss", seed=5)
    journal = first.folder / JOURNAL
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:4]))
    assert [t.params for t in continue_sweep(bowl, first.folder)] == [t.params for t in first]


def test_a_sweep_that_its_journal_cannot_rebuild_names_the_way_on(tmp_path):
    class Own(Choice):
        pass

    first = sweep(bowl, {"lr": Own(0.1, 0.2)}, params=place(tmp_path), objective="loss")
    with pytest.raises(ParameterError, match="resume="):
        continue_sweep(bowl, first.folder)


CONDITIONAL = {
    "name": Choice("sgd", "adam"),
    "lr": Choice(0.1, 0.2).when(name="sgd"),
    "size": Choice(1, 2).when({"lr": 0.2, "name": ["sgd", "adam"]}),
}


def test_a_condition_varies_a_parameter_only_where_another_has_its_value(tmp_path):
    points = make_space(CONDITIONAL, ParameterSet()).grid()
    assert points == [
        {"name": "sgd", "lr": 0.1},
        {"name": "sgd", "lr": 0.2, "size": 1},
        {"name": "sgd", "lr": 0.2, "size": 2},
        {"name": "adam"},
    ]
    assert make_space(dict(reversed(CONDITIONAL.items())), ParameterSet()).grid()[1] == {
        "size": 1,
        "lr": 0.2,
        "name": "sgd",
    }
    first = sweep(bowl, CONDITIONAL, params=place(tmp_path), objective="loss")
    assert [t.params for t in first] == points and CALLS[-1] == (0.1, 1)  # elsewhere the default
    journal = first.folder / JOURNAL
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:4]))
    shutil.rmtree(first[1].run_dir)
    assert [t.params for t in continue_sweep(bowl, first.folder)] == points
    drawn = sweep(bowl, CONDITIONAL, sampler="random", n_trials=12, params=place(tmp_path), objective="loss")
    assert all(("lr" in t.params) == (t.params["name"] == "sgd") for t in drawn)
    assert {"adam", "sgd"} == {t.params["name"] for t in drawn}


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"lr": Uniform(0, 1).when(nam="a"), "name": ["a", "b"]}, "Did you mean 'name'"),
        ({"lr": Choice(0.1).when(name="c"), "name": ["a", "b"]}, "name='c', a value that name never takes"),
        ({"lr": Choice(0.1).when(size=1), "size": Choice(1).when(lr=0.1)}, "cycle"),
    ],
)
def test_a_condition_that_can_never_hold_is_an_error(tmp_path, space, words):
    with pytest.raises(ParameterError, match=words):
        sweep(bowl, space, sampler="random", n_trials=1, params=place(tmp_path))
    with pytest.raises(ParameterError, match="no conditions"):
        Choice(1).when()


def test_several_objectives_have_a_front_and_no_single_best(tmp_path):
    options = {"params": place(tmp_path), "objective": ("loss", "accuracy")}
    result = sweep(bowl, {"lr": Choice(0.1, 0.3, 0.4), "size": [2, 3]}, **options)
    assert result.direction == ("min", "max") and [t.params["lr"] for t in result.front] == [0.3, 0.1]
    assert result.front[0].values == {"loss": 0.0, "accuracy": 0.7} and result.front[0].value is None
    with pytest.raises(ExperimentError, match=r"result\.front"):
        result.best
    assert result.ranked[0] in result.front and list(result.rows()[0])[:4] == ["trial", "status", "loss", "accuracy"]
    again = read_sweep(result.folder)
    assert [t.index for t in again.front] == [t.index for t in result.front] and again.goal == result.goal
    with open(result.to_csv(tmp_path / "sweep.csv"), newline="") as stream:
        assert float(next(csv.DictReader(stream))["value.accuracy"]) == 0.7
    assert (
        sweep(bowl, {"lr": Choice(0.1, 0.3, 0.4), "size": [2, 3]}, resume=result.folder, **options).goal == result.goal
    )


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({"objective": ("loss", "loss")}, "twice"),
        ({"objective": ("loss", "accuracy"), "direction": "min"}, "1 entries for 2 objectives"),
        ({"direction": ("min", "max")}, "2 entries for 1 objectives"),
        ({"objective": ()}, "expected a name"),
        ({"objective": 3}, "expected a name"),
    ],
)
def test_a_goal_that_does_not_fit_is_an_error(tmp_path, goal, words):
    with pytest.raises(ConfigError, match=words):
        sweep(bowl, {"size": [1]}, params=place(tmp_path), **goal)


def test_total_time_left_and_the_last_report_are_known_while_a_sweep_runs(tmp_path):
    seen = []

    @experiment
    def reporting(x: int = 0):
        for step in range(3):
            report(x / 2, step)
        return x

    def note(result):
        seen.append((result.total, result.seconds_left, [(t.status, t.reported) for t in result]))

    sweep(reporting, {"x": [0, 1, 2]}, params=place(tmp_path), on_change=note)
    assert all(total == 3 for total, _, _ in seen) and seen[0][1] is None
    assert 0 < seen[1][1] < 600 and seen[-1][1] == 0
    assert seen[-1][2][1] == ("finished", (2, 0.5)) and seen[0][2] == [("running", None)]


def test_names_of_our_own_columns_are_free_for_objectives_and_parameters(tmp_path):
    @experiment
    def timed(value: int = 1, trial: str = "a"):
        return {"seconds": 10.0 * value, "loss": 1.0}

    result = sweep(timed, {"value": [1, 2]}, params=place(tmp_path), objective=("loss", "seconds"))
    assert [row["value.seconds"] for row in result.rows()] == [10.0, 20.0] and result.rows()[0]["seconds"] < 9
    single = sweep(timed, {"value": [1, 2], "trial": ["a", "b"]}, params=place(tmp_path), objective="seconds")
    assert [(row["value"], row["params.value"]) for row in single.rows()][::2] == [(10.0, 1), (20.0, 2)]
    assert single.rows()[1]["params.trial"] == "b" and single.rows()[1]["trial"] == 1


def test_trials_that_return_several_numbers_without_an_objective_are_warned_about_once(tmp_path, caplog):
    @experiment
    def several(x: int = 1):
        return {"loss": x, "seconds": 2}

    result = sweep(several, {"x": [1, 2]}, params={"output_dir": str(tmp_path)})
    found = [record.getMessage() for record in caplog.records if "no value to compare" in record.getMessage()]
    assert [trial.value for trial in result] == [None, None]
    assert len(found) == 1 and "it returned loss, seconds. Choose one with objective=" in found[0]


@dataclass
class Rule:
    lr: float = 0.1
    momentum: float = 0.0


@experiment
def nested(rule: Rule, batch_size: int = 1, activation=math.tanh):
    return rule.lr + rule.momentum


@pytest.mark.parametrize(
    "space", [[{"rule": {"lr": 1.0}}], {"rule": {"lr": [1.0]}}, {"rule": Choice({"lr": 1.0})}, {"rule.lr": 1.0}]
)
def test_parameters_of_all_trials_within_a_group_stay(tmp_path, space):
    (trial,) = sweep(nested, space, params={**place(tmp_path), "rule": {"momentum": 0.5}})
    assert trial.value == 1.5


def test_names_may_be_written_as_on_a_command_line(tmp_path):
    space = {"batch-size": [1, 2], "rule.lr": Choice(1.0, 2.0).when({"batch-size": 2})}
    result = sweep(nested, space, params=place(tmp_path))
    assert [trial.params.get("batch_size") for trial in result] == [1, 2, 2]


def test_a_sweep_that_is_interrupted_again_and_again_stays_in_the_folders_of_its_trials(tmp_path):
    folders = []

    @experiment
    def slow(x: int = 0):
        folders.append(current_run().folder.name)
        if len(folders) < 4:
            raise KeyboardInterrupt
        if len(folders) < 5:
            raise ValueError("fails once")
        return 1.0

    options = {"params": place(tmp_path), "retries": 1}
    for _ in range(3):
        folder = next((tmp_path / "slow" / "sweeps").glob("*"), None)
        with pytest.raises(KeyboardInterrupt):
            sweep(slow, {"x": [1]}, resume=folder, **options)
    (trial,) = sweep(slow, {"x": [1]}, resume=folder, **options)
    assert folders == ["trial-0000"] * 5 and trial.value == 1.0 and trial.attempts == 2


def test_a_continuous_range_of_a_whole_number_is_an_error_before_the_first_trial(tmp_path):
    with pytest.raises(ParameterError, match="batch_size cannot be .*: expected a whole number"):
        sweep(nested, {"batch_size": Uniform(1, 8)}, sampler="random", n_trials=2, params=place(tmp_path))
    assert not list(tmp_path.iterdir())


def test_functions_are_the_same_values_when_a_sweep_is_resumed(tmp_path):
    for sampler in ("grid", "random"):
        space = lambda: {"activation": Choice(lambda x: x, math.tanh)}
        options = {"params": place(tmp_path), "sampler": sampler, "n_trials": 2}
        first = sweep(nested, space(), **options)
        assert len(sweep(nested, space(), resume=first.folder, **options)) == 2
        assert " at 0x" not in (first.folder / JOURNAL).read_text()


def test_a_result_that_no_float_can_hold_is_no_value(tmp_path):
    @experiment
    def huge(bits: int = 1):
        return 2**bits

    result = sweep(huge, {"bits": [3, 3000]}, params=place(tmp_path))
    assert [trial.value for trial in result] == [8.0, None]
    assert [record.state for record in find_runs(result.folder)] == ["finished", "finished"]


def test_a_sweep_that_is_resumed_by_a_relative_path_keeps_whole_paths(tmp_path, monkeypatch):
    first = sweep(bowl, {"size": [1, 2, 3]}, params=place(tmp_path), objective="loss", n_trials=1)
    monkeypatch.chdir(first.folder.parent)
    again = sweep(bowl, {"size": [1, 2, 3]}, params=place(tmp_path), objective="loss", resume=first.folder.name)
    assert {trial.run_dir.parent for trial in again} == {first.folder}


def test_an_objective_of_a_plain_number_is_explained(tmp_path):
    with pytest.raises(SweepError, match="no objective 'loss' .returned: a number without a name"):
        sweep(nested, {"batch_size": [1]}, params=place(tmp_path), objective="loss")


def test_a_trial_that_changes_a_value_changes_no_other_trial(tmp_path):
    @experiment
    def pops(config: Any = None, x: int = 0):
        return len(config["inner"]), config["inner"].clear()

    result = sweep(pops, {"x": [1, 2]}, params={**place(tmp_path), "config": {"inner": [1, 2, 3]}})
    assert [read_run(trial.run_dir).result[0] for trial in result] == [3, 3]
