"""A run on several processes is interrupted and resumed, on as many processes or on another number."""

from itertools import chain

import pytest
import torch
from torch import nn

from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, weights


class Pull(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self.at:
            raise RuntimeError("the plug is pulled")


class Seen(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        self.rows.append([round(value, 6) for value in batch[0][:, 0].tolist()])


def run(folder=None, pull=None, dropout=0.0, accumulation=2, optimizer=torch.optim.AdamW, loss=None, **kwargs):
    """Train at a constant global batch; return rows seen per step, weights and the epochs' losses."""
    double = torch.float64
    model = make_model(dtype=double, dropout=dropout)
    seen = Seen()
    callbacks = [seen] if pull is None else [seen, Pull(pull)]
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer(model.parameters(), lr=1e-2), callbacks=callbacks, seed=7)
    if folder is not None:
        kwargs = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False, **kwargs}
    try:
        history = trainer.train(
            make_data(35, dtype=double),
            num_epochs=3,
            global_batch_size=8,
            gradient_accumulation_steps=accumulation,
            **kwargs,
        )
    except RuntimeError as error:
        if "plug" not in str(error):
            raise
        return None
    return seen.rows, weights(model), list(history.get_metric_values("train_loss_epoch"))


@pytest.mark.parametrize("at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in (3, 8))])
def test_two_processes_resume_bit_for_bit(world2, tmp_path, at):
    expected = world2(run, dropout=0.3)
    world2(run, tmp_path, pull=at, dropout=0.3)
    resumed = world2(run, tmp_path, dropout=0.3, resume_from="auto")
    for (rows, ours, losses), (all_rows, theirs, all_losses) in zip(resumed, expected):
        assert rows == all_rows[at:]
        assert all(map(torch.equal, ours, theirs))
        assert losses == all_losses


def test_two_then_one_then_four_processes_see_one_sequence_and_end_alike(world2, world4, tmp_path):
    whole_rows, theirs, all_losses = run(accumulation=1)
    world2(run, tmp_path, pull=3, accumulation=1)
    assert run(tmp_path, pull=7, accumulation=1, resume_from="auto") is None
    results = world4(run, tmp_path, accumulation=1, resume_from="auto")
    joined = [list(chain(*parts)) for parts in zip(*(rows for rows, _, _ in results))]
    expected = [set(rows) for rows in whole_rows[7:]]
    assert [set(rows) for rows in joined] == expected  # a tail of three rows has a copy on the fourth process
    for _, ours, losses in results:
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        assert losses == pytest.approx(all_losses, abs=1e-10)


def run_in(size, worlds, *args, **kwargs):
    """Run on so many processes, and return what the first of them gives."""
    kwargs.setdefault("optimizer", torch.optim.SGD)
    return run(*args, **kwargs) if size == 1 else worlds[size](run, *args, **kwargs)[0]


@pytest.mark.parametrize(  # after the first batch of a short window, and after two of three
    ("before", "after", "at"),
    [
        (2, 1, 7),
        (2, 4, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 1, 4), (1, 2, 4), (1, 2, 7), (2, 4, 7)]),
    ],
)
def test_another_number_of_processes_goes_on_inside_a_window(world2, world4, tmp_path, before, after, at):
    worlds, settings = {2: world2, 4: world4}, {"accumulation": 3}
    _, theirs, all_losses = run(optimizer=torch.optim.SGD, **settings)
    run_in(before, worlds, tmp_path, pull=at, **settings)
    assert (tmp_path / f"checkpoint-ep{at // 5}-ba{at}").is_dir()
    _, ours, losses = run_in(after, worlds, tmp_path, resume_from="auto", **settings)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert losses == pytest.approx(all_losses, abs=1e-12)


def run_sharded(folder, **kwargs):
    """Train a model that FSDP splits, and return where the run began."""
    torch.manual_seed(0)
    model = make_model()
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), strategy=["fsdp"], device="cpu"
    )
    settings = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False, "num_epochs": None}
    trainer.train(make_data(32), global_batch_size=8, gradient_accumulation_steps=2, **settings, **kwargs)
    clear_data_ranks()


def test_sharded_gradients_of_a_window_stay_with_their_ranks(world2, tmp_path, caplog):
    world2(run_sharded, tmp_path, max_duration="3ba")
    model = make_model()
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    settings = {"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_epochs": None, "max_duration": "2ba"}
    trainer.train(make_data(32), checkpoint_dir=tmp_path, resume_from="auto", **settings)
    assert "ba3 is skipped: it was taken inside an accumulation window by 2 ranks" in caplog.text
    assert trainer.last_checkpoint.name == "checkpoint-ep0-ba2"


@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_sums_of_losses_go_on_inside_a_window(world2, tmp_path, before, after):
    worlds, settings = {2: world2}, {"accumulation": 3, "loss": nn.CrossEntropyLoss(reduction="sum")}
    _, theirs, _ = run(optimizer=torch.optim.SGD, **settings)
    run_in(before, worlds, tmp_path, pull=7, **settings)
    _, ours, _ = run_in(after, worlds, tmp_path, resume_from="auto", **settings)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
