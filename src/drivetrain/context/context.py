"""The Context: one object that holds a training session, and moves, saves and restores it as a whole.

Registration is attribute assignment, at Python's own price: there is no `__setattr__`, the items simply are the
instance's attributes. Names that begin with an underscore are private. What can be done with an item depends on its
kind; the kinds are listed in `loading.py`, and each of the methods below is one walk over them.

A change of all items (to a device, into DDP, into shards) is a `Transform`. An object that appears in several places is changed once and
stays one object. Optimizers come last, when their parameters are where they will be.
"""

import logging
from collections.abc import Callable, ItemsView, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.context.kinds import ItemHolder, Kind
from drivetrain.context.loading import MODULE_KIND, OTHER_KIND, Loading, LoadReport, Saving, kind_of, walk
from drivetrain.context.moving import move_optimizer_state
from drivetrain.core.display import aligned
from drivetrain.core.errors import ConfigError, ExperimentError, ResumeError, unknown_name
from drivetrain.core.types import Item, Settings, StateDict
from drivetrain.module.sharding import rebind_optimizer
from drivetrain.module.wrapping import named_clean_parameters, unwrap
from drivetrain.runtime.coders import PLAIN
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.group import join_launched_world
from drivetrain.runtime.ranks import is_distributed, is_master, require_group
from drivetrain.runtime.run import ExperimentRun, current_run
from drivetrain.runtime.seeds import reseed_rank, restore_rng

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("drivetrain")


class Transform:
    """One change in progress."""

    def __init__(self) -> None:
        self.followers: list[Optimizer] = []
        self._done: dict[int, tuple[object, object]] = {}  # keeps the originals, so that no identity is used twice

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

    def __init__(self, mesh: "DeviceMesh | None", settings: Settings):
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


class StateLayout(Protocol):
    """How a session that a plan has spread over ranks is saved and restored."""

    def save(self, context: "Context", full: bool) -> StateDict:
        """Return the state of every item."""

    def own_part(self, context: "Context", state: StateDict) -> StateDict:
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

    if TYPE_CHECKING:  # items are attributes of any name

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, item: object) -> None: ...

    def __init__(self, **items: object):
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

    @device.setter
    def device(self, value: torch.device | str | None) -> None:
        raise ConfigError(
            f"ctx.device = {str(value)!r}: `device` is where the Context is, and not the name of an item. Move everything with "
            f"ctx.to({str(value)!r}), or keep the device under another name."
        )

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
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def ddp(self, **ddp_kwargs: object) -> Self:
        """Make the session one of several equal processes: trainable modules into DDP, loaders split, own random stream.

        Keywords are those of DistributedDataParallel. A second call changes nothing.
        """
        return self._distribute("ddp", DataParallel(ddp_kwargs))

    def fsdp(self, mesh: "DeviceMesh | None" = None, **fully_shard_kwargs: object) -> Self:
        """Split the parameters of every module over the processes; optimizers made before are rebound to them by name.

        Keywords are those of `drivetrain.module.sharding.shard_fully` and of torch's `fully_shard`.
        """
        return self._distribute("fsdp", Shard(mesh, fully_shard_kwargs))

    def autotransform(self) -> Self:
        """Do what the run requests: restore, move to its device, distribute, then restore random states.

        Outside a run the device is chosen, and the launcher's world is joined.
        """
        run = current_run()
        device = wanted_device(run)
        join_launched_world(device)
        random_states = None if run is None else _restore(self, run)
        self.to(device)
        if is_distributed() or (run is not None and run.params.get("distributed")):
            self.ddp()
        if random_states is not None:
            restore_rng(random_states, self.device)
        return self

    def state_dict(self, *, full: bool = False) -> StateDict:
        """Return the state of every item, in plain containers and tensors that `torch.load(weights_only=True)` accepts.

        Tensors are those of the session, not copies. `full` gathers sharded tensors on the CPU of rank 0: call it on all ranks; the
        others get an empty dict.
        """
        state = Saving(self, full).pack(self, "") if self._layout is None else self._layout.save(self, full)
        return {} if full and not is_master() else state

    def load_state_dict(self, state: StateDict, strict: bool = True) -> LoadReport:
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
            device, wrapper = str(kind.device(item) or "-"), kind.wrapper(item) or "-"
            rows.append((name, kind.name, kind.describe(item), device, wrapper, saved))
        return "\n".join(aligned(rows))

    def items(self) -> ItemsView[str, Any]:
        """Return the registered items and their names."""
        return self._items().items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._items())})"

    # What the kinds and the walks ask.

    def _items(self) -> dict[str, Item]:
        """Return the registered items by name."""
        self._check_names()
        return {
            name: item for name, item in vars(self).items() if not name.startswith("_") and name not in self.transient
        }

    def _saved_items(self) -> dict[str, Item]:
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
        require_group(f"{verb}()")
        transform.apply(self)
        if not self._has_own_stream:
            reseed_rank(self._seed())
            self._has_own_stream = True
        return self


_RESERVED = frozenset(name for name, value in vars(Context).items() if callable(value) and not name.startswith("_"))


Restorer = Callable[[Context], Mapping[str, object] | None]
"""Loads a Context from the run's checkpoint and returns what `capture_rng` had returned, or None to leave random states alone.

Reading checkpoints belongs to a folder above this one, so whoever starts a run that begins from a checkpoint sets `run.restore`. The
random states are applied last, because moving and distributing draw random numbers and reseed.
"""


def _restore(context: Context, run: ExperimentRun) -> Mapping[str, object] | None:
    restorer: Restorer | None = getattr(run, "restore", None)
    if restorer is None:
        if run.params.get("checkpoint") is not None:
            raise ExperimentError(
                f"the run was given checkpoint={run.params['checkpoint']!r}, but run.restore is None, so nothing reads it. "
                "Start the run through drivetrain.experiment, or load it with ctx.load_state_dict(load_checkpoint(...))."
            )
        return None
    if run.params.get("resume", "never") not in ("never", None):
        _check_exact(context)
    return restorer(context)


def _check_exact(context: Context) -> None:
    """Reject a resume of a Context with a loader without state, whose position in the data is not known."""
    unknown = [(path, item) for path, kind, item in walk(context) if kind is OTHER_KIND]
    lost = [path for path, item in unknown if isinstance(item, torch.utils.data.DataLoader)]
    if lost:
        raise ResumeError(
            f"{', '.join(lost)}: a loader without state cannot continue at the sample where the run stopped. Use "
            "drivetrain.SmartDataLoader, or start a new run from the weights with --checkpoint."
        )


def wanted_device(run: ExperimentRun | None) -> torch.device:
    """Return the device a run asks for: `device`, else CUDA as `cuda` says; a default falls back to the CPU, a request fails."""
    params = {} if run is None else run.params
    if params.get("device", "auto") not in (None, "auto"):
        return choose_device(params["device"])
    if not params.get("cuda", True):
        return torch.device("cpu")
    asked = run is not None and run.origins.get("cuda", "default") not in ("default", "defaults")
    device = choose_device("cuda" if asked else "auto")
    if run is not None and device.type == "cpu":
        log.info("No accelerator found: running on the CPU.")
    return device
