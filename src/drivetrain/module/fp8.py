"""Linear layers whose matrix products run in 8-bit floating point (Micikevicius et al., 2022, arXiv 2209.05433).

Values are scaled so that the largest magnitude of a tensor (or of each row) is the largest number of the 8-bit type: e4m3 for inputs and
weights, e5m2, which has more range, for gradients. Scales are computed again in every pass; parameters keep their own precision. Where the
device has no 8-bit matrix product, the rounded values are multiplied in float32, to test with. Forward products add up with the fewer bits
that the matrix units are fast with, those of gradients with all of float32's.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drivetrain.core.arguments import check_choice, check_count
from drivetrain.module.surgery import Optimizers, replace_module_classes

Recipe = Literal["tensorwise", "rowwise"]
RECIPES = ("tensorwise", "rowwise")
Format = Literal["HYBRID", "E4M3"]
FORMATS = ("HYBRID", "E4M3")
"""The types of gradients: e5m2, or e4m3 as for everything else, which has less range and more precision."""
FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # what the matrix units ask of every inner and outer dimension
_TINY = 1e-12


def supports_fp8(device: torch.device | str) -> bool:
    """Return whether a device multiplies 8-bit matrices: CUDA of compute capability 8.9 or newer."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def quantize(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Return 8-bit values and the float32 factor that converts them back; one factor per slice along `dim`, or one for all.

    >>> values, factor = quantize(torch.tensor([1.0, -448.0]), torch.float8_e4m3fn)
    >>> values.float() * factor
    tensor([   1., -448.])
    """
    largest = torch.finfo(dtype).max
    amax = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    factor = amax.float().clamp(min=_TINY) / largest
    values = (x.float() / factor).clamp(-largest, largest)
    return values.to(dtype), factor


def matmul_fp8(
    a: Tensor, b: Tensor, a_dtype: torch.dtype, b_dtype: torch.dtype, recipe: Recipe, out_dtype: torch.dtype
) -> Tensor:
    """Return `a @ b` computed with 8-bit values; `rowwise` scales the rows of `a` and the columns of `b`."""
    rowwise = recipe == "rowwise"
    low_a, low_b = quantize(a, a_dtype, 1 if rowwise else None), quantize(b, b_dtype, 0 if rowwise else None)
    return scaled_product(*low_a, *low_b, out_dtype)


def scaled_product(
    a: Tensor, factor_a: Tensor, b: Tensor, factor_b: Tensor, out_dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return the product of 8-bit matrices multiplied by their factors: one each, or one for every row of `a` and column of `b`.

    `is_fast` lets the matrix units add up with fewer bits, which is faster and exact enough for forward passes.
    """
    if not supports_fp8(a.device):
        return ((a.float() * factor_a) @ (b.float() * factor_b)).to(out_dtype)
    inner = -a.shape[1] % _MULTIPLE  # zeros add nothing to a sum
    if inner:
        a = nn.functional.pad(a.view(torch.uint8), (0, inner)).view(a.dtype)
        b = nn.functional.pad(b.view(torch.uint8), (0, 0, 0, inner)).view(b.dtype)
    # The units want the first factor row by row and the second column by column.
    a, b = a.contiguous(), b.t().contiguous().t()
    kernel_dtype = torch.bfloat16 if factor_a.ndim else out_dtype
    if torch.compiler.is_compiling():
        out = _opaque_product(a, b, factor_a, factor_b, kernel_dtype, is_fast)
    else:
        out = torch._scaled_mm(a, b, factor_a, factor_b, out_dtype=kernel_dtype, use_fast_accum=is_fast)
    # Not `out.to(...)` where that does nothing: torch 2.11 compiles a function that returns a tensor it has named before without its
    # gradients (pytorch/pytorch#180642).
    return out if kernel_dtype == out_dtype else out.to(out_dtype)


@torch.library.custom_op("drivetrain::scaled_product", mutates_args=())
def _opaque_product(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, out_dtype: torch.dtype, is_fast: bool
) -> Tensor:
    """Multiply by the library's kernel also in compiled code, which would choose one of the compiler's own making."""
    a, b = a.contiguous(), b.t().contiguous().t()
    return torch._scaled_mm(a, b, factor_a, factor_b, out_dtype=out_dtype, use_fast_accum=is_fast)


