"""How long the operators of a step take: each by its kind and shape on this machine, and all together on host and device.

A measured machine has a `Timetable`. For a machine that is not available, a roofline model is used: arithmetic at a rate that
small products do not reach, or memory traffic, and never less than the launch time of a kernel. An accelerator works on a queue
that the host fills. In each stretch of a step the slower of the two decides, and the host's lead at the end of a stretch carries
over to the next one. So small batches take the host's time, whatever the arithmetic. On a CPU, host and device are the same, and
times add up.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from drivetrain.strategy.profile.operations import BY_WIDTH, EACH_GROUP, RECURRENCE, SPLIT, VIEW
from drivetrain.strategy.profile.values import Line, MachineProfile, Work

How = Literal["eager", "compiled", "graphed"]
PHASES = ("forward", "backward")

_PRODUCT_LIKE = frozenset({"product", "batched", "attention", "conv", "grouped", "patch"})
_ALIASES = {"other": "elementwise", "fused": "elementwise", "scan": "reduction/inner"}
_CONVOLUTIONS = frozenset({"conv", "depthwise", "grouped", "patch"})
_HOST = {"forward": 1.3, "backward": 2.0, "view": 0.11}
"""What the host pays for an operator, over what one small call of eager mode costs, until it is measured."""
_PYTHON, _COMPILED, _CONVOLUTION = 1.38, 2.2, 2.9
"""What the Python code of real models adds to the host's cost of an operator in a small one, what a compiled kernel costs the host, and
what a convolution costs it in addition: multiples of that cost, which is measured. Fitted on the shortest times of 26 steps of 16 models
that waited for the host, on an H200 with torch 2.11: half of them are within 4 % in eager mode and 9 % compiled."""
_WHOLE = 0.5
"""What a product or attention costs the host in a compiled step, over what a kernel of the compiler costs there."""
_CALL = {"eager": 0.0, "compiled": 60e-6, "graphed": 60e-6}
"""Seconds of the host to enter a compiled graph and leave it, once for forward and once for backward."""
_FLOOR = {"cuda": 2.5e-6}
"""Seconds that the smallest kernel takes on a device."""
_FUSED = 1.25
"""The time of a fused kernel over that of a simple one with the same traffic: 22 compiled steps of eight models on an H200, torch 2.11."""
_EACH_STEP = {"cuda": 11e-6}
"""Seconds of a recurrent layer for each step, in addition to its product: an LSTM of 256 steps on an H200."""
_BATCHED_SHARE = 0.7
"""What batched products in float32 reach of a large product's rate."""
_TILES = 132.0
"""Tiles of a product that fill a device."""


def at(line: Line, batch: float) -> float:
    """Return a line's value at a batch size."""
    return max(0.0, line[0] + batch * line[1])


def operator_seconds(
    work: Work,
    batch: float,
    machine: MachineProfile,
    rate: str | None = None,
    is_channels_last: bool = False,
    how: How = "eager",
) -> float:
    """Return the device time of one operator at a batch size. `rate` replaces the type that products compute in."""
    if work.key == VIEW:
        return 0.0
    kind = work.key.partition("/")[0]
    dtype = _computed_in(work.dtype, rate) if kind in _PRODUCT_LIKE else work.dtype
    dims = [max(1.0, at(line, batch)) for line in work.dims]
    flops, moved = at(work.flops, batch), at(work.moved, batch)
    if kind == "recurrent":
        return _recurrent(work, dims, machine, dtype)
    if work.key == EACH_GROUP:
        sizes, count = work.dims[:3], dims[3]
        one = replace(work, key="product", dims=sizes, flops=(flops / count, 0.0), moved=(moved / count, 0.0))
        return count * operator_seconds(one, batch, machine, rate, how=how)
    if how != "eager" and work.key.startswith("attention/dropout"):
        return _written_out(dims, work.key.endswith("backward"), machine)
    key = _ALIASES.get(kind, work.key)
    padded = 0.0
    if how != "eager" and kind == "product" and key != kind:  # the compiler pads operands whose rows are not aligned
        key, padded = kind, _traffic(moved, machine)
    if is_channels_last:
        key = re.sub("norm/batch/(?=f|b)", "norm/batch/last/", key.replace("/first/", "/last/"))
    ideal = _roofline(kind, dims, flops, moved, dtype, machine)
    grid = None if machine.times is None else machine.times.grid(key, dtype)
    if grid is None:
        return ideal + padded
    if kind == "fused":
        return _FUSED * grid.seconds([max(moved, 1.0)])
    if len(grid.axes) == len(dims):
        if key.startswith(BY_WIDTH):  # what is moved grows with the width already
            dims[0] = min(dims[0], grid.axes[0][-1])
        return grid.seconds(dims) + padded
    return grid.seconds([max(moved, 1.0)]) if len(grid.axes) == 1 else ideal


def _traffic(moved: float, machine: MachineProfile) -> float:
    """Return what moving so many bytes takes in a simple kernel."""
    grid = None if machine.times is None else machine.times.grid("elementwise", "float32")
    return moved / machine.bandwidth if grid is None else grid.seconds([max(moved, 1.0)])


def _written_out(dims: Sequence[float], is_backward: bool, machine: MachineProfile) -> float:
    """Return the time of attention that is written out in float32: two products and the passes over its scores, or four."""
    rows, length, width = dims
    scores, products = 4 * rows * length * length, 4 if is_backward else 2
    flops = products * 2 * rows * length * length * width
    return flops / (_BATCHED_SHARE * machine.flops["float32"]) + _traffic((3 if is_backward else 4) * scores, machine)


