"""A plan in words, and the difference between two plans."""

import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from drivetrain.core.quantities import shown_bytes, shown_seconds
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


def explain(plan: "Strategy", width: int = 100) -> str:
    """Return mesh and batch arithmetic, methods in order with reasons, numbers with evidence, and what was rejected or dropped."""
    lines = [f"Plan of {len(plan)} methods (evidence: {plan.evidence})" + _counted(plan)]
    if plan.failure is not None:
        lines.append(f"  FAILED ({plan.failure.kind}): {plan.failure.message}")
    lines.append(
        "  mesh    " + (" x ".join(f"{axis} {size}" for axis, size in plan.mesh) if plan.mesh else "not fixed yet")
    )
    lines.append("  batch   " + (str(plan.batch) if plan.batch is not None else "not fixed yet"))
    notes = list(plan.reasons)
    if len(plan):
        lines.append("  methods, in order of application")
    for name, config, tunable in sorted(plan, key=lambda entry: (find_method(entry.name).stage, entry.name)):
        own = [text for text in notes if text.startswith(f"{name}:")]
        notes = [text for text in notes if text not in own]
        why = [text.partition(":")[2].strip() for text in own] or [find_method(name).reason(config)]
        told = "; ".join(text for text in dict.fromkeys(why) if text)
        settings = _settings(config) or "defaults"
        lines.append(f"    {name:<16} {settings}" + (f": {told}" if told else "") + ("   (tunable)" if tunable else ""))
    lines += _memory_lines(plan) + _time_lines(plan) + _other_lines(plan)
    lines += [f"  rejected {text}" for text in plan.rejected[:5]]
    hint = (plan.predicted or {}).get("sensitivity")
    lines += [f"  with more memory: {hint}"] if hint else []
    lines += [f"  dropped {name}: {reason}" for name, reason in plan.dropped]
    lines += [f"  note    {text}" for text in dict.fromkeys(notes)]
    wrapped = [
        textwrap.wrap(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4)) or [""]
        for line in lines
    ]
    return "\n".join(part for parts in wrapped for part in parts)


def _counted(plan: "Strategy") -> str:
    """Return how many plans it was chosen from."""
    search = plan.search
    if not search:
        return ""
    tried = len(search.get("measured", ()))
    took = sum(search.get("seconds", {}).values())
    return f", chosen from {search['candidates']}: {search['fitting']} fit, {tried} measured, {took:.0f} s"


def _memory_lines(plan: "Strategy") -> list[str]:
    predicted, measured = plan.predicted or {}, plan.measured or {}
    lines = []
    if "memory" in predicted:
        parts = ", ".join(f"{name} {shown_bytes(value)}" for name, value in predicted["memory"].items() if value >= 1)
        of = f" of {shown_bytes(predicted['budget_bytes'])}" if "budget_bytes" in predicted else ""
        evidence = predicted.get("evidence", {}).get("memory", "modelled")
        lines.append(f"  memory  predicted {shown_bytes(predicted['peak_bytes'])}{of} ({evidence}): {parts}")
    if measured.get("peak_bytes") is not None:
        reserved = measured.get("reserved_bytes")
        more = " by which the process grew"
        if reserved is not None:
            more = f" in tensors, {shown_bytes(reserved)} with what the allocator kept"
        lines.append(f"  memory  measured {shown_bytes(measured['peak_bytes'])}{more}")
    return lines


def _time_lines(plan: "Strategy") -> list[str]:
    predicted, measured = plan.predicted or {}, plan.measured or {}
    size = 1 if plan.batch is None else plan.batch.global_size
    lines = []
    if "time" in predicted:
        seconds = predicted["step_seconds"]
        parts = ", ".join(f"{name} {shown_seconds(value)}" for name, value in predicted["time"].items() if value > 0)
        evidence = predicted.get("evidence", {}).get("time", "modelled")
        lines.append(f"  time    predicted {shown_seconds(seconds)} a step ({evidence}): {parts}")
    if measured.get("step_seconds"):
        seconds = measured["step_seconds"]
        told = f"  time    measured {shown_seconds(seconds)} a step over {measured.get('steps', 0)} steps"
        lines.append(f"{told}, {size / seconds:.4g} samples a second")
    if measured.get("loss") is not None and measured.get("is_verified"):
        told = f"loss {measured['loss']:.6g}, plain {measured['plain_loss']:.6g}" if "plain_loss" in measured else ""
        lines.append(f"  checked {told or 'against the plain model'}")
    return lines


def _other_lines(plan: "Strategy") -> list[str]:
    """Return numbers that a plan carries from elsewhere."""
    lines = []
    for title, numbers in (("predicted", plan.predicted), ("measured", plan.measured)):
        others = {key: value for key, value in (numbers or {}).items() if key not in _KNOWN}
        if others:
            lines.append(f"  {title}: " + ", ".join(f"{key} {_number(value)}" for key, value in others.items()))
    return lines


_KNOWN = frozenset(
    "memory time peak_bytes step_seconds budget_bytes evidence sensitivity steps reserved_bytes loss plain_loss gradient_norm "
    "startup_seconds is_verified".split()
)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def difference(ours: "Strategy", other: "Strategy") -> str:
    """Return one line for each method or number that differs; empty when the plans do the same."""
    lines = []
    left = {entry.name: entry.config for entry in ours}
    right = {entry.name: entry.config for entry in other}
    for name in left:
        if name not in right:
            lines.append(f"- {name} {_settings(left[name])}".rstrip())
    for name in right:
        if name not in left:
            lines.append(f"+ {name} {_settings(right[name])}".rstrip())
        elif left[name] != right[name]:
            for item in fields(left[name]):
                before, after = getattr(left[name], item.name), getattr(right[name], item.name)
                if before != after:
                    lines.append(f"~ {name}.{item.name}: {before!r} -> {after!r}")
    if ours.batch != other.batch:
        lines.append(f"~ batch: {ours.batch} -> {other.batch}")
    return "\n".join(lines)


def _settings(config: Any) -> str:
    """Return the settings that are not defaults."""
    shown = [
        f"{item.name}={value!r}" for item in fields(config) if (value := getattr(config, item.name)) != item.default
    ]
    return ", ".join(shown)
