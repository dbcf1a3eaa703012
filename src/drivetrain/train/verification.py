"""`verify_resume`: check that a user's own run resumes exactly.

It runs N steps. Then, from the same start, it runs half of them, saves, rebuilds everything, resumes, and runs the rest. It
compares the two results tensor by tensor, the learning rates step by step, and all recorded values, including evaluations. A run
that cannot resume exactly (a loader without a position, a layer with hidden state, an evaluation that draws from a generator that
is not saved) shows here, with the names of the parts that differ. Loaders and datasets are the same objects in all runs. Their
generators are reset before each run, as in a new process.
"""

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain.core.arguments import check_count
from drivetrain.core.containers import join_path
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Settings
from drivetrain.module.wrapping import clean_state_dict
from drivetrain.runtime.collectives import bytes_of
from drivetrain.runtime.seeds import preserve_rng_state
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.checkpoints import plain_scheduler_state
from drivetrain.train.loaders import is_ready_loader
from drivetrain.train.run import load_loader_state, loader_state

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ResumeVerdict:
    """Whether the resumed run ended like the uninterrupted one."""

    is_exact: bool
    num_steps: int
    first_difference: str | None = None
    """The name of the first tensor or value that differs."""
    largest_error: float = 0.0
    """The largest absolute difference of that tensor or number."""
    differences: dict[str, str] = field(default_factory=dict)
    """The parts that differ (model, optimizer, random numbers, schedule, learning rates, evaluation, history), each with the name of the
    first value that does."""

    def __str__(self) -> str:
        if self.is_exact:
            return f"bit-exact: yes ({self.num_steps} updates, interrupted after {self.num_steps // 2})"
        first = f"{self.first_difference} (largest error {self.largest_error:.3g})"
        parts = ", ".join(f"{part} (first: {name})" for part, name in self.differences.items())
        return f"bit-exact: no; first difference: {first}. Parts that differ: {parts}"


def verify_resume(
    build: "Callable[[], Trainer]", train_dataset: object, num_steps: int = 8, *, seed: int = 0, **train_kwargs: object
) -> ResumeVerdict:
    """Check that a run resumes bit for bit.

    Args:
        build: a function that returns a new Trainer.
        train_dataset: what it trains on.
        num_steps: updates of the run; it is interrupted after half of them.
        seed: set before each run.
        **train_kwargs: further arguments of `Trainer.train`.

    >>> from drivetrain import Trainer
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    >>> def build():
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    ...     return Trainer(model, torch.nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=())
    >>> verdict = verify_resume(build, data, per_device_batch_size=4)  # doctest: +ELLIPSIS
    No checkpoint under ...
    Resumed ...: epoch 1, batch 4, 4 updates done.
    >>> verdict.is_exact
    True
    """
    hint = ", half before and half after the interruption"
    check_count("num_steps", num_steps, at_least=2, owner="verify_resume", hint=hint)
    reserved = {"max_num_train_steps", "checkpoint_dir", "resume_from", "checkpoint_every"} & set(train_kwargs)
    if reserved:
        raise ConfigError(f"verify_resume sets {', '.join(sorted(reserved))} itself; remove it.")
    evaluation = train_kwargs.get("eval_dataset")
    given = [train_dataset, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])]
    loaders = [data if is_ready_loader(data) else SimpleNamespace(dataset=data) for data in given]
    start = [(loader, loader_state(loader)) for loader in loaders]

    def run(seed: int, folder: str | None = None, stop_at: int | None = None) -> dict[str, object]:
        for loader, state in start:
            load_loader_state(loader, state, 0)
        torch.manual_seed(seed)
        return _run(build(), train_dataset, num_steps, folder, train_kwargs, stop_at)

    with preserve_rng_state(), tempfile.TemporaryDirectory() as folder:
        whole = run(seed)
        half = run(seed, folder, stop_at=num_steps // 2)
        resumed = run(seed + 1, folder)
    return _compare(whole, {**half, **resumed}, num_steps)


class _Interrupted(Exception):
    """The run ends here, as if its process were killed."""


class _Rates(TrainerCallback):
    """Stores the learning rates of every update, and interrupts the run before one of them."""

    def __init__(self, stop_at: int | None):
        self.stop_at = stop_at
        self.by_step: dict[str, list[float]] = {}

    def on_train_step_start(self, trainer: "Trainer", **kwargs: object) -> None:
        step, optimizers = trainer.state.clock.step, trainer.state.optimizers
        rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        self.by_step[f"learning rates.update {step + 1}"] = rates
        if step == self.stop_at:
            raise _Interrupted


def _run(
    trainer: "Trainer", data: object, steps: int, folder: str | None, kwargs: Settings, stop_at: int | None
) -> dict[str, object]:
    """Train, and return everything that the run has computed, by name."""
    handler, rates, keeping = trainer.callback_handler, _Rates(stop_at), Settings()
    handler.add_callback(rates)
    if folder is not None:
        keeping = {
            "checkpoint_dir": folder,
            "checkpoint_every": "1st",
            "resume_from": "auto",
            "async_checkpoint": False,
        }
    try:
        trainer.train(data, max_num_train_steps=steps, **{"num_epochs": None, **kwargs}, **keeping)
    except _Interrupted:
        return flat_values(rates.by_step)
    finally:
        handler.callbacks = [callback for callback in handler if callback is not rates]
    history = trainer.run_history
    values = {name: history.get_metric_values(name) for name in history.get_metric_names()}
    return flat_values(
        {
            "model": clean_state_dict(trainer.model),
            "optimizer": trainer.optimizer.state_dict(),
            "random numbers": torch.get_rng_state(),
            "schedule": None if trainer.scheduler is None else plain_scheduler_state(trainer.scheduler),
            **rates.by_step,
            "evaluation": {name: values[name] for name in values if "eval" in name},
            "history": {name: values[name] for name in values if "eval" not in name},
            "history.steps": {name: list(history.get_metric_steps(name)) for name in values},
        }
    )


def flat_values(value: object, path: str = "") -> dict[str, object]:
    """Return the values in nested containers by their paths; tensors are copied."""
    if isinstance(value, dict):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value.detach().clone() if isinstance(value, Tensor) else value}
    return {k: v for key, item in items for k, v in flat_values(item, join_path(path, key)).items()}


def _compare(whole: dict[str, object], resumed: dict[str, object], steps: int) -> ResumeVerdict:
    errors = {name: difference(whole.get(name), resumed.get(name)) for name in dict.fromkeys((*whole, *resumed))}
    wrong = {name: error for name, error in errors.items() if error is not None}
    if not wrong:
        return ResumeVerdict(is_exact=True, num_steps=steps)
    differences: dict[str, str] = {}
    for name in wrong:
        differences.setdefault(name.partition(".")[0], name)
    first, error = next(iter(wrong.items()))
    return ResumeVerdict(
        is_exact=False, num_steps=steps, first_difference=first, largest_error=error, differences=differences
    )


def difference(whole: object, resumed: object) -> float | None:
    """Return by how much two values differ, NaN where that is not a number; None where they are the same to the bit."""
    if isinstance(whole, Tensor) and isinstance(resumed, Tensor) and whole.shape == resumed.shape:
        if whole.dtype == resumed.dtype and torch.equal(bytes_of(whole), bytes_of(resumed)):
            return None
        return (whole.cpu().double() - resumed.cpu().double()).abs().max().item()
    if whole is resumed or repr(whole) == repr(resumed):
        return None
    if isinstance(whole, int | float) and isinstance(resumed, int | float):
        return abs(whole - resumed)
    return math.nan
