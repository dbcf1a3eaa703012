"""How gradients become their mean over the data ranks: by DDP, by `fully_shard`, or by this file where a wrapper cannot.

DDP's reducer needs every parameter's gradient exactly once, so anything less runs under `no_sync` and is averaged here. `fully_shard`
fills gradients through hooks that `backward(inputs=...)` does not trigger, so all gradients are computed there and those of other parts
restored. Compiled graphs free their buffers after one backward unless they are configured not to.

Our own average sends one flat tensor per type and about 25 MB, in the fixed order of the parameters, all at once. A gradient that is
missing on one rank counts as zero. If it is missing on all ranks it stays missing, as on one process. A sparse one is sent dense.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.module.accumulation import Count
from drivetrain.module.wrapping import inner_attribute, is_compiled_shell, is_fully_sharded, wrapping_of
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.device import PINNED, copy_to, wide_dtype
from drivetrain.runtime.ranks import data_group, is_distributed, num_data_ranks

BUCKET_BYTES = 25 * 1024 * 1024
_SPARSE = 1 << 12  # the flag of a sparse gradient, more than the ranks that may have a dense one
Group = dist.ProcessGroup | None
"""The ranks that are averaged over; None for the default group."""


class GradientSync:
    """One model in the backward pass, and how its gradients are averaged."""

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
        self.is_sharded = any(map(is_fully_sharded, modules))
        old = [type(module).__name__ for module in modules if inner_attribute(module) == "_fsdp_wrapped_module"]
        self.unsupported = old[0] if old else None
        """The name of a wrapper that does not support gradients of parts of the model."""

    @property
    def no_sync(self) -> AbstractContextManager[object]:
        """A context for forward and backward in which DDP sends nothing."""
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def spare(self, others: Iterable[nn.Parameter]) -> None:
        """Leave the gradients of these parameters of other modules alone, too."""
        self.parameters = [*self.model.parameters(), *others]

    def reducer_runs(self) -> bool:
        """Return whether DDP averages the gradients of the next backward."""
        return self.ddp is not None and bool(self.ddp.require_backward_grad_sync)

    def group(self) -> "dist.ProcessGroup | None":
        """Return the processes that see different data, None for the default group."""
        return data_group() if self.ddp is None else self.ddp.process_group

    def world(self, distributed: bool) -> int:
        """Return the number of processes over which gradients are averaged."""
        if not is_distributed() or not (distributed or self.ddp is not None or self.is_sharded):
            return 1
        return dist.get_world_size(self.ddp.process_group) if self.ddp is not None else num_data_ranks()

    def allow_repeated_backward(self) -> None:
        """Allow several backward passes through a compiled graph, because several losses may share it."""
        if any(is_compiled_shell(m) or wrapping_of(m) == "module.compile()" for m in self.model.modules()):
            from torch._functorch import config

            config.donated_buffer = False


def set_synchronisation(model: nn.Module, flag: bool) -> None:
    """Set whether the next backward averages gradients over ranks, if a wrapper does that."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = flag
    elif is_fully_sharded(model):
        model.set_requires_gradient_sync(flag)  # type: ignore[operator]


@torch.no_grad()
def start_alike(tensors: Sequence[Tensor]) -> None:
    """Give all ranks the values of rank 0, as DDP does for a model."""
    for tensor, value in zip(tensors, broadcast_from_master([tensor.detach().cpu() for tensor in tensors])):
        tensor.copy_(value)


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor], group: Group) -> None:
    """Replace each gradient by its mean over the ranks of the group."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    world = dist.get_world_size(group)
    device = trained[0].device
    kinds = [0 if p.grad is None else _SPARSE if p.grad.is_sparse else 1 for p in trained]
    flags = torch.tensor(kinds, dtype=torch.float32, device="cpu", pin_memory=device.type in PINNED)
    flags = copy_to(device, flags)  # from pinned memory: the host does not wait
    sent = []
    for bucket in _buckets(trained):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(world)
        sent.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    work = dist.all_reduce(flags, group=group, async_op=True)
    for bucket, flat, sending in sent:
        sending.wait()
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            if p.grad is None or p.grad.is_sparse:
                p.grad = part.view_as(p).clone()
            else:
                p.grad.copy_(part.view_as(p))
    work.wait()
    if set(kinds) != {1}:  # rare, so this read of a few flags is not worth avoiding
        for p, kinds_on_ranks in zip(trained, flags.tolist()):
            if kinds_on_ranks == 0:
                p.grad = None
            elif kinds_on_ranks >= _SPARSE and p.grad is not None:
                p.grad = p.grad.to_sparse(1)  # of an embedding: whole rows


def start_sum_over_ranks(value: Count, device: torch.device | str | None, group: Group = None) -> Callable[[], Count]:
    """Start to sum a number over a group, by default the data ranks; the returned function gives the sum, on a device unread."""
    dtype = wide_dtype(torch.device(device or "cpu"))
    if isinstance(value, Tensor):
        total = value.detach().to(device=device, dtype=dtype, copy=True)
    else:
        total = torch.full((), value, dtype=dtype, device=device)  # a fill does not make the host wait
    work = dist.all_reduce(total, group=data_group() if group is None else group, async_op=True)

    def result() -> Count:
        work.wait()
        return total.item() if total.is_cpu else total

    return result


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for p in parameters:
        full = size + p.numel() * p.element_size() > BUCKET_BYTES
        if bucket and (full or (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.numel() * p.element_size()
    if bucket:
        yield bucket
