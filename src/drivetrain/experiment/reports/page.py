"""The page: one HTML file that loads nothing, which its own content policy enforces, made of sections.

Each section takes the runs, one or several, and returns HTML; several runs are shown side by side.
"""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from drivetrain.core.display import shown_bytes
from drivetrain.core.errors import ConfigError
from drivetrain.experiment.parameters import standard_parameters
from drivetrain.experiment.reports.chart import Curve, draw_chart, short
from drivetrain.experiment.reports.gather import (
    ENVIRONMENT,
    MetricSummary,
    RunData,
    differs,
    duration,
    gather_run,
    main_metric,
    moment,
    names_of,
)
from drivetrain.experiment.reports.html import SCRIPT, STYLE, block, cell, folded, number, row, section, table
from drivetrain.experiment.reports.many import MANY, MANY_SCRIPT, MANY_STYLE, drawn_runs, runs_table
from drivetrain.experiment.reports.pictures import pictures
from drivetrain.experiment.run_folder import write_text

FILE_NAME = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SPLITS = re.compile(r"^(training|train|evaluation|eval|validation|valid|val|test)[/_.]")
NOT_TRAINING = ("eval", "val", "test")


def write_report(
    runs: Sequence[str | Path], output: str | Path | None = None, *, directions: Mapping[str, str] | None = None
) -> Path:
    """Write the report of one or several run folders and return the file; one run's goes into its own folder by default."""
    if not runs:
        raise ConfigError("a report needs at least one run folder, such as output/digits/2026-01-31_12-00-00_ab12cd.")
    data = [gather_run(folder, directions=directions) for folder in runs]
    path = Path(output) if output is not None else Path(runs[0]) / FILE_NAME if len(data) == 1 else Path(FILE_NAME)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, make_page(data))
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {path}: {error}. Choose another place with --output."
        ) from error
    return path


def make_page(runs: Sequence[RunData]) -> str:
    """Return the HTML of a report."""
    is_wide = len(runs) >= MANY

    def beside(title: str, body: str) -> str:
        """Show a table with a column per run on demand where there are many."""
        return folded(f"{title} of all runs side by side", body) if is_wide else body

    parts = [
        runs_table(runs) if is_wide else overview(runs) if len(runs) > 1 else summary_cards(runs[0]),
        errors(runs),
        curves(runs),
        beside("Metrics", metrics(runs)),
        pictures(runs),
        beside("Parameters", parameters(runs)),
        plan(runs),
        beside("Environment", environment(runs)),
        checkpoints(runs),
        texts_and_log(runs),
    ]
    style, script = (STYLE + MANY_STYLE, SCRIPT + MANY_SCRIPT) if is_wide else (STYLE, SCRIPT)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – Drivetrain</title><style>{style}</style></head>\n"
        f"<body>{_header(runs, title)}<main>{''.join(parts)}</main>{_footer()}<script>{script}</script></body></html>\n"
    )


def _header(runs: Sequence[RunData], title: str) -> str:
    if len(runs) > 1:
        return f"<header><h1>{escape(title)}</h1></header>"
    record = runs[0].record
    badge = f'<span class="badge {escape(record.state)}">{escape(record.state)}</span>'
    trial = record.manifest.get("trial") or {}
    details = [f"started {moment(record.started)}", str(record.folder)]
    details += [f"trial {trial['index']}"] if isinstance(trial, dict) and "index" in trial else []
    if record.manifest.get("resumed"):
        details.append(f"continued {len(record.manifest['resumed'])} time(s)")
    return f'<header><h1>{escape(title)} {badge}</h1><p class="soft">{escape(" · ".join(details))}</p></header>'


def _footer() -> str:
    from drivetrain import __version__

    return f"<footer>Written by Drivetrain {escape(__version__)}. This file needs no network.</footer>"


def summary_cards(run: RunData) -> str:
    """Return the numbers one looks for first."""
    record, cards = run.record, []
    summaries = {entry.tag: entry for entry in run.metrics()}
    leading = main_metric(run.series)
    shown = [leading] if leading else []
    shown += [
        tag
        for tag in summaries
        if tag not in shown and tag in ("train_loss_epoch", "train/loss", "eval_loss_epoch", "eval/loss")
    ]
    for tag in shown[:3]:
        entry = summaries[tag]
        best = "" if entry.best is None else f"; best {short(entry.best)} at step {_shown(entry.best_step)}"
        cards.append((short(entry.last), tag + best))
    known = [entry.last for entry in summaries.values()]
    cards += [(number(value), name) for name, value in run.summary.items() if value not in known][:3]
    if isinstance(record.status.get("step"), int):
        cards.append((f"{record.status['step']:,}", "steps"))
    cards.append((duration(record.status.get("seconds")), "duration"))
    devices = ", ".join(map(str, record.manifest.get("devices") or ["unknown"]))
    processes = record.manifest.get("processes") or 1
    cards.append((devices, "one process" if processes == 1 else f"{processes} processes"))
    parts = "".join(
        f'<div class="card"><b>{escape(str(value))}</b><span>{escape(label)}</span></div>' for value, label in cards
    )
    return f'<div class="cards">{parts}</div>'


