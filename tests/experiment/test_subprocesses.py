"""Processes that a run starts, and processes that run an experiment."""

import multiprocessing
import subprocess
import sys
import time

import pytest

from drivetrain.core.errors import ExperimentError, ParameterError
from drivetrain.experiment import experiment, find_runs, launch_subprocess
from drivetrain.experiment.processes import end_subprocesses, reference_to, start_process
from drivetrain.runtime import current_run
from tests.experiment import samples


def test_subprocesses_share_the_folder_finish_their_work_and_leave_others_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.experiment.processes.WAIT_SECONDS", 240)  # a busy machine starts them late
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    foreign_child = (
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        if sys.platform == "linux"
        else None
    )
    try:
        if foreign_child is not None:
            foreign_child.start()
        samples.with_subprocesses.run(output_dir=str(tmp_path), random_seed=5, seconds=0.5)
        (record,) = find_runs(tmp_path)
        written = {path.name: int(path.read_text()) for path in record.folder.glob("rank-*.txt")}
        assert set(written) == {"rank-0.txt", "rank-1.txt", "rank-2.txt"} and len(set(written.values())) == 3
        assert (record.folder / "log.rank-1.txt").is_file() and record.state == "finished"
        assert foreign.poll() is None and (foreign_child is None or foreign_child.is_alive())
    finally:
        foreign.kill()
        foreign.wait()
        if foreign_child is not None:
            foreign_child.kill()
            foreign_child.join()


def test_subprocesses_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr("drivetrain.experiment.processes.WAIT_SECONDS", 0.1)
    process = start_process(time.sleep, 3600)
    monkeypatch.setattr("drivetrain.experiment.processes._started", [process])
    end_subprocesses()
    assert not process.is_alive()


def test_launching_outside_a_run_is_refused():
    with pytest.raises(ExperimentError, match="inside a running experiment"):
        launch_subprocess()


def test_a_subprocess_launches_no_further_ones(tmp_path):
    @experiment
    def inner():
        current_run().params["subprocess"] = "parameters.yaml"
        try:
            with pytest.raises(AssertionError, match="cannot launch further"):
                launch_subprocess()
        finally:
            current_run().params["subprocess"] = None

    inner.run(output_dir=str(tmp_path))


def test_a_new_process_finds_the_experiment_by_module(tmp_path):
    process = samples.describe.run_in_new_process({"output_dir": str(tmp_path), "tag": "elsewhere"})
    process.join()
    (record,) = find_runs(tmp_path)
    assert process.exitcode == 0 and record.result["tag"] == "elsewhere"


def test_what_a_new_process_could_not_find_is_refused_before_it_starts():
    inside = samples.closure()
    with pytest.raises(ExperimentError, match="not an attribute of its module"):
        inside.run_in_new_process({})
    with pytest.raises(ParameterError, match="unknown parameter 'tga'"):
        samples.describe.run_in_new_process({"tga": 1})


def test_a_module_loaded_from_a_file_is_found_by_its_path(tmp_path, monkeypatch):
    from drivetrain.experiment.processes import load_file

    file = tmp_path / "script.py"
    file.write_text(
        "from drivetrain.experiment import experiment\n\n@experiment\ndef square(x: int = 2):\n    return x * x\n"
    )
    module = load_file(str(file), "a_module_of_this_test")
    found = reference_to(module.square)
    assert found.file == str(file) and found.attribute == "square"
    monkeypatch.delitem(sys.modules, "a_module_of_this_test")
    again = found.load()
    assert again is not module.square and again.name == "square"
    monkeypatch.delitem(sys.modules, "a_module_of_this_test")


def test_an_experiment_of_a_notebook_is_refused(monkeypatch):
    import __main__

    @experiment
    def cell():
        pass

    cell.main_function.__module__ = "__main__"
    monkeypatch.setattr(__main__, "cell", cell, raising=False)
    monkeypatch.delattr(__main__, "__file__", raising=False)
    with pytest.raises(ExperimentError, match="notebook"):
        cell.run_in_new_process({})


def test_a_program_without_a_main_guard_does_not_start_again_in_its_subprocess(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from drivetrain.experiment import experiment, launch_subprocess\n\n"
        "@experiment\ndef fit():\n    process = launch_subprocess()\n    process.join()\n    return process.exitcode\n\n"
        "assert fit.cli() == 1\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "while it is imported" in done.stderr, done.stderr
    assert len(list((tmp_path / "output" / "fit").iterdir())) == 1
