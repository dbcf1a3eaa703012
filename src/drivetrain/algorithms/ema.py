"""Exponential moving average of the weights (Polyak and Juditsky, 1992): train fast, evaluate the smooth path.

The average is kept next to the model, sharded where the model is, and exchanged with it for the length of an evaluation.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.run import has_reached
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger, Time, TimeUnit, ensure_time
from drivetrain.core.arguments import check_fraction, check_fractions
from drivetrain.core.time import Interval
from drivetrain.core.types import StateDict
from drivetrain.module.average import AveragedWeights
from drivetrain.module.wrapping import clean_state_dict, load_clean_state_dict, unwrap

_STARTS = frozenset({Event.EVAL_START, Event.PREDICT_START})
_ENDS = frozenset({Event.EVAL_END, Event.PREDICT_END})


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module | AveragedWeights, smoothing: float = 0.99) -> None:
    """Move an average towards the model: average = smoothing * average + (1 - smoothing) * model.

    Trainable parameters and floating buffers are averaged; counters are copied.

    >>> model, average = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> compute_ema(model, average, smoothing=0.0)
    >>> torch.equal(model.weight, average.weight)
    True
    """
    check_fractions("compute_ema", smoothing=smoothing)
    if isinstance(ema_model, AveragedWeights):
        ema_model.update_lerp(model, 1 - smoothing)
        return
    averages: list[Tensor] = []
    values: list[Tensor] = []
    own = {**dict(ema_model.named_parameters()), **dict(ema_model.named_buffers())}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, value in [*trained, *model.named_buffers()]:
        if value.is_floating_point() or value.is_complex():
            averages.append(own[name])
            values.append(value.detach().to(own[name]))
        else:
            own[name].copy_(value)
    if averages:
        torch._foreach_lerp_(averages, values, 1 - smoothing)


class EMA(Algorithm):
    """Averages the weights while training and evaluates with the average.

    Give `half_life`, the time after which a weight's influence has halved, or `smoothing`, the share of the old average that stays in
    each update. The average is a copy of the weights after the first batch, optimizer step or epoch at or after `ema_start`; updates come
    every `update_interval` (by default every batch or epoch, as the half-life counts).
    Checkpoints hold the training weights and the average.
    """

    allow_multiple = False
    writes = ("model",)
    tags = frozenset({"average"})
    conflicts = {
        "SWA": "both average the weights. Use one of them",
        "ScheduleFree": "schedule-free training averages the weights itself. Remove EMA",
    }

    def __init__(
        self,
        half_life: str | Time | None = "1000ba",
        smoothing: float | None = None,
        ema_start: str | Time = "0.0dur",
        update_interval: str | Time | None = None,
    ):
        if (half_life is None) == (smoothing is None):
            given = "both" if smoothing is not None else "neither"
            raise ConfigError(
                f"EMA(half_life={half_life!r}, smoothing={smoothing!r}): {given} given. Give one: half_life='1000ba', or half_life=None "
                "with smoothing=0.99."
            )
        self.half_life = None if half_life is None else _counted("half_life", half_life)
        self.ema_start = ensure_time(ema_start, TimeUnit.BATCH)
        unit = TimeUnit.BATCH if self.half_life is None else self.half_life.unit
        self.update_interval = _counted(
            "update_interval", Time(1, unit) if update_interval is None else update_interval
        )
        if self.half_life is None:
            self.smoothing = check_fraction("smoothing", smoothing, owner="EMA")
        else:
            if self.half_life.unit is not self.update_interval.unit:
                raise ConfigError(
                    f"EMA(half_life={str(self.half_life)!r}, update_interval={str(self.update_interval)!r}): the units must be the same."
                )
            self.smoothing = 2.0 ** -(self.update_interval.value / self.half_life.value)
        self._update_event = Event.EPOCH_END if self.update_interval.unit is TimeUnit.EPOCH else Event.BATCH_END
        self.events = frozenset({Event.INIT, self._update_event}) | _STARTS | _ENDS
        self._every = Interval(self.update_interval)
        self._done_at = 0  # the last update, in the unit of the interval
        self._average: AveragedWeights | None = None
        self._restored: Mapping[str, object] | None = None
        self._model: weakref.ref[nn.Module] | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        self._model = weakref.ref(unwrap(model))
        if event is Event.INIT:
            return
        self._restore_average(model)
        if event is self._update_event:
            self._update(state, model)
        elif self._average is not None and self._average.is_swapped == (event in _ENDS):
            self._average.swap(model)

    def _update(self, state: State, model: nn.Module) -> None:
        now = int(state.clock.get(self.update_interval.unit).value)
        if now == 0 or not has_reached(self.ema_start, state, str(self)):
            return
        if self._average is None:
            self._average = AveragedWeights(model)  # a copy, whether an update is due or not
            self._every.count_from(now)
        elif self._every.passes(now):
            self._average.update_lerp(model, 1 - self.smoothing)
        else:
            return
        self._done_at = now

    def _restore_average(self, model: nn.Module) -> None:
        """Put a loaded average in place, now that the model is there."""
        if self._restored is not None:
            self._average, self._restored = AveragedWeights(model, self._restored), None

    @property
    def ema_started(self) -> bool:
        """Whether there is an average by now."""
        return self._average is not None or self._restored is not None

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Write the averaged weights into a model and return it."""
        return self._fill(model, averaged=True)

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Write the weights that are trained into a model and return it."""
        return self._fill(model, averaged=False)

    def _fill(self, model: nn.Module, averaged: bool) -> nn.Module:
        live = None if self._model is None else self._model()
        if live is None:
            raise ConfigError("EMA has no model yet: the run has not started.")
        self._restore_average(live)
        if self._average is None and averaged:
            raise ConfigError(f"EMA has no average yet: it starts at {self.ema_start}.")
        turned = self._average is not None and self._average.is_swapped != averaged
        if turned:
            self._average.swap(live)  # type: ignore[union-attr]
        if unwrap(model) is live:
            return model  # the model of the run itself: it holds now what was asked for
        load_clean_state_dict(model, clean_state_dict(live))
        if turned:
            self._average.swap(live)  # type: ignore[union-attr]
        return model

    def inference_weights(self, state: State) -> Mapping[str, Tensor] | None:
        """Return the averaged tensors by name, or None when there is no average or the model holds it already."""
        self._restore_average(model_of(state, str(self)))
        if self._average is None or self._average.is_swapped:
            return None
        return dict(self._average.named_tensors())

    def close(self, state: State, logger: Logger) -> None:
        """Leave the training weights in the model when an evaluation broke off."""
        if self._average is not None and self._average.is_swapped:
            self._average.swap(model_of(state, str(self)))

    def state_dict(self) -> StateDict:
        average = self._restored if self._average is None else self._average.state_dict()
        return {"average": average, "done_at": self._done_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average, self._restored, self._done_at = None, state["average"], state["done_at"]
        self._every.count_from(self._done_at)


def _counted(name: str, value: str | Time) -> Time:
    time = ensure_time(value, TimeUnit.BATCH)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.STEP, TimeUnit.EPOCH) or not time.value > 0:
        raise ConfigError(
            f"EMA({name}={str(time)!r}): expected batches, optimizer steps or epochs, such as '100ba', '100st' or '1ep'."
        )
    return time
