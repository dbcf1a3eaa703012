"""Continuing a run: which one, with which parameters, from where."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import drivetrain as dt
from drivetrain.core.errors import ExperimentError, ParameterError, ResumeError
from drivetrain.core.locking import FolderLock
from drivetrain.experiment import Param, experiment, find_runs, read_run
from drivetrain.runtime import current_run

STOP_AT = {"step": None}


@experiment
def learn(lr: float = 0.1, steps: Annotated[int, Param(resumable=True)] = 6, width: int = 3):
    """A small hand-written loop that can be stopped at a step."""
    ctx = dt.Context(step=0, losses=[])
    ctx.model = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.2), nn.Linear(width, 1))
    ctx.optimizer = torch.optim.SGD(ctx.model.parameters(), lr=lr, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
    ctx.loader = dt.SmartDataLoader(data, batch_size=4, shuffle=True, loading_bar=False)
    ctx.autotransform()
    keeper = dt.Checkpointer(ctx, every="2ba", signals=False)
    while ctx.step < steps:
        for x, y in ctx.loader:
            ctx.optimizer.zero_grad()
            loss = mse_loss(ctx.model(x), y)
            loss.backward()
            ctx.optimizer.step()
            ctx.step += 1
            ctx.losses.append(loss.item())
            keeper.step()
            if ctx.step == STOP_AT["step"]:
                raise RuntimeError("stopped")
            if ctx.step == steps:
                break
    return {"losses": ctx.losses, "weights": ctx.model[0].weight.flatten().tolist(), "seed": dt.experiment.new_seed()}


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run with seed 3 that failed after five of six steps; its newest checkpoint is of step four."""
    monkeypatch.setitem(STOP_AT, "step", 5)
    with pytest.raises(RuntimeError, match="stopped"):
        learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.05)
    monkeypatch.setitem(STOP_AT, "step", None)
    (record,) = find_runs(tmp_path)
    return record


@dataclass(frozen=True)
class Decay:
    steps: int
    kind: str = "cosine"


@pytest.fixture
def whole(tmp_path_factory):
    return learn.run(output_dir=str(tmp_path_factory.mktemp("whole")), random_seed=3, lr=0.05)


def test_the_same_command_with_resume_auto_continues_bit_for_bit_in_its_folder(stopped, whole, tmp_path):
    result = learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.05, resume="auto")
    (record,) = find_runs(tmp_path)
    assert result == whole and record.folder == stopped.folder and record.state == "finished"
    assert len(record.manifest["resumed"]) == 1 and record.started == stopped.started
    assert "continued from" in record.log_path.read_text()


def test_a_finished_run_is_not_repeated(stopped, whole, tmp_path, capsys):
    for _ in range(2):
        assert learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.05, resume="auto") == whole
    assert "already finished" in capsys.readouterr().out
    assert len(list(find_runs(tmp_path))) == 1


def test_a_finished_run_goes_on_when_a_resumable_parameter_has_changed(stopped, tmp_path, tmp_path_factory):
    learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.05, resume="auto")
    longer = learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.05, resume="auto", steps=9)
    reference = learn.run(output_dir=str(tmp_path_factory.mktemp("longer")), random_seed=3, lr=0.05, steps=9)
    assert longer == reference and len(list(find_runs(tmp_path))) == 1


def test_auto_without_an_earlier_run_is_a_fresh_one_and_says_so(tmp_path):
    learn.run(output_dir=str(tmp_path), resume="auto", steps=2)
    (record,) = find_runs(tmp_path)
    assert "starting a new one" in record.log_path.read_text()


def test_other_parameters_are_another_run(stopped, tmp_path):
    learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.06, resume="auto", steps=2)
    assert len(list(find_runs(tmp_path))) == 2


def test_where_and_how_it_runs_does_not_make_it_another_run(stopped, whole, tmp_path):
    result = learn.run(
        output_dir=str(tmp_path), random_seed=3, lr=0.05, resume="auto", device="cpu", debug=True, max_restarts=2
    )
    assert result == whole and len(list(find_runs(tmp_path))) == 1


def test_an_undeclared_seed_is_taken_from_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(STOP_AT, "step", 3)
    with pytest.raises(RuntimeError):
        learn.run(output_dir=str(tmp_path))
    monkeypatch.setitem(STOP_AT, "step", None)
    result = learn.run(output_dir=str(tmp_path), resume="auto")
    (record,) = find_runs(tmp_path)
    fresh = learn.run(output_dir=str(tmp_path / "fresh"), random_seed=record.manifest["seed"])
    assert result == fresh


def test_a_path_continues_that_run_with_its_own_values(stopped, whole, tmp_path):
    assert learn.run(output_dir=str(tmp_path / "elsewhere"), resume=str(stopped.folder)) == whole
    assert not (tmp_path / "elsewhere").exists()
    assert read_run(stopped.folder).parameters["lr"] == 0.05


