"""Runs of features put together at random are interrupted anywhere, once or more often, and end like those that were left alone.

`NAMED` are compositions that once ended otherwise. The others are drawn from a seed: `make test-slow` tries many.
"""

import hashlib
import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from drivetrain import SmartDataLoader, Trainer
from drivetrain.algorithms import EMA, GradientClipping, Lookahead, MixUp, ScheduleFree, SelectiveBackprop
from drivetrain.callbacks import (
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LossSpike,
    LRMonitor,
    SaveBestModelCallback,
    TrainerCallback,
)
from drivetrain.core.errors import DrivetrainError
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.optim import ConstantLr, NoamLr, OptimSet
from drivetrain.runtime.signals import StopSignals
from drivetrain.train.checkpoints import plain_scheduler_state
from tests.checkpoint.training import flat_values


class Samples(Dataset):
    """Rows with noise from all three generators of the process."""

    def __init__(self, rows, is_noisy=True):
        self.rows, self.is_noisy = rows, is_noisy

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(int(index))
        x, y = torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator)
        noise = 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand()
        return x + self.is_noisy * noise, y


class Stream(IterableDataset):
    """Shuffles with a generator of its own, which continues from epoch to epoch."""

    def __init__(self, samples):
        self.samples, self.generator = samples, torch.Generator().manual_seed(3)

    def __iter__(self):
        return (self.samples[i] for i in torch.randperm(len(self.samples), generator=self.generator).tolist())


class Shuffled(torch.utils.data.Sampler):
    """An order of Python's generator, held by the sampler."""

    def __init__(self, rows):
        self.rows, self.random = rows, random.Random(5)

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(self.random.sample(range(self.rows), self.rows))


