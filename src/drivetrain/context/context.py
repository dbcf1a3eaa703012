"""The Context: one object that holds a training session, and moves, saves and restores it as a whole.

Registration is attribute assignment, at Python's own price: there is no `__setattr__`, the items simply are the
instance's attributes. Names that begin with an underscore are private. What can be done with an item depends on its
kind; the kinds are listed in `table.py`, and each of the methods below is one walk over them.
"""

from collections.abc import ItemsView
from typing import Any, ClassVar, Protocol, Self

import torch

from drivetrain.context.kinds import ItemHolder
from drivetrain.context.loading import Loading, LoadReport
from drivetrain.context.restore import follow_run
from drivetrain.context.saving import Saving
from drivetrain.context.table import kind_of, walk
from drivetrain.context.transforms import DataParallel, Move, Shard, Transform
from drivetrain.core.errors import ConfigError, DistributedError, unknown_name
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.ranks import is_distributed, is_master
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import reseed_rank


class StateLayout(Protocol):
    """How a session that a plan has spread over ranks is saved and restored."""

    def save(self, context: "Context", full: bool) -> dict[str, Any]:
        """Return the state of every item."""

    def own_part(self, context: "Context", state: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank takes of a saved state."""


class Context(ItemHolder):
    """A training session as one object: register everything that matters, then move, save and restore it together.

    Args:
        **items: the first items; others are set as attributes.

    >>> ctx = Context(epoch=0)
    >>> ctx.model = torch.nn.Linear(2, 1)
    >>> ctx.optimizer = torch.optim.SGD(ctx.model.parameters(), lr=0.1)
    >>> sorted(ctx.cpu().state_dict())
    ['epoch', 'model', 'optimizer']
    """

    transient: ClassVar[frozenset[str]] = frozenset()
    """Names that are never saved nor moved."""
    rank_local: ClassVar[tuple[str, ...]] = ()
    """Patterns over paths of the state that differ from rank to rank, such as `"window.*"`; generators always do."""

    _excluded: frozenset[str] = frozenset()
    _layout: "StateLayout | None" = None
    _has_own_stream = False

    def __init__(self, **items: Any):
        for name, item in items.items():
            setattr(self, name, item)
        self._check_names()

    @property
    def device(self) -> torch.device:
        """Where the Context was moved, else where its first module or tensor is, else the CPU."""
        if self._device is not None:
            return self._device
        places = (kind.device(item) for _, kind, item in walk(self))
        return next((place for place in places if place is not None), torch.device("cpu"))

    def to(self, device: torch.device | str) -> Self:
        """Move every item; under DDP, call it on all ranks. A device that is not there leaves the Context untouched."""
        target = choose_device(device)
        Move(target).apply(self)
        self._device = target
        return self

    def cpu(self) -> Self:
        """Move every item to the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device | None = None) -> Self:
        """Move every item to a CUDA device: the given one, else this process's own."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    def ddp(self, **ddp_kwargs: Any) -> Self:
        """Make the session one of several equal processes: trainable modules into DDP, loaders split, own random stream.

        Keywords are those of DistributedDataParallel. A second call changes nothing.
        """
        return self._distribute("ddp", DataParallel(ddp_kwargs))

    def fsdp(self, mesh: Any = None, **fully_shard_kwargs: Any) -> Self:
        """Split the parameters of every module over the processes; optimizers made before are rebound to them by name.

        Keywords are those of `drivetrain.module.wrapping.shard_fully` and of torch's `fully_shard`.
        """
        return self._distribute("fsdp", Shard(mesh, fully_shard_kwargs))

    def autotransform(self) -> Self:
        """Do what the run asks for: restore, move to its device, distribute, then restore random states."""
        follow_run(self)
        return self

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return the state of every item, in plain containers and tensors that `torch.load(weights_only=True)` accepts.

        Tensors are those of the session, not copies. `full` gathers sharded tensors on the CPU of rank 0: call it on all ranks; the
        others get an empty dict.
        """
        state = Saving(self, full).pack(self, "") if self._layout is None else self._layout.save(self, full)
        return {} if full and not is_master() else state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> LoadReport:
        """Restore a saved state.

        With `strict`, everything that is missing, unexpected or does not fit is raised in one StateError before anything is
        changed. Without, what fits is restored and the report lists the rest.
        """
        if self._layout is not None:
            state = self._layout.own_part(self, state)
        loading = Loading(self, strict)
        return loading.finish(loading.fit(self, state, ""))

    def exclude(self, *names: str) -> Self:
        """Leave items out of the state; they still move."""
        for name in names:
            if name not in vars(self):
                raise ConfigError(unknown_name("item", name, self._items(), where="exclude"))
        self._excluded = self._excluded | set(names)
        return self

    def explain(self) -> str:
        """Return a table of the items: kind, type, device, wrapper, and whether and how each is saved."""
        rows = [("name", "kind", "type", "device", "wrapper", "saved")]
        for name, item in self._items().items():
            kind = self._own_kind(name, item) or kind_of(item)
            saved = "no (excluded)" if name in self._excluded else kind.saved_as(item)
            rows.append(
                (name, kind.name, kind.describe(item), str(kind.device(item) or "-"), kind.wrapper(item) or "-", saved)
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def items(self) -> ItemsView[str, Any]:
        """Return the registered items and their names."""
        return self._items().items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._items())})"

    # What the kinds and the walks ask.

    def _items(self) -> dict[str, Any]:
        """Return the registered items by name."""
        self._check_names()
        return {
            name: item for name, item in vars(self).items() if not name.startswith("_") and name not in self.transient
        }

    def _saved_items(self) -> dict[str, Any]:
        return {name: item for name, item in self._items().items() if name not in self._excluded}

    def _seed(self) -> int:
        """Return the seed that is the same on all ranks, from which each derives its own."""
        run = current_run()
        return run.seed if run is not None else broadcast_from_master(torch.initial_seed())

    def _check_names(self) -> None:
        hidden = _RESERVED.intersection(vars(self))
        if hidden:
            raise ConfigError(
                f"{sorted(hidden)[0]!r} is a method of Context and cannot be the name of an item. Choose another name."
            )

    def _distribute(self, verb: str, transform: Transform) -> Self:
        if not is_distributed():
            raise DistributedError(
                f"{verb}() needs a process group, and there is none. Start the program with `torchrun --nproc-per-node=2 "
                "program.py` and call drivetrain.init_distributed() first, or start the experiment with --distributed."
            )
        transform.apply(self)
        if not self._has_own_stream:
            reseed_rank(self._seed())
            self._has_own_stream = True
        return self


_RESERVED = frozenset(name for name, value in vars(Context).items() if callable(value) and not name.startswith("_"))
