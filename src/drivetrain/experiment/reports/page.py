"""The page: one HTML file that loads nothing, which its own content policy enforces.

Style, script and the charting library are files in `assets`, written into the page as they are. The runs are JSON in an element that is not
a script, in which no text can end the element. The policy allows only these scripts, by their hash.
"""

import functools
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from drivetrain.core.display import printable, printable_lines
from drivetrain.core.errors import ConfigError
from drivetrain.experiment.records import read_run
from drivetrain.experiment.reports.data import Blobs, Limits, main_objective, run_as_data
from drivetrain.experiment.reports.gather import RunData, gather_run
from drivetrain.experiment.run_folder import write_text
from drivetrain.experiment.summaries import summary_of

FILE_NAME = "report.html"
SAMPLE = 4
ASSETS = Path(__file__).with_name("assets")


def write_report(
    runs: Sequence[str | Path], output: str | Path | None = None, *, directions: Mapping[str, str] | None = None
) -> Path:
    """Write the report of one or several run folders and return the file; one run's goes into its own folder by default."""
    if not runs:
        raise ConfigError("a report needs at least one run folder, such as output/digits/2026-01-31_12-00-00_ab12cd.")
    path = Path(output) if output is not None else Path(runs[0]) / FILE_NAME if len(runs) == 1 else Path(FILE_NAME)
    if path.is_dir():
        path = path / FILE_NAME
    sample = runs[:: -(-len(runs) // SAMPLE)]  # a few runs are enough to estimate the number of curves
    num_curves = len(runs) * max(len(summary_of(read_run(folder).metrics_path).tags) for folder in sample)
    limits = Limits.share(len(runs), num_curves)
    page = make_page((gather_run(folder, directions=directions) for folder in runs), limits)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {path}: {error}. Choose another path with --output."
        ) from error
    return path


def make_page(runs: Iterable[RunData], limits: Limits | None = None) -> str:
    """Return the HTML of a report; runs are read one after the other, and none is kept."""
    blobs = Blobs()
    data = [run_as_data(run, blobs, limits or Limits()) for run in runs]
    return render_page({"version": 0, "runs": data, "blobs": blobs.texts, "objective": main_objective(data)})


def render_page(data: Mapping[str, Any], *, is_live: bool = False) -> str:
    """Return the HTML around data; a live page asks its server for what has changed."""
    from drivetrain import __version__

    runs = data["runs"]
    title = f"{runs[0]['experiment']}/{runs[0]['name']}" if len(runs) == 1 else f"{len(runs)} runs"
    parts = {
        "policy": escape(policy(is_live)),
        "title": escape(printable(title)),
        "version": escape(__version__),
        "style": _style(),
        "licence": _asset("uPlot.LICENSE"),
        "uplot": _asset("uPlot.iife.min.js"),
        "script": _script(),
        "data": as_json({**data, "live": is_live}),
    }
    # One pass, so that texts of runs stay as they are.
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], _asset("report.html"))


def as_json(data: object) -> str:
    """Return data as JSON that can end neither an element nor a comment, in ASCII; texts and names are `printable`."""
    return json.dumps(_visible(data), separators=(",", ":"), default=str).replace("<", "\\u003c")


def _visible(data: object) -> object:
    """Return data with the characters escaped that turn the direction of all text after them, or are not seen."""
    if isinstance(data, str):
        return printable_lines(data)
    if isinstance(data, Mapping):
        return {_visible(name): _visible(value) for name, value in data.items()}
    return [_visible(value) for value in data] if isinstance(data, list | tuple) else data


@functools.cache
def policy(is_live: bool) -> str:
    """Return the content policy: nothing is loaded, pictures are part of the page, and no other script or style counts."""
    scripts = " ".join(map(_hash, (_asset("uPlot.iife.min.js"), _script())))
    style = _hash(_style())
    rules = f"default-src 'none'; img-src data:; style-src {style}; script-src {scripts}; base-uri 'none'; form-action 'none'"
    return rules + ("; connect-src 'self'" if is_live else "")


def _style() -> str:
    return _asset("uPlot.min.css") + _asset("report.css")


def _script() -> str:
    return "".join(_asset(f"{name}.js") for name in ("runs", "charts", "forest", "plots", "report"))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