class Counted(nn.Module):
    """A layer whose state is a number outside of any tensor."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.001 * self.calls)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2)), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        return hidden, self.decoder(hidden)


class TwoLosses(Trainer):
    """A loss for each of two units."""

    def calculate_train_batch_loss(self, batch):
        hidden, outputs = self.forward(batch[0])
        losses = {"encoder_loss": hidden.pow(2).mean(), "decoder_loss": self.compute_loss(outputs, batch[1])}
        return {"loss": sum(losses.values()), "losses": losses, "model_outputs": outputs, "batch_size": len(batch[1])}


class SometimesNan(nn.CrossEntropyLoss):
    """A loss that is not finite on one batch in `every`; the outputs decide which."""

    every = 0

    def forward(self, outputs, targets):
        loss = super().forward(outputs, targets)
        if self.every and torch.is_grad_enabled():
            digest = hashlib.sha256(outputs.detach().numpy().tobytes()).digest()
            return loss * (float("nan") if digest[0] % self.every == 0 else 1)
        return loss


class Trace(TrainerCallback):
    """Stores outside of any checkpoint what each batch was, counts evaluations, and interrupts the run at an event."""

    def __init__(self, batches, kind="", at=0):
        self.batches, self.kind, self.at, self.passed, self.evaluations = batches, kind, at, 0, 0

    def state_dict(self):
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.evaluations = state["evaluations"]

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        clock = trainer.state.clock
        self.batches[clock.batch] = clock.epoch, clock.batch_in_epoch, batch[0].clone(), batch_output["loss"].item()

    def on_eval_epoch_end(self, trainer, **kwargs):
        self.evaluations += 1

    def run_event(self, event, state, logger):
        self.passed += event.value != "init"
        if self.passed == self.at and event.value != "init":
            if self.kind == "signal" and StopSignals.active() is not None and event.value != "fit_end":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise InterruptedError


def loader_of(kind, rows):
    samples = Samples(rows)
    match kind:
        case "tensors":
            x, y = zip(*(Samples(rows, False)[i] for i in range(rows)))
            return TensorDataset(torch.stack(x), torch.stack(y))
        case "samples":
            return samples
        case "stream":
            return Stream(samples)
        case "smart stream":
            return SmartDataLoader(Stream(samples), batch_size=4)
        case "smart sampler":
            return SmartDataLoader(samples, sampler=Shuffled(rows), batch_size=4)
        case "smart weighted":
            return SmartDataLoader(
                samples, sampler=WeightedRandomSampler(torch.arange(1.0, rows + 1), rows), batch_size=4
            )
        case "plain":
            return DataLoader(samples, batch_size=4, shuffle=True)
        case "plain sampler":
            return DataLoader(samples, batch_size=4, sampler=Shuffled(rows))
        case "plain stream":
            return DataLoader(Stream(samples), batch_size=4)


LOADERS = (
    "tensors",
    "samples",
    "stream",
    "smart stream",
    "smart sampler",
    "smart weighted",
    "plain",
    "plain sampler",
    "plain stream",
)
SCHEDULERS = {
    "none": None,
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}
ALGORITHMS = {
    "EMA": lambda: EMA("4ba", update_interval="1ba"),
    "MixUp": lambda: MixUp(0.3),
    "SelectiveBackprop": lambda: SelectiveBackprop(0.2, 0.9, 0.6),
    "Lookahead": lambda: Lookahead(3, 0.5),
    "ScheduleFree": lambda: ScheduleFree(lr=0.02, bn_batches=2),
    "GradientClipping": lambda: GradientClipping("norm", 0.5),
}
CALLBACKS = {
    "early": lambda folder: EarlyStoppingCallback(2, 0.01),
    "best": lambda folder: SaveBestModelCallback(folder / "best.pt"),
    "spike": lambda folder: LossSpike(2.0, window=6, min_losses=3),
    "rollback": lambda folder: LossSpike(2.0, window=6, min_losses=3, action="rollback", pass_over=1),
    "rates": lambda folder: LRMonitor("2ba"),
    "limit": lambda folder: LimitBatchesCallback(3),
}
PLAIN = {
    "data": "tensors", "rows": 18, "units": False, "accumulation": 1, "evaluation": "none", "interval": None, "duration": "3ep",
    "every": "1ba", "scheduler": "none", "per_epoch": False, "nan": 0, "policy": "skip", "limit": None, "algorithms": (),
    "callbacks": (),
}  # fmt: skip
CUTS = ("error", "error", "signal")

NAMED: dict = {
    "state that is not a tensor": ({}, [[("error", 0.5)]]),
    "a random sample that is read ahead of the loop": ({"data": "plain stream", "every": "1ba"}, [[("error", 0.5)]]),
    "a sampler with numbers of its own, and epochs that a limit ends": (
        {"data": "smart sampler", "limit": 3, "every": "1ep"}, [[("error", 0.6)]]
    ),
    "killed in the last evaluation of a run that ends inside an epoch": (
        {"duration": "8ba", "evaluation": "samples", "callbacks": ("best",), "every": "1ep"}, [[("error", 0.97)]]
    ),
    "stopped in the last evaluation of a run that ends inside an epoch": (
        {"duration": "8ba", "evaluation": "samples", "interval": "2ba", "scheduler": "exponential", "per_epoch": True},
        [[("signal", 0.95), ("error", 0.5)]],
    ),
    "a batch that was rejected inside a window": (
        {"rows": 22, "accumulation": 3, "callbacks": ("rollback",)}, [[("error", part)] for part in (0.35, 0.42, 0.5)]
    ),
    "statistics from before a window": (
        {"rows": 24, "accumulation": 3, "nan": 4}, [[("error", part)] for part in (0.3, 0.5, 0.7)]
    ),
    "a sampler with a generator of its own, in the evaluation after an epoch": (
        {"data": "plain sampler", "evaluation": "samples"}, [[("error", 0.65)]]
    ),
    "a signal before the first resumed step": (
        {"data": "plain"}, [[("error", 0.5), ("signal", 0.01), ("signal", 0.01)]]
    ),
    "a shuffling stream": ({"data": "smart stream"}, [[("error", 0.5)]]),
    "a sampler of a SmartDataLoader with a generator of its own": ({"data": "smart sampler"}, [[("error", 0.5)]]),
    "a limited stream": ({"data": "smart stream", "rows": 30, "limit": 3}, [[("error", part)] for part in (0.3, 0.5)]),
    "the gradient norm of units": ({"units": True, "every": "1ep"}, [[("signal", 0.98)]]),
    "a skipped update at the end of an epoch": (
        {"nan": 2, "scheduler": "sequential", "per_epoch": True}, [[("error", part)] for part in (0.4, 0.7, 0.98)]
    ),
    "averaged weights in an evaluation that a signal cuts short": (
        {"algorithms": ("EMA",), "evaluation": "samples"}, [[("signal", 0.61)]]
    ),
    "schedule-free weights in an evaluation that a signal cuts short": (
        {"algorithms": ("ScheduleFree",), "evaluation": "samples"}, [[("signal", 0.61)]]
    ),
}  # fmt: skip


def draw(seed):
    """Return a composition and where it is interrupted."""
    chance = random.Random(seed)
    one = {
        "data": chance.choice(LOADERS), "rows": chance.choice([14, 18, 23, 30]), "accumulation": chance.choice([1, 1, 2, 3]),
        "evaluation": chance.choice(["none", "samples", "plain"]), "duration": chance.choice(["3ep", "9ba", "5st", "50sp"]),
        "every": chance.choice(["1ba", "3ba", "1ep", "2st", None]), "scheduler": chance.choice(list(SCHEDULERS)),
        "per_epoch": chance.random() < 0.5, "nan": chance.choice([0, 0, 4]), "policy": chance.choice(["skip", "skip", "rollback"]),
        "limit": chance.choice([None, None, None, 3]), "algorithms": chance.sample(list(ALGORITHMS), chance.choice([0, 0, 1, 2])),
        "callbacks": chance.sample(list(CALLBACKS), chance.choice([0, 1, 2])), "units": chance.random() < 0.1,
    }  # fmt: skip
    if one["units"]:  # whose model evaluates otherwise
        one.update(evaluation="none", algorithms=[])
    one["interval"] = None if one["evaluation"] == "none" else chance.choice([None, 1, "2ba", "2st", "0.2dur"])
    if one["policy"] == "rollback" or "rollback" in one["callbacks"]:  # a stop saves, and so adds a state to return to
        return one, [("error", chance.random()) for _ in range(chance.choice([1, 1, 2, 3]))]
    return one, [(chance.choice(CUTS), chance.random()) for _ in range(chance.choice([1, 1, 2, 3]))]


def run(one, folder, batches, kind="", at=0, seed=0):
    """Run a composition to its end or to an interruption; return what it ends with, None if it was interrupted, and its events."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    loss = SometimesNan()
    loss.every, trace = one["nan"], Trace(batches, kind, at)
    if one["units"]:
        model, shared = Pair(), {"grad_clip": 1.0}
        first = ConstantLr(
            "SGD", {"lr": 0.1}, model, optim_loss="encoder_loss", updated_modules="encoder", step_per_update=2, **shared
        )
        second = NoamLr(
            "AdamW", {"lr": 0.2}, model, optim_loss="decoder_loss", updated_modules="decoder", warmup_steps=3, **shared
        )
        optimizer: object = OptimSet(encoder=first, decoder=second)
    else:
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), Counted(), nn.Linear(8, 3)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    callbacks = [CALLBACKS[name](folder) for name in one["callbacks"]]
    trainer = (TwoLosses if one["units"] else Trainer)(
        model, loss, optimizer, [*callbacks, trace], algorithms=[ALGORITHMS[name]() for name in one["algorithms"]]
    )
    data, evaluation = loader_of(one["data"], one["rows"]), one["evaluation"]
    options = {} if isinstance(data, DataLoader) else {"train_dataloader_kwargs": {"num_workers": 0}}
    if evaluation == "samples":
        options["eval_dataloader_kwargs"] = {"num_workers": 0}
    try:
        trainer.train(
            data, None, None if evaluation == "none" else loader_of(evaluation, 9), 4, max_duration=one["duration"],
            gradient_accumulation_steps=one["accumulation"], create_scheduler_fn=SCHEDULERS[one["scheduler"]],
            scheduler_interval="epoch" if one["per_epoch"] else "step", eval_interval=one["interval"],
            limit_train_batches=one["limit"], nonfinite=NonFinitePolicy(action=one["policy"], limit=1000, every=3),
            checkpoint_dir=folder / "checkpoints", checkpoint_every=one["every"], resume_from="auto", async_checkpoint=False, **options,
        )  # fmt: skip
    except (InterruptedError, SystemExit):
        return None, trace.passed
    state, history = trainer.state, trainer.run_history
    names = [name for name in history.get_metric_names() if "time" not in name]
    plugins = [plugin for plugin in (*state.algorithms, *state.callbacks) if hasattr(plugin, "state_dict")]
    end = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        "schedulers": [plain_scheduler_state(scheduler) for scheduler in state.schedulers],
        "plugins": {type(plugin).__name__: plugin.state_dict() for plugin in plugins},
        "history": {name: list(zip(history.get_metric_values(name), history.get_metric_steps(name))) for name in names},
        "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "clock": [
            state.clock.epoch,
            state.clock.batch,
            state.clock.batch_in_epoch,
            state.clock.sample,
            state.clock.step,
        ],
        "batches": dict(batches),
    }
    return flat_values(end), trace.passed


