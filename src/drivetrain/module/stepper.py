"""The Stepper: from the losses of an accumulation window to one update of one optimizer.

The Trainer, hand-written loops around what `auto_accelerate` returns, and each unit of an `OptimSet` step through this file. For every
micro-batch the loop calls `begin`, then `backward` with the loss that `weigh` returned. Where the window closes it calls `finish`
(gradients become the mean over the window and all ranks, unscaled), clips, then `step` or `end_skipped_update`, `clear` and `end`.

A checkpoint may be taken inside a window: `state_dict` then holds the gradients that this rank has collected.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.errors import ResumeError
from drivetrain.core.types import StateDict
from drivetrain.module.accumulation import AccumulationWindow, Count, as_factor, scale_gradients, share_of
from drivetrain.module.distributed_tensors import is_dtensor, local_part
from drivetrain.module.finite import NonFinitePolicy, StepGuard, any_nonfinite, entries_of, on_any_rank
from drivetrain.module.gradient_sync import GradientSync, average_gradients, start_sum_over_ranks
from drivetrain.module.optimizers import served_parameters, start_momentum
from drivetrain.module.wrapping import clean_name
from drivetrain.runtime.coders import generator_kind
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.ranks import data_group, is_distributed


class Stepper:
    """The accumulation window of one optimizer, and what happens to its gradients.

    >>> model = nn.Linear(2, 1)
    >>> stepper = Stepper(torch.optim.SGD(model.parameters(), lr=0.1), AccumulationWindow(length=2))
    >>> for x, is_last in ((torch.ones(3, 2), False), (torch.ones(1, 2), True)):
    ...     stepper.begin(is_last)
    ...     stepper.backward(stepper.weigh(model(x).mean(), items=len(x), everywhere=len(x)))
    >>> stepper.finish()
    >>> model.weight.grad
    tensor([[1., 1.]])
    >>> stepper.step(); stepper.clear(); stepper.end()
    """

    def __init__(
        self,
        optimizer: Any,
        window: AccumulationWindow,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
        policy: NonFinitePolicy | None = None,
        device: torch.device | str | None = None,
        parameters: Sequence[Tensor] | None = None,
    ):
        self._own = parameters  # those of a unit, whatever groups its optimizer has
        self.optimizer, self.window, self.scaler, self.device = optimizer, window, scaler, device
        self.guard = StepGuard(NonFinitePolicy() if policy is None else policy)
        """Keeps updates that are not finite out of the weights; its counts are saved with the window."""
        self.sync: GradientSync | None = None
        """What averages gradients over ranks, if the loop needs it."""
        self.model: object = None
        """Whose gradients are saved inside a window."""
        self.axes: dict[str, int] = {}
        """The axes along which ranks work on the same samples: their open windows cannot be moved to other ranks."""
        self.synchronises = True
        """Whether the backward of the current batch averages over ranks."""
        self.was_skipped: bool | Tensor = False
        """Whether the last update was skipped; for a fused optimizer a flag on the device."""
        self.is_finished = False
        """Whether the gradients of the closing window are complete and unscaled."""
        self.is_simple = self._clears_as_torch = False
        """Whether every batch is an update of one optimizer on one process, without scaler or copies: there is nothing to weigh."""
        self.is_complete = False
        """Whether losses are weighted by the known size of their window, so that gradients are complete after the last backward."""
        held = _held_by(optimizer)
        self._numbers = {name: value for name, value in held.items() if generator_kind(value) is None}
        self._step: Callable[[], object] | None = None  # of the optimizer, without the profiler's mark
        self._is_normalised = False  # over the window as the caller had planned it, on as many ranks
        self._total: Callable[[], Count] | None = None  # the items of the window on all ranks, on their way
        self._apart: list[Tensor] = []  # of several ranks, what no wrapper averages

    def prepare(self, *, is_split: bool = False, is_exchanged: bool = False, tests: bool = True) -> None:
        """Decide once what depends only on the final optimizer and model.

        `is_split`: batches come in parts. `is_exchanged`: several ranks decide together about updates that are not finite; `tests` is
        whether anybody asks for that.
        """
        optimizer, window = self.optimizer, self.window
        start_momentum(optimizer)
        window.is_plain = window.is_plain and not is_split
        has_copies = hasattr(optimizer, "collect_gradients")
        self.is_simple = window.is_plain and self.scaler is None and not has_copies
        if self.is_simple:
            window.opens = window.closes = self.synchronises = True
        self.skip_marks()
        self._apart = self.parameters_apart() if window.world > 1 else []
        own = getattr(type(optimizer), "zero_grad", None)
        self._clears_as_torch = own is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
        if tests and isinstance(getattr(optimizer, "param_groups", None), list):
            self.guard.prepare(
                optimizer, self.model, is_exchanged=is_exchanged, is_tested_elsewhere=self.scaler is not None
            )

    def skip_marks(self) -> None:
        """Step without the profiler's mark from now on, unless a scaler steps."""
        self._step = None if self.scaler is not None else unmarked_step(self.optimizer)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the next step updates."""
        if self._own is not None:
            return list(self._own)
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def parameters_apart(self) -> list[Tensor]:
        """Return what the optimizer trains and the model does not have, such as weights of the loss function."""
        model, held = self.model, getattr(self.optimizer, "optimizers", None)
        optimizers = held if isinstance(held, list) else [self.optimizer]
        own = set(map(id, model.parameters())) if isinstance(model, nn.Module) else set()
        trained = [p for one in optimizers if _has_groups(one) for p in served_parameters(one)]
        return [p for p in trained if id(p) not in own]

    # A micro-batch.

    def begin(self, last: bool) -> None:
        """Add the next micro-batch to the window. `last` closes a window that is not full."""
        self.window.begin(last)
        self.synchronises = self.window.closes

    def weigh(
        self,
        loss: Tensor,
        items: Count,
        everywhere: Count | None,
        *,
        reference: Count | None = None,
        is_last_part: bool = True,
        is_whole: bool = False,
    ) -> Tensor:
        """Return the loss weighted by its share of the window's items.

        `everywhere` are the items on all ranks, None where only a reduction knows. `reference` is the count that weights are relative
        to. A batch may come in parts, of which the last completes the count; `is_whole` says that it never does.
        """
        window = self.window
        if window.is_plain:
            return loss
        if window.is_sum:
            return window.weigh(loss, items, None)
        if everywhere is None and is_whole and window.length == 1:
            total = self._start_sum(items)()
            return loss * as_factor(share_of(items, total, window.world), loss)
        if window.reference is None:
            self._refer_to(items if reference is None else reference)
        weighted = window.weigh(loss, items, everywhere)
        if window.everywhere is None and self.synchronises and is_last_part and window.world > 1:
            self._total = self._start_sum(window.items)  # known by the end of the backward pass
        return weighted

    def weigh_normalised(self, loss: Tensor) -> Tensor:
        """Return the weighted loss if the caller has divided it by the items of the batch on all ranks."""
        window = self.window
        if window.is_plain:
            return loss
        self._refer_to(1)
        self._is_normalised = True
        assert window.reference is not None
        return window.weigh(loss * window.world, window.reference, window.reference * window.world)

    def _start_sum(self, items: Count) -> Callable[[], Count]:
        return start_sum_over_ranks(items, self.device, None if self.sync is None else self.sync.group())

    def _refer_to(self, items: Count) -> None:
        """Fix the count that weights are relative to, once per run and alike on all ranks: the first one that rank 0 saw."""
        if self.window.reference is None:
            number = items.item() if isinstance(items, Tensor) else items  # once; this synchronizes the host
            self.window.reference = (broadcast_from_master(number) if is_distributed() else number) or 1

    def use_sums(self, is_sum: bool) -> None:
        """Set whether losses are summed instead of averaged."""
        self.window.is_sum = is_sum

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Back-propagate, with loss scaling if float16 needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    # The end of a window.

    def complete(self, parameters: Iterable[Tensor]) -> Count:
        """Scale the gradients collected before the last backward of a window to its items; return the factor for that backward."""
        self.is_complete = True
        return self._scale_to_items(parameters)

    def finish(self) -> None:
        """Turn the gradients into those of the mean over the window, unscaled. A second call changes nothing."""
        if self.is_finished:
            return
        self.is_finished = True
        if self._apart:
            average_gradients(self._apart, data_group())
        collect = getattr(self.optimizer, "collect_gradients", None)
        if collect is not None:  # it trains copies of the parameters: clipping, unscaling and the update look at those
            collect()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            if self.sync is not None and self.sync.is_sharded:
                # An overflow in one rank's shard lowers the scale of all.
                for found in self.scaler._found_inf_per_device(self.optimizer).values():
                    on_any_rank(found, self.sync.group())
        if not (self.window.is_plain or self.is_complete):
            self._scale_to_items()

    def _scale_to_items(self, parameters: Iterable[Tensor] | None = None) -> Count:
        """Multiply gradients by the factor that makes them the mean over the items of the window; return the factor."""
        window = self.window
        total, self._total = None if self._total is None else self._total(), None
        if total is None and window.everywhere is None and not window.is_sum and window.world > 1:
            total = self._start_sum(window.items)()
        factor = window.correction(total)
        if factor is None:
            return 1.0
        scale_gradients(self.parameters if parameters is None else parameters, factor)
        return factor

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Update the parameters. A scaler skips the step if a gradient overflowed."""
        if self._step is None or closure is not None:
            self.was_skipped = step(self.optimizer, self.scaler, closure)
        else:
            self.was_skipped = False
            self._step()

    def step_optimizer(self) -> None:
        """Step the optimizer and nothing else: its gradients are unscaled and tested."""
        self.optimizer.step() if self._step is None else self._step()

    def step_unless(self, overflow: Tensor) -> None:
        """Step a fused optimizer, which does not change parameters and state if the flag is one."""
        self.was_skipped = self.optimizer.found_inf = overflow
        self.optimizer.step()
        del self.optimizer.found_inf

    def end_skipped_update(self) -> None:
        """End an update that is skipped."""
        self.was_skipped = True
        if self.scaler is not None:
            self.scaler.update()  # it has unscaled these gradients, and learns here that they are done with

    def skipped_units(self) -> "Sequence[bool | Tensor] | None":
        """Return what a scaler has skipped in the last update, None if the guard itself has tested."""
        return None if self.scaler is None else [self.was_skipped]

    def update(self, skip_nonfinite: bool = False) -> bool:
        """Complete the gradients, step and end the window. Return whether the parameters were updated. This synchronizes the host."""
        self.finish()
        if skip_nonfinite and self.scaler is None and any_nonfinite(self.parameters):
            self.was_skipped = True
        else:
            self.step()
        self.end()
        return not self.was_skipped

    def clear(self) -> None:
        """Clear the gradients as `zero_grad()` does, without its profiler mark, which costs more than the rest."""
        if not self._clears_as_torch:
            self.optimizer.zero_grad()
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def end(self) -> None:
        """Reset the window after its update."""
        self.window.reset()
        self.is_finished, self._total = False, None

    # State.

    def state_dict(self) -> StateDict:
        """Return the counts of the window and, when it is open, the gradients that this rank has collected in it."""
        window, partial = self.window, {}
        counts = window.state_dict()
        items = counts.pop("items")
        counts |= {"length": window.length, "world": window.world, "is_sum": window.is_sum}
        if window.count:
            grads = {name: p.grad for name, p in self._named_parameters() if p.grad is not None}
            partial = {
                "items": items,
                "is_whole": not (self.axes or self._is_normalised or any(map(is_dtensor, grads.values()))),
                "grads": {name: local_part(grad).detach().to_dense().clone() for name, grad in grads.items()},
                "sparse": {name: grad.sparse_dim() for name, grad in grads.items() if grad.is_sparse},
            }
        guard = self.guard.state_dict(bool(window.count))
        held = {name: value for name, value in _held_by(self.optimizer).items() if value != self._numbers.get(name)}
        state = {"window": counts, "partial": partial, "axes": self.axes if partial else None, "guard": guard}
        return {**state, "optimizer": held} if held else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window."""
        partial, window, counts = state["partial"], self.window, state["window"]
        for name, value in state.get("optimizer", {}).items():
            kind, live = generator_kind(value), getattr(self.optimizer, name, None)
            if kind is not None and kind is generator_kind(live):
                kind.restore(live, kind.state(value))
            elif type(value) in (int, float) and type(live) in (int, float):
                setattr(self.optimizer, name, value)
        if "guard" in state:  # older checkpoints have none
            self.guard.load_state_dict(state["guard"])
        if partial and (state.get("axes") or {}) != self.axes:
            raise ResumeError(
                f"the checkpoint was taken inside an accumulation window, with the axes {state.get('axes') or 'of data alone'}, and this "
                f"run has {self.axes or 'data alone'}: gradients of an open window belong to their ranks. Resume with the same plan, or "
                "from a checkpoint between two updates."
            )
        window.load_state_dict({**counts, "items": partial.get("items", 0)})
        if partial and window.length == 1:
            window.is_plain = False  # what was collected elsewhere has weights, so what is added needs them too
        grads = partial.get("grads", partial)  # earlier versions had no level between
        sparse = partial.get("sparse", {})
        factor = 1.0 if counts.get("is_sum") else counts.get("length", window.length) / window.length
        for name, parameter in self._named_parameters():
            saved = grads.get(name)
            if saved is None:
                parameter.grad = None
            else:
                parameter.grad = torch.empty_like(parameter)
                local_part(parameter.grad).copy_(saved).mul_(factor)
                if name in sparse:
                    parameter.grad = parameter.grad.to_sparse(sparse[name])

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        model = self.model
        own = model.named_parameters() if isinstance(model, nn.Module) else ()
        apart = ((f"apart.{index}", p) for index, p in enumerate(self.parameters_apart()))
        return [*((clean_name(name), p) for name, p in own), *apart]


def _has_groups(optimizer: object) -> bool:
    return isinstance(getattr(optimizer, "param_groups", None), list)


def _held_by(optimizer: object) -> dict[str, object]:
    """Return the numbers and generators that an optimizer keeps as attributes: those that change are state, but not in `state_dict()`."""
    held = getattr(optimizer, "__dict__", {}).items()
    return {name: value for name, value in held if type(value) in (int, float) or generator_kind(value) is not None}


def merge_windows(saved: Sequence[Mapping[str, Any]], rank: int, counted: str = "items") -> StateDict:
    """Return one rank's part of a window that other ranks opened: the first takes the sums of gradients and items."""
    if not any(saved):
        return {}
    if not all(part and part.get("is_whole") for part in saved):
        raise ResumeError(
            f"it was taken inside an accumulation window by {len(saved)} ranks that share a model or have normalised the loss "
            "themselves, so the gradients of the open window cannot be moved to another number of ranks"
        )
    sums: dict[str, Tensor] = {}
    for part in saved:
        for name, grad in part["grads"].items():
            sums[name] = sums[name] + grad if name in sums else grad
    items = sum(part[counted] for part in saved)
    return {
        **saved[0],
        counted: items if rank == 0 else 0,
        f"{counted}_reduce_over_last_stages": items,
        "grads": sums if rank == 0 else {name: torch.zeros_like(grad) for name, grad in sums.items()},
    }


