"""What joins loader, loss and optimizer of a hand-written loop, so that its five lines are right for any plan.

The loader opens and closes accumulation windows and says when gradients synchronise; the loss keeps its value while its gradient is
weighted by its share of the window (and by the float16 scale); the optimizer steps when a window closes. The arithmetic is
`drivetrain.module.accumulation`'s. When the loader knows how many samples a window will have, gradients are complete after the last
backward, so that clipping between backward and step sees the truth.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.order import BatchInfo
from drivetrain.module.accumulation import AccumulationWindow, copy_gradients, scale_gradients
from drivetrain.module.autocasting import autocast_forward
from drivetrain.module.pipeline_schedule import PipelinedModel, PipelineOutput
from drivetrain.module.precision import Precision, warn_unscaled_float16
from drivetrain.module.wrappers import is_fully_sharded
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.strategy.batching import BatchPlan, plan_batch

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application


class Stepping:
    """The window of one plan, and what it does to losses and gradients."""

    def __init__(self, ctx: "Application", batch: BatchPlan | None):
        self.model = ctx.model
        self.batch = batch
        self.window = AccumulationWindow(1 if batch is None else batch.accumulation, num_data_ranks())
        self.precision = Precision(name="plan", autocast_dtype=ctx.autocast_dtype)
        self.device = ctx.device
        self.scaler = ctx.scaler
        self.skip_nonfinite = ctx.skip_nonfinite
        self.was_skipped = self.just_updated = False
        self._loss_func = ctx.loss_func
        self._info: BatchInfo | None = None
        self._factor: float | None = None
        self._is_stepped = False  # whether `step` was called for the micro-batch in hand
        self._is_finished = False  # whether the gradients of a closing window are complete and unscaled
        self._is_complete = False  # whether the window's gradients need no correction when it closes
        self._is_followed = False  # whether a loader says when windows open
        self._is_unweighted = False
        # Recorded kernels write every gradient into the same memory: what is to be added to must be kept elsewhere.
        self._is_recorded = any(method.records_kernels for _, method, _ in ctx.plan.steps)
        self.pipeline = ctx.model if isinstance(ctx.model, PipelinedModel) else None
        if self.pipeline is not None:
            replicas = ctx.plan.site.axis("tensor") * ctx.plan.site.axis("sequence")
            self.pipeline.connect(self._user_loss, self._gradient_weight, self._share, replicas)
        self.begin(None)

    def begin(self, info: BatchInfo | None, total: int | None = None) -> None:
        """Take the next micro-batch; `total` is the number of samples in the epoch, where it is known."""
        window = self.window
        window.begin(last=info is not None and bool(info.last))
        self._info, self._factor, self._is_stepped = info, None, False
        if self._is_recorded and window.count == 2:
            copy_gradients(unwrap(self.model).parameters())
        if window.opens:
            self._is_complete = self.batch is not None and info is not None and total is not None
            if self._is_complete:
                assert self.batch is not None and info is not None and total is not None
                size = min(self.batch.global_size, total - (info.end - info.global_size))
                window.reference = size / (window.world * window.length)
            else:
                window.reference = None if self.batch is None else self.batch.micro
        self._synchronise(window.closes)

    def _synchronise(self, flag: bool) -> None:
        """Set whether the next backward averages gradients over ranks."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model.require_backward_grad_sync = flag
        elif is_fully_sharded(self.model):
            self.model.set_requires_gradient_sync(flag)  # type: ignore[operator]

    def follow(self, loader: "PlannedLoader", batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a loader's batches, each as the next of its window."""
        self._is_followed = True
        self.window.reset()
        total = loader._samples()
        for batch in batches:
            info = loader.batch_info
            assert info is not None
            if loader.drop_last and self.batch is not None and self.window.count == 0 and total is not None:
                left = total - (info.end - info.global_size)
                if left < self.batch.global_size:
                    return
            self.begin(info, total)
            yield batch

    def loss(self, inputs: Any, outputs: Any) -> Any:
        """Return the user's loss: its true value, with a gradient weighted for the window."""
        result = self.plain_loss(inputs, outputs)
        if self.pipeline is not None:  # its gradients were computed, and weighted, when the model ran
            return result
        if isinstance(result, list | tuple):
            return type(result)([self.weigh(result[0]), *result[1:]])
        return self.weigh(result)

    def plain_loss(self, inputs: Any, outputs: Any) -> Any:
        """Return the user's loss in the plan's precision, without weights."""
        if self.pipeline is not None:
            is_trained = isinstance(outputs, PipelineOutput) and self.pipeline.training
            return outputs.loss if is_trained else self.pipeline.joined_loss(inputs, outputs, self._user_loss)
        return self._user_loss(inputs, outputs)

    def _user_loss(self, inputs: Any, outputs: Any) -> Any:
        if self._loss_func is None:
            raise ConfigError("no loss_func was given, so there is none to call.")
        with self.precision.autocast(self.device.type):
            return self._loss_func(inputs, outputs)

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the same loss with a gradient that is multiplied by its share of the window."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        scale = self._gradient_weight(loss.device)
        return loss if isinstance(scale, float) and scale == 1.0 else _weighted(loss, scale)

    def _gradient_weight(self, device: torch.device | None = None) -> Any:
        """Return what the gradient of the micro-batch in hand is multiplied by: its share of the window, and float16's scale."""
        if self._is_unweighted:
            return 1.0
        if self._factor is None:
            items, everywhere = self._sizes()
            factor: Any = self.window.weigh(1.0, items, everywhere)  # type: ignore[arg-type]
            self._factor = float(factor)
        if self.scaler is not None:
            return self.scaler.scale(torch.ones((), device=device or self.device)) * self._factor
        return self._factor

    def _sizes(self) -> tuple[int, int]:
        """Return the samples of the micro-batch in hand, on this rank and on all."""
        if self._info is not None:
            return self._info.size, self._info.global_size
        micro = 1 if self.batch is None else self.batch.micro
        return micro, micro * self.window.world

    def _share(self) -> float:
        """Return which part of the samples in hand, over all data ranks, is this rank's."""
        here, everywhere = self._sizes()
        return here / everywhere if everywhere else 0.0

    @contextmanager
    def unweighted(self) -> Iterator[None]:
        """Let a pipeline compute plain gradients meanwhile, as a comparison with another model needs them."""
        self._is_unweighted = True
        try:
            yield
        finally:
            self._is_unweighted = False

    # At the end of a window.

    def finish_gradients(self, optimizer: Optimizer) -> None:
        """Make the gradients those of the mean over the window, unscaled; a second call changes nothing."""
        if self._is_finished:
            return
        self._is_finished = True
        collect = getattr(optimizer, "collect_gradients", None)
        if collect is not None:
            collect()
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        factor = None if self._is_complete else self.window.correction()
        if factor is not None:
            scale_gradients((p for group in optimizer.param_groups for p in group["params"]), factor)

    def step(self, optimizer: Optimizer) -> None:
        """End the micro-batch: update the parameters if it closes its window."""
        self._is_stepped, self.just_updated = True, False
        if self.window.closes:
            self._update(optimizer)
            self.just_updated = not self.was_skipped
        if not self._is_followed:
            self.begin(None)

    def may_clear(self) -> bool:
        """Return whether no gradient of an open window would be lost: before its first backward, or after its update.

        So `zero_grad` may stand at the beginning of a loop's body as well as at its end.
        """
        return self.window.closes if self._is_stepped else self.window.opens

    def _update(self, optimizer: Optimizer) -> None:
        """Update the parameters, unless a gradient is not finite and the plan says to skip then."""
        self.finish_gradients(optimizer)
        self.was_skipped = False
        if self.scaler is not None:
            before = self.scaler.get_scale()  # the host waits for the device here: the one read that float16 needs
            self.scaler.step(optimizer)
            self.scaler.update()
            self.was_skipped = self.scaler.get_scale() < before
        elif self.skip_nonfinite and not _all_finite(optimizer):
            self.was_skipped = True
        else:
            optimizer.step()
        self._is_finished = False
        self.window.reset()


class PlannedOptimizer(Optimizer):
    """An optimizer that steps and clears when an accumulation window closes; everything else is the inner one's."""

    def __init__(self, inner: Optimizer, stepping: Stepping):  # the inner optimizer's own initialisation is enough
        self.__dict__["inner"] = inner
        self.__dict__["stepping"] = stepping

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("state", "param_groups", "defaults"):
            setattr(self.inner, name, value)
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def window_closed(self) -> bool:
        """Whether the batch in hand is the last of its window, so that `step` will update."""
        return self.stepping.window.closes

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was left out because a gradient was not finite."""
        return self.stepping.was_skipped

    def unscale_(self) -> None:
        """Complete the gradients of a closing window now, to clip or look at them before `step`."""
        if self.window_closed:
            self.stepping.finish_gradients(self.inner)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters if the window closes, else do nothing."""
        if closure is not None:
            raise ConfigError("step(closure): a plan's optimizer takes no closure; call backward before step.")
        self.stepping.step(self.inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients between windows, and keep them inside one."""
        if self.stepping.may_clear():
            self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)


class PlannedScheduler:
    """A scheduler that moves on only when the optimizer really stepped."""

    def __init__(self, inner: Any, optimizer: PlannedOptimizer):
        self.inner, self._optimizer = inner, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the learning rate on, unless the update was left out."""
        if self._optimizer.stepping.just_updated:
            self.inner.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class PlannedLoader(SmartDataLoader[Any]):
    """A SmartDataLoader whose batches are the micro-batches of a plan."""

    _stepping: Stepping | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        return batches if self._stepping is None else self._stepping.follow(self, batches)

    def __len__(self) -> int:
        batch, total = self._stepping.batch if self._stepping is not None else None, self._samples()
        if batch is not None and self.drop_last and total is not None:
            return total // batch.global_size * batch.accumulation
        return super().__len__()

    def attach(self, stepping: Stepping) -> None:
        """Let this loader open and close the windows."""
        if self.drop_last and stepping.window.length > 1 and self._samples() is None:
            raise ConfigError(
                "drop_last with accumulation needs data whose length is known, to tell the last whole batch. Leave drop_last out."
            )
        self._stepping = stepping


def finish(ctx: "Application", loader: Any = None, batch: BatchPlan | None = None) -> None:
    """The last stage for a hand-written loop: autocast, scaler, windows around loader, loss and optimizer."""
    if ctx.autocast_dtype is not None:
        parts = ctx.model.parts if isinstance(ctx.model, PipelinedModel) else [ctx.model]
        for part in parts:
            autocast_forward(unwrap(part), ctx.device.type, ctx.autocast_dtype)
    scaler = Precision(name="plan", autocast_dtype=ctx.scaler_dtype).make_scaler(ctx.device)
    if scaler is not None:
        ctx.context.scaler = scaler  # type: ignore[attr-defined]
    elif ctx.scaler_dtype is torch.float16:
        warn_unscaled_float16(f"float16 on {ctx.device} has no gradient scaler")
    if isinstance(loader, SmartDataLoader) and not isinstance(loader, PlannedLoader):
        batch, loader = _planned(ctx, loader)
    ctx.stepping = Stepping(ctx, batch)
    if isinstance(loader, PlannedLoader):
        loader.attach(ctx.stepping)
    if loader is not None:
        ctx.context.loader = loader  # type: ignore[attr-defined]
    if ctx.optimizer is not None:
        ctx.optimizer = PlannedOptimizer(ctx.optimizer, ctx.stepping)


def _planned(ctx: "Application", loader: SmartDataLoader[Any]) -> tuple[BatchPlan | None, SmartDataLoader[Any]]:
    """Return the batch plan of a user's own loader, and the loader that follows it."""
    split, size = ctx.plan.batch_split, loader.global_batch_size
    if split == (None, None):
        return None, loader
    if size is None:
        raise ConfigError(f"{ctx.plan.splitter} needs a loader that was made with global_batch_size=.")
    batch = plan_batch(size, ctx.plan.data_ranks, *split)
    arguments = {**loader._arguments, "global_batch_size": batch.micro * batch.data_ranks, "random_seed": loader.seed}
    planned = PlannedLoader(**arguments)
    planned._device = loader._device
    return batch, planned


class _Weighted(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _weighted(loss: Tensor, factor: Any) -> Tensor:
    result: Any = _Weighted.apply(loss, factor)
    return result


def _all_finite(optimizer: Optimizer) -> bool:
    """Return whether every gradient on every rank is finite; the host waits for the device here."""
    import torch.distributed as dist

    from drivetrain.module.distributed_tensors import local_part
    from drivetrain.module.finite import nonfinite_flag

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        flag = nonfinite_flag(gradients)
    else:
        flag = torch.zeros((), device=local_part(parameters[0]).device if parameters else None)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # tensor ranks and stages too: all ranks step, or none does
    return not flag.item()
