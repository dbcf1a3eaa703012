"""Ghost batch norm (Hoffer et al., 2017, arXiv 1705.08741): normalise small parts of a large batch by their own statistics.

Large batches have less noisy statistics, and lose the regularisation that the noise brings; parts of a fixed size keep it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, share_tensors, warn_no_effect
from drivetrain.context.state import State
from drivetrain.core import ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts
from drivetrain.module.surgery import count_module_instances, replace_module_classes
from drivetrain.runtime.ranks import num_data_ranks


class _GhostNorm(_BatchNorm):
    """A batch norm that splits its batch in training; with the parameters, buffers and names of the one it replaces."""

    def __init__(self, num_features: int, *args: Any, ghost_batch_size: int = 32, **kwargs: Any):
        super().__init__(num_features, *args, **kwargs)
        self.ghost_batch_size = ghost_batch_size

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        rows = input.shape[0]
        if rows < self.ghost_batch_size:
            raise ConfigError(
                f"Worker batch size ({rows}) is smaller than ghost_batch_size ({self.ghost_batch_size}). Use a smaller "
                "ghost_batch_size, larger batches, or drop_last=True where the last batch of an epoch is the small one."
            )
        parts = input.chunk(-(-rows // self.ghost_batch_size))
        # One value has no variance: every part gets two rows or more.
        if len(parts) > 1 and parts[-1][:, 0].numel() == 1:
            parts = input.tensor_split(min(len(parts), rows // 2))
        # Each part moves the running statistics; together they are to move them about as far as one batch does.
        momentum = None if self.momentum is None else self.momentum / len(parts)
        return torch.cat([self._normalized(part, momentum) for part in parts])

    def _normalized(self, part: Tensor, momentum: float | None) -> Tensor:
        factor = momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative mean, as torch computes it
                factor = 1.0 / float(self.num_batches_tracked)
        return F.batch_norm(
            part, self.running_mean, self.running_var, self.weight, self.bias, True, 0.0 if factor is None else factor, self.eps
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch_size={self.ghost_batch_size}"

    @classmethod
    def from_batchnorm(cls, module: _BatchNorm, ghost_batch_size: int = 32) -> "_GhostNorm":
        """Return the layer that takes the place of a batch norm and uses its very parameters and buffers."""
        new = cls(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
            ghost_batch_size=ghost_batch_size, device="meta",
        )  # fmt: skip
        return share_tensors(new, module)


class GhostBatchNorm1d(_GhostNorm, nn.BatchNorm1d):
    """Ghost batch norm over (N, C) or (N, C, L)."""


class GhostBatchNorm2d(_GhostNorm, nn.BatchNorm2d):
    """Ghost batch norm over (N, C, H, W)."""


class GhostBatchNorm3d(_GhostNorm, nn.BatchNorm3d):
    """Ghost batch norm over (N, C, D, H, W)."""


_GHOST_OF: dict[type[nn.Module], type[_GhostNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def apply_ghost_batchnorm(model: nn.Module, ghost_batch_size: int = 32, optimizers: Optimizers = None) -> None:
    """Replace the batch norms of a model."""
    check_counts("apply_ghost_batchnorm", 1, ghost_batch_size=ghost_batch_size)

    def make_ghost(module: nn.Module, index: int) -> nn.Module | None:
        ghost = _GHOST_OF.get(type(module))  # a subclass may compute something else, and stays
        return None if ghost is None else ghost.from_batchnorm(module, ghost_batch_size)  # type: ignore[arg-type]

    replaced = replace_module_classes(model, dict.fromkeys(_GHOST_OF, make_ghost), optimizers)
    if not replaced and not count_module_instances(model, _GhostNorm):
        warn_no_effect(f"GhostBatchNorm found no BatchNorm1d, 2d or 3d in {type(model).__name__}.")


class GhostBatchNorm(ModelSurgery):
    """Replaces the batch norms of the model, and checks before training that every batch is large enough."""

    function = staticmethod(apply_ghost_batchnorm)
    events = frozenset({Event.INIT, Event.FIT_START})
    counts = {"GhostBatchNorm/num_new_modules": _GhostNorm}

    def __init__(self, ghost_batch_size: int = 32):
        check_counts("GhostBatchNorm", 1, ghost_batch_size=ghost_batch_size)
        self.ghost_batch_size = ghost_batch_size

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            return super().apply(event, state, logger)
        loader: Any = state.train_dataloader
        smallest = smallest_batch(loader)
        if smallest is not None and smallest < self.ghost_batch_size:
            size = loader.batch_size
            way_out = "larger batches" if size < self.ghost_batch_size else "drop_last=True for the training loader"
            raise ConfigError(
                f"GhostBatchNorm(ghost_batch_size={self.ghost_batch_size}): Worker batch size falls to {smallest} (batches of {size} "
                f"over {len(loader.sampler)} samples). Use {way_out}, or a smaller ghost_batch_size."
            )
        return None


def smallest_batch(loader: object) -> int | None:
    """Return the smallest number of samples that a batch of this loader has on this process, or None where it is unknown."""
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if not isinstance(size, int) or not hasattr(sampler, "__len__"):
        return None
    world = num_data_ranks()
    left = len(sampler) % (size * world)  # type: ignore[arg-type]
    return size if left == 0 or getattr(loader, "drop_last", False) else left // world
