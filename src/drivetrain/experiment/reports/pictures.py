"""Pictures and histograms of runs, written into the page; what would make it too heavy is named instead."""

import base64
import struct
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from drivetrain.core.display import shown_bytes
from drivetrain.core.files import read_limited
from drivetrain.experiment.reports.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, scale_for, short
from drivetrain.experiment.reports.gather import PICTURE_TYPES, PictureFile, RunData, names_of
from drivetrain.experiment.reports.html import section

LARGEST = 4_000_000
"""Bytes of one picture that is still put into the page."""
MOST_BYTES = 24_000_000
PER_TAG = 6
LARGE_FROM = 200
"""Pictures at least this wide get more room and are not drawn with square pixels."""


def pictures(runs: Sequence[RunData]) -> str:
    """Return the newest pictures of each tag, those of all runs together, and the newest histograms."""
    budget, parts, left_out = MOST_BYTES, [], []
    owned = [(picture, name) for name, run in zip(names_of(runs), runs) for picture in run.pictures]
    owned.sort(key=lambda entry: (_family(entry[0].tag), entry[0].tag))  # stable: within a tag run by run, newest first
    for family, group in groupby(owned, key=lambda entry: _family(entry[0].tag)):
        figures: list[str] = []
        seen: Counter[tuple[str, str]] = Counter()
        for picture, name in group:
            size = picture.path.lstat().st_size
            seen[picture.tag, name] += 1
            if size > min(LARGEST, budget) or seen[picture.tag, name] > PER_TAG:
                left_out.append(f"{picture.path.name} of {picture.tag} ({shown_bytes(size)})")
                continue
            budget -= size
            own = picture.tag.removeprefix(family).lstrip("/")
            figures.append(_figure(picture, [own, name if len(runs) > 1 else ""]))
        if figures:
            parts.append(f'<h3>{escape(family)}</h3><div class="pictures">{"".join(figures)}</div>')
    if left_out:
        shown = ", ".join(left_out[:6]) + (", …" if len(left_out) > 6 else "")
        parts.append(
            f'<p class="soft">{len(left_out)} older or very large pictures stay in the run folder only: {escape(shown)}.</p>'
        )
    return section("Pictures", *parts, _histograms(runs))


def _family(tag: str) -> str:
    """Return what tags such as `mistakes/3` and `mistakes/5` have in common."""
    return tag.rpartition("/")[0] or tag


def _figure(picture: PictureFile, words: list[str]) -> str:
    data = read_limited(picture.path, LARGEST)
    kind = PICTURE_TYPES[picture.path.suffix.lower()]
    large = " large" if _width(data) >= LARGE_FROM else ""
    step = "" if picture.step is None else f"step {picture.step}"
    caption = escape(", ".join(filter(None, (*words, step))))
    source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return f'<figure class="picture{large}"><img src="{source}" alt="{escape(picture.tag)}"><figcaption>{caption}</figcaption></figure>'


def _width(data: bytes) -> int:
    """Return the width of a PNG; other formats are photographs or plots, hence large."""
    is_png = data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24
    return int(struct.unpack(">I", data[16:20])[0]) if is_png else LARGE_FROM


def _histograms(runs: Sequence[RunData]) -> str:
    figures = []
    for name, run in zip(names_of(runs), runs):
        for tag, histogram in run.histograms.items():
            title = f"{tag}, step {histogram['step']}" + (f", {name}" if len(runs) > 1 else "")
            drawn = _bars(histogram)
            if drawn:
                figures.append(f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{drawn}</figure>')
    return f'<h3>Histograms</h3><div class="charts">{"".join(figures)}</div>' if figures else ""


def _bars(histogram: dict[str, Any]) -> str:
    """Return a histogram as SVG, nothing where the recorded values do not make one."""
    counts = histogram.get("counts")
    low, high = histogram.get("low"), histogram.get("high")
    if (
        not isinstance(counts, list)
        or not counts
        or not isinstance(low, int | float)
        or not isinstance(high, int | float)
    ):
        return ""
    if not all(isinstance(count, int | float) and count >= 0 for count in counts) or not max(counts) > 0:
        return ""
    x = scale_for((low, high), LEFT, WIDTH - RIGHT)
    y = scale_for((0, max(counts)), HEIGHT - BOTTOM, TOP)
    width = (x.end - x.start) / len(counts)
    parts = []
    for place, count in enumerate(counts):
        top = y.place(count)
        parts.append(
            f'<rect class="bar" x="{x.start + place * width:.1f}" y="{top:.1f}" width="{max(width - 1, 0.5):.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}"/>'
        )
    parts += [
        f'<text class="tick y" x="{LEFT - 8}" y="{y.place(tick) + 4:.1f}">{short(tick)}</text>' for tick in y.ticks(4)
    ]
    parts += [
        f'<text class="tick x" x="{x.place(tick):.1f}" y="{HEIGHT - BOTTOM + 15}">{short(tick)}</text>'
        for tick in x.ticks(6)
    ]
    parts.append(f'<path class="frame" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
