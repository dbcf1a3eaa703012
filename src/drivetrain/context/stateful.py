"""Items with state of their own: modules, optimizers, nested Contexts, and objects with `state_dict` and
`load_state_dict`.

They stay the same objects through a load: what is restored is inside them. Objects of the last kind (schedulers,
scalers, metrics, loaders, recorders) take part by structure alone: `.to(device)`, `.ddp()`, `state_dict()`,
`load_state_dict(state)`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.context.kinds import ItemHolder, Kind, Restore, keep
from drivetrain.context.optimizers import fit_optimizer, is_torch_form, save_optimizer
from drivetrain.context.values import ask
from drivetrain.core.containers import join_path
from drivetrain.core.errors import DeviceError, DistributedError
from drivetrain.core.types import Item, Saved
from drivetrain.module import wrapping
from drivetrain.module.ddp import wrap_ddp
from drivetrain.module.sharding import shard_fully
from drivetrain.module.wrapping import is_fully_sharded, unwrap
from drivetrain.runtime.codec import with_metadata
from drivetrain.runtime.coders import NOT_STATE, tag_of

if TYPE_CHECKING:
    from drivetrain.context.context import DataParallel, Move, Shard
    from drivetrain.context.loading import Loading, Saving


class ModuleKind(Kind):
    """Modules, wrapped or bare; their state has the names of the user's own module."""

    name = "module"
    saves_itself = True

    def holds(self, item: object) -> bool:
        return isinstance(item, nn.Module)

    def has_state(self, item: nn.Module) -> bool:
        return len(item.state_dict(keep_vars=True)) > 0

    def device(self, item: nn.Module) -> torch.device | None:
        return next((tensor.device for tensor in (*item.parameters(), *item.buffers())), None)

    def describe(self, item: nn.Module) -> str:
        return type(unwrap(item)).__name__

    def wrapper(self, item: nn.Module) -> str | None:
        return "DDP" if isinstance(item, DistributedDataParallel) else wrapping.wrapping_of(item)

    def saved_as(self, item: nn.Module) -> str:
        count = len(item.state_dict(keep_vars=True))
        return f"own state, {count} entries" if count else "own state, empty"

    def check_move(self, item: nn.Module, device: torch.device, path: str) -> None:
        """Reject a move that a distributed module cannot make."""
        here = self.device(item)
        if here is not None and here.type != device.type and any(map(is_fully_sharded, item.modules())):
            raise DeviceError(
                f"{path} is sharded over {here.type} devices and cannot move to {str(device)!r}. Take state_dict(full=True) and load "
                "it into a Context that is not sharded."
            )
        shell = _ddp_shell(item)
        group: Any = None if shell is None else shell.process_group
        if group is not None and device.type not in {supported.type for supported in group._device_types}:
            raise DistributedError(
                f"{path} is in DDP, and the process group ({dist.get_backend(group)}) does not support {device.type} "
                f"devices, so it cannot be wrapped there. Start the group with init_distributed(backend='cpu:gloo,cuda:nccl')."
            )

    def move(self, item: nn.Module, job: "Move") -> nn.Module:
        if all(tensor.device == job.device for tensor in (*item.parameters(), *item.buffers())):
            return item
        shell = _ddp_shell(item)
        if shell is None:
            return item.to(job.device)
        # The buckets of DDP belong to the old device, so it is built again, with all settings but that device.
        settings = dict(vars(shell).get("_wrap_settings", {}))
        for name in ("device_ids", "output_device"):
            settings.pop(name, None)
        return wrap_ddp(unwrap(item, keep_compile=True).to(job.device), **settings)

    def ddp(self, item: nn.Module, job: "DataParallel") -> nn.Module:
        if any(map(is_fully_sharded, item.modules())):
            return item  # sharding averages gradients already
        return wrap_ddp(item, **job.settings)

    def fsdp(self, item: nn.Module, job: "Shard") -> nn.Module:
        if next(item.parameters(), None) is None:
            return item
        shell = unwrap(item, keep_compile=True)
        shard_fully(shell, job.mesh, **job.settings)  # in place, so torch.compile's shell stays on
        return shell

    def save(self, item: nn.Module, saving: "Saving", path: str) -> Saved:
        return saving.pack(wrapping.clean_state_dict(item), path)

    def fit(self, item: nn.Module, saved: Saved, loading: "Loading", path: str) -> Restore:
        if not isinstance(saved, Mapping) or tag_of(saved) is not None:
            return loading.add_mismatch(path, item, saved, "expected the state of a module")
        state = with_metadata(loading.unpack(saved), saved)
        for fault, name, reason in wrapping.state_faults(item, state):
            loading.note(fault, join_path(path, name), reason)
        loading.modules.append(lambda: wrapping.load_clean_state_dict(item, state, strict=loading.strict))
        return keep(item)


def _ddp_shell(module: nn.Module) -> DistributedDataParallel | None:
    return next((part for part in module.modules() if isinstance(part, DistributedDataParallel)), None)


