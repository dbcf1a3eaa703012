"""Which values each part of a candidate may take in a place.

The registry is asked what exists, and each method what it can do: a method that is not there, is excluded, or refuses the place is simply
not enumerated.
"""

import itertools
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.strategy.mesh import fit_axes
from drivetrain.strategy.method import Method, Site
from drivetrain.strategy.registry import find_method, method_names
from drivetrain.strategy.search.candidates import CHECKPOINTS, SHARDINGS
from drivetrain.strategy.search.place import NEVER_SEARCHED, SEARCHED, Asked, Place
from drivetrain.strategy.search.wishes import NUMERICS, budget_bytes

_SMALL_WORLD = 8
"""Up to here also what is predicted to lose is enumerated; beyond, the mesh alone makes enough candidates."""
_LARGEST_SEQUENCE = 16
_LARGE_STATE = 0.3
"""The share of the budget from which on state is large."""


class Dimensions:
    """The values of each part of a candidate."""

    def __init__(self, place: Place, asked: Asked):
        self.place, self.asked = place, asked
        self.notes: list[str] = []
        kind, profile = place.machine.kind, place.profile
        self.is_cpu = kind == "cpu"
        self.precisions = self._precisions()
        self.checkpoints = self._switch("checkpoint", self._checkpoints())
        self.compiles = self._switch("native_dynamo", self._scopes())
        self.shardings = self._shardings()
        self.fused = self._fused()
        self.channels_last = self._flag("channels_last", profile.has_convolution)
        self.chunked = self._flag("chunked_cross_entropy", profile.cross_entropy_head is not None and place.has_loss)
        self.offload = self._flag("cpu_offload", not self.is_cpu and self._state_is_large())
        self.graphs = self._flag("cuda_graphs", not self.is_cpu and "native_dynamo" in method_names())
        self.threads = self._threads()
        self.splits_batches = not profile.has_batchnorm
        if profile.has_batchnorm:
            self.notes.append(
                "micro_batch: the model has batch norms, whose statistics a split batch would change; none is split"
            )
        self.extras = list(self._extras())

    def usable(self, name: str, axes: Mapping[str, int] | None = None, config: Any = None) -> bool:
        """Say whether a method exists, may be used, and accepts the place."""
        place = self.place
        if name not in method_names() or not self.asked.may(name):
            return False
        method = find_method(name)
        if method.numerics not in NUMERICS[place.wishes.numerics] and not self.asked.must(name):
            return False
        site = Site(
            device=place.device, world=place.world, axes=dict(axes or {}), names=frozenset({name, "native_dynamo", *_axis_methods(axes)}),
            model=place.model,
        )  # fmt: skip
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if place.wishes.spec is None and method.requires(place.profile, place.device, place.world) is not None:
                    return False
                method.check(method.parse(None) if config is None else config, site)
        except (ConfigError, RuntimeError):
            return False
        return True

    def _state_is_large(self) -> bool:
        """Say whether parameters, gradients and optimizer state are so large that moving them to the host could pay."""
        place, profile = self.place, self.place.profile
        budget = budget_bytes(place.wishes.memory_budget, place.machine.free)
        return 2 * profile.parameter_bytes + profile.optimizer_bytes > _LARGE_STATE * budget

    def _flag(self, name: str, is_sensible: bool) -> tuple[bool, ...]:
        if self.asked.must(name):
            return (True,)
        if not is_sensible or not self.usable(name):
            return (False,)
        return (False, True)

    def _switch(self, name: str, values: list[str]) -> list[str]:
        """Return values with "none" where the method may be left out."""
        if not self.asked.may(name) or name not in method_names():
            return ["none"]
        return values if self.asked.must(name) else ["none", *values]

    def _precisions(self) -> list[str]:
        place, asked, rates = self.place, self.asked, self.place.machine.flops
        kept = asked.kept.get("amp_native")
        sixteen = "bfloat16" if "bfloat16" in rates or place.machine.kind == "cpu" else "float16"
        if kept is not None and kept.dtype != "auto":
            sixteen = kept.dtype
        found = ["float32"]
        if self.usable("tf32") and "tf32" in rates:
            found.append("tf32")
        if self.usable("amp_native") and (sixteen in rates or asked.must("amp_native")):
            found.append(sixteen)
            if self.usable("fp8") and "float8" in rates and sixteen == "bfloat16":
                found.append("float8")
        if self.usable("half") and sixteen in rates:
            found.append("half")
        wanted = {"amp_native": (sixteen, "float8"), "fp8": ("float8",), "half": ("half",), "tf32": ("tf32",)}
        for name, values in wanted.items():
            if asked.must(name):
                found = [value for value in found if value in values] or [values[0]]
        return found

    def _checkpoints(self) -> list[str]:
        kept = self.asked.kept.get("checkpoint")
        if kept is not None:
            if kept.mode != "full":
                return [kept.mode]
            return ["full" if kept.every == 1 else "second"]
        if not any(unit.path for unit in self.place.profile.units) and not self.asked.must("checkpoint"):
            return []
        return [value for value in CHECKPOINTS if not (self.is_cpu and value == "offload")]

    def _scopes(self) -> list[str]:
        kept = self.asked.kept.get("native_dynamo")
        if kept is not None:
            return [kept.scope] if kept.scope != "auto" else ["model", "block"]
        if (
            self.is_cpu
            and self.place.wishes.spec is None
            and not _has_compiler()
            and not self.asked.must("native_dynamo")
        ):
            self.notes.append("compile: there is no C++ compiler on this machine")
            return []
        return ["model", "block"] if any(unit.path for unit in self.place.profile.units) else ["model"]

    def _shardings(self) -> list[str]:
        asked = self.asked
        if self.place.world == 1:
            return ["none"]
        group = [name for name in SHARDINGS[1:] if name in method_names()]
        chosen = [name for name in group if asked.must(name)]
        if chosen:
            return chosen[:1]
        needs = any(members <= set(group) for members in asked.wanted)
        allowed = [name for name in group if self.usable(name) and (not self.is_cpu or needs)]
        return allowed if needs else ["none", *allowed]

    def _threads(self) -> list[int | None]:
        """Return numbers of threads; None, which changes nothing, where the method may be left out."""
        place, kept = self.place, self.asked.kept.get("cpu_threads")
        if self.asked.must("cpu_threads"):
            given = None if kept is None else kept.threads
            found = (given,) if given is not None else place.threads or (place.machine.threads,)
            return list(found[-1:] if kept is not None else found)
        is_sensible = self.is_cpu and place.wishes.spec is None and self.usable("cpu_threads")
        return [None, *(place.threads if is_sensible else ())]

    def _fused(self) -> tuple[bool, ...]:
        place = self.place
        if self.asked.must("fused_optimizer"):
            return (True,)
        from drivetrain.strategy.methods.fused_optimizer import _FUSED

        is_chosen = any(place.optim_args.get(key) is not None for key in ("fused", "foreach"))
        if is_chosen or place.optim_func not in _FUSED or not self.usable("fused_optimizer"):
            return (False,)
        return (False, True) if place.world <= _SMALL_WORLD else (True,)

    def _extras(self) -> Iterator[tuple[tuple[str, Any], ...]]:
        """Yield further methods: none, then each configuration of each method that a user registered."""
        yield ()
        for name in method_names():
            if name in SEARCHED or name in NEVER_SEARCHED or name in self.asked.here or not self.usable(name):
                continue
            method = find_method(name)
            if type(method).estimate is Method.estimate:
                continue  # it promises nothing, so it could only make a plan less simple
            for config in method.candidates(self.place.profile, self.place.device, self.place.world):
                yield ((name, method.parse(config)),)

    def meshes(self) -> Iterator[dict[str, int]]:
        """Yield sizes of axes whose product is the world."""
        place, world = self.place, self.place.world
        kept = self.asked.kept.get("parallel_mode") or self.asked.base.get("parallel_mode")
        if kept is not None and kept.axes:
            fixed = dict(fit_axes(kept.axes, world))
            if "parallel_mode" in self.asked.kept:
                yield fixed
                return
            inner = {axis: size for axis, size in fixed.items() if axis not in ("data", "zero")}
            yield from _data_splits(inner, world // math.prod(inner.values()), self.shardings, place.machine.per_node)
            return
        tensors = self._sizes("tensor", "tensor_parallel", min(world, place.machine.per_node))
        sequences = self._sizes("sequence", "sequence_parallel", min(world, _LARGEST_SEQUENCE))
        most = sum(unit.count for unit in place.profile.units if unit.path) if self.splits_batches else 1
        pipes = self._sizes("pipe", "pipeline_parallel", min(world, most))
        for tensor, sequence, pipe in itertools.product(tensors, sequences, pipes):
            inner = {"tensor": tensor, "sequence": sequence, "pipe": pipe}
            if world % (tensor * sequence * pipe) or (sequence > 1 and pipe > 1):
                continue
            yield from _data_splits(inner, world // (tensor * sequence * pipe), self.shardings, place.machine.per_node)

    def _sizes(self, axis: str, name: str, most: int) -> list[int]:
        """Return the sizes of an axis that its method accepts."""
        if self.place.world == 1 or (self.is_cpu and not self._is_asked(name)) or not self.place.has_loss:
            return [1]
        kept = self.asked.kept.get(name)
        sizes = [
            size
            for size in range(2, most + 1)
            if self.place.world % size == 0 and self._divides(axis, size) and self.usable(name, {axis: size}, kept)
        ]
        return sizes if self.asked.must(name) else [1, *sizes]

    def _is_asked(self, name: str) -> bool:
        return any(name in members for members in self.asked.wanted)

    def _divides(self, axis: str, size: int) -> bool:
        """Say whether heads and positions can be split into so many parts."""
        heads = [unit.heads for unit in self.place.profile.units if unit.heads]
        if axis == "pipe":
            return True
        length = self.place.profile.sequence_length
        if axis == "sequence" and (length is None or length % size):
            return False
        return all(count % size == 0 for count in heads)

    def micros(self, per_rank: int) -> list[tuple[int, int]]:
        """Return pairs of micro-batch and accumulation."""
        kept = self.asked.kept.get("micro_batch")
        if kept is not None and (kept.size or kept.accumulation):
            size = kept.size or per_rank // kept.accumulation
            return [(size, per_rank // size)] if size and per_rank % size == 0 else []
        if not self.splits_batches or not self.asked.may("micro_batch") or "micro_batch" not in method_names():
            return [(per_rank, 1)]
        sizes = [size for size in range(per_rank, 0, -1) if per_rank % size == 0]
        return [(size, per_rank // size) for size in sizes]


def _axis_methods(axes: Mapping[str, int] | None) -> list[str]:
    names = {"tensor": "tensor_parallel", "sequence": "sequence_parallel", "pipe": "pipeline_parallel"}
    return [names[axis] for axis in axes or {} if axis in names]


def _data_splits(inner: dict[str, int], ranks: int, shardings: list[str], per_node: int) -> Iterator[dict[str, int]]:
    """Yield how data ranks share parameters: not at all, all of them, or those of one node and smaller groups."""
    if any(name in ("none", "zero1") for name in shardings):
        yield {**inner, "data": ranks, "zero": 1}
    if ranks > 1 and any(name in ("zero2", "fsdp") for name in shardings):
        inside = inner.get("tensor", 1) * inner.get("sequence", 1)
        nodes = {per_node // inside} if per_node > inside else set()
        for zero in sorted({ranks, *nodes, 2 * per_node, 8 * per_node}, reverse=True):
            if 1 < zero <= ranks and ranks % zero == 0:
                yield {**inner, "data": ranks // zero, "zero": zero}


def _has_compiler() -> bool:
    """Say whether kernels for the CPU can be compiled here."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
