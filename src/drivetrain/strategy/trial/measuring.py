"""One trial in one process: build the model, compare it with the plain one, train a few steps, and report each event as it happens.

It reports line by line (`tell(event, ...)`), because the process may end at any moment, and everything reported before then
counts. A trial fails with an exception; `failure_of` maps it to an outcome.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.context.moving import move_to_device
from drivetrain.core.errors import ConfigError, first_line
from drivetrain.core.plain import plain_text
from drivetrain.core.types import Batch
from drivetrain.module.distributed_tensors import whole_tensor
from drivetrain.runtime.collectives import distributed_barrier
from drivetrain.runtime.device import as_current, is_out_of_memory
from drivetrain.strategy.apply import Application
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.method import Method
from drivetrain.strategy.plan_check import compare_with_fewer_blocks, on_meta
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.checking import (
    Share,
    fitting_reference,
    plain_number,
    planned_step,
    share_of_plan,
    train_window,
    use_weights_of_first_rank,
    verdict,
)
from drivetrain.strategy.trial.memory import MemoryMeter
from drivetrain.strategy.trial.report import PLAIN, OutcomeKind, ReferenceResults
from drivetrain.strategy.value import Strategy

WARM_UP_STEPS = 2
"""Updates before the clock runs: the first compiles and makes the optimizer's state, the second meets DDP's final buckets."""

Tell = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a trial process has to try."""

    plan: Strategy
    methods: tuple[Method, ...] = ()
    """Methods of the plan that the user registered."""
    steps: int
    verify: bool = True
    yardsticks: tuple[ReferenceResults, ...] = ()
    """The expected results that are known."""
    plain_fits: bool = True
    """Whether the plain model may fit on the device; False where it did not in an earlier trial."""


class TrialFailed(Exception):
    """A trial ended without a program error: with a wrong or a non-finite number."""

    def __init__(self, kind: OutcomeKind, message: str):
        super().__init__(message)
        self.kind: OutcomeKind = kind


def failure_of(error: BaseException) -> tuple[OutcomeKind, str]:
    """Return the outcome and the message for an exception."""
    if isinstance(error, TrialFailed):
        return error.kind, str(error)
    if is_out_of_memory(error):
        return "oom", first_line(error)
    return "error", str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {plain_text(error)}"


def measure(order: Order, task: TrainingTask, device: torch.device, tell: Tell, *, may_reset: bool) -> None:
    """Try a plan in this process. `may_reset` allows the trial to clear the compiler's in-memory caches."""
    with as_current(device):
        _TimedTrial(order, task, device, tell, may_reset, MemoryMeter(device)).run()


