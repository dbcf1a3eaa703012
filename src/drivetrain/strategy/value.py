"""The Strategy: a plan as a value.

It can be read like a list, compared, hashed, explained, written as JSON and read back. It is immutable: methods that edit return
a new plan. Two plans are equal if they do the same, in whatever order they were written: the order of application is fixed, and
numbers, reasons and fingerprints only describe the plan.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import nn

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import (
    ConfigTypeError,
    DrivetrainError,
    MethodConfigError,
    PlanInfeasible,
    StrategyFormatError,
    unknown_name,
)
from drivetrain.core.files import replace_bytes
from drivetrain.core.types import Settings
from drivetrain.strategy.batching import BatchSplit, replan_batch
from drivetrain.strategy.explain import difference, draw, explain
from drivetrain.strategy.mesh import AXES, DATA_AXES, resize_axes
from drivetrain.strategy.method import is_whole
from drivetrain.strategy.reading import dump, load, parse_json, reject_pickle_name
from drivetrain.strategy.registry import find_method, mesh_method

Evidence = Literal["given", "modelled", "simulated", "measured"]
EVIDENCE = get_args(Evidence)


class Entry(NamedTuple):
    """One method of a plan."""

    name: str
    config: Any
    tunable: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a plan could not be used."""

    kind: str
    """`oom`, `nonfinite`, `wrong`, `error` or `infeasible`."""
    message: str
    shortfall_bytes: int | None = None
    nearest: Any = None
    """The closest plan that would work, and what it would need."""


