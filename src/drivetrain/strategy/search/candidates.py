"""A candidate of the search: a mesh, a batch split and methods with their configurations.

Its cost is predicted from the effects of its methods, so thousands can be compared. It becomes a `Strategy` only when it is one of the few
that are simulated, measured or chosen.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.effects import Effects
from drivetrain.strategy.mesh import AXES
from drivetrain.strategy.method import Method, Option
from drivetrain.strategy.registry import all_methods, find_method
from drivetrain.strategy.value import Strategy

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train one global batch."""

    pipe: int = 1
    data: int = 1
    zero: int = 1
    sequence: int = 1
    tensor: int = 1
    micro: int = 1
    """Samples of one forward pass on one rank; under pipelining, of one pass through all stages."""
    accumulation: int = 1
    methods: Option = ()
    """Names and configurations in the order of the registry; what the mesh and the batch split imply is not listed."""
    given: Strategy | None = field(default=None, compare=False)
    """The original plan, if the candidate represents one."""

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.pipe * self.data * self.zero * self.sequence * self.tensor

    @property
    def data_ranks(self) -> int:
        """The number of ranks that samples are spread over."""
        return self.data * self.zero

    @property
    def global_size(self) -> int:
        """Samples of one update."""
        return self.micro * self.accumulation * self.data_ranks

    @property
    def batch(self) -> BatchSplit:
        """The batch arithmetic."""
        size, ranks = self.global_size, self.data_ranks
        return BatchSplit(global_size=size, micro=self.micro, accumulation=self.accumulation, data_ranks=ranks)

    @cached_property
    def configs(self) -> dict[str, Any]:
        """The configuration of each method."""
        return dict(self.methods)

    @cached_property
    def steps(self) -> tuple[tuple[Method, Any], ...]:
        """Methods and configurations in the order of the registry."""
        return steps_of(self.methods)

    @property
    def is_sharded(self) -> bool:
        """Whether parameters and gradients are split over data ranks."""
        return any(method.shards_axis is not None for method, _ in self.steps)

    @property
    def divides_model(self) -> bool:
        """Whether the model, its samples or its parameters are split over ranks."""
        return self.is_sharded or self.tensor * self.pipe * self.sequence > 1

    @cached_property
    def effects(self) -> Effects:
        """What its methods change about a step."""
        axes = {axis: getattr(self, axis) for axis in AXES}
        effects = Effects(axes=axes, micro=self.micro, accumulation=self.accumulation)
        for method, config in sorted(self.steps, key=lambda step: (step[0].stage, step[0].name)):
            method.affect(effects, config)
        return effects

    @property
    def kind(self) -> str:
        """What decides which kernels run. Prediction errors are similar for plans of one kind."""
        return self.effects.kind

    @property
    def is_compiled(self) -> bool:
        """Whether any part is compiled, which takes time at the start."""
        return self.effects.is_compiled

    @cached_property
    def amounts(self) -> dict[str, int]:
        """How much memory it saves, in each ordered dimension of methods."""
        found = ((method.dimension or method.name, method.amount(config)) for method, config in self.steps)
        return {dimension: amount for dimension, amount in found if amount}

    def adding(self, option: Option) -> "Candidate":
        """Return the candidate with further methods, which come later in the registry."""
        return Candidate(
            pipe=self.pipe, data=self.data, zero=self.zero, sequence=self.sequence, tensor=self.tensor,
            micro=self.micro, accumulation=self.accumulation, methods=self.methods + option,
        )  # fmt: skip

    def without(self, names: Iterable[str]) -> "Candidate":
        """Return the candidate without some methods."""
        left_out = set(names)
        return replace(self, methods=tuple(item for item in self.methods if item[0] not in left_out), given=None)

    def axes(self) -> list[tuple[str, int]]:
        """Return the axes of its mesh, the fastest first; empty if all ranks are data ranks."""
        present = [(axis, getattr(self, axis)) for axis in reversed(AXES) if getattr(self, axis) > 1]
        return [] if [axis for axis, _ in present] in ([], ["data"]) else present

    def _implied(self) -> dict[str, dict[str, Any]]:
        found = ((method.name, method.implied(self)) for method in all_methods() if is_implied(method))
        return {name: settings for name, settings in found if settings is not None}

    def names(self) -> list[str]:
        """Return the names of its methods."""
        return self._names

    @cached_property
    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self._implied(), *self.configs]))

    def plan(self, kept: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None) -> Strategy:
        """Return the candidate as a Strategy. `kept` configurations are unchanged; `base` ones change where the candidate differs."""
        if self.given is not None:
            return self.given
        kept, base, implied = kept or {}, base or {}, self._implied()
        entries = []
        for name in dict.fromkeys([*implied, *self.configs, *kept, *base]):
            config = kept.get(name, self.configs.get(name))
            if config is None:
                config = dataclasses.replace(base.get(name, find_method(name).parse(None)), **implied.get(name, {}))
            entries.append((name, config))
        sizes = [(axis, getattr(self, axis)) for axis in AXES]
        mesh = tuple((axis, size) for axis, size in sizes if size > 1) or (("data", 1),)
        return Strategy(entries, mesh=mesh, batch=self.batch)


def steps_of(option: Option) -> tuple[tuple[Method, Any], ...]:
    """Return methods and configurations."""
    return tuple((find_method(name), config) for name, config in option)


def is_implied(method: Method) -> bool:
    """Return whether a mesh or a batch split expresses a method, so that no option does."""
    return type(method).implied is not Method.implied


def in_order(methods: Mapping[str, object]) -> Option:
    """Return methods in the order of the registry, without those that a mesh or a batch split implies.

    >>> [name for name, _ in in_order({"checkpoint": None, "zero1": None, "micro_batch": None})]
    ['zero1', 'checkpoint']
    """
    names = [method.name for method in all_methods() if not is_implied(method)]
    return tuple((name, methods[name]) for name in names if name in methods)


def label_of(candidate: Candidate) -> str:
    """Return a candidate in a few words.

    >>> label_of(Candidate(micro=8, accumulation=4, methods=(("fused_optimizer", None),)))
    'fp32, fused, 8 x 4'
    """
    words = [f"{axis} {getattr(candidate, axis)}" for axis in AXES if getattr(candidate, axis) > 1]
    labels = [(m.shards_axis or m.splits_optimizer, m.label(config)) for m, config in candidate.steps]
    words += [label for is_split, label in labels if is_split] or (["ddp"] if candidate.data_ranks > 1 else [])
    precision = candidate.effects.precision
    words += [_SHORT.get(precision, precision), *(label for is_split, label in labels if label and not is_split)]
    return ", ".join([*words, f"{candidate.micro} x {candidate.accumulation}"])
