"""Factorize (compare Jaderberg et al., 2014, arXiv 1405.3866): write a large matrix as the product of two thin ones.

A convolution becomes one with few output channels followed by a 1x1 convolution; a linear layer becomes two. The rank must be so
low that the pair costs less than the original. `set_rank` lowers it later, refitting both parts to what the layer computes.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.nn.utils import parametrize

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, disable_fused_encoder, inside, warn_no_effect
from drivetrain.context.moving import move_to_device
from drivetrain.core.arguments import check_choice, check_counts, check_number
from drivetrain.core.errors import ConfigError
from drivetrain.module.surgery import ReplacementFunction, replace_module_classes
from drivetrain.runtime.device import wide_dtype


class MissingKernelError(ConfigError, RuntimeError):
    """A bias was given for a kernel that was not."""


@dataclass
class LowRankSolution:
    """A factorization and how well it does; where two factors would save nothing, one matrix."""

    Wa: Tensor | None = None
    """Shape (inputs, rank), or the whole matrix; for a convolution (rank, channels, height, width)."""
    Wb: Tensor | None = None
    """Shape (rank, outputs); for a convolution (outputs, rank, 1, 1). None where `Wa` is the whole matrix."""
    bias: Tensor | None = None
    rank: int = -1
    """The rank, or -1 where nothing was factorized."""
    nmse: float = 0.0
    """The mean squared error over the variance of the outputs."""


def split_matrix(W: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best two factors of a rank for a matrix, with its singular values shared between them.

    >>> a, b = split_matrix(torch.ones(3, 4), 1)
    >>> torch.allclose(a @ b, torch.ones(3, 4), atol=1e-6)
    True
    """
    U, s, Vh = torch.linalg.svd(W.to(torch.promote_types(W.dtype, torch.float32)), full_matrices=False)
    root = s[:rank].sqrt()
    return (U[:, :rank] * root).to(W.dtype), (root[:, None] * Vh[:rank]).to(W.dtype)


