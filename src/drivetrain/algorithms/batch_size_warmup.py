"""Batch size warm-up (Smith et al., 2018, arXiv 1711.00489): small batches while gradients agree, large ones later.

How large a batch still helps grows during training (McCandlish et al., 2018, arXiv 1812.06162). The batch of an update is the
batches of an accumulation window. A window starts with fewer of them and grows to the run's `gradient_accumulation_steps`; it
never changes its length once it is open.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch.optim import Optimizer

from drivetrain.algorithms.utils.run import progress_to
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger, Time, TimeUnit, ensure_time
from drivetrain.core.arguments import check_choice, check_fractions
from drivetrain.core.types import StateDict

Rule = Literal["sqrt", "linear", "none"]


def learning_rate_factor(share: float, rule: Rule) -> float:
    """Return what a batch that is a `share` of the full one does to the learning rate.

    >>> learning_rate_factor(0.25, "sqrt")
    0.5
    """
    return math.sqrt(share) if rule == "sqrt" else share if rule == "linear" else 1.0


class BatchSizeWarmup(Algorithm):
    """Grows the batch of an update from a fraction `initial` to the whole during `duration`, and the learning rate with it.

    The learning rate is multiplied for the length of a step only, so that schedulers never see the factor.
    """

    allow_multiple = False
    events = frozenset({Event.BEFORE_LOAD, Event.BATCH_START, Event.BEFORE_STEP, Event.AFTER_STEP})
    writes = ("settings", "optimizers")

    def __init__(self, initial: float = 0.25, duration: str | Time = "0.3dur", lr_rule: Rule = "sqrt"):
        check_fractions("BatchSizeWarmup", initial=initial)
        check_choice("lr_rule", lr_rule, ("sqrt", "linear", "none"), owner="BatchSizeWarmup")
        self.initial, self.duration, self.lr_rule = initial, ensure_time(duration, TimeUnit.BATCH), lr_rule
        self._length: int | None = None
        self._window: Any = None  # the Trainer's, which counts the batches of an update
        self._rates: list[tuple[dict[str, object], object]] = []

    def length_at(self, state: State) -> int:
        """Return how many batches the window that opens now has."""
        full = state.accumulation_steps
        share = self.initial + (1 - self.initial) * progress_to(self.duration, state, str(self))
        return min(full, max(1, round(full * share)))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BEFORE_LOAD:
            self._window = vars(state)["gradients"].window
        elif event is Event.BATCH_START:
            self._set_length(state, logger)
        elif event is Event.BEFORE_STEP:
            self._scale_rates(state)
        else:
            for group, rate in self._rates:
                group["lr"] = rate
            self._rates = []

    def _set_length(self, state: State, logger: Logger) -> None:
        if state.accumulation_steps < 2:
            raise ConfigError(
                "BatchSizeWarmup grows the number of batches per update, and gradient_accumulation_steps is "
                f"{state.accumulation_steps}. Split the full batch: smaller batches, and gradient_accumulation_steps of 4 or more."
            )
        if self._window.count == 0 or self._length is None:
            length = self.length_at(state)
            if length != self._length:
                self._length = length
                logger.log_metrics({"batch_size_warmup/batches_per_update": length})
        self._window.length = self._length

    def _scale_rates(self, state: State) -> None:
        assert self._length is not None
        factor = learning_rate_factor(self._length / state.accumulation_steps, self.lr_rule)
        if factor == 1:
            return
        for optimizer in state.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"BatchSizeWarmup(lr_rule={self.lr_rule!r}) changes learning rates of torch optimizers; this run has a "
                    f"{type(optimizer).__name__}. Use lr_rule='none'."
                )
            for group in optimizer.param_groups:
                self._rates.append((group, group["lr"]))
                group["lr"] = group["lr"] * factor

    def state_dict(self) -> StateDict:
        return {"length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._length = state["length"]
        if self._window is not None and self._length is not None:
            # Before the gradients of an open window are loaded, which are parts of it.
            self._window.length = self._length