def check(one, cuts, folder, whole=None):
    """Compare a composition that is interrupted and resumed with the same one left alone, and return the end of that one.

    None: its parts do not go together.
    """
    one = PLAIN | one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, events = whole = whole or run(one, folder / "whole", {})
        except (DrivetrainError, ValueError):
            return None
        batches: dict = {}
        for seed, (kind, part) in enumerate(
            [*cuts, ("", 0)]
        ):  # the program draws other numbers each time, as without a seed
            if not any(
                (folder / "cut" / "checkpoints").glob("checkpoint-*")
            ):  # nothing was saved, so it starts from the beginning
                batches.clear()
                seed = 0
            found, _ = run(one, folder / "cut", batches, kind, 1 + int(part * events) if kind else 0, seed)
            if found is not None:
                break
    assert found.keys() == expected.keys(), (one, cuts)
    for name, value in expected.items():
        assert _alike(value, found[name]), (name, value, found[name], one, cuts)
    return whole


def _alike(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.nan_to_num(), other.nan_to_num())
    return repr(one) == repr(other)


@pytest.mark.parametrize("name", NAMED)
def test_what_was_once_lost_is_kept(name, tmp_path):
    one, cuts = NAMED[name]
    whole = None
    for number, several in enumerate(cuts):
        whole = check(one, several, tmp_path / str(number), whole)
        assert whole


@pytest.mark.parametrize("seed", range(3))
def test_a_composition_of_chance_continues_as_if_it_had_not_stopped(seed, tmp_path):
    check(*draw(seed), tmp_path)


@pytest.mark.slow
def test_many_compositions_of_chance_continue_as_if_they_had_not_stopped(tmp_path):
    tried = [check(*draw(seed), tmp_path / str(seed)) is not None for seed in range(100, 400)]
    assert sum(tried) > 150
