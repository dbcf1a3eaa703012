"""What is known about a model and a machine before a plan is tried: plain values for predictions, which JSON can store.

All sizes are bytes, all times seconds. What grows with the batch is given per sample: activations are linear in the batch.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

ARITHMETICS = ("float32", "bfloat16")
"""In what a forward pass computes: as the parameters are, or under 16-bit autocast."""

COMPILED, FUSED = "/compiled", "/fused"
PARTS = (
    "bfloat16/compiled", "float32/full", "bfloat16/full", "float32/selective", "bfloat16/selective", "float32/compiled",
)  # fmt: skip
"""Parts of a profile that only some plans ask for, the most useful first: what a compiled forward pass keeps, and the peak with all blocks
checkpointed; each in one arithmetic."""

Line = tuple[float, float]
"""Fixed part and part per sample."""


def line_through(sizes: Sequence[int], values: Sequence[float]) -> Line:
    """Return the line through two points.

    >>> line_through((2, 4), (10.0, 16.0))
    (4.0, 3.0)
    """
    each = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[0] - sizes[0] * each, each


@dataclass(frozen=True, kw_only=True)
class Work:
    """Equal operators of a step, or one kernel that a compiler makes from several. Sizes are lines in the batch size."""

    key: str
    """The kind, and what else decides which kernel runs: "product", "norm/layer/backward"."""
    dtype: str
    phase: str
    """"forward" (with the loss) or "backward"."""
    in_block: bool
    """Whether it is a part of a repeated block."""
    flops: Line
    moved: Line
    """Bytes that are read and written."""
    dims: tuple[Line, ...] = ()
    """The sizes that decide the time of a product, a convolution or attention."""
    count: float = 1.0


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """One kind of repeated block or, with an empty path, everything outside of blocks."""

    path: str
    """Where the blocks are; empty for the rest of the model."""
    count: int
    """How many members of this kind run one after another; 1 for the rest."""
    parameters: int
    """Elements in one member."""
    forward_flops: float
    """Operations of one member's forward pass for one sample."""
    saved_bytes: Mapping[str, float]
    """By arithmetic: what one member keeps for backward, for one sample, without parameters."""
    input_bytes: Mapping[str, float]
    """By arithmetic: the input of one member, for one sample; what full checkpointing keeps instead."""
    selective_bytes: Mapping[str, float]
    """By arithmetic: what remains when only the outputs of matrix products and attention are kept."""
    traffic_bytes: Mapping[str, float]
    """By arithmetic: memory read and written by one member's forward pass in eager mode, for one sample."""
    operations: int
    """Operations dispatched by one member's forward pass; each costs a launch in eager mode."""
    largest_saved_bytes: Mapping[str, float] = field(default_factory=dict)
    """By arithmetic: `saved_bytes` of the member that keeps most; members may differ in shape."""
    heads: int | None = None
    """Attention heads, where they could be found; they bound tensor and sequence parallelism."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model and its loss on one batch shape."""

    units: tuple[UnitProfile, ...]
    parameters: int
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: float
    """The batch itself on the device, for one sample."""
    logits_bytes: Mapping[str, float]
    """By arithmetic: model output and what the loss keeps of it, for one sample; what a chunked cross-entropy saves."""
    sequence_length: int | None = None
    compiled_bytes: Mapping[str, float] | None = None
    """By arithmetic: what the compiled forward pass keeps for backward, for one sample; None where it could not be captured."""
    compiled_fixed_bytes: Mapping[str, float] | None = None
    """By arithmetic: the part of it that does not grow with the batch."""
    peak_lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """Fixed and per-sample parts of the moments that can be the peak of a step with a fused optimizer: by arithmetic, and with all blocks
    checkpointed by "arithmetic/full" and "arithmetic/selective". The peak at a batch size is the largest (see `peak`)."""
    optimizer_bytes: int = 0
    """State that the optimizer keeps, unsharded."""
    optimizer_temporary_bytes: int = 0
    """What its step allocates in addition, at most, when it is not fused."""
    has_batchnorm: bool = False
    has_convolution: bool = False
    cross_entropy_head: str | None = None
    """Name of the final Linear whose output goes into a cross entropy, or None."""
    is_one_graph: bool = False
    """Whether a compiler sees model and loss as one graph that returns the loss alone."""
    evidence: str = "simulated"
    """"simulated" from a run on fake tensors, "modelled" from closed forms."""
    work: Mapping[str, tuple[Work, ...]] = field(default_factory=dict)
    """By arithmetic, and with "/fused" as a compiler runs them: the operators of forward, loss and backward."""
    tensors: int = 0
    """Trainable parameters, counted as tensors."""
    notes: tuple[str, ...] = ()
    """Why something could not be found out."""

    @property
    def forward_flops(self) -> float:
        """Operations of a forward pass for one sample."""
        return sum(unit.count * unit.forward_flops for unit in self.units)

    @property
    def blocks(self) -> list[UnitProfile]:
        """The repeated blocks: all units but the rest of the model."""
        return [unit for unit in self.units if unit.path]

    @property
    def trainable_share(self) -> float:
        """The share of the parameters that is trained."""
        return self.trainable / max(self.parameters, 1)

    def peak(self, kind: str, batch: float) -> float | None:
        """Return the tracked peak of an eager step of `batch` samples with a fused optimizer, or None if it was not tracked.

        `kind` is an arithmetic, or one with a mode of checkpointing: "bfloat16/full".
        """
        return max((fixed + batch * each for fixed, each in self.peak_lines.get(kind, ())), default=None)

    def saved_bytes(self, arithmetic: str) -> float:
        """Return what an eager forward pass keeps for one sample."""
        return sum(unit.count * unit.saved_bytes[arithmetic] for unit in self.units)


