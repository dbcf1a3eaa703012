"""The page as a whole: one HTML file that loads nothing, which its own content policy enforces."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from drivetrain.core.errors import ConfigError
from drivetrain.experiment.reports import sections
from drivetrain.experiment.reports.gather import RunData, gather_run
from drivetrain.experiment.reports.html import moment
from drivetrain.experiment.reports.pictures import pictures
from drivetrain.experiment.reports.style import SCRIPT, STYLE
from drivetrain.experiment.run_folder import write_text

FILE_NAME = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report of one or several run folders and return the file; one run's goes into its own folder by default."""
    if not runs:
        raise ConfigError("a report needs at least one run folder, such as output/digits/2026-01-31_12-00-00_ab12cd.")
    data = [gather_run(folder) for folder in runs]
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
    parts = [
        sections.overview(runs) if len(runs) > 1 else sections.summary_cards(runs[0]),
        sections.errors(runs),
        sections.curves(runs),
        sections.metrics(runs),
        pictures(runs),
        sections.parameters(runs),
        sections.plan(runs),
        sections.environment(runs),
        sections.checkpoints(runs),
        sections.texts_and_log(runs),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – Drivetrain</title><style>{STYLE}</style></head>\n"
        f"<body>{_header(runs, title)}<main>{''.join(parts)}</main>{_footer()}<script>{SCRIPT}</script></body></html>\n"
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