@torch.no_grad()
def factorize_matrix(
    X: Tensor,
    Y: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    bias: Tensor | None = None,
    rank: int | float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Return thin matrices with `X @ Wa @ Wb + bias` close to `Y`, starting from a known matrix or pair.

    `rank` below 1 is a fraction of the inputs, at most the present rank. A rank as large as either side saves nothing: the answer is
    then the one best matrix. A rank as large as that of the given pair returns the pair. Both have `rank=-1`. Without a bias to start
    from, none is fitted.
    """
    if wide_dtype(X.device) is not torch.float64:  # solved on the host
        device = X.device
        X, Y, Wa, Wb, bias = move_to_device("cpu", X, Y, Wa, Wb, bias)
        return move_to_device(device, factorize_matrix(X, Y, Wa, Wb, bias, rank, n_iters))
    rank = int(rank) if rank >= 1 else max(1, min(int(rank * X.shape[1]), Wa.shape[1]))
    dtype, X, Y = Wa.dtype, X.double(), Y.double()
    offset = torch.zeros(Y.shape[1], dtype=Y.dtype, device=Y.device) if bias is None else bias.double()
    if rank >= min(X.shape[1], Y.shape[1]):
        whole = _solve(X, Y - offset)
        return LowRankSolution(whole.to(dtype), None, bias, nmse=_nmse(X @ whole + offset, Y))
    if rank >= Wa.shape[1]:
        assert Wb is not None  # a whole matrix has the outputs as columns, of which there are more
        return LowRankSolution(Wa, Wb, bias, nmse=_nmse(X @ Wa.double() @ Wb.double() + offset, Y))
    first, second = (factor.double() for factor in split_matrix(Wa if Wb is None else Wa @ Wb, rank))
    for _ in range(n_iters):
        # With one factor fixed, the other is a linear regression.
        first = _solve(X, (Y - offset) @ torch.linalg.pinv(second))
        second = _solve(X @ first, Y - offset)
        if bias is not None:
            offset = (Y - X @ first @ second).mean(dim=0)
    nmse = _nmse(X @ first @ second + offset, Y)
    return LowRankSolution(first.to(dtype), second.to(dtype), None if bias is None else offset.to(dtype), rank, nmse)


def _nmse(found: Tensor, Y: Tensor) -> float:
    return float((found - Y).square().mean() / Y.var(correction=0).clamp(min=torch.finfo(Y.dtype).tiny))


def _solve(X: Tensor, Y: Tensor) -> Tensor:
    """Return the least-squares solution; on the CPU also for dependent columns, which accelerators have no solver for."""
    return torch.linalg.lstsq(X, Y, driver="gelsd" if X.device.type == "cpu" else "gels").solution


@torch.no_grad()
def factorize_conv2d(
    X: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    rank: int | float = 0.25,
    biasA: Tensor | None = None,
    biasB: Tensor | None = None,
    n_iters: int = 3,
    **conv2d_kwargs: Any,
) -> LowRankSolution:
    """Return the two kernels of lower rank whose outputs for the images `X` are closest to those of the given ones.

    `Wa` alone is a convolution; with `Wb`, a 1x1 kernel, it is already a pair. `biasA` belongs to the first, `biasB` to the last. As
    `factorize_matrix` does, it returns one kernel where two would save nothing.
    """
    if Wb is None and biasB is not None:
        raise MissingKernelError(
            "factorize_conv2d: biasB belongs to the second kernel Wb, which is missing. Use biasA."
        )
    padding, mode = conv2d_kwargs.pop("padding", 0), conv2d_kwargs.pop("padding_mode", "zeros")
    if padding == "same":
        dilation = _pair(conv2d_kwargs.get("dilation", 1))
        sides = [step * (side - 1) for step, side in zip(dilation, Wa.shape[2:])]
    else:
        sides = [0, 0] if padding == "valid" else [2 * side for side in _pair(padding)]
    high, wide = sides  # the pixels on both sides together
    around = (wide // 2, wide - wide // 2, high // 2, high - high // 2)
    X = F.pad(X, around, mode="constant" if mode == "zeros" else mode)
    Y, bias = F.conv2d(X, Wa, biasA, **conv2d_kwargs), biasA
    if Wb is not None:
        Y = F.conv2d(Y, Wb, biasB)
        # What the first part adds reaches the output through the second.
        passed = None if biasA is None else Wb.flatten(1) @ biasA
        bias = passed if biasB is None else biasB if passed is None else biasB + passed
    rows = F.unfold(X, Wa.shape[2:], **conv2d_kwargs).transpose(1, 2).flatten(0, 1)  # (N * places, channels * area)
    solution = factorize_matrix(
        rows, Y.flatten(2).transpose(1, 2).flatten(0, 1), Wa.flatten(1).t(),
        None if Wb is None else Wb.flatten(1).t(), bias, rank, n_iters,
    )  # fmt: skip
    assert solution.Wa is not None
    solution.Wa = solution.Wa.t().reshape(-1, *Wa.shape[1:])
    solution.Wb = None if solution.Wb is None else solution.Wb.t()[:, :, None, None]
    return solution


Initialize = Literal["random", "svd"]


def clean_latent_size(latent: float, in_size: int, out_size: int) -> int:
    """Return the rank that a setting means: a count of at least 1, or a fraction of the smaller size below 1."""
    return int(latent) if latent >= 1 else max(1, int(latent * min(in_size, out_size)))


def max_rank_with_speedup(in_size: int, out_size: int) -> int:
    """Return the largest rank at which two thin matrices hold fewer numbers than the one they replace."""
    return math.ceil(in_size * out_size / (in_size + out_size) - 1)


def factorizing_could_speedup(module: nn.Module, latent_size: float) -> bool:
    """Return whether a layer split at this rank would do less arithmetic than it does now."""
    if isinstance(module, FactorizedModule):
        return module.should_factorize(latent_size)
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        sizes, area = (module.in_channels, module.out_channels), math.prod(module.kernel_size)
    elif isinstance(module, nn.Linear):
        sizes, area = (module.in_features, module.out_features), 1
    else:
        return False
    return clean_latent_size(latent_size, *sizes) <= max_rank_with_speedup(sizes[0] * area, sizes[1])


class FactorizedModule(nn.Module):
    """What the two kinds share: `module0` has few outputs and no bias, `module1` has the layer's outputs and its bias."""

    module0: Any
    module1: Any
    unit: str
    """What torch calls the sizes of such a layer: channels or features."""

    def __init__(self, in_size: int, out_size: int, latent_size: float, inputs: int):
        super().__init__()
        self.in_size, self.out_size = in_size, out_size
        rank, most = clean_latent_size(latent_size, in_size, out_size), max_rank_with_speedup(inputs, out_size)
        if rank > most:
            raise ConfigError(
                f"{type(self).__name__}: a rank of {rank} saves nothing; the largest that does is {most}. Use a smaller latent size."
            )
        self.latent_size = rank
        """The rank."""

    bias = property(lambda self: self.module1.bias, doc="As of the layer it replaces.")

    @property
    def weight(self) -> Tensor:
        """The weight of one layer that computes the same; models read its type and device."""
        whole = self.module1.weight.flatten(1) @ self.module0.weight.flatten(1)
        return whole.view(-1, *self.module0.weight.shape[1:])

    def forward(self, input: Tensor) -> Tensor:
        return self.module1(self.module0(input))

    def reset_parameters(self) -> None:
        """Draw new weights for both parts."""
        for part in (self.module0, self.module1):
            part.reset_parameters()

    def should_factorize(self, proposed_rank: float) -> bool:
        """Return whether this rank, or this fraction of the smaller size, would do less arithmetic than the present one."""
        return clean_latent_size(proposed_rank, self.in_size, self.out_size) < self.latent_size

    def set_rank(self, input: Tensor, rank: int) -> LowRankSolution | None:
        """Lower the rank, refitting both parts so that the outputs for `input` change little; return how well that went.

        The parts get new parameters: optimizers made before must be updated (`drivetrain.surgery.update_params_in_optimizer`).
        """
        check_counts(f"{type(self).__name__}.set_rank", 1, rank=rank)
        if rank > self.latent_size:
            raise ConfigError(
                f"{type(self).__name__}.set_rank(rank={rank}): the rank is {self.latent_size} and can only be lowered."
            )
        if rank == self.latent_size:
            return None
        solution = self.solution_for_rank(input, rank)
        self.apply_solution(solution)
        return solution

    def solution_for_rank(self, input: Tensor, rank: int) -> LowRankSolution:
        """Return parts of a lower rank whose outputs for `input` are close to the present ones; nothing changes yet."""
        raise NotImplementedError

    def apply_solution(self, solution: LowRankSolution) -> None:
        """Take the parts that `solution_for_rank` found."""
        assert solution.Wa is not None and solution.Wb is not None
        self.latent_size = solution.rank
        for part, side, found in ((self.module0, "out", solution.Wa), (self.module1, "in", solution.Wb)):
            setattr(part, f"{side}_{self.unit}", solution.rank)
            weight = found.t() if found.ndim == 2 else found
            part.weight = nn.Parameter(weight.contiguous(), requires_grad=part.weight.requires_grad)
        if solution.bias is not None:
            self.module1.bias.data.copy_(solution.bias)

    def _approximate(self, module: nn.Conv2d | nn.Linear) -> None:
        """Start from the best approximation of a layer's weights."""
        factors = split_matrix(module.weight.detach().flatten(1).t(), self.latent_size)
        for part, factor in zip((self.module0, self.module1), factors):
            part.weight = nn.Parameter(factor.t().reshape(part.weight.shape).contiguous())
        self.module1.bias = module.bias


class FactorizedConv2d(FactorizedModule):
    """Two convolutions in place of one: the first has its geometry and few channels, the second is 1x1 and has its bias."""

    unit = "channels"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        latent_channels: float = 0.25,
        **conv: Any,
    ):
        if conv.get("groups", 1) > 1:
            raise ConfigError(f"FactorizedConv2d(groups={conv['groups']}): grouped convolutions are not factorized.")
        super().__init__(in_channels, out_channels, latent_channels, in_channels * math.prod(_pair(kernel_size)))
        bias = conv.pop("bias", True)
        self.kernel_size = kernel_size
        self.module0 = nn.Conv2d(in_channels, self.latent_size, kernel_size, bias=False, **conv)
        self.module1 = nn.Conv2d(self.latent_size, out_channels, 1, bias=bias)

    in_channels = property(lambda self: self.in_size, doc="As of the convolution it replaces.")
    out_channels = property(lambda self: self.out_size, doc="As of the convolution it replaces.")
    latent_channels = property(lambda self: self.latent_size, doc="The rank.")
    conv0 = property(lambda self: self.module0, doc="The convolution with few channels.")
    conv1 = property(lambda self: self.module1, doc="The 1x1 convolution.")

    @staticmethod
    def max_allowed_latent_channels(in_channels: int, out_channels: int, kernel_size: int | tuple[int, int]) -> int:
        """Return the largest rank that saves arithmetic."""
        return max_rank_with_speedup(in_channels * math.prod(_pair(kernel_size)), out_channels)

    max_allowed_latent_features = max_allowed_latent_channels  # Composer's name

    def solution_for_rank(self, input: Tensor, rank: int) -> LowRankSolution:
        conv, bias = self.module0, self.module1.bias
        return factorize_conv2d(
            input, conv.weight.detach(), self.module1.weight.detach(), rank, biasB=None if bias is None else bias.detach(),
            stride=conv.stride, padding=conv.padding, dilation=conv.dilation, padding_mode=conv.padding_mode,
        )  # fmt: skip

    @staticmethod
    def from_conv2d(
        module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.25, initialize: Initialize = "random"
    ) -> "FactorizedConv2d":
        """Return a layer that replaces a convolution; `svd` starts from the best approximation of its weights."""
        new = FactorizedConv2d(
            module.in_channels, module.out_channels, module.kernel_size, latent_channels, stride=module.stride,  # type: ignore[arg-type]
            padding=module.padding, dilation=module.dilation, padding_mode=module.padding_mode, bias=module.bias is not None,
        )  # fmt: skip
        if initialize == "svd":
            new._approximate(module)
        return new


