"""The full weights of a sharded model: for other programs, and for calls of `state_dict()` after training.

After `fully_shard` or tensor parallelism each rank holds parts, and `state_dict()` returns them. Between two training runs the
model returns plain tensors instead, and `save_pretrained()` of models that have it writes them once. Gathering needs all ranks.
"""

from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import DistributedError
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.wrapping import clean_key, unwrap
from drivetrain.runtime.collectives import control_group, distributed_barrier
from drivetrain.runtime.ranks import is_master

DEADLINE = timedelta(minutes=5)
"""How long a rank that gathers waits for the others to do the same."""


def full_state_dict(model: nn.Module, *, prefix: str = "") -> StateDict:
    """Return the full state of a model under its own names, with sharded tensors gathered on the CPU. All ranks must call this.

    >>> list(full_state_dict(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    module = unwrap(model)
    state = type(module).state_dict(module, keep_vars=True)
    if any(map(is_dtensor, state.values())):
        try:
            dist.monitored_barrier(control_group(), timeout=DEADLINE, wait_all_ranks=True)
        except RuntimeError as error:
            raise DistributedError(
                f"the weights of {type(module).__name__} are gathered from all ranks, but not every rank arrived within "
                f"{DEADLINE.total_seconds():.0f} s. Call state_dict() or save_pretrained() of a sharded model on all ranks, not under a "
                "condition such as `if is_master():`, and use the result on one of them."
            ) from error
    whole: dict[int, object] = {}  # a parameter under two names stays one tensor
    result: OrderedDict[str, object] = OrderedDict()
    for key, value in state.items():
        if id(value) not in whole:
            full = value.full_tensor().cpu() if is_dtensor(value) else value
            whole[id(value)] = full.detach() if isinstance(full, Tensor) else full
        result[prefix + clean_key(module, key)] = whole[id(value)]
    return result


def gather_on_request(model: nn.Module) -> None:
    """Make `state_dict()` and `save_pretrained()` of a sharded model return the full weights, until `restore_sharded_state_dict`."""
    module = unwrap(model)
    if not any(is_dtensor(parameter) for parameter in module.parameters()):
        return
    module.__dict__["state_dict"] = partial(_state_dict, module)
    if callable(getattr(type(module), "save_pretrained", None)):
        module.__dict__["save_pretrained"] = partial(_save_pretrained, module)


def restore_sharded_state_dict(model: nn.Module) -> None:
    """Undo `gather_on_request`."""
    for name in ("state_dict", "save_pretrained"):
        unwrap(model).__dict__.pop(name, None)


def _state_dict(module: nn.Module, *args: object, **kwargs: Any) -> object:
    if args or kwargs.get("keep_vars") or kwargs.get("destination") is not None:
        return type(module).state_dict(module, *args, **kwargs)  # a walk over the modules as they are
    return full_state_dict(module, prefix=kwargs.get("prefix", ""))


def _save_pretrained(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Gather on all ranks, write on rank 0, and let the others wait for the files."""
    state, result = full_state_dict(module), None
    write: Callable[..., object] = type(module).save_pretrained  # type: ignore[attr-defined]
    try:
        if is_master():
            module.__dict__["state_dict"] = lambda *_, **__: state
            result = write(module, *args, **kwargs)
    finally:
        module.__dict__["state_dict"] = partial(_state_dict, module)
        distributed_barrier()
    return result
