"""A task of the zoo: a model, a few samples of data and, where the model has none, a loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

Sample = Mapping[str, Tensor] | tuple[Tensor, ...]


class Samples(Dataset[Sample]):
    """A list of samples."""

    def __init__(self, samples: list[Sample]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained; dropout is off, so that two ways of running it can be compared."""

    model: nn.Module
    data: Samples
    loss_func: Callable[..., Tensor] | None = None
    """None for a model whose output carries its loss."""
    collate_fn: Callable[..., object] | None = None
    mixes_samples: bool = False
    """Whether a sample's loss depends on the others of its batch, as with batch norm: then other batches give other gradients."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the zoo by name."""

    name: str
    family: str
    build: Callable[[], Task]
    needs: str | None = None
    """The package that it comes from."""


BATCH, NUM_SAMPLES = 4, 16


def make_samples(make: Callable[[torch.Generator], Sample], seed: int = 0) -> Samples:
    """Return samples that are the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return Samples([make(generator) for _ in range(NUM_SAMPLES)])


def mixes_samples(model: nn.Module) -> bool:
    """Whether a model has layers whose statistics are those of the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def in_float64(task: Task) -> Task:
    """Return the task in float64. Batch norm over a few small images amplifies the rounding of float32 beyond any tolerance."""
    samples = [tree_map_only(Tensor, _doubled, sample) for sample in task.data.samples]
    return replace(task, model=task.model.double(), data=Samples(samples))


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def without_dropout(model: nn.Module) -> nn.Module:
    """Turn dropout off, so that two runs of the same step are the same."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
        elif isinstance(getattr(module, "drop_rate", None), float):  # timm's models pass it to F.dropout
            module.drop_rate = 0.0
    return model
