"""Factorize (compare Jaderberg et al., 2014, arXiv 1405.3866): write a large matrix as the product of two thin ones.

A convolution becomes one with few output channels followed by a 1x1 convolution; a linear layer becomes two. The rank must be so
low that the pair costs less than the original. `set_rank` lowers it later, refitting both parts to what the layer computes.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.optim import Optimizer

from drivetrain.algorithms.low_rank import LowRankSolution, factorize_conv2d, factorize_matrix, split_matrix
from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, inside, warn_no_effect
from drivetrain.algorithms.utils.checks import check_choice, check_whole
from drivetrain.core.errors import ConfigError
from drivetrain.module.surgery import count_module_instances, replace_module_classes

__all__ = [
    "Factorize",
    "FactorizedConv2d",
    "FactorizedLinear",
    "LowRankSolution",
    "apply_factorization",
    "factorize_conv2d",
    "factorize_matrix",
    "factorizing_could_speedup",
]

Initialize = Literal["random", "svd"]
_INITIALIZE = ("random", "svd")


def clean_latent_size(latent: float, in_size: int, out_size: int) -> int:
    """Return the rank that a setting means: a count from 1 on, below that a fraction of the smaller size."""
    return int(latent) if latent >= 1 else max(1, int(latent * min(in_size, out_size)))


def max_rank_with_speedup(in_size: int, out_size: int) -> int:
    """Return the largest rank at which two thin matrices hold fewer numbers than the one they replace."""
    return math.ceil(in_size * out_size / (in_size + out_size) - 1)


def factorizing_could_speedup(module: nn.Module, latent_size: float) -> bool:
    """Say whether a layer split at this rank would do less arithmetic than it does now."""
    if isinstance(module, FactorizedConv2d | FactorizedLinear):
        return clean_latent_size(latent_size, module.in_size, module.out_size) < module.latent_size
    if isinstance(module, nn.Conv2d):
        if module.groups > 1:
            return False
        area = module.kernel_size[0] * module.kernel_size[1]
        latent = clean_latent_size(latent_size, module.in_channels, module.out_channels)
        return latent <= max_rank_with_speedup(module.in_channels * area, module.out_channels)
    if isinstance(module, nn.Linear):
        latent = clean_latent_size(latent_size, module.in_features, module.out_features)
        return latent <= max_rank_with_speedup(module.in_features, module.out_features)
    raise ConfigError(
        f"factorizing_could_speedup: {type(module).__name__} cannot be factorized; expected Conv2d, Linear, FactorizedConv2d or "
        "FactorizedLinear."
    )


def _checked_rank(who: str, latent: float, in_size: int, out_size: int, inputs: int) -> int:
    rank, most = clean_latent_size(latent, in_size, out_size), max_rank_with_speedup(inputs, out_size)
    if rank > most:
        raise ConfigError(
            f"{who}: a rank of {rank} saves nothing; the largest that does is {most}. Use a smaller latent size."
        )
    return rank


class FactorizedConv2d(nn.Module):
    """Two convolutions in place of one: `conv0` has its geometry and few channels, `conv1` is 1x1 and has its bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        latent_channels: float = 0.25,
        **conv: Any,
    ):
        super().__init__()
        if conv.get("groups", 1) > 1:
            raise ConfigError(f"FactorizedConv2d(groups={conv['groups']}): grouped convolutions are not factorized.")
        bias, area = conv.pop("bias", True), math.prod(_pair(kernel_size))
        self.in_size, self.out_size = in_channels, out_channels
        rank = _checked_rank("FactorizedConv2d", latent_channels, in_channels, out_channels, in_channels * area)
        self.conv0 = nn.Conv2d(in_channels, rank, kernel_size, bias=False, **conv)
        self.conv1 = nn.Conv2d(rank, out_channels, 1, bias=bias)

    @property
    def latent_size(self) -> int:
        """The rank."""
        return self.conv0.out_channels

    latent_channels = latent_size

    def forward(self, input: Tensor) -> Tensor:
        return self.conv1(self.conv0(input))

    def set_rank(self, input: Tensor, rank: int) -> LowRankSolution | None:
        """Lower the rank, refitting both parts so that the outputs for `input` change little; return how well that went.

        The parts get new parameters: optimizers made before must be told (`drivetrain.surgery.update_params_in_optimizer`).
        """
        if not _is_lower("FactorizedConv2d", rank, self.latent_size):
            return None
        bias = None if self.conv1.bias is None else self.conv1.bias.detach()
        conv = self.conv0
        solution = factorize_conv2d(
            input, conv.weight.detach(), self.conv1.weight.detach(), biasB=bias, rank=rank, stride=conv.stride,
            padding=conv.padding, dilation=conv.dilation, padding_mode=conv.padding_mode,
        )  # fmt: skip
        _assign(self.conv0, "out_channels", rank, solution.Wa)
        _assign(self.conv1, "in_channels", rank, solution.Wb, solution.bias)
        return solution

    @staticmethod
    def from_conv2d(
        module: nn.Conv2d, module_index: int = -1, latent_channels: float = 0.25, initialize: Initialize = "random"
    ) -> "FactorizedConv2d":
        """Return the layer that takes the place of a convolution; `svd` starts from the best approximation of its weights."""
        new = FactorizedConv2d(
            module.in_channels, module.out_channels, module.kernel_size, latent_channels, stride=module.stride,  # type: ignore[arg-type]
            padding=module.padding, dilation=module.dilation, padding_mode=module.padding_mode, bias=module.bias is not None,
        )  # fmt: skip
        if initialize == "svd":
            first, second = split_matrix(module.weight.detach().flatten(1).t(), new.latent_size)
            new.conv0.weight = nn.Parameter(first.t().reshape(-1, *module.weight.shape[1:]).contiguous())
            new.conv1.weight = nn.Parameter(second.t()[:, :, None, None].contiguous())
            new.conv1.bias = module.bias
        return new


