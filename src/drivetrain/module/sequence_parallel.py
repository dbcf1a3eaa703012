"""Run the blocks of a model on pieces of the sequence, each rank on its own.

Everything outside the blocks (embeddings, positions, masks, rotary tables, head, loss) runs on the whole sequence, on every rank alike. At
the first block of a family the sequence is cut, after the last it is joined; in between, activations are divided by the number of ranks.
Tables that come in from outside are cut like the sequence; masks are not, because attention sees all of it.

The first call of a kind runs the model twice more, without gradients, whole and split. A block that derives positions from the length it
sees, mixes positions by something other than attention, or attends without `F.scaled_dot_product_attention` would be silently wrong. So
outputs and inputs of attention are compared: sums of queries, keys and values over the sequence, weighted by position. A wrong position
changes these by their own size, even in an untrained model whose outputs hardly show it. If something between two blocks needs the whole
sequence, each block cuts and joins for itself.

The mean of gradients over the ranks of the group is the gradient of the whole model.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from drivetrain.core.errors import ConfigError
from drivetrain.module.attention import AttentionCalls
from drivetrain.module.blocks import find_blocks
from drivetrain.module.checkpointing import CACHE_ARGUMENTS
from drivetrain.module.probing import eval_mode, floats_in
from drivetrain.module.sequence_attention import (
    RingAttention,
    SequenceAttention,
    check_heads,
    gather_sequence,
    open_multihead,
    with_shared_heads,
)
from drivetrain.module.wrapping import GeneratedClass, add_mixin, user_class
from drivetrain.runtime.collectives import agree_any

Mode = Literal["whole", "chain", "single"]
"""How blocks run: on the whole sequence; cut at a family's first and joined at its last; each cut and joined for itself."""

_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
_LOOSE = 0.1  # 16 bits: an error of position is ten times that


class Fingerprints:
    """The inputs of attention in one run of a model, from the view of one rank's heads."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank
        self.calls: list[list[Tensor]] = []
        self.shapes: list[tuple[tuple[int, ...], bool, bool]] = []
        self.dtype: torch.dtype = torch.float32

    def record_full_call(self, call: dict[str, Any]) -> None:
        """Record a call that has the whole sequence and all heads."""
        query = call["query"]
        if query.ndim != 4 or call["key"].shape[-2] != query.shape[-2]:
            return
        check_heads(query.shape[1], self.size)
        local = []
        for x in with_shared_heads(call, self.size):
            heads = x.shape[1] // self.size
            local.append(x.narrow(1, self.rank * heads, heads))
        self.note(local, call)

    def note(self, tensors: list[Tensor], call: dict[str, object]) -> None:
        """Record a call, given this rank's heads of queries, keys and values for the whole sequence."""
        self.dtype = tensors[0].dtype
        self.calls.append([_weighted_sum(x) for x in tensors])
        self.shapes.append((tuple(tensors[0].shape), call.get("attn_mask") is None, bool(call.get("is_causal"))))

    def lengths(self) -> set[int]:
        """Return the lengths of the attended sequences."""
        return {shape[2] for shape, _, _ in self.shapes}


