"""The life of a run: its folder, its log, its seed, its end."""

import json
import logging
import os
import random
import re
import sys
import threading

import pytest
import torch
import yaml

import drivetrain.experiment as pystematic
from drivetrain.core.errors import DeviceError, ExperimentError, ParameterError
from drivetrain.experiment import experiment, find_runs, read_run, run_folder, sweep
from drivetrain.experiment.plugins import app
from drivetrain.runtime import current_run


@pytest.fixture(autouse=True)
def _heartbeats_end_with_their_run():
    before = set(threading.enumerate())
    yield
    assert "drivetrain-heartbeat" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.fixture
def hooks(monkeypatch):
    """An app without callbacks of other tests."""
    monkeypatch.setattr(app, "_callbacks", {"created": [], "before": [], "after": []})
    return app


@experiment
def draw(x: int = 1, fail: bool = False):
    """Draw random numbers."""
    logging.getLogger("mine").info("a line with [brackets] and %s", "w" * 300)
    logging.getLogger("mine").debug("a debug line")
    if fail:
        raise ValueError("asked to fail")
    return {"x": x, "drawn": [random.random(), torch.rand(1).item()], "seed": pystematic.new_seed()}


def only_run(tmp_path):
    (record,) = find_runs(tmp_path)
    return record


def test_a_run_leaves_a_folder_that_says_what_happened(tmp_path):
    result = draw.run(output_dir=str(tmp_path), x=2, random_seed=5)
    record = only_run(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-z]{6}", record.folder.name)
    assert record.folder.parent == tmp_path / "draw" and record.experiment == "draw"
    assert record.parameters["x"] == 2 and record.parameters["random_seed"] == 5
    assert yaml.safe_load((record.folder / "parameters.yaml").read_text())["x"] == 2
    assert record.origins["x"] == "run" and record.origins["fail"] == "default"
    manifest = record.manifest
    assert manifest["seed"] == 5 and manifest["schema"] == 1 and manifest["source"].endswith("test_running.py")
    assert manifest["packages"]["torch"] and manifest["host"]["python"] and manifest["devices"] and manifest["argv"]
    assert record.state == "finished" and record.status["exit_code"] == 0 and record.status["error"] is None
    assert record.result == result and record.status["result_is_complete"] is True
    assert not record.is_live and current_run() is None


def test_the_seed_decides_every_generator(tmp_path):
    first, again, other = (draw.run(output_dir=str(tmp_path), random_seed=seed) for seed in (5, 5, 6))
    assert first == again and first["drawn"] != other["drawn"]
    reference = random.Random(5)
    assert first["seed"] == reference.getrandbits(32)  # as pystematic draws it
    random.seed(5)
    torch.manual_seed(5)
    assert first["drawn"] == [random.random(), torch.rand(1).item()]


def test_the_default_seed_comes_from_the_operating_system(tmp_path):
    seeds = []
    for _ in range(2):
        random.seed(0)
        draw.run(output_dir=str(tmp_path))
    for record in find_runs(tmp_path):
        seeds.append(record.manifest["seed"])
    assert len(set(seeds)) == 2


def test_log_lines_are_whole_and_handlers_go_away(tmp_path):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    draw.run(output_dir=str(tmp_path))
    assert root.handlers == before and root.level == level
    logging.getLogger("mine").warning("after the run")
    text = only_run(tmp_path).log_path.read_text()
    (line,) = [line for line in text.splitlines() if "brackets" in line]
    assert line.endswith("[INFO] [mine] a line with [brackets] and " + "w" * 300)
    assert "debug line" not in text and "after the run" not in text
    draw.run(output_dir=str(tmp_path / "debug"), debug=True)
    assert "[DEBUG] [mine] a debug line" in only_run(tmp_path / "debug").log_path.read_text()


def test_the_console_has_one_line_per_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    draw.run(output_dir=str(tmp_path))
    lines = capsys.readouterr().err.splitlines()
    assert "[INFO] [mine] a line with [brackets] and " + "w" * 300 in lines


def test_a_failing_run_is_recorded_and_raised(tmp_path):
    with pytest.raises(ValueError, match="asked to fail"):
        draw.run(output_dir=str(tmp_path), fail=True)
    record = only_run(tmp_path)
    assert record.state == "failed" and record.status["exit_code"] == 1
    assert record.status["error"] == "ValueError: asked to fail"
    assert "Traceback" in record.log_path.read_text() and current_run() is None
    draw.run(output_dir=str(tmp_path))


