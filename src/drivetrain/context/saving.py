"""Taking the state of a Context: one walk, in which items with state of their own are asked for it."""

import warnings
from functools import cached_property

import torch

from drivetrain.context.codec import Packer
from drivetrain.context.kinds import ItemHolder
from drivetrain.context.optimizers import Names
from drivetrain.context.table import kind_of, parameter_names
from drivetrain.core.errors import DrivetrainWarning
from drivetrain.core.types import Saved
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.runtime.ranks import is_master


class Saving(Packer):
    """One `state_dict()` in progress; `full` gathers sharded tensors on the CPU of rank 0."""

    def __init__(self, root: ItemHolder, full: bool = False):
        super().__init__(None, _gathered if full else torch.Tensor.detach)
        self._root = root

    @cached_property
    def parameter_names(self) -> Names:
        """Names of all parameters in the Context, by identity."""
        return parameter_names(self._root)

    def save_named(self, context: ItemHolder, name: str, item: object, path: str) -> Saved:
        """Save one item of a Context, in the way the Context has for that name."""
        kind = context._own_kind(name, item)
        return kind.save(item, self, path) if kind is not None and kind.saves_itself else self.pack(item, path)

    def warn_unknown(self, path: str, item: object) -> None:
        """Name an object that cannot be saved, once for each Context."""
        if path in self._root._warned:
            return
        self._root._warned = self._root._warned | {path}
        advice = (
            "use drivetrain.SmartDataLoader, which saves its position in the data"
            if isinstance(item, torch.utils.data.DataLoader)
            else "give it state_dict() and load_state_dict(state)"
        )
        warnings.warn(
            f"{path} is a {type(item).__name__}, which has no state to save. To save it, {advice}; if that is meant, "
            f"call exclude({path.partition('.')[0]!r}) or begin its name with an underscore.",
            DrivetrainWarning,
            stacklevel=2,
        )

    def pack_special(self, item: object, path: str) -> Saved:
        """Ask an item that has state of its own for it."""
        kind = kind_of(item)
        return kind.save(item, self, path) if kind.saves_itself else NotImplemented


def _gathered(tensor: torch.Tensor) -> torch.Tensor | None:
    full = tensor.detach()
    if is_dtensor(full):
        full = full.full_tensor()  # type: ignore[attr-defined]
    return full.cpu() if is_master() else None  # the others only take part
