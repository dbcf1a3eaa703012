"""Alternating flip (Jordan, 2024, arXiv 2404.00498): each image is seen both ways every two epochs, instead of by chance.

Random flipping shows half of the images the same way in two epochs running. Here a hash of the sample's index decides about
the first epoch, and every epoch after that shows the other side.
"""

import torch
from torch import Tensor

from drivetrain.algorithms.utils.parts import check_images, map_tensors, warn_of_images_left
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts
from drivetrain.runtime.device import copy_to


def alternating_flip(x: Tensor, index: Tensor, epoch: int, seed: int = 0) -> Tensor:
    """Return images (N, ..., W) flipped horizontally according to a hash of their index and the epoch.

    >>> x = torch.tensor([[[[0, 1]]], [[[0, 1]]]])
    >>> sides = [alternating_flip(x, torch.tensor([3, 4]), epoch)[:, 0, 0, 0].tolist() for epoch in range(2)]
    >>> [first + second for first, second in zip(*sides)]
    [1, 1]
    """
    check_images(x, "alternating_flip")
    if index.ndim != 1 or len(index) != len(x):
        raise ConfigError(
            f"alternating_flip: index has shape {tuple(index.shape)} for {len(x)} images; expected one number for each."
        )
    is_flipped = copy_to(x.device, (hash_bits(index, seed) + epoch) % 2 == 1)
    return torch.where(is_flipped.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)


def hash_bits(index: Tensor, seed: int) -> Tensor:
    """Return the lowest bit of splitmix64(index xor seed), as 0 or 1."""
    z = (index.long() ^ seed) + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) & 1


def _signed(constant: int) -> int:
    """Return a 64-bit constant as torch's signed integers hold it; their products wrap around like unsigned ones."""
    return constant - 2**64 if constant >= 2**63 else constant


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right without dragging the sign along."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


class AlternatingFlip(Algorithm):
    """Flips images of every batch so that each sample is seen both ways every two epochs; the loader must provide sample indices.

    It acts before samples are selected, because afterwards it is unknown which ones are left.
    """

    allow_multiple = False
    events = frozenset({Event.AFTER_DATALOADER})
    reads, writes = ("batch",), ("batch",)
    before = ("SelectiveBackprop",)

    def __init__(self, seed: int = 0, input_key: BatchKey = 0):
        check_counts("AlternatingFlip", 0, seed=seed)
        self.seed, self.input_key = seed, input_key
        self._has_looked = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        index = state.sample_index
        if index is None:
            index = getattr(state.train_dataloader, "sample_index", None)
        if index is None:
            raise ConfigError(
                f"AlternatingFlip needs the sample indices of each batch, but the loader ({type(state.train_dataloader).__name__}) does "
                "not provide them. Give train() a dataset with an index, or a SmartDataLoader."
            )
        images = state.batch_get_item(self.input_key)
        if not self._has_looked:
            self._has_looked = True
            warn_of_images_left(state.batch, images, str(self))
        flipped = map_tensors(lambda x: alternating_flip(x, index, state.clock.epoch, self.seed), images)
        state.batch_set_item(self.input_key, flipped)
