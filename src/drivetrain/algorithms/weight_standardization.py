"""Weight standardization (Qiao et al., 2019, arXiv 1903.10520): give every convolution filter mean zero and variance one."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, warn_no_effect
from drivetrain.core.arguments import check_counts
from drivetrain.core.errors import warn
from drivetrain.module.surgery import check_unwrapped, count_module_instances


class WeightStandardizer(nn.Module):
    """A parametrization that standardizes a kernel over all of its dimensions but the first."""

    def forward(self, W: Tensor) -> Tensor:
        wide = W.to(torch.promote_types(W.dtype, torch.float32))  # float16 has no 1e-10
        var, mean = torch.var_mean(wide, dim=list(range(1, W.ndim)), correction=0, keepdim=True)
        return ((wide - mean) / torch.sqrt(var + 1e-10)).to(W.dtype)


def apply_weight_standardization(
    module: nn.Module, n_last_layers_ignore: int = 0, optimizers: Optimizers = None
) -> int:
    """Standardize the kernels of all convolutions but the last `n_last_layers_ignore`; return how many are.

    The last ones in order of execution are meant, which a symbolic trace shows; a model that cannot be traced is taken in the
    order of definition, with a warning. Parameters stay the same objects, so `optimizers`, which every function of this kind
    takes, need no change.
    """
    check_counts("apply_weight_standardization", 0, n_last_layers_ignore=n_last_layers_ignore)
    check_unwrapped(module, "apply_weight_standardization")
    convs = _in_order(module) if n_last_layers_ignore else _convolutions(module)
    chosen = convs[: max(0, len(convs) - n_last_layers_ignore)]
    if not chosen:
        warn_no_effect(
            f"WeightStandardization(n_last_layers_ignore={n_last_layers_ignore}) found nothing to standardize: "
            f"{type(module).__name__} has {len(convs)} convolutions."
        )
    for conv in chosen:
        if not count_module_instances(conv, WeightStandardizer):
            parametrize.register_parametrization(conv, "weight", WeightStandardizer())
    return len(chosen)


class _ConvolutionTracer(torch.fx.Tracer):
    """Follows a model down to what holds one convolution or none, which need not be traceable."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return len(_convolutions(m)) <= 1


def _convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]


def _in_order(model: nn.Module) -> list[nn.Module]:
    """Return the convolutions in the order in which the model first calls them."""
    known = _convolutions(model)
    try:
        graph = _ConvolutionTracer().trace(model)
    except Exception as error:  # whatever a user's forward does to a tracer
        warn(
            f"WeightStandardization could not trace {type(model).__name__} ({type(error).__name__}), so its last convolutions are "
            "those defined last."
        )
        return known
    named = dict(model.named_modules())
    holders = [named[str(node.target)] for node in graph.nodes if node.op == "call_module"]
    called = dict.fromkeys(conv for holder in holders for conv in _convolutions(holder))
    return [conv for conv in known if conv not in called] + list(called)  # those never called are surely not the last


class WeightStandardization(ModelSurgery):
    """Standardizes the convolution kernels of the model."""

    function = staticmethod(apply_weight_standardization)
    writes = ("model",)
    before = ("StochasticDepth",)  # blocks that are skipped at random cannot be traced
    counts = {"WeightStandardization/num_weights_standardized": WeightStandardizer}

    def __init__(self, n_last_layers_ignore: int = 0):
        check_counts("WeightStandardization", 0, n_last_layers_ignore=n_last_layers_ignore)
        self.n_last_layers_ignore = n_last_layers_ignore
