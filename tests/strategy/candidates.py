"""Candidates in a few words, for tests."""

from typing import Any

from drivetrain.strategy.effects import Effects
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.values import COMPILED, PARTS
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.search.candidates import Candidate, in_order

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "selective": {"mode": "selective"},
    "second": {"every": 2},
    "full": {},
    "offload": {"mode": "offload"},
}
PRECISIONS = {
    "tf32": {"tf32": None},
    "bfloat16": {"amp_native": "bf16"},
    "float16": {"amp_native": "fp16"},
    "float8": {"amp_native": "bf16", "fp8": None},
    "half": {"half": None},
}
FLAGS = {
    "graphs": "cuda_graphs",
    "chunked_loss": "chunked_cross_entropy",
    "fused": "fused_optimizer",
    "channels_last": "channels_last",
    "cpu_offload": "cpu_offload",
}
MESH = ("pipe", "data", "zero", "sequence", "tensor", "micro", "accumulation")


def candidate(
    precision: str = "float32",
    sharding: str = "none",
    checkpoint: str = "none",
    compile: str = "none",
    threads: int | None = None,
    microbatches: int | None = None,
    **values: Any,
) -> Candidate:
    """Return the candidate with these methods."""
    methods: dict[str, Any] = dict(PRECISIONS.get(precision, {}))
    methods |= {} if sharding == "none" else {sharding: None}
    methods |= {} if checkpoint == "none" else {"checkpoint": CHECKPOINTS[checkpoint]}
    methods |= {} if compile == "none" else {"native_dynamo": {"scope": compile}}
    methods |= {} if threads is None else {"cpu_threads": threads}
    methods |= {} if microbatches is None else {"pipeline_parallel": {"microbatches": microbatches}}
    methods |= {f"{axis}_parallel": None for axis in ("sequence", "tensor") if values.get(axis, 1) > 1}
    methods |= {FLAGS[flag]: None for flag, is_used in values.items() if flag in FLAGS and is_used}
    sizes = {name: value for name, value in values.items() if name in MESH}
    assert not values.keys() - FLAGS.keys() - set(MESH)
    parsed = {name: find_method(name).parse(config) for name, config in methods.items()}
    return Candidate(**sizes, methods=in_order(parsed))


def effects(**words: Any) -> Effects:
    """Return what the methods of a candidate change."""
    return candidate(**words).effects


def sharding_of(found: Candidate) -> str:
    """Return the method that splits what data ranks share."""
    names = [method.name for method, _ in found.steps if method.dimension == "sharding"]
    return names[0] if names else "none"


def checkpoint_of(found: Candidate) -> str:
    """Return how much is computed again."""
    return next(
        (method.label(config).split()[1] for method, config in found.steps if method.name == "checkpoint"), "none"
    )


def profile_model(task, *, compiled=True, time_limit=None):
    """Return a task's profile with all parts; `compiled` includes what compiled graphs keep, the slowest ones."""
    parts = [part for part in PARTS if compiled or not part.endswith(COMPILED)]
    return ModelProfiler(task).profile(parts, time_limit=time_limit)
