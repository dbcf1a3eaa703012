"""What a sweep shows while it runs: a table on a terminal, lines elsewhere; and where the prints of trials go."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from drivetrain.experiment.cli.output import prints_to_stderr
from drivetrain.experiment.cli.sweep import draw, read_space, run_sweep, show_progress, state_of, values_of
from drivetrain.experiment.sweeps.result import SweepResult
from drivetrain.experiment.sweeps.trial import Trial
from tests.experiment.test_submitit_executor import slurm  # noqa: F401 (a fixture)


def trials(*states):
    return SweepResult(
        [
            Trial(k, {"lr": k / 10, "fixed": 1}, state, k / 2 if state == "finished" else None)
            for k, state in enumerate(states)
        ]
    )


def test_the_state_of_a_sweep_in_one_line():
    result = trials("finished", "running", "failed", "finished")
    assert state_of(result) == "1 running, 2 done, 1 failed, best 0 (trial 0)"


def test_the_state_has_the_total_and_the_time_left_and_a_running_trial_its_last_report():
    few = list(trials("finished", "running"))
    few[0].seconds, few[1].reported = 60.0, (12, 0.25)
    result = SweepResult(few, total=5, slots=2)
    assert state_of(result) == "1 running, 1 of 5 done, 0 failed, best 0 (trial 0), about 2 min 0 s left"
    assert values_of(few[1]) == "0.25 at 12" and values_of(Trial(3, {}, values={"a": 1.0, "b": 0.5})) == "a=1, b=0.5"


def test_the_time_left_moves_with_the_clock_and_uses_running_trials(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("drivetrain.experiment.sweeps.trial.time.monotonic", lambda: now[0])
    few = list(trials("finished", "asked", "asked"))
    few[0].seconds = 60.0
    for trial in few[1:]:
        trial.begin(Path("sweep"))
    result = SweepResult(few, total=4, slots=2)
    assert result.seconds_left == 90  # two that run, one that waits, in two slots
    now[0] += 20
    assert result.seconds_left == 70 and few[1].elapsed == 20
    now[0] += 80
    assert result.seconds_left == pytest.approx(260 / 3 / 2)  # both take longer than thought, and so will the last one
    few[1].settle("finished", None, 100.0, {})
    now[0] += 5
    assert few[1].elapsed == 100 and few[2].elapsed == 105
    last = SweepResult(few[:1] + few[2:], total=2, slots=8)
    now[0] -= 85
    assert last.seconds_left == 40  # free slots do not make a running trial quicker


def test_without_a_terminal_every_change_of_a_trial_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with show_progress() as show:
        show(trials("running"))
        show(trials("running"))
        show(trials("finished", "running"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("   ")[0] for line in lines] == [
        "trial 0: running",
        "trial 0: finished 0",
        "trial 1: running",
    ]


def test_prints_of_this_process_and_of_others_go_to_the_error_output(capfd):
    with prints_to_stderr():
        print("from here")
        os.write(1, b"from the descriptor\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    print("after")
    out, err = capfd.readouterr()
    assert out == "after\n"
    assert all(text in err for text in ("from here", "from the descriptor", "from a child"))


ON_A_TERMINAL = """
import os, sys, subprocess, time
from drivetrain.experiment.cli.sweep import show_progress
from tests.experiment.cli.test_live_table import trials
with show_progress() as show:
    print("before the table")
    show(trials("finished", "running", "failed"))
    subprocess.run(["echo", "a child prints"])
    print("an error line", file=sys.stderr)
    time.sleep(0.6)
