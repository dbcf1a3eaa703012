"""One adapter for two trackers: against a stand-in with the parts of both that are used, and against the real W&B, offline."""

import json
import struct
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drivetrain.record import Recorder, WandbSink


class Run:
    """What W&B and trackio have in common."""

    def __init__(self, settings):
        self.settings, self.logged, self.config, self.is_finished = settings, [], Config(), False
        self.name = settings.get("name")

    def log(self, values, **step):
        assert not self.is_finished
        self.logged.append((values, step))

    def finish(self):
        self.is_finished = True


class Config(dict):
    def update(self, values, **options):
        super().update(values)


class WandbRun(Run):
    """A run with an id, a summary and axes."""

    def __init__(self, settings):
        super().__init__(settings)
        self.id, self.summary, self.axes = settings.get("id", "abc"), {}, []

    def define_metric(self, name, **options):
        self.axes.append((name, options))


def stand_in(monkeypatch, package, run_class):
    """Put a module of a tracker's name in its place and return the runs it starts."""
    runs, module = [], ModuleType(package)

    def init(**settings):
        runs.append(run_class(settings))
        return runs[-1]

    module.init = init
    module.Image = lambda image: SimpleNamespace(size=image.size)
    module.Histogram = lambda np_histogram: SimpleNamespace(
        counts=np_histogram[0].tolist(), edges=np_histogram[1].tolist()
    )
    module.__spec__ = SimpleNamespace(name=package)
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.delenv(f"{package.upper()}_PROJECT", raising=False)
    return runs


def record(recorder):
    recorder.params({"lr": 0.1})
    recorder.scalars({"loss": torch.tensor(0.5), "acc": 1})
    recorder.step()
    recorder.image("sample", torch.zeros(2, 5))
    recorder.histogram("weights", torch.tensor([0.0, 1.0]), bins=2)
    recorder.text("note", "x")
    recorder.summary({"best": 2})


def test_wandb_gets_rows_on_our_own_axis(monkeypatch, tmp_path):
    pytest.importorskip("PIL.Image")
    runs = stand_in(monkeypatch, "wandb", WandbRun)
    with Recorder(tmp_path / "run", tensorboard=False, sinks=("wandb",)) as recorder:
        record(recorder)
        state = recorder.state_dict()
    (run,) = runs
    assert run.settings == {
        "project": "drivetrain",
        "name": "run",
        "dir": str(tmp_path / "run"),
        "reinit": "create_new",
    }
    assert run.axes == [("step", {"hidden": True}), ("*", {"step_metric": "step"})]
    (scalars, _), (image, _), (histogram, _), (text, _) = run.logged
    assert scalars == {"step": 0, "loss": 0.5, "acc": 1} and text == {"step": 1, "note": "x"}
    assert image["sample"].size == (5, 2) and histogram["weights"].counts == [1, 1]
    assert (run.config, run.summary, run.is_finished) == ({"lr": 0.1}, {"best": 2}, True)
    assert state["runs"] == {"wandb": "abc"}


def test_a_resume_continues_the_run_of_the_tracker(monkeypatch, tmp_path):
    for package, run_class, name in (("wandb", WandbRun, "id"), ("trackio", Run, "name")):
        runs = stand_in(monkeypatch, package, run_class)
        with Recorder(tmp_path / package, tensorboard=False, sinks=(package,)) as first:
            first.scalar("loss", 1)
            state = first.state_dict()
        with Recorder(tmp_path / package, tensorboard=False, sinks=(package,)) as second:
            second.load_state_dict(state)
            second.scalar("loss", 2)
        assert runs[1].settings[name] == state["runs"][package] and runs[1].settings["resume"] == "allow"
        assert "resume" not in runs[0].settings


def test_trackio_gets_rows_with_their_step(monkeypatch, tmp_path):
    pytest.importorskip("PIL.Image")
    runs = stand_in(monkeypatch, "trackio", Run)
    monkeypatch.setenv("TRACKIO_PROJECT", "digits")
    with Recorder(tmp_path / "run", tensorboard=False, sinks=(WandbSink("trackio", name="mine"),)) as recorder:
        record(recorder)
    (run,) = runs
    assert run.settings == {"project": "digits", "name": "mine"}
    assert run.logged[0] == ({"loss": 0.5, "acc": 1}, {"step": 0}) and run.logged[-1] == ({"best": 2}, {"step": 1})


def test_only_these_two_trackers_are_known():
    with pytest.raises(ValueError, match="Did you mean 'wandb'"):
        WandbSink("wandbb")


def journal(path):
    """Return the records of a W&B file: blocks of 32 KiB with records that have a checksum, a length and a kind."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@pytest.mark.slow
def test_the_real_wandb_writes_and_continues_offline(tmp_path):
    pytest.importorskip("wandb")
    code = """
import sys, torch
from drivetrain.record import Recorder
first = Recorder(sys.argv[1], tensorboard=False, sinks=("wandb",))
first.params({"lr": 0.1})
for value in (0.5, 0.25):
    first.scalar("loss", value)
    first.step()
first.image("sample", torch.zeros(2, 5))
first.histogram("weights", torch.arange(4.0), bins=2)
state = first.state_dict()
first.close()
with Recorder(sys.argv[1], tensorboard=False, sinks=("wandb",)) as second:
    second.load_state_dict(state)
    second.scalar("loss", 0.125)
"""
    import os

    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name  # one run in two parts
    rows, config = [], {}
    for file in files:
        for entry in journal(file):
            rows += (
                [{tuple(item.nested_key): json.loads(item.value_json) for item in entry.history.item}]
                if entry.history.item
                else []
            )
            config |= {item.key: item.value_json for item in entry.config.update}
    losses = [(row[("step",)], row[("loss",)]) for row in rows if ("loss",) in row]
    assert losses == [(0, 0.5), (1, 0.25), (2, 0.125)] and config["lr"] == "0.1"
    assert any(row.get(("weights", "values")) == [2, 2] for row in rows)
    assert any(row.get(("sample", "width")) == 5 for row in rows)
