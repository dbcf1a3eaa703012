"""The example runs."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivetrain.runtime.seeds import capture_rng, restore_rng
from tests.checkpoint.victim import Forked

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("resume_after_kill", ROOT / "examples" / "resume_after_kill.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = capture_rng()
    yield module
    restore_rng(before)


def test_the_example_survives_kills(example, monkeypatch, capsys):
    """Its starts are forks here: a new interpreter takes longer to load torch than the example runs."""

    def start(command):
        folder, num_epochs = Path(command[2]), int(command[3])
        return Forked(lambda: (folder / "fingerprint").write_text(example.train(folder, num_epochs)))

    monkeypatch.setattr(example, "subprocess", SimpleNamespace(Popen=start))
    assert example.main(kills=3, num_epochs=12)
    told = (
        capsys.readouterr().out
    )  # a machine that becomes faster during the test may finish the run before the last kill
    assert re.match("killed [123] times", told) and "bit-identical" in told


@pytest.mark.slow
def test_the_example_survives_a_kill_of_a_real_command(example, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert example.main(kills=1, num_epochs=2)
