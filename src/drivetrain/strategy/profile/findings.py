"""The results of runs on fake tensors, and the profile made from them: straight lines through two batch sizes.

The optimizer's state comes from a fused step on fake tensors, which needs no values. Temporaries of a `foreach` step are scaled
from a small real step: it allocates whole lists of tensors as large as the parameters.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.module.blocks import BlockGroup, find_blocks
from drivetrain.strategy.profile.few_blocks import DeeperTimeline
from drivetrain.strategy.profile.operations import tensors_of
from drivetrain.strategy.profile.step_memory import StepMemory
from drivetrain.strategy.profile.torch_private import ROUNDING
from drivetrain.strategy.profile.unit_recorder import UnitRecorder, UnitTotals
from drivetrain.strategy.profile.values import (
    ARITHMETICS,
    Line,
    ModelProfile,
    UnitProfile,
    Work,
    counts_of,
    line_through,
)
from drivetrain.strategy.task import TrainingTask, joined

SIZES = (2, 4)
"""Samples in the two runs; never 1, which disappears in a squeeze and has no variance to normalise by."""
_FIRST = ARITHMETICS[0], SIZES[0]


@dataclass
class Findings:
    """Results of the runs, by arithmetic and batch size."""

    recorders: dict[tuple[str, int], UnitRecorder] = field(default_factory=dict)
    lines: dict[str, tuple[Line, ...]] = field(default_factory=dict)
    compiled: dict[str, Line] = field(default_factory=dict)
    work: dict[str, tuple[Work, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def profile(
        self,
        task: TrainingTask,
        model: nn.Module,
        groups: Sequence[BlockGroup],
        inputs: Mapping[int, object],
        optimizer_bytes: int,
        optimizer_temporaries: int,
    ) -> ModelProfile:
        """Return the profile of a model with these blocks from what is known."""
        compiled, recorder = self.compiled, self.recorders[_FIRST]
        inside = {id(parameter) for group in groups for member in group.members for parameter in member.parameters()}
        rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
        units = [self._unit(index, group) for index, group in enumerate(groups)]
        return ModelProfile(
            units=(*units, self._unit(len(groups), None, rest)),
            input_bytes=line_through(SIZES, [float(storage_bytes(tensors_of(inputs[size]))) for size in SIZES])[1],
            # Output, what the loss keeps of it, and the gradient that the loss sends back, which is as large as what it keeps.
            logits_bytes=self._by_arithmetic(lambda recorder: recorder.output_bytes + 2 * recorder.loss.saved),
            sequence_length=recorder.sequence_length,
            compiled_bytes={name: each for name, (_, each) in compiled.items()} or None,
            compiled_fixed_bytes={name: fixed for name, (fixed, _) in compiled.items()} or None,
            peak_lines=self.lines,
            optimizer_bytes=optimizer_bytes,
            optimizer_temporary_bytes=optimizer_temporaries,
            cross_entropy_head=recorder.cross_entropy_head,
            is_one_graph=task.loss_graph == "loss",
            work=self.work,
            notes=tuple(self.notes),
            **counts_of(model),
        )

    def _by_arithmetic(self, read: Callable[[UnitRecorder], float], count: int = 1) -> dict[str, float]:
        """Return by arithmetic what grows with each sample, for one of `count` members."""
        found = {name: [read(self.recorders[name, size]) for size in SIZES] for name in ARITHMETICS}
        return {name: line_through(SIZES, values)[1] / count for name, values in found.items()}

    def _unit(self, index: int, group: BlockGroup | None, parameters: int = 0) -> UnitProfile:
        count = len(group.members) if group is not None else 1
        if group is not None:
            held = {id(p): p.numel() for member in group.members for p in member.parameters()}
            parameters = round(sum(held.values()) / count)

        def each(read: Callable[[UnitTotals], float]) -> dict[str, float]:
            return self._by_arithmetic(lambda recorder: read(recorder.totals[index]), count)

        totals = {place: recorder.totals[index] for place, recorder in self.recorders.items()}
        saved = each(lambda unit: unit.saved)
        return UnitProfile(
            path="" if group is None else group.path,
            count=count,
            parameters=parameters,
            forward_flops=each(lambda unit: unit.flops)[ARITHMETICS[0]],
            saved_bytes=saved,
            input_bytes=each(lambda unit: unit.inputs),
            selective_bytes=each(lambda unit: unit.inputs + unit.expensive) if group is not None else saved,
            traffic_bytes=each(lambda unit: unit.traffic),
            operations=round(totals[_FIRST].operations / count),
            largest_saved_bytes={
                name: _largest(*(totals[name, size].saved_by_member for size in SIZES)) for name in ARITHMETICS
            },
            # Attention that no fused kernel takes does not show its heads in each arithmetic.
            heads=next((heads for name in ARITHMETICS if (heads := totals[name, SIZES[0]].heads) is not None), None),
        )


def _largest(small: Mapping[int, float], large: Mapping[int, float]) -> float:
    return max(((large[key] - small[key]) / (SIZES[1] - SIZES[0]) for key in large), default=0.0)


def storage_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of all storages, counting each once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def upper_edge(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that are highest somewhere from one sample upwards, flattest first.

    >>> upper_edge([(10.0, 1.0), (0.0, 2.0), (5.0, 1.0), (4.0, 1.4)])
    [(10.0, 1.0), (0.0, 2.0)]
    """
    edge: list[Line] = []
    for line in sorted(set(lines), key=lambda line: (line[1], line[0])):
        if edge and edge[-1][1] == line[1]:
            edge.pop()
        while edge and edge[-1][0] + edge[-1][1] <= line[0] + line[1]:
            edge.pop()  # lower at one sample already, and flatter
        while len(edge) > 1 and _crossing(edge[-2], line) <= _crossing(edge[-2], edge[-1]):
            edge.pop()
        edge.append(line)
    return edge


