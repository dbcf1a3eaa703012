"""Whether numbers are finite, and what happens to an update whose gradients are not: one test and one policy for every optimizer.

The test is one kernel over all gradients. On a CPU the host reads its answer at once. A fused optimizer on an accelerator takes the
answer as a flag on the device and leaves weights and state alone; the host reads it two updates later. Any other optimizer there costs
one read for each update.

A loss that is not finite may have finite gradients, so its backward pass begins with NaN instead of one. On several ranks the flag itself
is exchanged, one number for each update: gradients may be sharded, and a fault may spoil those of one rank after they were averaged.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.core.arguments import check_choice, check_count
from drivetrain.module.distributed_tensors import local_part
from drivetrain.runtime.coders import inner_tensors, is_made_of_tensors
from drivetrain.runtime.device import AsyncReadback
from drivetrain.runtime.ranks import is_distributed

Action = Literal["skip", "stop", "rollback", "ignore"]
ALIASES = {"raise": "stop"}
NONFINITE, REJECTED = 1, 2  # bits of a verdict: a gradient is not finite; a plugin has rejected the batch
_LARGE = 1 << 17  # elements on a CPU from which a test that only reads is faster than the one kernel, which also writes


@dataclass(frozen=True, kw_only=True)
class NonFinitePolicy:
    """What to do about an update whose loss or gradients are not finite."""

    action: Action = "skip"
    """`skip` skips the update; `stop` ends the run; `rollback` also restores the last good state; `ignore` does not test."""
    limit: int = 20
    """Number of consecutive bad updates that ends the run, for every action."""
    every: int = 100
    """Updates between two copies of the state to roll back to."""

    def __post_init__(self) -> None:
        if isinstance(self.action, str):
            object.__setattr__(self, "action", ALIASES.get(self.action, self.action))
        check_choice("nonfinite", self.action, get_args(Action))
        check_count("limit", self.limit)
        check_count("every", self.every)

    @classmethod
    def of(cls, value: "str | NonFinitePolicy") -> "NonFinitePolicy":
        """Return the policy of that name.

        >>> NonFinitePolicy.of("raise").action
        'stop'
        """
        return value if isinstance(value, NonFinitePolicy) else cls(action=value)  # type: ignore[arg-type]


def nonfinite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if an entry of any tensor is not finite, else 0.0, as a scalar on their device. This does not synchronize the host."""
    found = torch.zeros((), device=tensors[0].device)
    try:
        # Made for gradient scalers. With a scale of one it is the cheapest test of many tensors: one launch, no result for each.
        torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found, torch.ones_like(found))
    except RuntimeError:  # sparse, complex, on several devices, or not writable
        checks = [torch.isfinite(entries_of(tensor)).all().to(found.device) for tensor in tensors]
        found = torch.stack(checks).all().logical_not().to(torch.float32)
    return found


def on_any_rank(flags: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Set flags on all ranks where they are set on any, in place; nothing without a process group."""
    if is_distributed():
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags


def any_nonfinite(parameters: Iterable[Tensor]) -> bool:
    """Return whether a gradient on any rank is not finite. This synchronizes the host, and all ranks must call it."""
    held = list(parameters)
    gradients = [local_part(p.grad) for p in held if p.grad is not None]
    device = local_part(held[0]).device if held else None
    flag = nonfinite_flag(gradients) if gradients else torch.zeros((), device=device)
    return on_any_rank(flag).item() != 0  # tensor ranks and stages too: all ranks step, or none does


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    return map(entries_of, inner_tensors(tensor).values() if is_made_of_tensors(tensor) else [tensor])


def nonfinite_names(named: Iterable[tuple[str, Tensor]], only_nan: bool = False) -> list[str]:
    """Return which floating-point tensors hold NaN or infinity, or only NaN. Reads once for each device and type, and writes nothing."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    parts = ((name, part) for name, tensor in named for part in _parts(local_part(tensor.detach())))
    for name, values in parts:
        if (values.is_floating_point() or values.is_complex()) and values.element_size() > 1 and values.numel():
            groups.setdefault((values.device, values.dtype), []).append((name, values))
    found = []
    for (_, dtype), members in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm([tensor for _, tensor in members], 2, wide))
        for (name, tensor), is_finite in zip(members, torch.isfinite(norms).tolist()):  # the host waits here
            # A norm of finite numbers may overflow, so the tensor itself decides.
            if not is_finite and (torch.isnan(tensor) if only_nan else ~torch.isfinite(tensor)).any():
                found.append(name)
    return found


