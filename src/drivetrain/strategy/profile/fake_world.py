"""A process group of any size on one process: torch's fake process group, and models whose tensors have shapes and no memory.

Rank 0 of the simulated world runs the code that a real rank would run. Collectives return at once and transfer nothing. What
torch cannot do on fake tensors, or does slowly, is replaced during a simulation: moving a module (torch swaps tensors, which fake
ones do not allow while anything refers to them), splitting into a thousand chunks, and DDP's reducer (it is in C++ and reads
memory), which `GradientBuckets` reimplements in Python.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from drivetrain.core.errors import DistributedError
from drivetrain.core.types import Batch
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.probing import attributes_set
from drivetrain.runtime.group import destroy_group
from drivetrain.runtime.ranks import data_group, is_distributed
from drivetrain.runtime.seeds import preserve_rng_state
from drivetrain.strategy.profile.operations import tensors_of
from drivetrain.strategy.profile.torch_private import fake_mode, faked, is_fake, operation_rules
from drivetrain.strategy.snapshot import HeldValues, ProcessSettings

if TYPE_CHECKING:
    from drivetrain.strategy.profile.torch_private import FakeTensorMode, Operation
    from drivetrain.strategy.task import TrainingTask

_FIRST_BUCKET = 2**20
_BUCKET_MIB = 25
"""Sizes of DDP's gradient buckets, as torch has them: a small first one, so that communication starts early."""


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Act as rank 0 of a simulated world. One process needs no process group and gets none."""
    if is_distributed():
        raise DistributedError("a fake world needs a process without a process group; simulate in a child process.")
    if size == 1:
        yield
        return
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401 - it registers them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        destroy_group()


def structure_of(task: "TrainingTask") -> nn.Module:
    """Return the task's model, for its structure alone; one that must be built is built without memory where that works."""
    if task.model is not None:
        return task.model
    assert task.model_fn is not None, "a task has a model or a function that makes one"
    try:
        with fake_mode():
            return task.model_fn()
    except Exception:  # a constructor that reads values, such as a ramp of drop rates, needs real ones
        return task.model_fn()


def fake_copy(model: nn.Module, mode: "FakeTensorMode") -> nn.Module:
    """Return a copy of a model on a fake CPU, with the same structure, names and tied parameters, and without memory.

    Tensors are replaced while the structure is copied, so that a model on the meta device, or one that fills the machine, is fine.
    """
    return _copied(model, lambda tensor: faked(mode, tensor), mode)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors are on the meta device, so that it can be sent to another process."""
    return _copied(model, lambda tensor: torch.empty_like(tensor, device="meta"), nullcontext())


def _copied(model: nn.Module, replace: Callable[[Tensor], Tensor], mode: AbstractContextManager[object]) -> nn.Module:
    """Return a deep copy with every tensor replaced, those too that a module keeps without registering them; shared ones stay shared."""
    known: dict[int, Tensor] = {}
    for tensor in (tensor for module in model.modules() for tensor in tensors_of(vars(module))):
        if id(tensor) not in known:
            with torch.no_grad():
                new = replace(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                with mode:
                    new = nn.Parameter(new, tensor.requires_grad)
                kept = {key: value for key, value in vars(tensor).items() if not isinstance(value, Tensor)}
                # What a fake tensor has of its own, such as its mode, stays.
                new.__dict__.update({**kept, **vars(new)})
            known[id(tensor)] = new
    return copy.deepcopy(model, known)


@contextmanager
def preserve_model_state(model: nn.Module | None) -> Iterator[None]:
    """Restore random states, the settings of the process, and what a model holds: a hook may write into the original while a copy runs.

    A fake tensor that stayed there would end the process as soon as somebody copies the model.
    """
    settings, held = ProcessSettings.capture(), HeldValues([] if model is None else map(vars, model.modules()))
    with preserve_rng_state():
        try:
            yield
        finally:
            settings.restore()
            held.restore()


def prepared_inputs(task: "TrainingTask", size: int, mode: "FakeTensorMode") -> Any:
    """Return the model's fake input for a number of samples: prepared like real ones on the host, then made fake."""
    prepared = task.prepared(task.batch(size), torch.device("cpu"))
    return tree_map_only(Tensor, lambda tensor: faked(mode, tensor), prepared)


def allow_fake_module_moves() -> AbstractContextManager[None]:
    """Make `module.to(...)` work on modules of fake tensors: each tensor becomes what it was converted to."""

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

    return attributes_set([(nn.Module, "_apply", apply)])


_MANY = 16
"""From how many chunks on only one of each size is made."""


