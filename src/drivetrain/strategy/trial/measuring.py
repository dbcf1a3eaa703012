"""One trial in one process: build the model, compare it with the plain one, train a few steps, and tell each thing as it happens.

It tells by lines (`tell(event, ...)`), because the process may end at any moment, and what was told by then still counts. A
trial fails by an exception; which outcome that is, `failure_of` decides.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.context.moving import move_to_device
from drivetrain.core.errors import ConfigError
from drivetrain.module.buffers import buffers_kept
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.runtime.collectives import agree_any, distributed_barrier
from drivetrain.runtime.seeds import capture_rng, same_rng
from drivetrain.strategy.apply import Application
from drivetrain.strategy.batching import BatchPlan
from drivetrain.strategy.method import Method
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.checking import (
    check_size,
    first_loss,
    loss_and_norm,
    plain_number,
    planned_loss_and_norm,
    train_window,
    verdict,
)
from drivetrain.strategy.trial.memory import MemoryMeter
from drivetrain.strategy.trial.values import PLAIN, OutcomeKind, Yardstick
from drivetrain.strategy.value import Strategy

WARM_UP_STEPS = 2
"""Updates before the clock runs: the first compiles and makes the optimizer's state, the second meets DDP's final buckets."""
_STEADY = 5e-3
"""By how much the loss of repeated samples may differ: kernels for another size round differently, and batch statistics magnify it."""

Tell = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process is to try."""

    plan: Strategy
    methods: tuple[Method, ...] = ()
    """Methods of the plan that the user registered."""
    steps: int
    verify: bool = True
    yardsticks: tuple[Yardstick, ...] = ()
    """What is known of how it ought to be."""
    plain_fits: bool = True
    """Whether the plain model may fit on the device; False where it did not in an earlier trial."""


class TrialFailed(Exception):
    """A trial came to an end that is no error of the program: a wrong or a non-finite number."""

    def __init__(self, kind: OutcomeKind, message: str):
        super().__init__(message)
        self.kind: OutcomeKind = kind