def step(optimizer: Any, scaler: "torch.amp.GradScaler | None", closure: Callable[[], object] | None = None) -> bool:
    """Step an optimizer; return whether its scaler skipped the step because a gradient overflowed."""
    if scaler is None:
        optimizer.step() if closure is None else optimizer.step(closure)
        return False
    before = scaler.get_scale()  # the host waits for the device here: the one read that float16 needs
    if closure is None:
        scaler.step(optimizer)
    else:  # by position: torch rejects the keyword, because most closures would bring scaled gradients
        scaler.step(optimizer, closure)
    scaler.update()
    return bool(scaler.get_scale() < before)


def unmarked_step(optimizer: Any) -> Callable[[], object] | None:
    """Return an optimizer's `step` without its profiler mark, or None if it has none.

    Torch wraps every optimizer's `step` to mark it and to call hooks. On a CPU the mark alone may cost more than the step of a small
    model. While a profiler is on, where there are hooks, and where the optimizer was given another `step`, that one is called.
    """
    from torch.optim import optimizer as torch_optimizer

    method, replaced = getattr(type(optimizer), "step", None), vars(optimizer)
    inner = getattr(method, "__wrapped__", None)
    if inner is None or not getattr(method, "hooked", False) or "step" in replaced:
        return None
    own_pre, own_post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    all_pre, all_post = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    profiles = torch.autograd._profiler_enabled

    def call() -> object:
        if own_pre or own_post or all_pre or all_post or "step" in replaced or profiles():
            return optimizer.step()
        return inner(optimizer)

    return call