class OptimizerKind(Kind):
    """Optimizers: their state follows their parameters."""

    name = "optimizer"
    saves_itself = True

    def holds(self, item: object) -> bool:
        return isinstance(item, Optimizer)

    def has_state(self, item: Optimizer) -> bool:
        return True

    def saved_as(self, item: Optimizer) -> str:
        return f"torch form with parameter names, {len(item.param_groups)} group{'s' * (len(item.param_groups) != 1)}"

    def move(self, item: Optimizer, job: "Move") -> Optimizer:
        job.followers.append(item)
        return item

    def fsdp(self, item: Optimizer, job: "Shard") -> Optimizer:
        job.followers.append(item)
        return item

    def save(self, item: Optimizer, saving: "Saving", path: str) -> Saved:
        return saving.pack(save_optimizer(item, saving.parameter_names), path)

    def fit(self, item: Optimizer, saved: Saved, loading: "Loading", path: str) -> Restore:
        if not is_torch_form(saved):
            if not isinstance(saved, Mapping) or is_torch_form(item.state_dict()):
                return loading.add_mismatch(path, item, saved, "expected the state of an optimizer")
            loading.try_to_load(path, item, loading.unpack(saved))
            return keep(item)
        problems, load = fit_optimizer(item, loading.unpack(saved), loading.parameter_names)
        for problem in problems:
            loading.add_mismatch(path, item, saved, problem)
        if load is None:
            return keep(item)

        def restore() -> None:
            for name in load(loading.mismatched_paths()):
                loading.note("unfitting", path, f"the state of {name} is not restored, because {name} is not")

        loading.optimizers.append(restore)
        return keep(item)


class ContextKind(Kind):
    """A Context inside another one."""

    name = "context"
    is_container = True
    saves_itself = True

    def holds(self, item: object) -> bool:
        return isinstance(item, ItemHolder)

    def children(self, item: Item) -> Iterable[tuple[object, object]]:
        return item._items().items()

    def rebuild(self, item: Item, change: Callable[[Any], object]) -> Item:
        for name, child in item._items().items():
            changed = change(child)
            if changed is not child:
                setattr(item, name, changed)
        return item

    def save(self, item: Item, saving: "Saving", path: str) -> Saved:
        saved = {}
        for name, child in item._saved_items().items():
            kind, where = item._own_kind(name, child), join_path(path, name)
            saves_itself = kind is not None and kind.saves_itself
            saved[name] = kind.save(child, saving, where) if saves_itself else saving.pack(child, where)
        return saved

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        if not isinstance(saved, Mapping) or tag_of(saved) is not None:
            return loading.add_mismatch(path, item, saved, "expected a mapping of names to states")
        live = item._saved_items()
        restores = {}
        for name, child in live.items():
            where = join_path(path, name)
            if name in saved:
                restores[name] = loading.fit(child, saved[name], where, item._own_kind(name, child))
            elif not loading.is_stateless(child):
                loading.note("missing", where)
        for name, state in saved.items():
            if name not in live and name not in item._excluded and tag_of(state) != NOT_STATE:
                loading.note("unexpected", join_path(path, name), valid=live)

        def restore() -> object:
            for name, put in restores.items():
                restored = put()
                if restored is not live[name]:
                    setattr(item, name, restored)
            return item

        return restore


class ObjectKind(Kind):
    """Any other object with `state_dict` and `load_state_dict`."""

    name = "object"
    saves_itself = True

    def holds(self, item: object) -> bool:
        owner = type(item) if isinstance(item, dict) else item  # one with entries as attributes may raise a KeyError
        load = None if isinstance(item, type) else getattr(owner, "load_state_dict", None)
        # A class method makes a new object, as Timestamp's does; such an item is a value and has no state to restore.
        return (
            callable(load)
            and callable(getattr(owner, "state_dict", None))
            and not isinstance(getattr(load, "__self__", None), type)
        )

    def has_state(self, item: object) -> bool:
        return True

    def saved_as(self, item: object) -> str:
        return "own state_dict"

    def device(self, item: object) -> torch.device | None:
        device = getattr(item, "device", None)
        return device if isinstance(device, torch.device) else None

    def move(self, item: object, job: "Move") -> Item:
        self._follow(item, job)
        return ask(item, "to", job.device)

    def ddp(self, item: object, job: "DataParallel") -> Item:
        return ask(item, "ddp")

    def fsdp(self, item: object, job: "Shard") -> Item:
        self._follow(item, job)
        return ask(item, "ddp")

    def _follow(self, item: object, job: "Move | Shard") -> None:
        """A scheduler or the like may be the only one to hold an optimizer."""
        optimizer = getattr(item, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            job.followers.append(optimizer)

    def save(self, item: Item, saving: "Saving", path: str) -> Saved:
        return saving.pack(item.state_dict(), path)

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        loading.try_to_load(path, item, loading.unpack(saved, item.state_dict))
        return keep(item)
