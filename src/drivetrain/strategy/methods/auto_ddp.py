"""Data parallelism over all processes: another name for `parallel_mode` without settings, merged with it."""

from typing import Any

from drivetrain.strategy.method import Method, Stage


class AutoDdp(Method):
    """DDP over all processes."""

    name, group, stage = "auto_ddp", "parallel_mode", Stage.MESH
    stays_idle = leaves_no_trace = True
    why = "each process takes its share of the global batch"

    def expand(self, config: object) -> dict[str, Any]:
        return {"parallel_mode": None}
