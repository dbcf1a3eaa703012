"""The demonstration: good, quick, kept, and continued after an interruption."""

import os
import signal
import subprocess

import pytest

from drivetrain.core.errors import MissingExtra
from drivetrain.experiment import demo
from drivetrain.experiment.records import find_runs
from drivetrain.runtime.seeds import capture_rng, restore_rng


@pytest.fixture(autouse=True)
def same_random_state():
    before = capture_rng()
    yield
    restore_rng(before)


def test_the_demo_is_accurate_and_leaves_a_run_with_a_report(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert demo.run_demo(epochs=6, output_dir=str(tmp_path)) == 0
    (record,) = find_runs(tmp_path)
    out = capsys.readouterr().out
    assert record.state == "finished" and record.result["accuracy"] > 0.97
    assert (record.folder / "report.html").is_file() and record.folder.name in out and "samples per second" in out
    commands = [line.strip() for line in out.split("Next:")[1].splitlines() if line.startswith("  ")]
    for command in commands:  # they work as they are printed
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.returncode == 0 and record.folder.name.split("_")[-1] in done.stdout, done.stderr
    assert len(commands) == 2
    assert "[INFO]" not in out and list((record.folder / "images").rglob("*.png"))


@pytest.mark.slow
def test_an_interrupted_demo_goes_on_where_it_was_and_a_finished_one_starts_anew(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    original = demo.epoch_line

    def interrupting(num_epochs):
        callback = original(num_epochs)
        show = callback.on_eval_epoch_end

        def show_and_interrupt(trainer, **kwargs):
            show(trainer, **kwargs)
            if trainer.run_history.current_epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

        callback.on_eval_epoch_end = show_and_interrupt
        return callback

    with monkeypatch.context() as patch:
        patch.setattr(demo, "epoch_line", interrupting)
        assert demo.run_demo(epochs=3, output_dir=str(tmp_path)) == 130
    (record,) = find_runs(tmp_path)
    assert record.state == "interrupted" and "resumes it" in capsys.readouterr().err
    demo.run_demo(epochs=3, output_dir=str(tmp_path))
    (record,) = find_runs(tmp_path)
    resumed = capsys.readouterr().out
    assert record.state == "finished" and "epoch  1 of 3" not in resumed and "epoch  3 of 3" in resumed
    assert len(record.result["losses"]) == 3
    demo.run_demo(epochs=3, output_dir=str(tmp_path))
    first, second = find_runs(tmp_path)
    assert first.result["losses"] == second.result["losses"]  # interrupted and continued, or not: the same run


def test_missing_data_is_said_before_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install scikit-learn"):
        demo.run_demo(epochs=1, output_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())
