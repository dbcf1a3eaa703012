"""The penalty: each head lowers a score by its slope times the distance between query and key."""

import math

import torch
from torch import Tensor

from drivetrain.module.attention import AttentionBias


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the heads: a geometric series for powers of two, filled up from the next one otherwise.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        ratio = 2 ** (-(2 ** (3 - math.log2(heads))))
        return [ratio ** (index + 1) for index in range(heads)]
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: heads - power]


class AlibiBias(AttentionBias):
    """Slope times key position where only the past is seen, which differs from the distance by a constant per query and so makes
    the same attention; otherwise minus slope times distance."""

    slopes: Tensor

    def __init__(self, heads: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def scores(self, queries: int, keys: int) -> Tensor:
        slopes = self.slopes.float()[None, :, None, None]
        place = torch.arange(keys, device=self.slopes.device, dtype=torch.float32)
        if self.causal:
            return slopes * place
        return -slopes * (place[keys - queries :, None] - place[None, :]).abs()
