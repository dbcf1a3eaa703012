"""A plan in words, and the difference between two plans."""

import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from drivetrain.strategy.registry import find_method
from drivetrain.strategy.value import Strategy


def explain(plan: Strategy, width: int = 100) -> str:
    """Return mesh and batch arithmetic, methods in order with reasons, numbers, and what was rejected or dropped."""
    lines = [f"Plan of {len(plan)} methods (evidence: {plan.evidence})"]
    if plan.failure is not None:
        lines.append(f"  FAILED ({plan.failure.kind}): {plan.failure.message}")
    lines.append(
        "  mesh    " + (" x ".join(f"{axis} {size}" for axis, size in plan.mesh) if plan.mesh else "not fixed yet")
    )
    lines.append("  batch   " + (str(plan.batch) if plan.batch is not None else "not fixed yet"))
    lines.append("  methods, in order of application")
    notes = list(plan.reasons)
    for name, config, tunable in sorted(plan, key=lambda entry: (find_method(entry.name).stage, entry.name)):
        method = find_method(name)
        settings = _settings(config)
        lines.append(f"    {name:<16} {settings or 'defaults'}" + ("   (tunable)" if tunable else ""))
        own = [text for text in notes if text.startswith(f"{name}:")]
        for text in own or ([f"{name}: {why}"] if (why := method.reason(config)) else []):
            lines.append(f"      {text.partition(':')[2].strip()}")
        notes = [text for text in notes if text not in own]
    lines += [f"  note    {text}" for text in notes]
    for title, numbers in (("predicted", plan.predicted), ("measured", plan.measured)):
        if numbers:
            lines.append(f"  {title}: " + ", ".join(f"{key} {_number(value)}" for key, value in numbers.items()))
    lines += [f"  rejected {text}" for text in plan.rejected[:5]]
    lines += [f"  dropped {name}: {reason}" for name, reason in plan.dropped]
    wrapped = [
        textwrap.wrap(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4)) or [""]
        for line in lines
    ]
    return "\n".join(part for parts in wrapped for part in parts)


def difference(ours: Strategy, other: Strategy) -> str:
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


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_number(item)}" for key, item in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
