"""A picture of a search: throughput over memory for the candidates it compared, with those that were measured and the one chosen."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy

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
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("matplotlib", "demo", "the picture of a search") from error
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
