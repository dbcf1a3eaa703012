"""The Recorder as a program uses it."""

import gc
import math
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from drivetrain.context.context import Context
from drivetrain.core.errors import ConfigError, ExperimentError, MissingExtra, StateError
from drivetrain.core.plugin import Logger
from drivetrain.record import Picture, Recorder, read_metrics
from drivetrain.record.images import encode_png
from drivetrain.runtime.run import Run, set_current_run


@pytest.fixture
def recorder(tmp_path):
    with Recorder(tmp_path / "run", tensorboard=False, flush_every="1h") as recorder:
        yield recorder


@pytest.fixture
def run(tmp_path):
    run = Run(folder=tmp_path / "run", seed=1, name="test")
    set_current_run(run)
    yield run
    set_current_run(None)


def scalars(folder):
    return [(row["step"], row["tag"], row["value"]) for row in read_metrics(folder, kind="scalar")]


class Keeper:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.told = []

    def open(self, folder, resume):
        self.told.append(("open", resume))

    def scalar(self, tag, value, step, time):
        self.told.append((tag, value, step))

    def params(self, values, step, time):
        self.told.append(("params", values))

    def close(self):
        self.told.append("close")


# ---------------------------------------------------------------------- recording


def test_rows_have_the_step_of_their_call(recorder):
    for value in (1.0, 2.0):
        recorder.scalar("loss", value)
        recorder.step()
    recorder.count = 10
    recorder.scalars({"acc": 3, "loss": np.float32(0.5)})
    recorder.flush()
    assert scalars(recorder.output_dir) == [(0, "loss", 1.0), (1, "loss", 2.0), (10, "acc", 3), (10, "loss", 0.5)]
    assert recorder.count == 10


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1),
        (2**70, 2**70),
        (torch.tensor(3), 3),
        (torch.tensor([[0.5]]), 0.5),
        (torch.tensor(True), 1),
        (np.int64(4), 4),
        (np.array([1.5]), 1.5),
        (torch.tensor(2.0, requires_grad=True) * 2, 4.0),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (math.inf, math.inf),
    ],
)
def test_every_kind_of_number_is_recorded(recorder, value, expected):
    recorder.scalar("x", value)
    assert recorder.last("x") == expected and type(recorder.last("x")) is type(expected)
    recorder.flush()
    assert read_metrics(recorder.output_dir)[0]["value"] == expected


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.empty(0), np.ones(3), "1", None, [1.0], 1j, torch.tensor(1j), np.array("x")]
)
def test_what_is_not_one_number_is_refused_at_the_call(recorder, value):
    with pytest.raises(ValueError, match=r"scalar\('loss'\) was given"):
        recorder.scalar("loss", value)
    recorder.flush()
    assert not (recorder.output_dir / "metrics.jsonl").exists()


def test_later_changes_of_a_value_do_not_reach_the_record(recorder):
    value, pixels, params = torch.tensor(1.0), torch.zeros(2, 2), {"sizes": [1, 2]}
    array = np.zeros((2, 2), np.uint8)
    recorder.scalar("x", value)
    recorder.image("tensor", pixels)
    recorder.image("array", array)
    recorder.params(params)
    value.fill_(5.0), pixels.fill_(1.0), params["sizes"].append(3), array.fill(255)
    recorder.flush()
    assert recorder.last("x") == 1.0
    assert read_metrics(recorder.output_dir, kind="params")[0]["value"] == {"sizes": [1, 2]}
    for name in ("tensor", "array"):
        assert (recorder.output_dir / f"images/{name}/0.png").read_bytes() == encode_png(np.zeros((2, 2), np.uint8))


