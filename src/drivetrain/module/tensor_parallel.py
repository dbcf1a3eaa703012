"""Split the matrices of a model over ranks by an explicit plan (Shoeybi et al., 2019, arXiv 1909.08053).

A plan says for each layer whether its output features (`colwise`) or its input features (`rowwise`) are split; a column-wise layer
followed by a row-wise one needs one reduction. Names and state-dict keys stay; the parameters become distributed tensors. A model's
own code must not count heads or features globally where a layer before it is split: `view(batch, time, -1, head_size)` works.
"""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.classes import written_class

STYLES = ("colwise", "rowwise", "sequence", "colwise_gather", "replicate")
"""`colwise_gather` gathers the outputs again, as a head needs it; `replicate` names a layer that stays whole."""

_registered: dict[type[nn.Module], dict[str, Any]] = {}


def register_tp_plan(cls: type[nn.Module], plan: Mapping[str, Any]) -> None:
    """Say how models (or blocks) of a class are split: dotted names or patterns inside them, each with its style."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"register_tp_plan({cls!r}): expected a class of modules.")
    for name, style in plan.items():
        _check_style(name, style)
    _registered[cls] = dict(plan)


def find_tp_plan(model: nn.Module) -> dict[str, Any]:
    """Return the plan of a model: registered for its class or for classes inside it, or the model's own `tp_plan`."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for cls in written_class(module).__mro__:
            if cls in _registered:
                found.update({f"{path}.{name}" if path else name: style for name, style in _registered[cls].items()})
                break
    if found:
        return found
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(own) if isinstance(own, Mapping) else {}


def expand_tp_plan(model: nn.Module, plan: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the style of each layer that a plan names, after checking that names match and sizes divide."""
    modules = dict(model.named_modules())
    result: dict[str, Any] = {}
    for pattern, style in plan.items():
        _check_style(pattern, style)
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                unknown_name("layer", pattern, [name for name in modules if name], where="tensor_parallel")
            )
        for name in names:
            _check_divides(name, modules[name], style, size)
            result[name] = style
    return {name: style for name, style in result.items() if style != "replicate"}


def parallelize(model: nn.Module, mesh: Any, plan: Mapping[str, Any]) -> nn.Module:
    """Split a model's layers over a one-dimensional mesh, in place; `plan` is what `expand_tp_plan` returned."""
    from torch.distributed.tensor.parallel import parallelize_module

    modules = dict(model.named_modules())
    return parallelize_module(model, mesh, {name: _style(style, modules[name]) for name, style in plan.items()})


def _check_style(name: str, style: Any) -> None:
    if isinstance(style, str) and style not in STYLES:
        raise ConfigError(unknown_name("style", style, STYLES, where=f"tensor_parallel plan, {name}"))


def _check_divides(name: str, module: nn.Module, style: Any, size: int) -> None:
    if style not in ("colwise", "rowwise", "colwise_gather"):
        return
    if isinstance(module, nn.Linear):
        features = module.in_features if style == "rowwise" else module.out_features
    elif isinstance(module, nn.Embedding):
        features = module.num_embeddings if style == "rowwise" else module.embedding_dim
    else:
        raise ConfigError(
            f"tensor_parallel: {name} is a {type(module).__name__}; the style {style!r} is for nn.Linear and nn.Embedding."
        )
    if features % size:
        raise ConfigError(
            f"tensor_parallel: {name} has {features} features to split ({style}), which do not divide over {size} ranks. Choose "
            "another size of the tensor axis, or leave the layer out."
        )


def _style(style: Any, module: nn.Module) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if not isinstance(style, str):
        return style
    is_embedding = isinstance(module, nn.Embedding)
    styles: dict[str, Callable[[], Any]] = {
        "colwise": lambda: ColwiseParallel(output_layouts=Replicate()) if is_embedding else ColwiseParallel(),
        "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": lambda: RowwiseParallel(input_layouts=Replicate()) if is_embedding else RowwiseParallel(),
        "sequence": SequenceParallel,
    }
    return styles[style]()
