"""Several processes: each row is written once, whether or not the Recorder is in a Context."""

import csv
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.context.context import Context
from drivetrain.record import Recorder, read_metrics


def record(folder):
    """Record on this rank; return what it knows."""
    recorder = Recorder(folder, tensorboard=False)
    for place in range(3):
        recorder.scalar("loss", torch.tensor(float(place + 10 * dist.get_rank())))
        recorder.step()
    recorder.image("x", torch.zeros(2, 2))
    recorder.histogram("h", torch.zeros(2))
    state = recorder.state_dict()
    last = recorder.last("loss")
    recorder.close()
    dist.barrier()
    return last, state["count"]


def record_in_context(folder):
    context = Context(recorder=Recorder(folder, tensorboard=False), model=torch.nn.Linear(1, 1))
    context.ddp()
    context.recorder.scalar("loss", float(dist.get_rank()))
    silent = context.recorder._stream.is_silent
    context.recorder.close()
    dist.barrier()
    return silent


def both(folder):
    return record(Path(folder) / "bare"), record_in_context(Path(folder) / "context")


def test_each_row_is_written_once(world2, tmp_path):
    results = world2(both, str(tmp_path))
    assert results == [((2.0, 3), False), ((12.0, 3), True)]
    rows = read_metrics(tmp_path / "bare")
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("scalar", 0),
        ("scalar", 1),
        ("scalar", 2),
        ("image", 3),
        ("histogram", 3),
    ]
    assert [row["value"] for row in rows[:3]] == [0.0, 1.0, 2.0]
    with (tmp_path / "bare" / "scalars.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 3
    assert [row["value"] for row in read_metrics(tmp_path / "context")] == [0.0]


@pytest.mark.parametrize(("rank", "expected"), [("0", 1), ("1", 0)])
def test_a_launched_process_knows_its_rank_before_there_is_a_group(tmp_path, monkeypatch, rank, expected):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    with Recorder(tmp_path / "run", tensorboard=False) as recorder:
        recorder.scalar("x", 1)
    assert len(list(tmp_path.glob("run/metrics.jsonl"))) == expected