def test_pil_grey_and_float_images_and_figures_are_written(recorder):
    Image, figure = pytest.importorskip("PIL.Image"), pytest.importorskip("matplotlib.figure").Figure()
    recorder.image("pil", Image.new("RGB", (3, 2), "red"))
    recorder.image("grey", torch.zeros(4, 5, dtype=torch.uint8))
    recorder.image("float", torch.rand(3, 4, 5))
    recorder.figure("plots/loss", figure)
    figure.clear()
    recorder.flush()
    paths = [row["value"] for row in read_metrics(recorder.output_dir)]
    assert paths == ["images/pil/0.png", "images/grey/0.png", "images/float/0.png", "figures/plots.loss/0.png"]
    sizes = [Picture(png=(recorder.output_dir / path).read_bytes()).size for path in paths]
    assert sizes[:3] == [(3, 2), (5, 4), (5, 4)]
    with pytest.raises(ValueError, match="matplotlib Figure"):
        recorder.figure("x", torch.zeros(2, 2))


def test_histograms_texts_params_and_summaries_are_rows(recorder, tmp_path):
    recorder.histogram("weights", [1, 2, 2, 3], bins=2)
    recorder.text("note", "line\nbreak")
    recorder.params({"lr": 0.1, "path": tmp_path, "nested": {"x": (1, None)}, "bad": math.nan})
    recorder.summary({"best": torch.tensor(0.5)})
    recorder.flush()
    values = {row["kind"]: row["value"] for row in read_metrics(recorder.output_dir)}
    assert values["histogram"] == {"low": 1.0, "high": 3.0, "counts": [1, 3], "nonfinite": 0}
    assert values["text"] == "line\nbreak" and values["summary"] == {"best": 0.5}
    assert values["params"] == {"lr": 0.1, "path": str(tmp_path), "nested": {"x": [1, None]}, "bad": "nan"}
    for wrong in (lambda: recorder.text("a", 3), lambda: recorder.params([1]), lambda: recorder.summary(None)):
        with pytest.raises(ValueError, match="expected a"):
            wrong()


def test_last_names_the_nearest_tag(recorder):
    recorder.scalar("train/loss", 1.0)
    with pytest.raises(ValueError, match=r"Did you mean 'train/loss'"):
        recorder.last("train/los")


def test_rows_are_written_when_their_time_has_come(tmp_path):
    with Recorder(tmp_path, tensorboard=False, flush_every=0.0) as recorder:
        recorder.scalar("x", 1.0)
        assert scalars(tmp_path) == [(0, "x", 1.0)]
    with Recorder(tmp_path / "b", tensorboard=False, flush_every="1h") as recorder:
        recorder.scalar("x", 1.0)
        recorder.step()
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"flush_every": "5ep"},
        {"flush_every": -1},
        {"flush_every": None},
        {"sinks": "wandb"},
        {"sinks": ("wandbb",)},
        {"sinks": (object(),)},
    ],
)
def test_bad_arguments_are_refused_while_building(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0] + "|wall-clock"):
        Recorder(tmp_path, **wrong)


@pytest.mark.parametrize("count", [-1, 1.5, "3", True])
def test_count_is_a_whole_number(recorder, count):
    recorder.count = 5
    with pytest.raises(ValueError, match="count ="):
        recorder.count = count


# ---------------------------------------------------------------------- places


def test_without_a_folder_and_without_a_run_there_is_no_place():
    with pytest.raises(ExperimentError, match="no experiment is running"):
        Recorder()


def test_in_a_run_it_writes_to_the_runs_folder(run):
    with Recorder(tensorboard=False) as recorder:
        recorder.scalar("x", 1)
        assert run.recorder is recorder and recorder.output_dir == run.folder
    assert scalars(run.folder) == [(0, "x", 1)]


def test_two_recorders_write_two_complete_folders(run, tmp_path):
    pytest.importorskip("tensorboard")
    first, second, third = Recorder(), Recorder(), Recorder(tmp_path / "own")
    for place in range(3):
        for factor, recorder in ((1, first), (10, second), (100, third)):
            recorder.scalar("x", place * factor)
            recorder.step()
    assert run.recorder is first and second.output_dir == run.folder / "recorder-1"
    for factor, recorder in ((1, first), (10, second), (100, third)):
        recorder.close()
        assert scalars(recorder.output_dir) == [(place, "x", place * factor) for place in range(3)]
        assert {path.name for path in recorder.output_dir.iterdir()} >= {"metrics.jsonl", "scalars.csv", "tb"}
        assert len(list((recorder.output_dir / "tb").iterdir())) == 1


