"""The first section of a report on six or more runs: one row per run, with what varies and the metrics, to sort and to filter."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from drivetrain.experiment.directions import best_places, direction_of
from drivetrain.experiment.reports.chart import short
from drivetrain.experiment.reports.gather import (
    MetricSummary,
    RunData,
    duration,
    main_metric,
    names_of,
    varying_settings,
)
from drivetrain.experiment.reports.html import cell, section

MANY = 6
"""From so many runs on a report begins with this table, and shows what has a column per run on demand."""
MAX_METRICS, MAX_CURVES = 12, 8
FILTER_HELP = "words, or comparisons such as lr<0.1 and state=finished; all must match"


def runs_table(runs: Sequence[RunData]) -> str:
    """Return the section; the best value of each metric whose direction is known is marked."""
    names = names_of(runs)
    columns: list[tuple[str, list[str]]] = [
        ("state", [_cell(run.record.state, text=_badge(run.record.state)) for run in runs]),
    ]
    for name, values in varying_settings([run.record for run in runs]).items():
        columns.append((name, [_cell(value) for value in values]))
    columns += _metrics(runs)
    seconds = [run.record.status.get("seconds") for run in runs]
    columns.append(("duration", [_cell(value, text=escape(duration(value))) for value in seconds]))
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>'
        for name in ("run", *(name for name, _ in columns))
    )
    rows = "".join(
        f'<tr><th scope="row" title="{escape(str(run.record.folder))}">{escape(names[place])}</th>'
        + "".join(cells[place] for _, cells in columns)
        + "</tr>"
        for place, run in enumerate(runs)
    )
    search = (
        f'<p class="search"><label>filter <input type="search" placeholder="{escape(FILTER_HELP)}"></label> '
        f'<output aria-live="polite">{len(runs)} runs</output></p>'
    )
    body = (
        f'<div class="table"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return section("Runs", search + body)


def drawn_runs(runs: Sequence[RunData]) -> tuple[list[int], str]:
    """Return the positions of the runs whose curves are drawn, and a sentence where they are not all: the best eight."""
    if len(runs) <= MAX_CURVES:
        return list(range(len(runs))), ""
    found = [{entry.tag: entry for entry in run.metrics()} for run in runs]
    tag = main_metric(dict.fromkeys(tag for own in found for tag in own))
    good = None if tag is None else _direction(runs, found, tag)
    if tag is None or good is None:
        return list(range(MAX_CURVES)), f"The first {MAX_CURVES} of {len(runs)} runs; name fewer runs to see others."

    def rank(place: int) -> tuple[bool, float]:
        best = found[place][tag].best if tag in found[place] else None
        is_known = best is not None and math.isfinite(best)
        return (not is_known, (best if good == "min" else -best) if best is not None and is_known else 0.0)

    chosen = sorted(range(len(runs)), key=rank)[:MAX_CURVES]
    return sorted(chosen), f"The best {MAX_CURVES} of {len(runs)} runs by {tag}; name fewer runs to see others."


def _direction(runs: Sequence[RunData], found: Sequence[Mapping[str, MetricSummary]], tag: str) -> str | None:
    """Return the direction of a metric on which all runs that have it agree."""
    directions = {direction_of(tag, run.directions) for run, own in zip(runs, found) if tag in own}
    return directions.pop() if len(directions) == 1 else None


def _metrics(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return a column per metric: the best value where its direction is known, else the last; the most telling metric first."""
    found = [{entry.tag: entry for entry in run.metrics()} for run in runs]
    tags = list(dict.fromkeys(tag for own in found for tag in own))
    first = main_metric(tags)
    tags = [tag for tag in tags if tag == first] + [tag for tag in tags if tag != first]
    columns = []
    for tag in tags[:MAX_METRICS]:
        good = _direction(runs, found, tag)
        entries = [own.get(tag) for own in found]
        values = [None if entry is None else entry.best if good else entry.last for entry in entries]
        stars = best_places(values, good)
        cells = [_cell(value, is_best=place in stars) for place, value in enumerate(values)]
        columns.append((f"{tag} ({'best' if good else 'last'})", cells))
    return columns


def _cell(value: Any, *, text: str | None = None, is_best: bool = False) -> str:
    """Return a cell with the value to sort by; `text` is ready HTML."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    key = ("" if math.isnan(value) else repr(value)) if is_number else "" if value is None else str(value)
    shown = text if text is not None else "–" if value is None else short(float(value)) if is_number else cell(value)
    kind = "number" if is_number else "value"
    mark = '<span title="the best of these runs"> ★</span>' if is_best else ""
    return f'<td class="{kind}{" best" if is_best else ""}" data-key="{escape(key)}">{shown}{mark}</td>'


def _badge(state: str) -> str:
    return f'<span class="badge {escape(state)}">{escape(state)}</span>'


MANY_STYLE = """
.sortable th[scope=col] button { all: unset; cursor: pointer; white-space: nowrap; }
.sortable th[scope=col] button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.sortable th[aria-sort=ascending] button::after { content: " ▲"; } .sortable th[aria-sort=descending] button::after { content: " ▼"; }
td.best { background: var(--mark); font-weight: 600; }
.search { display: flex; gap: 12px; align-items: center; } .search label { flex: 1; display: flex; gap: 8px; }
.search input { flex: 1; min-width: 0; font: inherit; color: inherit; background: var(--card); border: 1px solid var(--edge);
  border-radius: 6px; padding: 3px 9px; }
"""

MANY_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], rows = [...body.rows];
  const parts = table.closest("section"), input = parts.querySelector("input"), count = parts.querySelector("output");
  const key = (row, column) => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const number = text => text.trim() === "" ? NaN : Number(text === "inf" ? Infinity : text === "-inf" ? -Infinity : text);
  const order = (a, b) => {
    const x = number(a), y = number(b);
    return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
  };
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const empty = row => key(row, column) === "";
    rows.sort((a, b) => empty(a) - empty(b) || sign * order(key(a, column), key(b, column)));
    body.append(...rows);
  }));
  const names = heads.map(head => head.textContent.toLowerCase());
  const find = name => names.findIndex(own => own === name || own === name + " (best)" || own === name + " (last)");
  const holds = (row, condition) => {
    const found = condition.match(/^([^<>=!~]+)(<=|>=|!=|=|<|>|~)(.+)$/), column = found ? find(found[1].toLowerCase()) : -1;
    if (column < 0) return row.textContent.toLowerCase().includes(condition.toLowerCase());
    const own = key(row, column), wanted = found[3], x = number(own), y = number(wanted), numeric = !isNaN(x) && !isNaN(y);
    const same = numeric ? x === y : own.toLowerCase() === wanted.toLowerCase();
    switch (found[2]) {
      case "=": return same;
      case "!=": return !same;
      case "~": return own.toLowerCase().includes(wanted.toLowerCase());
      case "<": return numeric && x < y;
      case ">": return numeric && x > y;
      case "<=": return numeric && x <= y;
      default: return numeric && x >= y;
    }
  };
  input.addEventListener("input", () => {
    const text = input.value.replace(/\\s*(<=|>=|!=|=|<|>|~)\\s*/g, "$1");
    const conditions = text.split(/\\s+/).filter(word => word && word.toLowerCase() !== "and");
    for (const row of rows) row.hidden = !conditions.every(condition => holds(row, condition));
    const shown = rows.filter(row => !row.hidden).length;
    count.textContent = shown === rows.length ? `${shown} runs` : `${shown} of ${rows.length} runs`;
  });
}
"""
