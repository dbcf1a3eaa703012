"""Predicted time of one update, by part, in closed form.

Matrix products wait for arithmetic and everything between them for memory, one after the other, so a unit takes the sum of both, or what
dispatching its operations takes, if that is longer; backward counts twice. Collectives cost
(n - 1)(latency + bytes / (n · bandwidth)) for all-gather and reduce-scatter, twice that for all-reduce (Thakur et al., 2005). What is
exposed is what compute cannot hide. A pipeline of p stages and m micro-batches stands still for (p - 1)/(m + p - 1) of the time.
"""

from dataclasses import replace

from drivetrain.strategy.profile.values import Link, MachineProfile, ModelProfile, UnitProfile
from drivetrain.strategy.search.candidates import Candidate

_BACKWARD = 2.0
"""A backward pass costs twice its forward pass."""
_TRAFFIC = 0.8
"""The part of a forward pass's traffic that is not the operands of matrix products, whose time is in their arithmetic: a GPT block has 0.7,
its head with the loss 0.9."""
_COMPILED_TRAFFIC, _COMPILED_LAUNCHES = 0.3, 0.25
"""What fusion leaves of eager traffic and launches; priors until a trial has corrected them. With the rates measured there (644 TFLOP/s in
bfloat16, 3.8 TB/s) they give 119 and 170 ms for a step of GPT-2 124M, 64 x 1,024 tokens, on an H200; measured were 121 compiled and 172
in eager mode (torch 2.11, three steps each)."""
_SELECTIVE_SHARE = 0.3
"""What is computed again when products and attention are kept, as a share of a block's forward pass."""
_CHANNELS_LAST = {"cuda": 0.75, "cpu": 0.95}
"""What convolutions in 16 bits take with channels last, as a share of before; in float32 nothing is won."""
_THREAD_GAIN = 0.5
"""Twice the threads take the square root of a half of the time: a prior between large products, which gain all of it, and memory traffic,
which gains little; a trial decides."""
_UNFUSED_UPDATE = 2.5
"""Passes over memory of an update that is not fused, over those of a fused one."""
_EXTRA_CHUNKED = 1.0
"""Further forward passes of the output layer in a chunked cross-entropy: its logits are computed again."""


def predict_time(candidate: Candidate, profile: ModelProfile, machine: MachineProfile) -> dict[str, float]:
    """Return seconds by part for one update."""
    c = candidate
    micro = c.micro / c.microbatches if c.pipe > 1 else float(c.micro)
    blocks = [(unit, _forward_time(unit, c, machine, micro)) for unit in profile.units]
    of_blocks = sum(seconds for unit, seconds in blocks if unit.path) / c.pipe
    rest = sum(seconds for unit, seconds in blocks if not unit.path)
    share = {"none": 0.0, "selective": _SELECTIVE_SHARE, "second": 0.5, "full": 1.0, "offload": 1.0}[c.checkpoint]
    correction = correction_of(c, machine)
    one_pass = (of_blocks + rest) * (1 + _BACKWARD) * correction + weight_time(c, profile, machine)
    again = (of_blocks * share + rest * (_EXTRA_CHUNKED if c.chunked_loss else 0.0)) * correction
    passes = c.accumulation * (c.microbatches if c.pipe > 1 else 1)
    time = {"compute": passes * one_pass, "recompute": passes * again}
    busy = time["compute"] + time["recompute"]
    if c.pipe > 1:
        time["bubble"] = busy * (c.pipe - 1) / c.microbatches
    time["communication"] = communication_time(c, profile, machine, busy)
    time["transfer"] = _transfer_time(c, profile, machine, busy)
    time["optimizer"] = _update_time(c, profile, machine)
    return time


def _forward_time(unit: UnitProfile, c: Candidate, machine: MachineProfile, micro: float) -> float:
    """Return the forward pass of all members of a unit for one micro-batch."""
    share = micro / (c.tensor * c.sequence)
    rate = machine.flops.get(_rate_name(c.precision), machine.flops["float32"])
    is_compiled = c.compile == "model" or (c.compile == "block" and unit.path)
    traffic = unit.traffic_bytes[c.arithmetic] * (_COMPILED_TRAFFIC if is_compiled else _TRAFFIC)
    launches = unit.operations * (_COMPILED_LAUNCHES if is_compiled else 1.0)
    if c.graphs:
        launches = 0.0
    arithmetic = unit.forward_flops * share / rate
    if c.channels_last and c.arithmetic == "bfloat16":
        arithmetic *= _CHANNELS_LAST.get(machine.kind, 1.0)
    work = (arithmetic + traffic * share / machine.bandwidth) * thread_factor(c, machine)
    return unit.count * max(work, launches * machine.launch)


def thread_factor(c: Candidate, machine: MachineProfile) -> float:
    """Return the time of an operation with a plan's threads, over that with those the machine was measured with."""
    return 1.0 if c.threads is None else (max(1, machine.threads) / c.threads) ** _THREAD_GAIN


def correction_of(c: Candidate, machine: MachineProfile) -> float:
    """Return measured over predicted time of plans of a kind; where none was tried, of the nearest kind with the same kernels."""
    known = machine.corrections
    if not known or c.kind in known:
        return known.get(c.kind, 1.0)
    others = (*c.near_kinds, *(() if c.threads is None else (replace(c, threads=None).kind,)))
    return next((known[kind] for kind in others if kind in known), 1.0)


