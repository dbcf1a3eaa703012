"""The random numbers of user code inside a fetch: a function of the loader's seed and the data's place, of nothing else.

A dataset that augments draws from Python's, numpy's and torch's shared generators. Left alone, its numbers would depend on how
many workers there are, on what ran ahead and on what the training step drew. So before user code runs, the three generators are
seeded from the epoch and the place in the global order, and afterwards the caller's are restored. Pure tensor
gathers draw nothing and skip all of this.

Seeding costs about 12 µs a batch, keeping and restoring about 28 µs more (one core of an AMD EPYC server, Python 3.11, torch
2.13, numpy 2.4, median of 300), because the expensive calls are avoided: `torch.manual_seed` also visits every accelerator
(210 µs), and numpy's state is copied word by word (150 µs), so its bit generator is exchanged instead.
"""

import ctypes
import random
from typing import Any, Literal, NamedTuple

import numpy.random
import torch

RngMode = Literal["batch", "sample", "off"]

numpy_random: Any = numpy.random  # the exchange of bit generators is documented, but not in numpy's stubs

_MT19937_BYTES = 624 * 4 + 4  # the state words and the position among them


class KeptGenerators(NamedTuple):
    """The states of the caller's generators."""

    torch: torch.Tensor
    python: tuple[object, ...]
    numpy: tuple[object, float | None]


class _NumpyExchange:
    """Lends numpy's module-level functions another bit generator and takes it back.

    An exchange forgets the second half of a pair of normals that numpy may hold, and the call that would show it copies the whole
    state. Drawing a normal shows it too: where one is held, the draw leaves the bit generator untouched.
    """

    def __init__(self) -> None:
        self.spare: list[object] = []  # one to lend per level: a fetch may itself read from a loader
        self.level = 0

    def lend(self) -> tuple[object, float | None]:
        own = numpy_random.get_bit_generator()
        held = self._held_normal(own)
        if self.level == len(self.spare):
            self.spare.append(numpy_random.MT19937(0))
        numpy_random.set_bit_generator(self.spare[self.level])
        self.level += 1
        return own, held

    def take_back(self, own: object, held: float | None) -> None:
        self.level -= 1
        numpy_random.set_bit_generator(own)
        if held is not None:
            numpy_random.set_state({**numpy_random.get_state(legacy=False), "has_gauss": 1, "gauss": held})

    def _held_normal(self, own: Any) -> float | None:
        if type(own) is not numpy_random.MT19937:
            state = numpy_random.get_state(legacy=False)
            return state["gauss"] if state["has_gauss"] else None
        address = own.ctypes.state_address
        before = ctypes.string_at(address, _MT19937_BYTES)
        normal = numpy_random.standard_normal()
        if ctypes.string_at(address, _MT19937_BYTES) == before:
            return normal
        ctypes.memmove(address, before, _MT19937_BYTES)
        return None


_exchange: _NumpyExchange | None = None


def keep_generators() -> KeptGenerators:
    """Remember the three shared generators; `seed_generators` may then change them until `restore_generators`."""
    global _exchange
    if _exchange is None:
        _exchange = _NumpyExchange()
    return KeptGenerators(torch.default_generator.get_state(), random.getstate(), _exchange.lend())


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator; accelerators are left alone, a fetch does not use them."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # In a worker of a program that chose another kind.
    if type(numpy_random.get_bit_generator()) is not numpy_random.MT19937:
        numpy_random.set_bit_generator(numpy_random.MT19937(0))
    numpy_random.seed(seed % 2**32)


def restore_generators(kept: KeptGenerators) -> None:
    """Return the shared generators to where `keep_generators` found them."""
    torch.default_generator.set_state(kept.torch)
    random.setstate(kept.python)
    assert _exchange is not None
    _exchange.take_back(*kept.numpy)


class SeededGenerators:
    """`with SeededGenerators(seed): ...` runs a block on seeded generators and puts the caller's back."""

    __slots__ = ("kept", "seed")

    def __init__(self, seed: int):
        self.seed = seed

    def __enter__(self) -> None:
        self.kept = keep_generators()
        seed_generators(self.seed)

    def __exit__(self, *error: object) -> None:
        restore_generators(self.kept)
