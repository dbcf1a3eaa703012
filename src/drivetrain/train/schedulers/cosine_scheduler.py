"""Cosine annealing (Loshchilov and Hutter, 2016) without restarts, with warm-up, cool-down and k-decay.

k-decay (Zhang and Li, 2020) raises the position to a power before the cosine is taken.
"""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer

from drivetrain.core.types import StateDict
from drivetrain.optim.schedules import between, cosine
from drivetrain.train.schedulers.scheduler_base import StatefulSchedulerBase, require, require_numbers
from drivetrain.train.settings import RunNumber, TrainerPlaceholderValues


class CosineLrScheduler(StatefulSchedulerBase):
    """Rises linearly to the base rate, falls along half a cosine to the minimum, and stays there.

    With T total, W warm-up and C cool-down updates the rate falls between W and T - C; `k_decay` above 1 keeps
    the rate high for longer. Ratios are fractions of each group's base rate and win over the absolute values.

    Args:
        optimizer: the optimizer whose rates are set.
        total_num_epochs: epochs of the run.
        num_update_steps_per_epoch: updates of an epoch in one process.
        k_decay: exponent of the progress inside the cosine.
        lr_min: the last rate.
        min_lr_ratio: the last rate as a fraction of the base rate.
        num_warmup_epochs: epochs of linear warm-up.
        warmup_starting_lr: the first rate.
        warmup_starting_lr_ratio: the first rate as a fraction of the base rate.
        num_cooldown_epochs: epochs at the last rate.

    >>> from torch import nn, optim
    >>> sgd = optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    >>> CosineLrScheduler(sgd, total_num_epochs=2, num_update_steps_per_epoch=10, num_warmup_epochs=1).total_iterations
    20
    """

    saved = (
        *("total_iterations", "lr_min_ratio", "lr_min", "warmup_iterations", "warmup_lr_init", "warmup_lr_ratio"),
        *("k_decay", "num_cooldown_iterations", "num_updates"),
    )

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_epochs: int,
        num_update_steps_per_epoch: int,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ):
        given = dict(locals())
        super().__init__(optimizer)
        require_numbers(given, "total_num_epochs", "num_update_steps_per_epoch", "k_decay", above=0)
        require_numbers(given, "lr_min", "warmup_starting_lr", "num_warmup_epochs", "num_cooldown_epochs", at_least=0)
        hint = ", a fraction of the base rate"
        require_numbers(given, "min_lr_ratio", "warmup_starting_lr_ratio", at_least=0, at_most=1, hint=hint)
        require(
            num_warmup_epochs + num_cooldown_epochs <= total_num_epochs,
            f"num_warmup_epochs={num_warmup_epochs} and num_cooldown_epochs={num_cooldown_epochs} do not fit in "
            f"total_num_epochs={total_num_epochs}, which includes both.",
        )
        self.total_iterations = total_num_epochs * num_update_steps_per_epoch
        self.lr_min_ratio = min_lr_ratio
        self.lr_min = lr_min
        self.warmup_iterations = num_warmup_epochs * num_update_steps_per_epoch
        self.warmup_lr_init = warmup_starting_lr
        self.warmup_lr_ratio = warmup_starting_lr_ratio
        self.k_decay = k_decay
        self.num_cooldown_iterations = num_cooldown_epochs * num_update_steps_per_epoch
        self.step_update(0)

    def get_updated_values(self, num_updates: int) -> list[float]:
        return [self._rate(base, num_updates) for base in self.base_lr_values]

    def _rate(self, base: float, num_updates: int) -> float:
        warmup, end = self.warmup_iterations, self.total_iterations - self.num_cooldown_iterations
        lowest = self.lr_min if self.lr_min_ratio is None else self.lr_min_ratio * base
        if num_updates < warmup:
            start = self.warmup_lr_init if self.warmup_lr_ratio is None else self.warmup_lr_ratio * base
            return start + num_updates * (base - start) / warmup
        if num_updates < end:
            return between(base, lowest, cosine((num_updates - warmup) / (end - warmup), self.k_decay))
        return lowest

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: RunNumber = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: RunNumber = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: RunNumber = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: RunNumber = 0,
    ) -> "Callable[[Optimizer], CosineLrScheduler]":
        """Return a function of the optimizer for `train(create_scheduler_fn=...)`, which fills in the length."""
        arguments = dict(locals())
        return partial(arguments.pop("cls"), **arguments)

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict({name: state_dict[name] for name in self.saved})
