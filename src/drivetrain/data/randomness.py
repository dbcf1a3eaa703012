"""The random numbers of user code inside a fetch: a function of the loader's seed and the data's place, of nothing else.

A dataset that augments draws from the shared generators of Python, numpy and torch. Before user code runs they are seeded from the epoch
and the place in the global order, and afterwards the caller's are restored. Pure tensor gathers draw nothing and skip this.

Seeding costs about 7 µs a batch, saving and restoring another 7 (one core of an AMD EPYC server, Python 3.11, torch 2.13, numpy 2.4,
CPU time, least of 15 blocks of 300), because the expensive calls are avoided: `torch.manual_seed` also visits every accelerator (210 µs),
numpy's state is copied word by word (150 µs), so its bit generator is exchanged, and Python's is copied as memory (9 µs as 625 numbers).
"""

import ctypes
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, Literal

import numpy.random
import torch

from drivetrain.runtime.codec import pack, unpack
from drivetrain.runtime.coders import generator_kind
from drivetrain.runtime.seeds import MT19937_BYTES, PYTHON_MEMORY, held_normal

RngMode = Literal["batch", "sample", "off"]

numpy_random: Any = numpy.random  # the exchange of bit generators is documented, but not in numpy's stubs

_spare: list[object] = []  # bit generators to lend: a fetch may itself read from a loader


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator; accelerators are left alone, a fetch does not use them."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # In a worker of a program that chose another kind.
    if type(numpy_random.get_bit_generator()) is not numpy_random.MT19937:
        numpy_random.set_bit_generator(numpy_random.MT19937(0))
    numpy_random.seed(seed % 2**32)


class SeededGenerators:
    """`with SeededGenerators(seed): ...` runs a block on seeded generators and restores the caller's.

    With `restores=False` it only seeds: a worker process has no caller.
    """

    __slots__ = ("held", "lent", "own", "python", "restores", "seed", "torch")

    def __init__(self, seed: int, restores: bool = True):
        self.seed, self.restores = seed, restores

    def __enter__(self) -> None:
        if self.restores:
            self.torch, self.python = torch.default_generator.get_state(), _keep_python()
            self.own = numpy_random.get_bit_generator()
            self.held = held_normal()  # which an exchange of bit generators forgets
            self.lent = _spare.pop() if _spare else numpy_random.MT19937(0)
            numpy_random.set_bit_generator(self.lent)
        seed_generators(self.seed)

    def __exit__(self, *error: object) -> None:
        if not self.restores:
            return
        torch.default_generator.set_state(self.torch)
        self.python()
        numpy_random.set_bit_generator(self.own)
        _spare.append(self.lent)
        if self.held is not None:
            numpy_random.set_state({**numpy_random.get_state(legacy=False), "has_gauss": 1, "gauss": self.held})


def _keep_python() -> Callable[[], None]:
    """Return a function that restores the present state of Python's generator."""
    if PYTHON_MEMORY is None:
        return partial(random.setstate, random.getstate())
    words, others = ctypes.string_at(PYTHON_MEMORY, MT19937_BYTES), vars(random._inst)
    normal = others["gauss_next"]

    def restore() -> None:
        ctypes.memmove(PYTHON_MEMORY, words, MT19937_BYTES)
        others["gauss_next"] = normal

    return restore


# Generators of a dataset, a sampler or a loader of its own, which nobody seeds: a copy of them is part of a saved position.

_DEPTH, _WIDTH = 5, 64  # a subset, its dataset, transforms, one of them; what is wider holds data


def held_generators(owner: object, *names: str) -> dict[str, object]:
    """Return the random generators that attributes of an object hold, by where they are: of a loader, its samplers and its dataset."""
    found: dict[str, object] = {}
    for name in names or ("generator", "sampler", "batch_sampler", "dataset"):
        _collect(vars(owner).get(name) if hasattr(owner, "__dict__") else None, name, found, _DEPTH)
    return found


def generator_states(generators: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of each generator."""
    return {name: unpack(pack(generator)) for name, generator in generators.items()}


def set_generators(generators: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Give generators the states of those of their kind that were saved under the same names."""
    for name in generators.keys() & saved.keys():
        kind = generator_kind(generators[name])
        if kind is not None and kind is generator_kind(saved[name]):
            kind.restore(generators[name], kind.state(saved[name]))


def _collect(value: object, path: str, found: dict[str, object], depth: int) -> None:
    if generator_kind(value) is not None:
        if not any(value is known for known in found.values()):
            found[path] = value
        return
    if not depth or isinstance(value, torch.Tensor | torch.nn.Module | type | ModuleType | FunctionType):
        return
    if isinstance(value, list | tuple):
        parts: Iterable[tuple[object, object]] = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    else:
        value = parts = vars(value).items() if hasattr(value, "__dict__") else ()
    if len(value) <= _WIDTH:
        for name, part in parts:
            _collect(part, f"{path}.{name}", found, depth - 1)
