"""OptimSet: several named units that together behave like one optimizer.

In every batch all backwards come first, in the order of the units, and only then all steps: a step in between would
change weights that a later backward still needs. Units that can share a backward do. The loop needs to know nothing of
this; it calls `begin_batch`, `backward`, `step` and `zero_grad`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.context.moving import move_optimizer_state
from drivetrain.core.errors import ConfigError, unknown_name, warn
from drivetrain.core.types import Settings, StateDict
from drivetrain.core.yaml import YamlSource, read_yaml
from drivetrain.module.gradient_sync import GradientSync
from drivetrain.module.precision import Scaling
from drivetrain.module.wrapping import unwrap
from drivetrain.optim.building import REST, UNCHANGED, all_names
from drivetrain.optim.config import read_units, to_config
from drivetrain.optim.passes import Losses, Pass, Weight, finish_units, plan_passes, update_scalers, update_units
from drivetrain.optim.scheduler import OptimScheduler

_log = logging.getLogger(__name__)


class BatchPlan(NamedTuple):
    """What one batch means for the units."""

    active: tuple[str, ...]
    """The units whose gradients this batch contributes to."""
    closes: bool
    """Whether the window of some unit ends with this batch: then finish, step and clear."""
    ddp_sync: bool
    """Whether the wrapper's own synchronisation applies; False means forward and backward run under DDP's no_sync."""


class OptimSet(Mapping[str, OptimScheduler]):
    """Named units as one optimizer, and as a read-only mapping of names to units.

    Args:
        units: the units by name, or one unit.
        **named: the same as keywords.

    >>> from drivetrain.optim.constant import ConstantLr
    >>> model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 1)})
    >>> optim = OptimSet(
    ...     encoder=ConstantLr("SGD", {"lr": 0.1}, model, optim_loss="enc", updated_modules="encoder"),
    ...     decoder=ConstantLr("Adam", {"lr": 0.01}, model, optim_loss="dec", updated_modules="decoder"),
    ... )
    >>> hidden = model["encoder"](torch.ones(1, 2))
    >>> optim.backward({"enc": hidden.mean(), "dec": model["decoder"](hidden).mean()})
    >>> optim.step()
    True
    >>> optim.zero_grad()
    >>> optim.get_lr()
    {'encoder': 0.1, 'decoder': 0.01}
    """

    _now: list[Pass]
    """The passes of the batch that is open."""

    def __init__(self, units: Mapping[str, OptimScheduler] | OptimScheduler | None = None, /, **named: OptimScheduler):
        if isinstance(units, OptimScheduler):
            units = {"main": units}
        self._units: dict[str, OptimScheduler] = {**(units or {}), **named}
        for name in named:
            if name in (units or {}):
                raise ConfigError(f"two units are called {name!r}; give each its own name.")
        _check_units(self._units)
        for name, unit in self._units.items():
            unit.name = name
        self._attach(None)
        self._batch = 0
        self._plan: BatchPlan | None = None
        self._counts_batches_itself = self._had_backward = False
        self._to_clear: list[OptimScheduler] = []
        self.skipped: list[bool | torch.Tensor] = []
        """For each unit of the last `step()`, whether its update was skipped; for fused optimizers a flag on the device."""

    # ------------------------------------------------------------------ mapping

    def __getitem__(self, name: str) -> OptimScheduler:
        try:
            return self._units[name]
        except KeyError:
            raise KeyError(unknown_name("unit", name, self._units)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    __hash__, __eq__ = object.__hash__, object.__eq__  # a set is itself, not what it holds

    # ------------------------------------------------------------------ one batch

    def begin_batch(self, step_num: int, epoch_num: int | None = None, *, last: bool = False) -> BatchPlan:
        """Take the next batch into the windows of all units and set the rates of those that open.

        `step_num` counts batches from 1, `epoch_num` epochs from 1; `last` marks the last batch of an epoch, with which
        windows end. The same number twice is the same batch.
        """
        if type(step_num) is not int or step_num < 1:
            raise ConfigError(f"step_num={step_num!r}: batches are counted from 1.")
        self._counts_batches_itself = False
        if step_num == self._batch and self._plan is not None:
            return self._plan
        self._batch = step_num
        for unit in self._units.values():
            unit.begin(step_num, epoch_num, last)
        if self._num_parameters != sum(len(unit.params) for unit in self._units.values()):
            self._forget_passes()  # groups were added to an optimizer
        closes = any(unit.closes for unit in self._driven)
        names = tuple(unit.name for unit in self._driven if unit.is_active)
        passes = self._passes.get(names)
        if passes is None:
            if not self._passes:  # prepare wrappers for the most passes there can be, before the first forward
                plan_passes(self._driven)
            passes = self._passes[names] = plan_passes([self._units[name] for name in names])
        self._now = passes
        self._plan = BatchPlan(names, closes, not self._wrapped or self._reducer_applies(passes))
        return self._plan

    def backward(self, losses: Losses, *, weight: Weight = None) -> None:
        """Run all passes of this batch; `weight` is what it counts for in the mean over a window, None means one.

        Without `begin_batch` before it, each call is the next batch.
        """
        self._count_batch()
        self._had_backward = True
        last = len(self._now) - 1
        for index, one in enumerate(self._now):
            one.run(losses, weight, index < last)

    def _count_batch(self) -> None:
        """Open the next batch where nobody calls `begin_batch`: the first one, and when the present one has had its passes."""
        if self._plan is None or (self._counts_batches_itself and self._had_backward):
            self.begin_batch(self._batch + 1)
            self._counts_batches_itself, self._had_backward = True, False

    def finish_gradients(self) -> None:
        """Average over ranks, unscale and rescale the gradients of the units whose windows close; once per batch."""
        finish_units(self.due)

    def step(self, closure: Callable[[], object] | None = None) -> bool:
        """Clip, check and step every unit whose window closed; True if any changed its parameters."""
        if closure is not None:
            raise NotImplementedError(
                "an OptimSet has no loss to evaluate again: step(closure) works with a single torch optimizer, passed to the Trainer "
                "as it is (SAM and LBFGS need that)."
            )
        due = self.due
        if not due:
            return False
        finish_units(due)
        changed = update_units(due)
        self.skipped = [unit.stepper.was_skipped for unit in due]
        self._end_windows(due)
        return any(changed)

    def end_skipped_update(self) -> None:
        """End the windows that close without updating anything."""
        due = self.due
        update_scalers(due)
        self._end_windows(due)

    def _end_windows(self, due: list[OptimScheduler]) -> None:
        for unit in due:
            unit.stepper.end()
            self._to_clear.append(unit)

    def step_now(self, name: str, losses: Losses) -> bool:
        """Back-propagate for a `manual` unit and, if its window closes, update it at once; True if it changed.

        Parts of the bare model may be called for this under DDP: the unit averages its gradients itself.
        """
        unit = self[name]
        if not unit.manual:
            raise RuntimeError(f"unit {name!r} is stepped by the set; step_now is for units built with manual=True.")
        self._count_batch()
        self._had_backward = self._had_backward or not self._driven
        if not unit.is_active:
            return False
        with torch.autocast(unit.params[0].device.type, enabled=False), unit.sync.no_sync:
            self._manual_passes[name].run(losses, None, retain_graph=False)
        return unit.update()

    def zero_grad(self, set_to_none: bool = True, *, all: bool = False) -> None:
        """Clear the gradients of units whose window closed since the last call; `all` also drops windows in progress."""
        for unit in self._units.values() if all else self._to_clear:
            if set_to_none:
                unit.clear_gradients()
            else:
                unit.optimizer.zero_grad(set_to_none=False)
            if all:
                unit.stepper.end()
        self._to_clear.clear()

    @property
    def due(self) -> list[OptimScheduler]:
        """The units that the next `step()` updates."""
        return [unit for unit in self._driven if unit.is_due and unit.window.count]

    def sync_context(self, plan: BatchPlan) -> AbstractContextManager[object]:
        """Return the context for forward and backward of a batch in a hand-written loop: DDP's no_sync where it is due."""
        if plan.ddp_sync:
            return nullcontext()
        contexts = ExitStack()
        for sync in self._syncs():
            contexts.enter_context(sync.no_sync)
        return contexts

    # ------------------------------------------------------------------ as an optimizer

    @property
    def param_groups(self) -> list[Settings]:
        """The live groups of all optimizers, each with its unit's name under "unit"."""
        return [group for unit in self._units.values() for group in unit.optimizer.param_groups]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The torch optimizers, in the order of the units."""
        return [unit.optimizer for unit in self._units.values()]

    @property
    def state(self) -> dict[Any, Any]:
        """What all optimizers keep about their parameters."""
        return {p: kept for optimizer in self.optimizers for p, kept in optimizer.state.items()}

    def get_lr(self) -> dict[str, float]:
        """Return the learning rate of each unit."""
        return {name: unit.get_lr() for name, unit in self._units.items()}

    def metrics(self) -> dict[str, float | torch.Tensor]:
        """Return what is worth logging of each unit; counts of skipped updates may wait for the device."""
        values: dict[str, float | torch.Tensor] = {}
        for name, unit in self._units.items():
            values[f"lr/{name}"] = unit.get_lr()
            if unit.last_grad_norm is not None:
                values[f"grad_norm/{name}"] = unit.last_grad_norm
            values[f"skipped_steps/{name}"] = unit.skipped_steps
        return values

    def train(self) -> None:
        """Put optimizers that have modes (schedule-free ones) into training mode."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):
                optimizer.train()

    def eval(self) -> None:
        """Put optimizers that have modes into evaluation mode: parameters then hold the averaged weights."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "eval"):
                optimizer.eval()

    def to(self, device: torch.device | str) -> "OptimSet":
        """Move what the optimizers keep to a device, where the parameters are or will be."""
        for optimizer in self.optimizers:
            move_optimizer_state(optimizer, device)
        return self

    def state_dict(self) -> StateDict:
        """Return the state of each unit under its name."""
        return {name: unit.state_dict() for name, unit in self._units.items()}

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True) -> tuple[list[str], list[str]]:
        """Go on from a saved state; return the names missing in it and those unknown here, both empty when strict."""
        saved: Mapping[str, Any] = state_dict
        if len(self) == 1:
            only = next(iter(self))
            if set(saved) == {"state", "param_groups"}:  # of a plain torch optimizer
                saved = {only: {"optimizer": saved}}
            elif "optimizer" in saved and only not in saved:  # of the unit itself
                saved = {only: saved}
        missing = [name for name in self._units if name not in saved]
        unexpected = [name for name in saved if name not in self._units]
        if strict and (missing or unexpected):
            raise ConfigError(
                f"the saved state is for the units {', '.join(saved) or 'none'}, but this set has {', '.join(self)}: missing "
                f"{missing or 'none'}, unexpected {unexpected or 'none'}. strict=False loads the common ones."
            )
        for name, unit in self._units.items():
            if name in saved:
                unit.load_state_dict(saved[name])
        self._label_groups()
        self._plan = None
        self._to_clear.clear()
        self._batch = max(unit.batch for unit in self._units.values())
        return missing, unexpected

    # ------------------------------------------------------------------ building

    def bind(
        self,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        *,
        autocast_dtype: torch.dtype | None = UNCHANGED,
    ) -> None:
        """Give all units the length of the run, in batches, and the precision of the forward pass."""
        for unit in self._units.values():
            unit.bind(total_steps, steps_per_epoch, autocast_dtype=autocast_dtype)

    def share(self, **shared: object) -> None:
        """Give all units values for the shared arguments that they were not given themselves."""
        for unit in self._units.values():
            unit.share(**shared)
        self._forget_passes()

    def rebind(self, model: nn.Module) -> None:
        """Look all names up again in a wrapped or reshaped model; new parameters only before the first update.

        A wrapped model concerns only the units of what is inside: others have a module of their own, such as the loss.
        """
        self._attach(model)

    def end_run(self) -> None:
        """Log in one line which gradients were collected but not used, if any."""
        left = [f"{name} ({unit.window.count} batches)" for name, unit in self._units.items() if unit.window.count]
        if left:
            _log.warning("the run ended inside an accumulation window; gradients not used: %s.", ", ".join(left))

    @classmethod
    def from_config(cls, cfg: Mapping[str, object], model: nn.Module, **shared: Any) -> "OptimSet":
        """Build a set from a mapping with `optim_sches`; `shared` values hold for units that do not give their own."""
        return cls(read_units(cfg, model, **shared))

    @classmethod
    def from_yaml(cls, source: YamlSource, model: nn.Module, **shared: object) -> "OptimSet":
        """Build a set from the `optim_sches` of a YAML file or open stream, at its top or in `train_cfg`.

        `accum_grad`, `ft_factor`, `grad_clip`, `grad_norm_type`, `use_amp` and `distributed` next to either hold for units that do not
        give their own; a keyword here counts before them. Other keys of the file are for `!ref`.
        """
        file = read_yaml(source)
        return cls(read_units(file.data, model, file=file, **shared))

    def to_config(self) -> Settings:
        """Return the configuration from which `from_config` builds the same set."""
        return to_config(self)

    def explain(self) -> str:
        """Return a table of the units: optimizer, parameters, loss, when, schedule, passes per batch."""
        from drivetrain.optim.explain import explain_units

        return explain_units(self)

    def __repr__(self) -> str:
        lines = [f"    {name}={unit!r}," for name, unit in self._units.items()]
        return "\n".join(["OptimSet(", *lines, ")"])

    def passes(self) -> list[tuple[str, ...]]:
        """Return the backward passes of a batch in which every unit is active, each as the names of its units."""
        return [tuple(unit.name for unit in one.units) for one in plan_passes(self._driven)]

    def _attach(self, model: nn.Module | None) -> None:
        """Settle who owns which parameter, `_rest_` last, and reject what two units own."""
        taken: dict[int, str] = {}
        inner = None if model is None else unwrap(model)
        inside = [unit for unit in self._units.values() if unit.sync.bare is inner] or list(self._units.values())
        for unit in sorted(self._units.values(), key=lambda unit: REST in (unit.updated_modules or ())):
            target = model if model is not None and any(unit is one for one in inside) else None
            if target is not None or REST in (unit.updated_modules or ()):
                unit.attach(unit.model if target is None else target, taken)
            for name, p in zip(unit.param_names, unit.params):
                if id(p) in taken:
                    raise ConfigError(
                        f"the parameter {name!r} belongs to two units, {taken[id(p)]!r} and {unit.name!r}. Exclude it from one with "
                        f"excluded_modules, or give one unit updated_modules='{REST}', all parameters without another owner."
                    )
                taken[id(p)] = unit.name
        # Units of one model see it in the same way, wrapped if any of them was given the wrapped one.
        known: dict[int, GradientSync] = {}
        for unit in sorted(self._units.values(), key=lambda unit: unit.sync.ddp is None):
            unit.use_sync(known.setdefault(id(unit.sync.bare), unit.sync))
        self._warn_of_orphans(taken)
        self._forget_passes()

    def _forget_passes(self) -> None:
        self._driven = [unit for unit in self._units.values() if not unit.manual]
        self._passes: dict[tuple[str, ...], list[Pass]] = {}
        self._now = []
        self._plan = None
        syncs = self._syncs()
        self._wrapped = any(sync.ddp is not None for sync in syncs)
        for sync in syncs:  # a backward pass must leave the gradients of other units alone, whatever module they train
            others = [unit for unit in self._units.values() if unit.sync is not sync]
            sync.spare(p for unit in others for p in unit.params)
        self._manual_passes = {name: Pass([unit]) for name, unit in self._units.items() if unit.manual}
        self._label_groups()
        self._num_parameters = sum(len(unit.params) for unit in self._units.values())
        # Units with the same loss and windows share a gradient scaler, so that they can share a pass.
        known: dict[tuple[object, ...], Scaling] = {}
        for unit in self._driven:
            if unit.real_step == 0:
                key = (unit.loss_terms, unit.accum_grad, unit.step_per_update, unit.accumulate_skipped, unit.use_amp)
                unit.scaling = known.setdefault((*key, id(unit.sync)), unit.scaling)

    def _label_groups(self) -> None:
        for name, unit in self._units.items():
            for group in unit.optimizer.param_groups:
                group["unit"] = name

    def _syncs(self) -> list[GradientSync]:
        return list({id(unit.sync): unit.sync for unit in self._units.values()}.values())

    def _reducer_applies(self, passes: list[Pass]) -> bool:
        """Return whether DDP's reducer can do the averaging: one pass, all trainable parameters, all its units due."""
        is_one = len(passes) == 1 and len(self._syncs()) == 1
        return is_one and passes[0].covers_everything() and all(unit.is_due for unit in passes[0].units)

    def _warn_of_orphans(self, taken: Mapping[int, str]) -> None:
        named = [pair for sync in self._syncs() for pair in all_names(sync.model)]
        orphans = [name for name, p in named if p.requires_grad and id(p) not in taken]
        if orphans:
            shown = ", ".join(orphans[:5]) + (", ..." if len(orphans) > 5 else "")
            warn(
                f"{len(orphans)} trainable parameters belong to no unit and will not change: {shown}. Freeze them, or assign them to a "
                f"unit (updated_modules='{REST}')."
            )


def _check_units(units: Mapping[str, object]) -> None:
    if not units:
        raise ConfigError("an OptimSet needs at least one unit.")
    for name, unit in units.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{name!r} is not a valid unit name; expected a string.")
        if not isinstance(unit, OptimScheduler):
            raise ConfigError(
                f"unit {name!r} is a {type(unit).__name__}; expected an OptimScheduler such as ConstantLr('AdamW', {{'lr': 1e-3}}, model)."
            )
    if len({id(unit) for unit in units.values()}) < len(units):
        raise ConfigError("one unit is in the set under two names. Add it once.")


from_config, from_yaml = OptimSet.from_config, OptimSet.from_yaml
