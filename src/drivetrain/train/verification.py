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

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Settings
from drivetrain.module.wrapping import clean_state_dict
from drivetrain.runtime.seeds import capture_rng, restore_rng
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
    if num_steps < 2:
        raise ConfigError(
            f"verify_resume: num_steps={num_steps}: expected at least 2, half before and half after the interruption."
        )
    reserved = {"max_num_train_steps", "checkpoint_dir", "resume_from", "checkpoint_every"} & set(train_kwargs)
    if reserved:
        raise ConfigError(f"verify_resume sets {', '.join(sorted(reserved))} itself; remove it.")
    kept, data = capture_rng(), _Data(train_dataset, train_kwargs.get("eval_dataset"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            data.start_over()
            whole = _run(build, train_dataset, num_steps, seed, None, train_kwargs)
            data.start_over()
            half = _run(build, train_dataset, num_steps, seed, folder, train_kwargs, stop_at=num_steps // 2)
            data.start_over()
            resumed = _run(build, train_dataset, num_steps, seed + 1, folder, train_kwargs)
    finally:
        restore_rng(kept)
    return _compare(whole, {**half, **resumed}, num_steps)


class _Data:
    """The loaders and datasets that were given, and the state they began with."""

    def __init__(self, *given: object):
        each = [one for value in given for one in (value.values() if isinstance(value, dict) else [value])]
        self._start = [(one, loader_state(one)) for one in map(_as_loader, each)]

    def start_over(self) -> None:
        """Give every loader and dataset the state it began with."""
        for loader, state in self._start:
            load_loader_state(loader, state, 0)


def _as_loader(data: object) -> object:
    return data if is_ready_loader(data) else SimpleNamespace(dataset=data)


class _Interrupted(Exception):
    """The plug is pulled."""


class _Rates(TrainerCallback):
    """Keeps the learning rates of every update."""

    def __init__(self) -> None:
        self.by_step: dict[str, list[float]] = {}

    def on_train_step_start(self, trainer: "Trainer", **kwargs: object) -> None:
        optimizers = trainer.state.optimizers
        rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        self.by_step[f"learning rates.update {trainer.state.clock.step + 1}"] = rates


class _Interrupt(TrainerCallback):
    def __init__(self, at: int):
        self.at = at

    def on_train_step_start(self, trainer: "Trainer", **kwargs: object) -> None:
        if trainer.state.clock.step == self.at:
            raise _Interrupted


def _run(
    build: "Callable[[], Trainer]",
    data: object,
    steps: int,
    seed: int,
    folder: str | None,
    kwargs: Settings,
    stop_at: int | None = None,
) -> dict[str, object]:
    torch.manual_seed(seed)
    trainer = build()
    added: list[TrainerCallback] = [rates := _Rates()]
    if stop_at is not None:
        added.append(_Interrupt(stop_at))
    for callback in added:
        trainer.callback_handler.add_callback(callback)
    keeping: Settings = (
        {"checkpoint_dir": folder, "checkpoint_every": "1st", "resume_from": "auto", "async_checkpoint": False}
        if folder
        else {}
    )
    try:
        trainer.train(data, max_num_train_steps=steps, **{"num_epochs": None, **kwargs}, **keeping)
    except _Interrupted:
        return _flatten(rates.by_step)
    finally:
        trainer.callback_handler.callbacks = [
            callback for callback in trainer.callback_handler if callback not in added
        ]
    history = trainer.run_history
    values = {name: list(history.get_metric_values(name)) for name in history.get_metric_names()}
    recorded_at = {name: list(history.get_metric_steps(name)) for name in values}
    return _flatten(
        {
            "model": clean_state_dict(trainer.model),
            "optimizer": trainer.optimizer.state_dict(),
            "random numbers": torch.get_rng_state(),
            "schedule": None if trainer.scheduler is None else plain_scheduler_state(trainer.scheduler),
            **rates.by_step,
            "evaluation": {name: values[name] for name in values if _is_of_evaluation(name)},
            "history": {name: values[name] for name in values if not _is_of_evaluation(name)},
            "history.steps": recorded_at,
        }
    )


def _is_of_evaluation(name: str) -> bool:
    return "eval" in name


def _flatten(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value.detach().clone() if isinstance(value, Tensor) else value}
    return {k: v for key, item in items for k, v in _flatten(item, f"{path}.{key}" if path else str(key)).items()}


def _compare(whole: dict[str, object], resumed: dict[str, object], steps: int) -> ResumeVerdict:
    errors = {name: _error(whole.get(name), resumed.get(name)) for name in dict.fromkeys((*whole, *resumed))}
    wrong = {name: error for name, error in errors.items() if error is not None}
    if not wrong:
        return ResumeVerdict(is_exact=True, num_steps=steps)
    differences: dict[str, str] = {}
    for name in wrong:
        differences.setdefault(name.partition(".")[0], name)
    first = next(iter(wrong))
    return ResumeVerdict(
        is_exact=False, num_steps=steps, first_difference=first, largest_error=wrong[first], differences=differences
    )


def _error(whole: object, resumed: object) -> float | None:
    """Return by how much two values differ, NaN where that is not a number; None where they are the same."""
    if isinstance(whole, Tensor) and isinstance(resumed, Tensor) and whole.shape == resumed.shape:
        if torch.equal(whole.nan_to_num(), resumed.nan_to_num()):
            return None
        return (whole.double() - resumed.double()).abs().max().item()
    if whole is resumed or repr(whole) == repr(resumed):
        return None
    if isinstance(whole, int | float) and isinstance(resumed, int | float):
        return abs(whole - resumed)
    return math.nan
