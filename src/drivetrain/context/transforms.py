"""Changes of a whole Context: to a device, into DDP, into shards.

Each is one walk over all items. An object that appears in several places is changed once and stays one object.
Optimizers come last, when their parameters are where they will be.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.context.coders import PLAIN
from drivetrain.context.kinds import Kind
from drivetrain.context.moving import move_optimizer_state
from drivetrain.context.table import MODULE_KIND, kind_of, walk
from drivetrain.core.types import Item, Settings
from drivetrain.module.sharding import rebind_optimizer
from drivetrain.module.wrapping import named_clean_parameters, unwrap

if TYPE_CHECKING:
    from drivetrain.context.context import Context


class Transform:
    """One change in progress."""

    def __init__(self) -> None:
        self.followers: list[Optimizer] = []
        self._done: dict[
            int, tuple[object, object]
        ] = {}  # holds on to the originals, so that no identity is used twice

    def act(self, kind: Kind, item: object) -> Item:
        """Change one item that is not a container."""
        raise NotImplementedError

    def apply(self, context: "Context") -> None:
        """Change a whole Context."""
        self.visit(context)

    def visit(self, item: object) -> Item:
        """Change an item and everything in it."""
        if type(item) in PLAIN:
            return item
        if id(item) in self._done:
            return self._done[id(item)][1]
        kind = kind_of(item)
        self._done[id(item)] = (item, item)  # a container may contain itself
        changed = kind.rebuild(item, self.visit) if kind.is_container else self.act(kind, item)
        self._done[id(item)] = (item, changed)
        return changed


class Move(Transform):
    """Everything to one device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def apply(self, context: "Context") -> None:
        """Move the items of a Context; a move that cannot be made is rejected before the first one."""
        for path, kind, item in walk(context):
            if kind is MODULE_KIND:
                MODULE_KIND.check_move(item, self.device, path)
        self.visit(context)
        for optimizer in self.followers:
            move_optimizer_state(optimizer)

    def act(self, kind: Kind, item: object) -> Item:
        return kind.move(item, self)


class DataParallel(Transform):
    """Every trainable module into DDP."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings

    def act(self, kind: Kind, item: object) -> Item:
        return kind.ddp(item, self)


class Shard(Transform):
    """The parameters of every module split over the processes, with optimizers rebound to them."""

    def __init__(self, mesh: object, settings: Settings):
        super().__init__()
        self.mesh, self.settings = mesh, settings

    def apply(self, context: "Context") -> None:
        """Shard the modules of a Context."""
        modules = [unwrap(item) for _, kind, item in walk(context) if kind is MODULE_KIND]
        together = nn.ModuleList(modules)  # one optimizer may train several modules
        before = dict(named_clean_parameters(together))
        self.visit(context)
        for optimizer in dict.fromkeys(self.followers):
            _rebind(optimizer, before, modules)

    def act(self, kind: Kind, item: object) -> Item:
        return kind.fsdp(item, self)


def _rebind(optimizer: Optimizer, before: dict[str, nn.Parameter], modules: list[nn.Module]) -> None:
    sharded = {id(parameter) for parameter in before.values()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    alone = [parameter for parameter in held if id(parameter) not in sharded]
    if len(alone) == len(held):
        return  # built after sharding, or of parameters in no module
    together = nn.ModuleList([*modules, nn.ParameterList(alone)])
    names = {f"{len(modules)}.{index}": parameter for index, parameter in enumerate(alone)}
    rebind_optimizer(optimizer, {**before, **names}, together)
