"""OptimScheduler: one torch optimizer, the parameters it may change, the loss it follows, and its learning rate.

The rate is a pure function of the real step, the number of the accumulation window. A unit works alone, by `step(losses)`
in a hand-written loop, or as part of an `OptimSet`. Its gradients are its `Stepper`'s (`drivetrain.module.stepper`), what units do
together is in `passes.py`; this file holds the clock and the public face.
"""

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.arguments import check_choice, check_count, check_flag
from drivetrain.core.errors import ConfigError, ConfigTypeError, unknown_name, warn
from drivetrain.core.types import Settings, StateDict
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.gradient_sync import GradientSync
from drivetrain.module.precision import Scaling
from drivetrain.module.stepper import Stepper
from drivetrain.optim import building
from drivetrain.optim.building import SHARED, Default, Names
from drivetrain.optim.passes import Losses, LossNames, Pass, Weight, finish_units, loss_terms, update_units
from drivetrain.optim.positions import RunLength
from drivetrain.optim.state import load_unit, save_unit

TimeFunction = Callable[[list[str | None]], AbstractContextManager[object]]
_log = logging.getLogger(__name__)
_LOG_EVERY = 100  # real steps between two lines about skipped updates of one unit

GENERAL = (
    *("optim_type", "optim_conf", "optim_loss", "optim_losses", "updated_modules", "update_modules", "step_per_update"),
    *("accumulate_skipped", "excluded_modules", "param_groups", "nonfinite", "manual"),
)
"""The arguments every unit has besides the shared ones, under all their names."""