@dataclass(frozen=True)
class Grid:
    """Seconds over a grid of sizes. Between its points time is linear in logarithms.

    >>> grid = Grid(((1.0, 4.0),), (1.0, 2.0))
    >>> round(grid.seconds((2.0,)), 3), grid.seconds((8.0,)), grid.seconds((0.5,))
    (1.414, 4.0, 1.0)
    """

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    """Seconds, the last axis fastest."""

    def seconds(self, sizes: Sequence[float]) -> float:
        """Return the time at some sizes. Beyond the last point it grows proportionally, below the first it is constant."""
        corners, beyond = [(0, 1.0)], 1.0
        for axis, size in zip(self.axes, sizes, strict=True):
            beyond *= max(1.0, size / axis[-1])
            size = min(max(size, axis[0]), axis[-1])
            upper = min(max(1, bisect.bisect_left(axis, size)), len(axis) - 1)
            lower = max(0, upper - 1)
            span = math.log(axis[upper] / axis[lower]) if upper > lower else 1.0
            share = math.log(size / axis[lower]) / span
            ends = ((lower, 1 - share), (upper, share)) if share > 0 else ((lower, 1.0),)
            corners = [(place * len(axis) + index, weight * part) for place, weight in corners for index, part in ends]
        return beyond * math.exp(sum(weight * math.log(self.values[place]) for place, weight in corners))


@dataclass(frozen=True)
class Timetable:
    """Times of operators on a device, by kind and type, and the host time to start them."""

    grids: Mapping[str, Grid] = field(default_factory=dict)
    """By "key/dtype", or by key alone: over the sizes of `Work.dims`, or over the bytes moved."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the host for one operator: "forward", "backward", "view", "compiled", "graphed"."""
    is_complete: bool = True
    """Whether there was time for all kinds; a later start measures the others."""

    def grid(self, key: str, dtype: str) -> Grid | None:
        """Return the grid of an operator, or of the nearest measured kind."""
        while key:
            for name in (f"{key}/{dtype}", key):
                if name in self.grids:
                    return self.grids[name]
            key = key.rpartition("/")[0]
        return None


@dataclass(frozen=True, kw_only=True)
class Link:
    """The cost of communication over one kind of connection: a latency and a rate."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """One device and its links, measured or taken from data sheets."""

    device: str
    """Its name."""
    kind: str
    """Its torch device type, "cuda" or "cpu"."""
    memory: int
    """Usable bytes of an empty device."""
    free: int
    """Bytes free now."""
    flops: Mapping[str, float]
    """Sustained operations per second in matrix products: "float32", "tf32", "bfloat16", "float16", "float8"; absent: not possible."""
    bandwidth: float
    """Sustained bytes per second."""
    launch: float
    """Seconds to dispatch one operation in eager mode."""
    intra: Link
    inter: Link
    per_node: int = 8
    host_bandwidth: float = 20e9
    """Bytes per second between device and host memory."""
    threads: int = 1
    times: "Timetable | None" = None
    """What operators take, measured over sizes; None for a data sheet."""
    reserve_bytes: float = float(2**30)
    """What a process needs in addition to its tensors: context, workspaces, communication buffers."""
    reserve_share: float = 0.04
    """What fragmentation adds, as a share of the peak."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted time of earlier trials, by kind of plan."""
    evidence: str = "modelled"
    """"measured" here, or "modelled" from a preset."""


def divides_heads(profile: ModelProfile, size: int) -> bool:
    """Return whether all known attention heads can be split into this many parts."""
    return all(unit.heads % size == 0 for unit in profile.units if unit.heads)


def counts_of(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a profile that need no run of the model."""
    parameters, modules = list(model.parameters()), list(model.modules())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "tensors": sum(p.requires_grad for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "has_batchnorm": any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules),
        "has_convolution": any(isinstance(module, nn.modules.conv._ConvNd) for module in modules),
    }