@dataclass
class _TimedTrial:
    order: Order
    task: TrainingTask
    device: torch.device
    tell: Tell
    may_reset: bool
    meter: MemoryMeter

    @cached_property
    def methods(self) -> list[Method]:
        return [find_method(name) for name in self.order.plan.opt_names()]

    @property
    def is_compiled(self) -> bool:
        return any(method.compiles for method in self.methods)

    def run(self) -> None:
        order, task = self.order, self.task
        self.tell("phase", name="build")
        model = task.build()
        if order.verify:
            use_weights_of_first_rank(model)
        resolved = resolve_plan(order.plan, model=model, device=self.device)
        batch = resolved.batch_of(order.plan, task.global_batch_size)
        share = share_of_plan(resolved, batch)
        expected = self._known(share.samples)
        verify = order.verify and not on_meta(model)
        if verify and expected is None and order.plain_fits:
            self.tell("phase", name="plain")
            expected, model = self._plain(model, share.samples)
        if order.verify and expected is None:
            self._compare_with_fewer_blocks(model)
        if not order.steps and on_meta(model):
            return
        self.tell("phase", name="shape")
        ctx = task.shaped(model, resolved, batch)
        del model
        self.tell("phase", name="compile" if self.is_compiled else "check")
        if verify:
            self._check(ctx, expected, share, batch)
        self._train(ctx, task.batch(batch.micro))

    # Right.

    def _known(self, samples: int) -> ReferenceResults | None:
        """Return what is known about so many samples."""
        for one in self.order.yardsticks:
            may_be_used = one.source == PLAIN or not self.order.plain_fits
            if one.samples == samples and may_be_used and (one.is_steady is not None or not self.is_compiled):
                return one
        return None

    def _plain(self, model: nn.Module, samples: int) -> tuple[ReferenceResults | None, nn.Module]:
        """Return the plain model's numbers, or None where it does not fit on some rank; and a model to go on with."""
        home = next((parameter.device for parameter in model.parameters()), self.device)
        found = fitting_reference(model, self.task, self.device, samples, steady=self.is_compiled)
        if found is None:
            del model
            release_unused_memory(self.device)
            return None, self.task.build()
        model.to(home)  # a plan is applied where the caller has the model: sharding then never holds it whole
        release_unused_memory(self.device)
        return found, model

    def _compare_with_fewer_blocks(self, model: nn.Module) -> None:
        """Compare the plan on a smaller model, because the plain one does not fit or has no weights."""
        self.tell("phase", name="compile" if self.is_compiled else "check")
        kind, text = compare_with_fewer_blocks(self.order.plan, self.task, model, self.device)
        if self.is_compiled and self.may_reset:
            torch._dynamo.reset()  # as in `_check`
        release_unused_memory(self.device)
        if kind not in ("ok", None):
            raise TrialFailed(kind, text)
        self.tell("note", text=text if kind else f"this plan was not compared with the plain model: {text}")
        if kind == "ok":
            self.tell("verified")

    def _check(self, ctx: Application, expected: ReferenceResults | None, share: Share, batch: BatchSplit) -> None:
        """Run a step of the plan and compare it. Where nothing is expected, others are compared with it."""
        is_steady = self.is_compiled and expected is not None and bool(expected.is_steady)
        as_trained = is_steady and batch.micro % share.rows == 0 and ctx.stepping.pipeline is None
        repeats = batch.micro // share.rows if as_trained else 1
        found = planned_step(
            ctx, self.task.rows, share, self.task.call,
            training=as_trained, quiet=expected is not None and expected.is_quiet, repeats=repeats,
        )  # fmt: skip
        if self.is_compiled and not as_trained and self.may_reset:
            # The compiler has seen another batch size and would now compile for any: slower than in the real run.
            torch._dynamo.reset()
        if expected is None:
            is_finite = math.isfinite(found.loss) and math.isfinite(found.norm)
            kind: OutcomeKind = "ok" if is_finite else "nonfinite"
            text = f"loss {found.loss:.6g}, gradient norm {found.norm:.4g}"
            known = ReferenceResults(
                loss=found.loss, gradient_norm=found.norm, samples=share.samples, each=found.each, source="first plan that fits"
            )  # fmt: skip
        else:
            kind, text = verdict(found, expected, ctx.plan)
            known = expected
        is_verified = kind == "ok" and expected is not None and not expected.is_random
        self.tell("checked", loss=found.loss, norm=found.norm, is_verified=is_verified, yardstick=known)
        if kind != "ok":
            raise TrialFailed(kind, text)
        if expected is not None:
            self.tell("note", text=text)

    # Fast.

    def _train(self, ctx: Application, batch: Batch) -> None:
        ctx.model.train()
        release_unused_memory(self.device)
        batch = self._at_hand(batch)
        for step in range(WARM_UP_STEPS + sum(method.warm_up_steps for method in self.methods)):
            value = plain_number(train_window(ctx, batch, self.task.call))
            if not math.isfinite(value):
                raise TrialFailed("nonfinite", f"the loss of training step {step + 1} is {value}")
            self.tell("warm")
            if step == 0:  # the steady state counts, not what the compiler tried out
                self.meter.reset()
        distributed_barrier()
        self.tell("phase", name="steps")
        (self._timed_by_events if self.device.type == "cuda" else self._timed_by_clock)(ctx, batch)

    def _at_hand(self, batch: Batch) -> object:
        """Return a batch where a loader has put it by the time of its step.

        That is on the device, which loaders copy to ahead of time: a copy inside the step would hide what plans differ in. A
        `prepare_input` of the user's own may want it on the host, and gets it there, pinned.
        """
        if self.task.prepare_input is None:
            return move_to_device(self.device, batch)
        if self.device.type != "cuda":
            return batch
        return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory(), batch)

    def _timed_by_clock(self, ctx: Application, batch: Batch) -> None:
        for index in range(self.order.steps):
            begin = time.perf_counter()
            loss = train_window(ctx, batch, self.task.call)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self._send_step_result(index, time.perf_counter() - begin, plain_number(loss))

    def _timed_by_events(self, ctx: Application, batch: Batch) -> None:
        """Read each step's time one step later, so that the host runs ahead of the device as it does in training."""
        steps = self.order.steps
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        losses = torch.empty(steps, device="cpu", pin_memory=True)
        torch.cuda.synchronize(self.device)
        marks[0].record()

        def tell(index: int) -> None:
            marks[index + 1].synchronize()
            seconds = marks[index].elapsed_time(marks[index + 1]) / 1000
            self._send_step_result(index, seconds, float(losses[index]))

        for index in range(steps):
            loss = train_window(ctx, batch, self.task.call)
            losses[index].copy_(whole_tensor(loss), non_blocking=True)
            marks[index + 1].record()
            if index:
                tell(index - 1)
        if steps:
            tell(steps - 1)

    def _send_step_result(self, index: int, seconds: float, loss: float) -> None:
        peak, reserved = self.meter.peak()
        self.tell("step", seconds=seconds, loss=loss, peak=peak, reserved=reserved)
        if not math.isfinite(loss):
            raise TrialFailed("nonfinite", f"the loss of training step {index + WARM_UP_STEPS + 1} is {loss}")


def release_unused_memory(device: torch.device) -> None:
    """Release memory that is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
