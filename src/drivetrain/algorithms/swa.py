"""Stochastic weight averaging (Izmailov et al., 2018, arXiv 1803.05407): the mean of the weights seen late in training.

The weights at `swa_start` are the first member of the mean, and every `update_interval` after that adds one. At `swa_end`, whose
weights belong to the mean when they are due, the mean takes the model's place. Batch norms then get the statistics of a pass over
training data, because no training batch has seen the mean's activations.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.algorithms.surgery import model_of, torch_optimizers, warn_no_effect
from drivetrain.algorithms.utils.passes import measure_batch_norms
from drivetrain.algorithms.utils.run import has_reached, num_batches
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger, Time, TimeUnit, ensure_time
from drivetrain.core.arguments import check_choice, check_counts, check_number
from drivetrain.core.types import StateDict
from drivetrain.module.average import AveragedWeights


def annealed_rate(start: float, end: float, share: float, strategy: str) -> float:
    """Return the learning rate on its way from `start` to `end`.

    >>> annealed_rate(1.0, 0.0, 0.25, "linear"), round(annealed_rate(1.0, 0.0, 0.25, "cos"), 4)
    (0.75, 0.8536)
    """
    reached = share if strategy == "linear" else (1 - math.cos(math.pi * share)) / 2
    return start + (end - start) * reached


class SWA(Algorithm):
    """Averages the weights from `swa_start` to `swa_end` and continues with the mean.

    With `schedule_swa_lr` the learning rate moves to `swa_lr` (None: stays where it is) over `anneal_steps` updates of the average,
    and the run's own scheduler rests from then on.
    """

    allow_multiple = False
    writes = ("model", "optimizers", "schedulers")
    tags = frozenset({"average"})
    conflicts = {
        "EMA": "both average the weights. Use one of them",
        "ScheduleFree": "schedule-free training averages the weights itself. Remove SWA",
    }

    def __init__(
        self,
        swa_start: str | Time = "0.7dur",
        swa_end: str | Time = "0.97dur",
        update_interval: str | Time = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: Literal["linear", "cos"] = "linear",
        anneal_steps: int = 10,
        swa_lr: float | None = None,
    ):
        self.swa_start, self.swa_end = ensure_time(swa_start, TimeUnit.EPOCH), ensure_time(swa_end, TimeUnit.EPOCH)
        self.update_interval = ensure_time(update_interval, TimeUnit.EPOCH)
        self._check_times()
        check_choice("anneal_strategy", anneal_strategy, ("linear", "cos"), owner="SWA")
        check_counts("SWA", 1, anneal_steps=anneal_steps)
        if swa_lr is not None:
            check_number("swa_lr", swa_lr, at_least=0, owner="SWA", hint=", a learning rate")
        self.schedule_swa_lr, self.anneal_strategy = schedule_swa_lr, anneal_strategy
        self.anneal_steps, self.swa_lr = anneal_steps, swa_lr
        self._update_event = Event.EPOCH_END if self.update_interval.unit is TimeUnit.EPOCH else Event.BATCH_END
        self.events = frozenset({Event.INIT, Event.FIT_START, self._update_event, Event.FIT_END})
        self._first_at: int | None = None  # the batch or epoch of the first member; the others are counted from it
        self._average: AveragedWeights | None = None
        self._restored: Mapping[str, object] | None = None
        self._first_rates: list[float] | None = None
        self.swa_completed = False
        self._state: State | None = None

    def _check_times(self) -> None:
        start, end, every = self.swa_start, self.swa_end, self.update_interval
        if start.unit is not end.unit or start.unit not in (TimeUnit.DURATION, TimeUnit.EPOCH):
            raise ConfigError(
                f"SWA(swa_start={str(start)!r}, swa_end={str(end)!r}): expected both as fractions of the run ('0.7dur') or both in epochs."
            )
        if not start < end:
            raise ConfigError(
                f"SWA(swa_start={str(start)!r}, swa_end={str(end)!r}): the start must come before the end."
            )
        if every.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or not every.value > 0:
            raise ConfigError(
                f"SWA(update_interval={str(every)!r}): expected batches or epochs, such as '100ba' or '1ep'."
            )

    @property
    def swa_started(self) -> bool:
        """Whether the mean has its first member."""
        return self._average is not None or self._restored is not None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        self._state = state
        if event is Event.INIT:
            return
        if self._restored is not None:  # a loaded mean, now that the model is there
            self._average, self._restored = AveragedWeights(model, self._restored), None
        if event is Event.FIT_START:
            self._warn_if_too_short(state)
        elif event is Event.FIT_END:
            if self.swa_started and not self.swa_completed:
                self._complete(model)
            if self.swa_completed:
                measure_batch_norms(state)  # of the final weights: steps after the swap have moved them
        elif not self.swa_completed and has_reached(self.swa_start, state, str(self)):
            self._update(state, model)

    def _update(self, state: State, model: nn.Module) -> None:
        now = int(state.clock.get(self.update_interval.unit).value)
        if self._first_at is None:
            self._first_at, self._average = now, AveragedWeights(model)
        if (now - self._first_at) % int(self.update_interval.value) == 0:
            assert self._average is not None
            self._average.update_mean(model)
            if self.schedule_swa_lr:
                self._anneal(state)
        if has_reached(self.swa_end, state, str(self)):
            self._complete(model)
            if self._update_event is Event.EPOCH_END:
                measure_batch_norms(state)  # for the evaluation that follows

    def _warn_if_too_short(self, state: State) -> None:
        """Warn when the run ends before the mean has two members: it is then what plain training gives."""
        members = None if self.swa_completed else self._count_members(state)
        if members is not None and members < 2:
            warn_no_effect(
                f"SWA needs at least two sets of weights to average and gets {members} in a run of {state.max_duration} (swa_start="
                f"{str(self.swa_start)!r}, swa_end={str(self.swa_end)!r}, update_interval={str(self.update_interval)!r}), so it has no "
                "effect. Train longer, start earlier, or give update_interval in batches."
            )

    def _count_members(self, state: State) -> int | None:
        """Return how many sets of weights a whole run averages, or None where its length is not known."""
        length, in_epochs = state.dataloader_len, self._update_event is Event.EPOCH_END
        total: float | None = num_batches(state)
        if in_epochs and state.max_duration is not None and state.max_duration.unit is TimeUnit.EPOCH:
            total = state.max_duration.value
        elif in_epochs and total is not None:
            total = None if length is None else total / length.value
        per_epoch = 1 if in_epochs else None if length is None else length.value
        scale = total if self.swa_start.unit is TimeUnit.DURATION else per_epoch
        if total is None or scale is None:
            return None
        first, last = (max(1, math.ceil(round(time.value * scale, 9))) for time in (self.swa_start, self.swa_end))
        return max(0, (min(last, int(total)) - first) // int(self.update_interval.value) + 1)

    def _complete(self, model: nn.Module) -> None:
        assert self._average is not None
        self._average.copy_to(model)
        self._average, self.swa_completed = None, True

    def _anneal(self, state: State) -> None:
        assert self._average is not None
        groups = [group for optimizer in torch_optimizers(state) for group in optimizer.param_groups]
        if self._first_rates is None:
            self._first_rates = [float(group["lr"]) for group in groups]
            pause_schedulers(state)
        share = min(1.0, self._average.num_updates / self.anneal_steps)
        for group, first in zip(groups, self._first_rates):
            rate = annealed_rate(first, first if self.swa_lr is None else self.swa_lr, share, self.anneal_strategy)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> StateDict:
        return {
            "average": self._restored if self._average is None else self._average.state_dict(),
            "first_at": self._first_at,
            "completed": self.swa_completed,
            "first_rates": self._first_rates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average, self._restored, self._first_at = None, state["average"], state["first_at"]
        self.swa_completed, self._first_rates = state["completed"], state["first_rates"]
        if self._first_rates is not None and self._state is not None:
            pause_schedulers(self._state)  # a paused scheduler stays paused


def pause_schedulers(state: State) -> None:
    """Let the schedulers of a run change no more rates; they are saved and restored as before."""
    state.schedulers = tuple(
        one if isinstance(one, _PausedScheduler) else _PausedScheduler(one) for one in state.schedulers
    )


class _PausedScheduler:
    """A scheduler that no longer changes the rates, but is saved and restored as before."""

    def __init__(self, scheduler: Any):
        self.optimizer: Optimizer = scheduler.optimizer
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict

    def step(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]