class FactorizedLinear(nn.Module):
    """Two linear layers in place of one: `linear0` has few outputs and no bias, `linear1` has the bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, latent_features: float = 0.25):
        super().__init__()
        self.in_size, self.out_size = in_features, out_features
        rank = _checked_rank("FactorizedLinear", latent_features, in_features, out_features, in_features)
        self.linear0 = nn.Linear(in_features, rank, bias=False)
        self.linear1 = nn.Linear(rank, out_features, bias=bias)

    @property
    def latent_size(self) -> int:
        """The rank."""
        return self.linear0.out_features

    latent_features = latent_size

    def forward(self, input: Tensor) -> Tensor:
        return self.linear1(self.linear0(input))

    @torch.no_grad()
    def set_rank(self, input: Tensor, rank: int) -> LowRankSolution | None:
        """Lower the rank, refitting both parts so that the outputs for `input` change little; return how well that went.

        The parts get new parameters: optimizers made before must be told (`drivetrain.surgery.update_params_in_optimizer`).
        """
        if not _is_lower("FactorizedLinear", rank, self.latent_size):
            return None
        rows = input.reshape(-1, self.in_size)
        bias = None if self.linear1.bias is None else self.linear1.bias.detach()
        solution = factorize_matrix(
            rows, self(rows), self.linear0.weight.detach().t(), self.linear1.weight.detach().t(), bias, rank
        )
        _assign(self.linear0, "out_features", rank, solution.Wa.t())
        _assign(self.linear1, "in_features", rank, solution.Wb.t(), solution.bias)  # type: ignore[union-attr]
        return solution

    @staticmethod
    def from_linear(
        module: nn.Linear, module_index: int = -1, latent_features: float = 0.25, initialize: Initialize = "random"
    ) -> "FactorizedLinear":
        """Return the layer that takes the place of a linear one; `svd` starts from the best approximation of its weights."""
        new = FactorizedLinear(module.in_features, module.out_features, module.bias is not None, latent_features)
        if initialize == "svd":
            first, second = split_matrix(module.weight.detach().t(), new.latent_size)
            new.linear0.weight = nn.Parameter(first.t().contiguous())
            new.linear1.weight = nn.Parameter(second.t().contiguous())
            new.linear1.bias = module.bias
        return new


def _is_lower(who: str, rank: int, current: int) -> bool:
    check_whole(f"{who}.set_rank", 1, rank=rank)
    if rank > current:
        raise ConfigError(f"{who}.set_rank(rank={rank}): the rank is {current} and can only be lowered.")
    return rank < current


def _assign(layer: nn.Module, size: str, rank: int, weight: Tensor | None, bias: Tensor | None = None) -> None:
    assert weight is not None
    setattr(layer, size, rank)
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=layer.weight.requires_grad)  # type: ignore[arg-type]
    if bias is not None:
        layer.bias.data.copy_(bias)  # type: ignore[operator]


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
    check_factorize(
        "apply_factorization", factorize_convs, factorize_linears, latent_channels, latent_features, initialize
    )
    done = inside(model, _LAYERS)

    def factorize_conv(module: nn.Module, index: int) -> nn.Module | None:
        if (
            type(module) is not nn.Conv2d
            or module in done
            or min(module.in_channels, module.out_channels) < min_channels
        ):
            return None
        if not factorizing_could_speedup(module, latent_channels):
            return None
        return FactorizedConv2d.from_conv2d(module, index, latent_channels, initialize)

    def factorize_linear(module: nn.Module, index: int) -> nn.Module | None:
        if (
            type(module) is not nn.Linear
            or module in done
            or min(module.in_features, module.out_features) < min_features
        ):
            return None
        if not factorizing_could_speedup(module, latent_features):
            return None
        return FactorizedLinear.from_linear(module, index, latent_features, initialize)

    policies: dict[type[nn.Module], Any] = {}
    if factorize_convs:
        policies[nn.Conv2d] = factorize_conv
    if factorize_linears:
        policies[nn.Linear] = factorize_linear
    if not replace_module_classes(model, policies, optimizers) and not done:
        warn_no_effect(
            f"Factorize found nothing in {type(model).__name__} that is wide enough (min_channels={min_channels}, "
            f"min_features={min_features}) and would be cheaper in two parts."
        )


_LAYERS = (FactorizedConv2d, FactorizedLinear)


def check_factorize(
    who: str, convs: bool, linears: bool, latent_channels: float, latent_features: float, initialize: str
) -> None:
    """Refuse settings under which nothing could be factorized."""
    if not convs and not linears:
        raise ConfigError(f"{who}: factorize_convs and factorize_linears are both False, so there is nothing to do.")
    for name, value in (("latent_channels", latent_channels), ("latent_features", latent_features)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{who}({name}={value!r}): expected a count, or a fraction below 1.")
    check_choice(who, "initialize", initialize, _INITIALIZE)


class Factorize(ModelSurgery):
    """Factorizes the wide layers of the model."""

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
        check_factorize("Factorize", factorize_convs, factorize_linears, latent_channels, latent_features, initialize)
        self.factorize_convs, self.factorize_linears = factorize_convs, factorize_linears
        self.min_channels, self.latent_channels = min_channels, latent_channels
        self.min_features, self.latent_features, self.initialize = min_features, latent_features, initialize

    def operate(self, model: nn.Module, optimizers: list[Optimizer]) -> Mapping[str, int]:
        apply_factorization(
            model,
            self.factorize_convs,
            self.factorize_linears,
            self.min_channels,
            self.latent_channels,
            self.min_features,
            self.latent_features,
            optimizers,
            initialize=self.initialize,
        )
        return {
            "factorize/num_conv2d_replacements": count_module_instances(model, FactorizedConv2d),
            "factorize/num_linear_replacements": count_module_instances(model, FactorizedLinear),
        }
