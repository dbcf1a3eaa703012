"""Check once, before training, that a model computes the same on parts of a sequence.

A block that derives positions from the length it sees (a rotary table cut to `x.shape[1]`), mixes positions by something other
than attention, or attends without `F.scaled_dot_product_attention` would be silently wrong. So the inputs of attention are
compared between a whole run and a split one: sums of queries, keys and values over the sequence, weighted by position. A wrong
position changes these sums by their own size, even in an untrained model whose attention is still flat and whose outputs hardly
show it. The outputs are compared too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.module.probing import floats_in, in_evaluation
from drivetrain.module.sequence_attention import check_heads, with_shared_heads

_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
_LOOSE = 0.1  # 16 bits: an error of position is ten times that


class Fingerprints:
    """The inputs of attention in one run of a model, from the view of one rank's heads."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank
        self.calls: list[list[Tensor]] = []
        self.shapes: list[Any] = []
        self.dtype: torch.dtype = torch.float32

    def note_whole(self, call: dict[str, Any]) -> None:
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


def difference(whole: Fingerprints, split: Fingerprints, outputs: tuple[object, object]) -> str | None:
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


@contextmanager
def observing(model: nn.Module) -> Iterator[None]:
    """Run a model without gradients and dropout, and restore its random state."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type != "cpu" else []
    kind = device.type if devices else "cuda"
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=kind), in_evaluation(model):
        yield


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