class FactorizedLinear(FactorizedModule):
    """Two linear layers in place of one: the first has few outputs and no bias, the second has the bias."""

    unit = "features"

    def __init__(self, in_features: int, out_features: int, bias: bool = True, latent_features: float = 0.25):
        super().__init__(in_features, out_features, latent_features, in_features)
        self.module0 = nn.Linear(in_features, self.latent_size, bias=False)
        self.module1 = nn.Linear(self.latent_size, out_features, bias=bias)

    in_features = property(lambda self: self.in_size, doc="As of the layer it replaces.")
    out_features = property(lambda self: self.out_size, doc="As of the layer it replaces.")
    latent_features = property(lambda self: self.latent_size, doc="The rank.")
    linear0 = property(lambda self: self.module0, doc="The layer with few outputs.")
    linear1 = property(lambda self: self.module1, doc="The layer with the bias.")

    @staticmethod
    def max_allowed_latent_features(in_features: int, out_features: int) -> int:
        """Return the largest rank that saves arithmetic."""
        return max_rank_with_speedup(in_features, out_features)

    max_allowed_latent_channels = max_allowed_latent_features  # Composer's name

    @torch.no_grad()
    def solution_for_rank(self, input: Tensor, rank: int) -> LowRankSolution:
        rows, bias = input.reshape(-1, self.in_size), self.module1.bias
        return factorize_matrix(
            rows, self(rows), self.module0.weight.detach().t(), self.module1.weight.detach().t(),
            None if bias is None else bias.detach(), rank,
        )  # fmt: skip

    @staticmethod
    def from_linear(
        module: nn.Linear, module_index: int = -1, latent_features: float = 0.25, initialize: Initialize = "random"
    ) -> "FactorizedLinear":
        """Return a layer that replaces a linear one; `svd` starts from the best approximation of its weights."""
        new = FactorizedLinear(module.in_features, module.out_features, module.bias is not None, latent_features)
        if initialize == "svd":
            new._approximate(module)
        return new


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: float = 0.25,
    min_features: int = 512,
    latent_features: float = 0.25,
    optimizers: Optimizers = None,
    *,
    initialize: Initialize = "random",
) -> None:
    """Factorize the convolutions and linear layers that are wide enough, where it saves arithmetic."""
    check_factorize("apply_factorization", latent_channels, latent_features, initialize)
    if not factorize_convs and not factorize_linears:
        warn_no_effect("Factorize has no effect: factorize_convs and factorize_linears are both False.")
        return
    done = inside(model, FactorizedModule)
    left_alone: set[nn.Module] = set()

    def factorize(module: nn.Module, index: int) -> nn.Module | None:
        if isinstance(module, nn.Conv2d):
            sizes, narrowest, latent = (module.in_channels, module.out_channels), min_channels, latent_channels
        else:
            assert isinstance(module, nn.Linear)
            sizes, narrowest, latent = (module.in_features, module.out_features), min_features, latent_features
        if module in done or min(sizes) < narrowest or not factorizing_could_speedup(module, latent):
            return None
        if parametrize.is_parametrized(module):
            left_alone.add(module)
        if type(module) is nn.Conv2d:  # a subclass computes something else with its weights
            return FactorizedConv2d.from_conv2d(module, index, latent, initialize)
        return FactorizedLinear.from_linear(module, index, latent, initialize) if type(module) is nn.Linear else None

    chosen: dict[type[nn.Module], bool] = {nn.Conv2d: factorize_convs, nn.Linear: factorize_linears}
    policies: dict[type[nn.Module], ReplacementFunction] = {cls: factorize for cls, wanted in chosen.items() if wanted}
    replaced = replace_module_classes(model, policies, optimizers)
    disable_fused_encoder(model, FactorizedModule)
    if left_alone:
        warn_no_effect(
            f"Factorize left {len(left_alone)} layers of {type(model).__name__} as they are, because their weights are parametrized "
            "(WeightStandardization, weight norm). Factorize them first."
        )
    elif not replaced and not done:
        warn_no_effect(
            f"Factorize found nothing in {type(model).__name__} that is wide enough (min_channels={min_channels}, "
            f"min_features={min_features}) and would be cheaper as two layers."
        )


