"""Sweeps through submitit: on this machine, and through stand-ins for SLURM's commands."""

import os
import sys
import time
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError, MissingExtra
from drivetrain.experiment import SubmititConfig, SubmititExecutor, sweep
from drivetrain.experiment.sweeps.executors import TrialWork
from drivetrain.experiment.sweeps.trial import Trial
from tests.experiment import cluster_samples

SBATCH = """#!{python}
import os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
number = str(sum(name.endswith(".sh") for name in os.listdir(here)) + 1)
script, state = os.path.join(here, number + ".sh"), os.path.join(here, number + ".state")
open(script, "w").write(open(sys.argv[1]).read())
open(state, "w").write("RUNNING")
names = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
names |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
after = "import subprocess, sys; code = subprocess.call(['bash', sys.argv[1]]);"
after += "open(sys.argv[2], 'w').write('FAILED' if code else 'COMPLETED')"
subprocess.Popen([sys.executable, "-c", after, script, state], env=os.environ | names, start_new_session=True,
                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("Submitted batch job " + number)
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do if [[ "$1" == --unbuffered ]]; then shift; else shift 2; fi; done
exec "$@"
"""
SACCT = """#!/bin/bash
cd "$(dirname "$0")"
echo "JobID|State|NodeList"
for state in *.state; do echo "${state%.state}|$(cat $state)|here"; done
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put commands in the path that take jobs as SLURM's do, and run them at once on this machine."""
    pytest.importorskip("submitit")
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {"sbatch": SBATCH.replace("{python}", sys.executable), "srun": SRUN, "sacct": SACCT}
    for name, text in (commands | {"scancel": "#!/bin/bash\n"}).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield folder
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(path.read_text() == "RUNNING" for path in folder.glob("*.state")):
        time.sleep(0.1)


def run_eventful(tmp_path, executor, xs, **options):
    params = {"output_dir": str(tmp_path), "markers": str(tmp_path), "random_seed": 7, "cuda": False}
    options = {"executor": executor, "params": params, "objective": "value", "retries": 1} | options
    return sweep(cluster_samples.eventful, {"x": xs}, on_failure="return", **options)


def test_settings_are_checked_when_they_are_given():
    with pytest.raises(ValueError, match="Did you mean 'slurm'"):
        SubmititConfig(cluster="slrum")
    with pytest.raises(ConfigError, match="num_processes=0.: expected a whole number of at least 1"):
        SubmititConfig(num_processes=0)
    with pytest.raises(ConfigError, match="gpus_per_trial=True"):
        SubmititConfig(gpus_per_trial=True)
    with pytest.raises(ConfigError, match=r"gpus_per_trial: 1 has no effect.*executor='pool'"):
        SubmititConfig(cluster="local", gpus_per_trial=1)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingExtra, match="pip install submitit"):
        SubmititExecutor(SubmititConfig(cluster="local"))


def test_without_slurm_nothing_begins(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="found no SLURM"):
        run_eventful(tmp_path, "submitit", [0])
    assert not list(tmp_path.glob("**/sweep.jsonl"))


def test_a_setting_that_submitit_does_not_know_is_refused(slurm):
    with pytest.raises(ConfigError, match="acount"):
        SubmititExecutor(SubmititConfig(slurm={"acount": "me"}))


@pytest.mark.slow
def test_local_jobs_give_what_the_inline_executor_gives(tmp_path):
    """One ends well, one is killed and retried, one fails, one is stopped, saves, and goes on without costing a retry."""
    pytest.importorskip("submitit")
    executor = SubmititExecutor(SubmititConfig(cluster="local", num_processes=2, timeout_minutes=5))
    afar = run_eventful(tmp_path, executor, [0, 1, 2, 3])
    here = run_eventful(tmp_path, "inline", [0, 1, 2, 3])
    assert [(t.status, t.value, t.error, t.metrics) for t in afar] == [
        (t.status, t.value, t.error, t.metrics) for t in here
    ]
    assert [t.status for t in afar] == ["finished", "finished", "failed", "finished"]
    assert [t.attempts for t in afar] == [1, 2, 2, 1]


@pytest.mark.slow
def test_closing_ends_the_jobs_that_run(tmp_path):
    pytest.importorskip("submitit")
    executor = SubmititExecutor(SubmititConfig(cluster="local", timeout_minutes=5))
    trial = Trial(0, {}, run_dir=tmp_path / "sweep" / "trial-0", attempts=1)
    executor.start(TrialWork(cluster_samples.waits, {"output_dir": str(tmp_path)}, "sweep", None))
    try:
        executor.submit(trial)
        pid = wait_for_pid(trial)
    finally:
        executor.close()
    assert not is_alive(pid)


@pytest.mark.slow
def test_slurm_is_asked_for_what_the_settings_say(tmp_path, slurm):
    result = run_eventful(tmp_path, "submitit", [0, 2, 3], num_processes=2, gpus_per_trial=2, retries=0)
    assert [t.status for t in result] == ["finished", "failed", "finished"] and result[0].value < 1
    assert result[1].error == "ValueError: two is not a good number"
    scripts = [path.read_text() for path in slurm.glob("*.sh")]
    assert len(scripts) == 4 and all("#SBATCH --gpus-per-node=2\n" in text for text in scripts)


@pytest.mark.slow
def test_a_job_that_outlived_its_sweep_is_found_again(tmp_path, slurm):
    trial = Trial(4, {"x": 4}, run_dir=tmp_path / "sweep" / "trial-4", attempts=1)
    params = {"output_dir": str(tmp_path), "until": str(tmp_path / "go")}
    work = TrialWork(cluster_samples.waits, params, "sweep", None)
    config = SubmititConfig(partition="day", warning_seconds=30, cpus_per_trial=3, slurm={"gres": "gpu:a100:1"})
    first, second = SubmititExecutor(config), SubmititExecutor(config)
    try:
        first.start(work)
        first.submit(trial)
        wait_for_pid(trial)
        second.start(work)
        future = second.submit(trial)
        (tmp_path / "go").touch()
        assert future.result(timeout=60).result == 4
    finally:
        (tmp_path / "go").touch()
        first.close()
        second.close()
    (script,) = slurm.glob("*.sh")
    for setting in ("partition=day", "signal=USR2@30", "cpus-per-task=3", "gres=gpu:a100:1", "time=60"):
        assert f"#SBATCH --{setting}\n" in script.read_text()


def wait_for_pid(trial: Trial) -> int:
    path, deadline = Path(trial.run_dir, "pid"), time.monotonic() + 60
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_bytes() != b""
