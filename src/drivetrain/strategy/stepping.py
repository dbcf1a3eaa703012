"""Connects loader, loss and optimizer of a hand-written loop to the `Stepper`, so that its five lines are correct for any plan.

The loader opens and closes accumulation windows and decides when gradients synchronise. The loss keeps its value, while its
gradient is weighted by its share of the window (and by the float16 scale). The optimizer steps when a window closes. If the loader knows
how many samples a window will have, gradients are complete after the last backward, so that clipping sees the final gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from drivetrain.core.errors import BatchSizeError, ConfigError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.order import BatchInfo, share_of
from drivetrain.module.accumulation import AccumulationWindow, Count, copy_gradients
from drivetrain.module.compilation import replays_graphs
from drivetrain.module.ddp import check_reduced
from drivetrain.module.gradient_sync import set_synchronisation
from drivetrain.module.loss_items import without_empty
from drivetrain.module.pipeline_schedule import PipelinedModel, PipelineOutput
from drivetrain.module.precision import Precision, autocast_forward, warn_unscaled_float16
from drivetrain.module.stepper import Stepper, clip_grad_norm_
from drivetrain.module.wrapping import is_fully_sharded, unwrap
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.device import wide_dtype
from drivetrain.runtime.ranks import data_rank, num_data_ranks
from drivetrain.strategy.batching import BatchSplit, plan_batch

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application


def with_first(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the result of a loss function with its loss changed; it is a scalar, or a sequence that begins with it."""
    if isinstance(result, list | tuple):
        return type(result)([change(result[0]), *result[1:]])
    return change(result)