def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every entry of the gradients."""
    grads = []
    for p in parameters:
        if p.grad is not None:
            if p.grad.is_sparse:  # a row may be in it several times, and counts with its sum
                p.grad = p.grad.coalesce()
            grads.append(entries_of(local_part(p.grad)))
    if grads:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)


def grad_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, *, device: torch.device | str | None = None, stages: int = 1
) -> Tensor:
    """Return the norm of the gradients over all ranks that hold parts of them. Full and sharded gradients may be mixed.

    `stages` is the number of pipeline stages, each of which holds other parameters. `device` is where ranks exchange numbers.
    """
    held = [(p.grad, getattr(p, "tied_stages", 1)) for p in parameters if p.grad is not None]
    if not held and stages == 1 and device is not None:
        return torch.zeros((), device=device)  # where the norms of other updates are
    if stages == 1 and not any(is_dtensor(grad) for grad, _ in held):
        grads = [grad for grad, _ in held]
        try:
            if grads and all(grad.is_cpu and grad.dtype is grads[0].dtype for grad in grads):
                with torch.no_grad():  # what torch's function does below its sorting, which costs as much
                    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)
            return torch.nn.utils.get_total_norm(grads, norm_type)
        except NotImplementedError:  # a sparse gradient, of an embedding
            return torch.nn.utils.get_total_norm([entries_of(grad) for grad in grads], norm_type)
    return _norm_over_ranks(held, norm_type, torch.device("cpu" if device is None else device), stages)


def scale_to_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of this norm to at most `max_norm`, as torch does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            by_device.setdefault(local.device, []).append(local)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, factor.to(device))


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    device: torch.device | str | None = None,
    stages: int = 1,
) -> Tensor:
    """Scale the gradients to at most this norm over all ranks, and return the norm before (see `grad_norm`)."""
    held = [p for p in parameters if p.grad is not None]
    norm = grad_norm(held, norm_type, device=device, stages=stages)
    scale_to_norm(held, max_norm, norm)
    return norm


def _norm_over_ranks(
    grads: Sequence[tuple[Tensor, int]], norm_type: float, device: torch.device, stages: int
) -> Tensor:
    """Return the norm over all gradients of all ranks, the same on each of them, with one exchange.

    An entry that several ranks hold is counted by each for its share: a whole gradient is on all ranks of its stage, a sharded one
    on as many as there are ranks for each of its parts. Each gradient comes with the number of stages that hold it.
    """
    world, is_largest = dist.get_world_size(), math.isinf(norm_type)
    held: dict[float, list[Tensor]] = {}
    for grad, holders in grads:
        parts = stages / holders
        if is_dtensor(grad):
            split = [dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate()]  # type: ignore[attr-defined]
            parts *= math.prod(map(grad.device_mesh.size, split))  # type: ignore[attr-defined]
        local = local_part(grad)
        if local.numel():
            held.setdefault(parts, []).append(local)
    total = torch.zeros((), device=device)
    for parts, tensors in held.items():
        norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(tensors, norm_type)])
        wide = norms.to(torch.promote_types(norms.dtype, torch.float32))
        total = torch.maximum(total, wide.max()) if is_largest else total + wide.pow(norm_type).sum() * (parts / world)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
    return total if is_largest else total.pow(1 / norm_type)
