"""A rank that hangs, dies or is slow, in runs of real processes."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.callbacks import TrainerCallback
from drivetrain.core.errors import ConfigError
from drivetrain.runtime import hangs
from drivetrain.runtime.hangs import HANG_STATUS
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.store import store_variables
from drivetrain.train.trainer import Trainer
from tests.checkpoint.training import assert_same_state
from tests.checkpoint.victim import Forked
from tests.train import elastic_program
from tests.train.tasks import make_data, make_model


def fork_rank(rank: int, folder: Path, action) -> Forked:
    """Fork a rank of two whose output goes to a file."""

    def be_rank() -> None:
        with Path(folder, f"output-{rank}").open("w") as output:
            os.dup2(output.fileno(), 2)
            sys.stderr = os.fdopen(2, "w")
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            os.environ |= store_variables(folder / "store")
            action()

    return Forked(be_rank)


def test_a_hung_rank_ends_the_job_and_every_rank_prints_where_it_is(tmp_path):
    (tmp_path / "store").mkdir()
    ranks = [fork_rank(rank, tmp_path, lambda: elastic_program.run(str(tmp_path), "hang", "1s")) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [HANG_STATUS, HANG_STATUS]
    first, second = ((tmp_path / f"output-{rank}").read_text() for rank in range(2))
    for rank, text in enumerate((first, second)):
        assert f"[rank {rank}] rank {rank} of 2 has made no progress" in text
        assert f"batch {elastic_program.FAULT_AT} of the run" in text and "_run_training" in text
    assert "time.sleep(1000)" in second
    assert "all_reduce" in first and "collectives in progress" in first
    places = [line for line in first.splitlines() if line.startswith("[all ranks] rank ")]
    assert len(places) == 2 and "elastic_program.py" in places[1] and "Fault.after_loss" in places[1]


def launched(folder: Path, kind: str, restarts: int) -> subprocess.CompletedProcess:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.train.elastic_program", str(folder), "2", kind, str(restarts)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What the program ends with on two ranks when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("elastic") / "whole"
    assert launched(folder, "none", 0).returncode == 0
    return elastic_program.ends_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_a_rank_that_dies_or_hangs_is_replaced_and_the_run_ends_as_if_nothing_had_happened(
    tmp_path, kind, uninterrupted
):
    done = launched(tmp_path / kind, kind, restarts=1)
    assert done.returncode == 0, done.stderr
    assert ("has made no progress" in done.stderr) == (kind == "hang")
    ends = elastic_program.ends_of(tmp_path / kind)
    assert len(ends) == 2
    for end, whole in zip(ends, uninterrupted, strict=True):
        assert_same_state(end, whole)


@pytest.mark.slow
def test_without_restarts_a_hung_rank_ends_the_job_with_an_error_that_says_so(tmp_path):
    done = launched(tmp_path / "hang", "hang", restarts=0)
    assert done.returncode != 0
    assert "WorkerFailed" in done.stderr and "no progress for hang_timeout" in done.stderr


class Slow(TrainerCallback):
    """Makes rank 1 slow in its forward passes."""

    def before_forward(self, state, logger):
        time.sleep(0.02 if get_rank() == 1 else 0.001)


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self):
        self.metrics: dict = {}

    def log_metrics(self, metrics, step=None):
        self.metrics |= metrics


def train_with_a_slow_rank() -> tuple[dict, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("drivetrain.runtime.hangs").addHandler(handler)
    before, hangs.EXCHANGE_SECONDS, hangs.POLL_SECONDS = (hangs.EXCHANGE_SECONDS, hangs.POLL_SECONDS), 0.1, 0.05
    kept, model = Kept(), make_model()
    try:
        trainer = Trainer(
            model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), [Slow()],
            loggers=[kept], device="cpu",
        )  # fmt: skip
        trainer.train(make_data(400), num_epochs=1, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
    finally:
        hangs.EXCHANGE_SECONDS, hangs.POLL_SECONDS = before
        logging.getLogger("drivetrain.runtime.hangs").removeHandler(handler)
    return kept.metrics, said


def test_a_slow_rank_is_named_in_a_warning_and_in_the_record(world2):
    (metrics, said), (_, said_elsewhere) = world2(train_with_a_slow_rank)
    assert len(said) == 1 and "rank 1 is slow" in said[0] and not said_elsewhere
    assert metrics["straggler/rank"] == 1 and metrics["straggler/delay"] > 0.005


@pytest.mark.parametrize("junk", ["3ep", "-1s", "soon", -2, float("inf")])
def test_a_hang_timeout_that_is_no_time_is_rejected_by_name(junk):
    model = make_model()
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.raises(ConfigError, match="hang_timeout"):
        trainer.train(make_data(), num_epochs=1, hang_timeout=junk)


def test_one_process_is_watched_only_where_a_limit_is_given(monkeypatch):
    started = []
    monkeypatch.setattr(hangs.RankWatch, "_watch", lambda watch: started.append(watch))
    for limit in (None, 60):
        model = make_model()
        trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        trainer.train(make_data(), num_epochs=1, hang_timeout=limit)
        assert len(started) == (limit is not None)
