"""What the next evaluation depends on, saved with the run: an evaluation with random data then gives a resumed run the same numbers.

A `SmartDataLoader` draws by its seed and the number of the evaluation, which is counted here for each evaluation set. Of another loader
the state is kept, or the generators that it, its samplers and its dataset hold. The generators of the process need nothing: an evaluation
starts from those of training, and restores them.
"""

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from drivetrain.context.codec import pack, unpack
from drivetrain.core.errors import StateError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.train import loaders
from drivetrain.train.loaders import DataLoaderSlice

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH, _WIDTH = 5, 64  # a subset, its dataset, transforms, one of them; what is wider holds data


class EvaluationState:
    """Counts the evaluations of each set, and knows which sets an interrupted evaluation has done.

    `sets` are the loaders of the run by the name of their set; the only one has the name "".
    """

    def __init__(self, evaluation_loader: object = None):
        if isinstance(evaluation_loader, loaders.EvaluationLoaders):
            self.sets: dict[str, Any] = dict(evaluation_loader.items())
        else:
            self.sets = {} if evaluation_loader is None else {"": evaluation_loader}
        self.counts = dict.fromkeys(self.sets, 0)
        self.finished: list[str] = []
        """Sets that need not be evaluated again in an evaluation that was interrupted."""

    @contextmanager
    def counting(self, name: str, loader: object) -> Iterator[list[bool]]:
        """Give a loader the number of this evaluation; one that is cut short (True is put into the list) is not counted."""
        number, before, was_cut = self.counts.get(name, 0), loader_state(loader), list[bool]()
        self.counts[name] = number + 1
        _set_number(loader, number)
        yield was_cut
        if was_cut:
            self.counts[name] = number
            load_loader_state(loader, before, number)
        else:
            _set_number(loader, self.counts[name])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make evaluations that do not count."""
        before = self.state_dict()
        yield
        self.load_state_dict(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the loaders' states."""
        return {
            "counts": dict(self.counts),
            "finished": list(self.finished),
            "loaders": {name: loader_state(loader) for name, loader in self.sets.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; sets that are new start from the beginning."""
        self.finished = [name for name in state["finished"] if name in self.sets]
        for name, loader in self.sets.items():
            self.counts[name] = state["counts"].get(name, 0)
            load_loader_state(loader, state["loaders"].get(name), self.counts[name])


def loader_state(loader: Any) -> dict[str, Any] | None:
    """Return what a loader's next iteration depends on, as far as it can be known."""
    loader = _inner(loader)
    state: dict[str, Any] = {}
    if isinstance(loader, SmartDataLoader):
        place = loader.state_dict()
        state["smart"] = {name: place[name] for name in ("seed", "sampler") if name in place}
    elif callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        try:
            state["own"] = pack(loader.state_dict())
        except StateError:  # it holds what cannot be saved
            return None
        return state
    held = {name: _copied(generator) for name, generator in held_generators(loader).items()}
    return {**state, "generators": held} if held else state or None


def load_loader_state(loader: Any, state: Mapping[str, Any] | None, number: int) -> None:
    """Let a loader's next iteration be evaluation `number` of the saved run."""
    loader = _inner(loader)
    _set_number(loader, number)
    if state is None:
        return
    if isinstance(loader, SmartDataLoader) and "smart" in state:
        place = loader.state_dict()
        saved = {name: value for name, value in state["smart"].items() if name in place}
        loader.load_state_dict({**place, **saved, "epoch": number, "position": 0})
    elif "own" in state and callable(getattr(loader, "load_state_dict", None)):
        loader.load_state_dict(unpack(state["own"]))
    for name, generator in held_generators(loader).items():
        if name in state.get("generators", {}):
            _set(generator, state["generators"][name])


def held_generators(loader: object) -> dict[str, Any]:
    """Return the random generators that a loader, its samplers and its dataset hold, by where they are."""
    found: dict[str, Any] = {}
    for name in ("generator", "sampler", "batch_sampler", "dataset"):
        _collect(vars(loader).get(name) if hasattr(loader, "__dict__") else None, name, found, _DEPTH)
    return found


def _collect(value: object, path: str, found: dict[str, Any], depth: int) -> None:
    if isinstance(value, _GENERATORS):
        if not any(value is known for known in found.values()):
            found[path] = value
        return
    if not depth or isinstance(value, torch.Tensor | nn.Module | type | ModuleType | FunctionType):
        return
    if isinstance(value, list | tuple):
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    else:
        value = parts = vars(value).items() if hasattr(value, "__dict__") else ()
    if len(value) <= _WIDTH:
        for name, part in parts:
            _collect(part, f"{path}.{name}", found, depth - 1)


def _copied(generator: object) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.Generator(device=generator.device).set_state(generator.get_state())
    return copy.deepcopy(generator)


def _set(generator: object, saved: object) -> None:
    """Give a generator the state of another of its kind."""
    if isinstance(generator, torch.Generator) and isinstance(saved, torch.Generator):
        generator.set_state(saved.get_state())
    elif isinstance(generator, np.random.Generator) and isinstance(saved, np.random.Generator):
        generator.bit_generator.state = saved.bit_generator.state
    elif isinstance(generator, np.random.RandomState) and isinstance(saved, np.random.RandomState):
        generator.set_state(saved.get_state(legacy=False))
    elif isinstance(generator, random.Random) and isinstance(saved, random.Random):
        generator.setstate(saved.getstate())


def _set_number(loader: object, number: int) -> None:
    loader = _inner(loader)
    if isinstance(loader, SmartDataLoader):
        loader.set_epoch(number)


def _inner(loader: object) -> Any:
    while isinstance(loader, DataLoaderSlice):
        loader = loader.dl
    return loader
