"""Fewer batches than a loader has: the limit that the environment sets, and the part of a loader that is left."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

from drivetrain.core.errors import ConfigError

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"
_OWN_LIMIT_VARIABLE = "DRIVETRAIN_LIMIT_BATCHES"
_LIMIT_VARIABLES = (_OWN_LIMIT_VARIABLE, LIMIT_BATCHES_ENV_VAR)  # the first that is set wins


class LimitBatches:
    """A context in which every new Trainer runs at most so many batches per epoch; None lifts an outer limit.

    >>> with LimitBatches(3):
    ...     limit_from_environment()
    3
    """

    def __init__(self, num_batches: int | None):
        if num_batches is not None and num_batches < 1:
            raise ConfigError(f"num_batches={num_batches}: expected at least 1, or None for no limit.")
        self.num_batches = num_batches
        self._outer: list[dict[str, str | None]] = []

    def __enter__(self) -> "LimitBatches":
        self._outer.append({name: os.environ.get(name) for name in _LIMIT_VARIABLES})
        for name in _LIMIT_VARIABLES:
            os.environ[name] = "none" if self.num_batches is None else str(self.num_batches)
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._outer.pop().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def limit_from_environment() -> int | None:
    """Return the number of batches the environment allows, or None for all of them."""
    name = next((name for name in _LIMIT_VARIABLES if os.environ.get(name)), None)
    if name is None or os.environ[name].strip().lower() == "none":
        return None
    text = os.environ[name].strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text!r}: expected a number of batches of at least 1, or 'none'.")
    return int(text)


class DataLoaderSlice:
    """The first batches of a loader, or all of them for a size of None; everything else about it is the loader's."""

    def __init__(self, dl: Any, slice_size: int | None):
        self.dl = dl
        self.slice_size = slice_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dl, self.slice_size)

    def __len__(self) -> int:
        return len(self.dl) if self.slice_size is None else min(len(self.dl), self.slice_size)

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.dl, name)
