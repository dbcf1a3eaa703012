"""Charts as SVG: scales with ticks at round numbers, thinning that keeps every peak, axes, lines and a legend.

The values are written next to the drawing, for the page's readout.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 30
MOST_POINTS = 600
SMOOTH_FROM = 120
"""Curves with more points than this are drawn thin, with their moving mean on top."""
NUM_COLORS = 8
"""Colours in the page's style sheet; more curves begin again from the first."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value."""
        low, high, value = (self._bent(number) for number in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round numbers within the range."""
        return log_ticks(self.low, self.high, count) if self.is_log else round_ticks(self.low, self.high, count)

    def _bent(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def scale_for(values: Iterable[float], start: float, end: float, *, is_log: bool = False, margin: float = 0.0) -> Scale:
    """Return a scale that shows all finite values, with a margin as a fraction of their range."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    if is_log:
        factor = (high / low) ** margin if high > low else 2.0
        return Scale(low=low / factor, high=high * factor, start=start, end=end, is_log=True)
    if low == high:
        reach = abs(low) * 0.1 or 1.0
        low, high = low - reach, high + reach
    else:
        low, high = low - (high - low) * margin, high + (high - low) * margin
    return Scale(low=low, high=high, start=start, end=end)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten.

    >>> round_ticks(0, 10, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    rough = (high - low) / max(count, 1)
    if not (rough > 0 and math.isfinite(rough)):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return powers of ten, or round numbers where the range holds fewer than two of them."""
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    if len(powers) < 2:
        return [tick for tick in round_ticks(low, high, count) if tick > 0]
    stride = max(1, math.ceil(len(powers) / max(count, 1)))
    return [10.0**power for power in powers[::stride]]


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about `most` points: the lowest and highest of each stretch, so that no peak is lost.

    >>> thin([(0, 1), (1, 9), (2, 1), (3, 1)], 2)
    [(0, 1), (1, 9)]
    """
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / max(most // 2, 1))
    kept: list[Point] = []
    for first in range(0, len(points), stretch):
        part = range(first, min(first + stretch, len(points)))
        key: Callable[[int], float] = lambda index: points[index][1]
        kept += [points[index] for index in sorted({min(part, key=key), max(part, key=key)})]
    return kept


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the exponential moving mean over about `span` values, without the pull towards the first one.

    The correction for the start is that of Adam's moments (Kingma and Ba, 2015).
    """
    decay, total, weight, smoothed = 1 - 2 / (span + 1), 0.0, 0.0, []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed.append(total / weight)
    return smoothed


def short(value: float) -> str:
    """Return a number in few characters.

    >>> short(0.1), short(12500.0), short(3e-05), short(1e6)
    ('0.1', '12.5k', '3e-05', '1M')
    """
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}" if abs(value) < 1e13 else f"{value:.3g}"
    return f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    label: str
    points: tuple[Point, ...]
    """Steps and values; a value may be NaN or infinite, which leaves a gap."""
    color: int = 0
    is_dashed: bool = False


def draw_chart(curves: Sequence[Curve], title: str, *, x_label: str = "step") -> str:
    """Return a figure with one chart; where values span decades a second, logarithmic one can be switched to."""
    shown = [_Prepared(curve) for curve in curves]
    linear = _svg(shown, x_label, is_log=False)
    scales = f'<div class="linear">{linear}</div>'
    switch = ""
    if _spans_decades(shown):
        scales += f'<div class="log">{_svg(shown, x_label, is_log=True)}</div>'
        switch = '<label class="switch"><input type="checkbox" class="to-log"> log</label>'
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true"><path class="line c{curve.color % NUM_COLORS}'
        f'{" dashed" if curve.is_dashed else ""}" d="M0 4H22"/></svg>{escape(curve.label)}</li>'
        for curve in curves
    )
    if any(prepared.means for prepared in shown):
        legend += "<li>thick: moving mean</li>"
    values = json.dumps([{"label": curve.label, "points": prepared.readout} for curve, prepared in zip(curves, shown)])
    area = json.dumps([LEFT, WIDTH - RIGHT, *_x_range(shown)])
    return (
        f'<figure class="chart" data-curves="{escape(values)}" data-area="{escape(area)}">'
        f"<figcaption>{escape(title)}{switch}</figcaption>{scales}"
        f'<ul class="legend">{legend}</ul><output class="readout" hidden></output></figure>'
    )


class _Prepared:
    """A curve split at its gaps and thinned."""

    def __init__(self, curve: Curve):
        self.curve = curve
        self.runs = [thin(part, MOST_POINTS) for part in _between_gaps(curve.points)]
        self.means: list[list[Point]] = []
        if len(curve.points) > SMOOTH_FROM:
            span = max(10, len(curve.points) // 25)
            for part in _between_gaps(curve.points):
                means = zip((x for x, _ in part), smooth([y for _, y in part], span))
                self.means.append(thin(list(means), MOST_POINTS))
        self.readout = [[x, _readable(y)] for x, y in thin(curve.points, MOST_POINTS)]

    @property
    def finite(self) -> list[Point]:
        return [point for part in self.runs for point in part]


def _readable(value: float) -> float | str:
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)  # JSON has no NaN


def _between_gaps(points: Sequence[Point]) -> list[list[Point]]:
    parts: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _spans_decades(shown: Sequence[_Prepared]) -> bool:
    values = [y for prepared in shown for _, y in prepared.finite]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 20


def _x_range(shown: Sequence[_Prepared]) -> tuple[float, float]:
    scale = _x_scale(shown)
    return scale.low, scale.high


def _x_scale(shown: Sequence[_Prepared]) -> Scale:
    return scale_for((x for prepared in shown for x, _ in prepared.curve.points), LEFT, WIDTH - RIGHT)


def _svg(shown: Sequence[_Prepared], x_label: str, *, is_log: bool) -> str:
    x = _x_scale(shown)
    values = (value for prepared in shown for _, value in prepared.finite)
    y = scale_for(values, HEIGHT - BOTTOM, TOP, is_log=is_log, margin=0.06)
    parts = [_axes(x, y, x_label)]
    for prepared in shown:
        kind = f"line c{prepared.curve.color % NUM_COLORS}" + (" dashed" if prepared.curve.is_dashed else "")
        faint = " faint" if prepared.means else ""
        parts += [_line(part, x, y, kind + faint) for part in prepared.runs]
        parts += [_line(part, x, y, kind) for part in prepared.means]
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _axes(x: Scale, y: Scale, x_label: str) -> str:
    floor, parts = HEIGHT - BOTTOM, []
    for tick in y.ticks(5):
        place = y.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 8}" y="{place + 4:.1f}">{short(tick)}</text>')
    for tick in x.ticks(6):
        place = x.place(tick)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{floor}"/>')
        parts.append(f'<text class="tick x" x="{place:.1f}" y="{floor + 15}">{short(tick)}</text>')
    parts.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}">{escape(x_label)}</text>')
    parts.append(f'<path class="frame" d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _line(points: Sequence[Point], x: Scale, y: Scale, kind: str) -> str:
    visible = [point for point in points if point[1] > 0] if y.is_log else list(points)
    if len(visible) == 1:
        return f'<circle class="{kind} dot" cx="{x.place(visible[0][0]):.1f}" cy="{y.place(visible[0][1]):.1f}" r="3"/>'
    places = "L".join(f"{x.place(step):.1f} {y.place(value):.1f}" for step, value in visible)
    return f'<path class="{kind}" d="M{places}"/>' if places else ""
