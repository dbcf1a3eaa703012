"""`verify_resume`: a certificate that a user's own run continues exactly.

It runs N steps; then, from the same start, half of them, saves, rebuilds everything, resumes, and runs the rest; and compares the
two ends tensor by tensor. A run that cannot continue exactly (a loader without a place, a layer with hidden state) shows here, by
the name of the first tensor that differs.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrapping import clean_state_dict
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train.callbacks import TrainerCallback


@dataclass(frozen=True, kw_only=True)
class ResumeVerdict:
    """Whether the resumed run ended like the unbroken one."""

    is_exact: bool
    num_steps: int
    first_difference: str | None = None
    """The name of the first tensor or value that differs."""
    largest_error: float = 0.0
    """The largest absolute difference of that tensor."""

    def __str__(self) -> str:
        if self.is_exact:
            return f"bit-exact: yes ({self.num_steps} updates, interrupted after {self.num_steps // 2})"
        return f"bit-exact: no; first difference: {self.first_difference} (largest error {self.largest_error:.3g})"


def verify_resume(
    build: Callable[[], Any], train_dataset: Any, num_steps: int = 8, *, seed: int = 0, **train_kwargs: Any
) -> ResumeVerdict:
    """Check that a run built by `build()` (which returns a fresh Trainer) resumes bit for bit.

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
        raise ConfigError(f"verify_resume sets {', '.join(sorted(reserved))} itself; leave it out.")
    kept = capture_rng()
    try:
        with tempfile.TemporaryDirectory() as folder:
            whole = _run(build, train_dataset, num_steps, seed, None, train_kwargs)
            _run(build, train_dataset, num_steps, seed, folder, train_kwargs, stop_at=num_steps // 2)
            resumed = _run(build, train_dataset, num_steps, seed + 1, folder, train_kwargs)
    finally:
        restore_rng(kept)
    return _compare(whole, resumed, num_steps)


class _Interrupted(Exception):
    """The plug is pulled."""


class _Interrupt(TrainerCallback):
    def __init__(self, at: int):
        self.at = at

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.state.clock.step == self.at:
            raise _Interrupted


def _run(
    build: Callable[[], Any],
    data: Any,
    steps: int,
    seed: int,
    folder: str | None,
    kwargs: dict[str, Any],
    stop_at: int | None = None,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    trainer = build()
    if stop_at is not None:
        trainer.callback_handler.add_callback(_Interrupt(stop_at))
    keeping = (
        {"checkpoint_dir": folder, "checkpoint_every": "1st", "resume_from": "auto", "async_checkpoint": False}
        if folder
        else {}
    )
    try:
        trainer.train(data, max_num_train_steps=steps, **{"num_epochs": None, **kwargs}, **keeping)
    except _Interrupted:
        return {}
    finally:
        if stop_at is not None:
            trainer.callback_handler.callbacks = [c for c in trainer.callback_handler if not isinstance(c, _Interrupt)]
    return _flatten(
        {
            "model": clean_state_dict(trainer.model),
            "optimizer": trainer.optimizer.state_dict(),
            "random numbers": torch.get_rng_state(),
            "history": {
                name: list(trainer.run_history.get_metric_values(name))
                for name in trainer.run_history.get_metric_names()
            },
        }
    )


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value.detach().clone() if isinstance(value, Tensor) else value}
    return {k: v for key, item in items for k, v in _flatten(item, f"{path}.{key}" if path else str(key)).items()}


def _compare(whole: dict[str, Any], resumed: dict[str, Any], steps: int) -> ResumeVerdict:
    for name in dict.fromkeys((*whole, *resumed)):
        a, b = whole.get(name), resumed.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
            if not torch.equal(a.nan_to_num(), b.nan_to_num()):
                error = (a.double() - b.double()).abs().max().item()
                return ResumeVerdict(is_exact=False, num_steps=steps, first_difference=name, largest_error=error)
        elif a is not b and repr(a) != repr(b):
            return ResumeVerdict(is_exact=False, num_steps=steps, first_difference=name, largest_error=float("nan"))
    return ResumeVerdict(is_exact=True, num_steps=steps)
