"""What stands between the user's model and a backward pass: nothing, DDP, `fully_shard`, torch.compile, or something else.

Three facts decide how gradients of a part of a model can be taken. DDP's reducer wants every parameter's gradient exactly
once, so anything less runs under `no_sync` and is averaged by the unit itself. `fully_shard` fills gradients through hooks
that `backward(inputs=...)` does not trigger, so there all gradients are taken and foreign ones set aside. Compiled graphs
free their buffers after one backward unless told otherwise.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrappers import inner_attribute, is_compiled_shell, is_fully_sharded, wrapping_of
from drivetrain.runtime.ranks import data_group, is_distributed, num_data_ranks


class Terrain:
    """One model as the backward pass sees it."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.ddp: DistributedDataParallel | None = None
        inner = model
        while (attribute := inner_attribute(inner)) is not None:
            if isinstance(inner, DistributedDataParallel):
                self.ddp = inner
            inner = getattr(inner, attribute)
        self.bare = inner
        modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.is_sharded = any(is_fully_sharded(m) for m in modules)
        self.stranger = next((type(m).__name__ for m in modules if inner_attribute(m) == "_fsdp_wrapped_module"), None)

    @property
    def no_sync(self) -> AbstractContextManager[Any]:
        """A context for forward and backward in which DDP sends nothing."""
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def reducer_runs(self) -> bool:
        """Say whether DDP will average the gradients of the backward that comes now."""
        return self.ddp is not None and bool(self.ddp.require_backward_grad_sync)

    def group(self) -> "dist.ProcessGroup | None":
        """Return the processes that see different data, None for the default group."""
        if self.ddp is not None:
            group: dist.ProcessGroup = self.ddp.process_group
            return group
        return data_group()

    def world(self, distributed: bool) -> int:
        """Return over how many processes gradients are averaged."""
        if not is_distributed() or not (distributed or self.ddp is not None or self.is_sharded):
            return 1
        return dist.get_world_size(self.ddp.process_group) if self.ddp is not None else num_data_ranks()

    def refuse_several_passes(self, units: Sequence[str]) -> None:
        """Say that a wrapper gives no way to take gradients of parts of the model."""
        if self.stranger is not None:
            raise ConfigError(
                f"the units {', '.join(units)} need several backward passes, which {self.stranger} cannot do. Wrap the model in "
                "DistributedDataParallel or shard it with fully_shard, or use one unit that owns everything."
            )

    def allow_repeated_backward(self) -> None:
        """Let compiled graphs be walked more than once: several losses may share one."""
        if any(is_compiled_shell(m) or wrapping_of(m) == "module.compile()" for m in self.model.modules()):
            from torch._functorch import config

            config.donated_buffer = False