def nonfinite_state(items: Mapping[str, object]) -> list[str]:
    """Return the names of trainable weights and optimizer states that are not finite, and of buffers that hold NaN.

    Infinity is usual in buffers, such as attention masks. `items` are modules and optimizers by name; others are ignored.
    """
    strict: list[tuple[str, Tensor]] = []
    buffers: list[tuple[str, Tensor]] = []
    for name, item in items.items():
        if isinstance(item, nn.Module):
            strict += [(f"{name}.{key}", p) for key, p in item.named_parameters() if p.requires_grad]
            buffers += [(f"{name}.{key}", buffer) for key, buffer in item.named_buffers()]
            continue
        groups, state = getattr(item, "param_groups", None), getattr(item, "state", None)
        held = state if isinstance(groups, list) and isinstance(state, Mapping) else {}
        for index, (parameter, kept) in enumerate(held.items()):
            if isinstance(parameter, Tensor) and isinstance(kept, Mapping):
                tensors = [(f"{name}.{index}.{key}", v) for key, v in kept.items() if isinstance(v, Tensor)]
                strict += [(key, tensor) for key, tensor in tensors if tensor.shape == parameter.shape]
    return nonfinite_names(strict) + nonfinite_names(buffers, only_nan=True)


def entries_of(tensor: Tensor) -> Tensor:
    """Return a tensor as it is; of a sparse one the entries that it holds."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


class StepGuard:
    """Skips updates that are not finite and batches that a plugin rejects, and counts consecutive ones.

    The loop calls `open` before the first forward pass of an update, `seed` or `mark` for each loss, `should_step` before the optimizer's
    step and `close` after it. All ranks get the same answers at the same step.
    """

    def __init__(self, policy: NonFinitePolicy):
        self.policy = policy
        self.in_a_row, self.total = 0, 0
        """Skipped updates: since the last applied one, and in the whole run. On an accelerator the counts lag by two updates."""
        self.is_active = False
        """Whether updates are tested; False until `prepare`."""
        self.batches_to_skip = 0
        """Batches that the loop still has to pass over after a rollback."""
        self.is_immediate = True
        """Whether an admitted update needs no `close`: its verdict was read at once, or nothing is tested."""
        self.has_statistics = False
        """Whether the model keeps running statistics, so that there is something to `open` an update for."""
        self.verdict = 0
        """What has been found since the last `close`; 0 if all is well."""
        self._late = AsyncReadback()
        self._rejected: Tensor | bool = False
        self._optimizer: Any = None
        self._is_exchanged = self._is_large = self._is_judged_elsewhere = self._flagged = False
        # For the test on a CPU, made once.
        self._found, self._unscaled = torch.zeros((), device="cpu"), torch.ones((), device="cpu")
        self._statistics: list[Tensor] = []
        self._copies: deque[list[Tensor]] = deque(maxlen=3)

    def prepare(self, optimizer: Any, model: object, *, is_exchanged: bool, is_tested_elsewhere: bool) -> None:
        """Read the optimizer and model of a run. `is_tested_elsewhere`: a gradient scaler, or units of an `OptimSet`, test."""
        self.is_active = True
        self._optimizer, self._is_exchanged, self._is_judged_elsewhere = optimizer, is_exchanged, is_tested_elsewhere
        self._is_large = sum(p.numel() for group in optimizer.param_groups for p in group["params"]) >= _LARGE
        modules = model.modules() if isinstance(model, nn.Module) else ()
        norms = [module for module in modules if isinstance(module, nn.modules.batchnorm._NormBase)]
        self._statistics = [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        for copies in self._copies:  # restored, of an open window
            copies[:] = [copied.to(live.device) for copied, live in zip(copies, self._statistics)]
        self.has_statistics = bool(self._statistics)
        on_cpu = all(p.is_cpu for group in optimizer.param_groups for p in group["params"])
        self.is_immediate = on_cpu and not is_exchanged and not is_tested_elsewhere

    def open(self) -> None:
        """Save the running statistics, so that a skipped batch can be removed from them."""
        full = len(self._copies) == self._copies.maxlen
        copies = self._copies.popleft() if full else [torch.empty_like(b) for b in self._statistics]
        torch._foreach_copy_(copies, self._statistics)
        self._copies.append(copies)

    def seed(self, loss: Tensor) -> Tensor | None:
        """Return the gradient that the backward pass of a loss starts with: None for one, NaN for a loss that is not finite."""
        if loss.is_cpu:
            return None if math.isfinite(loss.item()) else torch.full_like(loss, math.nan)
        return torch.rsub(loss.detach(), 1, alpha=0)  # 1 - 0 * loss

    def mark(self, loss: Tensor) -> Tensor:
        """Return the same loss, with NaN gradients if it is not finite."""
        seed = self.seed(loss)
        return loss if seed is None else loss * seed

    def reject(self, flag: Tensor | bool) -> None:
        """Skip the update of the current batch if the flag is set. All ranks must pass the same flag."""
        if isinstance(flag, bool) and isinstance(self._rejected, bool):
            self._rejected = self._rejected or flag
        else:
            self._rejected = torch.maximum(_number(self._rejected, flag), _number(flag, self._rejected))

    def should_step(self, norm: Tensor | None = None, loss: Tensor | None = None) -> bool:
        """Return whether the optimizer should step. Tests the gradients, or their norm if it is known, and a loss that was not marked.

        A fused optimizer on an accelerator always steps: it finds the flag on itself until `close`.
        """
        if loss is not None and not math.isfinite(loss.item()):
            return self._decide(NONFINITE + bool(self._rejected) * REJECTED)
        if self._is_judged_elsewhere:
            return not self._rejected or self._decide(REJECTED)  # a flag on the device is waited for
        groups = self._optimizer.param_groups
        if norm is not None:
            gradients = [norm]
        else:
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            if not gradients and not self._is_exchanged:
                return True
        first = gradients[0] if gradients else groups[0]["params"][0]
        if first.is_cpu and not self._is_exchanged:
            bad = self._any_gradient_nonfinite(gradients)
            if not bad and self._rejected is False:
                self.in_a_row = 0
                return True
            return self._decide(bad * NONFINITE + bool(self._rejected) * REJECTED)
        gradients = [local_part(gradient) for gradient in gradients]
        flag = nonfinite_flag(gradients) if gradients else torch.zeros((), device=first.device)
        flag = self._exchanged(flag)
        verdict = flag if self._rejected is False else flag + REJECTED * _number(self._rejected, flag)
        self._late.push(verdict)
        if verdict.is_cpu or not getattr(self._optimizer, "_step_supports_amp_scaling", False):
            return self._decide(int(self._late.drain()[-1][1]))  # the host waits here
        self._optimizer.found_inf = verdict.clamp(max=1.0)
        self._flagged = True
        return True

    def drop_nonfinite(self, parameters: Iterable[Tensor]) -> None:
        """Remove gradients that are not finite, for an optimizer inside its step. This synchronizes the host."""
        held = [p for p in parameters if p.grad is not None]
        if held:
            flag = self._exchanged(nonfinite_flag([local_part(p.grad) for p in held if p.grad is not None]))
            if flag.item():
                self._decide(NONFINITE)
                for parameter in held:
                    parameter.grad = None

    def close(self, judged: Sequence[Tensor | bool] | None = None) -> int:
        """End an update. `judged` is what a scaler or units have skipped. Return the outcome that has become known, 0 if it is fine."""
        if self._flagged:
            del self._optimizer.found_inf
            self._flagged = False
        if judged is not None:
            flags = [flag.reshape(()) for flag in judged if isinstance(flag, Tensor)]
            if flags:
                self._late.push(torch.stack(flags).max())
            else:
                self._decide(int(any(judged)) * NONFINITE)
        for _, verdict in self._late.overdue():
            self._count(int(verdict), 0)
        self._rejected = False
        verdict, self.verdict = self.verdict, 0
        return verdict

    def state_dict(self, is_open: bool = False) -> dict[str, object]:
        """Return the counts, and what is known of an open window. This waits for outcomes that are not known yet."""
        for _, verdict in self._late.drain():
            self._count(int(verdict), 0)
        counts = {"in_a_row": self.in_a_row, "total": self.total, "to_pass_over": self.batches_to_skip}
        return {**counts, "rejected": self._rejected, "statistics": [*self._copies][-1:]} if is_open else {**counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts and an open window."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]
        self.batches_to_skip, self._rejected = state["to_pass_over"], state.get("rejected", False)
        self._copies = deque(state.get("statistics", ()), maxlen=self._copies.maxlen)

    def _exchanged(self, flag: Tensor) -> Tensor:
        """Set the flag on all ranks where it is set on any."""
        return on_any_rank(flag) if self._is_exchanged else flag

    def _any_gradient_nonfinite(self, gradients: list[Tensor]) -> bool:
        if self._is_large:
            return bool(nonfinite_names([("", gradient) for gradient in gradients]))
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._unscaled)
        except RuntimeError:
            return nonfinite_flag(gradients).item() != 0
        is_bad = self._found.item() != 0
        if is_bad:
            self._found.zero_()
        return is_bad

    def _decide(self, verdict: int) -> bool:
        self._count(verdict, -1)
        return not verdict

    def _count(self, verdict: int, copy: int) -> None:
        """Count an update; one that is skipped gets the statistics of this copy back."""
        if not verdict:
            self.in_a_row = 0
            return
        self.in_a_row, self.total, self.verdict = self.in_a_row + 1, self.total + 1, self.verdict | verdict
        if self._copies:
            torch._foreach_copy_(self._statistics, self._copies[copy])


def _number(flag: Tensor | bool, like: Tensor | bool) -> Tensor:
    """Return a flag as a number on the device of another one."""
    if isinstance(flag, Tensor):
        return flag.to(torch.float32).reshape(())
    return torch.full((), float(flag), device=like.device if isinstance(like, Tensor) else None)
