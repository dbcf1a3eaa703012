"""Sweeps in processes of their own, with GPUs of their own."""

import json
import os
from pathlib import Path

import pytest

from drivetrain.core.errors import ExperimentError, SweepError
from drivetrain.experiment import PoolExecutor, find_runs, param_matrix, run_parameter_sweep, sweep
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
    import multiprocessing.context

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def fail(self):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        raise OSError("no more processes")

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", fail)
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
