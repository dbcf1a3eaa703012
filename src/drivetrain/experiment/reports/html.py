"""The pieces of HTML that every section is made of, the style and the script; all text from runs goes through `escape`."""

import json
from collections.abc import Iterable, Sequence
from html import escape

from drivetrain.experiment.reports.chart import short

LONGEST_VALUE = 400


def cell(value: object) -> str:
    """Return a value as escaped text, cut where it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return escape(text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…")


def table(head: Sequence[str], rows: Iterable[str], *, numbers_from: int | None = None) -> str:
    """Return a table; rows are ready `<tr>` elements."""
    columns = "".join(
        f'<th scope="col"{" class=number" if numbers_from is not None and place >= numbers_from else ""}>{escape(name)}</th>'
        for place, name in enumerate(head)
    )
    return f'<div class="table"><table><thead><tr>{columns}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(name: str, values: Iterable[str], kind: str = "", cell_kind: str = "value") -> str:
    """Return a table row from a name and ready, escaped values."""
    cells = "".join(f'<td class="{cell_kind}">{value}</td>' for value in values)
    return f'<tr class="{kind}"><th scope="row">{escape(name)}</th>{cells}</tr>'


def section(title: str, *parts: str) -> str:
    """Return a titled section, nothing when it would be empty."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def folded(title: str, body: str) -> str:
    """Return a part that opens on demand."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def block(text: str, kind: str = "") -> str:
    """Return preformatted text."""
    return f'<pre class="block {kind}">{escape(text)}</pre>' if text else ""


def number(value: object) -> str:
    """Return a number as tables show it, anything else as text."""
    return short(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else cell(value)


STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #5c6672; --edge: #dfe3e8;
  --accent: #2457c5; --good: #17784a; --bad: #b42318; --warn: #8a5a00; --mark: #fff5d6;
  --c0: #2457c5; --c1: #d9480f; --c2: #17784a; --c3: #9c36b5; --c4: #0b7285; --c5: #a61e4d; --c6: #5f6b00; --c7: #495057; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1c2026; --text: #e6e9ed; --soft: #9aa4b0; --edge: #323943;
  --accent: #7ea6ff; --good: #5fd09a; --bad: #ff8f85; --warn: #f0c060; --mark: #3a3215;
  --c0: #7ea6ff; --c1: #ff9d66; --c2: #5fd09a; --c3: #d9a0ee; --c4: #66c9dc; --c5: #f58fb4; --c6: #c5cf5a; --c7: #b8c0c8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, header { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 26px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 18px 0 6px; overflow-wrap: anywhere; }
p { margin: 4px 0; }
.soft { color: var(--soft); }
.badge { display: inline-block; padding: 0 9px; border-radius: 10px; border: 1px solid currentColor; font-size: 12px; line-height: 19px;
  vertical-align: 2px; white-space: nowrap; }
.finished { color: var(--good); } .failed, .lost { color: var(--bad); } .interrupted { color: var(--warn); }
.running { color: var(--accent); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 12px; margin-top: 18px; }
.card, .chart, .table, .block { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
.card { padding: 10px 14px; min-width: 0; }
.card b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px; }
.chart { margin: 0; padding: 12px 14px 8px; position: relative; min-width: 0; }
.chart figcaption { display: flex; justify-content: space-between; gap: 10px; font-weight: 600; font-size: 14px; overflow-wrap: anywhere; }
.chart svg { display: block; width: 100%; height: auto; }
.switch { font-weight: 400; font-size: 12.5px; color: var(--soft); white-space: nowrap; cursor: pointer; }
.chart .log, .chart:has(.to-log:checked) .linear { display: none; }
.chart:has(.to-log:checked) .log { display: block; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.line.faint { opacity: .28; stroke-width: 1; } .line.dashed { stroke-dasharray: 5 4; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
.grid { stroke: var(--edge); stroke-width: 1; } .frame { fill: none; stroke: var(--soft); stroke-width: 1; }
.bar { fill: var(--c0); opacity: .8; }
.cursor { stroke: var(--soft); stroke-width: 1; visibility: hidden; }
text { fill: var(--soft); font-size: 11.5px; } .tick.y, .name { text-anchor: end; } .tick.x { text-anchor: middle; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 0;
  padding: 0; font-size: 12.5px; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 6px; overflow-wrap: anywhere; min-width: 0; }
.chart svg.key { width: 22px; height: 8px; flex: none; }
.readout { position: absolute; top: 42px; right: 24px; background: var(--card); border: 1px solid var(--edge); border-radius: 6px;
  padding: 5px 9px; font-size: 12px; line-height: 1.45; white-space: pre; pointer-events: none; font-variant-numeric: tabular-nums; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 5px 14px; border-top: 1px solid var(--edge); vertical-align: top; overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; }
thead th, th[scope=col] { color: var(--soft); font-weight: 500; font-size: 12.5px; }
tbody th { font-weight: 500; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } th.number { text-align: right; }
td.value { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
tr.set > th { font-weight: 700; } tr.differs > td.value, tr.differs > td.number { background: var(--mark); }
.only-differing { font-size: 13px; color: var(--soft); cursor: pointer; display: inline-block; margin: 0 0 8px; }
section:has(.only-differing input:checked) tr.same { display: none; }
details { margin-top: 10px; } summary { cursor: pointer; font-size: 14px; }
.block { margin: 8px 0 0; padding: 12px 14px; overflow: auto; max-height: 460px;
  font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre; tab-size: 4; }
.block.wrapped { white-space: pre-wrap; overflow-wrap: anywhere; }
.error { border-color: var(--bad); color: var(--bad); }
.added { color: var(--good); } .removed { color: var(--bad); }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }
.picture { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 8px; text-align: center; }
.picture img { max-width: 100%; min-width: 60%; image-rendering: pixelated; border-radius: 3px; }
.picture.large { grid-column: span 2; } .picture.large img { image-rendering: auto; }
.picture figcaption { font-size: 12px; color: var(--soft); }
footer { max-width: 1240px; margin: 40px auto 24px; padding: 0 20px; color: var(--soft); font-size: 12.5px; }
@media print { body { background: #fff; } details > * { display: block; }
  .chart, .card { break-inside: avoid; } .switch, .only-differing { display: none; } }
"""

SCRIPT = """
for (const chart of document.querySelectorAll(".chart[data-curves]")) {
  const curves = JSON.parse(chart.dataset.curves), [left, right, low, high] = JSON.parse(chart.dataset.area);
  const readout = chart.querySelector(".readout");
  const nearest = (points, step) => {
    let first = 0, last = points.length - 1;
    while (last - first > 1) { const middle = (first + last) >> 1; points[middle][0] <= step ? first = middle : last = middle; }
    return points[step - points[first][0] <= points[last][0] - step ? first : last];
  };
  for (const svg of chart.querySelectorAll("svg[role=img]")) {
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      if (x < left || x > right) return;
      const step = low + (x - left) / (right - left) * (high - low);
      const found = curves.filter(curve => curve.points.length).map(curve => [curve.label, nearest(curve.points, step)]);
      readout.textContent = found.map(([label, [at, value]]) => `${value}  ${label} @ ${at}`).join("\\n");
      readout.hidden = !found.length;
      readout.style.right = x > (left + right) / 2 ? "auto" : "24px";
      readout.style.left = x > (left + right) / 2 ? "70px" : "auto";
      cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.visibility = "visible";
    });
    svg.addEventListener("pointerleave", () => { readout.hidden = true; cursor.style.visibility = "hidden"; });
  }
}
document.documentElement.dataset.ready = "yes";
"""
