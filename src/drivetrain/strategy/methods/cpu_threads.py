"""How many threads one operation on the CPU uses: all of them for large products, few where starting them costs more than it saves."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.runtime.device import usable_cpus
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.strategy.method import Method, Option, Stage, is_whole

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.space import SearchScope


@dataclass(frozen=True, kw_only=True)
class CpuThreadsConfig:
    threads: int | None = None
    """Threads of each process; None: this process's share of the CPUs that it may use."""


class CpuThreads(Method):
    """`torch.set_num_threads`, for the whole process."""

    name, group, stage = "cpu_threads", "threads", Stage.MESH
    Config = CpuThreadsConfig
    short = "threads"
    why = "number of threads for one operation, in the whole process"
    unproved_on = frozenset({"cpu"})
    must_win = leaves_no_trace = True
    not_simulated = "it does not change memory"

    def local_candidates(self, device: torch.device, world: int) -> tuple[Any, ...]:
        found = self.candidates(None, device, world)
        return tuple(config for config in found if config.threads != torch.get_num_threads())

    def options(self, scope: "SearchScope") -> list[Option]:
        offered, kept = [config.threads for config in scope.local(self)], scope.kept(self.name)
        if kept:
            found = [kept[0].threads or (offered or [scope.machine.threads])[-1]]
        elif scope.must(self.name):
            found = offered or [scope.machine.threads]
        else:
            found = offered if scope.is_cpu and scope.is_here and scope.usable(self) else []
        return [((self.name, scope.config(self, threads=threads)),) for threads in found]

    def settled(self, config: CpuThreadsConfig, candidate: "Candidate") -> CpuThreadsConfig:
        return replace(config, threads=config.threads or cpu_share())

    def affect(self, effects: "Effects", config: CpuThreadsConfig) -> None:
        effects.threads = config.threads

    def label(self, config: CpuThreadsConfig) -> str:
        return f"threads {config.threads}"

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        given = values.get("threads")
        if given is not None and not is_whole(given):
            raise self.bad("threads", given, "a whole number of at least 1, or None for this process's share")
        return values

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        return None if device.type == "cpu" else f"operations run on {device.type}, not on the CPU's threads"

    def candidates(self, profile: object, device: torch.device, world: int) -> list[Any]:
        """Return one thread, half of this process's CPUs, and all of them."""
        if self.requires(profile, device, world) is not None:
            return []
        share = cpu_share()
        return [CpuThreadsConfig(threads=count) for count in sorted({1, max(1, share // 2), share})]

    def apply(self, ctx: "Application", config: CpuThreadsConfig) -> None:
        torch.set_num_threads(config.threads or cpu_share())
        ctx.note("cpu_threads: applies to the whole process")


def cpu_share() -> int:
    """Return how many CPUs each process of this machine may use, when they share them."""
    world = launched_world()
    around = None if world is None else world.local_world_size
    return max(1, usable_cpus() // (around or get_num_processes()))