@pytest.mark.parametrize("stage", ["before", "after"])
def test_a_failing_hook_leaves_the_next_run_working(tmp_path, hooks, stage):
    def fail(*args):
        raise RuntimeError("a bad hook")

    getattr(hooks, f"on_{stage}_experiment")(fail)
    with pytest.raises(RuntimeError, match="a bad hook"):
        draw.run(output_dir=str(tmp_path))
    assert only_run(tmp_path).state == "failed" and current_run() is None
    hooks._callbacks[stage].clear()
    assert draw.run(output_dir=str(tmp_path))["x"] == 1


def test_hooks_see_experiment_parameters_and_error(tmp_path, hooks):
    seen = []
    hooks.on_before_experiment(lambda experiment, params: seen.append((experiment.name, params["x"])))
    hooks.on_after_experiment(seen.append)
    draw.run(output_dir=str(tmp_path), x=4)
    with pytest.raises(ValueError):
        draw.run(output_dir=str(tmp_path), fail=True)
    assert seen[:3] == [("draw", 4), None, ("draw", 1)] and isinstance(seen[3], ValueError)


@pytest.mark.parametrize(
    ("error", "state", "code", "raised"),
    [
        (SystemExit(0), "finished", 0, None),
        (SystemExit(), "finished", 0, None),
        (SystemExit(3), "failed", 3, SystemExit),
        (SystemExit(143), "interrupted", 143, SystemExit),
        (SystemExit("words"), "failed", 1, SystemExit),
        (KeyboardInterrupt(), "interrupted", 130, KeyboardInterrupt),
    ],
)
def test_how_a_run_ends_is_written_down(tmp_path, error, state, code, raised):
    @experiment
    def ends():
        raise error

    if raised is None:
        assert ends.run(output_dir=str(tmp_path)) is None
    else:
        with pytest.raises(raised):
            ends.run(output_dir=str(tmp_path))
    assert (only_run(tmp_path).state, only_run(tmp_path).status["exit_code"]) == (state, code)
    assert (only_run(tmp_path).status["error"] is None) == (state != "failed"), "a signal is a state, not an error"


def test_a_run_within_a_run_is_refused(tmp_path):
    @experiment
    def outer():
        return draw.run(output_dir=str(tmp_path))

    with pytest.raises(ExperimentError, match="'outer' is still active"):
        outer.run(output_dir=str(tmp_path))
    assert not (tmp_path / "draw").exists()


def test_the_lock_lives_as_long_as_the_run(tmp_path):
    seen = []

    @experiment
    def look():
        seen.append(read_run(current_run().folder))

    look.run(output_dir=str(tmp_path))
    assert seen[0].is_live and seen[0].state == "running"
    status = seen[0].folder / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "running"}))
    assert read_run(seen[0].folder).state == "lost"


def test_a_run_name_replaces_time_and_suffix(tmp_path):
    draw.run(output_dir=str(tmp_path), run_name="baseline")
    assert only_run(tmp_path).folder == tmp_path / "draw" / "baseline"
    with pytest.raises(ExperimentError, match="already exists"):
        draw.run(output_dir=str(tmp_path), run_name="baseline")
    for bad in ("../x", "a/b", "..", "sweeps", "", "ü" * 101):
        with pytest.raises(ParameterError, match="cannot name a folder"):
            draw.run(output_dir=str(tmp_path), run_name=bad)


def test_what_cannot_be_written_as_json_is_kept_as_text(tmp_path):
    @experiment
    def returns(kind: str = "tensor"):
        return {"tensor": torch.tensor(0.5), "object": object(), "array": torch.zeros(3)}[kind]

    assert returns.run(output_dir=str(tmp_path / "a")) == 0.5
    assert only_run(tmp_path / "a").result == 0.5
    returns.run(output_dir=str(tmp_path / "b"), kind="object")
    assert only_run(tmp_path / "b").status["result_is_complete"] is False


def test_proxies_mean_the_present_run_and_keep_the_last(tmp_path):
    @experiment
    def look(params):
        assert os.listdir(pystematic.output_dir) and pystematic.params["nnodes"] == 1
        with open(pystematic.params_file) as stream:
            assert yaml.safe_load(stream)["nnodes"] == 1
        assert pystematic.current_experiment.name == "look" and pystematic.subprocess_counter == 0
        assert not pystematic.is_subprocess() and pystematic.local_rank() == 0
        return str(pystematic.output_dir)

    folder = look.run({"output_dir": str(tmp_path)})
    assert str(pystematic.output_dir) == folder == os.fspath(pystematic.output_dir / "")[: len(folder)]
    assert current_run() is None