@_opaque_product.register_fake
def _shape_of_product(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, out_dtype: torch.dtype, is_fast: bool
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


class _TensorwiseProduct(torch.autograd.Function):
    """`x @ weight.T` and its two gradients, each product in 8 bits; one factor serves a tensor in all its products.

    The rounded input is kept. Of the weight the parameter itself is: a sharded one is then gathered again instead of held whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: torch.dtype, out_dtype: torch.dtype) -> Tensor:
        low_x, factor_x = quantize(x, FORWARD)
        low_weight, factor_weight = quantize(weight, FORWARD)
        ctx.save_for_backward(low_x, factor_x, weight)
        ctx.gradient, ctx.x_dtype = gradient, x.dtype
        return scaled_product(low_x, factor_x, low_weight.t(), factor_weight, out_dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        low_x, factor_x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        low_grad, factor = quantize(grad, ctx.gradient)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = scaled_product(low_grad, factor, *quantize(weight, FORWARD), ctx.x_dtype)
        if needs_weight:
            grad_weight = scaled_product(low_grad.t(), factor, low_x, factor_x, weight.dtype)
        return grad_x, grad_weight, None, None


class _RowwiseProduct(torch.autograd.Function):
    """The same with a factor for every row and column: each product needs other ones, so nothing rounded is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: torch.dtype, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient = gradient
        low_x, low_weight = quantize(x, FORWARD, 1), quantize(weight.t(), FORWARD, 0)
        return scaled_product(*low_x, *low_weight, out_dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kind = ctx.gradient
        grad_x = matmul_fp8(grad, weight, kind, FORWARD, "rowwise", x.dtype) if needs_x else None
        grad_weight = matmul_fp8(grad.t(), x, kind, FORWARD, "rowwise", weight.dtype) if needs_weight else None
        return grad_x, grad_weight, None, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits. Its result has the type of autocast, or else of its input."""

    recipe: Recipe = "tensorwise"
    format: Format = "HYBRID"

    def forward(self, input: Tensor) -> Tensor:
        if not input.numel():  # an expert without tokens: there is nothing to find a scale from
            return super().forward(input)
        device = input.device.type
        autocasts = torch.is_autocast_enabled(device)
        out_dtype = torch.get_autocast_dtype(device) if autocasts else input.dtype
        rows = input.reshape(-1, self.in_features)
        gradient = GRADIENT if self.format == "HYBRID" else FORWARD
        product = _RowwiseProduct if self.recipe == "rowwise" else _TensorwiseProduct
        out = product.apply(rows, self.weight, gradient, out_dtype)
        if self.bias is not None:
            out = out + self.bias.to(out_dtype)
        return out.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"

    @staticmethod
    def from_linear(
        module: nn.Linear, module_index: int = -1, recipe: Recipe = "tensorwise", format: Format = "HYBRID"
    ) -> "Float8Linear":
        """Return a layer that replaces a linear layer and uses its parameters."""
        new = Float8Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        new.weight, new.bias, new.recipe, new.format = module.weight, module.bias, recipe, format
        return new


def check_fp8(who: str, recipe: str, min_features: int) -> None:
    """Raise for settings that no layer could have."""
    check_choice("recipe", recipe, RECIPES, owner=who)
    check_count("min_features", min_features, owner=who)


def convert_linears_to_fp8(
    model: nn.Module,
    recipe: Recipe = "tensorwise",
    min_features: int = 2048,
    skip: Sequence[str] = ("head",),
    optimizers: Optimizers = None,
    include: Sequence[str] = (),
    format: Format = "HYBRID",
) -> list[str]:
    """Replace the linear layers that gain from 8 bits, and return the names of all 8-bit layers.

    Both sizes must be at least `min_features` and multiples of 16. A layer whose dotted name contains a word of `skip` stays: an
    output layer needs the precision. One whose name contains a word of `include` is replaced at any size, as long
    as its sizes are multiples of 16.
    """
    check_fp8("convert_linears_to_fp8", recipe, min_features)
    names = {module: name for name, module in model.named_modules()}

    def convert(module: nn.Module, index: int) -> nn.Module | None:
        if type(module) is not nn.Linear or any(size % _MULTIPLE for size in (module.in_features, module.out_features)):
            return None
        is_named = any(word in names[module] for word in include)
        is_skipped = any(word in names[module] for word in skip)
        if not is_named and (is_skipped or min(module.in_features, module.out_features) < min_features):
            return None
        return Float8Linear.from_linear(module, index, recipe, format)

    replace_module_classes(model, {nn.Linear: convert}, optimizers)
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
