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
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from drivetrain.algorithms.low_rank import LowRankSolution, factorize_conv2d, factorize_matrix, split_matrix
from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, inside, leave_fused_paths, warn_no_effect
from drivetrain.core.arguments import check_choice, check_counts
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
    """Return whether a layer split at this rank would do less arithmetic than it does now."""
    if isinstance(module, FactorizedModule):
        return module.should_factorize(latent_size)
    if isinstance(module, nn.Conv2d):
        if module.groups > 1:
            return False
        inputs = module.in_channels * math.prod(module.kernel_size)
        latent = clean_latent_size(latent_size, module.in_channels, module.out_channels)
        return latent <= max_rank_with_speedup(inputs, module.out_channels)
    if isinstance(module, nn.Linear):
        latent = clean_latent_size(latent_size, module.in_features, module.out_features)
        return latent <= max_rank_with_speedup(module.in_features, module.out_features)
    return False


class FactorizedModule(nn.Module):
    """What the two kinds share: `module0` has few outputs and no bias, `module1` has the layer's outputs and its bias."""

    module0: nn.Module
    module1: nn.Module

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

    def forward(self, input: Tensor) -> Tensor:
        return self.module1(self.module0(input))

    def reset_parameters(self) -> None:
        """Draw new weights for both parts."""
        for part in (self.module0, self.module1):
            part.reset_parameters()  # type: ignore[operator]

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
        raise NotImplementedError

    def _assign(self, size: str, solution: LowRankSolution, first: Tensor, second: Tensor) -> None:
        self.latent_size = solution.rank
        for part, name, weight in ((self.module0, f"out_{size}", first), (self.module1, f"in_{size}", second)):
            setattr(part, name, solution.rank)
            part.weight = nn.Parameter(weight.contiguous(), requires_grad=part.weight.requires_grad)  # type: ignore[arg-type]
        if solution.bias is not None:
            self.module1.bias.data.copy_(solution.bias)  # type: ignore[operator]


class FactorizedConv2d(FactorizedModule):
    """Two convolutions in place of one: the first has its geometry and few channels, the second is 1x1 and has its bias."""

    module0: nn.Conv2d
    module1: nn.Conv2d

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

    def apply_solution(self, solution: LowRankSolution) -> None:
        assert solution.Wa is not None and solution.Wb is not None
        self._assign("channels", solution, solution.Wa, solution.Wb)

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
            first, second = split_matrix(module.weight.detach().flatten(1).t(), new.latent_size)
            new.module0.weight = nn.Parameter(first.t().reshape(-1, *module.weight.shape[1:]).contiguous())
            new.module1.weight = nn.Parameter(second.t()[:, :, None, None].contiguous())
            new.module1.bias = module.bias
        return new


class FactorizedLinear(FactorizedModule):
    """Two linear layers in place of one: the first has few outputs and no bias, the second has the bias."""

    module0: nn.Linear
    module1: nn.Linear

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

    def apply_solution(self, solution: LowRankSolution) -> None:
        assert solution.Wa is not None and solution.Wb is not None
        self._assign("features", solution, solution.Wa.t(), solution.Wb.t())

    @staticmethod
    def from_linear(
        module: nn.Linear, module_index: int = -1, latent_features: float = 0.25, initialize: Initialize = "random"
    ) -> "FactorizedLinear":
        """Return a layer that replaces a linear one; `svd` starts from the best approximation of its weights."""
        new = FactorizedLinear(module.in_features, module.out_features, module.bias is not None, latent_features)
        if initialize == "svd":
            first, second = split_matrix(module.weight.detach().t(), new.latent_size)
            new.module0.weight = nn.Parameter(first.t().contiguous())
            new.module1.weight = nn.Parameter(second.t().contiguous())
            new.module1.bias = module.bias
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

    def is_wide(module: nn.Module, sizes: tuple[int, int], narrowest: int, latent: float) -> bool:
        if module in done or min(sizes) < narrowest or not factorizing_could_speedup(module, latent):
            return False
        if parametrize.is_parametrized(module):
            left_alone.add(module)
        return type(module) in (nn.Conv2d, nn.Linear)  # a subclass computes something else with its weights

    def factorize_conv(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        if not is_wide(module, (module.in_channels, module.out_channels), min_channels, latent_channels):
            return None
        return FactorizedConv2d.from_conv2d(module, index, latent_channels, initialize)

    def factorize_linear(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Linear)
        if not is_wide(module, (module.in_features, module.out_features), min_features, latent_features):
            return None
        return FactorizedLinear.from_linear(module, index, latent_features, initialize)

    policies: dict[type[nn.Module], Any] = {}
    if factorize_convs:
        policies[nn.Conv2d] = factorize_conv
    if factorize_linears:
        policies[nn.Linear] = factorize_linear
    replaced = replace_module_classes(model, policies, optimizers)
    leave_fused_paths(model, FactorizedModule)
    if left_alone:
        warn_no_effect(
            f"Factorize left {len(left_alone)} layers of {type(model).__name__} as they are, because their weights are parametrized "
            "(WeightStandardization, weight norm). Factorize them first."
        )
    elif not replaced and not done:
        warn_no_effect(
            f"Factorize found nothing in {type(model).__name__} that is wide enough (min_channels={min_channels}, "
            f"min_features={min_features}) and would be cheaper in two parts."
        )


def check_factorize(who: str, latent_channels: float, latent_features: float, initialize: str) -> None:
    """Reject sizes and names that mean nothing."""
    for name, value in (("latent_channels", latent_channels), ("latent_features", latent_features)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{who}({name}={value!r}): expected a count, or a fraction below 1.")
    check_choice("initialize", initialize, _INITIALIZE, owner=who)


class Factorize(ModelSurgery):
    """Factorizes the wide layers of the model: after those that wrap or make wide layers, before their weights are parametrized."""

    after = ("SqueezeExcite", "GatedLinearUnits")
    before = ("WeightStandardization", "FP8Linear")

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
