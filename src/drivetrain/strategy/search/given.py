"""A plan that somebody wrote, as the candidate that stands for it."""

import warnings
from typing import Any

from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.mesh import AXES
from drivetrain.strategy.methods.cpu_threads import cpu_share
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.search.candidates import SHARDINGS, Candidate
from drivetrain.strategy.search.place import SEARCHED, Place
from drivetrain.strategy.value import Strategy


def candidate_of(plan: Strategy, place: Place) -> Candidate:
    """Return the candidate whose cost is the plan's; it keeps the plan as it was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is dropped is said when the plan is applied
        resolved = resolve_plan(plan, model=place.model, device=place.device, world=place.world)
    config = {method.name: settings for _, method, settings in resolved.steps}
    axes = {axis: dict(resolved.axes).get(axis, 1) for axis in AXES}
    sharding = next((name for name in SHARDINGS[1:] if name in config), "none")
    if sharding in ("zero2", "fsdp") and axes["zero"] == 1:
        axes["zero"], axes["data"] = axes["data"], 1
    micro = config.get("micro_batch")
    given = (None, None) if micro is None else (micro.size, micro.accumulation)
    batch = plan_batch(
        place.global_batch, axes["data"] * axes["zero"], *given, allow_rounding=place.wishes.allow_batch_rounding
    )
    by_block = sharding in ("zero2", "fsdp") or axes["tensor"] * axes["pipe"] * axes["sequence"] > 1
    parts = getattr(config.get("pipeline_parallel"), "microbatches", None) or 2 * axes["pipe"]
    return Candidate(
        **axes,
        sharding=sharding,
        precision=_precision(config),
        checkpoint=_checkpoint(config.get("checkpoint")),
        micro=batch.micro,
        accumulation=batch.accumulation,
        microbatches=parts if axes["pipe"] > 1 else 1,
        compile=_scope(config.get("native_dynamo"), by_block),
        graphs="cuda_graphs" in config,
        chunked_loss="chunked_cross_entropy" in config,
        fused="fused_optimizer" in config,
        channels_last="channels_last" in config,
        cpu_offload="cpu_offload" in config,
        threads=(config["cpu_threads"].threads or cpu_share()) if "cpu_threads" in config else None,
        extra=tuple((name, settings) for name, settings in config.items() if name not in SEARCHED),
        given=Strategy(
            [(name, settings) for name, settings, _ in plan],
            mesh=resolved.axes[::-1],
            batch=batch,
            dropped=resolved.dropped,
        ),
    )


def _precision(config: dict[str, Any]) -> str:
    for name, precision in (("half", "half"), ("fp8", "float8")):
        if name in config:
            return precision
    if "amp_native" in config:
        return "float16" if config["amp_native"].dtype == "float16" else "bfloat16"
    return "tf32" if "tf32" in config else "float32"


def _checkpoint(config: Any) -> str:
    if config is None:
        return "none"
    if config.mode != "full":
        return config.mode
    return "full" if config.every == 1 else "second"


def _scope(config: Any, by_block: bool) -> str:
    if config is None:
        return "none"
    return ("block" if by_block else "model") if config.scope == "auto" else config.scope
