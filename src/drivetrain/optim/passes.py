"""Backward passes that several units share, each leaving gradients only in the parameters of its own units.

Units that follow the same loss with the same divisor and the same gradient scaler need one pass, not one each. A pass
that covers every trainable parameter is a plain `loss.backward()`; a smaller one names its parameters, so that no other
unit's gradients are touched. The graph is kept until the last pass of a batch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.optim.losses import Losses, pick_loss
from drivetrain.optim.window import Weight

if TYPE_CHECKING:
    from drivetrain.optim.scheduler import OptimScheduler


def plan_passes(units: Sequence["OptimScheduler"]) -> list["Pass"]:
    """Return the passes of a batch in which these units are active, in the order of the units."""
    together: dict[tuple[object, ...], list[OptimScheduler]] = {}
    for unit in units:
        together.setdefault((unit.loss_terms, unit.window.length, id(unit.scaling), id(unit.terrain)), []).append(unit)
    passes = [Pass(members) for members in together.values()]
    if len(passes) > 1:
        for terrain in {id(unit.terrain): unit.terrain for unit in units}.values():
            terrain.refuse_several_passes([unit.name for unit in units])
            terrain.allow_repeated_backward()
    return passes


class Pass:
    """One backward for one or more units."""

    def __init__(self, units: Sequence["OptimScheduler"]):
        self.units = tuple(units)
        self.leader = self.units[0]
        self.terrain = self.leader.terrain
        self.parameters: list[nn.Parameter] = [p for unit in self.units for p in unit.params]
        own = {id(p) for p in self.parameters}
        self.foreign = [p for p in self.terrain.parameters if id(p) not in own]
        if self.foreign and self.terrain.stranger is not None:
            self.terrain.refuse_several_passes([unit.name for unit in self.units])
        self._verified = -1  # how many parameters were trainable when gradients were last seen to arrive

    def covers_everything(self) -> bool:
        """Say whether no trainable parameter of the model is left out."""
        return not self.foreign or not any(p.requires_grad for p in self.foreign)

    def run(self, losses: Losses, weight: Weight, retain_graph: bool) -> None:
        """Back-propagate the units' loss; a pass whose parameters are all frozen at present has nothing to do."""
        leader = self.leader
        everything = self.covers_everything()
        trainable = None if everything and self._verified >= 0 else [p for p in self.parameters if p.requires_grad]
        if trainable is not None and not trainable:
            return
        loss = leader.window.scaled(pick_loss(losses, leader.loss_terms, leader.name), weight)
        scaler = leader.scaling.scaler_for(leader, loss)
        if scaler is not None:
            loss = scaler.scale(loss)
        if trainable is not None and len(trainable) != self._verified:
            self._verify(loss, trainable, everything, retain_graph)
        else:
            self._backward(loss, trainable, everything, retain_graph)
        reduced = everything and self.terrain.reducer_runs()
        for unit in self.units:
            unit.window.add(weight)
            unit.is_reduced = reduced

    def _backward(
        self, loss: Tensor, trainable: list[nn.Parameter] | None, everything: bool, retain_graph: bool
    ) -> None:
        if everything:
            loss.backward(retain_graph=retain_graph)
        elif self.terrain.is_sharded:
            # The hooks of fully_shard fill every gradient; foreign ones are put back as they were.
            kept = [(p, p.grad) for p in self.foreign]
            for p in self.foreign:
                p.grad = None
            loss.backward(retain_graph=retain_graph)
            for p, grad in kept:
                p.grad = grad
        else:
            if self.terrain.reducer_runs():
                raise RuntimeError(
                    f"unit {self.leader.name!r} takes gradients of a part of a DDP model, which must run without its reducer. "
                    "Enclose forward and backward in `with optim_set.sync_context(plan):`, plan being what begin_batch returned."
                )
            loss.backward(inputs=trainable, retain_graph=retain_graph)

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
                    f"unit {unit.name!r}: its loss reaches none of its {len(own)} parameters ({unit.param_names[0]}, ...). Either the "
                    f"loss {unit.optim_loss or 'loss'!r} does not depend on these modules, or reentrant activation checkpointing hides "
                    "them: use checkpoint(..., use_reentrant=False)."
                )
        for p, grad in kept:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        self._verified = len(trainable)
