"""What an accelerator would do differently from a CPU, as rules for operations on fake CPU tensors.

Memory depends on which kernels run: attention that never writes its scores, dropout that keeps a mask of bytes, norms that keep their
statistics, and autocast, whose list of operations that stay in float32 is longer on CUDA than on CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.strategy.profile.torch_private import operation_rules

if TYPE_CHECKING:
    from drivetrain.strategy.profile.torch_private import Operation

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
_UNREDUCED = frozenset(
    {"aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss", "aten::binary_cross_entropy"}
)


def hold_as_torch_does(operation: "Operation", args: Sequence[Any], result: Tensor) -> None:
    """Give a fake result the memory that it really holds.

    Some losses are written in the shape of their input first and are then shrunk to one number, but their storage is not: as long as
    somebody holds the loss, it is as large as what the model returned.
    """
    if operation._schema.name in _UNREDUCED and result.ndim == 0:
        result.untyped_storage().resize_(args[0].numel() * args[0].element_size())


def borrowed_bytes(operation: "Operation", args: Sequence[Any], result: Tensor) -> int:
    """Return what a kernel borrows while it runs.

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
    """Return a context in which fake CPU tensors take the ways of an accelerator."""
    rules = [(name, "AutocastCPU", _in_float32) for name in _FLOAT32]
    rules += [(name, "AutocastCPU", _to_float32) for name in _FLOAT32_RESULT]
    rules += [
        ("dropout", "AutogradCPU", _dropout),
        ("scaled_dot_product_attention", "AutogradCPU", _attention),
        ("rms_norm", "AutogradCPU", _rms_norm),
    ]
    return operation_rules(rules)


_WRITTEN_OUT = ContextVar("written out", default=False)


@contextmanager
def compiled_attention() -> Iterator[None]:
    """Let attention with dropout and without a mask be written out in float32, as in compiled graphs on an H200 (torch 2.11)."""
    token = _WRITTEN_OUT.set(True)
    try:
        yield
    finally:
        _WRITTEN_OUT.reset(token)


class StandIns(TorchDispatchMode):
    """Answers where fake tensors cannot: conditions on values are taken as false, and products of experts have a shape."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that the compiler may trace under this mode."""
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
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the shape of a product of groups in any type; torch's own rule asks for 16 bits."""
    groups = () if offs is None or left.ndim != right.ndim else (offs.shape[0],) if left.ndim == 2 else (left.shape[0],)
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
    mask = attn_mask.detach().to(query.dtype) if attn_mask is not None else None
    if dropout_p > 0 and mask is None and _WRITTEN_OUT.get():
        wide = [tensor.float() for tensor in (query, key, value)]
        scores = (wide[0] @ wide[1].transpose(-1, -2)).softmax(-1)
        return (torch.native_dropout(scores, dropout_p, True)[0] @ wide[2]).to(query.dtype)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def _rms_norm(
    operation: "Operation", x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Keep the input and a number per row, as layer norm does; on CPU it would be written out in element-wise steps."""
    if weight is not None and weight.dtype != x.dtype:
        return operation.decompose(x, shape, weight, eps)
    return torch.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]