def _crossing(flat: Line, steep: Line) -> float:
    return (flat[0] - steep[0]) / (steep[1] - flat[1])


def upper_lines(sizes: Sequence[int], timelines: Sequence[StepMemory | DeeperTimeline]) -> tuple[list[Line], bool]:
    """Return the moments of a step that can be its peak, as lines in the batch size, and whether both runs had the same ones.

    Runs that did not allocate in the same order give one line through their peaks.
    """
    small, large = ([total for event, total in zip(one.events, one.totals()) if event.size > 0] for one in timelines)
    if len(small) != len(large):
        return [line_through(sizes, [max(small), max(large)])], False
    return upper_edge([line_through(sizes, moment) for moment in zip(small, large)]), True


_SIDE = 128  # of the square parameters of the small step


def optimizer_with_state(task: TrainingTask, model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the task's optimizer of a fake model after one step, gradients cleared; call it inside the fake mode."""
    recipe = task.recipe()
    if recipe is None:
        return None
    if "fused" in optimizer_settings(task) and not recipe.settings.get("foreach"):
        recipe.settings["fused"] = True
    optimizer = recipe.make(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of an optimizer's state."""
    return tensors_of(list(optimizer.state.values()))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(optimizer))


def optimizer_bytes(task: TrainingTask, model: nn.Module, note: Callable[[str], None]) -> tuple[float, float]:
    """Return what the optimizer of a model keeps and what its step allocates, in proportion to a small real step."""
    if task.optim_func is None:
        return 0.0, 0.0
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    try:
        state, temporary, is_foreach = small_step(task)
    except Exception as error:  # the user's own optimizer, on parameters it may not expect
        note(f"the optimizer's state is taken as Adam's: a small step failed ({type(error).__name__}: {error})")
        state, temporary, is_foreach = 2.0, 1.0, True
    return state * sum(sizes), temporary * (sum(sizes) if is_foreach else max(sizes, default=0))


def small_step(task: TrainingTask) -> tuple[float, float, bool]:
    """Return state and temporaries of a small real step per byte of parameters, and whether it was a `foreach` step."""
    has_foreach = "foreach" in optimizer_settings(task) and not task.optim_args.get("fused")
    count = 4 if has_foreach else 1
    model = nn.ParameterList([nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)])
    settings: dict[str, Any] = dict(task.optim_args)
    if has_foreach:
        settings.setdefault("foreach", True)
    assert task.optim_func is not None
    optimizer = task.optim_func(list(model), **settings)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model)

    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    timeline = StepMemory(ROUNDING)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    with timeline:
        timeline.register([*model, *state_tensors(optimizer), *(p.grad for p in model)], "known")
        before = timeline.totals()[-1]
        optimizer.step()
    temporary = max(timeline.totals()) - before
    timeline.freeze()
    return state_bytes(optimizer) / size, temporary / size, has_foreach


