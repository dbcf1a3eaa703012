"""Split the matrices of a model over ranks by a plan (Shoeybi et al., 2019, arXiv 1909.08053).

A plan says for each layer whether its output features (`colwise`) or its input features (`rowwise`) are split; a column-wise layer
followed by a row-wise one needs one reduction. Names, state-dict keys and ties stay; the parameters become distributed tensors. A model's
own code must not count heads or features globally where a layer before it is split: `view(batch, time, -1, head_size)` works. Plans come
from the user, from `register_tp_plan`, from the model itself (transformers' `_tp_plan`), or from `tensor_inference`.
"""

import fnmatch
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.vocabulary_parallel import enable_split_logits
from drivetrain.module.wrapping import parameter_places, user_class

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel.style import ParallelStyle

STYLES = ("colwise", "rowwise", "sequence", "heads", "colwise_gather", "vocabulary", "replicate")
"""`colwise_gather` gathers the outputs again, as a head needs it; a `vocabulary` head leaves them split until the loss; `heads` is a
norm of split queries or keys, (batch, time, heads, width); `replicate` names a layer that stays whole."""

_STYLES_OF_TRANSFORMERS = {
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}

_registered: dict[type[nn.Module], dict[str, Any]] = {}


def register_tp_plan(cls: type[nn.Module], plan: Mapping[str, object]) -> None:
    """Register how models (or blocks) of a class are split: dotted names or patterns inside them, each with its style."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"register_tp_plan({cls!r}): expected a class of modules.")
    for name, style in plan.items():
        _check_style(name, style)
    _registered[cls] = dict(plan)


def find_tp_plan(model: nn.Module) -> dict[str, Any]:
    """Return the plan of a model: that registered for its class or classes inside it, or the `tp_plan` of the model or an inner module."""
    prefixes = {module: f"{path}." if path else "" for path, module in model.named_modules()}
    found: dict[str, Any] = {}
    for module, prefix in prefixes.items():
        plan = next((_registered[cls] for cls in user_class(module).__mro__ if cls in _registered), {})
        found |= {prefix + name: style for name, style in plan.items()}
    if found:
        return found
    outer: list[str] = []  # modules with plans, which are also those of what is inside them
    for module, prefix in prefixes.items():  # a model of transformers may be inside a module of the user's own
        own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if isinstance(own, Mapping) and not any(map(prefix.startswith, outer)):
            outer.append(prefix)
            found |= {prefix + name: style for name, style in _translated(module, own).items()}
    return found


def _translated(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's own plan in our words; empty where it has styles that we do not know, or names nothing of this model."""
    styles = {name: _STYLES_OF_TRANSFORMERS.get(style, style) for name, style in plan.items()}
    if any(isinstance(style, str) and style not in STYLES for style in styles.values()):
        return {}
    names = [name for name, _ in model.named_modules()]
    return {name: style for name, style in styles.items() if fnmatch.filter(names, name)}


def expand_tp_plan(model: nn.Module, plan: Mapping[str, object], size: int) -> dict[str, Any]:
    """Return the style of each layer that a plan names, after checking that names match and sizes divide."""
    modules = dict(model.named_modules())
    result: dict[str, Any] = {}
    for pattern, style in plan.items():
        _check_style(pattern, style)
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(unknown_name("layer", pattern, list(modules)[1:], where="tensor_parallel"))
        for name in names:
            _check_divides(name, modules[name], style, size)
            result[name] = style
    return {name: style for name, style in result.items() if style != "replicate"}


def parallelize(
    model: nn.Module,
    mesh: "DeviceMesh",
    plan: Mapping[str, Any],
    *,
    unreduced: Collection[str] = (),
    prepare: Callable[[str, nn.Module], None] | None = None,
) -> nn.Module:
    """Split a model's layers over a one-dimensional mesh, in place. `plan` is the result of `expand_tp_plan`.

    Row-wise layers named in `unreduced` return distributed tensors that are not added up yet. `prepare` is called for every module
    before it is split, so that no two whole layers need memory at once.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    modules = dict(model.named_modules())
    ties = [found for found in parameter_places(model).values() if len(found) > 1]
    for name, module in modules.items():
        if prepare is not None:
            prepare(name, module)
        if name in plan:
            if isinstance(plan[name], str) and _is_transposed(module):
                _split_transposed(module, mesh, plan[name], name not in unreduced)
            else:
                parallelize_module(module, mesh, _style(plan[name], module, name not in unreduced))
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(_wait_for_lookup)
    _retie_parameters(ties)
    for name, style in plan.items():
        if style == "vocabulary":
            enable_split_logits(model, modules[name])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # torch's fused path in evaluation knows no split weights
    return model


def _wait_for_lookup(embedding: nn.Module, args: object, out: object) -> Any:
    """Return what an embedding looked up when it has arrived: a compiled block drops the gradient of a tensor that is on its way."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return _WaitForCollective.apply(out) if isinstance(out, AsyncCollectiveTensor) else out


