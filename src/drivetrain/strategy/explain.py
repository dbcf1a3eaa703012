"""A plan in words, the difference between two plans, and a picture of the search that found one."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from drivetrain.core.display import format_bytes, format_duration
from drivetrain.core.errors import ConfigError, needs_package
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


def explain(plan: "Strategy", width: int = 100) -> str:
    """Return mesh and batch arithmetic, methods in order with reasons, numbers with their evidence, and rejected or dropped methods."""
    predicted, measured = plan.predicted or {}, plan.measured or {}
    methods = f"{len(plan)} method{'' if len(plan) == 1 else 's'}"
    lines = [f"Plan of {methods} (evidence: {plan.evidence})" + _counted(plan.search)]
    if plan.failure is not None:
        lines.append(f"  FAILED ({plan.failure.kind}): {plan.failure.message}")
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh or ())
    lines += [f"  mesh    {mesh or 'not fixed yet'}", f"  batch   {plan.batch or 'not fixed yet'}"]
    notes = list(plan.reasons)
    if len(plan):
        lines.append("  methods, in order of application")
    for name, config, tunable in sorted(plan, key=lambda entry: (find_method(entry.name).stage, entry.name)):
        own = [text for text in notes if text.startswith(f"{name}:")]
        notes = [text for text in notes if text not in own]
        usual = find_method(name).reason(config)
        why = [text.partition(":")[2].strip() for text in own] or [usual]
        if any(text.startswith("unchanged") for text in why):
            why = [text for text in why if text != usual]
        shown = "; ".join(text for text in dict.fromkeys(why) if text)
        line = f"    {name:<16} {_settings(config) or 'defaults'}" + (f": {shown}" if shown else "")
        lines.append(f"{line}   (tunable)" if tunable else line)
    size = 1 if plan.batch is None else plan.batch.global_size
    lines += [*_memory_lines(predicted, measured), *_time_lines(predicted, measured, size)]
    lines += [*_other_line("predicted", predicted), *_other_line("measured", measured)]
    lines += [f"  rejected {text}" for text in plan.rejected[:5]]
    lines += [f"  with more memory: {predicted['sensitivity']}"] if predicted.get("sensitivity") else []
    lines += [f"  dropped {name}: {reason}" for name, reason in plan.dropped]
    lines += [f"  note    {text}" for text in dict.fromkeys(notes)]
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4)) for line in lines
    )


def _counted(search: Mapping[str, Any] | None) -> str:
    """Return how many plans it was chosen from."""
    if not search:
        return ""
    tried, took = len(search.get("measured", ())), sum(search.get("seconds", {}).values())
    return f", chosen from {search['candidates']}: {search['fitting']} fit, {tried} tried, {took:.0f} s"


def _memory_lines(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    lines = []
    if "memory" in predicted:
        parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in predicted["memory"].items() if value >= 1)
        of = f" of {format_bytes(predicted['budget_bytes'])}" if "budget_bytes" in predicted else ""
        evidence = predicted.get("evidence", {}).get("memory", "modelled")
        lines.append(f"  memory  predicted {format_bytes(predicted['peak_bytes'])}{of} ({evidence}): {parts}")
    if measured.get("peak_bytes") is not None:
        more = " by which the process grew"
        if (reserved := measured.get("reserved_bytes")) is not None:
            more = f" in tensors, {format_bytes(reserved)} with what the allocator kept"
        lines.append(f"  memory  measured {format_bytes(measured['peak_bytes'])}{more}")
    return lines


def _time_lines(predicted: Mapping[str, Any], measured: Mapping[str, Any], batch_size: int) -> list[str]:
    lines = []
    if "time" in predicted:
        parts = ", ".join(f"{name} {format_duration(value)}" for name, value in predicted["time"].items() if value > 0)
        evidence = predicted.get("evidence", {}).get("time", "modelled")
        lines.append(f"  time    predicted {format_duration(predicted['step_seconds'])} a step ({evidence}): {parts}")
    if seconds := measured.get("step_seconds"):
        shown = f"  time    measured {format_duration(seconds)} a step over {measured.get('steps', 0)} steps"
        lines.append(f"{shown}, {batch_size / seconds:.4g} samples a second")
    if measured.get("loss") is not None and measured.get("is_verified"):
        shown = f"loss {measured['loss']:.6g}, plain {measured['plain_loss']:.6g}" if "plain_loss" in measured else ""
        lines.append(f"  checked {shown or 'against the plain model'}")
    return lines


def _other_line(title: str, numbers: Mapping[str, Any]) -> list[str]:
    """Return numbers that a plan carries from elsewhere."""
    shown = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in numbers.items()
        if key not in _KNOWN
    ]
    return [f"  {title}: " + ", ".join(shown)] if shown else []


_KNOWN = frozenset(
    "memory time peak_bytes step_seconds budget_bytes evidence sensitivity steps reserved_bytes loss plain_loss gradient_norm "
    "startup_seconds is_verified".split()
)


def difference(ours: "Strategy", other: "Strategy") -> str:
    """Return one line for each method or number that differs. Plans that do the same give an empty list."""
    left = {entry.name: entry.config for entry in ours}
    right = {entry.name: entry.config for entry in other}
    lines = [f"- {name} {_settings(left[name])}".rstrip() for name in left if name not in right]
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
    values = [(item, getattr(config, item.name)) for item in fields(config)]
    return ", ".join(f"{item.name}={value!r}" for item, value in values if value != item.default)


_GIB = 2**30
_WIDE = 10.0
"""From this ratio of the largest to the smallest on, an axis is logarithmic; below, its ticks would be few and crooked."""


def draw(plan: "Strategy", path: str | os.PathLike[str]) -> None:
    """Write the picture of a plan's search as a PNG."""
    search = plan.search
    if not search or not search.get("points"):
        raise ConfigError(
            "the plan was not found by a search, so there is nothing to draw. Call auto_accelerate without load_strategy."
        )
    with needs_package("matplotlib", "demo", "the picture of a search"):
        import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window, and no change of the program's own backend
    axes = figure.add_subplot()
    _draw(axes, plan, search, matplotlib.color_sequences["tab10"])
    figure.savefig(path, dpi=150, format="png")


