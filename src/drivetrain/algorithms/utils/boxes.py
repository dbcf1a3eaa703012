"""Random boxes in images, as CutOut and CutMix cut them."""

from drivetrain.algorithms.utils.draws import Generator, draw_integer

Box = tuple[int, int, int, int]
"""First row, first column, and the row and column after the last."""


def draw_box(image: tuple[int, int], box: tuple[int, int], uniform: bool, generator: Generator = None) -> Box:
    """Return a box of the given height and width around a random place, clipped to the image.

    With `uniform` the centre may lie outside, so that every pixel is covered equally often.
    """
    (top, bottom), (left, right) = (_span(side, length, uniform, generator) for side, length in zip(image, box))
    return top, left, bottom, right


def _span(side: int, length: int, uniform: bool, generator: Generator) -> tuple[int, int]:
    low, high = (-length // 2, side + length // 2) if uniform else (0, side)
    centre = draw_integer(low, high, generator)
    return _clip(centre - length // 2, side), _clip(centre + length // 2, side)


def _clip(value: int, side: int) -> int:
    return min(max(value, 0), side)
