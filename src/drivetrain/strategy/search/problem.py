"""What plans are made for, and what was requested of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from drivetrain.strategy.profile.values import MachineProfile, ModelProfile
from drivetrain.strategy.registry import find_method, mesh_method
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.constraints import SearchConstraints


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """What plans are made for: a model, a machine, a number of processes and a global batch."""

    profile: ModelProfile
    machine: MachineProfile
    device: torch.device
    """The device at hand; for a machine that is not here, the CPU."""
    world: int
    global_batch: int
    constraints: SearchConstraints
    model: nn.Module | None = None
    optim_func: Any = None
    optim_args: Mapping[str, Any] = field(default_factory=dict)
    has_loss: bool = True
    local: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """By method: configurations that rank 0 offers, because they depend on a process."""


class Requests:
    """What the caller's constraints say about names and configurations."""

    def __init__(self, problem: PlanningProblem):
        constraints = problem.constraints
        self.unwanted, self.wanted = constraints.unwanted(), constraints.wanted()
        self.kept: dict[str, Any] = constraints.configured()
        self.base: dict[str, Any] = {}
        self.start = constraints.start
        self.only: frozenset[str] | None = None
        if self.start is not None:
            tunable = {entry.name for entry in self.start if entry.tunable} or set(self.start.opt_names())
            for name, config, _ in self.start:
                (self.base if name in tunable else self.kept).setdefault(name, config)
            names = set(self.start.opt_names()) | set().union(*self.wanted, set())
            self.only = frozenset(names | ({mesh_method().name} if problem.world > 1 else set()))
            self.wanted = [*self.wanted, *(frozenset({name}) for name in self.start.opt_names())]
        alone = [next(iter(members)) for members in self.wanted if len(members) == 1]
        if problem.world == 1:  # they are dropped with a reason when the plan is applied
            groups = [members for members in self.wanted if all(find_method(name).needs_processes for name in members)]
            alone += [min(members) for members in groups]
        idle = [name for name in alone if find_method(name).stays_idle]
        for name in [name for name in alone if self._is_unexpressed(name, problem)] + idle:
            if name not in self.base:
                (self.base if name in idle else self.kept).setdefault(name, find_method(name).parse(None))
        written = {*self.kept, *self.base}
        self.here = frozenset(
            name for name in written if find_method(name).stays_idle or self._is_unexpressed(name, problem)
        )
        """Methods that the plan of every candidate has, whatever the candidate says."""
        self.keeps_searched = any(find_method(name).is_searched for name in self.kept)
        """Whether some configuration that stays is one that the space would vary."""

    @staticmethod
    def _is_unexpressed(name: str, problem: PlanningProblem) -> bool:
        """Return whether no option of the space stands for a method; on one process some are dropped when the plan is applied."""
        method = find_method(name)
        return not method.is_searched or (problem.world == 1 and method.needs_processes)

    def may(self, name: str) -> bool:
        """Return whether a candidate may have a method."""
        return name not in self.unwanted and (self.only is None or name in self.only)

    def must(self, name: str) -> bool:
        """Return whether every candidate has this method."""
        return any(members == {name} for members in self.wanted) or name in self.kept

    def allows(self, candidate: Candidate) -> bool:
        """Return whether a candidate has all that was requested, and nothing that was ruled out."""
        names = set(candidate.names())
        if names & self.unwanted or (self.only is not None and not names <= self.only):
            return False
        return all(members & (names | self.here) for members in self.wanted)
