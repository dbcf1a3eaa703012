"""What several units do together: backward passes that they share, and the end of their windows.

Units that follow the same loss with the same divisor and the same gradient scaler need one pass, not one each. A pass
that covers every trainable parameter is a plain `loss.backward()`; a smaller one names its parameters, so that no other
unit's gradients are touched. The graph is kept until the last pass of a batch.

At the end of a window each unit's `Stepper` completes its gradients. Only what units share is here: gradients that no reducer has
averaged go over the network together, and whether gradients are finite is read once for all units, and not at all for fused
optimizers, which take the verdict as a flag on the device.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.arguments import check_number
from drivetrain.core.errors import BatchOutputError, ConfigError, SharedGraphError, did_you_mean
from drivetrain.module.finite import nonfinite_flag, on_any_rank
from drivetrain.module.gradient_sync import GradientSync, average_gradients
from drivetrain.module.stepper import grad_norm, scale_to_norm

if TYPE_CHECKING:
    from drivetrain.optim.scheduler import OptimScheduler


Terms = tuple[tuple[str, float], ...]
LossNames = str | Sequence[str] | Mapping[str, float] | None
Losses = Mapping[str, Tensor] | Tensor


def loss_terms(optim_loss: LossNames) -> Terms:
    """Return what an `optim_loss` argument means: names with weights.

    >>> loss_terms(None), loss_terms(["ctc", "att"]), loss_terms({"ctc": 0.3})
    ((('loss', 1.0),), (('ctc', 1.0), ('att', 1.0)), (('ctc', 0.3),))
    """
    terms: list[tuple[Any, Any]] = []
    if optim_loss is None or isinstance(optim_loss, str):
        terms = [("loss" if optim_loss is None else optim_loss, 1.0)]
    elif isinstance(optim_loss, Mapping):
        terms = list(optim_loss.items())
    elif isinstance(optim_loss, Sequence):
        terms = [(name, 1.0) for name in optim_loss]
    for name, weight in terms:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"optim_loss={optim_loss!r}: {name!r} is not the name of a loss.")
        check_number(f"optim_loss[{name!r}]", weight)
    if not terms or len(dict(terms)) < len(terms):
        raise ConfigError(f"optim_loss={optim_loss!r}: expected a name, a list of different names or {{name: weight}}.")
    return tuple((name, float(weight)) for name, weight in terms)


def pick_loss(losses: Losses, terms: Terms, unit: str) -> Tensor:
    """Return the unit's loss from what the model gave, as a scalar that has a gradient; nothing is changed in place."""
    if isinstance(losses, Tensor):
        losses = {"loss": losses}
    total: Tensor | None = None
    for name, weight in terms:
        value = losses.get(name)
        if name not in losses:
            given = f"{did_you_mean(name, losses)} Losses given: {', '.join(map(str, losses)) or 'none'}."
            raise BatchOutputError(f"unit {unit!r} follows the loss {name!r}, which was not returned.{given}")
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise ConfigError(f"unit {unit!r}: the loss {name!r} is {what}; expected a tensor with one element.")
        term = value if weight == 1.0 else value * weight
        total = term if total is None else total + term
    assert total is not None
    if not total.requires_grad:
        shown = " + ".join(repr(name) if weight == 1.0 else f"{weight:g}*{name!r}" for name, weight in terms)
        raise ConfigError(
            f"unit {unit!r}: the loss {shown} has no gradient. It was computed under no_grad, detached, or from frozen parameters only."
        )
    return total if total.ndim == 0 else total.squeeze()


Weight = float | Tensor | None
"""The weight of a batch in the mean over its window; None means one, on every rank."""
_log = logging.getLogger(__name__)


def plan_passes(units: Sequence["OptimScheduler"]) -> list["Pass"]:
    """Return the passes of a batch in which these units are active, in the order of the units."""
    together: dict[tuple[object, ...], list[OptimScheduler]] = {}
    for unit in units:
        together.setdefault((unit.loss_terms, unit.window.length, id(unit.scaling), id(unit.sync)), []).append(unit)
    passes = [Pass(members) for members in together.values()]
    if len(passes) > 1:
        for sync in {id(unit.sync): unit.sync for unit in units}.values():
            _check_several_passes(sync, units)
            sync.allow_repeated_backward()
    return passes


