"""Warm-up, stable, decay (Wen et al., 2024, "A River Valley Loss Landscape Perspective"): a schedule with several ends.

The rate rises, stays, and falls shortly before each checkpoint; after a checkpoint it is back at the base rate.
Checkpoints double in distance and the last one is the end: 2 of 100 000 updates are at 50 000 and 100 000. A later
run can continue from the weights before a decay (WSD) or after it (WSD-S): it has a length of its own and no warm-up.
"""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import StateDict
from drivetrain.optim.schedules import between, decay
from drivetrain.train.schedulers.scheduler_base import StatefulSchedulerBase, require, require_numbers
from drivetrain.train.settings import RunNumber, TrainerPlaceholderValues

_SHAPE = (
    *("num_warmup_steps", "decay_phase_ratio", "lr_min", "warmup_starting_lr"),
    *("use_inverse_sqrt_decay", "num_checkpoints"),
)


class WSDLrScheduler(StatefulSchedulerBase):
    """Keeps the base rate and lowers it before each checkpoint. `WSDCheckpointCallback` saves at those steps."""

    saved = ("total_steps", *_SHAPE, "is_continuation_from_checkpoint", "num_updates")

    def __init__(
        self,
        optimizer: Optimizer,
        num_epochs: int | None = None,
        num_update_steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        num_warmup_steps: float | None = 0,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ):
        given = dict(locals())
        super().__init__(optimizer)
        require_numbers(given, "num_epochs", "num_update_steps_per_epoch", "total_steps", "num_checkpoints", above=0)
        require_numbers(given, "num_warmup_steps", "warmup_starting_lr", at_least=0)
        require_numbers(given, "decay_phase_ratio", at_least=0, at_most=1, hint=", a fraction of a period")
        require_numbers(given, "lr_min", at_least=0, at_most=1, hint=", a fraction of the base rate")
        for name in ("use_inverse_sqrt_decay", "is_continuation_from_checkpoint"):
            require(isinstance(given[name], bool), f"{name}={given[name]!r}: expected True or False.")
        length = (num_epochs, num_update_steps_per_epoch)
        if total_steps is None and num_epochs is not None and num_update_steps_per_epoch is not None:
            total_steps = num_epochs * num_update_steps_per_epoch
        elif total_steps is None or length != (None, None):
            raise ConfigError(
                f"num_epochs={num_epochs}, num_update_steps_per_epoch={num_update_steps_per_epoch}, total_steps={total_steps}: the length "
                f"is {'missing' if total_steps is None else 'set twice'}. Pass total_steps alone, or the other two without it."
            )
        self.total_steps = total_steps
        self.num_warmup_steps = int(0.01 * self.total_steps) if num_warmup_steps is None else num_warmup_steps
        self.decay_phase_ratio = decay_phase_ratio
        self.lr_min = lr_min  # a fraction of the base rate
        self.warmup_starting_lr = warmup_starting_lr
        self.use_inverse_sqrt_decay = use_inverse_sqrt_decay
        self.num_checkpoints = num_checkpoints
        self.is_continuation_from_checkpoint = is_continuation_from_checkpoint
        ratio, count, highest = decay_phase_ratio, num_checkpoints, max(self.base_lr_values)
        require(
            self.total_steps >= 2 ** (count - 1),
            f"num_checkpoints={count} do not fit in total_steps={self.total_steps}; use at least {2 ** (count - 1)} "
            "steps.",
        )
        if warmup_starting_lr > highest:
            raise ConfigError(
                f"warmup_starting_lr={warmup_starting_lr} is above the base rate {highest}: the warm-up would "
                "lower the rate. Choose a smaller start."
            )
        if count > 1 and ratio > 1 / 3:
            raise ConfigError(
                f"decay_phase_ratio={ratio} with num_checkpoints={count}: decays take at most a third of a period "
                "when there are several. Use a ratio up to 0.33, or one checkpoint."
            )
        self._plan()
        self.step_update(0)

    def _plan(self) -> None:
        self.checkpoint_steps = estimate_checkpoint_steps(self.total_steps, self.num_checkpoints)
        self.checkpoint_decay_info = []
        for start, end in zip([0, *self.checkpoint_steps], self.checkpoint_steps):
            decay_steps = int((end - start) * self.decay_phase_ratio)
            period = {"period_start": start, "period_end": end}
            self.checkpoint_decay_info.append(
                {**period, "decay_steps": decay_steps, "pre_decay_step": end - decay_steps}
            )

    def get_checkpoint_steps(self) -> list[int]:
        """Return the updates after which a decay is complete."""
        return self.checkpoint_steps

    def get_decay_info(self) -> list[dict[str, int]]:
        """Return start, end, decay length and the update before the decay, for every period."""
        return self.checkpoint_decay_info

    def get_phase_info(self, num_updates: int) -> dict[str, int]:
        """Return the period that contains this many updates. The end of a period belongs to it."""
        return self._period(num_updates - 1)

    def get_current_step(self) -> int:
        """Return the number of updates for the current rate."""
        return max(self._num_updates, 0)

    def get_current_phase_info(self) -> dict[str, int]:
        """Return the period the schedule is in."""
        return self.get_phase_info(self.get_current_step())

    def _get_checkpoint_info(self, num_updates: int) -> tuple[int, int]:
        """Return the length of the period that comes next and the updates done in it."""
        period = self._period(num_updates)
        return period["period_end"] - period["period_start"], num_updates - period["period_start"]

    _get_checkpoint_info.cache_clear = lambda: None  # type: ignore[attr-defined]  # callers may clear; nothing is cached

    def _period(self, num_updates: int) -> dict[str, int]:
        periods = self.checkpoint_decay_info
        return next((period for period in periods if num_updates < period["period_end"]), periods[-1])

    def get_updated_values(self, num_updates: int) -> list[float]:
        if not self.is_continuation_from_checkpoint and num_updates < self.num_warmup_steps:
            start, done = self.warmup_starting_lr, num_updates / self.num_warmup_steps
            return [between(base, start, done) for base in self.base_lr_values]
        period, lowest, factor = self._period(num_updates), self.lr_min, 1.0
        into_decay = num_updates - period["pre_decay_step"]
        if into_decay > 0 and period["decay_steps"]:
            t = min(into_decay / period["decay_steps"], 1.0)
            if self.use_inverse_sqrt_decay:
                factor = decay(t, "sqrt", lowest)
            else:
                factor = decay(t, "inverse", lowest) if lowest else 0.0
        return [base * factor for base in self.base_lr_values]

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: RunNumber = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: RunNumber = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        num_warmup_epochs: RunNumber | None = None,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> "Callable[[Optimizer], WSDLrScheduler]":
        """Return a function of the optimizer for `train(create_scheduler_fn=...)`, which fills in the length."""
        arguments = dict(locals())
        del arguments["cls"], arguments["num_warmup_epochs"]
        arguments["num_epochs"] = arguments.pop("total_num_epochs")
        steps = None if num_warmup_epochs is None else num_warmup_epochs * num_update_steps_per_epoch
        return partial(cls, **arguments | {"num_warmup_steps": steps})

    def restart(self) -> None:
        """Start counting from the beginning, as a continuation does."""
        self._num_updates = -1
        self.step_update(0)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the curve. A continuation keeps its own length and starts from 0, unless the state is its own."""
        state = {name: state_dict[name] for name in self.saved if name in state_dict}
        is_own = state.get("is_continuation_from_checkpoint") and state.get("total_steps") == self.total_steps
        if self.is_continuation_from_checkpoint and not is_own:
            vars(self).update({name: state[name] for name in _SHAPE if name in state})
            self._plan()
            self.restart()
        else:
            super().load_state_dict(state)
            self._plan()


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int) -> list[int]:
    """Return the ends of the periods, each twice the previous one.

    >>> estimate_checkpoint_steps(200_000, 3)
    [50000, 100000, 200000]
    """
    return [total_steps // 2 ** (num_checkpoints - 1 - index) for index in range(num_checkpoints)]
