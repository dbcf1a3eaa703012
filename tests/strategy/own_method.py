"""A method that no file of the package knows: all that a search, a trial and an explanation need is here."""

from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.strategy.apply import Application
from drivetrain.strategy.effects import Effects, Kernels
from drivetrain.strategy.method import Method, Stage
from drivetrain.strategy.search.candidates import Candidate


@dataclass(frozen=True, kw_only=True)
class FlushConfig:
    is_on: bool = True


class FlushDenormals(Method):
    """Numbers too small for the usual format count as zero."""

    name, group, stage = "flush_denormals", "denormals", Stage.MODULE
    Config = FlushConfig
    why = "tiny numbers are zero, which arithmetic units are faster with"
    unproved_on = frozenset({"cpu"})
    not_simulated = "it does not change memory"

    def requires(self, profile: Any, device: torch.device, world: int) -> str | None:
        return None if device.type == "cpu" else "it changes the CPU's arithmetic"

    def fits(self, config: FlushConfig, candidate: Candidate) -> str | None:
        return "a compiler has kernels of its own" if candidate.is_compiled else None

    def affect(self, effects: Effects, config: FlushConfig) -> None:
        effects.block_kernels = effects.other_kernels = Kernels(traffic=0.2, launches=0.5)
        effects.update_passes *= 0.5

    def label(self, config: FlushConfig) -> str:
        return "flush"

    def apply(self, ctx: Application, config: FlushConfig) -> None:
        torch.set_flush_denormal(config.is_on)
        ctx.note("flush_denormals: holds for the whole process")
