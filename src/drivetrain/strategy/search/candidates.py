"""A candidate of the search: a plan reduced to the few values that cost depends on, so that thousands can be compared.

It becomes a `Strategy` only when it is one of the few that are simulated, measured or chosen.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.strategy.batching import BatchPlan
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.value import Strategy

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "selective": {"mode": "selective", "every": 1},
    "second": {"mode": "full", "every": 2},
    "full": {"mode": "full", "every": 1},
    "offload": {"mode": "offload", "every": 1},
}
"""From little to much: what remains in memory shrinks from one to the next."""
SHARDINGS = ("none", "zero1", "zero2", "fsdp")
"""From nothing split to everything split."""
_SIXTEEN = ("bfloat16", "float16", "half", "float8")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train one global batch."""

    pipe: int = 1
    data: int = 1
    zero: int = 1
    sequence: int = 1
    tensor: int = 1
    sharding: str = "none"
    precision: str = "float32"
    checkpoint: str = "none"
    micro: int = 1
    """Samples of one forward pass on one rank; under pipelining, of one pass through all stages."""
    accumulation: int = 1
    microbatches: int = 1
    """Into how many parts a pipeline cuts one pass."""
    compile: str = "none"
    graphs: bool = False
    chunked_loss: bool = False
    fused: bool = False
    channels_last: bool = False
    cpu_offload: bool = False
    threads: int | None = None
    """On a CPU; None leaves them as they are."""
    extra: tuple[tuple[str, Any], ...] = ()
    """Further methods with their settings: a user's own, and those that were asked for."""
    given: Strategy | None = field(default=None, compare=False)
    """The plan as it was written, where the candidate stands for one."""

    @property
    def world(self) -> int:
        """How many processes it runs on."""
        return self.pipe * self.data * self.zero * self.sequence * self.tensor

    @property
    def data_ranks(self) -> int:
        """Over how many ranks samples are spread."""
        return self.data * self.zero

    @property
    def is_sharded(self) -> bool:
        """Whether parameters and gradients are split over data ranks."""
        return self.sharding in ("zero2", "fsdp")

    @property
    def arithmetic(self) -> str:
        """What a forward pass computes in: the key of a profile's numbers."""
        return "bfloat16" if self.precision in _SIXTEEN else "float32"

    @property
    def global_size(self) -> int:
        """Samples of one update."""
        return self.micro * self.accumulation * self.data_ranks

    @property
    def batch(self) -> BatchPlan:
        """The batch arithmetic."""
        return BatchPlan(
            global_size=self.global_size, micro=self.micro, accumulation=self.accumulation, data_ranks=self.data_ranks
        )

    @property
    def kind(self) -> str:
        """The part of it that decides which kernels run; plans of one kind mispredict alike."""
        how = "eager" if self.compile == "none" else f"compiled {self.compile}"
        threads = "" if self.threads is None else f", threads {self.threads}"
        return f"{self.precision}, {how}{' with graphs' if self.graphs else ''}{threads}"

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler has a part in it, and time to take."""
        return self.compile != "none"

    @property
    def near_kinds(self) -> tuple[str, ...]:
        """Kinds with nearly the same kernels: the same precision, compiled in another scope, with or without graphs."""
        if not self.is_compiled:
            return ()
        others = [
            replace(self, compile=scope, graphs=graphs) for scope in ("model", "block") for graphs in (False, True)
        ]
        return tuple(dict.fromkeys(other.kind for other in others if other.kind != self.kind))

    def axes(self) -> list[tuple[str, int]]:
        """Return the axes of its mesh, the fastest first; empty when all ranks are data ranks."""
        sizes = [(axis, getattr(self, axis)) for axis in ("tensor", "sequence", "zero", "data", "pipe")]
        present = [(axis, size) for axis, size in sizes if size > 1]
        return [] if [axis for axis, _ in present] in ([], ["data"]) else present

    def names(self) -> list[str]:
        """Return the names of its methods."""
        found = ["parallel_mode"] if self.world > 1 else []
        found += [self.sharding] if self.sharding != "none" else []
        found += {
            "tf32": ["tf32"],
            "bfloat16": ["amp_native"],
            "float16": ["amp_native"],
            "half": ["half"],
            "float8": ["amp_native", "fp8"],
        }.get(self.precision, [])
        for name, is_used in (
            ("checkpoint", self.checkpoint != "none"),
            ("micro_batch", self.accumulation > 1),
            ("native_dynamo", self.is_compiled),
            ("cuda_graphs", self.graphs),
            ("chunked_cross_entropy", self.chunked_loss),
            ("fused_optimizer", self.fused),
            ("channels_last", self.channels_last),
            ("cpu_offload", self.cpu_offload),
            ("cpu_threads", self.threads is not None),
            ("tensor_parallel", self.tensor > 1),
            ("sequence_parallel", self.sequence > 1),
            ("pipeline_parallel", self.pipe > 1),
        ):
            if is_used:
                found.append(name)
        return found + [name for name, _ in self.extra if name not in found]

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return what the candidate says about its methods' configurations."""
        found: dict[str, dict[str, Any]] = {}
        if axes := self.axes():
            found["parallel_mode"] = {"axes": tuple(axes)}
        if self.precision in ("bfloat16", "float16"):
            found["amp_native"] = {"dtype": self.precision}
        elif self.precision == "float8":
            found["amp_native"] = {"dtype": "bfloat16"}
        if self.checkpoint != "none":
            found["checkpoint"] = CHECKPOINTS[self.checkpoint]
        if self.accumulation > 1:
            found["micro_batch"] = {"size": self.micro}
        if self.is_compiled:
            found["native_dynamo"] = {"scope": self.compile}
        if self.threads is not None:
            found["cpu_threads"] = {"threads": self.threads}
        if self.pipe > 1:
            found["pipeline_parallel"] = {"microbatches": self.microbatches}
        return found

    def plan(self, kept: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None) -> Strategy:
        """Return it as a Strategy; `kept` configurations stay as they are, `base` ones are changed where the candidate differs."""
        if self.given is not None:
            return self.given
        kept, base = kept or {}, base or {}
        own, settings = dict(self.extra), self.settings()
        entries = []
        for name in dict.fromkeys([*self.names(), *kept, *base]):
            method = find_method(name)
            config = kept.get(name, own.get(name))
            if config is None:
                changes = {k: v for k, v in settings.get(name, {}).items() if k in method._keys()}
                config = dataclasses.replace(base.get(name, method.parse(None)), **changes)
            entries.append((name, config))
        sizes = [(axis, getattr(self, axis)) for axis in ("pipe", "data", "zero", "sequence", "tensor")]
        mesh = tuple((axis, size) for axis, size in sizes if size > 1) or (("data", 1),)
        return Strategy(entries, mesh=mesh, batch=self.batch)


def label_of(candidate: Candidate) -> str:
    """Return a candidate in a few words.

    >>> label_of(Candidate(micro=8, accumulation=4, precision="bfloat16", compile="model"))
    'bf16, compile, 8 x 4'
    """
    axes = [f"{axis} {getattr(candidate, axis)}" for axis in ("pipe", "data", "zero", "sequence", "tensor")]
    words = [text for text in axes if not text.endswith(" 1")]
    words += [candidate.sharding] if candidate.sharding != "none" else ["ddp"] if candidate.data_ranks > 1 else []
    words.append(
        {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}.get(
            candidate.precision, candidate.precision
        )
    )
    words += [] if candidate.compile == "none" else ["compile" if candidate.compile == "model" else "compile blocks"]
    words += [] if candidate.checkpoint == "none" else [f"checkpoint {candidate.checkpoint}"]
    flags = ("graphs", "chunked_loss", "fused", "channels_last", "cpu_offload")
    words += [flag.replace("_", " ") for flag in flags if getattr(candidate, flag)]
    words += [] if candidate.threads is None else [f"threads {candidate.threads}"]
    words += [name for name, _ in candidate.extra]
    return ", ".join([*words, f"{candidate.micro} x {candidate.accumulation}"])
