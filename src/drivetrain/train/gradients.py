"""From losses to complete gradients: accumulation, the units of an `OptimSet`, and what a checkpoint keeps of both.

The arithmetic is `drivetrain.module.accumulation`'s; this file counts the items of each batch, on this rank and on all data ranks, and
keeps the gradients of an open window as part of the state, because a checkpoint may fall inside one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ResumeError
from drivetrain.module.accumulation import AccumulationWindow, Count, as_factor, scale_gradients, share_of, widened
from drivetrain.module.distributed_tensors import is_dtensor, local_part
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.module.wrapping import clean_name
from drivetrain.optim.state import sum_gradients
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.train import loaders
from drivetrain.train.recovery import make_guard


class Gradients:
    """The accumulation window of a trainer."""

    def __init__(self, trainer: Any, length: int = 1, policy: NonFinitePolicy | None = None):
        self._trainer = trainer
        self.window = AccumulationWindow(length, num_data_ranks())
        self.synchronises = True
        """Whether the backward of the batch in hand averages over ranks."""
        self.unit_weight: Count = 1.0
        self.parts, self.is_last_part = 1, True
        """How many micro-batches the batch in hand has, and whether this is its last."""
        self._loader: Any = None
        self._total: Callable[[], Count] | None = None
        self.guard = make_guard(NonFinitePolicy() if policy is None else policy)
        """What keeps updates that are not finite out of the weights; its counts are saved with the window."""
        self.is_simple = False
        """Whether every batch is an update of one optimizer on one process, without scaler or copies: then there is nothing to do here."""

    def use_loader(self, loader: Any) -> None:
        """Take sample counts from a loader that knows them."""
        self._loader = loaders.smart_loader(loader)

    def settle(self) -> None:
        """Decide once, before the loop, whether there is anything to count."""
        window = self.window
        has_long_units = any(unit.accum_grad > 1 for unit in (self._trainer._units or {}).values())
        window.is_plain = window.is_plain and self._trainer._microbatch_size is None and not has_long_units
        scaler = getattr(self._trainer._accelerator, "scaler", None)
        has_copies = hasattr(self._trainer.optimizer, "collect_gradients")  # it trains copies of the parameters
        self.is_simple = window.is_plain and self._trainer._units is None and scaler is None and not has_copies
        if self.is_simple:
            window.opens = window.closes = self.synchronises = True

    def open(self, last: bool) -> None:
        """Take a batch into the window; the units of an `OptimSet` decide about theirs."""
        window, units = self.window, self._trainer._units
        window.begin(last)
        self.synchronises = window.closes
        if units is not None:
            clock = self._trainer.state.clock
            plan = units.begin_batch(clock.batch + 1, clock.epoch + 1, last=last)
            window.closes, self.synchronises = plan.closes, plan.ddp_sync

    def use_sums(self, is_sum: bool) -> None:
        """Add losses up instead of averaging them, or not; also in the windows of units."""
        self.window.is_sum = is_sum
        for unit in (self._trainer._units or {}).values():
            unit.window.is_sum = is_sum

    def close(self) -> None:
        """Forget the window: its update is done."""
        self.window.reset()

    def refer_to(self, items: Count) -> None:
        """Fix the count that weights are relative to, once per run and alike on all ranks."""
        if self.window.reference is None:
            self.window.reference = loaders.agree_on_reference(items)  # once; this synchronizes the host

    def weigh(self, loss: Tensor, output: Mapping[str, Any]) -> Tensor:
        """Return the loss weighted by its share of the window's items."""
        window = self.window
        if window.is_plain:
            return loss
        if output.get("num_items_in_batch") is not None:  # the caller has normalised over all ranks
            self.refer_to(1)
            self._is_normalised = True
            assert window.reference is not None
            return window.weigh(loss * window.world, window.reference, window.reference * window.world)
        items, everywhere = self._count(output)
        if window.is_sum:
            self.unit_weight = items
            return loss if self._trainer._units is not None else window.weigh(loss, items, None)
        is_counted = output.get("num_items") is not None
        is_split = window.length > 1 or self._trainer._microbatch_size is not None
        if everywhere is None and not is_split and self._trainer._units is None:
            total = loaders.start_sum_over_ranks(items, self._trainer.device)()
            return loss * as_factor(share_of(items, total, window.world), loss)
        self.refer_to(items * self.parts if is_counted else self._rows or items)
        if self._trainer._units is not None:
            assert window.reference is not None
            self.unit_weight = widened(items) / window.reference
            return loss
        weighted = window.weigh(loss, items, everywhere)
        if (
            window.everywhere is None and self.synchronises and self.is_last_part
        ):  # known by the end of the backward pass
            self._total = loaders.start_sum_over_ranks(window.items, self._trainer.device)
        return weighted

    def begin_part(self, index: int, parts: int, rows: int) -> None:
        """Take a micro-batch of a batch with so many rows."""
        self.parts, self.is_last_part, self._rows = parts, index == parts - 1, rows

    _rows: int | None = None
    _is_normalised = False  # over the window as the caller had planned it, on as many ranks

    def named_losses(self, loss: Tensor) -> dict[str, Tensor]:
        """Return every named loss of the batch for the units; `loss` is always the one given here."""
        state = self._trainer.state
        return {**(state.batch_output.get("losses") or state.losses or {}), "loss": loss}

    def finish(self) -> None:
        """Make the window's gradients the mean over all its items, unscaled."""
        trainer, window = self._trainer, self.window
        if trainer._units is not None:
            trainer._units.finish_gradients()
            return
        collect = getattr(trainer.optimizer, "collect_gradients", None)
        if collect is not None:  # clipping, unscaling and the update look at the copies
            collect()
        if getattr(trainer._accelerator, "scaler", None) is not None:
            trainer._accelerator.unscale(trainer.optimizer)
        if window.is_plain:
            return
        total, self._total = None if self._total is None else self._total(), None
        factor = window.correction(total)
        if factor is not None:
            scale_gradients(trainer._parameters(), factor)

    def _count(self, output: Mapping[str, Any]) -> tuple[Count, Count | None]:
        """Return how many items this loss is a mean over, here and on all ranks (None: a reduction must tell)."""
        trainer, alone = self._trainer, self.window.world == 1
        info = self._loader.batch_info if self._loader is not None else None
        items = output.get("num_items")
        if items is not None:
            items = (
                0 if info is not None and info.size == 0 else items
            )  # a stand-in for a rank that has no samples left
            return items, items if alone else None
        if info is None:
            return output["batch_size"], output["batch_size"] if alone else None
        if trainer._microbatch_size is None:
            return info.size, info.global_size
        return (output["batch_size"] if info.size else 0), output["batch_size"] if alone else None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the window and, when it is open, what this rank has gathered in it."""
        window, axes, partial = self.window, self._axes(), {}
        counts = window.state_dict()
        items = counts.pop("items")
        counts |= {"length": window.length, "world": window.world, "is_sum": window.is_sum}
        if window.count:
            # Units keep their own gradients.
            open_ones = {} if self._trainer._units is not None else dict(self._parameters())
            grads = {name: p.grad for name, p in open_ones.items() if p.grad is not None}
            partial = {
                "items": items,
                "is_whole": not (axes or self._is_normalised or any(map(is_dtensor, grads.values()))),
                "grads": {name: local_part(grad).detach().clone() for name, grad in grads.items()},
            }
        guard = self.guard.state_dict()
        return {"window": counts, "partial": partial, "axes": axes if partial else None, "guard": guard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the window back as it was."""
        partial, axes = state["partial"], self._axes()
        if "guard" in state:  # older checkpoints have none
            self.guard.load_state_dict(state["guard"])
        if partial and (state.get("axes") or {}) != axes:
            raise ResumeError(
                f"the checkpoint was taken inside an accumulation window, with the axes {state.get('axes') or 'of data alone'}, and this "
                f"run has {axes or 'data alone'}: gradients of an open window belong to their ranks. Resume with the same plan, or from a "
                "checkpoint between two updates."
            )
        window, counts, units = self.window, state["window"], self._trainer._units
        window.load_state_dict({**counts, "items": partial.get("items", 0)})
        is_moved = counts.get("world", window.world) != window.world
        if (partial and window.length == 1) or (is_moved and units is not None):
            window.is_plain = False  # what was gathered elsewhere has weights, so that what is added needs them too
        if units is not None:
            return
        grads = partial.get("grads", partial)  # earlier versions had no level between
        length = counts.get("length", window.length)
        factor = 1.0 if counts.get("is_sum") else length / window.length
        for name, parameter in self._parameters():
            saved = grads.get(name)
            parameter.grad = None if saved is None else torch.empty_like(parameter)
            if parameter.grad is not None:
                local_part(parameter.grad).copy_(saved if factor == 1.0 else saved * factor)

    def _axes(self) -> dict[str, int]:
        """Return the axes along which ranks work on the same samples."""
        plan = getattr(self._trainer, "plan", None)
        axes = () if plan is None else plan.mesh or ()
        return {axis: size for axis, size in axes if axis in ("tensor", "sequence") and size > 1}

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        model = self._trainer.model
        return [(clean_name(name), p) for name, p in model.named_parameters()] if isinstance(model, nn.Module) else []


def merge_partial(saved: list[Any], rank: int) -> dict[str, Any]:
    """Return one rank's part of a window that another number of ranks has opened.

    What counts is the sum over all ranks, of gradients and of items (see `drivetrain.module.accumulation`): the first rank takes it, and
    the others begin with nothing.
    """
    if not any(saved):
        return {}
    if not all(part and part.get("is_whole") for part in saved):
        raise ResumeError(
            f"it was taken inside an accumulation window by {len(saved)} ranks that share a model or have normalised the loss "
            "themselves, so the gradients of the open window cannot be moved to another number of ranks"
        )
    items = sum(part["items"] for part in saved)
    return {
        **saved[0],
        "items": items if rank == 0 else 0,
        "grads": sum_gradients([part["grads"] for part in saved], rank),
    }