@dataclass(frozen=True, eq=False, repr=False)
class Strategy:
    """An ordered list of optimization methods with their configurations: a plan.

    Args:
        opt_list: names of methods, or pairs of a name and its configuration.
        mesh: pairs of axis and size, outermost first; None before the plan is applied.
        batch: how the global batch is split.
        predicted: memory and time as predicted.
        measured: memory and time as measured.
        evidence: where those numbers come from.
        reasons: why each method was chosen.
        rejected: plans that were compared.
        dropped: methods that were requested but not used, each with the reason.
        fingerprint: the model and machine that the plan was made for.
        failure: why it cannot be used.
        search: how the plan was found: counts, times, every trial, and points for `picture`.

    >>> plan = Strategy(["parallel_mode", ("amp_native", "bf16")])
    >>> plan.opt_names(), len(plan)
    (['parallel_mode', 'amp_native'], 2)
    >>> Strategy.load(plan.to_json()) == Strategy([("amp_native", "bfloat16"), "parallel_mode"])
    True
    """

    opt_list: Any = None
    _: KW_ONLY
    mesh: Any = None
    batch: BatchSplit | None = None
    predicted: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    evidence: Evidence = "given"
    reasons: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    fingerprint: Mapping[str, Any] | None = None
    failure: Failure | None = None
    search: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.evidence not in EVIDENCE:
            raise StrategyFormatError(unknown_name("evidence", self.evidence, EVIDENCE, where="Strategy"))
        values: Settings = {"reasons": tuple(self.reasons), "rejected": tuple(self.rejected)}
        values["dropped"] = tuple((name, reason) for name, reason in self.dropped)
        texts = (*values["reasons"], *values["rejected"], *chain(*values["dropped"]))
        if isinstance(self.opt_list, str) or not all(isinstance(text, str) for text in texts):
            raise StrategyFormatError("a plan has a list of methods, and reasons, rejected and dropped hold texts.")
        values["opt_list"] = tuple(map(as_entry, self.opt_list or ()))
        if self.mesh is not None:
            pairs = self.mesh.items() if isinstance(self.mesh, Mapping) else self.mesh
            values["mesh"] = tuple((axis, size) for axis, size in pairs)
            if not all(axis in AXES and is_whole(size) for axis, size in values["mesh"]):
                raise StrategyFormatError(
                    f"mesh={values['mesh']!r} is not valid; expected pairs of an axis and its size."
                )
        for name in ("batch", "predicted", "measured", "fingerprint", "search"):
            if not isinstance(getattr(self, name), BatchSplit | Mapping | None):
                raise StrategyFormatError(
                    f"{name}={getattr(self, name)!r} is not valid; expected an object with its numbers."
                )
        if isinstance(self.batch, Mapping):
            values["batch"] = BatchSplit(**self.batch)
        vars(self).update(values)

    # Reading it like a list.

    def __len__(self) -> int:
        return len(self.opt_list)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.opt_list)

    def __getitem__(self, index: int) -> Entry:
        return self.opt_list[index]

    def __setitem__(self, index: int, value: object) -> NoReturn:
        raise TypeError("a Strategy is immutable; use plan.replace(index, method), which returns a new one.")

    def __contains__(self, name: object) -> bool:
        return any(name in (entry, entry.name, *find_method(entry.name).aliases) for entry in self.opt_list)

    def __repr__(self) -> str:
        return f"Strategy([{', '.join(repr(entry.name) for entry in self)}])"

    def opt_names(self) -> list[str]:
        """Return the names of the methods in listed order."""
        return [entry.name for entry in self]

    def is_tunable(self) -> bool:
        """Return whether a search may change some configuration."""
        return any(entry.tunable for entry in self)

    def get_parallel_mode(self) -> tuple[bool, Any]:
        """Return whether `parallel_mode` is in the plan, and its configuration."""
        entry = next((entry for entry in self if find_method(entry.name).lays_out_mesh), None)
        return entry is not None, None if entry is None else entry.config

    def __eq__(self, other: object) -> bool:
        return self._comparable() == other._comparable() if isinstance(other, Strategy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._comparable())

    def _comparable(self) -> tuple[frozenset[tuple[str, object]], BatchSplit | None]:
        return frozenset((entry.name, entry.config) for entry in self), self.batch

    # New plans from this one.

    def add_opt(self, opt: object) -> "Strategy":
        """Return the plan with one more method."""
        return replace(self, opt_list=[*self, as_entry(opt)])

    def replace(self, index: int, opt: object) -> "Strategy":
        """Return the plan with one method replaced."""
        entries = list(self)
        entries[index] = as_entry(opt)
        return replace(self, opt_list=entries)

    def reset_config(self) -> "Strategy":
        """Return the plan with every configuration at its default."""
        return replace(self, opt_list=[(entry.name, None, entry.tunable) for entry in self])

    def adjust_data_parallel(self, size: int) -> "Strategy":
        """Return the plan with `size` as the size of its data axis."""
        method = mesh_method()
        config = self.get_parallel_mode()[1] or method.parse(None)
        axes = {**dict(config.axes), "data": check_count("size", size, owner="adjust_data_parallel")}
        others = [entry for entry in self if entry.name != method.name]
        return replace(self, opt_list=[(method.name, replace(config, axes=tuple(axes.items()))), *others])

    def remove_distributed_method(self) -> "Strategy":
        """Return the plan for one process."""
        group = mesh_method().group
        methods = [(find_method(entry.name), entry) for entry in self]
        return replace(
            self, opt_list=[entry for one, entry in methods if not one.needs_processes and one.group != group]
        )

    def remove_device_unsupported_method(self, device: torch.device | str) -> "Strategy":
        """Return the plan without methods that the device cannot run; they are listed in `dropped`."""
        reasons = {entry.name: find_method(entry.name).requires(None, torch.device(device), 1) for entry in self}
        dropped = [(name, reason) for name, reason in reasons.items() if reason is not None]
        kept = [entry for entry in self if reasons[entry.name] is None]
        return replace(self, opt_list=kept, dropped=(*self.dropped, *dropped))

    def rescale(self, world_size: int, *, context: Any = None) -> "Strategy":
        """Return the plan for another number of processes, with the same global batch.

        Tensor, pipe and sequence axes stay; `zero` keeps its size if it can, and `data` takes the rest. Predicted memory follows in
        proportion, and a plan that would exceed its budget is rejected; times are left out, and what was measured no longer holds.
        """
        from drivetrain.strategy.search.cost import rescaled_prediction, shortfall_of

        found, config = self.get_parallel_mode()
        check_count("world_size", world_size, owner="rescale")
        given = config.axes if self.mesh is None and found else self.mesh
        axes = resize_axes(dict(given or ()) or {"data": 1}, world_size)
        batch = self.batch
        if batch is not None:
            batch = replan_batch(batch, math.prod(axes.get(axis, 1) for axis in DATA_AXES))
        entries = [
            (name, find_method(name).scaled_to(settings, axes, batch), tunable) for name, settings, tunable in self
        ]
        mesh = None if self.mesh is None else tuple(axes.items())
        predicted = rescaled_prediction(self, axes, batch)
        if (missing := shortfall_of(predicted)) is not None:
            raise PlanInfeasible(
                f"the plan does not fit on {world_size} processes: {missing}. Use more processes, or search for a plan."
            )
        memory = "memory is the earlier prediction in proportion" if predicted else "memory is not predicted"
        reasons = [text for text in self.reasons if not text.startswith("rescale:")]
        reasons.append(f"rescale: for a world of {world_size}; {memory}, and times were left out")
        result = replace(
            self, opt_list=entries, mesh=mesh, batch=batch, predicted=predicted, measured=None, fingerprint=None,
            evidence="modelled" if predicted else "given", reasons=tuple(reasons), rejected=(), search=None,
        )  # fmt: skip
        if context is not None:
            model = getattr(context, "model", None)
            result.validate(model if isinstance(model, nn.Module) else None, context.device, world_size)
        return result

    # Using it.

    def validate(
        self,
        model: nn.Module | None = None,
        device: torch.device | str | None = None,
        world_size: int | None = None,
    ) -> None:
        """Check the plan without changing anything. Raise on conflicts, wrong settings or an impossible mesh."""
        from drivetrain.strategy.resolve import resolve_plan

        resolve_plan(self, model=model, device=device, world=world_size)

    def apply(self, context: Any) -> Any:
        """Apply the plan to a Context that holds `model`, and optionally `optimizer`, `loader` and `loss_func`; return it."""
        from drivetrain.strategy.apply import apply_to_context

        return apply_to_context(self, context)

    def explain(self, width: int = 100) -> str:
        """Return the plan in words: mesh and batch, methods in order with reasons, numbers, what was dropped and why."""
        return explain(self, width)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw throughput over memory of every candidate that the search compared, as a PNG; needs matplotlib."""
        draw(self, path)

    def diff(self, other: "Strategy") -> str:
        """Return what differs from this plan to another, one line each; empty if they are equal."""
        return difference(self, other)

    def require_success(self) -> "Strategy":
        """Return the plan, or raise its failure."""
        if self.failure is not None:
            raise PlanInfeasible(f"{self.failure.kind}: {self.failure.message}")
        return self

    # Keeping it.

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return dump(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a JSON file, atomically."""
        reject_pickle_name(path)
        text = self.to_json()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(Path(path), text.encode() + b"\n")

    @classmethod
    def from_json(cls, text: str | bytes) -> "Strategy":
        """Return the plan from a JSON text."""
        return parse_json(cls, text)

    @classmethod
    def load(cls, source: object, *, allow_pickle: bool = False) -> "Strategy":
        """Return the plan from a Strategy, a list, a dict, JSON as text or bytes, or a file.

        A text that begins with `{` or `[` is JSON, any other is a path.
        """
        return load(cls, source, allow_pickle)


