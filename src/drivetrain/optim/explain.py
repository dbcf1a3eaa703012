"""A table of what the units of a set do, for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError
from drivetrain.optim.plotting import sparkline

if TYPE_CHECKING:
    from drivetrain.optim.optim_set import OptimSet
    from drivetrain.optim.scheduler import OptimScheduler

_HEAD = ("unit", "optimizer", "parameters", "loss", "when", "schedule", "pass")


def explain_units(optim_set: "OptimSet") -> str:
    """Return one line per unit, the number of backward passes, and each schedule's shape where its length is known."""
    passes = optim_set.passes()
    rows = [_HEAD]
    for name, unit in optim_set.items():
        number = next((str(index + 1) for index, names in enumerate(passes) if name in names), "own")
        count = sum(p.numel() for p in unit.params)
        parameters = f"{count:,} in {len(unit.params)}"
        rows.append(
            (name, type(unit.optimizer).__name__, parameters, _loss(unit), _when(unit), _schedule(unit), number)
        )
    lines = _table(rows)
    lines.append(f"backward passes per batch: {len(passes)} when every unit is active")
    for name, unit in optim_set.items():
        shape = _shape(unit)
        if shape:
            lines.append(f"{name}: {shape}")
    return "\n".join(lines)


def _loss(unit: "OptimScheduler") -> str:
    return " + ".join(name if weight == 1 else f"{weight:g}*{name}" for name, weight in unit.loss_terms)


def _when(unit: "OptimScheduler") -> str:
    if unit.manual:
        return "by hand"
    every = {1: "every step", 2: "every 2nd step"}.get(unit.step_per_update, f"every {unit.step_per_update}th step")
    return every if unit.accum_grad == 1 else f"{every} of {unit.accum_grad} batches"


def _schedule(unit: "OptimScheduler") -> str:
    extra = unit.extra_repr_fn()
    return f"{type(unit).__name__}({extra})"


def _shape(unit: "OptimScheduler") -> str | None:
    total = unit.run_length.total(unit.accum_grad)
    if total is None:
        return None
    try:
        return sparkline(unit, steps=total)
    except ConfigError:  # a schedule that also needs the epoch has no shape by steps alone
        return None


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
