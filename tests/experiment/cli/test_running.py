"""`run`, `launch`, `resume` and `sweep`, with real experiments."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from drivetrain.experiment.cli.output import own_command
from drivetrain.experiment.records import find_runs, read_run


@pytest.fixture
def small(program):
    return program("SMALL")


def only_run(place):
    (record,) = find_runs(place)
    return record


def test_run_says_with_what_and_where_and_what_came_of_it(command, small, tmp_path):
    status, out, err = command("run", small, "--output-dir", tmp_path / "o", "--lr", "0.05")
    record = only_run(tmp_path / "o")
    assert status == 0, err
    assert str(record.folder) in out and "device" in out and "finished" in out
    assert [line.split() for line in out.splitlines() if line.split()[:1] == ["lr"]] == [["lr", "0.05", "cli"]]
    assert "epochs" not in out  # a default is not worth a line
    assert record.state == "finished" and record.manifest["argv"][:2] == ["drivetrain", "run"]
    assert f"drivetrain report {shlex.quote(str(record.folder))}" in out


def test_run_json_holds_the_result(command_json, small, tmp_path):
    data = command_json("run", "--json", small, "--output-dir", tmp_path / "o", "--run-name", "a")
    assert data["state"] == "finished" and data["result"].keys() == {"loss"}
    assert data["run_folder"].endswith("/o/small/a") and "checkpoint-" in data["last_checkpoint"]


def test_a_failing_run_has_status_1_its_traceback_and_a_way_on(command, small, tmp_path):
    status, out, err = command("run", small, "--output-dir", tmp_path / "o", "--fail")
    assert status == 1
    assert "RuntimeError: it broke" in err and "run_experiment" not in err
    assert "failed" in out and f"drivetrain resume {shlex.quote(str(only_run(tmp_path / 'o').folder))}" in out


def test_bad_options_have_status_2_and_make_no_folder(command, small, tmp_path):
    status, _, err = command("run", small, "--output-dir", tmp_path / "o", "--epohcs", "3")
    assert status == 2 and "did you mean --epochs" in err and f"drivetrain run {shlex.quote(str(small))}" in err
    status, _, err = command("run", small, "--output-dir", tmp_path / "o", "--device", "cuda:99")
    assert status == 2 and "cuda" in err
    assert not (tmp_path / "o").exists()


def test_a_run_name_that_is_taken_is_refused(command, small, tmp_path):
    words = ("run", small, "--output-dir", tmp_path / "o", "--run-name", "a", "--epochs", "1")
    assert command(*words)[0] == 0
    status, _, err = command(*words)
    assert status == 2 and "already exists" in err


def test_the_experiments_own_help_and_values_are_reachable(command, small):
    status, out, _ = command("run", small, "--help")
    assert status == 0 and "--drifting" in out and "Usage: drivetrain run" in out
    status, out, _ = command("run", small, "--print-params", "--lr", "3")
    assert status == 0 and "cli" in out


def test_a_member_of_a_group_runs(command, program, tmp_path):
    status, out, err = command(
        "run", f"{program('SEVERAL')}:family", "member", "--y", "4", "--output-dir", tmp_path / "o"
    )
    assert status == 0, err
    assert "member runs with 4" in out


def test_resume_continues_in_the_same_folder_and_says_where(command, small, tmp_path):
    command("run", small, "--output-dir", tmp_path / "o", "--fail", "--epochs", "3")
    folder = only_run(tmp_path / "o").folder
    newest = sorted((folder / "checkpoints").glob("checkpoint-*"))[-1]
    damaged = folder / "checkpoints" / "checkpoint-ep9-ba99"
    damaged.mkdir()
    status, out, err = command("resume", folder)
    assert status == 1 and "it broke" in err  # the same parameters fail in the same way
    assert (
        "skipped      checkpoint-ep9-ba99" in out
        and f"checkpoint   {newest.name}" in out
        and "continues at epoch 1" in out
    )
    status, _, err = command("resume", folder, "--set", "fail=false")
    assert status == 2 and "other parameters" in err
    status, out, err = command("resume", folder, "--set", "fail=false", "--force")
    assert status == 0, err
    assert only_run(tmp_path / "o").state == "finished"
    status, _, err = command("resume", folder, "--set", "fial=false")
    assert status == 2 and "Did you mean 'fail'" in err


def test_resume_refuses_what_is_no_run(command, tmp_path):
    status, _, err = command("resume", tmp_path)
    assert status == 2 and "is not the folder of a run" in err


def test_sweep_prints_trials_best_first(command, small, tmp_path):
    status, out, err = command(
        "sweep", small, "lr=0.1,0.001", "epochs=1", f"output_dir={tmp_path / 'o'}", "--objective", "loss"
    )
    assert status == 0, err
    records = list(find_runs(tmp_path / "o"))
    assert sorted(record.parameters["lr"] for record in records) == [0.001, 0.1]
    assert "2 done" in out and "trial 1: finished" in out and "sweep folder" in out


def test_sweep_draws_from_ranges_and_speaks_json(command_json, small, tmp_path):
    words = ("lr=log(1e-3,1e-1)", "epochs=int(1,2)", f"output_dir={tmp_path / 'o'}")
    data = command_json("sweep", small, *words, "--trials", "2", "--objective", "loss", "--json")
    assert len(data["trials"]) == 2 and all(1e-3 <= trial["lr"] <= 1e-1 for trial in data["trials"])


def test_a_sweep_with_a_failing_trial_has_status_1_and_finishes_the_others(command, small, tmp_path):
    status, out, err = command("sweep", small, "fail=true,false", f"output_dir={tmp_path / 'o'}")
    assert status == 1 and "it broke" in err
    assert sorted(record.state for record in find_runs(tmp_path / "o")) == ["failed", "finished"]
    assert "failed" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["epochs=1"], "at least one parameter with several values"),
        (["lrr=1,2"], "Did you mean 'lr'"),
        (["lr=1,x"], "expected a number"),
        (["lr=log(a,b)"], "not numbers"),
        (["lr=1,2", "lr=3"], "given twice"),
    ],
)
def test_a_sweep_refuses_a_bad_space(command, small, words, message):
    status, _, err = command("sweep", small, *words)
    assert status == 2 and message in err


def command_in_new_process(*words, **environment):
    """Run the command as a user does."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    command = [sys.executable, "-m", "drivetrain", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)


