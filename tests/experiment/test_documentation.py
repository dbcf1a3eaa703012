"""The examples run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.experiment import find_runs

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_digits_experiment_learns_is_stopped_and_goes_on(tmp_path, capsys):
    pytest.importorskip("sklearn")
    example = load("experiment_digits")
    options = {"output_dir": str(tmp_path), "random_seed": 1, "resume": "auto"}
    first = example.main(epochs=1, **options)
    longer = example.main(epochs=3, **options)
    whole = example.main(epochs=3, output_dir=str(tmp_path / "whole"), random_seed=1)
    assert longer == whole < first
    assert f"loss after 3 epochs: {whole:.4f}; the run is in {tmp_path / 'whole'}" in capsys.readouterr().out
    (record,) = find_runs(tmp_path / "digits")
    assert record.metrics_path.is_file() and record.status["step"] == 3 * 29


def test_the_sweep_finds_a_middle_learning_rate(tmp_path, capsys):
    result = load("sweep_learning_rate").main(output_dir=str(tmp_path), steps=60)
    assert len(result) == 8 and result.best.params["lr"] in (1e-2, 1e-1) and "best: " in capsys.readouterr().out
    assert (result.folder / "trials.csv").is_file()


@pytest.mark.slow
def test_the_examples_run_as_programs(tmp_path):
    for line in (
        [
            "experiment_digits.py",
            "--epochs",
            "1",
            "--output-dir",
            str(tmp_path),
            "--distributed",
            "--nproc-per-node",
            "2",
            "--no-cuda",
        ],
        ["sweep_learning_rate.py", "--processes", "2", "--trials", "2", "--output-dir", str(tmp_path)],
    ):
        done = subprocess.run(
            [sys.executable, *line], cwd=ROOT / "examples", capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
