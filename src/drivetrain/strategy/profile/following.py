"""One update, as a loop would make it: clear, run the passes of the window, step; followed or not."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from drivetrain.module.wrapping import unwrap
from drivetrain.strategy.apply import Application
from drivetrain.strategy.batching import BatchPlan
from drivetrain.strategy.profile.fake_world import GradientBuckets
from drivetrain.strategy.profile.step_memory import StepMemory
from drivetrain.strategy.task import TrainingTask


class Update:
    """One update of a shaped model, with every pass of its window; real and simulated training are followed by the same code."""

    def __init__(
        self,
        task: TrainingTask,
        ctx: Application,
        batch: BatchPlan,
        buckets: Sequence[GradientBuckets] = (),
        before_pass: Callable[[], None] = lambda: None,
    ):
        self.task, self.ctx, self.batch, self.buckets, self.before_pass = task, ctx, batch, buckets, before_pass
        self.window = 0

    def run(self, tracker: StepMemory | None) -> None:
        """Clear the gradients of the step before, then run every pass of a window and update."""
        ctx = self.ctx
        if tracker is not None:
            self._register(tracker)
        with nullcontext() if tracker is None else tracker.watching():
            self._clear()
            for window in range(self.batch.accumulation):
                self.window = window
                self.before_pass()
                self._pass(tracker)
                if tracker is not None:
                    tracker.settle()
                    self._register(tracker)
                    tracker.segment = "update"
                if ctx.optimizer is not None:
                    ctx.optimizer.step()
                if tracker is not None:
                    self._register(tracker)

    def _pass(self, tracker: StepMemory | None) -> None:
        ctx, is_last = self.ctx, self.window == self.batch.accumulation - 1
        for bucket in self.buckets:
            bucket.is_synchronising = is_last
        if tracker is not None:
            tracker.part = "closing" if is_last else "open"
            tracker.segment, tracker.phase = ("forward", self.window), "activations"
        inputs = ctx.prepared(self.task.batch(self.batch.micro))
        loss = self._loss(inputs)
        if tracker is not None:
            tracker.segment, tracker.phase = ("backward", self.window), "temporary"
        loss.backward()

    def _loss(self, inputs: Any) -> Tensor:
        outputs = self.task.call(self.ctx.model, inputs)
        if self.task.loss_func is None:
            from torch.utils._pytree import tree_leaves

            leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
            return torch.stack([leaf.float().mean() for leaf in leaves]).sum()
        result = self.ctx.stepping.loss(inputs, outputs)
        return result[0] if isinstance(result, list | tuple) else result

    def _clear(self) -> None:
        unwrap(self.ctx.model).zero_grad()
        if self.ctx.optimizer is not None:
            self.ctx.optimizer.inner.zero_grad()

    def _register(self, tracker: StepMemory) -> None:
        tracker.register_all(unwrap(self.ctx.model), self.ctx.optimizer)
        for bucket in self.buckets:
            tracker.register(bucket.storages, "grads")