def as_entry(item: object) -> Entry:
    """Return one item of a list as an entry: a name, `(name, config)` or `(name, config, tunable)`."""
    if isinstance(item, str):
        item = (item,)
    elif isinstance(item, Mapping):
        if "name" not in item or not item.keys() <= {"name", "config", "tunable"}:
            raise StrategyFormatError(
                f"an entry of a plan has the keys name, config and tunable; given {', '.join(map(str, item)) or 'none'}."
            )
        item = (item["name"], item.get("config"), item.get("tunable", False))
    form = "an entry of a plan is a name, (name, config) or (name, config, tunable)"
    if not isinstance(item, tuple | list):
        raise ConfigTypeError(f"{form}; given {item!r} ({type(item).__name__}).")
    if not 1 <= len(item) <= 3:
        raise StrategyFormatError(f"{form}; given {len(item)} items: {item!r}.")
    name, config, tunable = tuple(item) + (None, False)[len(item) - 1 :]
    if not isinstance(tunable, bool):
        raise StrategyFormatError(f"{name!r}: tunable={tunable!r} is not valid; expected True or False.")
    method = find_method(name)
    try:
        return Entry(method.name, method.parse(config), tunable)
    except (TypeError, ValueError, AttributeError) as error:  # a value of a type that the method does not look for
        if isinstance(error, DrivetrainError):
            raise
        raise MethodConfigError(f"{method.name}: the configuration {config!r} cannot be read: {error}.") from error


def fingerprint(model: nn.Module, device: torch.device, world: int, global_batch: int | None) -> Settings:
    """Return what identifies the model, device and versions that a plan was applied with."""
    text = "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    )
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": hashlib.sha256(text.encode()).hexdigest()[:16],
        "device": kind,
        "torch": torch.__version__.partition("+")[0],
        "world": world,
        "global_batch": global_batch,
    }


def changes_since(old: Mapping[str, object] | None, new: Mapping[str, object]) -> list[str]:
    """Return one line for each part of a fingerprint that differs from that of a loaded plan."""
    if old is None:
        return []
    return [
        f"loaded plan: {name} was {old[name]}, is {value}"
        for name, value in new.items()
        if name in old and old[name] != value
    ]