def weight_time(c: Candidate, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return what a pass costs whatever its size: weights are read by forward and twice by backward, and gradients are added up.

    It is why few large micro-batches beat many small ones.
    """
    width = 2.0 if c.arithmetic == "bfloat16" else 4.0
    moved = 3 * width * profile.parameters + (8.0 * profile.trainable if c.accumulation > 1 else 0.0)
    return moved / (c.tensor * c.pipe) / machine.bandwidth


def _rate_name(precision: str) -> str:
    return {"half": "bfloat16", "float8": "float8"}.get(precision, precision)


def collective_time(size: float, ranks: int, link: Link) -> float:
    """Return the time of an all-gather or reduce-scatter of `size` bytes in all.

    >>> round(collective_time(8e9, 8, Link(latency=1e-5, bandwidth=100e9)), 5)
    0.07007
    """
    return 0.0 if ranks <= 1 else (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def link_of(c: Candidate, axis: str, machine: MachineProfile) -> Link:
    """Return what connects the ranks along an axis: neighbours share a node while the axes inside fit into one."""
    span = 1
    for name in ("tensor", "sequence", "zero", "data", "pipe"):
        span *= getattr(c, name)
        if name == axis:
            break
    return machine.intra if span <= machine.per_node else machine.inter


def communication_time(c: Candidate, profile: ModelProfile, machine: MachineProfile, busy: float) -> float:
    """Return the communication that compute does not hide."""
    split = c.tensor * c.pipe
    params = profile.parameter_bytes / split
    grads = params * profile.trainable / max(profile.parameters, 1)
    backward_of_one = busy * _BACKWARD / (1 + _BACKWARD) / c.accumulation
    hidden = exposed = 0.0
    if c.is_sharded and c.zero > 1:
        link = link_of(c, "zero", machine)
        width = 0.5 if c.arithmetic == "bfloat16" else 1.0
        gathers = (2 if c.sharding == "fsdp" else 1) * c.accumulation
        hidden += gathers * collective_time(params * width, c.zero, link) + collective_time(grads, c.zero, link)
        hidden += 2 * collective_time(grads / c.zero, c.data, link_of(c, "data", machine))
        exposed += max(0.0, hidden - busy)
    elif c.data_ranks > 1:
        link = link_of(c, "data", machine)
        reduce = 2 * collective_time(grads, c.data_ranks, link)
        exposed += max(0.0, reduce - backward_of_one)  # only the last pass of a window synchronises
        if c.sharding == "zero1":
            exposed += collective_time(params, c.data_ranks, link)  # updated parameters go round, and nothing hides it
    return exposed + _activation_traffic(c, profile, machine)


def _activation_traffic(c: Candidate, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return what moves activations between ranks: it stands in the way of the next operation, so nothing hides it."""
    passes = c.accumulation * (c.microbatches if c.pipe > 1 else 1)
    micro = c.micro / c.microbatches if c.pipe > 1 else float(c.micro)
    seconds = 0.0
    for unit in (unit for unit in profile.units if unit.path):
        size = micro * unit.input_bytes[c.arithmetic] / c.sequence
        count = unit.count / c.pipe
        if c.tensor > 1:  # attention and MLP, forward and backward
            seconds += count * 4 * 2 * collective_time(size, c.tensor, link_of(c, "tensor", machine))
        if c.sequence > 1:  # queries, keys, values there, the result back; and the same in backward
            seconds += count * 8 * collective_time(size, c.sequence, link_of(c, "sequence", machine))
    if c.pipe > 1:
        unit = max((unit for unit in profile.units if unit.path), key=lambda unit: unit.count)
        link = link_of(c, "pipe", machine)
        seconds += 2 * (link.latency + micro * unit.input_bytes[c.arithmetic] / link.bandwidth)
    return passes * seconds


def _transfer_time(c: Candidate, profile: ModelProfile, machine: MachineProfile, busy: float) -> float:
    """Return traffic with host memory that compute does not hide."""
    seconds = 0.0
    if c.checkpoint == "offload":
        inputs = sum(unit.count * unit.input_bytes[c.arithmetic] for unit in profile.units if unit.path)
        seconds += max(0.0, 2 * c.micro * c.accumulation * inputs / machine.host_bandwidth - busy)
    if c.cpu_offload:  # gradients go down, parameters come back
        shards = c.zero if c.is_sharded else 1
        seconds += 2 * profile.parameter_bytes / (c.tensor * c.pipe * shards) / machine.host_bandwidth
    return seconds


def _update_time(c: Candidate, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return the update: everything is read, parameters and state are written."""
    shards = c.zero if c.is_sharded else c.data_ranks if c.sharding == "zero1" else 1
    trainable = profile.trainable / max(profile.parameters, 1)
    moved = (3 * profile.parameter_bytes * trainable + 2 * profile.optimizer_bytes) / (c.tensor * c.pipe * shards)
    bandwidth = machine.bandwidth
    if c.cpu_offload:
        bandwidth = min(bandwidth, 2 * machine.host_bandwidth)
    return moved / bandwidth * (1.0 if c.fused else _UNFUSED_UPDATE) * thread_factor(c, machine)