def test_things_of_the_run_end_with_it(tmp_path):
    ended = []

    class Recorder:
        count = 7

        def close(self):
            ended.append("recorder")

    @experiment
    def record():
        run = current_run()
        run.recorder = Recorder()
        run.at_end(lambda: ended.append("first"))
        run.at_end(lambda: ended.append("second"))

    record.run(output_dir=str(tmp_path))
    assert ended == ["second", "first", "recorder"] and only_run(tmp_path).status["step"] == 7


def test_the_status_is_kept_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.experiment.run_folder.HEARTBEAT_SECONDS", 0.01)

    @experiment
    def wait():
        status = current_run().folder / "status.json"
        first = json.loads(status.read_text())["heartbeat"]
        for _ in range(500):
            if json.loads(status.read_text())["heartbeat"] > first:
                return True
            threading.Event().wait(0.01)

    assert wait.run(output_dir=str(tmp_path)) is True


def test_deterministic_holds_for_the_run_only(tmp_path):
    @experiment
    def look():
        return torch.are_deterministic_algorithms_enabled()

    assert look.run(output_dir=str(tmp_path), deterministic="strict") is True
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_falls_back_by_default_and_fails_when_asked_for(tmp_path):
    place = ["--output-dir", str(tmp_path)]
    assert draw.cli(place)["x"] == 1
    for line in (["--cuda"], ["--device", "cuda"]):
        with pytest.raises(DeviceError, match="cuda"):
            draw.cli(place + line, exit_on_error=False)
    assert len(list(find_runs(tmp_path))) == 1


def test_a_folder_that_cannot_be_made_is_an_experiment_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExperimentError, match="--output-dir"):
        draw.run(output_dir=str(tmp_path / "file"))
    assert current_run() is None


def test_reading_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="not the folder of a run"):
        read_run(tmp_path)
    draw.run(output_dir=str(tmp_path), run_name="a")
    folder = only_run(tmp_path).folder
    (folder / "status.json").write_text("{broken")
    (folder / "parameters.yaml").write_text("[broken")
    assert read_run(folder).state == "lost" and read_run(folder).parameters == {}


def test_the_command_line_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--x", "3", "--output-dir", str(tmp_path)])
    assert draw.cli()["x"] == 3
    assert only_run(tmp_path).manifest["argv"] == sys.argv and only_run(tmp_path).origins["x"] == "cli"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def contains_itself():
    found = []
    found.append(found)
    return found


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "result", [{"x": Unprintable()}, contains_itself(), nested(100_000)], ids=["text", "self", "deep"]
)
def test_a_result_that_cannot_be_written_is_returned_and_the_run_has_finished(tmp_path, result):
    @experiment
    def give():
        return result

    assert give.run(output_dir=str(tmp_path)) is result
    record = only_run(tmp_path)
    assert record.state == "finished" and record.status["result_is_complete"] is False


def test_an_error_without_a_text_is_written_down(tmp_path):
    @experiment
    def fail():
        raise Unprintable

    with pytest.raises(Unprintable):
        fail.run(output_dir=str(tmp_path))
    assert only_run(tmp_path).state == "failed" and "Unprintable" in only_run(tmp_path).status["error"]
    (trial,) = sweep(fail, [{}], params={"output_dir": str(tmp_path)}, on_failure="return")
    assert trial.status == "failed" and "Unprintable" in trial.error


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt(), "interrupted"), (SystemExit(3), "failed")])
def test_what_ends_one_of_the_endings_is_written_down_and_the_others_are_called(tmp_path, error, state):
    called = []

    def stop():
        raise error

    @experiment
    def record():
        current_run().at_end(lambda: called.append("first"))
        current_run().at_end(stop)

    with pytest.raises(type(error)):
        record.run(output_dir=str(tmp_path))
    assert only_run(tmp_path).state == state and called == ["first"]


def test_ctrl_c_while_a_run_ends_is_written_down(tmp_path, hooks):
    def interrupt(error):
        raise KeyboardInterrupt

    hooks.on_after_experiment(interrupt)
    with pytest.raises(KeyboardInterrupt):
        draw.run(output_dir=str(tmp_path))
    assert only_run(tmp_path).state == "interrupted" and current_run() is None


@pytest.mark.parametrize("fail", [False, True])
def test_a_disk_that_is_full_at_the_end_hides_neither_result_nor_error(tmp_path, monkeypatch, fail, caplog):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.StatusFile, "end", full)
    if fail:
        with pytest.raises(ValueError, match="asked to fail"):
            draw.run(output_dir=str(tmp_path), fail=True)
    else:
        assert draw.run(output_dir=str(tmp_path))["x"] == 1
    assert "No space left on device" in caplog.text