class Stepping:
    """Connects the stepper of one plan with the user's loader, loss and optimizer."""

    def __init__(self, ctx: "Application", batch: BatchSplit | None):
        self.model = ctx.model
        self.batch = batch
        self.window = AccumulationWindow(1 if batch is None else batch.accumulation, num_data_ranks())
        self.precision = Precision(name="plan", autocast_dtype=ctx.autocast_dtype)
        self.device = ctx.device
        self.stepper = Stepper(ctx.optimizer, self.window, scaler=ctx.scaler, device=ctx.device)
        self.skip_nonfinite = ctx.skip_nonfinite
        self.stages = ctx.plan.site.axis("pipe")
        self.just_updated = False
        self.count_items = ctx.count_items or (ctx.items.count if ctx.items.needs_count else None)
        """Counts what the loss of a batch is a mean over; None: samples."""
        self.is_sum = ctx.items.kind == "sum" and ctx.count_items is None
        """Whether losses of parts add up to that of the whole."""
        is_by_row = self.count_items is None or (ctx.count_items is None and ctx.items.is_one_per_row)
        self._items_per_row = 1.0 if is_by_row else None  # about, the same on all ranks; learned from the first count
        self._loss_func = ctx.loss_func
        self._keeps_outputs = ctx.loss_graph == "outputs"
        self._joint = ctx.joint if ctx.joint is not None and ctx.joint.planned is ctx.loss_func else None
        self._info: BatchInfo | None = None
        self._factor: Any = None
        self._is_stepped = False  # whether `step` was called for the current micro-batch
        self._is_followed = False  # whether a loader says when windows open
        # Recorded kernels write every gradient into the same memory: what is to be added to must be kept elsewhere.
        self._is_recorded = replays_graphs(ctx.model)
        self.pipeline = ctx.model if isinstance(ctx.model, PipelinedModel) else None
        if self.pipeline is not None:
            replicas = ctx.plan.site.axis("tensor") * ctx.plan.site.axis("sequence")
            self.pipeline.connect(self._user_loss, self, replicas)
            if ctx.optimizer is not None:
                _mark_tied(self.pipeline, ctx.optimizer)
        self.begin(None)

    def begin(self, info: BatchInfo | None, total: int | None = None) -> None:
        """Start the next micro-batch. `total` is the number of samples in the epoch, if it is known."""
        window = self.window
        self.stepper.begin(last=info is not None and bool(info.last))
        self._info, self._factor, self._is_stepped = info, None, False
        if self._is_recorded and window.count == 2:
            copy_gradients(unwrap(self.model).parameters())
        if window.opens:
            size = None
            if self.batch is not None and info is not None and total is not None:
                size = min(self.batch.global_size, _left(info, total))
            if size is not None and self._items_per_row is not None:
                window.reference = self._items_per_row * size / (window.world * window.length)
            elif self.count_items is None:
                window.reference = None if self.batch is None else self.batch.micro
            self.stepper.is_complete = self.is_sum or (size is not None and self.count_items is None)
        set_synchronisation(self.model, window.closes)

    def follow(self, loader: "PlannedLoader", batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a loader's batches, each as the next one of its window."""
        self._is_followed = True
        self.window.reset()
        total = loader._samples()
        for batch in batches:
            info = loader.batch_info
            assert info is not None
            is_short = total is not None and self.batch is not None and _left(info, total) < self.batch.global_size
            if is_short and loader.drop_last and self.window.count == 0:
                return
            self.begin(info, total)
            yield batch

    def loss(self, inputs: Any, outputs: Any) -> Any:
        """Return the user's loss with its true value and a gradient weighted for the window."""
        if self.pipeline is not None:  # its gradients were computed, and weighted, when the model ran
            is_trained = isinstance(outputs, PipelineOutput) and self.pipeline.training
            return outputs.loss if is_trained else self.pipeline.joined_loss(inputs, outputs, self._user_loss)
        return self._weighed(inputs, self._user_loss(inputs, outputs))

    def loss_of(self, call: Callable[..., object], inputs: object) -> Any:
        """Call the model and return the same, in one graph where the plan compiles model and loss together."""
        if self._joint is None:
            return self.loss(inputs, call(self.model, inputs))
        with self.precision.autocast(self.device.type):
            result, _ = self._joint.run(self.model, call, self._joint.loss_func, inputs, self._keeps_outputs)
        return self._weighed(inputs, result)

    def _weighed(self, inputs: object, result: object) -> Any:
        items = self.items_of(inputs) if torch.is_grad_enabled() else None
        return with_first(result, lambda loss: self.weigh(loss, items))

    def items_of(self, inputs: object) -> Count | None:
        """Return how many items the loss of a prepared input is a mean over; None for its samples, or if nothing is divided."""
        if self.count_items is None or (self.window.is_plain and self.pipeline is None):
            return None
        is_empty = self._info is not None and self._info.size == 0  # this rank has no samples left
        return 0 if is_empty else self.count_items(inputs)

    def _user_loss(self, inputs: object, outputs: object) -> object:
        if self._loss_func is None:
            raise ConfigError("there is no loss_func. Pass one.")
        with self.precision.autocast(self.device.type):
            return self._loss_func(inputs, outputs)

    def weigh(self, loss: Tensor, items: Count | None = None) -> Tensor:
        """Return the same loss with its gradient multiplied by its share of the window, by samples or by this many items."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and torch.is_grad_enabled()):
            return loss
        scale = self.gradient_weight(items, loss.device)
        if items is not None:
            loss = without_empty(loss, items)
        if isinstance(scale, float) and scale == 1.0:
            return loss
        return _Weighted.apply(loss, scale)

    def gradient_weight(self, items: Count | None, device: torch.device | None = None) -> Count:
        """Return the factor for the gradient of the current micro-batch: its share of the window, and float16's scale."""
        if self._factor is None:
            self._factor = self._window_share(items)
        if (scaler := self.stepper.scaler) is None:
            return self._factor
        return scaler.scale(torch.ones((), device=device or self.device)) * self._factor

    def _window_share(self, items: Count | None) -> Count:
        if self.is_sum:  # gradients are averaged over ranks
            return float(self.window.world) if self._sizes()[0] else 0.0
        if items is None:
            here, everywhere = self._sizes()
            factor: Any = self.window.weigh(1.0, here, everywhere)  # type: ignore[arg-type]
            return float(factor)
        one = torch.ones((), dtype=wide_dtype(self.device), device=self.device)
        share = self.stepper.weigh(one, items, items if self.window.world == 1 else None, is_whole=True)
        if self._items_per_row is None and self.window.reference is not None and self.batch is not None:
            self._items_per_row = float(self.window.reference) / self.batch.micro
        # Gradients that sharding has not added up yet, and those of copies, are completed by the step.
        is_here = not is_fully_sharded(self.model) and not hasattr(self.stepper.optimizer, "collect_gradients")
        if self.window.closes and self.window.length > 1 and is_here:
            return share * self.stepper.complete(unwrap(self.model).parameters())
        return share

    def _sizes(self) -> tuple[int, int]:
        """Return the samples of the current micro-batch, on this rank and on all."""
        if self._info is not None:
            return self._info.size, self._info.global_size
        micro = 1 if self.batch is None else self.batch.micro
        return micro, micro * self.window.world

    @property
    def is_last_pass(self) -> bool:
        """Whether the current micro-batch closes its window."""
        return self.window.closes

    def amount(self, items: Count | None) -> Count:
        """Return the weight of this rank's loss in the mean over all data ranks: its items, else its samples."""
        return self._sizes()[0] if items is None else items

    # At the end of a window.

    def step(self) -> None:
        """End the micro-batch, and update the parameters if it closes its window."""
        self._is_stepped, self.just_updated = True, False
        if self.window.closes:
            check_reduced(self.model)
            self.just_updated = self.stepper.update(self.skip_nonfinite)
        if not self._is_followed:
            self.begin(None)

    def may_clear(self) -> bool:
        """Return whether clearing gradients loses nothing: before the first backward of a window, or after its update.

        So `zero_grad` may be at the beginning of a loop's body as well as at its end.
        """
        return self.window.closes if self._is_stepped else self.window.opens


def _left(info: BatchInfo, total: int) -> int:
    """Return how many of an epoch's samples are not in earlier batches."""
    return total - (info.end - info.global_size)


def _mark_tied(pipeline: PipelinedModel, optimizer: Optimizer) -> None:
    """Mark what several stages train, so that a norm counts it once; reject optimizers that would train it differently there."""
    copies = {id(parameter): copied for parameter, copied in getattr(optimizer, "_served", ())}
    trained = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    settings = {}
    for names, (parameter, ranks) in zip(
        [names for names in pipeline.split.tied if not set(names).isdisjoint(pipeline.own)], pipeline.tied_parameters()
    ):
        held = copies.get(id(parameter), parameter)
        held.tied_stages = len(ranks)
        group = trained.get(id(held), {})
        settings[" and ".join(names.values())] = {key: str(value) for key, value in group.items() if key != "params"}
    everywhere: dict[str, dict[str, str]] = {}
    for rank, found in enumerate(all_gather_values(settings)):
        for shared, own in found.items():
            other = everywhere.setdefault(shared, own)
            if own != other:
                raise ConfigError(
                    f"pipeline_parallel: {shared} are one parameter shared by several stages, but the optimizer would use {other} in one "
                    f"of them and {own} on rank {rank}. Put both names into groups with the same settings."
                )


class PlannedOptimizer(Optimizer):
    """An optimizer that steps and clears when an accumulation window closes. Everything else is delegated to the inner optimizer."""

    def __init__(self, inner: Optimizer, stepping: Stepping):  # the inner optimizer's own initialisation is enough
        self.__dict__["inner"] = inner
        self.__dict__["stepping"] = stepping

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("state", "param_groups", "defaults"):
            setattr(self.inner, name, value)
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def window_closed(self) -> bool:
        """Whether the current batch is the last of its window, so that `step` will update."""
        return self.stepping.window.closes

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        return bool(self.stepping.stepper.was_skipped)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale the gradients of a closing window to at most this norm. Return the norm before it, None inside a window.

        The norm is that of the whole model on any mesh: over shards, tensor ranks and pipeline stages, and of the copies that the
        optimizer trains where the model has 16 bits or is offloaded. All ranks must call this.
        """
        if not self.window_closed:
            return None
        stepper = self.stepping.stepper
        stepper.finish()
        return clip_grad_norm_(
            stepper.parameters, max_norm, norm_type, device=self.stepping.device, stages=self.stepping.stages
        )

    def unscale_(self) -> None:
        """Complete the gradients of a closing window now, to clip or inspect them before `step`."""
        reason = "each pipeline stage holds only its own gradients" if self.stepping.stages > 1 else None
        if hasattr(self.inner, "collect_gradients"):
            reason = "the optimizer trains copies of the parameters, which hold the gradients"
        if reason is not None:
            raise ConfigError(
                f"unscale_(): {reason}, so clipping the model's parameters would be wrong. Call optim.clip_grad_norm_(max_norm) "
                "instead, which works with every plan."
            )
        if self.window_closed:
            self.stepping.stepper.finish()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters if the window closes, else do nothing."""
        if closure is not None:
            raise ConfigError("step(closure): a plan's optimizer takes no closure; call backward before step.")
        self.stepping.step()

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
    """A scheduler that advances only when the optimizer really stepped."""

    def __init__(self, inner: Any, optimizer: PlannedOptimizer):
        self.inner, self._optimizer = inner, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the learning rate, unless the update was skipped."""
        if self._optimizer.stepping.just_updated:
            self.inner.step(*args, **kwargs)


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
        """Make this loader open and close the windows."""
        if self.drop_last and stepping.window.length > 1 and self._samples() is None:
            raise ConfigError(
                "drop_last with accumulation needs data whose length is known, to find the last full batch. Remove drop_last."
            )
        self._stepping = stepping


def finish(ctx: "Application", loader: object = None, batch: BatchSplit | None = None) -> None:
    """The last stage for a hand-written loop: autocast, scaler, windows around loader, loss and optimizer."""
    if ctx.autocast_dtype is not None:
        for part in ctx.model.parts if isinstance(ctx.model, PipelinedModel) else [ctx.model]:
            autocast_forward(unwrap(part), ctx.device.type, ctx.autocast_dtype)
    scaler = Precision(name="plan", autocast_dtype=ctx.scaler_dtype).make_scaler(ctx.device)
    if scaler is not None:
        ctx.context.scaler = scaler
    elif ctx.scaler_dtype is torch.float16:
        warn_unscaled_float16(f"float16 on {ctx.device} has no gradient scaler")
    split = ctx.plan.batch_split
    if isinstance(loader, SmartDataLoader) and not isinstance(loader, PlannedLoader) and split != (None, None):
        assert loader.global_batch_size is not None
        batch = plan_batch(loader.global_batch_size, ctx.plan.data_ranks, *split)
        size = batch.micro * batch.data_ranks
        planned = PlannedLoader(**{**loader._arguments, "global_batch_size": size, "random_seed": loader.seed})
        planned._device, loader = loader._device, planned
    ctx.stepping = Stepping(ctx, batch)
    if isinstance(loader, PlannedLoader):
        loader.attach(ctx.stepping)
    if loader is not None:
        ctx.context.loader = loader
    if ctx.optimizer is not None:
        ctx.optimizer = PlannedOptimizer(ctx.optimizer, ctx.stepping)


class _Weighted(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def make_loader(
    dataset: Any, arguments: Mapping[str, Any], batch: BatchSplit, sampler_cls: Any = None, seed: int = 0
) -> PlannedLoader:
    """Return a loader of micro-batches; `arguments` are those of torch's DataLoader, with a global batch size."""
    given = {"loading_bar": False, "random_seed": seed, **arguments}
    given.pop("batch_size", None)
    if sampler_cls is not None:
        shuffle = bool(given.pop("shuffle", False))
        made = sampler_cls(dataset, num_replicas=batch.data_ranks, rank=data_rank(), shuffle=shuffle, seed=seed)
        is_known = isinstance(made, DistributedSampler)
        given["sampler"] = made if is_known else _AsReplicas(made, dataset, batch.data_ranks)
    if given.get("batch_sampler") is not None:
        given["batch_sampler"] = SplitBatches(given["batch_sampler"], batch.data_ranks * batch.accumulation)
        return PlannedLoader(dataset, **given)
    return PlannedLoader(dataset, global_batch_size=batch.micro * batch.data_ranks, **given)


class SplitBatches:
    """A batch sampler whose batches are equal parts of another one's, in order."""

    def __init__(self, inner: Iterable[Any], parts: int):
        self.inner, self.parts = inner, parts
        self.sampler = getattr(inner, "sampler", None)

    def __len__(self) -> int:
        return len(self.inner) * self.parts  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.inner:
            rows = list(batch)
            if len(rows) < self.parts:
                raise BatchSizeError(
                    f"batch_sampler gave a batch of {len(rows)} samples, which cannot be split into {self.parts} parts (data ranks x "
                    f"accumulation). Give batches of at least {self.parts}, or drop the last short batch."
                )
            for part in range(self.parts):
                first, size = share_of(len(rows), part, self.parts)
                yield rows[first : first + size]


class _AsReplicas(DistributedSampler[Any]):
    """Shows a sampler that only looks like torch's DistributedSampler to be one."""

    def __init__(self, inner: Any, dataset: Any, replicas: int):
        super().__init__(dataset, num_replicas=replicas, rank=data_rank(), shuffle=False)
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, where the sampler takes one."""
        if callable(getattr(self.inner, "set_epoch", None)):
            self.inner.set_epoch(epoch)