def overview(runs: Sequence[RunData]) -> str:
    """Return one line per run, for several runs."""
    rows = []
    for name, run in zip(names_of(runs), runs):
        record = run.record
        state = f'<span class="badge {escape(record.state)}">{escape(record.state)}</span>'
        cells = (state, moment(record.started), duration(record.status.get("seconds")), escape(str(record.folder)))
        rows.append(row(name, cells, cell_kind=""))
    return section("Runs", table(["run", "state", "started", "duration", "folder"], rows))


def errors(runs: Sequence[RunData]) -> str:
    """Return what went wrong, in the runs and in reading them."""
    parts = []
    for name, run in zip(names_of(runs), runs):
        problems = [str(run.record.status["error"])] if run.record.status.get("error") else []
        problems += run.notes
        parts += [block(f"{name}: {text}" if len(runs) > 1 else text, "wrapped error") for text in problems]
    return section("Errors", *parts)


def curves(runs: Sequence[RunData]) -> str:
    """Return a chart per quantity: training and evaluation of the same quantity share one, and so do all runs."""
    chosen, choice = drawn_runs(runs)
    charts: dict[str, list[tuple[int, str]]] = {}
    for place in chosen:
        for tag in runs[place].series:
            charts.setdefault(SPLITS.sub("", tag), []).append((place, tag))
    names, figures = names_of(runs), []
    for title, members in charts.items():
        tags = list(dict.fromkeys(tag for _, tag in members))
        lines = []
        for place, tag in members:
            label = tag if len(runs) == 1 else names[place] if len(tags) == 1 else f"{names[place]}: {tag}"
            is_dashed = len(runs) > 1 and len(tags) > 1 and tag.startswith(NOT_TRAINING)
            color = tags.index(tag) if len(runs) == 1 else chosen.index(place)
            lines.append(Curve(label=label, points=runs[place].series[tag], color=color, is_dashed=is_dashed))
        figures.append(draw_chart(lines, tags[0] if len(tags) == 1 else title))
    note = f'<p class="soft">{escape(choice)}</p>' if choice else ""
    return section("Curves", f'{note}<div class="charts">{"".join(figures)}</div>' if figures else "")


def metrics(runs: Sequence[RunData]) -> str:
    """Return last and best values."""
    if len(runs) == 1:
        rows = [_metric_row(entry) for entry in runs[0].metrics()]
        head = ["metric", "last", "best", "at step", "values"]
        return section("Metrics", table(head, rows, numbers_from=1) if rows else "")
    found = [{entry.tag: entry for entry in run.metrics()} for run in runs]
    rows = []
    for tag in dict.fromkeys(tag for entries in found for tag in entries):
        own = [entries.get(tag) for entries in found]
        last = [_shown(None if entry is None else entry.last) for entry in own]
        best = [_shown(None if entry is None else entry.best) for entry in own]
        rows.append(row(f"{tag} (last)", last, _same(last), "number"))
        if any(entry is not None and entry.best is not None for entry in own):
            rows.append(row(f"{tag} (best)", best, _same(best), "number"))
    return section("Metrics", _compared(["metric", *names_of(runs)], rows, numbers_from=1) if rows else "")


def _metric_row(entry: MetricSummary) -> str:
    return row(
        entry.tag,
        [short(entry.last), _shown(entry.best), _shown(entry.best_step), f"{entry.count:,}"],
        cell_kind="number",
    )


def _shown(value: float | None) -> str:
    return "–" if value is None else short(value)


def _same(values: Sequence[object]) -> str:
    return "differs" if differs(values) else "same"


def _compared(head: list[str], rows: list[str], *, numbers_from: int | None = None) -> str:
    switch = '<label class="only-differing"><input type="checkbox"> only what differs</label>'
    return switch + table(head, rows, numbers_from=numbers_from)