class _WaitForCollective(torch.autograd.Function):
    """The identity, which waits for a collective."""

    @staticmethod
    def forward(ctx: object, tensor: "AsyncCollectiveTensor") -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def _retie_parameters(ties: list[list[tuple[nn.Module, str]]]) -> None:
    for places in ties:
        parameters = [module._parameters[name] for module, name in places]
        layouts = {str(getattr(parameter, "placements", None)) for parameter in parameters}
        if len(layouts) > 1:
            owners = " and ".join(type(module).__name__ for module, _ in places)
            raise ConfigError(
                f"tensor_parallel: {owners} share a parameter, and the plan splits it differently in each. Split an embedding 'rowwise' "
                "where the head that shares its weight is 'colwise', or remove both from the plan."
            )
        for module, name in places:
            module._parameters[name] = parameters[0]


def split_head(model: nn.Module, plan: Mapping[str, object], size: int) -> dict[str, Any] | None:
    """Return a plan in which the head keeps the logits split until the loss, and the embedding matches; None without such a head.

    A head is a linear layer that gives one number for each word of an embedding. Where the two share their weight, the embedding is split
    by words too.
    """
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for head, module in reversed(list(model.named_modules())):
        may_split = plan.get(head, "colwise_gather") in ("colwise_gather", "vocabulary")
        if not (isinstance(module, nn.Linear) and may_split) or module.out_features % size:
            continue
        own = {name: e for name, e in embeddings.items() if e.num_embeddings == module.out_features}
        if not own:
            continue
        result = {**plan, head: "vocabulary"}
        for name, embedding in own.items():
            is_tied = embedding.weight is module.weight
            is_plain = embedding.max_norm is None and embedding.padding_idx is None
            if is_tied and not (is_plain and plan.get(name, "rowwise") == "rowwise"):
                return None
            if is_plain and (is_tied or embedding.embedding_dim % size == 0):
                result.setdefault(name, "rowwise" if is_tied else "colwise")
        return result
    return None


def _check_style(name: str, style: object) -> None:
    if isinstance(style, str) and style not in STYLES:
        raise ConfigError(unknown_name("style", style, STYLES, where=f"tensor_parallel plan, {name}"))


def is_splittable(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a weight to split: torch's, or transformers' transposed Conv1D."""
    return (isinstance(module, nn.Linear) or _is_transposed(module)) and "weight" in module._parameters


def features(module: nn.Module, style: str) -> int:
    """Return how many features a style splits."""
    weight: Any = module.weight
    return int(weight.shape[weight_dim(module, style)])


def weight_dim(module: nn.Module, style: str) -> int:
    """Return the dimension of the weight that a style splits."""
    is_transposed = isinstance(module, nn.Embedding) or _is_transposed(module)
    outputs = 1 if is_transposed else 0
    return 1 - outputs if style == "rowwise" else outputs


def _is_transposed(module: nn.Module) -> bool:
    is_conv1d = user_class(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return is_conv1d and getattr(module, "weight", None) is not None


def _check_divides(name: str, module: nn.Module, style: object, size: int) -> None:
    if style not in ("colwise", "rowwise", "colwise_gather", "vocabulary"):
        return
    if isinstance(module, nn.Linear | nn.Embedding) and "weight" not in module._parameters:
        raise ConfigError(
            f"tensor_parallel: the weight of {name} is computed from other parameters, as weight_norm and other parametrizations do, so it "
            "cannot be split. Remove the layer from the plan, or remove the parametrization."
        )
    if not (is_splittable(module) or isinstance(module, nn.Embedding)):
        raise ConfigError(
            f"tensor_parallel: {name} is a {type(module).__name__}; the style {style!r} is for nn.Linear and nn.Embedding."
        )
    count = features(module, style)
    if count % size:
        raise ConfigError(
            f"tensor_parallel: {name} has {count} features to split ({style}), which do not divide over {size} ranks. Choose "
            "another size of the tensor axis, or remove the layer from the plan."
        )


def _style(style: object, module: nn.Module, is_reduced: bool) -> Any:
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if not isinstance(style, str):
        return style
    if style == "rowwise" and not is_reduced:
        return RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    whole = Replicate() if isinstance(module, nn.Embedding) else None
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(output_layouts=whole),
        "colwise_gather": ColwiseParallel(output_layouts=Replicate()),
        "vocabulary": ColwiseParallel(use_local_output=False),
        "rowwise": RowwiseParallel(input_layouts=whole),
        "sequence": SequenceParallel(),
        "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    return styles[style]


def _split_transposed(module: nn.Module, mesh: "DeviceMesh", style: str, is_reduced: bool) -> None:
    """Split a layer that keeps its weight as (inputs, outputs)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    is_rowwise = style == "rowwise"
    comes = Shard(-1) if is_rowwise else Replicate()
    leaves = Shard(-1) if style == "colwise" else Replicate()
    layouts = {"weight": Shard(0 if is_rowwise else 1), "bias": Replicate() if is_rowwise else Shard(0)}

    def split(name: str, module: nn.Module, mesh: "DeviceMesh") -> None:
        for key, parameter in module.named_parameters():
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [layouts[key]])))

    def enter(module: nn.Module, inputs: tuple[Tensor, ...], mesh: "DeviceMesh") -> Any:
        return DTensor.from_local(inputs[0], mesh, [comes], run_check=False)

    def leave(module: nn.Module, outputs: "DTensor", mesh: "DeviceMesh") -> Any:
        return outputs.redistribute(placements=[leaves]).to_local() if is_reduced else outputs

    distribute_module(module, mesh, split, enter, leave)
