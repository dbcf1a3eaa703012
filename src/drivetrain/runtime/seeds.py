"""Seeds: one root per run, every other seed derived from it by name.

`derive_seed` hashes names with SHA-256, so that a derived seed is the same on every machine and in every version, and
two purposes never share a stream by accident. The rest sets, keeps and restores the generators a program shares:
Python's, numpy's, torch's and the accelerator's.
"""

import _random
import ctypes
import functools
import hashlib
import operator
import os
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from drivetrain.core.arguments import check_choice
from drivetrain.core.errors import ConfigError, StateError, warn
from drivetrain.core.types import StateDict
from drivetrain.runtime.device import as_current
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.ranks import get_rank, is_distributed

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def derive_seed(root: int, name: str, *ints: int) -> int:
    """Return a 63-bit seed for one purpose, always the same for the same arguments.

    >>> derive_seed(0, "shuffle", 3)
    3479638028671884636
    """
    text = ":".join(["drivetrain", str(root), name, *(str(number) for number in ints)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (all devices). `device_specific` adds the rank, `deterministic` turns on strict mode."""
    try:
        if isinstance(seed, bool):
            raise TypeError
        seed = operator.index(seed)
    except TypeError:
        raise ConfigError(f"seed: {seed!r} is a {type(seed).__name__}; expected a whole number, such as 42.") from None
    _seed_all(seed + get_rank() if device_specific else seed)
    if deterministic:
        set_deterministic("strict")


def reseed_rank(seed: int) -> int:
    """Give this rank its own random stream, so that ranks with equal weights have different dropout. Return the seed."""
    own = derive_seed(seed, "rank", get_rank())
    _seed_all(own)
    return own


def seed_worker(worker_id: int) -> int:
    """Seed Python and numpy in a data worker from torch's seed and return it, for `worker_init_fn`.

    torch gives every worker of a loader its own seed, but equally seeded ranks give theirs the same ones. Ranks above 0
    therefore derive theirs once more.
    """
    # A spawned worker has no process group, yet inherits the launcher's environment.
    seed, world = torch.initial_seed(), None if is_distributed() else launched_world()
    rank = get_rank() if world is None else world.rank
    if rank > 0:
        seed = derive_seed(seed, "worker", rank)
        torch.manual_seed(seed)
    _seed_python_and_numpy(seed)
    return seed


def _seed_all(seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed: {seed} does not fit in 64 bits; expected a whole number, such as 42.")
    _seed_python_and_numpy(seed)
    torch.manual_seed(seed)


def _seed_python_and_numpy(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)


MT19937_BYTES = 624 * 4 + 4  # the state words and the position among them, which Python has in front and numpy behind


def _memory_of(generator: random.Random | None) -> int | None:
    """Return where the position and the words of one of Python's generators are; None where they are not where CPython has them."""
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or generator is None or _random.Random.__basicsize__ < head + MT19937_BYTES:
        return None
    position, *words = (ctypes.c_uint32 * 625).from_address(id(generator) + head)
    return id(generator) + head if (*words, position) == generator.getstate()[1] else None


PYTHON_MEMORY = _memory_of(getattr(random, "_inst", None))  # of the generator behind the functions of the module
_NORMAL = "@id"  # whether numpy's generator holds a normal, and that normal
_known: dict[str, tuple[object, StateDict]] = {}
"""The last copy of Python's and of numpy's generator, and what their memory held then."""


def random_state(generator: Any) -> StateDict:
    """Return the state of one of Python's generators, or of the module `random`."""
    version, words, gauss = generator.getstate()
    # Through an array: torch reads a tuple number by number, which takes five times as long.
    return {"version": version, "words": torch.frombuffer(array("q", words), dtype=torch.int64), "gauss": gauss}


def set_random_state(generator: Any, state: StateDict) -> None:
    """Restore the result of `random_state`."""
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def capture_rng(device: torch.device | None = None) -> StateDict:
    """Return the state of all shared generators of this process, in plain values and tensors; that of `device`, else the current one."""
    python = _state_of("python", _python_memory(), lambda: random_state(random))
    state: StateDict = {"python": python, "torch": torch.get_rng_state()}
    if "numpy.random" in sys.modules:  # never imported: never used, and there is nothing to keep
        state["numpy"] = _state_of("numpy", _numpy_memory(), _numpy_state)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if getattr(module, "is_initialized", lambda: True)():  # asking an idle one for its state would start it
            with as_current(device):
                state["accelerator"] = {"type": accelerator.type, "state": module.get_rng_state()}
    return state


def _state_of(name: str, held: object, copy: Callable[[], StateDict]) -> StateDict:
    """Return the state of a generator: the last copy of it, at a twentieth of the cost, if its memory holds the same as then."""
    if held is None or held != _known.get(name, (None,))[0]:
        _known[name] = held, copy()
    return dict(_known[name][1])


def _numpy_state() -> StateDict:
    legacy = sys.modules["numpy.random"].get_state(legacy=False)
    return {
        "generator": legacy["bit_generator"],
        "words": torch.from_numpy(legacy["state"]["key"].astype("int64")),
        "position": int(legacy["state"]["pos"]),
        "has_gauss": int(legacy["has_gauss"]),
        "gauss": float(legacy["gauss"]),
    }


def _python_memory() -> object:
    """Return what identifies the state of Python's generator, None where that is not known."""
    if PYTHON_MEMORY is None:
        return None
    return ctypes.string_at(PYTHON_MEMORY, MT19937_BYTES), vars(random._inst)["gauss_next"]


def _numpy_memory() -> object:
    """Return what identifies the state of numpy's generator, None where that is not known."""
    module = sys.modules["numpy.random"]
    own = module.get_bit_generator()
    if type(own) is not module.MT19937:
        return None
    normal = _normal_memory()
    return None if normal is None else (ctypes.string_at(own.ctypes.state_address, MT19937_BYTES), held_normal())


def held_normal() -> float | None:
    """Return the second half of a pair of normals that numpy's generator holds, None if it holds none."""
    address = _normal_memory()
    if address is None:
        state = sys.modules["numpy.random"].get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None
    is_held, normal = struct.unpack(_NORMAL, ctypes.string_at(address, struct.calcsize(_NORMAL)))
    return normal if is_held else None


@functools.cache
def _normal_memory() -> int | None:
    """Return where numpy's generator keeps a normal, and before it whether there is one; None where that cannot be found."""
    module = sys.modules["numpy.random"]
    # The generator behind the module's functions, which hold it for as long as there is the module.
    shared, probe = getattr(module.standard_normal, "__self__", None), module.RandomState(0)
    probe.standard_normal()
    if sys.implementation.name != "cpython" or type(shared) is not module.RandomState:
        return None
    at = _find(probe, struct.pack(_NORMAL, True, probe.get_state(legacy=False)["gauss"]))
    probe.standard_normal()
    if at < 0 or _find(probe, struct.pack("@i", False), at) != at:
        return None
    return id(shared) + at


def _find(owner: object, content: bytes, start: int = 0) -> int:
    """Return where the memory of an object of a compiled class holds these bytes, -1 if nowhere."""
    return ctypes.string_at(id(owner), type(owner).__basicsize__).find(content, start)


def _is_now(name: str, saved: StateDict, held: object) -> bool:
    """Return whether a generator, whose memory holds this, still has the state that was saved."""
    known, state = _known.get(name, (None, {}))
    return held is not None and held == known and saved["words"] is state["words"]


def same_state(one: Any, other: Any) -> bool:
    """Return whether two states are equal. Of two results of `capture_rng`: whether no number was drawn between them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_state(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the result of `capture_rng`, on `device` or the current one. The part of an accelerator that is absent is skipped."""
    missing = {"python", "torch"} - set(state)
    if missing:
        raise StateError(f"random state: {sorted(missing)} missing in {sorted(state)}. Pass that of capture_rng().")
    if not _is_now("python", state["python"], _python_memory()):
        set_random_state(random, state["python"])
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy.random as np_random

        saved = state["numpy"]
        if not _is_now("numpy", saved, _numpy_memory()):
            np_random.set_state(
                {
                    "bit_generator": saved["generator"],
                    "state": {"key": saved["words"].cpu().numpy().astype("uint32"), "pos": saved["position"]},
                    "has_gauss": saved["has_gauss"],
                    "gauss": saved["gauss"],
                }
            )
    if "accelerator" in state:
        kind = state["accelerator"]["type"]
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is not None and current.type == kind:
            with as_current(device):
                torch.get_device_module(kind).set_rng_state(state["accelerator"]["state"].cpu())


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore all shared generators at the end of the block."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


class _Settings(NamedTuple):
    deterministic: bool
    warn_only: bool
    cudnn_benchmark: bool
    cublas: str | None


_before_deterministic: _Settings | None = None


def set_deterministic(mode: Literal["off", "warn", "strict"]) -> None:
    """Request deterministic kernels from torch: `strict` rejects others, `warn` names them, `off` undoes an earlier call.

    `off` without an earlier call changes nothing, so a program's own settings survive a run with the default mode.
    """
    global _before_deterministic
    check_choice("deterministic", mode, ("off", "warn", "strict"))
    if mode == "off":
        if _before_deterministic is not None:
            _apply_settings(_before_deterministic)
            _before_deterministic = None
        return
    if _before_deterministic is None:
        _before_deterministic = _Settings(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get(CUBLAS_VARIABLE),
        )
    if CUBLAS_VARIABLE not in os.environ and torch.cuda.is_available() and torch.cuda.is_initialized():
        warn(
            f"deterministic={mode!r} is set after CUDA has started, so {CUBLAS_VARIABLE}=:4096:8 may come too late for "
            "matrix products. Set it before the first CUDA call, or in the shell."
        )
    _apply_settings(_Settings(True, mode == "warn", False, os.environ.get(CUBLAS_VARIABLE, ":4096:8")))


def _apply_settings(settings: _Settings) -> None:
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=settings.warn_only)
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    if settings.cublas is None:
        os.environ.pop(CUBLAS_VARIABLE, None)
    else:
        os.environ[CUBLAS_VARIABLE] = settings.cublas