def check_factorize(who: str, latent_channels: float, latent_features: float, initialize: str) -> None:
    """Reject sizes and names that mean nothing."""
    for name, value in (("latent_channels", latent_channels), ("latent_features", latent_features)):
        check_number(name, value, above=0, owner=who, hint=", a count, or a fraction below 1")
    check_choice("initialize", initialize, ("random", "svd"), owner=who)


class Factorize(ModelSurgery):
    """Factorizes the wide layers of the model: after those that wrap or make wide layers, before their weights are parametrized."""

    function = staticmethod(apply_factorization)
    after = ("SqueezeExcite", "GatedLinearUnits")
    before = ("WeightStandardization", "FP8Linear")
    counts = {
        "factorize/num_conv2d_replacements": FactorizedConv2d,
        "factorize/num_linear_replacements": FactorizedLinear,
    }

    def __init__(
        self,
        factorize_convs: bool = True,
        factorize_linears: bool = True,
        min_channels: int = 256,
        latent_channels: float = 0.25,
        min_features: int = 256,
        latent_features: float = 128,
        *,
        initialize: Initialize = "random",
    ):
        check_factorize("Factorize", latent_channels, latent_features, initialize)
        self.factorize_convs, self.factorize_linears = factorize_convs, factorize_linears
        self.min_channels, self.latent_channels = min_channels, latent_channels
        self.min_features, self.latent_features, self.initialize = min_features, latent_features, initialize
