"""The learning-rate range test (Smith, 2017): raise the rate exponentially, watch the loss, restore everything."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from drivetrain.context.context import Context
from drivetrain.core.arguments import check_count, check_number
from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import ConfigError, StopTrainingError, needs_package
from drivetrain.core.types import Settings
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.run import current_run, set_current_run
from drivetrain.train import loaders
from drivetrain.train.batches import BatchOutput, map_tensors
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.evaluation import discarded_history, restored_modes
from drivetrain.train.run import load_loader_state, loader_state

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from drivetrain.train.trainer import Trainer

LONGEST_SWEEP = 1_000_000
IGNORED_START, IGNORED_END = 10, 1  # the first losses are noise, the last one is the divergence


@dataclass(frozen=True)
class LrFindResult:
    """The result of the sweep."""

    lrs: list[float]
    losses: list[float]
    """Smoothed losses, one per learning rate."""
    suggestion: float | None
    """The rate where the smoothed loss falls most steeply; None if it never falls."""

    def plot(self, path: str | None = None) -> "Figure":
        """Draw loss over learning rate; with a path, write it there as PNG."""
        with needs_package("matplotlib", "demo", "LrFindResult.plot"):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.lrs, self.losses)
        axes.set(xscale="log", xlabel="learning rate", ylabel="smoothed loss")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", label=f"suggestion {self.suggestion:.2e}")
            axes.legend()
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


class _Sweep(TrainerCallback):
    """Sets the rate before each update and keeps the loss after it."""

    def __init__(self, rates: list[float], smoothing: float, diverge_ratio: float):
        self.rates, self.smoothing, self.diverge_ratio = rates, smoothing, diverge_ratio
        self.losses: list[float] = []
        self._window: list[float] = []  # the losses of this update's batches
        self._average, self._best = 0.0, float("inf")

    def on_train_step_start(self, trainer: "Trainer", **kwargs: object) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = self.rates[len(self.losses)]

    def on_train_step_end(self, trainer: "Trainer", batch: object, batch_output: BatchOutput, **kwargs: object) -> None:
        self._window.append(float(batch_output["loss"].detach()))
        if not trainer.run.stepper.window.closes:
            return
        loss, self._window = fmean(self._window), []
        self._average = self.smoothing * self._average + (1 - self.smoothing) * loss
        smoothed = self._average / (1 - self.smoothing ** (len(self.losses) + 1))
        self.losses.append(smoothed)
        self._best = min(self._best, smoothed)
        if smoothed != smoothed or smoothed > self.diverge_ratio * self._best:
            raise StopTrainingError("the loss diverged")


def find_lr(
    trainer: "Trainer",
    train_dataset: object,
    min_lr: float,
    max_lr: float,
    num_steps: int,
    smoothing: float,
    diverge_ratio: float,
    train_kwargs: Settings,
) -> LrFindResult:
    """Run the sweep in the trainer's own loop and restore weights, optimizer, counters and generators exactly."""
    for name, rate in {"min_lr": min_lr, "max_lr": max_lr}.items():
        check_number(name, rate, above=0, owner="lr_find")
    check_number("smoothing", smoothing, at_least=0, below=1, owner="lr_find")
    check_number("diverge_ratio", diverge_ratio, above=0, infinite=True, owner="lr_find")
    check_count("num_steps", num_steps, at_least=2, owner="lr_find")
    if num_steps > LONGEST_SWEEP:
        raise ConfigError(f"lr_find(num_steps={num_steps}): expected at most {LONGEST_SWEEP}; 100 are usual.")
    if not min_lr < max_lr:
        raise ConfigError(f"lr_find: min_lr={min_lr} and max_lr={max_lr}: expected 0 < min_lr < max_lr.")
    if not isinstance(trainer.optimizer, torch.optim.Optimizer):
        kind = type(trainer.optimizer).__name__
        raise ConfigError(f"lr_find sweeps the rate of one torch optimizer, and the Trainer's is a {kind}.")
    rates = [min_lr * (max_lr / min_lr) ** (k / (num_steps - 1)) for k in range(num_steps)]
    sweep = _Sweep(rates, smoothing, diverge_ratio)
    with _restored(trainer, train_dataset), with_attributes(trainer.callback_handler, callbacks=[sweep]):
        # A sweep saves nothing, also inside an experiment.
        kwargs = {**train_kwargs, "log_every": None, "checkpoint_dir": None, "resume_from": None}
        trainer.train(train_dataset, max_num_train_steps=num_steps, **kwargs)
    losses = broadcast_from_master(sweep.losses)  # so that all ranks continue with the same rate
    lrs = rates[: len(losses)]
    return LrFindResult(lrs, losses, _steepest_fall(lrs, losses))


@contextmanager
def _restored(trainer: "Trainer", data: object) -> Iterator[None]:
    """Restore everything that a sweep may change."""
    copied = lambda tensor: tensor.detach().clone()
    before = map_tensors(copied, Context(model=trainer.model, optimizer=trainer.optimizer).state_dict())
    state, clock, experiment = trainer.state, trainer.state.clock.state_dict(), current_run()
    loader = data if loaders.is_ready_loader(data) else SimpleNamespace(dataset=data)
    position = loader_state(loader)
    with (
        state.preserve_random(),
        discarded_history(trainer.logbook),
        with_attributes(trainer.run.shared, "scheduler_is_ours"),
        with_attributes(state, "schedulers", "rank_zero_seed"),
        with_attributes(trainer, "run", "train_dataset", "eval_dataset", "create_scheduler_fn", "collate_fn"),
        with_attributes(trainer, _resume_next=None),
        restored_modes(trainer.model),
    ):
        set_current_run(None)
        try:
            yield
        finally:
            set_current_run(experiment)
            load_loader_state(loader, position, 0)
            trainer.model = trainer.get_model()
            # A split one holds another.
            for held in (trainer.optimizer, getattr(trainer.optimizer, "optim", trainer.optimizer)):
                held.state.clear()
            # A plan may have split them.
            Context(model=trainer.model, optimizer=trainer.optimizer).load_state_dict(before)
            trainer.optimizer.zero_grad()
            state.clock.load_state_dict(clock)


def _steepest_fall(lrs: list[float], losses: list[float]) -> float | None:
    slopes = [
        ((losses[k + 1] - losses[k - 1]) / (math.log(lrs[k + 1]) - math.log(lrs[k - 1])), lrs[k])
        for k in range(IGNORED_START, len(losses) - IGNORED_END - 1)
    ]
    rounding = 1e-9 * max(map(abs, losses), default=0.0)  # a flat loss falls by rounding errors only
    slopes = [(slope, rate) for slope, rate in slopes if slope < -rounding]
    return min(slopes)[1] if slopes else None