def _check_several_passes(sync: GradientSync, units: Sequence["OptimScheduler"]) -> None:
    """Raise where a wrapper gives no way to take gradients of parts of the model."""
    if sync.unsupported is not None:
        raise ConfigError(
            f"the units {', '.join(unit.name for unit in units)} need several backward passes, which {sync.unsupported} does not "
            "support. Wrap the model in DistributedDataParallel or shard it with fully_shard, or use one unit that owns everything."
        )


class Pass:
    """One backward for one or more units."""

    def __init__(self, units: Sequence["OptimScheduler"]):
        self.units = tuple(units)
        self.leader = self.units[0]
        self.sync = self.leader.sync
        self.parameters: list[nn.Parameter] = [p for unit in self.units for p in unit.params]
        own = {id(p) for p in self.parameters}
        self.foreign = [p for p in self.sync.parameters if id(p) not in own]
        if self.foreign:
            _check_several_passes(self.sync, self.units)
        self._verified = -1  # how many parameters were trainable when gradients were last seen to arrive

    def covers_everything(self) -> bool:
        """Return whether no trainable parameter of the model is left out."""
        return not self.foreign or not any(p.requires_grad for p in self.foreign)

    def run(self, losses: Losses, weight: Weight, retain_graph: bool) -> None:
        """Back-propagate the units' loss; a pass whose parameters are all frozen at present has nothing to do."""
        leader = self.leader
        everything = self.covers_everything()
        trainable = None if everything and self._verified >= 0 else [p for p in self.parameters if p.requires_grad]
        if trainable is not None and not trainable:
            return
        items = 1 if weight is None else weight
        loss = leader.window.scaled(pick_loss(losses, leader.loss_terms, leader.name), items)
        scaler = leader.scaling.scaler_for(loss, leader.params, leader.use_amp, leader.name)
        if scaler is not None:
            loss = scaler.scale(loss)
        if trainable is not None and len(trainable) != self._verified:
            self._verify(loss, trainable, everything, retain_graph)
        else:
            self._backward(loss, trainable, everything, retain_graph)
        is_reduced = everything and self.sync.reducer_runs()
        for unit in self.units:
            window = unit.window
            window.count += 1
            # Weights of other ranks are known where there are none, and where every rank has the weight one.
            window.add(items, window.world if weight is None else items if window.world == 1 else None)
            unit.stepper.scaler, unit.is_reduced = scaler, is_reduced

    def _backward(
        self, loss: Tensor, trainable: list[nn.Parameter] | None, everything: bool, retain_graph: bool
    ) -> None:
        if not everything and not self.sync.is_sharded and self.sync.reducer_runs():
            raise RuntimeError(
                f"unit {self.leader.name!r} takes gradients of a part of a DDP model, which must run without its reducer. "
                "Run forward and backward inside `with optim_set.sync_context(plan):`, where plan is the result of begin_batch."
            )
        # The hooks of fully_shard fill every gradient; those of others are restored.
        kept = [] if everything or not self.sync.is_sharded else [(p, p.grad) for p in self.foreign]
        for p, _ in kept:
            p.grad = None
        try:
            loss.backward(inputs=None if everything or self.sync.is_sharded else trainable, retain_graph=retain_graph)
        except RuntimeError as problem:
            advice = _advice(str(problem))
            if advice is None:
                raise
            raise SharedGraphError(f"unit {self.leader.name!r}: {advice}") from problem
        for p, grad in kept:
            p.grad = grad

    def _verify(self, loss: Tensor, trainable: list[nn.Parameter], everything: bool, retain_graph: bool) -> None:
        """Back-propagate and see that every unit received a gradient: torch is silent when nothing is reachable."""
        kept = [(p, p.grad) for p in trainable if p.grad is not None]
        for p, _ in kept:
            p.grad = None
        self._backward(loss, trainable, everything, retain_graph)
        for unit in self.units:
            own = [p for p in unit.params if p.requires_grad]
            if own and all(p.grad is None for p in own):
                raise ConfigError(
                    f"unit {unit.name!r}: its loss does not reach any of its {len(own)} parameters ({unit.param_names[0]}, ...). Either "
                    f"the loss {unit.optim_loss or 'loss'!r} does not depend on these modules, or reentrant activation checkpointing hides "
                    "them: use checkpoint(..., use_reentrant=False)."
                )
        for p, grad in kept:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        self._verified = len(trainable)


