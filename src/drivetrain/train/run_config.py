"""The facts of a training run, fixed before its first step, for hooks, callbacks and schedulers to read."""

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TrainerRunConfig:
    """What `train()` was asked for and what follows from it."""

    num_epochs: int | None
    train_per_device_batch_size: int | None
    train_dl_kwargs: dict[str, Any] | None
    """The arguments the training loader was built with; None when the user built it."""
    eval_per_device_batch_size: int | None
    eval_dl_kwargs: dict[str, Any] | None
    """The arguments the evaluation loader was built with; None without one."""
    gradient_accumulation_steps: int
    gradient_clip_value: float | None
    train_total_batch_size: int | None
    """Samples per optimizer update, over all processes."""
    eval_total_batch_size: int | None
    num_update_steps_per_epoch: int | None
    """Updates of an epoch counted over all processes; None when the loader has no length."""
    num_local_update_steps_per_epoch: int | None
    """Updates that happen in an epoch: what a schedule counts in."""
    max_num_train_steps: int | None
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str
    num_processes: int
    gradient_clip_norm: float | None = None
    max_duration: str | None = None
    microbatch_size: int | str | None = None
    precision: str | None = None
    seed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields; containers are copied, what is in them (a generator, a sampler) is not."""
        return {field.name: _copy_containers(getattr(self, field.name)) for field in fields(self)}


def count_update_steps(num_batches: int, num_processes: int, gradient_accumulation_steps: int) -> tuple[int, int]:
    """Return the updates of an epoch over all processes and on each, for so many batches per process.

    >>> count_update_steps(20, num_processes=4, gradient_accumulation_steps=1)
    (80, 20)
    """
    return (
        math.ceil(num_batches * num_processes / gradient_accumulation_steps),
        math.ceil(num_batches / gradient_accumulation_steps),
    )


def _copy_containers(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_containers(item) for item in value]
    return value
