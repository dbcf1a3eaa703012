"""What the methods of a plan change about a training step, as numbers that the closed forms of memory and time read.

A record starts as the plain step on a mesh: float32, eager kernels, everything replicated. Each method of a plan changes it in
`Method.affect`, in the order of stages, so a later method sees what the earlier ones did.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from drivetrain.strategy.mesh import DATA_AXES

CompileScope = Literal["none", "block", "model"]
UNFUSED_UPDATE = 2.5
"""Passes over memory of an update that is not fused, over those of a fused one."""


@dataclass(frozen=True)
class Kernels:
    """The share of a pass's eager memory traffic and kernel launches that remains. Compiled passes use their own recorded kernels
    if there are any.
    """

    traffic: float = 0.8
    """The part that is not the operands of matrix products, whose time is in their arithmetic: a GPT block has 0.7, its head with the
    loss 0.9."""
    launches: float = 1.0


@dataclass(frozen=True)
class Recompute:
    """What blocks keep for backward, and what is recomputed."""

    keeps: Literal["all", "products", "inputs"] = "all"
    """Everything, the outputs of matrix products and attention, or the inputs of blocks alone."""
    every: int = 1
    """One block of so many is computed again."""
    on_device: int | None = None
    """How many blocks' inputs are on the device at once; the others are in host memory. None: all are on the device."""
    share: float = 0.0
    """The part of the blocks' forward pass that is computed again."""

    @property
    def tracked_part(self) -> str:
        """The suffix of the profile's part that was tracked with blocks that keep the same."""
        return {"all": "", "products": "/selective", "inputs": "/full"}[self.keeps]

    def in_every_block(self) -> "Recompute":
        """Return the setting with every block recomputed and its input on the device, as profiles track it."""
        return replace(self, every=1, on_device=None)


@dataclass(kw_only=True)
class Effects:
    """A training step on one rank. The defaults are the plain step; methods change them."""

    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the mesh's axes."""
    micro: int = 1
    """Samples of one forward pass."""
    accumulation: int = 1

    # Arithmetic and kernels.
    precision: str = "float32"
    """The precision of matrix products, as labels and kinds name it."""
    rate: str = "float32"
    """The key of the machine's rates."""
    arithmetic: str = "float32"
    """The key of the profile's numbers: "float32" or "bfloat16" for all that computes in 16 bits."""
    compiled: CompileScope = "none"
    """What is compiled: nothing, the blocks, or the whole model."""
    is_recorded: bool = False
    """Whether kernels are recorded once and replayed: launching costs nothing, and their memory pool is their own."""
    threads: int | None = None
    """On a CPU; None does not change them."""
    block_kernels: Kernels = Kernels()
    other_kernels: Kernels = Kernels()
    is_channels_last: bool = False
    """Whether images are in channels-last memory format."""

    # Parameters, gradients and optimizer state.
    parameter_ranks: int = 1
    """Over how many ranks the model itself is split, by layers or within them."""
    is_sharded: bool = False
    """Whether parameters and gradients are split over data ranks and gathered for use."""
    shards: int = 1
    gathers: int = 0
    """How often sharded parameters are gathered in one pass."""
    gathers_whole: bool = False
    """Whether gathered parameters stay until the pass ends; else those of a block are freed after use."""
    optimizer_shards: int = 1
    parameter_width: float | None = None
    """Bytes of a parameter where the optimizer trains float32 copies; None: as the model has them, without copies."""
    cast_width: float = 0.0
    """Bytes for each parameter that autocast's copies take until backward."""
    holds_gradients: bool = False
    """Whether gradients outlive a pass within a step."""
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    update_passes: float = UNFUSED_UPDATE
    """Passes over memory of an update, over those of a fused one."""
    update_temporary: float = 1.0
    """The share of the optimizer's temporary memory that is needed."""

    # Activations.
    work_ranks: int = 1
    """Over how many ranks the work on one sample is split."""
    token_ranks: int = 1
    """Over how many ranks the positions of a sample are split."""
    block_share: float = 1.0
    """The share of a block's activations that each rank keeps."""
    recompute: Recompute = Recompute()
    logits_share: float = 1.0
    """The share of the logits that exists at once."""
    head_again: float = 0.0
    """Further forward passes of what is outside of blocks."""
    is_tracked: bool = True
    """Whether the tracked peak of an eager step shows the memory that is held only briefly."""

    # Pipelines and communication.
    stages: int = 1
    parts: int = 1
    """Into how many micro-batches a pipeline cuts one pass."""
    block_exchanges: tuple[tuple[str, int], ...] = ()
    """Axes along which every block moves activations in forward and backward, each with how often."""

    @property
    def data_ranks(self) -> int:
        """The number of ranks that samples are spread over."""
        return math.prod(self.axes.get(axis, 1) for axis in DATA_AXES)

    @property
    def is_compiled(self) -> bool:
        """Whether any part is compiled."""
        return self.compiled != "none"

    @property
    def kind(self) -> str:
        """What decides which kernels run. Prediction errors are similar for plans of one kind."""
        return self._kind(self.compiled, self.is_recorded)

    def _kind(self, compiled: CompileScope, is_recorded: bool) -> str:
        how = "eager" if compiled == "none" else f"compiled {compiled}"
        shown = "" if self.threads is None else f", threads {self.threads}"
        return f"{self.precision}, {how}{' with graphs' if is_recorded else ''}{shown}"

    @property
    def similar_kernel_kinds(self) -> tuple[str, ...]:
        """Kinds with nearly the same kernels: the same precision, compiled in another scope, with or without CUDA graphs."""
        if not self.is_compiled:
            return ()
        scopes: tuple[CompileScope, ...] = ("model", "block")
        kinds = [self._kind(scope, recorded) for scope in scopes for recorded in (False, True)]
        return tuple(dict.fromkeys(kind for kind in kinds if kind != self.kind))