class OptimScheduler(ABC):
    """One optimizer with its schedule; a subclass defines how the learning rate follows the real step.

    A subclass defines `sche_init(**sche_conf)`, called last in the constructor, and `update_lr(real_step)` or
    `update_lr(real_step, epoch_num)`. Arguments that need a word:

    - `optim_type`: a name in torch.optim, then in drivetrain.optim, then a dotted path; a class; or a function of the
      parameters and `optim_conf`.
    - `optim_loss`: the name of the loss to follow (None: "loss"), a list of names (their sum) or {name: weight}.
    - `updated_modules`, `excluded_modules`: names, dotted names or patterns; None is the whole model, `_rest_` all that no
      other unit of a set owns.
    - `accum_grad`: batches per window; `step_per_update`: acts in every n-th window only; `accumulate_skipped`: collects
      the windows between as well.
    - `ft_factor` multiplies every rate, `grad_clip` is the largest norm over own parameters (None: no clipping).
    - `param_groups`: [{"match": pattern, **options}], the first match wins; groups keep the ratio of their rates.
    - `nonfinite`: "skip", "raise" or "ignore" an update whose gradients are not finite.
    - `manual`: the user steps this unit of a set by `step_now`.

    `distributed`, `use_amp`, `accum_grad`, `ft_factor`, `grad_clip` and `grad_norm_type` may also come from the set or the
    Trainer; a value given here wins.

    >>> class HalvingLr(OptimScheduler):
    ...     def sche_init(self, every=10):
    ...         self.every, self.first = every, self.get_lr()
    ...     def update_lr(self, real_step):
    ...         return self.first * 0.5 ** ((real_step - 1) // self.every)
    >>> model = nn.Linear(2, 1)
    >>> unit = HalvingLr("SGD", {"lr": 0.1}, model, every=1)
    >>> for _ in range(2):
    ...     changed = unit.step(model(torch.ones(1, 2)).mean())
    >>> unit.real_step, unit.get_lr()
    (2, 0.05)
    """

    decays: ClassVar[bool] = False
    """Whether the schedule lowers the rate by itself; schedule-free optimizers warn about that."""

    optimizer: Optimizer
    params: list[nn.Parameter]
    param_names: list[str]
    base_lrs: list[float]
    stepper: Stepper
    sync: GradientSync
    _pass: Pass | None
    _added: set[int]
    _ratios: list[float]

    def __init__(
        self,
        optim_type: str | type[Optimizer] | Callable[..., Optimizer],
        optim_conf: Mapping[str, object] | None,
        model: nn.Module,
        distributed: bool = SHARED["distributed"],
        optim_loss: LossNames = None,
        updated_modules: Names = None,
        step_per_update: int = 1,
        use_amp: bool = SHARED["use_amp"],
        accum_grad: int = SHARED["accum_grad"],
        ft_factor: float = SHARED["ft_factor"],
        grad_clip: float | None = SHARED["grad_clip"],
        grad_norm_type: float = SHARED["grad_norm_type"],
        *,
        accumulate_skipped: bool = False,
        excluded_modules: Names = None,
        param_groups: Sequence[Mapping[str, object]] | None = None,
        nonfinite: str = "skip",
        manual: bool = False,
        **sche_conf: object,
    ):
        optim_loss = building.one_of_two_names(sche_conf, "optim_losses", "optim_loss", optim_loss)
        updated_modules = building.one_of_two_names(sche_conf, "update_modules", "updated_modules", updated_modules)
        building.check_keywords(self.sche_init, sche_conf, type(self).__name__, [*GENERAL, *SHARED])
        if optim_conf is not None and not isinstance(optim_conf, Mapping):
            raise ConfigError(f"optim_conf={optim_conf!r}: expected a mapping of the optimizer's arguments, or None.")
        self.name = type(self).__name__
        self.optim_type, self.optim_conf = optim_type, dict(optim_conf or {})
        self.optim_loss, self.loss_terms = optim_loss, loss_terms(optim_loss)
        self.updated_modules = building.as_list("updated_modules", updated_modules)
        self.excluded_modules = building.as_list("excluded_modules", excluded_modules)
        self.step_per_update = check_count("step_per_update", step_per_update)
        self.accumulate_skipped = check_flag("accumulate_skipped", accumulate_skipped)
        self.param_groups = building.check_groups(param_groups)
        self.nonfinite = check_choice("nonfinite", nonfinite, building.NONFINITE)
        self.manual, self.sche_conf = check_flag("manual", manual), dict(sche_conf)

        given = zip(SHARED, (distributed, use_amp, accum_grad, ft_factor, grad_clip, grad_norm_type))
        self._given = {name: building.check_shared(name, v) for name, v in given if not isinstance(v, Default)}
        self.distributed, self.use_amp, self.accum_grad, self.ft_factor, self.grad_clip, self.grad_norm_type = (
            self._given.get(name, default.value) for name, default in SHARED.items()
        )
        self.real_step = 0
        self.last_grad_norm: Tensor | None = None
        self.is_active = self.is_due = self.is_reduced = False
        self.closes = True
        self.batch = self._position = self._updates = self._skips = self._logged_at = 0
        self._device_skips: Tensor | None = None
        self.scaling, self.run_length = Scaling(), RunLength()
        try:  # `update_lr` may have a second parameter, for the epoch
            inspect.signature(self.update_lr).bind(1, 1)
            self._takes_epoch = True
        except TypeError:
            self._takes_epoch = False
        self._settled = False
        self.params, self._added = [], set()
        self.model = model
        self.attach(model)
        self.sche_init(**sche_conf)
        if self.decays and hasattr(self.optimizer, "eval"):
            warn(
                f"{type(self.optimizer).__name__} averages weights instead of lowering the rate, but {type(self).__name__} lowers it. "
                f"Use ConstantLr with a warm-up."
            )

    # ------------------------------------------------------------------ what a subclass defines

    @abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Take the arguments of the schedule; `get_lr()` is the configured rate here."""

    @abstractmethod
    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        """Return the learning rate of a real step, counted from 1."""

    def extra_repr_fn(self) -> str:
        """Return what the schedule adds to `repr`."""
        return ""

    def settle(self) -> None:  # noqa: B027 - a schedule without durations has nothing to do
        """Turn durations into real steps; called when the length of the run is known, and before the first rate."""

    # ------------------------------------------------------------------ one batch

    def step(
        self,
        losses: Losses,
        time_func: TimeFunction | None = None,
        optim_name: str | None = None,
        step_num: int | None = None,
        epoch_num: int | None = None,
        logger: logging.Logger | None = None,
    ) -> bool:
        """Back-propagate and, when the window closes, update; True if parameters changed.

        `step_num` is the number of the batch since the start of training, from 1; None counts on from the last one.
        """
        self.backward(losses, step_num, epoch_num, time_func=time_func, optim_name=optim_name)
        return self.update(time_func=time_func, optim_name=optim_name, logger=logger)

    def backward(
        self,
        losses: Losses,
        step_num: int | None = None,
        epoch_num: int | None = None,
        *,
        weight: Weight = None,
        retain_graph: bool = False,
        time_func: TimeFunction | None = None,
        optim_name: str | None = None,
    ) -> bool:
        """Leave gradients in own parameters only; True if the unit is active in this batch.

        `weight` is what the batch counts for in the mean over its window; None means one.
        """
        self._enter(self.batch + 1 if step_num is None else step_num, epoch_num)
        if not self.is_active:
            return False
        if self._pass is None:
            self._pass = Pass([self])
        with nullcontext() if time_func is None else time_func(["loss_backward_time", optim_name]):
            self._pass.run(losses, weight, retain_graph)
        return True

    def update(
        self,
        step_num: int | None = None,
        epoch_num: int | None = None,
        *,
        close: bool | None = None,
        time_func: TimeFunction | None = None,
        optim_name: str | None = None,
        logger: logging.Logger | None = None,
    ) -> bool:
        """Update if the window closes with this batch, or if `close` is set; True if parameters changed."""
        if step_num is not None:
            self._enter(step_num, epoch_num)
        if not (self.is_due if close is None else close) or not self.window.count:
            return False
        with nullcontext() if time_func is None else time_func(["optim_time", optim_name]):
            finish_units([self])
            changed = update_units([self], logger or _log)[0]
            self.clear_gradients()
        self.stepper.end()
        return changed

    def begin(self, step_num: int, epoch_num: int | None, last: bool) -> None:
        """Take the next batch of an `OptimSet`: windows end with their epoch, and real steps count windows."""
        opens = self.closes
        if opens:
            self._position = 0
            if self.real_step == 0 and step_num > 1:  # training goes on, but no clock was saved: take the caller's
                self.real_step, self._position = divmod(step_num - 1, self.accum_grad)
            self.real_step += 1
        self.batch = step_num
        self._position += 1
        self.closes = last or self._position >= self.accum_grad
        self._activate(opens, epoch_num)

    def _enter(self, step_num: int, epoch_num: int | None) -> None:
        """Take a batch by its number: windows run on over epochs."""
        if type(step_num) is not int or step_num < 1:
            raise ConfigError(f"step_num={step_num!r}: batches are counted from 1.")
        if step_num == self.batch:
            return
        window, position = divmod(step_num - 1, self.accum_grad)
        opens = window + 1 != self.real_step or self.batch == 0
        self.batch, self.real_step, self._position = step_num, window + 1, position + 1
        self.closes = position + 1 == self.accum_grad
        self._activate(opens, epoch_num)

    def _activate(self, opens: bool, epoch_num: int | None) -> None:
        """Decide whether this batch counts, and set the rate of a window that opens."""
        has_turn = self.real_step % self.step_per_update == 0
        self.is_active = has_turn or self.accumulate_skipped
        self.is_due = has_turn and self.closes
        if not opens:
            return
        self.take_in_groups()
        is_new_span = not self.accumulate_skipped or (self.real_step - 1) % self.step_per_update == 0
        if self.window.count and is_new_span:
            text = "unit %s: a window ended without an update; the gradients of %d batches are discarded."
            _log.warning(text, self.name, self.window.count)
            self.clear_gradients()
            self.stepper.end()
        if self.is_active:
            self._set_rates(epoch_num)

    def go_to(self, real_step: int = 0, updates: int = 0, skips: int = 0) -> None:
        """Go on after a real step, with the counts it had; a window in progress is dropped."""
        self.clear_gradients()
        self.stepper.end()
        self.real_step, self._updates, self._skips, self._device_skips = real_step, updates, skips, None
        self.batch, self._position, self.closes = real_step * self.accum_grad, 0, True

    def clear_gradients(self) -> None:
        """Drop the gradients of own parameters."""
        for p in self.params:
            p.grad = None

    # ------------------------------------------------------------------ learning rate

    def get_lr(self) -> float:
        """Return the learning rate of the first group; before the first window, the configured one."""
        return float(self.optimizer.param_groups[0]["lr"])

    def lr_at(self, real_step: int, epoch_num: int | None = None) -> float:
        """Return the learning rate of any real step, without setting it."""
        if not self._settled:
            self.settle()
            self._settled = True
        lr = self.update_lr(real_step, epoch_num) if self._takes_epoch else self.update_lr(real_step)
        return float(self.ft_factor * lr)  # a number of numpy would make the saved state unreadable

    def bind(
        self,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        *,
        autocast_dtype: torch.dtype | None = building.UNCHANGED,
    ) -> None:
        """Learn the length of the run, in batches, and the precision of the forward pass."""
        if autocast_dtype is not building.UNCHANGED:
            self.scaling.use(autocast_dtype)
        self.run_length = RunLength(total_batches=total_steps, batches_per_epoch=steps_per_epoch)
        self.settle()
        self._settled = True

    def _set_rates(self, epoch_num: int | None) -> None:
        groups = self.optimizer.param_groups
        lr = self.lr_at(self.real_step, epoch_num)
        if not 0.0 <= lr < math.inf:
            raise ConfigError(
                f"unit {self.name!r}: update_lr returned {lr!r} for step {self.real_step}, expected a finite rate of at least 0."
            )
        for group, ratio in zip(groups, self._ratios):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio

    # ------------------------------------------------------------------ model and shared arguments

    def attach(self, model: nn.Module, taken: Mapping[int, str] | None = None) -> None:
        """Look the unit's parameters up in a model and make the optimizer, unless they are those it has."""
        own = building.own_parameters(model, self.updated_modules, self.excluded_modules, taken or {})
        known, found = {id(p) for p in self.params}, {id(p) for p in own.values()}
        if not found <= known or not known - found <= self._added:
            if self._updates:
                raise RuntimeError(
                    f"unit {self.name!r} has made {self._updates} updates and cannot move to other parameters. Rebind before training, "
                    "or build a new unit and load its state."
                )
            self.optimizer = building.build_optimizer(self.optim_type, self.optim_conf, own, self.param_groups)
            self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
            self._ratios = _ratios(self.base_lrs)
            self.params, self.param_names = list(own.values()), list(own)
            self._added.clear()
        self.model = model
        self.use_sync(GradientSync(model))

    def take_in_groups(self) -> None:
        """Own the parameters of groups that were added to the optimizer; their rate is what they were given."""
        new = self.optimizer.param_groups[len(self.base_lrs) :]
        if not new:
            return
        self.base_lrs += [float(group["lr"]) for group in new]
        self._ratios = _ratios(self.base_lrs)
        names = {id(p): name for name, p in building.all_names(self.model)}
        for p in (p for group in new for p in group["params"]):
            self.params.append(p)
            self.param_names.append(names.get(id(p), f"added.{len(self.params)}"))
            self._added.add(id(p))
        self._pass = None

    def use_sync(self, sync: GradientSync) -> None:
        """Take the view of the model that all units of a set share."""
        self.sync = sync
        self._pass = None
        self._make_stepper()

    def share(self, **shared: object) -> None:
        """Take values for the shared arguments that this unit was not given itself."""
        for name, value in shared.items():
            if name not in SHARED:
                raise ConfigTypeError(unknown_name("shared argument", name, SHARED, where=self.name))
            value = building.check_shared(name, value)
            if name in self._given or getattr(self, name) == value:
                continue
            if name == "accum_grad" and self.window.count:
                raise ConfigError(
                    f"unit {self.name!r}: accum_grad cannot change from {self.accum_grad} to {value} inside a window."
                )
            setattr(self, name, value)
        self._settled = False
        self._make_stepper()

    @property
    def given_arguments(self) -> Settings:
        """The shared arguments that are set: given here, or shared by set or Trainer."""
        values = {name: (getattr(self, name), default.value) for name, default in SHARED.items()}
        return {name: value for name, (value, default) in values.items() if name in self._given or value != default}

    def _make_stepper(self) -> None:
        """Make the stepper for the parameters and the window's length; a window in progress is kept where it can be."""
        length = self.accum_grad * (self.step_per_update if self.accumulate_skipped else 1)
        world, stepper = self.sync.world(self.distributed), getattr(self, "stepper", None)
        if stepper is None or stepper.window.length != length:
            window = AccumulationWindow(length, world, reference=1.0)
        else:  # a wrapper put on after loading must not lose a window in progress
            window = stepper.window
            window.world = world
        self.stepper = Stepper(self.optimizer, window, device=self.params[0].device, parameters=self.params)
        self.stepper.sync, self.stepper.scaler = self.sync, self.scaling.scaler

    @property
    def window(self) -> AccumulationWindow:
        """The batches that make up one update, with weights that count from one."""
        return self.stepper.window

    # ------------------------------------------------------------------ counts

    @property
    def scaler(self) -> "torch.amp.GradScaler | None":
        """The gradient scaler, or None where none is needed."""
        return self.scaling.scaler

    @property
    def is_tested(self) -> bool:
        """Whether updates with gradients that are not finite are skipped or raise an error."""
        return self.nonfinite != "ignore" or self.scaler is not None

    @property
    def update_count(self) -> int:
        """How many updates changed parameters; reading it may wait for the device."""
        return self._updates - (0 if self._device_skips is None else int(self._device_skips))

    @property
    def skipped_steps(self) -> int:
        """How many updates were skipped because of non-finite gradients; reading it may wait for the device."""
        return self._skips + (0 if self._device_skips is None else int(self._device_skips))

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer takes the verdict about its gradients as a flag on the device."""
        can_raise = self.nonfinite == "raise" and self.scaler is None
        return getattr(self.optimizer, "_step_supports_amp_scaling", False) and not can_raise

    def count_update(self, overflow: Tensor | None = None) -> None:
        """Count an update that was made, or left out where a flag on the device is one."""
        self._updates += 1
        if overflow is not None:
            self._device_skips = overflow.clone() if self._device_skips is None else self._device_skips + overflow

    def count_skip(self, logger: logging.Logger) -> None:
        """Count an update that was left out, and log it from time to time."""
        self._skips += 1
        if self._skips == 1 or self.real_step - self._logged_at >= _LOG_EVERY:
            self._logged_at = self.real_step
            text = "unit %s: the gradients of real step %d are not finite; %d updates skipped so far."
            logger.warning(text, self.name, self.real_step, self.skipped_steps)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> StateDict:
        """Return optimizer, scaler, clock and, inside a window, its gradients."""
        return save_unit(self)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go on from a saved state; base rates come from the configuration, not from the file."""
        load_unit(self, state_dict)

    def __repr__(self) -> str:
        owned = f"optim_loss={self.optim_loss!r}, updated_modules={self.updated_modules!r}"
        extra = f", {self.extra_repr_fn()}" if self.extra_repr_fn() else ""
        return f"{type(self).__name__}(optimizer={type(self.optimizer).__name__}, {owned}{extra})"


def _ratios(base_lrs: list[float]) -> list[float]:
    """Return each group's rate relative to the first one's."""
    first = base_lrs[0]
    if first == 0 and any(base_lrs):
        raise ConfigError(
            f"the learning rates of the groups are {base_lrs}: the first must not be 0, because the others are scaled relative to it."
        )
    return [1.0 if lr == first else lr / first for lr in base_lrs]
