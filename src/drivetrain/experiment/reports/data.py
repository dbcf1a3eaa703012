"""Runs as the page gets them: plain values, curves as base64, and large texts and pictures apart, each once.

Hundreds of runs must stay one file that opens quickly, so what each run may take depends on how many there are (`Limits`).
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.display import format_bytes, shortened
from drivetrain.core.files import read_limited
from drivetrain.core.plain import spelled
from drivetrain.experiment.directions import direction_of
from drivetrain.experiment.parameters import standard_parameters
from drivetrain.experiment.records import read_remarks, short_id
from drivetrain.experiment.reports.curves import MOST_HISTOGRAMS, MOST_POINTS, Curve, DownsampledSequence, encode
from drivetrain.experiment.reports.gather import (
    PICTURE_TYPES,
    PictureFile,
    RunData,
    common_objective,
    distinguishing_parameters,
    environment_of,
    main_metric,
)

ALL_POINTS, ALL_CURVES, ALL_HISTOGRAMS, ALL_BYTES = 1_000_000, 30_000, 6_000, 24_000_000
"""What all runs together may put into a page: points, curves, histograms, and bytes of pictures."""
LARGEST_PICTURE = 4_000_000
PER_TAG = 24
"""Pictures of one tag."""
LONG_TEXT = 1000
"""Texts from this length on are kept apart, so that runs that share one hold it once."""
LONGEST_VALUE, LONGEST_DIFF = 2000, 200_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may put into the page."""

    points: int = MOST_POINTS
    curves: int = 2000
    histograms: int = ALL_HISTOGRAMS
    picture_bytes: int = ALL_BYTES
    diff: int = LONGEST_DIFF

    @classmethod
    def share(cls, num_runs: int, num_curves: int) -> "Limits":
        """Return the share of each of so many runs, which have so many curves together."""
        num_runs = max(1, num_runs)
        curves = max(50, min(2000, ALL_CURVES // num_runs))
        return cls(
            points=max(60, min(MOST_POINTS, ALL_POINTS // max(1, min(num_curves, curves * num_runs)))),
            curves=curves,
            histograms=max(1, ALL_HISTOGRAMS // num_runs),
            picture_bytes=ALL_BYTES // num_runs,
            diff=LONGEST_DIFF if num_runs <= 30 else 20_000,
        )


class Blobs:
    """Large texts under the hash of their content."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def keep(self, text: str) -> str | dict[str, str]:
        """Return a short text as it is, and the reference of a long one."""
        if len(text) < LONG_TEXT:
            return text
        name = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:20]
        self.texts[name] = text
        return {"blob": name}


def run_as_data(run: RunData, blobs: Blobs, limits: Limits) -> dict[str, Any]:
    """Return one run for the page."""
    record, manifest, status = run.record, run.record.manifest, run.record.status
    git = manifest.get("git") or {}
    tags, note = read_remarks(record.folder)
    shown = list(run.curves)[: limits.curves]
    pictures, left_out = _pictures(run.pictures, blobs, limits.picture_bytes)
    notes = [*run.notes]
    if len(run.curves) > len(shown):
        notes.append(f"{len(run.curves) - len(shown)} of {len(run.curves)} metrics are not shown on this page")
    if left_out:
        notes.append(f"{left_out} older or very large pictures stay in the run folder only")
    plan = manifest.get("plan")
    return {
        "objective": record.sweep_objective,
        "key": str(record.folder.resolve()),
        "id": short_id(record.folder),
        "name": record.folder.resolve().name,
        "experiment": record.experiment,
        "folder": str(record.folder),
        "state": record.state,
        "started": record.started or None,
        "seconds": status.get("seconds"),
        "steps": status.get("step"),
        "seed": plain(manifest.get("seed")),
        "trial": plain((manifest.get("trial") or {}).get("index")),
        "resumed": len(manifest.get("resumed") or []),
        "tags": tags,
        "note": note,
        "error": blobs.keep(str(status.get("error") or "")),
        "notes": notes,
        "parameters": _parameters(run),
        "telling": list(distinguishing_parameters(record)),
        "metrics": {
            tag: [
                *map(plain, (own.last, own.low, own.low_step, own.high, own.high_step, own.count)),
                direction_of(tag, run.directions),
            ]
            for tag, own in list(run.recorded.tags.items())[: limits.curves]
        },
        "results": {name: [plain(value), direction_of(name, run.directions)] for name, value in record.numbers.items()},
        "summary": plain(run.recorded.results),
        "curves": {tag: run.curves[tag].as_data(limits.points) for tag in shown},
        "clock": _clock(run.recorded.knots),
        "epochs": _epochs(run.curves),
        "histograms": _histograms(run.recorded.histograms, limits.histograms),
        "pictures": pictures,
        "checkpoints": [
            {
                "name": line.name,
                "epoch": plain(line.progress.get("ep")),
                "step": plain(line.progress.get("st")),
                "samples": plain(line.progress.get("sp")),
                "size": format_bytes(line.size),
                "marks": [word for word, holds in (("last", line.is_last), ("best", line.is_best)) if holds],
                "problem": line.problem,
            }
            for line in run.checkpoints
        ],
        "environment": {
            name: plain(value) for name, value in environment_of(manifest).items() if value not in (None, "")
        },
        "packages": blobs.keep(json.dumps(plain(manifest.get("packages") or {}))),
        "plan": blobs.keep(plan if isinstance(plan, str) else json.dumps(plan, indent=2, ensure_ascii=False))
        if plan
        else "",
        "diff": blobs.keep(shortened(str(git.get("diff") or ""), limits.diff)),
        "texts": {tag: blobs.keep(text) for tag, text in run.recorded.texts.items()},
        "log": blobs.keep(run.log_tail),
    }


def main_objective(runs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the metric, or else the returned number, by which runs are judged unless somebody chooses another."""
    runs = list(runs)
    common = common_objective(run["objective"] for run in runs)
    if any(common in run["metrics"] or common in run["results"] for run in runs):
        return common
    names = ([name for run in runs for name in run[kind]] for kind in ("metrics", "results"))
    return next((found for found in map(main_metric, names) if found is not None), None)


def plain(value: object) -> object:
    """Return a value for the page: what JSON does not know becomes text, and long texts are cut."""
    is_number = lambda one: one is None or isinstance(one, bool | int | float)
    return spelled(value, lambda one: one if is_number(one) else shortened(str(one), LONGEST_VALUE))


def _parameters(run: RunData) -> dict[str, list[Any]]:
    """Return value and origin of every parameter: given ones first, then the experiment's own, then the others."""
    record, common = run.record, {parameter.name for parameter in standard_parameters()}
    is_default = {name: record.origins.get(name, "default") in ("default", "defaults") for name in record.settings}
    ordered = sorted(record.settings, key=lambda name: (is_default[name], name in common))
    return {name: [plain(record.settings[name]), record.origins.get(name, "")] for name in ordered}


def _clock(knots: Sequence[tuple[int, float]]) -> dict[str, str] | None:
    """Return steps and the seconds since the first recorded value."""
    if not knots:
        return None
    first = min(time for _, time in knots)
    return {"x": encode([step for step, _ in knots]), "y": encode([time - first for _, time in knots])}


def _epochs(curves: Mapping[str, Curve]) -> dict[str, str] | None:
    """Return steps and epochs: from a metric `epoch`, else from the steps at which means of epochs were recorded."""
    ordered = {tag: curve for tag, curve in curves.items() if curve.is_ordered}
    means = [curve for tag, curve in ordered.items() if tag.startswith("train") and tag.endswith("_epoch")]
    if "epoch" in ordered:
        points = [(stretch.low_step, stretch.low) for stretch in ordered["epoch"].stretches if stretch.num_finite]
    elif means:
        curve = max(means, key=lambda curve: curve.count)
        points = [(part.low_step, float(1 + place * curve.size)) for place, part in enumerate(curve.stretches)]
        points.insert(0, (0, 0.0))
    else:
        return None
    return {"x": encode([step for step, _ in points]), "y": encode([epoch for _, epoch in points])}


def spread(count: int) -> list[int]:
    """Return the positions of a sequence, the most informative first: the last, the first, then halves of the gaps.

    >>> spread(5)
    [4, 0, 2, 1, 3]
    """
    order, gaps = ([count - 1, 0] if count > 1 else list(range(count))), [(0, count - 1)]
    for low, high in gaps:  # grows while it is read
        middle = (low + high) // 2
        if middle > low:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def _histograms(found: Mapping[str, DownsampledSequence], most: int) -> dict[str, list[Any]]:
    per_tag = max(1, min(MOST_HISTOGRAMS, most // max(1, len(found))))
    chosen = {}
    for tag, thinned in list(found.items())[:most]:
        entries = thinned.entries
        chosen[tag] = [entries[place] for place in sorted(spread(len(entries))[:per_tag])]
    return chosen


def _pictures(found: Sequence[PictureFile], blobs: Blobs, budget: int) -> tuple[list[dict[str, Any]], int]:
    """Return pictures over steps, the newest of each tag first in line for the bytes there are, and how many are left out."""
    by_tag: dict[str, list[PictureFile]] = {}
    for picture in found:
        by_tag.setdefault(picture.tag, []).insert(0, picture)  # from the oldest to the newest
    ranked = sorted(
        (rank, tag, place) for tag, own in by_tag.items() for rank, place in enumerate(spread(len(own))[:PER_TAG])
    )
    kept: list[dict[str, Any]] = []
    for _, tag, place in ranked:
        picture = by_tag[tag][place]
        try:
            content = read_limited(picture.path, min(LARGEST_PICTURE, budget))
        except OSError:  # too large for what is left, or gone
            continue
        budget -= len(content)
        source = f"data:{PICTURE_TYPES[picture.path.suffix.lower()]};base64,{b64encode(content).decode()}"
        kept.append({"tag": tag, "step": picture.step, "name": picture.path.name, "source": blobs.keep(source)})
    kept.sort(key=lambda entry: (entry["tag"], entry["step"] or 0, entry["name"]))
    return kept, len(found) - len(kept)