def failure_of(error: BaseException) -> tuple[OutcomeKind, str]:
    """Return the outcome that an exception means, and its message."""
    if isinstance(error, TrialFailed):
        return error.kind, str(error)
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _says_no_memory(error):
        return "oom", first or type(error).__name__
    return "error", str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _says_no_memory(error: BaseException) -> bool:
    """Return whether a library other than torch's device allocator ran out: cuBLAS, NCCL, the allocator of the CPU."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "defaultcpuallocator: can't allocate" in text
    )


def measure(order: Order, task: TrainingTask, device: torch.device, tell: Tell, *, may_reset: bool) -> None:
    """Try a plan in this process; `may_reset` says that the compiler's caches in memory are this trial's own."""
    _Trial(order, task, device, tell, may_reset).run()


class _Trial:
    def __init__(self, order: Order, task: TrainingTask, device: torch.device, tell: Tell, may_reset: bool):
        self.order, self.task, self.device, self.tell, self.may_reset = order, task, device, tell, may_reset
        self.meter = MemoryMeter(device)
        self.methods = [find_method(name) for name in order.plan.opt_names()]
        self.is_compiled = any(method.compiles for method in self.methods)

    def run(self) -> None:
        order, task = self.order, self.task
        self.tell("phase", name="build")
        model = task.build()
        resolved = resolve_plan(order.plan, model=model, device=self.device)
        batch = resolved.batch_of(order.plan, task.global_batch_size)
        verify = order.verify and not _on_meta(model)
        if order.verify and not verify:
            self.tell("note", text="not compared: the model is on the meta device and has no weights yet")
        samples, expected = self._known(batch, resolved)
        if verify and expected is None and order.plain_fits:
            self.tell("phase", name="plain")
            expected, model = self._plain(model, samples)
        self.tell("phase", name="shape")
        ctx = task.shaped(model, resolved, batch)
        del model
        self.tell("phase", name="compile" if self.is_compiled else "check")
        if verify:
            self._check(ctx, expected, samples, batch)
        self._train(ctx, task.batch(batch.micro))

    # Right.

    def _known(self, batch: BatchPlan, resolved: ResolvedPlan) -> tuple[int, Yardstick | None]:
        """Return on how many samples to compare, and what is known about them."""
        samples = check_size(resolved, self.task.sample_count)
        if (
            self.is_compiled and resolved.site.axis("pipe") == 1
        ):  # fewer where a pass has fewer: then they can have the shape of training
            samples = min(samples, batch.micro)
        plain = [known for known in self.order.yardsticks if known.source == PLAIN]
        if self.order.yardsticks and not plain:
            known = self.order.yardsticks[0]  # the plain model does not fit
            return known.samples, known
        fitting = [known for known in plain if known.samples == samples]
        if self.is_compiled:
            fitting = [known for known in fitting if known.is_steady is not None]
        return samples, (fitting[0] if fitting else None)

    def _plain(self, model: nn.Module, samples: int) -> tuple[Yardstick | None, nn.Module]:
        """Return the plain model's numbers, or None where it does not fit on some rank; and a model to go on with."""
        task, found, fits = self.task, None, True
        home = next((parameter.device for parameter in model.parameters()), self.device)
        try:
            found = self._yardstick(model.to(self.device), samples)
        except torch.OutOfMemoryError:
            fits = False
        if agree_any(not fits):
            del model
            self._tidy()
            self.tell("note", text="the plain model does not fit, so this plan was not compared with it")
            return None, task.build()
        model.zero_grad()
        if home != self.device:
            model.to(home)  # a plan is applied where the caller has the model: sharding then never holds it whole
        self._tidy()
        assert found is not None
        return found, model

    def _yardstick(self, model: nn.Module, samples: int) -> Yardstick:
        task, mode = self.task, model.training
        inputs = task.prepared(task.batch(samples), self.device)
        model.eval()
        loss, norm = loss_and_norm(model, inputs, task.call, task.loss)
        found = Yardstick(loss=loss, gradient_norm=norm, samples=samples)
        if self.is_compiled:
            model.zero_grad()
            model.train()
            with buffers_kept(model):
                numbers = self._numbers_of_training(model, inputs, samples)
            found = replace(found, is_steady=bool(numbers), **numbers)
        model.train(mode)
        return found

    def _numbers_of_training(self, model: nn.Module, inputs: Any, samples: int) -> dict[str, Any]:
        """Return what a yardstick says of training mode if the loss is the same for every sample twice: no dropout, and a mean.

        Then a compiled plan can be compared in the mode and the shape of training, and is compiled once instead of twice. Batch
        statistics are no obstacle: those of repeated samples are the same.
        """
        task, random = self.task, capture_rng()
        twice = replace(task, samples=task.batch(samples)).batch(2 * samples)
        try:
            loss, norm = loss_and_norm(model, inputs, task.call, task.loss)
            with torch.no_grad():
                more = task.prepared(twice, self.device)
                other = plain_number(first_loss(task.loss(more, task.call(model, more))))
        except Exception:  # a model that cannot do this is compared in the ordinary way
            return {}
        drift = abs(other - loss)
        is_same = drift <= _STEADY * max(1.0, abs(loss)) and same_rng(random, capture_rng())
        return {"training_loss": loss, "training_norm": norm, "training_drift": drift} if is_same else {}

    def _check(self, ctx: Application, expected: Yardstick | None, samples: int, batch: BatchPlan) -> None:
        check = self.task.batch(samples)
        as_trained = (
            self.is_compiled and expected is not None and bool(expected.is_steady) and batch.micro % samples == 0
        )
        if as_trained:
            check = replace(self.task, samples=check).batch(batch.micro)
        found = planned_loss_and_norm(ctx, check, self.task.call, training=as_trained)
        aim = expected.trained() if expected is not None and as_trained else expected
        own = Yardstick(loss=found[0], gradient_norm=found[1], samples=samples, source="first plan that fits")
        if self.is_compiled and not as_trained and self.may_reset:
            # The compiler has seen another batch size and would now compile for any: slower than in the real run.
            torch._dynamo.reset()
        if expected is None or aim is None:
            self.tell("checked", loss=found[0], norm=found[1], is_verified=False, aim=found, yardstick=vars(own))
            if not (math.isfinite(found[0]) and math.isfinite(found[1])):
                raise TrialFailed("nonfinite", f"loss {found[0]:.6g}, gradient norm {found[1]:.4g}")
            return
        kind, numbers = verdict(found, aim, ctx.plan, ctx.scaler is not None)
        self.tell(
            "checked",
            loss=found[0],
            norm=found[1],
            is_verified=kind == "ok",
            aim=(aim.loss, aim.gradient_norm),
            yardstick=vars(expected),
        )
        if kind != "ok":
            raise TrialFailed(kind, numbers)
        self.tell("note", text=numbers)

    # Fast.

    def _train(self, ctx: Application, batch: Any) -> None:
        ctx.model.train()
        self._tidy()
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

    def _at_hand(self, batch: Any) -> Any:
        """Return a batch where a loader has put it by the time of its step.

        That is on the device, which loaders copy to ahead of time: a copy inside the step would hide what plans differ in. A
        `prepare_input` of the user's own may want it on the host, and gets it there, pinned.
        """
        if self.task.prepare_input is None:
            return move_to_device(self.device, batch)
        if self.device.type != "cuda":
            return batch
        return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory(), batch)

    def _timed_by_clock(self, ctx: Application, batch: Any) -> None:
        for index in range(self.order.steps):
            begin = time.perf_counter()
            loss = train_window(ctx, batch, self.task.call)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self._tell_step(index, time.perf_counter() - begin, plain_number(loss))

    def _timed_by_events(self, ctx: Application, batch: Any) -> None:
        """Read each step's time one step later, so that the host runs ahead of the device as it does in training."""
        steps = self.order.steps
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        losses = torch.empty(steps, pin_memory=True)
        torch.cuda.synchronize(self.device)
        marks[0].record()

        def tell(index: int) -> None:
            marks[index + 1].synchronize()
            seconds = marks[index].elapsed_time(marks[index + 1]) / 1000
            self._tell_step(index, seconds, float(losses[index]))

        for index in range(steps):
            loss: Tensor = train_window(ctx, batch, self.task.call)
            losses[index].copy_(loss.full_tensor() if is_dtensor(loss) else loss, non_blocking=True)  # type: ignore[attr-defined]
            marks[index + 1].record()
            if index:
                tell(index - 1)
        if steps:
            tell(steps - 1)

    def _tell_step(self, index: int, seconds: float, loss: float) -> None:
        peak, reserved = self.meter.peak()
        self.tell("step", seconds=seconds, loss=loss, peak=peak, reserved=reserved)
        if not math.isfinite(loss):
            raise TrialFailed("nonfinite", f"the loss of training step {index + WARM_UP_STEPS + 1} is {loss}")

    def _tidy(self) -> None:
        tidy(self.device)


def tidy(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
