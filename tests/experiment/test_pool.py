"""Sweeps in processes of their own, with GPUs of their own."""

import io
import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError, ExperimentError, SweepError
from drivetrain.experiment import PoolExecutor, find_runs, param_matrix, read_sweep, run_parameter_sweep, sweep
from drivetrain.experiment.sweeps import pool
from drivetrain.experiment.sweeps.executors import visible_gpus
from tests.experiment import samples


def test_trials_never_share_a_gpu_and_a_failing_one_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    before = dict(os.environ)
    points = param_matrix(x=[1, 2, 3], seconds=0.3, output_dir=str(tmp_path), cuda=False)
    with pytest.raises(SweepError, match=r"trial 1 .*two is not a good number") as caught:
        run_parameter_sweep(samples.on_gpu, points, max_num_processes=4, num_gpus_per_process=1)
    assert dict(os.environ) == before
    result = caught.value.result
    assert [t.value for t in result] == [1.0, None, 3.0] and [t.index for t in result.failed] == [1]
    notes = [json.loads(Path(t.run_dir, "note.json").read_text()) for t in result if t.status == "finished"]
    assert {note["gpus"] for note in notes} <= {"3", "5"} and len(notes) == 2
    for one in notes:
        for other in notes:
            apart = one["ended"] <= other["began"] or other["ended"] <= one["began"]
            assert one is other or one["gpus"] != other["gpus"] or apart
    assert len(list(find_runs(tmp_path))) == 3


def test_on_windows_the_pool_names_the_executor_that_works(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ConfigError, match="executor='inline'"):
        PoolExecutor(2)


def test_more_gpus_than_there_are_is_a_value_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    with pytest.raises(ValueError, match="this process sees 2"):
        PoolExecutor(1, gpus_per_trial=3)
    assert PoolExecutor(8, gpus_per_trial=1).slots == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="this process sees 0"):
        PoolExecutor(1, gpus_per_trial=1)
    with pytest.raises(ValueError, match="num_processes"):
        PoolExecutor(0)


def test_a_start_that_fails_leaves_environment_and_gpus_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def fail(self, share):
        assert share.gpus == "3" and os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
        raise OSError("no more processes")

    monkeypatch.setattr(pool.ProcessStarter, "start", fail)
    executor = PoolExecutor(2, gpus_per_trial=1)
    with pytest.raises(OSError, match="no more processes"):
        sweep(samples.on_gpu, {"x": [1]}, executor=executor, params={"output_dir": str(tmp_path)})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5" and sorted(executor._free) == ["3", "5"]


def test_an_experiment_no_process_could_find_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="cannot be found by a new process"):
        run_parameter_sweep(samples.closure(), [{"output_dir": str(tmp_path)}])


@pytest.mark.slow
def test_a_killed_trial_is_failed_and_says_by_what(tmp_path):
    with pytest.raises(SweepError, match="killed by SIGKILL") as caught:
        run_parameter_sweep(samples.dies, [{"output_dir": str(tmp_path)}], retries=1)
    assert caught.value.result[0].attempts == 2


def test_trials_that_take_too_long_are_ended_and_recorded_and_stop_no_other(tmp_path):
    points = param_matrix(x=[1, 1], output_dir=str(tmp_path), cuda=False, pid_file=str(tmp_path / "pid"))
    with pytest.raises(SweepError, match=r"2 of 2 trials failed") as caught:
        sweep(samples.sleeps, points, executor="pool", num_processes=2, trial_timeout=0.05, retries=3)
    result = caught.value.result
    assert [trial.status for trial in result] == ["timed out", "timed out"] and result[0].is_over
    assert "trial_timeout=0.05sec" in result[0].error and result[0].attempts == 1
    assert [trial.status for trial in read_sweep(result.folder)] == ["timed out", "timed out"]
    again = sweep(samples.sleeps, points, executor="pool", resume=result.folder, on_failure="return")
    assert [trial.attempts for trial in again] == [1, 1]


