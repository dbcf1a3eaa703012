"""What a plan is predicted to cost on one rank, in closed form: memory at its peak by category, and one update's time by part.

Memory. With Adam in float32, a replicated model takes 16 bytes a parameter, ZeRO-1 8 + 8/d, ZeRO-2 and ZeRO-3 16/d and what is gathered
(Rajbhandari et al., 2020, arXiv 1910.02054). Activations grow linearly with the micro-batch; what checkpoints leave of them is Chen et al.,
2016 (arXiv 1604.06174), what tensor parallelism leaves is Korthikanti et al., 2022 (arXiv 2205.05198). The peak is the largest of three
moments: the end of the forward pass, the start of backward where the loss's gradient appears, and the update. Gradients arrive as
activations leave, so they count at the first two only where they outlive a pass: in DDP's buckets and inside an accumulation window.

Time. A pass takes what its recorded operators take on this machine (`profile/step_time`). For a model whose operators could not be
recorded, matrix products wait for arithmetic and everything between them for memory, one after the other, or for the host; backward counts
twice. Collectives cost (n - 1)(latency + bytes / (n · bandwidth)) for all-gather and reduce-scatter, twice that for all-reduce (Thakur et
al., 2005). What is exposed is what compute cannot hide. A pipeline of p stages and m micro-batches is idle for (p - 1)/(m + p - 1) of the
time.

A user's method changes a cost in `estimate(cost, config)` and returns the new one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from drivetrain.core.display import format_bytes
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.effects import Effects, Kernels, Recompute
from drivetrain.strategy.profile.step_time import How, PassTime, pass_time, step_seconds
from drivetrain.strategy.profile.values import COMPILED, FUSED, Link, MachineProfile, ModelProfile, UnitProfile
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


MEMORY = ("params", "grads", "optimizer", "activations", "gathered", "temporary", "reserve")
TIME = ("compute", "recompute", "communication", "bubble", "transfer", "optimizer")


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds. The memory categories are those at the peak, so they add up to it.

    >>> cost = Cost({"params": 4.0, "activations": 8.0}, {"compute": 2.0})
    >>> cost.scaled(activations=0.5, compute=1.25).peak_bytes
    8.0
    """

    memory: Mapping[str, float] = field(default_factory=dict)
    time: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """The largest number of bytes held at once."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """The time of one update, with all its forward passes."""
        return sum(self.time.values())

    def scaled(self, **factors: float) -> "Cost":
        """Return the cost with categories of memory or parts of time multiplied."""
        unknown = [name for name in factors if name not in (*MEMORY, *TIME)]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a part of a cost. Parts: {', '.join((*MEMORY, *TIME))}.")

        def change(parts: Mapping[str, float]) -> dict[str, float]:
            return {name: value * factors.get(name, 1.0) for name, value in parts.items()}

        return Cost(change(self.memory), change(self.time))  # "optimizer" is both: state and update shrink together


_RECORDED_SHARE = 0.1
"""What recorded kernels keep in addition, as a share of the activations: their pool is not shared."""


def predict_memory(effects: Effects, profile: ModelProfile, machine: MachineProfile) -> dict[str, float]:
    """Return bytes by category at the moment of the peak, on the rank that needs most."""
    peak = _largest_moment(effects, profile)
    peak["activations"] = max(0.0, peak.get("activations", 0.0) + tracked_excess(effects, profile))
    peak["reserve"] = machine.reserve_bytes + machine.reserve_share * sum(peak.values())
    if effects.is_recorded:
        peak["reserve"] += _RECORDED_SHARE * peak["activations"]
    return peak


def tracked_excess(e: Effects, profile: ModelProfile) -> float:
    """Return by how much a tracked run of the plain model exceeds the closed form: memory that is held only briefly.

    With it, the prediction for an eager plan on one rank is the tracked peak itself. A model that is compiled whole has figures of its own;
    under compiled blocks, head and loss still run as they are.
    """
    if not e.is_tracked:
        return 0.0
    micro = e.micro / e.parts
    tracked = profile.peak(e.arithmetic + e.recompute.tracked_part, micro)
    if tracked is None:
        return 0.0
    alone = Effects(
        micro=max(1, int(micro)),
        arithmetic=e.arithmetic,
        cast_width=0.0 if e.arithmetic == "float32" else 2.0,
        recompute=e.recompute.in_every_block(),
        update_temporary=0.0,
    )
    return (tracked - sum(_largest_moment(alone, profile).values())) / (e.work_ranks * e.stages)


def parts_read(e: Effects) -> frozenset[str]:
    """Return the parts of a model's profile that a prediction reads in addition to those that all predictions read."""
    found = {e.arithmetic + COMPILED} if e.is_compiled else set()
    if e.recompute.tracked_part and e.is_tracked:
        found.add(e.arithmetic + e.recompute.tracked_part)
    return frozenset(found)


