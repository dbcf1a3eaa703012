"""Several optimizers on several losses in the ordinary loop, against a hand-written one."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError
from drivetrain.optim import ConstantLr, NoamLr, OptimSet
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, weights


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        return hidden, self.decoder(hidden)


class TwoLosses(Trainer):
    def calculate_train_batch_loss(self, batch):
        x, y = batch
        hidden, outputs = self.forward(x)
        losses = {"encoder_loss": hidden.pow(2).mean(), "decoder_loss": self.loss_func(outputs, y)}
        return {"loss": sum(losses.values()), "losses": losses, "model_outputs": outputs, "batch_size": len(y)}


def units_for(model, every):
    shared = {"grad_clip": None}
    return OptimSet(
        encoder=ConstantLr(
            "SGD",
            {"lr": 0.1},
            model,
            optim_loss="encoder_loss",
            updated_modules="encoder",
            step_per_update=every,
            **shared,
        ),
        decoder=NoamLr(
            "SGD", {"lr": 0.2}, model, optim_loss="decoder_loss", updated_modules="decoder", warmup_steps=3, **shared
        ),
    )


def by_trainer(accumulation, every, precision, rows=50, epochs=2, **kwargs):
    dtype = torch.float64 if precision == "no" else torch.float32
    model = Pair().to(dtype)
    trainer = TwoLosses(
        model,
        nn.CrossEntropyLoss(),
        units_for(model, every),
        callbacks=kwargs.pop("callbacks", ()),
        precision=precision,
        seed=2,
    )
    trainer.train(
        TensorDataset(make_data(rows).tensors[0].to(dtype), make_data(rows).tensors[1]),
        num_epochs=epochs,
        global_batch_size=8,
        gradient_accumulation_steps=accumulation,
        train_dataloader_kwargs={"shuffle": False},
        **kwargs,
    )
    return weights(model)


def by_hand(accumulation, every, precision, rows=50, epochs=2):
    """The same arithmetic with nothing but torch: mean gradients over a window, own loss per part, a Noam rate."""
    dtype = torch.float64 if precision == "no" else torch.float32
    model = Pair().to(dtype)
    x, y = make_data(rows).tensors
    x = x.to(dtype)
    batches = [slice(k, min(k + 8, rows)) for k in range(0, rows, 8)]
    step = 0
    for _ in range(epochs):
        for start in range(0, len(batches), accumulation):
            window = batches[start : start + accumulation]
            step += 1
            total = sum(b.stop - b.start for b in window)
            gradients = [torch.zeros_like(p) for p in model.parameters()]
            for rows_of in window:
                share = (rows_of.stop - rows_of.start) / total
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    hidden, outputs = model(x[rows_of])
                hidden, outputs = hidden.to(dtype), outputs.to(dtype)
                own = torch.autograd.grad(hidden.pow(2).mean(), list(model.encoder.parameters()), retain_graph=True)
                other = torch.autograd.grad(
                    nn.functional.cross_entropy(outputs, y[rows_of]), list(model.decoder.parameters())
                )
                for gradient, part in zip(gradients, (*own, *other)):
                    gradient += part * share
            rates = (0.1 if step % every == 0 else 0.0), 0.2 * 3**0.5 * min(step**-0.5, step * 3**-1.5)
            with torch.no_grad():
                for index, (p, gradient) in enumerate(zip(model.parameters(), gradients)):
                    p -= rates[index // 2] * gradient
    return weights(model)


MATRIX = list(itertools.product((1, 3), (1, 2), ("no", "bf16")))


def tolerance(precision):
    return {"rtol": 0, "atol": 1e-12} if precision == "no" else {"rtol": 2e-2, "atol": 2e-3}


@pytest.mark.parametrize(("accumulation", "every", "precision"), MATRIX)
def test_units_equal_a_hand_written_loop(accumulation, every, precision):
    for ours, theirs in zip(by_trainer(accumulation, every, precision), by_hand(accumulation, every, precision)):
        torch.testing.assert_close(ours, theirs, **tolerance(precision))


def whole_matrix():
    return [by_trainer(*case) for case in MATRIX]


def test_two_processes_equal_a_hand_written_loop(world2):
    for results in world2(whole_matrix):
        for case, ours in zip(MATRIX, results):
            for a, b in zip(ours, by_hand(*case)):
                torch.testing.assert_close(a, b, **tolerance(case[2]))


class Pull(TrainerCallback):
    """Ends the run before a batch."""

    def __init__(self, at):
        self.at = at

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self.at:
            raise RuntimeError("plug")


def cut_and_go_on(folder, at=None, **kwargs):
    """Train with a checkpoint after every batch; with `at`, end the run there."""
    keeping = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False, **kwargs}
    try:
        return by_trainer(3, 2, "no", callbacks=[Pull(at)], **keeping)
    except RuntimeError as error:
        if "plug" not in str(error):
            raise
        return None


@pytest.mark.parametrize("at", [4, 8])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_units_go_on_inside_a_window_on_another_number_of_processes(world2, tmp_path, before, after, at):
    expected, calls = by_hand(3, 2, "no"), {1: lambda f, *args, **kwargs: [f(*args, **kwargs)], 2: world2}
    calls[before](cut_and_go_on, tmp_path, at)
    assert list(tmp_path.glob(f"checkpoint-*-ba{at}"))
    for ours in calls[after](cut_and_go_on, tmp_path, resume_from="auto"):
        for a, b in zip(ours, expected):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", [4, 5, 9])
def test_a_killed_run_with_units_resumes_bit_for_bit(tmp_path, at):
    expected = by_trainer(3, 2, "no")
    keeping = {"checkpoint_dir": tmp_path, "checkpoint_every": "1ba"}
    with pytest.raises(RuntimeError, match="plug"):
        by_trainer(3, 2, "no", callbacks=[Pull(at)], **keeping)
    assert all(map(torch.equal, by_trainer(3, 2, "no", resume_from="auto", **keeping), expected))


def test_a_scheduler_beside_units_is_refused():
    with pytest.raises(ConfigError, match="set their own learning rates"):
        by_trainer(1, 1, "no", create_scheduler_fn=lambda optimizer: None)