@pytest.fixture
def launch_words(small, tmp_path):
    place = "ctx = dt.Context"
    breaks = f"if fail and dt.get_rank() == 1:\n        raise ValueError('rank one broke')\n    {place}"
    small.write_text(small.read_text().replace(place, breaks))
    return ("launch", "--nproc-per-node", "2", small, "--output-dir", tmp_path / "o", "--no-cuda", "--epochs", "1")


@pytest.mark.slow
def test_launch_names_the_rank_that_died_first_and_its_log(launch_words, tmp_path):
    done = command_in_new_process(*launch_words, "--fail", "--run-name", "broken")
    assert done.returncode == 1 and "processes   2" in done.stdout
    assert "rank one broke" in done.stderr
    assert f"rank 1 failed first; its log: {tmp_path / 'o' / 'small' / 'broken' / 'log.rank-1.txt'}" in done.stderr


@pytest.mark.slow
def test_launch_runs_on_two_processes(launch_words, tmp_path):
    done = command_in_new_process(*launch_words)
    assert done.returncode == 0, done.stderr
    record = only_run(tmp_path / "o")
    assert record.manifest["processes"] == 2 and record.state == "finished" and str(record.folder) in done.stdout


@pytest.mark.slow
def test_sigterm_ends_a_run_with_143_and_json_tells_so(small, tmp_path):
    text = small.read_text().replace(
        "ctx.recorder.step()", "ctx.recorder.step(); import os; ctx.recorder.count == 3 and os.kill(os.getpid(), 15)"
    )
    small.write_text(text)
    done = command_in_new_process("run", "--json", small, "--output-dir", tmp_path / "o")
    assert done.returncode == 143
    assert json.loads(done.stdout)["state"] == "interrupted"
    assert read_run(only_run(tmp_path / "o").folder).state == "interrupted"


def test_an_interrupted_sweep_prints_what_it_has_and_the_line_that_continues_it(
    command, command_json, program, tmp_path
):
    path, marker = program("STOPPABLE"), tmp_path / "go"
    words = ["x=1,2,3", f"marker={marker}", f"output_dir={tmp_path / 'o'}", "--objective", "accuracy"]
    status, out, _ = command("sweep", path, *words)
    (folder,) = (tmp_path / "o" / "stoppable" / "sweeps").iterdir()
    assert status == 130 and f"continue it with: {own_command()} resume {shlex.quote(str(folder))}" in out
    assert "interrupted" in out and "finished" in out and f"sweep folder  {folder}" in out
    status, out, _ = command("show", folder)
    assert status == 0 and "interrupted" in out and "drivetrain resume" in out
    marker.touch()
    found = command_json("resume", folder, "--json")
    assert found["direction"] == "max" and [trial["x"] for trial in found["trials"]] == [3.0, 2.0, 1.0]
    assert "drivetrain resume" not in command("show", folder)[1]


def test_a_sweep_with_a_secret_needs_it_again(command, program, tmp_path):
    path, marker = program("STOPPABLE"), tmp_path / "go"
    words = ["x=1,2", f"marker={marker}", f"output_dir={tmp_path / 'o'}", "api_key=hunter2hunter2"]
    assert command("sweep", path, *words)[0] == 130
    (folder,) = (tmp_path / "o" / "stoppable" / "sweeps").iterdir()
    marker.touch()
    status, _, err = command("resume", folder)
    assert status == 2 and "--set api_key=" in err
    assert command("resume", folder, "--set", "x=5")[0] == 2
    assert command("resume", folder, "--set", "api_key=hunter2hunter2")[0] == 0
    assert "hunter2" not in (folder / "sweep.jsonl").read_text()


def test_a_result_of_zero_is_printed(command, program, tmp_path):
    _, out, _ = command("run", program("QUICK"), "--output-dir", tmp_path / "o", "--x", "0.25")
    assert [line.split() for line in out.splitlines() if line.split()[:1] == ["result"]] == [["result", "0"]]


def test_the_command_of_a_program_whose_path_has_a_space_is_recorded_word_by_word(command, program, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = program("QUICK").rename(folder / f"program_{os.getpid()}.py")
    assert command("run", path, "--output-dir", folder, "--x", "0.5")[0] == 0
    words = ["drivetrain", "run", str(path), "--output-dir", str(folder), "--x", "0.5"]
    assert only_run(folder).manifest["argv"] == words
    status, _, err = command("run", path, "--y", "0.5")
    assert status == 2 and shlex.join(words[:3]) in err


def test_of_two_experiments_of_one_name_that_of_the_run_is_resumed(command, program, tmp_path):
    path = program("TWINS")
    status, _, err = command(
        "run", f"{path}:other", "train", "--output-dir", tmp_path / "o", "--run-name", "a", "--data", "x"
    )
    record = only_run(tmp_path / "o")
    assert status == 1 and record.manifest["argv"][:4] == ["drivetrain", "run", f"{path}:other", "train"], err
    status, out, _ = command("resume", record.folder)
    assert status == 1 and "the second one has x" in out and "the first one" not in out