def _advice(problem: str) -> str | None:
    """Return what to do about an error of torch that losses with a common graph cause, None for any other."""
    if "backward through the graph a second time" in problem:
        what = "its loss shares a graph with a loss that was already back-propagated, and torch has freed that graph."
    elif "modified by an inplace operation" in problem:
        what = "the graph of its loss needs weights that have changed since, probably by the step of another unit."
    else:
        return None
    return (
        f"{what} Put the units into one OptimSet, which runs all backward passes before all steps. By hand: call "
        "backward(losses, retain_graph=True) of every unit, without retain_graph for the last one, and then update() of every unit. "
        "Detach what is carried over from an earlier batch."
    )


# ---------------------------------------------------------------------- the end of a window


def finish_units(units: Sequence["OptimScheduler"]) -> None:
    """Make the gradients of these units the mean over their windows and over all ranks; a second call changes nothing."""
    units = [unit for unit in units if not unit.stepper.is_finished]
    waiting = [unit for unit in units if unit.window.world > 1 and not unit.is_reduced and not unit.sync.is_sharded]
    for sync in {unit.sync: None for unit in waiting}:
        average_gradients([p for unit in waiting if unit.sync is sync for p in unit.params], sync.group())
        if sync.ddp is not None and sync.ddp.broadcast_buffers and sync.ddp.modules_buffers:
            sync.ddp._sync_buffers()  # as in the forward passes that DDP synchronises
    for unit in units:
        unit.stepper.finish()


def update_units(units: Sequence["OptimScheduler"], logger: logging.Logger = _log) -> list[bool]:
    """Clip, test and step these units; return which of them changed their parameters, as far as the host knows."""
    for unit in units:
        unit.last_grad_norm = None
        if unit.grad_clip is not None or unit.is_tested:
            unit.last_grad_norm = norm = grad_norm(unit.params, unit.grad_norm_type, device=unit.params[0].device)
            if unit.grad_clip is not None:
                scale_to_norm(unit.params, unit.grad_clip, norm)
    finite = _verdicts(units)
    stepped = [_step(unit, verdict, logger) for unit, verdict in zip(units, finite)]
    update_scalers(units)
    return stepped


def update_scalers(units: Sequence["OptimScheduler"]) -> None:
    """Adapt the scales to what was found in the gradients, each scaler once."""
    for scaler in {id(unit.scaler): unit.scaler for unit in units if unit.scaler is not None}.values():
        scaler.update()


def _verdicts(units: Sequence["OptimScheduler"]) -> list[bool | Tensor]:
    """Return for each unit whether its gradients are finite on all ranks; for fused optimizers a device flag, set where they are not.

    The units of a model exchange their flags at once, and the host waits once for all that it reads.
    """
    flags: dict[int, Tensor] = {}
    verdicts: list[bool | Tensor] = [True] * len(units)
    for index, unit in enumerate(units):
        norm = unit.last_grad_norm if unit.is_tested else None
        if norm is not None and norm.is_cpu and unit.window.world == 1 and not unit.skips_on_device:
            verdicts[index] = math.isfinite(norm.item())  # on the host already, and nobody else's concern
        elif norm is not None:
            flags[index] = nonfinite_flag([norm])
    for sync in {units[index].sync: None for index in flags if units[index].window.world > 1}:
        own = [index for index in flags if units[index].sync is sync]
        flags.update(zip(own, on_any_rank(torch.stack([flags[index] for index in own]), sync.group())))
    for index, flag in flags.items():
        verdicts[index] = flag
    read = [index for index in flags if not units[index].skips_on_device]
    if read:
        found = torch.stack([flags[index].to(flags[read[0]].device) for index in read]).tolist()
        for index, is_bad in zip(read, found):
            verdicts[index] = not is_bad
    return verdicts


def _step(unit: "OptimScheduler", verdict: bool | Tensor, logger: logging.Logger) -> bool:
    if isinstance(verdict, Tensor):
        unit.stepper.step_unless(verdict)
        unit.count_update(verdict)
        return verdict.device.type != "cpu" or not bool(verdict)
    unit.stepper.was_skipped = not verdict
    if verdict:
        unit.stepper.step_optimizer()
        unit.count_update()
        return True
    if unit.nonfinite == "raise" and unit.scaler is None:
        raise FloatingPointError(
            f"unit {unit.name!r}: the gradient norm at real step {unit.real_step} is {unit.last_grad_norm}. "
            "nonfinite='skip' would skip this update, nonfinite='ignore' would apply it."
        )
    unit.count_skip(logger)
    return False