def test_a_checkpoint_of_a_run_can_be_continued_too(stopped, whole):
    checkpoint = next(path for path in sorted(stopped.checkpoints_path.iterdir()) if path.name.endswith("ba2"))
    assert learn.resume(checkpoint) == whole


def test_parameters_that_contradict_the_run_are_refused_unless_forced(stopped):
    with pytest.raises(ResumeError, match=r"lr: 0.05 in the run, 0.2 now"):
        learn.run(resume=str(stopped.folder), lr=0.2)
    with pytest.raises(ResumeError, match="random_seed: 3 in the run, 4 now"):
        learn.run(resume=str(stopped.folder), random_seed=4)
    learn.resume(stopped.folder, {"lr": 0.2}, force=True)
    record = read_run(stopped.folder)
    assert record.parameters["lr"] == 0.2 and "lr: 0.05 in the run" in json.dumps(record.manifest["resumed"])


def test_force_is_an_option_of_the_command_line(stopped):
    line = ["--resume", str(stopped.folder), "--lr", "0.2"]
    with pytest.raises(ResumeError):
        learn.cli(line, exit_on_error=False)
    assert learn.cli([*line, "--force"])["losses"]


def test_a_run_that_is_in_use_is_refused(stopped, tmp_path):
    with FolderLock(stopped.folder) as lock:
        assert lock.acquire()
        for resume in ("auto", str(stopped.folder)):
            with pytest.raises(ResumeError, match="still running"):
                learn.run(output_dir=str(tmp_path), random_seed=3, lr=0.05, resume=resume)
    assert current_run() is None


def test_a_path_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ResumeError, match="neither the folder of a run nor a checkpoint"):
        learn.run(resume=str(tmp_path))


def test_checkpoint_begins_a_new_run_from_a_state(stopped, tmp_path):
    result = learn.run(output_dir=str(tmp_path), checkpoint=stopped.folder, random_seed=8, steps=6)
    records = list(find_runs(tmp_path))
    assert len(records) == 2 and len(result["losses"]) == 6  # four from the checkpoint, two of its own
    assert records[1].manifest["seed"] == 8


SCRIPT = """
import os, signal, sys
from tests.experiment import test_resume
from drivetrain.checkpoint.checkpointer import Checkpointer

step = Checkpointer.step

def step_and_signal(self, *args, **kwargs):
    if self.progress.num_calls == 2 and os.environ.get("SIGNAL"):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return step(self, *args, **kwargs)

Checkpointer.step = step_and_signal
test_resume.with_signals.cli()
"""


@experiment
def with_signals(steps: int = 5):
    ctx = dt.Context(step=0, value=torch.zeros(1))
    ctx.autotransform()
    keeper = dt.Checkpointer(ctx)
    while ctx.step < steps:
        ctx.value += torch.rand(1)
        ctx.step += 1
        keeper.step()
    return ctx.value.item()


def test_a_terminated_run_saves_exits_143_and_continues(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", SCRIPT, "--output-dir", str(tmp_path), "--random-seed", "1", "--resume", "auto"]
    done = subprocess.run(
        line, env=env | {"SIGNAL": str(int(signal.SIGTERM))}, capture_output=True, text=True, timeout=100
    )
    (record,) = find_runs(tmp_path)
    assert done.returncode == 143 and record.state == "interrupted" and record.status["exit_code"] == 143, done.stderr
    assert len(list(record.checkpoints_path.glob("checkpoint-*"))) == 1
    result = with_signals.run(output_dir=str(tmp_path), random_seed=1, resume="auto")
    assert result == with_signals.run(output_dir=str(tmp_path / "whole"), random_seed=1)
    assert read_run(record.folder).state == "finished"


def test_the_parameters_of_a_resumed_run_begin_a_new_run_when_they_are_fed_back(stopped, tmp_path, caplog):
    learn.resume(stopped.folder)
    assert read_run(stopped.folder).parameters["resume"] == str(stopped.folder)
    words = ["--params-file", str(stopped.folder / "parameters.yaml"), "--output-dir", str(tmp_path)]
    result = learn.cli(words, exit_on_error=False)
    runs = list(find_runs(tmp_path))
    assert len(runs) == 2 and runs[1].parameters["resume"] == "never" and len(result["losses"]) == 6
    assert "resume is never read from a file and is ignored. Give --resume." in caplog.text


def test_resume_takes_the_short_id_of_a_run_in_the_output_folder(stopped, tmp_path):
    result = learn.run(output_dir=str(tmp_path), resume=stopped.folder.name.rpartition("_")[2])
    assert len(result["losses"]) == 6 and [record.folder for record in find_runs(tmp_path)] == [stopped.folder]
    with pytest.raises(ResumeError, match="short id"):
        learn.run(output_dir=str(tmp_path), resume="zzzzzz")


def experiment_named(name, function):
    return experiment(name=name)(function)


def test_a_run_with_a_required_parameter_is_continued_with_its_own_value(tmp_path):
    fails = {"yes": True}

    def function(data: str, lr: float = 0.1):
        if fails.pop("yes", False):
            raise RuntimeError("stopped")
        return data, lr

    made = experiment_named("needs-data", function)
    with pytest.raises(RuntimeError):
        made.run(data="digits", output_dir=str(tmp_path), run_name="a")
    assert made.resume(tmp_path / "needs-data" / "a") == ("digits", 0.1)
    with pytest.raises(ParameterError, match="'data' is required"):
        made.run(output_dir=str(tmp_path), resume="auto")


def test_a_run_of_another_function_of_the_same_name_is_not_continued(tmp_path):
    def train_resnet():
        return "resnet"

    def train_vit():
        return "vit"

    one, other = experiment_named("train", train_resnet), experiment_named("train", train_vit)
    assert [made.run(output_dir=str(tmp_path), resume="auto") for made in (one, other, one)] == [
        "resnet",
        "vit",
        "resnet",
    ]
    assert len(list(find_runs(tmp_path))) == 2


def test_a_run_of_a_file_of_another_name_is_not_continued(tmp_path):
    def function():
        return 1

    made = experiment_named("train", function)
    made.run(output_dir=str(tmp_path), run_name="a")
    manifest = tmp_path / "train" / "a" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("test_resume.py", "other.py"))
    made.run(output_dir=str(tmp_path), resume="auto")
    assert len(list(find_runs(tmp_path))) == 2