def _recurrent(work: Work, dims: Sequence[float], machine: MachineProfile, dtype: str) -> float:
    """Return the time of a recurrent layer: as measured, else one product for all its input, and one after the other for each step."""
    steps, batch, gates, inputs, hidden = dims
    grid = None if machine.times is None else machine.times.grid(work.key, dtype)
    if grid is not None:
        return steps / prod(RECURRENCE) * grid.seconds([batch, hidden]) * gates / (4 * hidden)

    def product(rows: float, depth: float) -> float:
        dims, flops = ((rows, 0.0), (gates, 0.0), (depth, 0.0)), (2 * rows * gates * depth, 0.0)
        one = replace(work, key="product", dims=dims, flops=flops)
        return operator_seconds(one, 0.0, machine, dtype)

    times = 2 if work.key.endswith("backward") else 1
    each_step = product(batch, hidden) + _EACH_STEP.get(machine.kind, 0.0)
    return times * (product(steps * batch, inputs) + steps * each_step)


def _computed_in(dtype: str, rate: str | None) -> str:
    """Return the type of a product: a plan's own, where it is as wide as what was recorded."""
    if rate is None or (dtype == "float32") != (rate in ("float32", "tf32")):
        return dtype
    return rate


def _roofline(
    kind: str, dims: Sequence[float], flops: float, moved: float, dtype: str, machine: MachineProfile
) -> float:
    """Return the time of an operator from rates alone."""
    rate = machine.flops.get(dtype, machine.flops["float32"])
    filled = 1.0
    if kind == "product" and machine.kind != "cpu" and len(dims) == 3:
        rows, columns, depth = dims
        filled = min(1.0, max(rows * columns / 128**2, 1.0) / _TILES) * depth / (depth + 128)
        filled = max(filled, 0.02)
    arithmetic = flops / (rate * filled)
    return max(arithmetic, moved / machine.bandwidth, _FLOOR.get(machine.kind, machine.launch))


@dataclass
class PassTime:
    """The time of one forward and backward pass, by phase and by whether it is inside a block, on device and host."""

    device: dict[tuple[str, bool], float] = field(default_factory=lambda: defaultdict(float))
    host: dict[tuple[str, bool], float] = field(default_factory=lambda: defaultdict(float))

    def seconds(self, phase: str, in_block: bool) -> float:
        """Return the longer of the two."""
        place = phase, in_block
        return max(self.device.get(place, 0.0), self.host.get(place, 0.0))


def pass_time(
    works: Iterable[Work],
    batch: float,
    machine: MachineProfile,
    *,
    rate: str | None = None,
    how: How = "eager",
    is_channels_last: bool = False,
    traffic: float = 1.0,
) -> PassTime:
    """Return the time of a pass part by part. `traffic` multiplies the time of memory-bound operators."""
    found, waiting = PassTime(), set()
    is_cpu = machine.kind == "cpu"
    for work in works:
        place = work.phase, work.in_block
        if work.key == EACH_GROUP:
            waiting.add(place)
        (found.device if is_cpu else found.host)[place] += work.count * host_seconds(work, machine, how)
        factor = 1.0 if work.key.partition("/")[0] in _PRODUCT_LIKE else traffic
        seconds = operator_seconds(work, batch, machine, rate, is_channels_last, how)
        found.device[place] += factor * work.count * seconds
    if not is_cpu:
        for phase in PHASES:
            found.host[phase, False] += _CALL[how]
        for place in waiting:  # the host waits for the device again and again, and then the device for the host
            found.device[place] += found.host[place]
    return found


def host_seconds(work: Work, machine: MachineProfile, how: How) -> float:
    """Return the host time to start an operator. On a CPU it adds to the operator's own time."""
    measured = {} if machine.times is None else machine.times.host
    cost = {name: measured.get(name, share * machine.launch) for name, share in _HOST.items()}
    mean = (cost["forward"] + cost["backward"]) / 2
    if how == "graphed":
        seconds = 0.0
    elif how == "compiled":
        seconds = _COMPILED * mean * (2.0 if work.key == SPLIT else 1.0 if work.key.startswith("fused") else _WHOLE)
    else:
        seconds = _PYTHON * cost["view" if work.key == VIEW else work.phase]
        if work.key == EACH_GROUP:
            seconds *= max(1.0, work.dims[3][0])
    if how != "graphed" and machine.kind != "cpu" and work.key.partition("/")[0] in _CONVOLUTIONS:
        seconds += _CONVOLUTION * mean
    if machine.kind != "cpu" or work.key == VIEW or machine.times is None:
        return seconds
    smallest = machine.times.grid("elementwise", "float32")
    return max(0.0, seconds - (0.0 if smallest is None else smallest.values[0]))


def queued(stretches: Sequence[tuple[float, float]]) -> float:
    """Return the time of a step from the host and device time of each stretch. The next step begins at once.

    >>> queued([(1.0, 2.0), (2.0, 1.0)])  # the host is ahead when the first stretch ends
    3.0
    >>> queued([(2.0, 1.0), (2.0, 1.0)])
    4.0
    """
    host = device = before = 0.0
    for _ in range(3):
        before = device
        for host_part, device_part in stretches:
            start = max(device, host)
            host += host_part
            device = max(start + device_part, host)
    return device - before


def step_seconds(passes: PassTime) -> float:
    """Return the time of one pass forward and backward, without the update."""
    order = [("forward", True), ("forward", False), ("backward", True), ("backward", False)]
    return queued([(passes.host.get(place, 0.0), passes.device.get(place, 0.0)) for place in order])