@pytest.mark.slow
def test_a_trial_that_takes_too_long_ends_with_the_processes_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    points = param_matrix(x=[1, 2], output_dir=str(tmp_path), cuda=False, pid_file=str(pid_file))
    result = sweep(samples.sleeps, points, executor="pool", num_processes=2, trial_timeout="40s", on_failure="return")
    assert [trial.status for trial in result] == ["timed out", "finished"]
    assert result.best.value == 2.0 and result[0].seconds >= 40
    stat = Path(f"/proc/{pid_file.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("junk", [0, -1, "soon", "3ep", float("nan"), float("inf"), True, [1]])
def test_a_time_limit_that_is_none_is_rejected_by_name(junk):
    with pytest.raises(ConfigError, match="trial_timeout"):
        sweep(samples.sleeps, {"x": [1]}, executor="pool", trial_timeout=junk)


def test_trials_in_this_process_cannot_be_ended(tmp_path):
    with pytest.raises(ConfigError, match="executor='pool'"):
        sweep(samples.sleeps, {"x": [1]}, trial_timeout=5, params={"output_dir": str(tmp_path)})


def test_processes_start_loaded_print_behind_their_number_and_share_no_state(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SAMPLE_WORD", "given")
    pids = []
    starter = pool.ProcessStarter.__init__

    def remember(self, preload=()):
        starter(self, preload)
        pids.append(pool._servers[self._key]._forkserver_pid)

    monkeypatch.setattr(pool.ProcessStarter, "__init__", remember)
    points = param_matrix(x=[1, 2], output_dir=str(tmp_path), cuda=False)
    executor = PoolExecutor(2, preload=["wave"])
    result = sweep(samples.speaks, points, executor=executor)
    out, err = capfd.readouterr()
    assert sorted(line for line in out.splitlines() if "says" in line) == [
        "trial 0 | 1 says given",
        "trial 1 | 2 says given",
    ]
    assert "trial 1 | 2 warns\n" in err and "trial 0 | half a line\n" in out and "trial 0 | 100%\n" in out
    assert [trial.value for trial in result] == [1.0, 1.0]  # calls counted in each process
    for trial in result:
        assert Path(trial.run_dir, "loaded.txt").read_text() == "True"
    assert not Path(f"/proc/{pids[0]}").exists() and not pool._servers


@pytest.mark.slow
def test_without_a_server_every_trial_is_a_new_interpreter(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(pool, "CAN_PRELOAD", False)
    result = sweep(samples.speaks, [{"x": 5, "output_dir": str(tmp_path), "cuda": False}], executor="pool")
    assert result.best.value == 1.0 and "trial 0 | 5 says" in capfd.readouterr().out


@pytest.mark.parametrize("junk", ["torch", [1], (None,)])
def test_what_is_preloaded_is_a_list_of_names(junk):
    with pytest.raises(ConfigError, match="preload"):
        PoolExecutor(1, preload=junk)


@pytest.mark.slow
def test_a_preloaded_module_that_fails_costs_time_and_not_the_sweep(tmp_path, monkeypatch, caplog):
    (tmp_path / "explodes.py").write_text("raise RuntimeError('at import')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    points = param_matrix(x=[1, 2], output_dir=str(tmp_path), cuda=False)
    result = sweep(samples.speaks, points, executor=PoolExecutor(1, preload=["explodes"]))
    assert [trial.status for trial in result] == ["finished"] * 2 and not pool._servers
    assert sum("each trial now loads its own" in record.message for record in caplog.records) == 1


def test_lines_of_trials_survive_an_output_that_is_ascii_closed_or_missing(monkeypatch):
    for stream in (io.TextIOWrapper(io.BytesIO(), "ascii"), io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", stream)
        if isinstance(stream, io.StringIO):
            stream.close()
        source, sink = os.pipe()
        os.write(sink, "gr\u00fcn\nhalf".encode())
        os.close(sink)
        pool.PrefixedLines(7, "stdout").finish(Connection(source))
        if isinstance(stream, io.TextIOWrapper):
            assert stream.buffer.getvalue() == b"trial 7 | gr\\xfcn\ntrial 7 | half\n"