def test_a_folder_has_one_open_recorder(recorder):
    with pytest.raises(ValueError, match="still open"):
        Recorder(recorder.output_dir)
    recorder.close()
    Recorder(recorder.output_dir).close()


def test_a_dropped_recorder_writes_what_it_has(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False, flush_every="1h")
    recorder.scalar("x", 1)
    del recorder
    gc.collect()
    assert scalars(tmp_path) == [(0, "x", 1)]


def test_the_end_of_the_program_writes_what_there_is(tmp_path):
    code = f"""
import atexit
from drivetrain.record import Recorder
class Tracker:
    remote = True
    def open(self, folder, resume):
        print("opened", flush=True)
        atexit.register(print, "its own end", flush=True)
    def scalar(self, tag, value, step, time):
        print(tag, flush=True)
    def close(self):
        print("closed", flush=True)
keep = Recorder({str(tmp_path)!r}, tensorboard=False, sinks=[Tracker()])
keep.scalars({{"x": 1, "y": 2}})
keep.step()
print("last line", flush=True)
keep.scalar("x", 3)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert scalars(tmp_path) == [(0, "x", 1), (0, "y", 2), (1, "x", 3)]
    # A tracker is opened while the program runs, and closed before its own hooks of the interpreter's end are called.
    lines = done.stdout.splitlines()
    assert lines[0] == "opened" and "last line" in lines[1:] and lines[-2:] == ["closed", "its own end"]
    assert [line for line in lines if len(line) == 1] == ["x", "y", "x"]


def test_a_closed_recorder_says_so(recorder):
    recorder.close()
    with pytest.raises(ExperimentError, match="closed"):
        recorder.scalar("x", 1)
    assert recorder.state_dict()["count"] == 0


def test_silence_is_final_and_keeps_what_was_before(recorder):
    recorder.scalar("x", 1)
    recorder.silence()
    recorder.scalar("x", 2)
    recorder.image("y", torch.zeros(2, 2))
    recorder.step()
    recorder.flush()
    assert scalars(recorder.output_dir) == [(0, "x", 1)] and not (recorder.output_dir / "images").exists()
    assert recorder.last("x") == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_worker_writes_nothing(recorder):
    recorder.scalar("x", 1)
    child = os.fork()
    if child == 0:
        try:
            recorder.scalar("x", 2)
            recorder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not (recorder.output_dir / "metrics.jsonl").exists()
    recorder.flush()
    assert scalars(recorder.output_dir) == [(0, "x", 1)]


# ---------------------------------------------------------------------- sinks


def test_a_sink_is_any_object_with_some_of_the_methods(tmp_path):
    keeper = Keeper()
    with Recorder(tmp_path, tensorboard=False, sinks=[keeper]) as recorder:
        recorder.params({"a": 1})
        recorder.scalar("x", torch.tensor(2.0))
        recorder.text("not", "taken")
        recorder.step()
    assert keeper.told == [("open", None), ("params", {"a": 1}), ("x", 2.0, 0), "close"]


def test_a_sink_with_scalars_gets_a_step_at_once(tmp_path):
    class Table:
        rows = []

        def scalars(self, values, step, time):
            self.rows.append((step, dict(values)))

        def text(self, tag, text, step, time):
            self.rows.append(text)

    with Recorder(tmp_path, tensorboard=False, sinks=[Table()]) as recorder:
        recorder.scalars({"a": 1, "b": 2})
        recorder.scalar("a", 3)
        recorder.step()
        recorder.scalar("a", 4)
        recorder.text("t", "between")
        recorder.scalar("b", 5)
    assert Table.rows == [(0, {"a": 1, "b": 2}), (0, {"a": 3}), (1, {"a": 4}), "between", (1, {"b": 5})]


def test_a_missing_package_is_said_while_building(tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    gone = ("wandb", "trackio", "mlflow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest))
    for name in gone:
        with pytest.raises(MissingExtra, match=f"pip install {name}"):
            Recorder(tmp_path, sinks=(name,))


# ---------------------------------------------------------------------- resume


def train(recorder, steps):
    for _ in range(steps):
        recorder.scalar("loss", recorder.count / 7)
        recorder.step()


def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(tmp_path):
    with Recorder(tmp_path / "whole", tensorboard=False) as recorder:
        train(recorder, 20)
    first = Recorder(tmp_path / "run", tensorboard=False)
    train(first, 8)
    state = first.state_dict()
    train(first, 5)  # lost: the checkpoint is older
    first.close()
    with Recorder(tmp_path / "run", tensorboard=False) as second:
        second.load_state_dict(state)
        assert (second.count, second.last("loss")) == (8, 7 / 7)
        train(second, 12)
    assert scalars(tmp_path / "run") == scalars(tmp_path / "whole")
    resumes = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"resume"' in line]
    assert len(resumes) == 1 and '"step": 8' in resumes[0]


def test_rows_of_the_step_of_the_checkpoint_are_neither_lost_nor_doubled(tmp_path):
    first = Recorder(tmp_path, tensorboard=False)
    first.count = 100
    first.scalar("train/loss", 1.0)
    state = first.state_dict()
    first.scalar("eval/loss", 2.0)  # the same step, after the checkpoint
    first.close()
    with Recorder(tmp_path, tensorboard=False) as second:
        second.load_state_dict(state)
        second.scalar("eval/loss", 3.0)
    assert scalars(tmp_path) == [(100, "train/loss", 1.0), (100, "eval/loss", 3.0)]


def test_a_run_that_starts_over_supersedes_its_first_life(tmp_path):
    for value in (1.0, 2.0):
        with Recorder(tmp_path, tensorboard=False) as recorder:
            recorder.scalar("x", value)
    assert scalars(tmp_path) == [(0, "x", 2.0)]


def test_a_state_can_be_loaded_in_the_middle(recorder):
    train(recorder, 3)
    state = recorder.state_dict()
    train(recorder, 3)
    recorder.load_state_dict(state)
    train(recorder, 1)
    recorder.flush()
    assert [step for step, _, _ in scalars(recorder.output_dir)] == [0, 1, 2, 3]


def test_a_new_run_from_a_checkpoint_begins_its_own_journal(tmp_path):
    class Tracker(Keeper):
        name, run_id = "tracker", None

        def open(self, folder, resume):
            super().open(folder, resume)
            self.run_id = (resume and resume.run_id) or folder.name

    first = Recorder(tmp_path / "a", tensorboard=False, sinks=[Tracker()])
    train(first, 3)
    state = first.state_dict()
    assert state["runs"] == {"tracker": "a"}
    first.close()
    continued, other = Tracker(), Tracker()
    with Recorder(tmp_path / "a", tensorboard=False, sinks=[continued]) as again:
        again.load_state_dict(state)
        train(again, 1)
        assert again.state_dict()["runs"] == {"tracker": "a"}
    with Recorder(tmp_path / "b", tensorboard=False, sinks=[other]) as fresh:
        fresh.params({"from": "a"})
        fresh.load_state_dict(state)
        train(fresh, 1)
        assert fresh.state_dict()["runs"] == {"tracker": "b"}
    assert continued.told[0][1].run_id == "a" and other.told[0] == ("open", None)
    assert scalars(tmp_path / "b") == [(3, "loss", 3 / 7)]


def test_the_state_is_plain_and_bad_ones_are_refused(recorder, tmp_path):
    train(recorder, 2)
    torch.save(recorder.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == recorder.state_dict()
    recorder.load_state_dict({"count": 5})  # all that older files have
    assert recorder.count == 5
    for state in ({}, {"count": -1}, {"count": "5"}):
        with pytest.raises(StateError, match="count="):
            recorder.load_state_dict(state)


def test_a_context_keeps_it(recorder, tmp_path):
    train(recorder, 4)
    state = Context(recorder=recorder, note="x").state_dict()
    with Recorder(tmp_path / "other", tensorboard=False) as other:
        context = Context(recorder=other, note="")
        context.load_state_dict(state)
        assert other.count == 4 and context.cpu().recorder is other


def test_a_checkpoint_keeps_it_and_finds_the_best_metric(recorder, tmp_path):
    from drivetrain.checkpoint.checkpointer import Checkpointer

    recorder.scalars({"eval/acc": 0.5, "odd.tag/ü": math.inf, "never": math.nan})
    with Checkpointer(
        Context(recorder=recorder), best="eval/acc", mode="max", dir=tmp_path / "checkpoints", async_save=False
    ) as keeper:
        keeper.save(id="one")
        recorder.step()
        recorder.scalar("eval/acc", 0.25)
        keeper.save(id="two")
    assert (tmp_path / "checkpoints" / "best").read_text().strip().endswith("one")
    with Recorder(tmp_path / "other", tensorboard=False) as other:
        Checkpointer(Context(recorder=other), dir=tmp_path / "checkpoints", async_save=False).restore("last")
        assert (other.count, other.last("eval/acc"), other.last("odd.tag/ü")) == (1, 0.25, math.inf)
        assert math.isnan(other.last("never"))


# ---------------------------------------------------------------------- as a logger


def test_it_is_a_logger_of_the_loop(recorder):
    assert isinstance(recorder, Logger)
    recorder.log_metrics({"a": 1.0}, step=7)
    recorder.log_hyperparameters({"lr": 0.1})
    recorder.log_images(torch.zeros(2, 3, 4, 4), name="batch", step=8)
    recorder.log_images(torch.zeros(3, 4, 4))
    recorder.flush()
    assert [(row["kind"], row["tag"], row["step"]) for row in read_metrics(recorder.output_dir)] == [
        ("scalar", "a", 7),
        ("params", "params", 7),
        ("image", "batch/0", 8),
        ("image", "batch/1", 8),
        ("image", "images", 8),
    ]


def test_text_that_is_not_utf8_is_recorded_in_escapes(tmp_path):
    """A path on the disk may be such a text; a sink raised for it in the middle of training."""
    with Recorder(tmp_path) as recorder:
        recorder.params({"data": "a\udcffb", "n\udcff": np.longdouble(2)})
        recorder.text("note", "a\ud800b")
    values = [row["value"] for row in read_metrics(tmp_path)]
    assert values == [{"data": "a\\udcffb", "n\\udcff": "2.0"}, "a\\ud800b"]


def test_numbers_of_every_kind_are_taken_and_others_rejected_at_once(tmp_path):
    with Recorder(tmp_path, tensorboard=False) as recorder:
        for value in (np.longdouble(1.5), np.uint64(2**63), Fraction(1, 2), np.bool_(True), -(2**70)):
            recorder.scalar("x", value)
        with pytest.raises(ConfigError, match="expected one number"):
            recorder.scalar("x", 10**400)
        with pytest.raises(ConfigError, match="meta device"):
            recorder.scalar("x", torch.ones(1, device="meta"))
    assert [row["value"] for row in read_metrics(tmp_path)] == [1.5, 2**63, 0.5, 1, -(2**70)]


def test_default_device_of_the_program_does_not_matter(tmp_path):
    weights = torch.ones(2)
    with torch.device("meta"), Recorder(tmp_path, tensorboard=False) as recorder:
        recorder.histogram("list", [1.0, 2.0])
        recorder.histogram("tensor", weights)
        recorder.scalar("x", weights.sum())
    assert [row["tag"] for row in read_metrics(tmp_path)] == ["list", "tensor", "x"]


def test_rows_between_two_restores_belong_to_the_first(recorder):
    recorder.scalar("x", 1.0)
    recorder.step()
    state = recorder.state_dict()
    for value in (2.0, 3.0, 4.0):  # as often as a run is rolled back
        recorder.load_state_dict(state)
        recorder.scalar("x", value)
    recorder.flush()
    assert [row["value"] for row in read_metrics(recorder.output_dir)] == [1.0, 4.0]
