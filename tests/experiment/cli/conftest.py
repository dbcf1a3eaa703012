"""What tests of the command share: a program on disk, and the command run in this process."""

import json
import sys
import uuid

import pytest

from drivetrain.__main__ import main
from drivetrain.runtime.seeds import capture_rng, restore_rng
from tests.experiment.cli import programs


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `drivetrain ...` here and return status, output and error output."""
    monkeypatch.setenv("COLUMNS", "200")
    before = capture_rng()

    def run(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as stop:  # argparse leaves this way
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    yield run
    restore_rng(before)


@pytest.fixture
def command_json(command):
    """Run `drivetrain ...` and return its JSON."""

    def run(*words):
        status, out, err = command(*words)
        assert status == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that writes a program and returns its path; modules loaded from there are forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = set(sys.modules)

    def write(name):
        # A new name each time: modules stay loaded while a process lives.
        path = tmp_path / f"program_{uuid.uuid4().hex[:8]}.py"
        path.write_text(getattr(programs, name))
        return path

    yield write
    for name in set(sys.modules) - loaded:
        if "program_" in name:
            del sys.modules[name]
