"""Shows units before a run: a table of what each does, and its learning rates as a picture or as a line of text."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core import display
from drivetrain.core.errors import ConfigError, needs_package

if TYPE_CHECKING:
    from drivetrain.optim.optim_set import OptimSet
    from drivetrain.optim.scheduler import OptimScheduler

_HEAD = ("unit", "optimizer", "parameters", "loss", "when", "schedule", "pass")


def explain_units(optim_set: "OptimSet") -> str:
    """Return one line per unit, the number of backward passes, and each schedule's shape where its length is known."""
    passes = optim_set.passes()
    rows: list[tuple[str, ...]] = [_HEAD]
    for name, unit in optim_set.items():
        number = next((str(index + 1) for index, names in enumerate(passes) if name in names), "own")
        parameters = f"{sum(p.numel() for p in unit.params):,} in {len(unit.params)}"
        loss = " + ".join(term if weight == 1 else f"{weight:g}*{term}" for term, weight in unit.loss_terms)
        every = {1: "every step", 2: "every 2nd step"}.get(unit.step_per_update, f"every {unit.step_per_update}th step")
        when = "by hand" if unit.manual else every
        if unit.accum_grad > 1 and not unit.manual:
            when += f" of {unit.accum_grad} batches"
        schedule = f"{type(unit).__name__}({unit.extra_repr_fn()})"
        rows.append((name, type(unit.optimizer).__name__, parameters, loss, when, schedule, number))
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append(f"backward passes per batch: {len(passes)} when every unit is active")
    for name, unit in optim_set.items():
        total = unit.run_length.total(unit.accum_grad)
        if total is not None:
            with suppress(ConfigError):  # a schedule that also needs the epoch has no shape by steps alone
                lines.append(f"{name}: {sparkline(unit, steps=total)}")
    return "\n".join(lines)


def sparkline(rates: "OptimScheduler | Sequence[float]", *, steps: int | None = None, width: int = 60) -> str:
    """Return rates as one line of bars with the lowest and highest value; a unit is asked for its first `steps` rates.

    >>> sparkline([0.0, 0.5, 1.0, 0.5])
    '▁▅█▅ 0 to 1'
    """
    values = list(rates) if isinstance(rates, Sequence) else rates_of(rates, steps)
    if not values:
        raise ConfigError("sparkline: there are no values to show.")
    return f"{display.sparkline(values, width)} {min(values):.4g} to {max(values):.4g}"


def plot(
    schedules: "OptimScheduler | Mapping[str, OptimScheduler | Sequence[float]]",
    path: str | os.PathLike[str],
    *,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    log_scale: bool = False,
) -> Path:
    """Draw the learning rate of a unit, a set or any mapping of units and lists over real steps into a PNG file.

    `steps` is how many real steps to draw, by default the whole run where its length is known; `steps_per_epoch` numbers
    the epochs for schedules that follow them.
    """
    with needs_package("matplotlib", "demo", "plotting learning rates"):
        from matplotlib.figure import Figure
    named: Mapping[str, Any] = schedules if isinstance(schedules, Mapping) else {type(schedules).__name__: schedules}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, schedule in named.items():
        rates = list(schedule) if isinstance(schedule, Sequence) else rates_of(schedule, steps, steps_per_epoch)
        axes.plot(range(1, len(rates) + 1), rates, label=name, linewidth=2)
    axes.set(xlabel="real step", ylabel="learning rate", yscale="log" if log_scale else "linear")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    if not log_scale:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")
    return Path(path)


def rates_of(unit: "OptimScheduler", steps: int | None = None, steps_per_epoch: int | None = None) -> list[float]:
    """Return the learning rates of a unit's first real steps, by default of the whole run."""
    if steps is None:
        steps = unit.run_length.total(unit.accum_grad) or getattr(unit, "total_steps", None)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"steps={steps!r}: give the number of real steps to show, or bind the unit to a run.")
    epochs = [None if steps_per_epoch is None else step // steps_per_epoch + 1 for step in range(steps)]
    return [unit.lr_at(step + 1, epochs[step]) for step in range(steps)]