def few_chunks() -> AbstractContextManager[None]:
    """Make `torch.chunk` of a fake tensor into very many parts create one part of each size and return it many times.

    Sharding over a thousand ranks cuts every parameter into a thousand views to keep one; fake views take milliseconds each.
    """
    before = torch.chunk

    def chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
        if chunks < _MANY or not is_fake(input) or is_dtensor(input) or input.shape[dim] == 0:
            return before(input, chunks, dim)
        size = input.shape[dim]
        step = -(-size // chunks)
        whole, rest = divmod(size, step)
        parts = [input.narrow(dim, 0, step)] * whole
        return (*parts, input.narrow(dim, size - rest, rest)) if rest else tuple(parts)

    return attributes_set([(torch, "chunk", chunk)])


class GradientBuckets:
    """Averages gradients over data ranks as DDP does: in persistent buckets, filled in the order in which gradients arrive.

    The first backward pass only learns that order, as DDP's first one does before it builds its buckets again.
    """

    def __init__(self, model: nn.Module, mode: "FakeTensorMode", bucket_cap_mb: int | None = None):
        self.mode = mode
        self.group = data_group()
        self.limits = [_FIRST_BUCKET, (bucket_cap_mb or _BUCKET_MIB) * 2**20]
        self.is_synchronising = True
        self._arrived: dict[nn.Parameter, None] = {}  # in order
        self._views: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self.storages: list[Tensor] = []
        """The buckets, which stay allocated between steps."""
        self._missing: list[int] = []
        self._sizes: list[int] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrive)
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self._buffers:
            model.register_forward_pre_hook(self._share_buffers)

    def build(self) -> None:
        """Allocate the buckets when the order is known."""
        import torch.distributed as dist

        arrived = list(self._arrived)
        indices, _ = dist._compute_bucket_assignment_by_size(list[Tensor](arrived), self.limits)
        with self.mode, torch.no_grad():
            for place, members in enumerate(indices):
                parameters = [arrived[index] for index in members]
                flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device="cpu")
                parts = flat.split([p.numel() for p in parameters])
                self._views |= {p: (part.view(p.shape), place) for p, part in zip(parameters, parts)}
                self.storages.append(flat)
                self._sizes.append(len(parameters))
        self._missing = list(self._sizes)

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
            dist.all_reduce(self.storages[place], group=self.group)

    def _share_buffers(self, module: nn.Module, inputs: Batch) -> None:
        """Give all ranks the first one's buffers, in one piece."""
        import torch.distributed as dist

        with torch.no_grad():
            joined = torch.cat([buffer.detach().flatten() for buffer in self._buffers])
            dist.broadcast(joined, group=self.group, group_src=0)


# What an accelerator would do differently from a CPU, as rules for operations on fake CPU tensors. Memory depends on which kernels run:
# attention that never writes its scores, dropout that keeps a mask of bytes, norms that keep their statistics, and autocast, whose list of
# operations that stay in float32 is longer on CUDA than on CPU.

# Operations that autocast runs in float32 on CUDA, and that its list for CPU leaves alone.
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    softplus layer_norm native_layer_norm rms_norm group_norm cosine_similarity kl_div l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy_with_logits logsumexp upsample_nearest2d upsample_bilinear2d
""".split()
# The same, where the result's type is an argument.
_FLOAT32_RESULT = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")
_LOW = (torch.bfloat16, torch.float16)
# Reductions whose result keeps the memory of what it is the mean or the sum of.
_UNREDUCED = ("aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss", "aten::binary_cross_entropy")


def match_real_memory(operation: "Operation", args: Sequence[Any], result: Tensor) -> None:
    """Give a fake result the memory that the real one occupies.

    Some losses are written in the shape of their input first and are then shrunk to one number, but their storage is not: as long as
    somebody holds the loss, it is as large as what the model returned.
    """
    if operation._schema.name in _UNREDUCED and result.ndim == 0:
        result.untyped_storage().resize_(args[0].numel() * args[0].element_size())


def workspace_bytes(operation: "Operation", args: Sequence[Any], result: Tensor) -> int:
    """Return the workspace of a kernel in bytes.

    cuDNN's convolutions compute with channels last. For tensors that have them first they copy input and output, as an H200 showed for all
    kernels but those of one pixel without strides, in 32 bits and in 16.
    """
    name = operation._schema.name
    if name == "aten::convolution":
        output, x, weight, stride, groups = result, args[0], args[1], args[3], args[8]
    elif name == "aten::convolution_backward":
        output, x, weight, stride, groups = args[0], args[1], args[2], args[4], args[9]
    else:
        return 0
    is_product = all(size == 1 for size in (*weight.shape[2:], *stride))
    if groups > 1 or is_product or _has_channels_last(x) or _has_channels_last(weight):
        return 0
    return (x.numel() + output.numel()) * x.element_size()


def _has_channels_last(tensor: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def accelerator_rules() -> AbstractContextManager[None]:
    """Return a context in which fake CPU tensors behave as on an accelerator."""
    rules = [(name, "AutocastCPU", _in_float32) for name in _FLOAT32]
    rules += [(name, "AutocastCPU", _to_float32) for name in _FLOAT32_RESULT]
    rules += [("dropout", "AutogradCPU", _dropout), ("rms_norm", "AutogradCPU", _rms_norm)]
    rules.append(("scaled_dot_product_attention", "AutogradCPU", _attention))
    return operation_rules(rules)


_WRITTEN_OUT = ContextVar("decomposed", default=False)


@contextmanager
def compiled_attention() -> Iterator[None]:
    """Decompose attention with dropout and without a mask in float32, as compiled graphs do on an H200 (torch 2.11)."""
    token = _WRITTEN_OUT.set(True)
    try:
        yield
    finally:
        _WRITTEN_OUT.reset(token)


class UnsupportedOpHandler(TorchDispatchMode):
    """Handles what fake tensors cannot: conditions on values are false, and products of experts have a shape."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: the compiler may trace under this mode."""
        return True

    def __torch_dispatch__(
        self, func: "Operation", types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and args[0].dtype is torch.bool:
            return False  # such as a layer that is skipped at random, or a value that is out of range
        if name == "aten::_grouped_mm":
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: object = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the shape of a product of groups in any type; torch's own rule asks for 16 bits."""
    groups: tuple[int, ...] = ()
    if offs is not None and left.ndim == right.ndim:
        groups = offs.shape[:1] if left.ndim == 2 else left.shape[:1]
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


def _in_float32(operation: "Operation", *args: Any, **kwargs: Any) -> Any:
    return operation(*[_widened(value) for value in args], **{key: _widened(value) for key, value in kwargs.items()})


def _to_float32(operation: "Operation", *args: Any, **kwargs: Any) -> Any:
    takes = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(takes, args)) | kwargs
    first = args[0]
    if given.get("dtype") is None and isinstance(first, Tensor) and first.dtype in _LOW:
        given["dtype"] = torch.float32
    return operation(**given)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