class SequenceSplit:
    """What the blocks of one model share: the ranks, and how the current call is run."""

    def __init__(self, group: ProcessGroup, seq_dim: int, ring: RingAttention | None = None):
        self.group, self.seq_dim, self.ring = group, seq_dim, ring
        self.size, self.rank = group.size(), group.rank()
        self.mode: Mode = "whole"
        self.notes: Fingerprints | None = None
        self.is_open = False  # whether a family's sequence is cut and not yet joined
        self.checked: dict[object, Mode] = {}
        """How each kind of call is run, from its one check."""

    def __deepcopy__(self, memo: object) -> "SequenceSplit":
        return SequenceSplit(self.group, self.seq_dim, self.ring)  # a process group cannot be copied, and need not be

    def piece(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part. Its gradient is zero elsewhere, and the mean over ranks combines the parts."""
        local = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * local, local)

    def attend_and_record(self, call: dict[str, Any]) -> Tensor:
        """Attend as usual and note the call."""
        assert self.notes is not None
        self.notes.record_full_call(call)
        return torch.nn.functional.scaled_dot_product_attention(**call)


def split_sequence(
    model: nn.Module,
    group: ProcessGroup,
    seq_dim: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    impl: Literal["ulysses", "ring"] = "ulysses",
) -> list[str]:
    """Make a model's blocks run on parts of the sequence, in place, and return their names.

    `seq_dim` is the dimension of the sequence in what the blocks take; `mesh` is the group's, for `impl="ring"`.
    """
    families = [family for family in find_blocks(model) if family.repeats]
    if not families:
        raise ConfigError(
            f"sequence_parallel: {type(model).__name__} has no repeated blocks that could run on parts of a "
            "sequence. Give the model a set_sp(sp_size, sp_rank, sp_group) method."
        )
    assert mesh is not None or impl != "ring"
    shared = SequenceSplit(group, seq_dim, RingAttention(mesh) if mesh is not None and impl == "ring" else None)
    for family in families:
        for block in family.members:
            open_multihead(block)
            place = (block is family.members[0], block is family.members[-1])
            add_mixin(block, SequenceBlock, _sequence_split=shared, _sequence_place=place)
    add_mixin(model, SequenceModel, _sequence_split=shared)
    return [name for family in families for name in family.names]


class SequenceModel(GeneratedClass):
    """Makes a model decide at each call how its blocks run."""

    _sequence_split: SequenceSplit

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model's own forward, and check each new kind of call."""
        run, split = super().forward, self._sequence_split  # type: ignore[misc]
        kind = _kind(self, args, kwargs)  # type: ignore[arg-type]
        mode = split.checked.get(kind)
        if mode is None:
            mode = _check(self, run, split, args, kwargs)  # type: ignore[arg-type]
            if mode != "whole":
                split.checked[kind] = mode
        split.mode, split.is_open = mode, False
        out = run(*args, **kwargs)
        if split.is_open:
            raise ConfigError(
                "sequence_parallel: the last block of a family did not run, so the sequence was not gathered again. Remove methods that "
                "skip blocks at random, such as stochastic depth."
            )
        return out


class SequenceBlock(GeneratedClass):
    """Makes a block run on this rank's part of the sequence."""

    _sequence_split: SequenceSplit
    _sequence_place: tuple[bool, bool]

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Split a whole input, attend over all ranks, and gather the output of the last block."""
        run, split = super().forward, self._sequence_split  # type: ignore[misc]
        if split.mode == "whole":
            if split.notes is None:
                return run(*args, **kwargs)
            with AttentionCalls(split.attend_and_record):
                return run(*args, **kwargs)
        names, values = _named(self, args, kwargs)  # type: ignore[arg-type]
        stream = _stream(values, split.seq_dim, user_class(self))  # type: ignore[arg-type]
        is_first, is_last = self._sequence_place
        comes_whole, leaves_whole = split.mode == "single" or is_first, split.mode == "single" or is_last
        length = values[stream].shape[split.seq_dim] * (1 if comes_whole else split.size)
        has_cache = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
        is_inference = split.notes is None and not torch.is_grad_enabled()
        if comes_whole and is_inference and (has_cache or length % split.size):
            # Generation: remembered keys belong to whole sequences, and few positions come at a time.
            split.mode = "whole"
            return run(*args, **kwargs)
        if length % split.size:
            raise ConfigError(
                f"sequence_parallel: a sequence of {length} positions does not divide over {split.size} ranks. Pad it to "
                f"{length + split.size - length % split.size}, or cut it to {length - length % split.size}."
            )
        activations = values[stream]
        rows = activations.shape[1 - split.seq_dim] if split.seq_dim < 2 else activations.shape[0]
        for index, name in enumerate(names):
            if index != stream:
                values[index] = _cut(split, length, rows, name, values[index])
            elif comes_whole:
                values[index] = split.piece(activations, split.seq_dim)
        args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))
        kwargs |= {name: None for name in CACHE_ARGUMENTS if kwargs.get(name) is not None}
        with AttentionCalls(SequenceAttention(split.group, length, split.ring, split.notes)):
            out = run(*args, **kwargs)
        split.is_open = not leaves_whole
        return _joined(out, split, length) if leaves_whole else out


def _cut(split: SequenceSplit, length: int, rows: int, name: str, value: Any) -> Any:
    """Return this rank's part of tables with one entry a position; masks, biases and what has no such dimension stay whole."""
    if isinstance(value, Tensor):
        dim = None if "mask" in name or "bias" in name else _sequence_dim(split, length, rows, name, value)
        return value if dim is None else split.piece(value, dim)
    if isinstance(value, dict):
        return {key: _cut(split, length, rows, str(key), item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cut(split, length, rows, name, item) for item in value)
    return value


_TABLES = ("position_embeddings", "rotary", "rope", "freqs")
"""Names of arguments that hold one row for each position, also where a row is as long as the sequence."""


def _sequence_dim(split: SequenceSplit, length: int, rows: int, name: str, value: Tensor) -> int | None:
    dims = [dim for dim, size in enumerate(value.shape) if size == length]
    is_table = any(word in name for word in _TABLES)
    if value.ndim >= 2 and value.shape[-1] == value.shape[-2] == length and not is_table:
        return None  # one entry for each pair of positions: a mask under another name
    if split.seq_dim in dims:
        return split.seq_dim
    if dims and dims[0] == 0 and value.ndim > 1 and length == rows:
        dims = dims[1:]  # as many samples as positions
    return dims[0] if dims else None


def _named(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return the names and values of all arguments, positional ones first."""
    parameters = inspect.signature(user_class(block).forward).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    names = positional[: len(args)] + [""] * (len(args) - len(positional))
    return [*names, *kwargs], [*args, *kwargs.values()]


def _stream(values: list[Any], seq_dim: int, cls: type) -> int:
    """Return which argument holds the activations: the first floating-point tensor that has a sequence and features."""
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3 and value.ndim > seq_dim:
            return index
    raise ConfigError(
        f"sequence_parallel: the block {cls.__name__} was called without a tensor of (batch, sequence, features), so there is no "
        f"sequence to cut along dimension {seq_dim}."
    )


def _joined(out: Any, split: SequenceSplit, length: int) -> Any:
    """Return a block's output with every piece of a sequence made whole."""
    dim = split.seq_dim

    def joined(x: Tensor) -> Tensor:
        is_piece = x.ndim >= 3 and x.ndim > dim and x.shape[dim] == length // split.size
        return gather_sequence(x, dim, split.group) if is_piece else x

    return tree_map_only(Tensor, joined, out)


def _kind(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return what distinguishes kinds of calls: which path a model takes may depend on it."""

    def describe(value: object) -> object:
        if isinstance(value, Tensor):
            return value.ndim
        if isinstance(value, dict):
            return tuple((str(key), describe(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return tuple(map(describe, value))
        return value if isinstance(value, str | int | float | bool | None) else type(value).__name__

    return model.training, torch.is_grad_enabled(), describe(args), describe(kwargs)


def _check(
    model: nn.Module, run: Callable[..., object], split: SequenceSplit, args: tuple[object, ...], kwargs: dict[str, Any]
) -> Mode:
    """Return the first way to split that keeps the results on all ranks; whole for inference on a length that does not divide."""
    is_inference = not torch.is_grad_enabled()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    forked = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    size, rank = (1, 0) if split.ring is not None else (split.size, split.rank)
    reasons = []
    try:
        with torch.no_grad(), forked, eval_mode(model):
            split.mode, split.notes = "whole", Fingerprints(size, rank)
            expected, whole = run(*args, **kwargs), split.notes
            if is_inference and any(length % split.size for length in whole.lengths()):
                return "whole"
            modes: tuple[Mode, ...] = ("chain", "single")
            for mode in modes:
                split.mode, split.notes = mode, Fingerprints(size, rank)
                try:
                    reason = _difference(whole, split.notes, (expected, run(*args, **kwargs)))
                except ConfigError:
                    raise
                except Exception as error:  # whatever a model does when its input is shorter than it thinks
                    reason = f"{type(error).__name__}: {error}"
                if not agree_any(reason is not None):
                    return mode
                reasons.append(reason or "another rank found a difference")
    finally:
        split.mode, split.notes = "whole", None
    raise ConfigError(
        f"sequence_parallel: {user_class(model).__name__} computes different results on parts of the sequence: {reasons[-1]}. Compute "
        "positions and masks outside the blocks and pass them in, split the batch yourself with batch_sp_processing_fn, or give the model "
        "a set_sp(sp_size, sp_rank, sp_group) method."
    )


def _difference(whole: Fingerprints, split: Fingerprints, outputs: tuple[object, object]) -> str | None:
    """Return how a split run differs from a whole one, or None if it does not."""
    if not whole.calls:
        return (
            "no block calls F.scaled_dot_product_attention, so its attention cannot be split. Use it in the model; for models of "
            "transformers, set_attn_implementation('sdpa') or the method module_replace"
        )
    tolerance = _TOLERANCES.get(whole.dtype, _LOOSE)
    if whole.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        tolerance = 2e-2  # TF32
    if whole.shapes != split.shapes:
        return "attention is called with other shapes"
    for index, (expected, found) in enumerate(zip(whole.calls, split.calls)):
        for name, first, second in zip(("queries", "keys", "values"), expected, found):
            if not _close(first, second, tolerance):
                return (
                    f"the {name} of attention call {index} differ, so a block finds positions from the length it sees"
                )
    expected_leaves, found_leaves = map(floats_in, outputs)
    if [x.shape for x in expected_leaves] != [x.shape for x in found_leaves]:
        return "the outputs have other shapes"
    for first, second in zip(expected_leaves, found_leaves):
        if not _close(first.float(), second.float(), tolerance):
            return "the outputs differ, so something other than attention mixes positions inside the blocks"
    return None


def _weighted_sum(x: Tensor) -> Tensor:
    """Return (batch, heads, width): the sum over positions, each with a weight of its own."""
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    return torch.einsum("bhtd,t->bhd", x.detach().float(), torch.cos(positions * 2.4))


def _close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    if first.shape != second.shape:
        return False
    if first.numel() == 0:
        return True
    first, second = first.nan_to_num(), second.nan_to_num()
    return bool((first - second).abs().max() <= tolerance * first.abs().max() + 1e-6)