def parameters(runs: Sequence[RunData]) -> str:
    """Return every parameter with its value and, for one run, where it came from: given ones, the experiment's own, the others."""
    common = {parameter.name for parameter in standard_parameters()}
    given = {
        name for run in runs for name, origin in run.record.origins.items() if origin not in ("default", "defaults")
    }
    every = dict.fromkeys(name for run in runs for name in run.record.settings)
    ordered = sorted(every, key=lambda name: (name not in given, name in common))
    if len(runs) == 1:
        record = runs[0].record
        rows = [
            row(
                name,
                [cell(record.parameters[name]), escape(record.origins.get(name, ""))],
                "set" if name in given else "",
            )
            for name in ordered
        ]
        return section("Parameters", table(["parameter", "value", "from"], rows) if rows else "")
    rows = []
    for name in ordered:
        values = [run.record.parameters.get(name, "–") for run in runs]
        rows.append(row(name, map(cell, values), _same(values)))
    return section("Parameters", _compared(["parameter", *names_of(runs)], rows) if rows else "")


def plan(runs: Sequence[RunData]) -> str:
    """Return the plan each run's strategy chose."""
    parts = []
    for name, run in zip(names_of(runs), runs):
        chosen = run.record.manifest.get("plan")
        if chosen:
            text = chosen if isinstance(chosen, str) else json.dumps(chosen, indent=2, ensure_ascii=False)
            parts.append((f"<h3>{escape(name)}</h3>" if len(runs) > 1 else "") + block(text))
    return section("Plan", *parts)


def environment(runs: Sequence[RunData]) -> str:
    """Return machine, versions and code, with packages and uncommitted changes to unfold."""
    manifests = [run.record.manifest for run in runs]
    rows = []
    for name, read in ENVIRONMENT:
        values = [read(manifest) for manifest in manifests]
        if any(value not in (None, "") for value in values):
            texts = ["–" if value in (None, "") else cell(value) for value in values]
            rows.append(row(name, texts, _same(values) if len(runs) > 1 else ""))
    if not rows:
        return ""
    head = ["", *names_of(runs)]
    body = table(["", ""], rows) if len(runs) == 1 else _compared(head, rows)
    return section("Environment", body, _packages(manifests, head), *_diffs(runs))


def _packages(manifests: Sequence[dict[str, Any]], head: list[str]) -> str:
    found = [manifest.get("packages") or {} for manifest in manifests]
    rows = []
    for name in sorted({name for packages in found for name in packages}, key=str.lower):
        values = [packages.get(name, "–") for packages in found]
        rows.append(row(name, map(cell, values), _same(values) if len(found) > 1 else ""))
    return folded(f"Packages ({len(rows)})", table(["package", *head[1:]], rows)) if rows else ""


def _diffs(runs: Sequence[RunData]) -> list[str]:
    parts = []
    for name, run in zip(names_of(runs), runs):
        diff = (run.record.manifest.get("git") or {}).get("diff")
        if diff:
            title = "Uncommitted changes" + (f" of {name}" if len(runs) > 1 else "")
            parts.append(folded(title, f'<pre class="block">{colored_diff(diff)}</pre>'))
    return parts


def colored_diff(diff: str) -> str:
    """Return a git diff with added and removed lines marked."""
    kinds = {"+": "added", "-": "removed"}
    lines = [
        f'<span class="{kinds[line[0]]}">{escape(line)}</span>' if line[:1] in kinds else escape(line)
        for line in diff.splitlines()
    ]
    return "\n".join(lines)


def checkpoints(runs: Sequence[RunData]) -> str:
    """Return the checkpoints of each run with what is known about them."""
    parts = []
    for name, run in zip(names_of(runs), runs):
        rows = []
        for line in run.checkpoints:
            marks = ", ".join(word for word, holds in (("last", line.is_last), ("best", line.is_best)) if holds)
            progress = [number(line.progress.get(unit, "–")) for unit in ("ep", "st", "sp")]
            verdict = "valid" if line.problem is None else f"damaged: {line.problem}"
            rows.append(row(line.name, [*progress, shown_bytes(line.size), marks, cell(verdict)], cell_kind=""))
        if rows:
            heading = f"<h3>{escape(name)}</h3>" if len(runs) > 1 else ""
            parts.append(heading + table(["checkpoint", "epoch", "step", "samples", "size", "", "state"], rows))
    return section("Checkpoints", *parts)


def texts_and_log(runs: Sequence[RunData]) -> str:
    """Return recorded texts and the last lines of each log."""
    parts = []
    for name, run in zip(names_of(runs), runs):
        owner = f"{name}: " if len(runs) > 1 else ""
        parts += [folded(f"{owner}{tag}", block(text, "wrapped")) for tag, text in run.texts.items()]
        parts.append(folded(f"{owner}last lines of the log", block(run.log_tail)))
    return section("Log", *parts)
