"""Tensor, pipeline and data parallelism together, written as one method (Narayanan et al., 2021, arXiv 2104.04473)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from drivetrain.core.errors import MethodConfigError
from drivetrain.strategy.method import Method, Stage
from drivetrain.strategy.registry import find_method


@dataclass(frozen=True, kw_only=True)
class MixedParallelConfig:
    parallel_mode: Any = None
    """What `parallel_mode` takes; its axes say which of the others are used."""
    tensor_config: Any = None
    """What `tensor_parallel` takes."""
    pipe_config: Any = None
    """What `pipeline_parallel` takes."""


_PARTS = {"parallel_mode": "parallel_mode", "tensor_config": "tensor_parallel", "pipe_config": "pipeline_parallel"}


class MixedParallel(Method):
    """Stands for `parallel_mode`, and for the methods that its axes need."""

    name, group, stage = "mixed_parallel", "parallel", Stage.MESH
    aliases: ClassVar[tuple[str, ...]] = ("ds_3d_parallel", "deepspeed_3d_parallel")
    Config = MixedParallelConfig
    needs_processes, is_searched = True, False
    conflicts: ClassVar[dict[str, str]] = {
        "tensor_parallel": "Give its settings as tensor_config of mixed_parallel.",
        "pipeline_parallel": "Give its settings as pipe_config of mixed_parallel.",
    }

    def parse(self, config: object = None) -> MixedParallelConfig:
        """Read each part as the method it belongs to does."""
        if isinstance(config, Mapping):
            config = {
                key: find_method(_PARTS[key]).parse(value) if key in _PARTS and value is not None else value
                for key, value in config.items()
            }
        return super().parse(config)

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("parallel_mode") is None:
            raise MethodConfigError(
                "mixed_parallel: parallel_mode is missing; expected the axes, such as {'parallel_mode': [('tensor', 2), ('pipe', 2), "
                "('data', 1)]}."
            )
        axes = {axis for axis, size in values["parallel_mode"].axes if size > 1}
        for key, axis in (("tensor_config", "tensor"), ("pipe_config", "pipe")):
            if values.get(key) is not None and axis not in axes:
                raise MethodConfigError(
                    f"mixed_parallel: {key} is given, and parallel_mode has no {axis!r} axis. Add it."
                )
        return values

    def plain(self, config: MixedParallelConfig) -> dict[str, Any]:
        parts = {key: getattr(config, key) for key in _PARTS}
        return {key: None if part is None else find_method(_PARTS[key]).plain(part) for key, part in parts.items()}

    def expand(self, config: MixedParallelConfig) -> dict[str, Any]:
        axes = {axis for axis, size in config.parallel_mode.axes if size > 1}
        parts: dict[str, Any] = {"parallel_mode": config.parallel_mode}
        if "tensor" in axes:
            parts["tensor_parallel"] = config.tensor_config
        if "pipe" in axes:
            parts["pipeline_parallel"] = config.pipe_config
        if "zero" in axes:
            parts["fsdp"] = None
        return parts
