"""Schedule-free training (Defazio et al., 2024, arXiv 2405.15682): an average of the iterates replaces the schedule.

The optimizer holds two sets of weights: gradients are taken at one, the other is evaluated. It has modes, which the Trainer
switches around evaluations. This algorithm puts it in place, gives batch norms the statistics of the weights that are
evaluated, and leaves those in the model at the end.
"""

from typing import Any, Literal

from torch import Tensor

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.passes import batch_norms, measure_batch_norms
from drivetrain.algorithms.utils.run import OptimizerReplacement, own_optimizer, set_optimizer
from drivetrain.context.state import State
from drivetrain.core import ConfigError, Event, Logger, Time, TimeUnit, ensure_time
from drivetrain.core.arguments import check_choice, check_counts
from drivetrain.core.types import Settings
from drivetrain.module.wrapping import unwrap

_KINDS = {"adamw": "AdamWScheduleFree", "sgd": "SGDScheduleFree"}
_STARTS = frozenset({Event.EVAL_START, Event.PREDICT_START})
_ENDS = frozenset({Event.EVAL_END, Event.PREDICT_END})


class ScheduleFree(OptimizerReplacement):
    """Replaces the optimizer by a schedule-free one and evaluates with its averaged weights.

    `lr=None` takes over the rates of the replaced optimizer. `warmup` is in batches or optimizer steps and counts updates. Before an
    evaluation, batch norms are measured on `bn_batches` batches of training data, and restored afterwards.
    """

    events = frozenset({Event.INIT, Event.FIT_START, Event.FIT_END}) | _STARTS | _ENDS
    writes = ("optimizers", "model")
    tags = frozenset({"optimizer", "average"})
    conflicts = {
        "EMA": "schedule-free training averages the weights itself. Remove EMA",
        "SWA": "schedule-free training averages the weights itself. Remove SWA",
    }

    def __init__(
        self,
        kind: Literal["adamw", "sgd"] = "adamw",
        lr: float | None = None,
        beta: float = 0.9,
        beta2: float = 0.999,
        warmup: str | int | Time = "0ba",
        weight_decay: float = 0,
        r: float = 0,
        weight_lr_power: float = 2,
        bn_batches: int = 50,
    ):
        check_choice("kind", kind, tuple(_KINDS), owner="ScheduleFree")
        check_counts("ScheduleFree", 0, bn_batches=bn_batches)
        self.warmup = ensure_time(warmup, TimeUnit.STEP)
        if self.warmup.unit not in (TimeUnit.BATCH, TimeUnit.STEP) or self.warmup.value < 0:
            raise ConfigError(
                f"ScheduleFree(warmup={str(self.warmup)!r}): expected batches or optimizer steps, such as '500ba' or '500st'."
            )
        self.kind, self.lr, self.beta, self.beta2 = kind, lr, beta, beta2
        self.weight_decay, self.r, self.weight_lr_power, self.bn_batches = weight_decay, r, weight_lr_power, bn_batches
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            self._replace(state)
            return
        optimizer: Any = own_optimizer(state, str(self))
        if event is Event.FIT_START:
            if state.schedulers:
                raise ConfigError(
                    f"ScheduleFree replaces the schedule, but this run has one ({type(state.schedulers[0]).__name__}). Remove "
                    "create_scheduler_fn; for a warm-up use ScheduleFree(warmup='500ba')."
                )
            optimizer.train()
        elif event is Event.FIT_END:
            optimizer.eval()
            self._measure(state)
        elif event in _STARTS:
            layers = batch_norms(unwrap(model_of(state, str(self))))
            self._statistics = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)]
            if optimizer.param_groups[0]["k"]:
                self._measure(state)
        else:
            for buffer, values in self._statistics:
                buffer.copy_(values)
            self._statistics = []

    def _replace(self, state: State) -> None:
        groups = [
            {"params": group["params"], "lr": group["lr"] if self.lr is None else self.lr}
            for group in self.replaced_groups(state)
        ]
        settings: Settings = {"betas": (self.beta, self.beta2)} if self.kind == "adamw" else {"momentum": self.beta}
        settings |= {"weight_decay": self.weight_decay, "warmup_steps": int(self.warmup.value)}
        set_optimizer(state, _KINDS[self.kind], groups, r=self.r, weight_lr_power=self.weight_lr_power, **settings)

    def _measure(self, state: State) -> None:
        if self.bn_batches:
            measure_batch_norms(state, self.bn_batches)