def _largest_moment(e: Effects, profile: ModelProfile) -> dict[str, float]:
    """Return what is held at the end of forward or during the update, whichever is more."""
    state = _fixed_state(e, profile)
    temporary = e.update_temporary * profile.optimizer_temporary_bytes / e.parameter_ranks / e.optimizer_shards
    outlives = e.holds_gradients or e.accumulation > 1 or (e.data_ranks > 1 and not e.is_sharded)
    held = {"params": state["params"], "optimizer": state["optimizer"]}
    moments = [
        {
            **held,
            "grads": state["grads"] if outlives else 0.0,
            "activations": activation_bytes(e, profile),
            "gathered": gathered_bytes(e, profile),
            "temporary": e.cast_width * profile.parameters / e.parameter_ranks + output_gradient_bytes(e, profile),
        },
        {**held, "grads": state["grads"], "temporary": temporary, "gathered": _unreduced_window(e, profile)},
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def _fixed_state(e: Effects, profile: ModelProfile) -> dict[str, float]:
    """Return parameters, gradients and optimizer state, which do not grow with the batch."""
    whole = profile.parameter_bytes / e.parameter_ranks
    trainable = profile.trainable_share
    held = whole if e.parameter_width is None else e.parameter_width * profile.parameters / e.parameter_ranks
    params, grads = held / e.shards, held * trainable / e.shards
    optimizer = profile.optimizer_bytes / e.parameter_ranks / e.optimizer_shards
    if e.parameter_width is not None:
        optimizer += whole * trainable / e.optimizer_shards  # the float32 copies
    if e.optimizer_on_host:
        optimizer = 0.0
    if e.parameters_on_host:
        params = grads = 0.0
    return {"params": params + profile.buffer_bytes, "grads": grads, "optimizer": optimizer}


def gathered_bytes(e: Effects, profile: ModelProfile) -> float:
    """Return what sharding holds unsharded at once: parameters in use, and one unit's gradient before it is reduced."""
    if not e.is_sharded or e.shards == 1:
        return 0.0
    width = 2.0 if e.arithmetic == "bfloat16" else 4.0
    blocks = profile.blocks
    block = max((unit.parameters for unit in blocks), default=0)
    rest = profile.parameters - sum(unit.parameters * unit.count for unit in blocks)
    if e.gathers_whole or e.stages > 1:  # a stage stays gathered between the micro-batches of a pipeline
        parameters = profile.parameters / e.stages
    else:  # one block in use, the next one on its way; what is outside of blocks stays
        count = sum(unit.count for unit in blocks)
        parameters = rest + min(2, count) * block
    within = e.parameter_ranks // e.stages
    return (width * parameters + 4.0 * max(block, rest)) / within + _unreduced_window(e, profile)


def _unreduced_window(e: Effects, profile: ModelProfile) -> float:
    """Return whole gradients in float32, which sharding holds inside an accumulation window or a pipeline: it reduces only at the end."""
    if not e.is_sharded or e.shards == 1 or e.accumulation * e.stages == 1:
        return 0.0
    return 4.0 * profile.trainable / e.parameter_ranks


def output_gradient_bytes(e: Effects, profile: ModelProfile) -> float:
    """Return the gradient of a compiled model's output, which exists while the loss still holds the output.

    In a loop that calls model and loss one after the other these are two compiled graphs, and the second may not write into what it was
    given; one graph of both does. What 16 bits save of the output is half of it: the loss computes in float32 either way.
    """
    is_one_graph = profile.is_one_graph and e.data_ranks == 1  # not in DDP
    if e.compiled != "model" or e.logits_share < 1 or is_one_graph:
        return 0.0
    half = max(0.0, profile.logits_bytes["float32"] - profile.logits_bytes["bfloat16"])
    return e.micro / e.work_ranks * half * (1.0 if e.arithmetic == "bfloat16" else 2.0)


def activation_bytes(e: Effects, profile: ModelProfile) -> float:
    """Return what is kept between forward and backward, including the batch."""
    kept, blocks = e.arithmetic, profile.blocks
    ratio = compiled_ratio(e, profile)
    of_blocks = sum(_block_bytes(unit, e.recompute, kept, ratio) for unit in blocks)
    largest = max((unit.largest_saved_bytes.get(kept, unit.saved_bytes[kept]) * ratio for unit in blocks), default=0.0)
    if e.recompute.keeps != "all":
        of_blocks += largest  # the one that is being computed again
    of_blocks *= e.block_share
    rest = sum(unit.count * unit.saved_bytes[kept] for unit in profile.units if not unit.path)
    rest *= ratio if e.compiled == "model" else 1.0
    if e.logits_share < 1:
        rest = max(rest - profile.logits_bytes[kept] * (1 - e.logits_share), 0.0)
    fixed = 0.0
    if e.compiled == "model":
        fixed = (profile.compiled_fixed_bytes or {}).get(kept, 0.0) / e.parameter_ranks
    samples = e.micro / e.token_ranks
    # The fullest pipeline stage is the first or the last: 1F1B holds min(p - i, m) micro-batches on stage i.
    fullest = max(of_blocks / e.stages * min(e.stages, e.parts), of_blocks / e.stages + rest)
    return samples / e.parts * fullest + fixed + samples * profile.input_bytes


def _block_bytes(unit: UnitProfile, recompute: Recompute, kept: str, ratio: float) -> float:
    """Return what all members of a unit keep for one sample."""
    saved, inputs = unit.saved_bytes[kept] * ratio, unit.input_bytes[kept]
    if recompute.keeps == "all":
        return unit.count * saved
    if recompute.keeps == "products":
        return unit.count * min(unit.selective_bytes[kept], saved)
    computed_again = -(-unit.count // recompute.every)
    on_device = computed_again if recompute.on_device is None else min(recompute.on_device, computed_again)
    return on_device * inputs + (unit.count - computed_again) * saved


def compiled_ratio(e: Effects, profile: ModelProfile) -> float:
    """Return the activations that compilation keeps, relative to eager mode. Decomposed attention may keep more.

    A graph that was captured at one batch size only counts its fixed part to every sample.
    """
    known = (profile.compiled_bytes or {}).get(e.arithmetic)
    eager = profile.saved_bytes(e.arithmetic)
    return 1.0 if not e.is_compiled or known is None or not eager else known / eager


_BACKWARD = 2.0
"""A backward pass costs twice its forward pass."""
_TIMES = {"forward": 1.0, "backward": _BACKWARD}
_THREAD_GAIN = 0.5
"""Twice the threads take the square root of a half of the time: a prior between large products, which gain all of it, and memory traffic,
which gains little; a trial decides."""


def predict_time(effects: Effects, profile: ModelProfile, machine: MachineProfile) -> dict[str, float]:
    """Return seconds by part for one update."""
    e = effects
    one = pass_of(e, profile, machine)
    correction = correction_of(e, machine)
    passes = e.accumulation * e.parts
    again = one.seconds("forward", True) * e.recompute.share + one.seconds("forward", False) * e.head_again
    # Gradients are added to those of the passes before: two are read, one is written.
    adding = 0.0 if e.accumulation == 1 else 12.0 * profile.trainable / e.parameter_ranks / machine.bandwidth
    time = {
        "compute": passes * (step_seconds(one) * correction + adding),
        "recompute": passes * again * correction,
    }
    busy = time["compute"] + time["recompute"]
    if e.stages > 1:
        time["bubble"] = busy * (e.stages - 1) / e.parts
    time["communication"] = communication_time(e, profile, machine, busy)
    time["transfer"] = _transfer_time(e, profile, machine, busy)
    time["optimizer"] = _update_time(e, profile, machine)
    return time


def pass_of(e: Effects, profile: ModelProfile, machine: MachineProfile) -> PassTime:
    """Return the time of one pass on the slowest pipeline stage, from recorded operators if there are any."""
    found = recorded_pass(e, profile, machine) if e.arithmetic in profile.work else _pass_of_units(e, profile, machine)
    threads = thread_factor(e, machine)
    share = {True: 1 / e.stages, False: 1.0}  # blocks are divided among stages
    return PassTime(
        {place: seconds * share[place[1]] * threads for place, seconds in found.device.items()},
        {place: seconds * share[place[1]] for place, seconds in found.host.items()},
    )


def recorded_pass(e: Effects, profile: ModelProfile, machine: MachineProfile) -> PassTime:
    """Return the time of the operators of one pass. Compiled parts run fused."""
    batch = e.micro / e.parts / e.work_ranks
    key = (e.arithmetic, e.compiled, e.is_recorded, e.rate, e.is_channels_last, e.block_kernels, e.other_kernels, batch)
    place = (id(profile), id(machine), *key)
    if place not in _passes:
        if len(_passes) >= _MOST_PASSES:
            _passes.clear()
        _passes[place] = profile, machine, _recorded_pass(e, profile, machine, batch)
    return _passes[place][2]


_MOST_PASSES = 4096
_passes: dict[tuple[object, ...], tuple[ModelProfile, MachineProfile, PassTime]] = {}
"""What thousands of candidates share. Profile and machine are held, so that their addresses stay theirs."""


def _recorded_pass(e: Effects, profile: ModelProfile, machine: MachineProfile, batch: float) -> PassTime:
    eager, fused = profile.work[e.arithmetic], profile.work.get(e.arithmetic + FUSED, ())
    compiled = {"none": (), "block": (True,), "model": (True, False)}[e.compiled]
    how: How = "graphed" if e.is_recorded else "compiled"
    found = PassTime()
    for in_block, kernels in ((True, e.block_kernels), (False, e.other_kernels)):
        is_fused = in_block in compiled
        part = pass_time(
            (work for work in (fused if is_fused else eager) if work.in_block == in_block),
            batch,
            machine,
            rate=e.rate,
            how=how if is_fused else "eager",
            # The compiler turns images itself.
            is_channels_last=e.is_channels_last or (is_fused and machine.kind == "cuda"),
            traffic=1.0 if is_fused else kernels.traffic / Kernels().traffic,
        )
        for place in part.device.keys() | part.host.keys():
            found.device[place] += part.device[place]
            found.host[place] += part.host[place] * (1.0 if is_fused else kernels.launches)
    return found


def _pass_of_units(e: Effects, profile: ModelProfile, machine: MachineProfile) -> PassTime:
    """Return the same in closed form: arithmetic and traffic one after the other, weights once a pass, backward twice."""
    share = e.micro / e.parts / e.work_ranks
    rate = machine.flops.get(e.rate, machine.flops["float32"])
    found = PassTime()
    for unit in profile.units:
        kernels = e.block_kernels if unit.path else e.other_kernels
        launches = 0.0 if e.is_recorded else unit.operations * kernels.launches
        arithmetic = unit.forward_flops * share / rate
        seconds = arithmetic + unit.traffic_bytes[e.arithmetic] * kernels.traffic * share / machine.bandwidth
        for phase, times in _TIMES.items():
            found.device[phase, bool(unit.path)] += times * unit.count * seconds
            found.host[phase, bool(unit.path)] += times * unit.count * launches * machine.launch
    width = 2.0 if e.arithmetic == "bfloat16" else 4.0
    for phase, times in _TIMES.items():
        found.device[phase, False] += times * width * profile.parameters / e.parameter_ranks / machine.bandwidth
    return found


def thread_factor(e: Effects, machine: MachineProfile) -> float:
    """Return the time of an operation with the plan's threads, relative to the threads of the measurement."""
    return 1.0 if e.threads is None else (max(1, machine.threads) / e.threads) ** _THREAD_GAIN


def correction_of(e: Effects, machine: MachineProfile) -> float:
    """Return measured over predicted time for plans of a kind, or of the nearest kind with the same kernels if none was tried."""
    known = machine.corrections
    if not known or e.kind in known:
        return known.get(e.kind, 1.0)
    others = (*e.similar_kernel_kinds, *(() if e.threads is None else (replace(e, threads=None).kind,)))
    return next((known[kind] for kind in others if kind in known), 1.0)


def collective_time(size: float, ranks: int, link: Link) -> float:
    """Return the time of an all-gather or reduce-scatter of `size` bytes in total.

    >>> round(collective_time(8e9, 8, Link(latency=1e-5, bandwidth=100e9)), 5)
    0.07007
    """
    return 0.0 if ranks <= 1 else (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def link_of(e: Effects, axis: str, machine: MachineProfile) -> Link:
    """Return the link between the ranks along an axis: ranks share a node while the inner axes fit into one."""
    span = 1
    for name in ("tensor", "sequence", "zero", "data", "pipe"):
        span *= e.axes.get(name, 1)
        if name == axis:
            break
    return machine.intra if span <= machine.per_node else machine.inter


def communication_time(e: Effects, profile: ModelProfile, machine: MachineProfile, busy: float) -> float:
    """Return the communication that computation does not hide."""
    params = profile.parameter_bytes / e.parameter_ranks
    grads = params * profile.trainable / max(profile.parameters, 1)
    backward_of_one = busy * _BACKWARD / (1 + _BACKWARD) / e.accumulation
    hidden = exposed = 0.0
    if e.is_sharded and e.shards > 1:
        link = link_of(e, "zero", machine)
        width = 0.5 if e.arithmetic == "bfloat16" else 1.0
        gathers = e.gathers * e.accumulation * (1 if e.gathers_whole else e.parts)
        hidden += gathers * collective_time(params * width, e.shards, link) + collective_time(grads, e.shards, link)
        hidden += 2 * collective_time(grads / e.shards, e.axes.get("data", 1), link_of(e, "data", machine))
        exposed += max(0.0, hidden - busy)
    elif e.data_ranks > 1:
        link = link_of(e, "data", machine)
        reduce = 2 * collective_time(grads, e.data_ranks, link)
        exposed += max(0.0, reduce - backward_of_one)  # only the last pass of a window synchronises
        if e.optimizer_shards > 1:
            exposed += collective_time(params, e.data_ranks, link)  # updated parameters go round, and nothing hides it
    return exposed + _activation_traffic(e, profile, machine)


def _activation_traffic(e: Effects, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return what moves activations between ranks: the next operation waits for it, so nothing hides it."""
    micro = e.micro / e.parts
    seconds = 0.0
    for unit in profile.blocks:
        size = micro * unit.input_bytes[e.arithmetic] / e.token_ranks
        for axis, times in e.block_exchanges:
            one = collective_time(size, e.axes.get(axis, 1), link_of(e, axis, machine))
            seconds += unit.count / e.stages * times * one
    if e.stages > 1:
        unit = max(profile.blocks, key=lambda unit: unit.count)
        link = link_of(e, "pipe", machine)
        seconds += 2 * (link.latency + micro * unit.input_bytes[e.arithmetic] / link.bandwidth)
    return e.accumulation * e.parts * seconds


def _transfer_time(e: Effects, profile: ModelProfile, machine: MachineProfile, busy: float) -> float:
    """Return traffic with host memory that compute does not hide."""
    seconds = 0.0
    if e.recompute.on_device is not None:
        inputs = sum(unit.count * unit.input_bytes[e.arithmetic] for unit in profile.blocks)
        seconds += max(0.0, 2 * e.micro * e.accumulation * inputs / machine.host_bandwidth - busy)
    if e.optimizer_on_host:  # gradients go down, parameters come back
        seconds += 2 * profile.parameter_bytes / (e.parameter_ranks * e.shards) / machine.host_bandwidth
    return seconds


def _update_time(e: Effects, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return the update: everything is read, parameters and state are written."""
    moved = 3 * profile.parameter_bytes * profile.trainable_share + 2 * profile.optimizer_bytes
    bandwidth = machine.bandwidth
    if e.optimizer_on_host:
        bandwidth = min(bandwidth, 2 * machine.host_bandwidth)
    seconds = moved / (e.parameter_ranks * e.optimizer_shards) / bandwidth
    return seconds * e.update_passes * thread_factor(e, machine)


# The same plan on another number of processes, from what it was predicted to hold: only proportions are needed. Sharded state grows as
# shards get fewer, activations follow the micro-batch, what lives for a moment stays. Times depend on links, so none are given.


def rescaled_prediction(plan: "Strategy", axes: Mapping[str, int], batch: BatchSplit | None) -> dict[str, Any] | None:
    """Return a plan's predicted memory for other axes and another batch split; None if the plan has no prediction."""
    if not plan.predicted or plan.mesh is None or plan.batch is None or batch is None:
        return None
    if not (known := plan.predicted.get("memory")):
        return None
    before = dict(plan.mesh)
    methods = [find_method(name) for name in plan.opt_names()]
    is_sharded = any(method.shards_axis is not None for method in methods)
    memory = {name: float(value) for name, value in known.items()}
    params = memory.get("params", 0.0)
    if is_sharded:
        whole = params * _shards(before)
        memory["params"] = whole / _shards(axes)
        memory["optimizer"] = memory.get("optimizer", 0.0) * _shards(before) / _shards(axes)
        memory["grads"] = whole if batch.accumulation > 1 else whole / _shards(axes)  # whole inside an open window
    else:
        if any(method.splits_optimizer for method in methods):
            memory["optimizer"] = memory.get("optimizer", 0.0) * plan.batch.data_ranks / batch.data_ranks
        if batch.accumulation > 1 or batch.data_ranks > 1:
            memory["grads"] = max(memory.get("grads", 0.0), params)
    memory["activations"] = memory.get("activations", 0.0) * batch.micro / plan.batch.micro
    reserve = memory.pop("reserve", 0.0)
    used = sum(value for name, value in known.items() if name != "reserve")
    memory["reserve"] = reserve * max(1.0, sum(memory.values()) / max(used, 1.0))
    memory = {name: value for name, value in memory.items() if value}
    found = {"memory": memory, "peak_bytes": sum(memory.values())}
    if "budget_bytes" in plan.predicted:
        found["budget_bytes"] = plan.predicted["budget_bytes"]
    return {**found, "evidence": {"memory": "modelled"}}


def _shards(axes: Mapping[str, int]) -> int:
    """Return over how many ranks parameters are split: those along `zero`, else along `data`, together with those along `sequence`."""
    return (axes["zero"] if axes.get("zero", 1) > 1 else axes.get("data", 1)) * axes.get("sequence", 1)


def shortfall_of(predicted: Mapping[str, Any] | None) -> str | None:
    """Return by how much a prediction exceeds its budget, or None if it fits."""
    if predicted is None or not predicted["peak_bytes"] > predicted.get("budget_bytes", math.inf):
        return None
    peak, budget = predicted["peak_bytes"], predicted["budget_bytes"]
    return f"it would need {format_bytes(peak)} of {format_bytes(budget)}; short by {format_bytes(peak - budget)}"