def test_a_run_whose_parameters_are_damaged_is_not_continued_with_defaults(stopped):
    (stopped.folder / "parameters.yaml").write_text("lr: [0.05")
    with pytest.raises(ResumeError, match="parameters.yaml is damaged"):
        learn.resume(stopped.folder)


def test_a_relative_path_stays_valid_when_the_program_changes_its_folder(tmp_path, monkeypatch):
    def function(fail: Annotated[bool, Param(resumable=True)] = False):
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert not fail
        return str(current_run().folder)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    made = experiment_named("moves", function)
    with pytest.raises(AssertionError):
        made.run(run_name="a", fail=True)
    monkeypatch.chdir(tmp_path)
    assert made.resume("output/moves/a", {"fail": False}) == str(tmp_path / "output/moves/a")
    assert read_run(tmp_path / "output/moves/a").state == "finished"


def test_a_default_without_a_plain_form_is_itself_again(tmp_path):
    def function(
        activation=torch.tanh, dtype: torch.dtype = torch.float16, steps: Annotated[int, Param(resumable=True)] = 1
    ):
        return activation is torch.tanh, dtype, steps

    made = experiment_named("objects", function)
    made.run(output_dir=str(tmp_path), run_name="a")
    folder = tmp_path / "objects" / "a"
    assert made.resume(folder, {"steps": 2}) == (True, torch.float16, 2)
    words = ["--params-file", str(folder / "parameters.yaml"), "--output-dir", str(tmp_path)]
    assert made.cli(words, exit_on_error=False) == (True, torch.float16, 2)
    assert " at 0x" not in (folder / "parameters.yaml").read_text()


def test_an_id_of_several_runs_is_named_with_them(tmp_path):
    for name in ("base-1", "base-2"):
        experiment_named("twice", lambda: None).run(output_dir=str(tmp_path), run_name=name)
    with pytest.raises(ExperimentError, match=r"(?s)base names 2 folders.*base-1.*base-2"):
        experiment_named("twice", lambda: None).run(output_dir=str(tmp_path), resume="base")


def test_a_value_that_was_none_stays_none_when_the_program_has_another_default(tmp_path):
    def first(limit: int | None = None):
        raise RuntimeError("stopped")

    def second(limit: int | None = 5):
        return limit

    second.__qualname__ = first.__qualname__
    with pytest.raises(RuntimeError):
        experiment_named("limited", first).run(output_dir=str(tmp_path), run_name="a")
    assert experiment_named("limited", second).resume(tmp_path / "limited" / "a") is None


def test_a_dataclass_that_was_none_is_none_in_the_resumed_run(tmp_path):
    fails = {"yes": True}

    def function(decay: Decay | None = None):
        if fails.pop("yes", False):
            raise RuntimeError("stopped")
        return decay

    made = experiment_named("decays", function)
    with pytest.raises(RuntimeError):
        made.run(output_dir=str(tmp_path), run_name="a")
    assert made.resume(tmp_path / "decays" / "a") is None
    assert made.resume(tmp_path / "decays" / "a", {"decay.steps": 2}, force=True) == Decay(2)


def test_a_checkpoint_that_does_not_exist_prevents_the_run(tmp_path):
    with pytest.raises(ParameterError, match="none.pt does not exist"):
        learn.run(output_dir=str(tmp_path / "runs"), checkpoint=tmp_path / "none.pt")
    assert not (tmp_path / "runs").exists()