print("the end")
"""


def run_on_a_terminal(code, **variables):
    """Run a program on a pseudo terminal and return everything it wrote there."""
    ours, its = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **variables}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=its, stdout=its, stderr=its, env=env, close_fds=True)
    os.close(its)
    pieces = []

    def read():
        try:
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        except OSError:  # how a pseudo terminal says that nobody is left
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert process.wait(240) == 0, b"".join(pieces).decode()
    reader.join(60)
    os.close(ours)
    return b"".join(pieces).decode()


def test_on_a_terminal_the_table_stands_and_everything_printed_comes_above_it():
    text = run_on_a_terminal(ON_A_TERMINAL)
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "before the table" in bare and "a child prints" in bare and "an error line" in bare
    assert "sweep: 1 running, 1 done, 1 failed, best 0 (trial 0)" in bare
    for cells in (("0", "lr=0", "finished", "0"), ("1", "lr=0.1", "running", "–"), ("2", "lr=0.2", "failed", "–")):
        pattern = r"\s+".join(map(re.escape, cells)) + r"\s+\d+\.\d s"
        assert re.search(pattern, bare), f"{cells} not in {bare!r}"
    assert bare.rstrip().endswith("the end")  # the descriptors are the terminal again


@pytest.mark.slow
def test_a_dumb_terminal_gets_lines():
    assert "trial 1: running" in run_on_a_terminal(ON_A_TERMINAL, TERM="dumb")


def test_many_trials_leave_room_and_running_ones_come_first():
    state, drawn, more = draw(trials(*["finished"] * 40, "running"), height=20).renderables
    assert "1 running, 40 done" in state.plain and more.plain == "… and 29 more"
    assert drawn.row_count == 12
    assert next(iter(drawn.columns[2].cells)).plain == "running"


@pytest.fixture
def quick(program):
    return program("QUICK")


@pytest.mark.slow
def test_a_sweep_by_optuna_in_a_pool_prints_pure_json(quick, tmp_path):
    pytest.importorskip("optuna")
    words = ["sweep", quick, "x=uniform(0,1)", f"output_dir={tmp_path / 'o'}", "cuda=false", "--sampler", "optuna"]
    words += ["--executor", "pool", "--processes", "2", "--trials", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *map(str, words)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [trial["status"] for trial in data["trials"]] == ["finished"] * 3
    assert all(trial["value"] == pytest.approx((trial["x"] - 0.25) ** 2) for trial in data["trials"])
    assert done.stderr.count("a trial speaks:") == 3


def sweep_through(executor, quick, tmp_path):
    words = ["sweep", quick, "x=0,1", f"output_dir={tmp_path / 'o'}", "cuda=false", "--executor", executor, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *map(str, words)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [trial["value"] for trial in json.loads(done.stdout)["trials"]]


@pytest.mark.slow
def test_a_sweep_through_submitit_prints_pure_json(quick, tmp_path, slurm):  # noqa: F811
    assert sweep_through("submitit", quick, tmp_path) == [0.0625, 0.5625]


@pytest.mark.slow
def test_a_sweep_through_ray_prints_pure_json(quick, tmp_path):
    pytest.importorskip("ray")
    assert sweep_through("ray", quick, tmp_path) == [0.0625, 0.5625]


@pytest.mark.slow
def test_launch_json_is_pure_although_workers_print(quick, tmp_path):
    words = ["launch", "--nproc-per-node", "2", "--json", quick, "--output-dir", tmp_path / "o", "--no-cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *map(str, words)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "finished" and done.stderr.count("a trial speaks:") == 2


def test_lists_on_the_command_line_are_written_in_brackets():
    from drivetrain.experiment import experiment

    @experiment
    def train(widths: list[int], names: list[str], pairs: list[list[int]]):
        pass

    space, fixed = read_space(train, ["widths=[1,2],[3]", "names=[a,b],[],c", "pairs=[1,2]"])
    assert space["widths"].values == ([1, 2], [3]) and space["names"].values == (["a", "b"], [], ["c"])
    assert fixed == {"pairs": [[1, 2]]}


def test_axes_on_the_command_line_may_have_conditions():
    from drivetrain.core.errors import ParameterError
    from drivetrain.experiment import experiment

    @experiment
    def train(kind: str = "sgd", momentum: float = 0.9, depth: int = 1):
        pass

    words = ["kind=sgd,adam", "momentum=uniform(0.5,0.9) if kind=sgd", "depth=3 if kind=sgd,adam and momentum=0.7"]
    space, fixed = read_space(train, words)
    assert repr(space["momentum"]) == "Uniform(low=0.5, high=0.9).when(kind='sgd')" and not fixed
    assert space["depth"].conditions == {"kind": ("sgd", "adam"), "momentum": (0.7,)}
    with pytest.raises(ParameterError, match="Did you mean 'kind'"):
        read_space(train, ["momentum=1,2 if knd=sgd"])
    with pytest.raises(ParameterError, match="'kind' is not understood"):
        read_space(train, ["momentum=1,2 if kind"])


def test_sigterm_ends_a_sweep_with_its_results_and_the_way_to_continue(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("drivetrain.experiment.cli.sweep.show_progress", lambda: nullcontext(None))
    result = SweepResult([], folder=tmp_path / "a sweep")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def start(on_change):
        on_change(result)
        signal.raise_signal(signal.SIGTERM)

    try:
        assert run_sweep(start, as_json=False) == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "resume '" + str(tmp_path / "a sweep") + "'" in capsys.readouterr().out
