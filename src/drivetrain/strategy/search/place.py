"""Where plans are made for, and what was asked of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from drivetrain.strategy.profile.values import MachineProfile, ModelProfile
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.wishes import Wishes

SEARCHED = frozenset(
    "parallel_mode auto_ddp zero1 zero2 fsdp amp_native half fp8 tf32 checkpoint micro_batch native_dynamo cuda_graphs "
    "chunked_cross_entropy fused_optimizer channels_last cpu_offload tensor_parallel sequence_parallel pipeline_parallel "
    "cpu_threads".split()
)
"""Methods that a dimension of the space expresses; others take part through their own `candidates()`."""
_IN_ANY_CASE = frozenset({"micro_batch", "parallel_mode", "auto_ddp"})
"""Methods that are in a plan when they are asked for, even where they have nothing to split."""
NEVER_SEARCHED = frozenset({"module_replace", "mixed_parallel"})
"""Methods that are used when they are asked for."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where plans are made for."""

    profile: ModelProfile
    machine: MachineProfile
    device: torch.device
    """The device at hand; for a machine that is not here, the CPU."""
    world: int
    global_batch: int
    wishes: Wishes
    model: nn.Module | None = None
    optim_func: Any = None
    optim_args: Mapping[str, Any] = field(default_factory=dict)
    has_loss: bool = True
    threads: tuple[int, ...] = ()
    """On a CPU: numbers of threads to compare with the present one."""


class Asked:
    """What the caller's wishes say about names and configurations."""

    def __init__(self, place: Place):
        wishes = place.wishes
        self.unwanted, self.wanted = wishes.unwanted(), wishes.wanted()
        self.kept: dict[str, Any] = wishes.configured()
        self.base: dict[str, Any] = {}
        self.start = wishes.start
        self.only: frozenset[str] | None = None
        if self.start is not None:
            tunable = {entry.name for entry in self.start if entry.tunable} or set(self.start.opt_names())
            for name, config, _ in self.start:
                (self.base if name in tunable else self.kept).setdefault(name, config)
            names = set(self.start.opt_names()) | set().union(*self.wanted, set())
            self.only = frozenset(names | ({"parallel_mode"} if place.world > 1 else set()))
            self.wanted = [*self.wanted, *(frozenset({name}) for name in self.start.opt_names())]
        alone = [next(iter(members)) for members in self.wanted if len(members) == 1]
        if place.world == 1:  # they are dropped with a reason when the plan is applied
            groups = [members for members in self.wanted if all(find_method(name).needs_processes for name in members)]
            alone += [min(members) for members in groups]
        unexpressed = [name for name in alone if name not in SEARCHED or find_method(name).needs_processes]
        for name in [*unexpressed, *(name for name in alone if name in _IN_ANY_CASE)]:
            if name not in self.base and (name not in SEARCHED or place.world == 1 or name in _IN_ANY_CASE):
                (self.base if name in _IN_ANY_CASE else self.kept).setdefault(name, find_method(name).parse(None))
        written = {*self.kept, *self.base}
        self.here = frozenset(
            name
            for name in written
            if name not in SEARCHED or name in _IN_ANY_CASE or (place.world == 1 and find_method(name).needs_processes)
        )
        """Methods that the plan of every candidate has, whatever the candidate says."""

    def may(self, name: str) -> bool:
        """Say whether a candidate may have a method."""
        return name not in self.unwanted and (self.only is None or name in self.only)

    def must(self, name: str) -> bool:
        """Say whether every candidate has this method."""
        return any(members == {name} for members in self.wanted) or name in self.kept

    def allows(self, candidate: Candidate) -> bool:
        """Say whether a candidate has all that was asked for, and nothing that was ruled out."""
        names = set(candidate.names())
        if names & self.unwanted or (self.only is not None and not names <= self.only):
            return False
        return all(members & (names | self.here) for members in self.wanted)