def _draw(axes: Any, plan: "Strategy", search: Mapping[str, Any], colours: Any) -> None:
    size = 1 if plan.batch is None else plan.batch.global_size
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for point in search["points"]:
        seconds, peak, kind = point.split(" ", 2)
        by_kind.setdefault(kind, []).append((float(peak) / _GIB, size / float(seconds)))
    for (kind, points), colour in zip(sorted(by_kind.items()), [*colours] * 3):
        axes.scatter(*zip(*points), s=14, alpha=0.6, linewidths=0, color=colour, label=kind)
    memory = [peak for points in by_kind.values() for peak, _ in points]
    measured = [item for item in search.get("measured", ()) if "step_seconds" in item]
    for number, item in enumerate(measured, start=1):
        place = item["predicted_bytes"] / _GIB, size / item["step_seconds"]
        before = place[0], size / item["predicted_seconds"]
        axes.annotate("", place, before, arrowprops={"arrowstyle": "->", "color": "0.4", "lw": 0.8})
        axes.scatter(*place, s=60, marker="D", facecolors="none", edgecolors="black", linewidths=1.2)
        axes.annotate(f"{number}", place, textcoords="offset points", xytext=(6, 5), fontsize=8)
    predicted = plan.predicted or {}
    seconds = (plan.measured or {}).get("step_seconds", predicted.get("step_seconds"))
    if seconds and "peak_bytes" in predicted:
        axes.scatter(
            predicted["peak_bytes"] / _GIB, size / seconds, s=170, marker="*", color="crimson", zorder=5, label="chosen"
        )
    if "budget_bytes" in predicted:
        budget = predicted["budget_bytes"] / _GIB
        largest = max(memory)
        if budget <= 4 * largest:  # a budget far beyond all candidates would only squeeze them together
            memory.append(budget)
            axes.axvline(budget, color="crimson", linestyle="--", linewidth=1)
            where = {"xycoords": ("data", "axes fraction"), "xytext": (-4, -12), "textcoords": "offset points"}
            axes.annotate("budget", (budget, 1), ha="right", color="crimson", fontsize=9, **where)
    is_narrow = max(memory) < _WIDE * min(memory)
    axes.set(
        xscale="linear" if is_narrow else "log",
        yscale="log",
        xlabel="memory of one rank at its peak (GiB, predicted)",
        ylabel="samples per second",
    )
    axes.set_title(
        f"{search['candidates']} candidates, {search['fitting']} fit; arrows: predicted to measured", fontsize=10
    )
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
