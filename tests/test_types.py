"""What type checkers and editors see of the public names, which load on first use."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.write_stubs import lazy_modules, stub_path, stub_text

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("module", lazy_modules())
def test_a_stub_says_what_the_lazy_exports_say(module):
    assert stub_path(module).read_text() == stub_text(module), "run `make stubs`"


@pytest.mark.parametrize("module", ["drivetrain", "drivetrain.algorithms", "drivetrain.functional", "drivetrain.optim"])
def test_a_star_import_brings_every_public_name(module):
    import torch

    names = {"torch": torch}
    exec(f"from {module} import *", names)
    assert set(sys.modules[module].__all__) <= set(names)
    assert names["torch"] is torch


@pytest.mark.slow  # without the cache of `make check` mypy reads torch first
def test_mypy_sees_the_public_classes_and_functions():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "tests/typed_script.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    revealed = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    trainer, same, auto, mixup, smooth, experiment, error, train, decorator = revealed
    assert trainer == same == "drivetrain.train.trainer.Trainer"
    assert "fallback=drivetrain.train.auto.AutoAccelerateResult]" in auto and smooth.endswith("-> torch._tensor.Tensor")
    assert mixup == "drivetrain.algorithms.mixup.MixUp"
    assert experiment.endswith("-> drivetrain.experiment.experiments.Experiment")
    assert error == "drivetrain.core.errors.DrivetrainError"
    assert train == "drivetrain.experiment.experiments.Experiment"
    assert decorator.endswith("-> drivetrain.experiment.experiments.Experiment")
