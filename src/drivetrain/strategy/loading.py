"""The loader of a plan: the global batch stays as the user set it, for any number of processes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from drivetrain.core.errors import BatchSizeError
from drivetrain.data.order import share_of
from drivetrain.runtime.ranks import data_rank
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.stepping import PlannedLoader


def make_loader(
    dataset: Any, arguments: Mapping[str, Any], batch: BatchSplit, sampler_cls: Any = None, seed: int = 0
) -> PlannedLoader:
    """Return a loader of micro-batches; `arguments` are those of torch's DataLoader, with a global batch size."""
    given = {name: value for name, value in arguments.items() if name != "batch_size"}
    given = {"loading_bar": False, "random_seed": seed, **given}
    if sampler_cls is not None:
        shuffle = bool(given.pop("shuffle", False))
        made = sampler_cls(dataset, num_replicas=batch.data_ranks, rank=data_rank(), shuffle=shuffle, seed=seed)
        given["sampler"] = (
            made if isinstance(made, DistributedSampler) else _AsReplicas(made, dataset, batch.data_ranks)
        )
    if given.get("batch_sampler") is not None:
        given["batch_sampler"] = SplitBatches(given["batch_sampler"], batch.data_ranks * batch.accumulation)
        return PlannedLoader(dataset, **given)
    return PlannedLoader(dataset, global_batch_size=batch.micro * batch.data_ranks, **given)


class SplitBatches:
    """A batch sampler whose batches are equal parts of another one's, in order."""

    def __init__(self, inner: Iterable[Any], parts: int):
        self.inner, self.parts = inner, parts
        self.sampler = getattr(inner, "sampler", None)

    def __len__(self) -> int:
        return len(self.inner) * self.parts  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.inner:
            rows = list(batch)
            if len(rows) < self.parts:
                raise BatchSizeError(
                    f"batch_sampler gave a batch of {len(rows)} samples, which cannot be split into {self.parts} parts (data ranks x "
                    f"accumulation). Give batches of at least {self.parts}, or drop the last short batch."
                )
            for part in range(self.parts):
                first, size = share_of(len(rows), part, self.parts)
                yield rows[first : first + size]


class _AsReplicas(DistributedSampler[Any]):
    """Shows a sampler that only looks like torch's DistributedSampler to be one."""

    def __init__(self, inner: Any, dataset: Any, replicas: int):
        super().__init__(dataset, num_replicas=replicas, rank=data_rank(), shuffle=False)
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, where the sampler takes one."""
        if callable(getattr(self.inner, "set_epoch", None)):
            self.inner.set_epoch(epoch)
