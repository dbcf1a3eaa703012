"""A world of any size on one process: torch's fake process group, and models whose tensors have shapes and no memory.

Rank 0 of the pretended world runs the code that a real rank would run; collectives return at once and bring nothing. What torch cannot
do on fake tensors, or only slowly, is replaced here for the time of a simulation: moving a module (torch swaps tensors, which fake ones
do not allow while anything refers to them), cutting into a thousand chunks, and DDP's reducer (it lives in C++ and reads memory), for which
`GradientBuckets` does the same in Python.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import DistributedError
from drivetrain.core.types import Batch
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.runtime.group import destroy_group
from drivetrain.runtime.ranks import data_group, is_distributed
from drivetrain.strategy.profile.torch_private import PrivateFeatureMissing, faked, is_fake
from drivetrain.strategy.task import TrainingTask

if TYPE_CHECKING:
    from drivetrain.strategy.profile.torch_private import FakeTensorMode

_FIRST_BUCKET = 2**20
_BUCKET_MIB = 25
"""Sizes of DDP's gradient buckets, as torch has them: a small first one, so that communication starts early."""


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Be rank 0 of a world that is not there; one process needs none and gets none."""
    if is_distributed():
        raise DistributedError(
            "a fake world cannot be entered while a process group exists; simulate in a child process."
        )
    if size == 1:
        yield
        return
    import torch.distributed as dist

    try:
        import torch.distributed._tools.fake_collectives
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise PrivateFeatureMissing(f"no fake process group in torch {torch.__version__}: {error}") from error
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        destroy_group()


def fake_model(task: TrainingTask, mode: "FakeTensorMode") -> nn.Module:
    """Return a fake copy of the task's model, in training mode; a model that is made by a function is made inside the mode."""
    if task.model is not None:
        return fake_copy(task.model, mode).train()
    assert task.model_fn is not None, "a task has a model or a function that makes one"
    try:
        with mode:
            return task.model_fn().train()
    except (
        Exception
    ):  # a constructor that reads values (a ramp of drop rates, say) needs real ones; then the copy is faked
        return fake_copy(task.model_fn(), mode).train()


def fake_copy(model: nn.Module, mode: "FakeTensorMode") -> nn.Module:
    """Return a copy of a model on a pretended CPU: structure, names and ties are its own, memory it has none.

    Tensors are replaced while the structure is copied, so that a model on the meta device, or one that fills the machine, is fine.
    """
    return _copied(model, lambda tensor: faked(mode, tensor), mode)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors are on the meta device, so that it can be sent to another process."""
    return _copied(model, lambda tensor: torch.empty_like(tensor, device="meta"), nullcontext())


def _copied(model: nn.Module, replace: Callable[[Tensor], Tensor], mode: AbstractContextManager[object]) -> nn.Module:
    """Return a deep copy with every tensor replaced, those too that a module keeps without registering them; shared ones stay shared."""
    known: dict[int, Tensor] = {}
    unregistered = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    for tensor in [*model.parameters(), *model.buffers(), *unregistered]:
        if id(tensor) not in known:
            with torch.no_grad():
                new = replace(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                with mode:
                    new = nn.Parameter(new, tensor.requires_grad)
                new.__dict__.update({key: kept for key, kept in vars(tensor).items() if not isinstance(kept, Tensor)})
            known[id(tensor)] = new
    return copy.deepcopy(model, known)


def prepared_inputs(task: TrainingTask, size: int, mode: "FakeTensorMode") -> Any:
    """Return the model's fake input for so many samples: prepared as real ones, on the host, then faked."""
    from torch.utils._pytree import tree_map_only

    prepared = task.prepared(task.batch(size), torch.device("cpu"))
    return tree_map_only(Tensor, lambda tensor: faked(mode, tensor), prepared)


@contextmanager
def pretended_moves() -> Iterator[None]:
    """Let `module.to(...)` work on modules of fake tensors: each tensor takes over what it was converted to."""

    def apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(function)
        for tensor in [*self._parameters.values(), *self._buffers.values()]:
            if tensor is not None:
                with torch.no_grad():
                    new = function(tensor)
                if new is not tensor and not is_dtensor(tensor):
                    tensor.data = new
        return self

    before = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


_MANY = 16
"""From how many chunks on only one of each size is made."""


@contextmanager
def few_chunks() -> Iterator[None]:
    """Let `torch.chunk` of a fake tensor into very many parts make one part of each size, and return it many times.

    Sharding over a thousand ranks cuts every parameter into a thousand views to keep one; fake views take milliseconds each.
    """
    before = torch.chunk

    def chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
        if chunks < _MANY or not is_fake(input) or is_dtensor(input):
            return before(input, chunks, dim)
        size = input.shape[dim]
        step = -(-size // chunks)
        if step == 0:
            return before(input, chunks, dim)
        whole, rest = divmod(size, step)
        parts = [input.narrow(dim, 0, step)] * whole
        return (*parts, input.narrow(dim, size - rest, rest)) if rest else tuple(parts)

    torch.chunk = chunk
    try:
        yield
    finally:
        torch.chunk = before


class GradientBuckets:
    """Averages gradients over data ranks as DDP does: in buckets that stay, filled in the order in which gradients arrive.

    The first backward pass only learns that order, as DDP's first one does before it builds its buckets again.
    """

    def __init__(self, model: nn.Module, mode: "FakeTensorMode", bucket_cap_mb: int | None = None):
        self.mode = mode
        self.group = data_group()
        self.limits = [_FIRST_BUCKET, (bucket_cap_mb or _BUCKET_MIB) * 2**20]
        self.is_synchronising = True
        self._arrived: dict[nn.Parameter, None] = {}  # in order
        self._views: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._flat: list[Tensor] = []
        self._missing: list[int] = []
        self._sizes: list[int] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrive)
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self._buffers:
            model.register_forward_pre_hook(self._share_buffers)

    def build(self) -> None:
        """Allocate the buckets, once the order is known."""
        import torch.distributed as dist

        arrived = list(self._arrived)
        indices, _ = dist._compute_bucket_assignment_by_size(list[Tensor](arrived), self.limits)
        with self.mode, torch.no_grad():
            for place, members in enumerate(indices):
                parameters = [arrived[index] for index in members]
                flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device="cpu")
                parts = flat.split([p.numel() for p in parameters])
                self._views |= {p: (part.view(p.shape), place) for p, part in zip(parameters, parts)}
                self._flat.append(flat)
                self._sizes.append(len(parameters))
        self._missing = list(self._sizes)

    @property
    def storages(self) -> list[Tensor]:
        """What stays between steps."""
        return self._flat

    def _arrive(self, parameter: Tensor) -> None:
        import torch.distributed as dist

        assert isinstance(parameter, nn.Parameter)
        if not self._views:
            self._arrived[parameter] = None
            return
        if not self.is_synchronising:
            return  # DDP lets gradients of an open window accumulate outside its buckets
        view, place = self._views[parameter]
        gradient = parameter.grad
        if gradient is not None and gradient is not view:
            view.copy_(gradient)
            parameter.grad = view
        self._missing[place] -= 1
        if self._missing[place] == 0:
            self._missing[place] = self._sizes[place]
            dist.all_reduce(self._flat[place], group=self.group)

    def _share_buffers(self, module: nn.Module, inputs: Batch) -> None:
        """Give all ranks the first one's buffers, in one piece."""
        import torch.distributed as dist

        with torch.no_grad():
            dist.broadcast(
                torch.cat([buffer.detach().flatten() for buffer in self._buffers]), group=self.group, group_src=0
            )
