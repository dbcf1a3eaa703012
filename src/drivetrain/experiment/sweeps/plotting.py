"""A picture of a sweep: value against each parameter, and every trial as one line across all parameters."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ExperimentError, MissingExtra

if TYPE_CHECKING:
    from drivetrain.experiment.sweeps.result import SweepResult


def plot_sweep(result: "SweepResult", path: Path) -> Path:
    """Draw the sweep into a PNG file; neither a display nor pyplot's global state is needed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "demo", "a picture of a sweep") from error
    trials = [trial for trial in result if trial.value is not None]
    if not trials:
        raise ExperimentError("no trial of this sweep has a value, so there is nothing to draw.")
    names = result.varied
    figure = Figure(figsize=(max(6.0, 3.2 * len(names)), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, max(1, len(names)))
    values = [float(trial.value or 0.0) for trial in trials]
    for column, name in enumerate(names):
        axes = figure.add_subplot(grid[0, column])
        places, labels, is_log = _places([result.shown(trial).get(name) for trial in trials])
        axes.scatter(places, values, c=values, cmap="viridis", edgecolors="none")
        axes.set(xlabel=name, ylabel="value" if column == 0 else "")
        if labels is not None:
            axes.set_xticks(range(len(labels)), labels)
        elif is_log:
            axes.set_xscale("log")
    _draw_lines(figure.add_subplot(grid[1, :]), result, trials, names, values)
    figure.savefig(path)
    return path


def _draw_lines(axes: Any, result: "SweepResult", trials: list[Any], names: list[str], values: list[float]) -> None:
    """Draw parallel coordinates: each axis scaled to its own range, the value last."""
    import math

    from matplotlib import colormaps

    columns = []
    for name in names:
        places, _, is_log = _places([result.shown(trial).get(name) for trial in trials])
        columns.append(_scaled([math.log(place) for place in places] if is_log else places))
    columns.append(_scaled(values))
    for row, shade in zip(zip(*columns, strict=True), columns[-1], strict=True):
        axes.plot(range(len(row)), row, color=colormaps["viridis"](shade), alpha=0.8)
    axes.set_xticks(range(len(columns)), [*names, "value"])
    axes.set_yticks([])


def _places(values: list[Any]) -> tuple[list[float], list[str] | None, bool]:
    """Return where values lie on an axis, the labels of values that are no numbers, and whether a log axis suits them."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        is_log = min(values) > 0 and max(values) / min(values) >= 30
        return [float(value) for value in values], None, is_log
    labels = list(dict.fromkeys(str(value) for value in values))
    return [float(labels.index(str(value))) for value in values], labels, False


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [0.5 if high == low else (value - low) / (high - low) for value in values]
