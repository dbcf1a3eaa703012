"""From numbers to places on a chart: ranges, ticks at round numbers, and thinning that keeps every peak."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
        """Return where a value stands."""
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