def optimizer_settings(task: TrainingTask) -> frozenset[str]:
    """Return the names of the optimizer's settings."""
    try:
        return frozenset(inspect.signature(task.optim_func).parameters) if task.optim_func is not None else frozenset()
    except (TypeError, ValueError):  # a callable without a signature
        return frozenset()


# A profile from parameters and layers alone, for models that cannot run on fake tensors. Each matrix product reads its input once per
# position, keeps it for backward, and its output is kept by what follows. Positions are the tokens of a sequence, or the pixels that are
# left after the strides so far. This is rough (attention scores, norms written by hand and everything functional are not seen).

_ELEMENT = {"float32": 4.0, "bfloat16": 2.6}
"""Bytes of an activation: under 16-bit autocast norms and residual sums stay in float32."""
_FOLLOWERS = 2  # element-wise operations after a matrix product, each a launch with its own traffic


def closed_form_profile(task: TrainingTask, note: str) -> ModelProfile:
    """Return a modelled profile. `note` gives the reason why there is no simulated one."""
    model = task.model if task.model is not None else task.build()
    groups = [group for group in find_blocks(model) if group.members[0] is not model]
    length, pixels, input_bytes = _sample_shape(task)
    layers = _layers(model, length or 1, pixels)
    blocks = [{module for member in group.members for module in member.modules()} for group in groups]
    inside = set[nn.Module]().union(*blocks)
    parts = zip(groups, blocks)
    units = [_unit(group.path, len(group.members), modules, layers) for group, modules in parts]
    units.append(_unit("", 1, {*model.modules()} - inside, layers, _parameters(inside)))
    notes = [note]
    state, temporary = optimizer_bytes(task, model, notes.append)
    counts = counts_of(model)
    trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    fixed = counts["parameter_bytes"] + state
    head = max((cost.outputs for module, cost in layers.items() if module not in inside), default=0.0)
    logits = {name: head * (_ELEMENT[name] + 8) for name in ARITHMETICS}
    slopes = {name: sum(unit.count * unit.saved_bytes[name] for unit in units) + logits[name] for name in ARITHMETICS}
    return ModelProfile(
        units=tuple(units),
        input_bytes=input_bytes,
        logits_bytes=logits,
        sequence_length=length,
        peak_lines={name: ((fixed + trainable, 0.0), (fixed, slopes[name])) for name in ARITHMETICS},
        optimizer_bytes=int(state),
        optimizer_temporary_bytes=int(temporary),
        evidence="modelled",
        notes=tuple(notes),
        **counts,
    )


class _LayerWork(NamedTuple):
    """What one layer does with one sample: elements in and out, operations."""

    inputs: float
    outputs: float
    flops: float = 0.0


def _sample_shape(task: TrainingTask) -> tuple[int | None, float, float]:
    """Return sequence length, pixels and bytes of one sample."""
    count = max(task.sample_count, 1)
    tensors = [tensor for tensor in tensors_of(joined(task.samples)) if tensor.ndim > 0]
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
            before, pixels = pixels, max(pixels / prod(module.stride), 1.0)
            flops = 2.0 * module.weight.numel() * pixels
            costs[module] = _LayerWork(module.in_channels * before, module.out_channels * pixels, flops)
        elif isinstance(module, nn.Linear):
            flops = 2.0 * module.weight.numel() * length
            costs[module] = _LayerWork(module.in_features * length, module.out_features * length, flops)
        elif isinstance(module, nn.Embedding):
            costs[module] = _LayerWork(0.0, module.embedding_dim * length)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            elements = float(module.normalized_shape[-1] * length)
            costs[module] = _LayerWork(elements, elements)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            costs[module] = _LayerWork(module.num_features * pixels, module.num_features * pixels)
    return costs


def _parameters(modules: set[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _unit(
    path: str,
    count: int,
    modules: set[nn.Module],
    layers: dict[nn.Module, _LayerWork],
    elsewhere: Set[nn.Parameter] = frozenset(),
) -> UnitProfile:
    parameters = round(sum(parameter.numel() for parameter in _parameters(modules) - elsewhere) / count)
    costs = [cost for module, cost in layers.items() if module in modules]
    kept = sum(cost.inputs + cost.outputs for cost in costs) / count
    entering = costs[0].inputs if costs else 0.0
    moved = sum((1 + _FOLLOWERS) * (cost.inputs + cost.outputs) for cost in costs) / count

    def elements(number: float) -> dict[str, float]:
        return {name: number * _ELEMENT[name] for name in ARITHMETICS}

    return UnitProfile(
        path=path,
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
