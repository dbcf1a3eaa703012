"""Trials that are followed through files alone."""

import runpy
import sys
import threading
from contextlib import suppress

import pytest

from drivetrain.experiment import InlineExecutor
from drivetrain.experiment.sweeps.executors import TrialWork, never_prune
from drivetrain.experiment.sweeps.jobs import SCRIPT, JobWatch, Mailbox, importable_reference, make_job
from drivetrain.experiment.sweeps.trial import Trial
from tests.experiment import cluster_samples


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """Jobs run in this process here, and change what a process of their own would."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    return {"output_dir": str(tmp_path), "random_seed": 7, "cuda": False}


def run_as_job(experiment, params, trial, should_prune=lambda trial, value, step: False, environment=None):
    work, over = TrialWork(experiment, params, "sweep", should_prune), threading.Event()
    watch = JobWatch(work)
    try:
        future = watch.follow(trial, lambda: "the job vanished" if over.is_set() else None)
        with suppress(Exception):  # the run folder tells
            make_job(work, importable_reference(experiment), trial, environment)()
        over.set()
        return future.result(timeout=200)
    finally:
        watch.close()


def test_a_job_has_the_outcome_of_the_inline_executor(tmp_path, sandbox):
    params = sandbox | {"markers": str(tmp_path)}
    for x in (0, 2):
        trial = Trial(x, {"x": x}, run_dir=tmp_path / "sweep" / f"trial-{x}", attempts=1)
        afar = run_as_job(cluster_samples.eventful, params, trial, environment={"CUDA_VISIBLE_DEVICES": None})
        inline = InlineExecutor()
        inline.start(TrialWork(cluster_samples.eventful, params, "sweep", lambda trial, value, step: False))
        trial.run_dir = tmp_path / "inline" / f"trial-{x}"
        here = inline.submit(trial).result()
        assert (afar.status, afar.error, afar.result) == (here.status, here.error, here.result)
        assert x == 2 or afar.result["visible"] == "None"


def test_a_report_reaches_the_sampler_and_ends_a_hopeless_trial(tmp_path, sandbox):
    seen = []
    trial = Trial(0, {}, run_dir=tmp_path / "sweep" / "trial-0", attempts=1)

    def should_prune(trial, value, step):
        seen.append((trial.index, value, step))
        return True

    assert run_as_job(cluster_samples.hopeless, sandbox, trial, should_prune).status == "pruned"
    assert seen[:2] == [(0, 1.0, 0), (0, 1.0, 1)] and len(seen) < 2000


def test_a_job_that_leaves_no_word_failed_as_the_cluster_says(tmp_path):
    trial = Trial(0, {}, run_dir=tmp_path / "trial-0", attempts=1)
    watch = JobWatch(TrialWork(None, {}, "sweep", lambda trial, value, step: False))
    outcome = watch.follow(trial, lambda: "NODE_FAIL").result(timeout=200)
    watch.close()
    assert (outcome.status, outcome.error) == ("failed", "NODE_FAIL")


def test_half_a_line_waits_for_its_other_half(tmp_path):
    box = Mailbox(tmp_path / "reports", tmp_path / "stop")
    assert box.read(0) == ([], 0)
    box.say(value=float("inf"), step=1)
    whole = box.reports.read_bytes()
    box.reports.write_bytes(whole + b'{"value": 2')
    letters, position = box.read(0)
    assert letters == [{"value": float("inf"), "step": 1}] and position == len(whole)
    with box.reports.open("ab") as stream:
        stream.write(b', "step": 2}\n')
    assert box.read(position)[0] == [{"value": 2, "step": 2}]


def test_an_experiment_of_a_script_is_found_by_its_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from drivetrain.experiment import experiment\n@experiment\ndef train():\n    pass\n"
        "from drivetrain.experiment.sweeps.jobs import importable_reference\n"
        "if __name__ == '__main__':\n    found = importable_reference(train)\n"
    )
    reference = runpy.run_path(str(script), run_name="__main__")["found"]
    assert (reference.module, reference.file, reference.attribute) == (SCRIPT, str(script), "train")
    assert reference.load().name == "train"
    sys.modules.pop(SCRIPT)


def test_a_job_that_runs_too_long_is_cancelled_and_timed_out(tmp_path, sandbox):
    trial, cancelled = Trial(0, {}, run_dir=tmp_path / "sweep" / "trial-0", attempts=1), []
    watch = JobWatch(TrialWork(cluster_samples.hopeless, sandbox, "sweep", never_prune, timeout=0.3))
    try:
        future = watch.follow(trial, lambda: None, lambda: cancelled.append(True))
        Mailbox.of(trial).clear()
        assert not future.done()  # it waits in the queue, which is not counted
        Mailbox.of(trial).say(began=True)
        outcome = future.result(timeout=200)
    finally:
        watch.close()
    assert outcome.status == "timed out" and outcome.seconds > 0.3 and cancelled
