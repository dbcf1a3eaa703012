"""What a plan holds on another number of processes, from what it was predicted to hold: no model is needed, only proportions.

Sharded state grows as shards get fewer, activations follow the micro-batch; what lives for a moment is taken as it was. Times depend on
links that may be others now, so none are given.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.core.quantities import shown_bytes
from drivetrain.strategy.batching import BatchPlan
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


def rescaled_prediction(plan: "Strategy", axes: Mapping[str, int], batch: BatchPlan | None) -> dict[str, Any] | None:
    """Return a plan's predicted memory for other axes and another batch arithmetic; None where it has none to go by."""
    known = (plan.predicted or {}).get("memory")
    if not known or plan.mesh is None or plan.batch is None or batch is None:
        return None
    before = dict(plan.mesh)
    methods = [find_method(name) for name in plan.opt_names()]
    is_sharded = any(method.shards_axis is not None for method in methods)
    memory = {name: float(value) for name, value in known.items()}
    params = memory.get("params", 0.0)
    if is_sharded:
        whole = params * _shards(before)
        memory["params"] = whole / _shards(axes)
        memory["optimizer"] = memory.get("optimizer", 0.0) * _shards(before) / _shards(axes)
        memory["grads"] = whole if batch.accumulation > 1 else whole / _shards(axes)  # whole inside an open window
    else:
        if any(method.splits_optimizer for method in methods):
            memory["optimizer"] = memory.get("optimizer", 0.0) * plan.batch.data_ranks / batch.data_ranks
        if batch.accumulation > 1 or batch.data_ranks > 1:
            memory["grads"] = max(memory.get("grads", 0.0), params)
    memory["activations"] = memory.get("activations", 0.0) * batch.micro / plan.batch.micro
    reserve = memory.pop("reserve", 0.0)
    used = sum(value for name, value in known.items() if name != "reserve")
    memory["reserve"] = reserve * max(1.0, sum(memory.values()) / max(used, 1.0))
    kept = {name: value for name, value in plan.predicted.items() if name == "budget_bytes"} if plan.predicted else {}
    memory = {name: value for name, value in memory.items() if value}
    return {"memory": memory, "peak_bytes": sum(memory.values()), **kept, "evidence": {"memory": "modelled"}}


def _shards(axes: Mapping[str, int]) -> int:
    """Return over how many ranks parameters are split: those along `zero`, else along `data`, together with those along `sequence`."""
    return (axes["zero"] if axes.get("zero", 1) > 1 else axes.get("data", 1)) * axes.get("sequence", 1)


def shortfall_of(predicted: Mapping[str, Any] | None) -> str | None:
    """Return by how much a prediction is above the budget it was made for, or None where it fits."""
    if predicted is None or not predicted["peak_bytes"] > predicted.get("budget_bytes", math.inf):
        return None
    peak, budget = predicted["peak_bytes"], predicted["budget_bytes"]
    return f"it would need {shown_bytes(peak)} of {shown_bytes(budget)}; {shown_bytes(peak - budget)} are missing"
