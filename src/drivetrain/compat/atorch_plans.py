"""Read the plans that ATorch pickled, without executing anything that is in them.

A pickle is a program. This reader runs only the part of it that builds data: lists, dicts, numbers, texts, torch dtypes, and ATorch's
own Strategy as a plain list. Any other name in the file becomes an inert text; a file that calls something is rejected, and the
message says what it wanted to call.
"""

import io
import pickle

import torch

from drivetrain.core.errors import StrategyFormatError

_BUILTINS = {cls.__name__: cls for cls in (list, dict, tuple, set, frozenset, int, float, str, bool, bytes)}


class _Inert(str):
    """The name of something that is not loaded."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise StrategyFormatError(f"the pickle calls {str(self)!r}, which is not allowed. It is not a plan.")


class _LegacyStrategy:
    """Takes the place of ATorch's class and keeps its fields."""

    opt_list: object = ()


class _PlanUnpickler(pickle.Unpickler):
    """Resolves the few names that a plan needs."""

    def find_class(self, module: str, name: str) -> object:
        if module.startswith("atorch.") and name == "Strategy":
            return _LegacyStrategy
        if module == "builtins" and name in _BUILTINS:
            return _BUILTINS[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return str(getattr(torch, name)).removeprefix("torch.")
        return _Inert(f"{module}.{name}")


def read_legacy_pickle(data: bytes) -> list[object]:
    """Return the list of methods in a pickled plan."""
    value = _unpickled(data)
    if isinstance(value, _LegacyStrategy):
        value = value.opt_list
    if not isinstance(value, list | tuple):
        raise StrategyFormatError(f"the pickle holds a {type(value).__name__}; expected a plan or a list of methods.")
    return [_decoded(item) for item in value]


def _unpickled(data: bytes) -> object:
    try:
        return _PlanUnpickler(io.BytesIO(data)).load()
    except StrategyFormatError:
        raise
    except Exception as error:  # damage shows in many ways
        raise StrategyFormatError(f"the pickle cannot be read as a plan: {error or type(error).__name__}.") from error


def _decoded(item: object) -> object:
    """Return one method; ATorch pickles the configuration inside its pickle once more."""
    if not isinstance(item, tuple | list) or len(item) < 2 or not isinstance(item[1], bytes):
        return tuple(item) if isinstance(item, list) else item
    return (item[0], _unpickled(item[1]), *item[2:3])
