"""Sweeps through a Ray of this machine."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError, MissingExtra
from drivetrain.experiment import RayConfig, RayExecutor, sweep
from drivetrain.experiment.sweeps.executors import TrialWork
from drivetrain.experiment.sweeps.trial import Trial
from tests.experiment import cluster_samples, samples
from tests.experiment.test_submitit_executor import is_alive, run_eventful, wait_for_pid


@pytest.fixture
def ray_is_over(monkeypatch):
    """Leave no Ray behind, and count the dummy GPUs 3 and 5 as this machine's."""
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    yield ray
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


def test_settings_are_checked_when_they_are_given():
    with pytest.raises(ConfigError, match="gpus_per_trial=0.: expected a whole number of at least 1"):
        RayConfig(gpus_per_trial=0)
    with pytest.raises(ConfigError, match="cpus_per_trial=nan"):
        RayConfig(cpus_per_trial=float("nan"))
    with pytest.raises(ConfigError, match="Remove one of them"):
        RayConfig(address="auto", num_cpus=2)
    needs = RayConfig(gpus_per_trial=2, resources={"big": 0.5}).needs
    assert needs == {"CPU": 1.0, "GPU": 2.0, "big": 0.5}


def test_without_the_package_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="pip install ray"):
        run_eventful(tmp_path, "ray", [0])


@pytest.mark.slow
def test_tasks_give_what_the_inline_executor_gives(tmp_path, ray_is_over):
    """One ends well, one is killed and retried, one fails; the Ray that the sweep started ends with it."""
    handler = signal.getsignal(signal.SIGTERM)
    afar = run_eventful(tmp_path, RayExecutor(RayConfig(num_cpus=2)), [0, 1, 2])
    assert not ray_is_over.is_initialized() and signal.getsignal(signal.SIGTERM) is handler
    here = run_eventful(tmp_path, "inline", [0, 1, 2])
    assert [(t.status, t.value, t.error, t.metrics) for t in afar] == [
        (t.status, t.value, t.error, t.metrics) for t in here
    ]
    assert [t.status for t in afar] == ["finished", "finished", "failed"] and [t.attempts for t in afar] == [1, 2, 2]


@pytest.mark.slow
def test_gpus_are_never_shared_and_a_ray_that_was_there_stays(tmp_path, ray_is_over):
    ray_is_over.init(num_cpus=2, num_gpus=2, include_dashboard=False, logging_level="warning")
    params = {"output_dir": str(tmp_path), "seconds": 0.3, "cuda": False}
    result = sweep(samples.on_gpu, {"x": [0, 1, 3]}, executor="ray", gpus_per_trial=1, params=params)
    assert [t.value for t in result] == [0.0, 1.0, 3.0] and ray_is_over.is_initialized()
    notes = [json.loads(Path(t.run_dir, "note.json").read_text()) for t in result]
    assert {note["gpus"] for note in notes} == {"3", "5"}
    for one in notes:
        for other in notes:
            apart = one["ended"] <= other["began"] or other["ended"] <= one["began"]
            assert one is other or one["gpus"] != other["gpus"] or apart
    with pytest.raises(ValueError, match=r"a trial needs .*'GPU': 3.0.* no Ray node has that much"):
        sweep(samples.on_gpu, {"x": [0]}, executor="ray", gpus_per_trial=3, params=params)

    executor = RayExecutor(RayConfig(cpus_per_trial=0.5))
    trial = Trial(0, {}, run_dir=tmp_path / "sweep" / "trial-0", attempts=1)
    executor.start(TrialWork(cluster_samples.waits, {"output_dir": str(tmp_path), "cuda": False}, "sweep", None))
    try:
        assert executor.slots == 4
        executor.submit(trial)
        pid = wait_for_pid(trial)
    finally:
        executor.close()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid)