def _dropout(operation: "Operation", x: Tensor, p: float, train: bool) -> Tensor:
    """Keep one byte per element, as the fused kernel does."""
    if not train or p in (0, 1) or x.numel() == 0:
        return operation.decompose(x, p, train)
    return torch.native_dropout(x, p, train)[0]


def _attention(
    operation: "Operation",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keep inputs, output and one float per row; dropout only adds a random seed."""
    is_grouped = query.ndim == 4 and key.shape[1] != query.shape[1]  # keys and values shared by groups of heads
    width = query.shape[-1]
    is_plain = query.ndim == 4 and key.shape[-1] == width and value.shape[-1] == width
    # What no fused kernel takes: three-dimensional input, unequal widths, other types, and groups in float32.
    if not is_plain or query.dtype not in ((torch.float32, *_LOW) if not is_grouped else _LOW):
        written_out = torch.ops.aten._scaled_dot_product_attention_math
        return written_out(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    # No fused kernel gives the gradient of a bias of positions.
    is_learnt = attn_mask is not None and attn_mask.requires_grad
    if not is_grouped and (is_learnt or (dropout_p > 0 and attn_mask is None and _WRITTEN_OUT.get())):
        wide = [tensor.float() for tensor in (query, key, value)]
        scores = wide[0] @ wide[1].transpose(-1, -2)
        shares = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
        kept = torch.native_dropout(shares, dropout_p, True)[0] if dropout_p > 0 else shares
        return (kept @ wide[2]).to(query.dtype)
    mask = attn_mask.detach().to(query.dtype) if attn_mask is not None else None
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def _rms_norm(
    operation: "Operation", x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Keep the input and a number per row, as layer norm does; on CPU it would be written out in element-wise steps."""
    if weight is not None and weight.dtype != x.dtype:
        return operation.decompose(x, shape, weight, eps)
    return torch.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


# A point in time that long work looks at: between its parts, and inside those that cannot be foreseen.


class OutOfTime(Exception):
    """Work was stopped before it finished, because its time was up."""

    def __init__(self, seconds: float):
        super().__init__(f"stopped after {seconds:.1f} s")
        self.seconds = seconds


class Deadline:
    """A number of seconds from now; None never ends."""

    def __init__(self, seconds: float | None):
        self._begin = time.monotonic()
        self._end = None if seconds is None else self._begin + seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether work of this duration would end in time."""
        return self._end is None or time.monotonic() + seconds < self._end

    def left(self) -> float | None:
        """Return the seconds left, at least 0; None without a limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Raise `OutOfTime` if the time is up."""
        if not self.allows():
            raise OutOfTime(time.monotonic() - self._begin)

    @contextmanager
    def at_least(self, seconds: float) -> Iterator[None]:
        """Extend the deadline temporarily to a number of seconds from the beginning, if it is earlier."""
        end = self._end
        if end is not None:
            self._end = max(end, self._begin + seconds)
        try:
            yield
        finally:
            self._end = end
