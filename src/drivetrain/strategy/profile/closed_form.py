"""A profile from parameters and layers alone, for models that cannot run on fake tensors.

Each matrix product reads its input once per position, keeps it for backward, and its output is kept by what follows. Positions are the
tokens of a sequence, or the pixels that are left after the strides so far. This is rough (attention scores, norms written by hand and
everything functional are not seen), and the profile says that it is modelled.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.module.blocks import BlockGroup, find_blocks
from drivetrain.strategy.profile.findings import small_step
from drivetrain.strategy.profile.values import ARITHMETICS, ModelProfile, UnitProfile, counts_of
from drivetrain.strategy.task import TrainingTask

_ELEMENT = {"float32": 4.0, "bfloat16": 2.6}
"""Bytes of an activation: under 16-bit autocast norms and residual sums stay in float32."""
_FOLLOWERS = 2  # element-wise operations after a matrix product, each a launch with its own traffic


def closed_form_profile(task: TrainingTask, note: str) -> ModelProfile:
    """Return a modelled profile; `note` says why there is no simulated one."""
    model = task.model if task.model is not None else task.build()
    groups = [group for group in find_blocks(model) if group.members[0] is not model]
    length, pixels, input_bytes = _sample_shape(task)
    layers = _layers(model, length or 1, pixels)
    inside = {module for group in groups for member in group.members for module in member.modules()}
    units = [_unit(group.path, group, layers, length) for group in groups]
    units.append(_unit("", None, {m: cost for m, cost in layers.items() if m not in inside}, length, model, inside))
    parameters = list(model.parameters())
    trainable = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    notes, state, temporary = [note], 2.0, 1.0
    if task.optim_func is not None:
        try:
            state, temporary, _ = small_step(task)
        except Exception as error:  # the user's own optimizer, on parameters it may not expect
            notes.append(f"the optimizer's state is taken as Adam's: a small step failed ({type(error).__name__})")
    else:
        state = temporary = 0.0
    fixed = sum(p.numel() * p.element_size() for p in parameters) + state * trainable
    head = max((cost.outputs for module, cost in layers.items() if module not in inside), default=0.0)
    logits = {name: head * (_ELEMENT[name] + 8) for name in ARITHMETICS}
    slopes = {name: sum(unit.count * unit.saved_bytes[name] for unit in units) + logits[name] for name in ARITHMETICS}
    return ModelProfile(
        units=tuple(units),
        input_bytes=input_bytes,
        logits_bytes=logits,
        sequence_length=length,
        peak_bytes={name: (fixed, slopes[name]) for name in ARITHMETICS},
        peak_lines={name: ((fixed + trainable, 0.0), (fixed, slopes[name])) for name in ARITHMETICS},
        optimizer_bytes=int(state * trainable),
        optimizer_temporary_bytes=int(temporary * trainable),
        has_dropout=any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()
        ),
        evidence="modelled",
        notes=tuple(notes),
        **counts_of(model),
    )


class _LayerWork:
    """What one layer does with one sample: elements in and out, operations."""

    def __init__(self, inputs: float, outputs: float, flops: float):
        self.inputs, self.outputs, self.flops = inputs, outputs, flops


def _sample_shape(task: TrainingTask) -> tuple[int | None, float, float]:
    """Return sequence length, pixels and bytes of one sample."""
    tensors = [leaf for leaf in tree_leaves(task.samples) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    count = max(task.sample_count, 1)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / count
    pictures = [tensor for tensor in tensors if tensor.ndim >= 4]
    if pictures:
        return None, float(pictures[0][0, 0].numel()), size
    lengths = [t.shape[1] for t in tensors if t.ndim == 3 or (t.ndim == 2 and not t.is_floating_point())]
    return (max(lengths) if lengths else None), 1.0, size


def _layers(model: nn.Module, length: int, pixels: float) -> dict[nn.Module, _LayerWork]:
    """Return the cost of every layer that has a weight, in definition order, following the strides of convolutions."""
    costs: dict[nn.Module, _LayerWork] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            stride = 1.0
            for step in module.stride:
                stride *= step
            before, pixels = pixels, max(pixels / stride, 1.0)
            flops = 2.0 * module.weight.numel() * pixels
            costs[module] = _LayerWork(module.in_channels * before, module.out_channels * pixels, flops)
        elif isinstance(module, nn.Linear):
            flops = 2.0 * module.weight.numel() * length
            costs[module] = _LayerWork(module.in_features * length, module.out_features * length, flops)
        elif isinstance(module, nn.Embedding):
            costs[module] = _LayerWork(0.0, module.embedding_dim * length, 0.0)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            elements = float(module.normalized_shape[-1] * length)
            costs[module] = _LayerWork(elements, elements, 0.0)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            costs[module] = _LayerWork(module.num_features * pixels, module.num_features * pixels, 0.0)
    return costs


def _unit(
    path: str,
    group: BlockGroup | None,
    layers: dict[nn.Module, _LayerWork],
    length: int | None,
    root: nn.Module | None = None,
    outside: Iterable[Any] = (),
) -> UnitProfile:
    members = group.members if group is not None else ()
    within = {module for member in members for module in member.modules()}
    costs = [cost for module, cost in layers.items() if group is None or module in within]
    count = len(members) or 1
    if group is not None:
        parameters = round(sum(p.numel() for member in members for p in member.parameters()) / count)
    else:
        assert root is not None
        held = {id(p) for module in outside for p in module.parameters()}
        parameters = sum(p.numel() for p in root.parameters() if id(p) not in held)
    kept = sum(cost.inputs + cost.outputs for cost in costs) / count
    entering = costs[0].inputs if costs else 0.0
    moved = sum((1 + _FOLLOWERS) * (cost.inputs + cost.outputs) for cost in costs) / count

    def elements(number: float) -> dict[str, float]:
        return {name: number * _ELEMENT[name] for name in ARITHMETICS}

    return UnitProfile(
        path=path,
        cls=group.cls.__name__ if group is not None else type(root).__name__,
        count=count,
        parameters=parameters,
        forward_flops=sum(cost.flops for cost in costs) / count,
        saved_bytes=elements(kept),
        input_bytes=elements(entering),
        selective_bytes=elements(entering + sum(cost.outputs for cost in costs if cost.flops) / count),
        traffic_bytes=elements(moved),
        operations=max(1, round((1 + _FOLLOWERS) * len(costs) / count)),
        largest_saved_bytes=elements(kept),
    )
