"""Predicted time of one update, by part, in closed form.

Matrix products wait for arithmetic and everything between them for memory, one after the other, so a unit takes the sum of both, or what
dispatching its operations takes, if that is longer; backward counts twice. Collectives cost
(n - 1)(latency + bytes / (n · bandwidth)) for all-gather and reduce-scatter, twice that for all-reduce (Thakur et al., 2005). What is
exposed is what compute cannot hide. A pipeline of p stages and m micro-batches stands still for (p - 1)/(m + p - 1) of the time.
"""

from dataclasses import replace

from drivetrain.strategy.effects import Effects
from drivetrain.strategy.profile.values import Link, MachineProfile, ModelProfile, UnitProfile

_BACKWARD = 2.0
"""A backward pass costs twice its forward pass."""
_THREAD_GAIN = 0.5
"""Twice the threads take the square root of a half of the time: a prior between large products, which gain all of it, and memory traffic,
which gains little; a trial decides."""


def predict_time(effects: Effects, profile: ModelProfile, machine: MachineProfile) -> dict[str, float]:
    """Return seconds by part for one update."""
    e = effects
    micro = e.micro / e.parts
    blocks = [(unit, _forward_time(unit, e, machine, micro)) for unit in profile.units]
    of_blocks = sum(seconds for unit, seconds in blocks if unit.path) / e.stages
    rest = sum(seconds for unit, seconds in blocks if not unit.path)
    correction = correction_of(e, machine)
    one_pass = (of_blocks + rest) * (1 + _BACKWARD) * correction + weight_time(e, profile, machine)
    again = (of_blocks * e.recompute.share + rest * e.head_again) * correction
    passes = e.accumulation * e.parts
    time = {"compute": passes * one_pass, "recompute": passes * again}
    busy = time["compute"] + time["recompute"]
    if e.stages > 1:
        time["bubble"] = busy * (e.stages - 1) / e.parts
    time["communication"] = communication_time(e, profile, machine, busy)
    time["transfer"] = _transfer_time(e, profile, machine, busy)
    time["optimizer"] = _update_time(e, profile, machine)
    return time


def _forward_time(unit: UnitProfile, e: Effects, machine: MachineProfile, micro: float) -> float:
    """Return the forward pass of all members of a unit for one micro-batch."""
    share = micro / e.work_ranks
    rate = machine.flops.get(e.rate, machine.flops["float32"])
    kernels = e.block_kernels if unit.path else e.other_kernels
    traffic = unit.traffic_bytes[e.arithmetic] * kernels.traffic
    launches = 0.0 if e.is_recorded else unit.operations * kernels.launches
    arithmetic = unit.forward_flops * share / rate
    if e.arithmetic == "bfloat16":
        arithmetic *= e.products_16_bit.get(machine.kind, 1.0)
    work = (arithmetic + traffic * share / machine.bandwidth) * thread_factor(e, machine)
    return unit.count * max(work, launches * machine.launch)


def thread_factor(e: Effects, machine: MachineProfile) -> float:
    """Return the time of an operation with a plan's threads, over that with those the machine was measured with."""
    return 1.0 if e.threads is None else (max(1, machine.threads) / e.threads) ** _THREAD_GAIN


def correction_of(e: Effects, machine: MachineProfile) -> float:
    """Return measured over predicted time of plans of a kind; where none was tried, of the nearest kind with the same kernels."""
    known = machine.corrections
    if not known or e.kind in known:
        return known.get(e.kind, 1.0)
    others = (*e.near_kinds, *(() if e.threads is None else (replace(e, threads=None).kind,)))
    return next((known[kind] for kind in others if kind in known), 1.0)


def weight_time(e: Effects, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return what a pass costs whatever its size: weights are read by forward and twice by backward, and gradients are added up.

    It is why few large micro-batches beat many small ones.
    """
    width = 2.0 if e.arithmetic == "bfloat16" else 4.0
    moved = 3 * width * profile.parameters + (8.0 * profile.trainable if e.accumulation > 1 else 0.0)
    return moved / e.parameter_ranks / machine.bandwidth


def collective_time(size: float, ranks: int, link: Link) -> float:
    """Return the time of an all-gather or reduce-scatter of `size` bytes in all.

    >>> round(collective_time(8e9, 8, Link(latency=1e-5, bandwidth=100e9)), 5)
    0.07007
    """
    return 0.0 if ranks <= 1 else (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def link_of(e: Effects, axis: str, machine: MachineProfile) -> Link:
    """Return what connects the ranks along an axis: neighbours share a node while the axes inside fit into one."""
    span = 1
    for name in ("tensor", "sequence", "zero", "data", "pipe"):
        span *= e.axes.get(name, 1)
        if name == axis:
            break
    return machine.intra if span <= machine.per_node else machine.inter


def communication_time(e: Effects, profile: ModelProfile, machine: MachineProfile, busy: float) -> float:
    """Return the communication that compute does not hide."""
    params = profile.parameter_bytes / e.parameter_ranks
    grads = params * profile.trainable / max(profile.parameters, 1)
    backward_of_one = busy * _BACKWARD / (1 + _BACKWARD) / e.accumulation
    hidden = exposed = 0.0
    if e.is_sharded and e.shards > 1:
        link = link_of(e, "zero", machine)
        width = 0.5 if e.arithmetic == "bfloat16" else 1.0
        gathers = e.gathers * e.accumulation
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
    for unit in (unit for unit in profile.units if unit.path):
        size = micro * unit.input_bytes[e.arithmetic] / e.token_ranks
        for axis, times in e.block_exchanges:
            one = collective_time(size, e.axes.get(axis, 1), link_of(e, axis, machine))
            seconds += unit.count / e.stages * times * one
    if e.stages > 1:
        unit = max((unit for unit in profile.units if unit.path), key=lambda unit: unit.count)
        link = link_of(e, "pipe", machine)
        seconds += 2 * (link.latency + micro * unit.input_bytes[e.arithmetic] / link.bandwidth)
    return e.accumulation * e.parts * seconds


def _transfer_time(e: Effects, profile: ModelProfile, machine: MachineProfile, busy: float) -> float:
    """Return traffic with host memory that compute does not hide."""
    seconds = 0.0
    if e.recompute.on_device is not None:
        inputs = sum(unit.count * unit.input_bytes[e.arithmetic] for unit in profile.units if unit.path)
        seconds += max(0.0, 2 * e.micro * e.accumulation * inputs / machine.host_bandwidth - busy)
    if e.optimizer_on_host:  # gradients go down, parameters come back
        seconds += 2 * profile.parameter_bytes / (e.parameter_ranks * e.shards) / machine.host_bandwidth
    return seconds


def _update_time(e: Effects, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return the update: everything is read, parameters and state are written."""
    trainable = profile.trainable / max(profile.parameters, 1)
    moved = 3 * profile.parameter_bytes * trainable + 2 * profile.optimizer_bytes
    bandwidth = machine.bandwidth
    if e.optimizer_on_host:
        bandwidth = min(bandwidth, 2 * machine.host_bandwidth)
    seconds = moved / (e.parameter_ranks * e.optimizer_shards) / bandwidth
    return seconds * e.update_passes * thread_factor(e, machine)
