"""Ways to look at a run history: a short table, a pandas DataFrame, a picture. Pandas and matplotlib are optional."""

from collections import Counter
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain.core.errors import MissingExtra, unknown_name

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-not-found,import-untyped,unused-ignore]

    from drivetrain.train.run_history import RunHistory

WIDTH = 80
ROWS_AT_START, ROWS_AT_END = 3, 7
_PHASES = ("train_", "eval_", "intermediate_eval_", "evaluation_")


def format_metric(value: object) -> str:
    """Return a value for people to read: six significant digits, whole numbers in full.

    >>> [format_metric(value) for value in (0.30000001192092896, 1.5e-07, 12345678, 0.1 + 0.2)]
    ['0.3', '1.5e-07', '12345678', '0.3']
    """
    value = _plain(value)
    if isinstance(value, bool | int) or not isinstance(value, Real):
        return str(value)
    number = float(value)
    return f"{number:.0f}" if 1e6 <= abs(number) < 1e15 else f"{number:.6g}"


def as_table(history: "RunHistory") -> str:
    """Return a table that fits a terminal: a row per moment, the middle of a long history left out."""
    rows, name = _rows(history), type(history).__name__
    if not rows:
        return f"{name}: nothing recorded yet"
    names = sorted(history.get_metric_names(), key=lambda metric: "intermediate_eval_" in metric)  # epochs first
    if len(rows) > ROWS_AT_START + 1 + ROWS_AT_END:
        hidden = len(rows) - ROWS_AT_START - ROWS_AT_END
        shown = [*rows[:ROWS_AT_START], None, *rows[-ROWS_AT_END:]]
        title = f"{name}: {len(rows)} rows, {hidden} not shown"
    else:
        shown, title = list(rows), name
    columns = [_column(key, [None if row is None else row[key] for row in shown]) for key in ("epoch", "step")]
    width, left_out = sum(len(column[0]) + 2 for column in columns), 0
    for index, metric in enumerate(names):
        column = _column(metric, [None if row is None else row.get(metric, "") for row in shown])
        width += len(column[0]) + 2
        if index and width > WIDTH:
            left_out = len(names) - index
            break
        columns.append(column)
    lines = [title, *("  ".join(cells).rstrip() for cells in zip(*columns))]
    if left_out:
        lines.append(f"and {left_out} more: {', '.join(names[-left_out:])}")
    return "\n".join(lines)


def to_dataframe(history: "RunHistory") -> "DataFrame":
    """Return the history as a DataFrame with the columns epoch, step and one per metric."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("pandas", None, "history.to_dataframe()") from error
    rows = [{name: _plain(value) for name, value in row.items()} for row in _rows(history)]
    return pandas.DataFrame(rows, columns=["epoch", "step", *history.get_metric_names()])


def plot(history: "RunHistory", metric_names: Iterable[str] | None = None, path: str | None = None) -> Any:
    """Return a matplotlib figure with one plot for each quantity, such as the loss in training and in evaluation."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "demo", "history.plot()") from error
    recorded = list(history.get_metric_names())
    names = recorded if metric_names is None else list(metric_names)
    for name in names:
        if name not in recorded:
            raise ValueError(unknown_name("metric", name, recorded or ["none recorded yet"], where="run history"))
    quantities: dict[str, list[str]] = {}
    for name in names:
        quantities.setdefault(_quantity(name), []).append(name)
    figure = Figure(figsize=(7, 3 * max(1, len(quantities))), layout="constrained")
    if not quantities:
        return figure
    for axes, (quantity, members) in zip(figure.subplots(len(quantities), squeeze=False).flat, quantities.items()):
        for name in members:
            values = [_plain(value) for value in history.get_metric_values(name)]
            axes.plot(history.get_metric_steps(name), values, marker="." if len(values) < 50 else None, label=name)
        axes.set(xlabel="step (batches)", ylabel=quantity)
        axes.legend()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _rows(history: "RunHistory") -> list[dict[str, Any]]:
    """Return what was recorded, by moment; a metric recorded twice at one moment gets a second row."""
    table: dict[tuple[int, int, int], dict[str, Any]] = {}
    for name in history.get_metric_names():
        seen: Counter[tuple[int, int]] = Counter()
        for moment, value in zip(history._moments(name), history.get_metric_values(name)):
            row = table.setdefault((*moment, seen[moment]), {"epoch": moment[0], "step": moment[1]})
            row[name] = value
            seen[moment] += 1
    return [table[key] for key in sorted(table)]


def _column(title: str, values: list[Any]) -> list[str]:
    """Return the cells of one column, all of one width, under its title; None means rows left out."""
    cells = [title, *("…" if value is None else format_metric(value) for value in values)]
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]


def _quantity(name: str) -> str:
    """Return what a metric measures, without the phase it was measured in.

    >>> _quantity("train_loss_epoch"), _quantity("intermediate_eval_loss"), _quantity("lr/group0")
    ('loss', 'loss', 'lr/group0')
    """
    phase = next((phase for phase in _PHASES if name.startswith(phase)), "")
    return name.removeprefix(phase).removesuffix("_epoch")


def _plain(value: object) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
