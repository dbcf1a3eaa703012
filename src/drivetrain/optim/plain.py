"""Whatever describes units, as a set: units, torch optimizers as they are, configurations, functions of the model; and a set
in a loop that is written for one optimizer.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, ConfigTypeError, warn
from drivetrain.core.time import Clock
from drivetrain.module.accumulation import AccumulationWindow, Count, widened
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.module.stepper import Stepper
from drivetrain.optim.building import SHARED, all_names
from drivetrain.optim.optim_set import OptimSet
from drivetrain.optim.scheduler import OptimScheduler


class PlainLr(OptimScheduler):
    """Leaves the learning rate to whoever owns the optimizer; nothing is clipped unless requested."""

    def sche_init(self) -> None:
        """Take no arguments."""

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        return self.get_lr()

    def _set_rates(self, epoch_num: int | None) -> None:
        """Set nothing."""


def as_unit(optimizer: OptimScheduler | Optimizer, model: nn.Module) -> OptimScheduler:
    """Return a unit around an existing optimizer, owning the parameters that it holds; a unit is returned as it is."""
    if isinstance(optimizer, OptimScheduler):
        return optimizer
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {name: id(p) for name, p in all_names(model) if id(p) in held}
    missing = held - set(found.values())
    if missing:
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(missing)} parameters that are not in the model. Build it from "
            "the parameters of this model."
        )
    return PlainLr(lambda params: optimizer, None, model, updated_modules=list(found), grad_clip=None)


def build_optim_sches(
    model: nn.Module, optim_sche_cfg: Mapping[str, object], args: object = None, **shared: object
) -> OptimSet:
    """Build a set as SpeeChain's runner does: `args` is a namespace or mapping that holds shared arguments among others.

    >>> cfg = {"type": "noam.Noamlr", "conf": {"optim_type": "Adam", "optim_conf": {"lr": 1e-3}}}
    >>> build_optim_sches(nn.Linear(2, 1), cfg, {"accum_grad": 4, "seed": 0})["main"].accum_grad
    4
    """
    values = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    found = {name: values[name] for name in SHARED if name in values}
    return OptimSet.from_config(optim_sche_cfg, model, **{**found, **shared})


def as_optim_set(value: object, model: nn.Module, **shared: object) -> OptimSet:
    """Convert a description of units into a set: units, optimizers, mappings of them, configuration, or a function.

    `shared` values hold for units that were not given their own, by themselves or by their configuration.
    """
    if isinstance(value, (str, os.PathLike)):
        made = OptimSet.from_yaml(value, model)
    elif isinstance(value, OptimSet):
        made = value
    elif isinstance(value, (OptimScheduler, Optimizer)):
        made = OptimSet(main=as_unit(value, model))
    elif isinstance(value, Mapping):
        if not all(isinstance(item, (OptimScheduler, Optimizer)) for item in value.values()) or not value:
            made = OptimSet.from_config(value, model)
        else:
            made = OptimSet({name: as_unit(item, model) for name, item in value.items()})
    elif callable(value):
        try:
            made = value(model)
        except TypeError as error:
            raise ConfigTypeError(
                f"{error}. The function is called with the model: lambda model: torch.optim.AdamW(model.parameters())."
            ) from error
        return as_optim_set(made, model, **shared)
    else:
        raise ConfigTypeError(
            f"a {type(value).__name__} is not an optimizer; expected a torch Optimizer, an OptimScheduler, a mapping of them, an OptimSet, "
            "a configuration with 'optim_sches', the path of a YAML file, or a function of the model that returns one of these."
        )
    made.share(**shared)
    for name, given in shared.items():  # values that no unit takes, because each has its own
        own = {unit_name: getattr(unit, name) for unit_name, unit in made.items()}
        if given != SHARED[name].value and given not in own.values():
            shown = ", ".join(f"{unit_name}: {value!r}" for unit_name, value in own.items())
            warn(f"{name}={given!r} has no effect: every unit sets its own ({shown}). Remove one of the two.")
    return made


class SetStepper(Stepper):
    """Passes each call of the loop to the units, whose own steppers weigh, scale, clip and step.

    Its window counts batches for the loop; gradients inside a window are saved with the units.
    """

    optimizer: OptimSet

    def __init__(
        self, units: OptimSet, window: AccumulationWindow, clock: Clock, policy: NonFinitePolicy | None = None
    ):
        super().__init__(units, window, policy=policy)
        self._clock = clock
        self._weight: Count = 1.0  # of the current batch, relative to the first one of the run

    def prepare(self, *, is_split: bool = False, is_exchanged: bool = False, tests: bool = True) -> None:
        has_long_units = any(unit.window.length > 1 for unit in self.optimizer.values())
        super().prepare(is_split=is_split or has_long_units, is_exchanged=is_exchanged, tests=False)
        for unit in self.optimizer.values():
            unit.stepper.skip_marks()
        if tests:  # each unit tests its own gradients
            self.guard.prepare(self.optimizer, self.model, is_exchanged=is_exchanged, is_tested_elsewhere=True)
        self.is_simple = False

    @property
    def parameters(self) -> list[Tensor]:
        return [p for unit in self.optimizer.due for p in unit.params]

    def begin(self, last: bool) -> None:
        self.window.begin(last)
        plan = self.optimizer.begin_batch(self._clock.batch + 1, self._clock.epoch + 1, last=last)
        self.window.closes, self.synchronises = plan.closes, plan.ddp_sync

    def weigh(
        self,
        loss: Tensor,
        items: Count,
        everywhere: Count | None,
        *,
        reference: Count | None = None,
        is_last_part: bool = True,
        is_whole: bool = False,
    ) -> Tensor:
        """Keep what the batch counts for; each unit weighs its own loss."""
        if self.window.is_sum:
            self._weight = items
        else:
            self._refer_to(items if reference is None else reference)
            assert self.window.reference is not None
            self._weight = widened(items) / self.window.reference
        return loss

    def weigh_normalised(self, loss: Tensor) -> Tensor:
        """Undo the average over ranks; each unit divides by the length of its window."""
        self._weight = 1.0
        return loss * self.window.world

    def use_sums(self, is_sum: bool) -> None:
        """Add losses up instead of averaging them, or not; also in the windows of units."""
        for window in (self.window, *(unit.window for unit in self.optimizer.values())):
            window.is_sum = is_sum

    def backward(self, loss: Tensor, losses: Mapping[str, Tensor] | None = None, **kwargs: object) -> None:
        """Run the passes of all active units; `losses` are the losses by name."""
        self.optimizer.backward({**(losses or {}), "loss": loss}, weight=self._weight)

    def finish(self) -> None:
        self.optimizer.finish_gradients()

    def step(self, closure: Callable[[], object] | None = None) -> None:
        self.was_skipped = False
        self.optimizer.step(closure)

    def end_skipped_update(self) -> None:
        self.was_skipped = True
        self.optimizer.end_skipped_update()

    def skipped_units(self) -> Sequence[bool | Tensor]:
        """Return which units skipped their last update."""
        return self.optimizer.skipped

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window as it was; units restore their own."""
        super().load_state_dict(state)
        if state["window"].get("world", self.window.world) != self.window.world:
            self.window.is_plain = False  # what was collected elsewhere has weights, so what is added needs them too

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        return []  # units save their own gradients
