"""`auto_accelerate`: take a plain model, an optimizer class, a dataset and a loss, and make them fast with a plan.

The plan is given (`load_strategy=`), checked and tried, or it is found by a search. Then it is applied. The result fits an
ordinary training loop: `loss.backward()`, `optim.step()` and `optim.zero_grad()` are correct for every plan, with any number of
processes and any accumulation. The global batch does not change, so more processes mean less work for each.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.context.context import Context
from drivetrain.core.arguments import check_callable
from drivetrain.core.display import print_if_possible
from drivetrain.core.errors import (
    BatchSizeError,
    ConfigError,
    ConflictError,
    NoEffectWarning,
    PlanInfeasible,
    did_you_mean,
    warn,
)
from drivetrain.core.types import Settings
from drivetrain.module.accumulation import Count
from drivetrain.module.loss_items import SAMPLES as LOSS_OF_SAMPLES
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.group import init_distributed
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.strategy.apply import Application, LossFunc, PrepareInput, check_model
from drivetrain.strategy.batching import BatchSplit, plan_batch
from drivetrain.strategy.device_spec import DeviceSpec
from drivetrain.strategy.dry_run import DryRunOutcome, verify_plan, with_counted_loss
from drivetrain.strategy.mesh import mesh_size
from drivetrain.strategy.method import is_whole
from drivetrain.strategy.reading import reject_pickle_name
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.search.constraints import NUMERICS, SearchConstraints, with_included
from drivetrain.strategy.stepping import PlannedLoader, PlannedOptimizer, PlannedScheduler, make_loader
from drivetrain.strategy.task import CallModel, ParameterGroups, TrainingTask, read_samples
from drivetrain.strategy.trial.checking import NOT_EXACT
from drivetrain.strategy.trial.memory import watch_memory
from drivetrain.strategy.trial.process import reject_inside_trial
from drivetrain.strategy.value import Strategy, changes_since, fingerprint
from drivetrain.train import loaders
from drivetrain.train.items import counts_rows_alike

_FORMATS = (None, "unpack_sequence", "unpack_dict")


class AutoAccelerateResult(NamedTuple):
    """What a training loop needs."""

    model: nn.Module
    optim: Any
    dataloader: Any
    loss_func: Any
    prepare_input: PrepareInput
    lr_scheduler: Any
    args: Settings

    @property
    def context(self) -> Context:
        """Model, optimizer, loader and loss as one object that can be moved, saved and restored."""
        return self.args["context"]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale the gradients of a closing window to at most this norm. Return the norm before it, None inside a window.

        The norm is that of the whole model for every plan: over shards, tensor ranks and pipeline stages. All ranks must call this.
        """
        return self.optim.clip_grad_norm_(max_norm, norm_type)

    @property
    def notes(self) -> list[str]:
        """Remarks of the plan's methods from when they were applied and from the first steps."""
        return self.args["notes"]


Outcome = tuple[bool, AutoAccelerateResult | None, Strategy]
"""Whether a plan was applied, what a loop needs, and the plan."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `auto_accelerate` beyond its named arguments."""

    time_limit: float | None = None
    """Seconds for an automatic search."""
    find_unused_parameters: bool = False
    ignore_dryrun_on_load_strategy: bool = False
    sample_batch: object = None
    """One sample, or a batch with `expand_sample_batch=False`, if there is no dataset."""
    batch_size: int | None = None
    """The global batch size that goes with `sample_batch`."""
    expand_sample_batch: bool = True
    verbose: bool = False
    sampler_seed: int = 0
    model_fn: Callable[[], nn.Module] | None = None
    """Makes the model again, for trials of a search."""
    numerics: str = "mixed"
    """How far a search may change precision: "exact", "mixed" or "low"."""
    memory_budget: float | int | str = 0.92
    """How much device memory a search may use."""
    allow_batch_rounding: bool = False
    plan_only: bool = False
    world_size: int | None = None
    device: Any = None
    allow_pickle: bool = False
    strict: bool = False
    count_items: Callable[..., Count] | None = None
    """Counts what the loss is a mean over, from the prepared input: parts of a batch are weighted by it. None: as is found out, else by
    samples."""

    def __post_init__(self) -> None:
        if self.count_items is not None:
            check_callable("count_items", self.count_items, "a function of the prepared input that returns a count")
        if self.numerics not in NUMERICS:
            raise ConfigError(f"numerics={self.numerics!r}: expected 'exact', 'mixed' or 'low'.")
        if self.world_size is not None and not (self.plan_only and is_whole(self.world_size)):
            raise ConfigError(
                f"world_size={self.world_size!r}: expected a whole number of at least 1, together with plan_only=True. A plan that is "
                "applied is for the processes that were started."
            )
        if self.sample_batch is not None and self.batch_size is None:
            raise ConfigError(
                "sample_batch was given without batch_size, the number of samples in a global batch. Pass both."
            )

    @property
    def spec(self) -> DeviceSpec | None:
        """The device to plan for if it is not this machine's: a DeviceSpec, its fields, or the name of a preset."""
        given = self.device
        if not self.plan_only or given is None or isinstance(given, torch.device):
            return None
        if isinstance(given, DeviceSpec):
            return given
        if isinstance(given, Mapping):
            return DeviceSpec(**given)
        return None if given in ("auto", "cpu") or str(given).startswith("cuda") else DeviceSpec.preset(given)


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., torch.optim.Optimizer] | None = None,
    dataset: object = None,
    loss_func: LossFunc | None = None,
    prepare_input: PrepareInput | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, object] | None = None,
    optim_param_func: ParameterGroups | None = None,
    dataloader_args: Mapping[str, object] | None = None,
    distributed_sampler_cls: object = None,
    excluded: Iterable[str] | None = None,
    included: Iterable[object] | None = None,
    load_strategy: object = None,
    lr_scheduler_cls: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None = None,
    lr_scheduler_args: Mapping[str, object] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: str | os.PathLike[str] | None = None,
    **kargs: object,
) -> Outcome:
    """Apply a plan to a model, its optimizer, data and loss. Return whether it worked, the result, and the applied plan.

    Args:
        model: a plain module.
        optim_func: an optimizer class, or a function of parameters and `optim_args`.
        dataset: what to train on.
        loss_func: a function of model input and model output.
        prepare_input: a function of what the loader yields and the device; it returns the model's input.
        model_input_format: None passes the batch unchanged, `"unpack_sequence"` and `"unpack_dict"` unpack it.
        optim_args: arguments of the optimizer.
        optim_param_func: a function of the model that returns parameter groups.
        dataloader_args: arguments of the loader; `batch_size` is the global batch.
        distributed_sampler_cls: a sampler of your own for several processes.
        excluded: methods that a search may not use.
        included: methods that it must use.
        load_strategy: a plan; None searches for one.
        lr_scheduler_cls: a scheduler class.
        lr_scheduler_args: its arguments.
        finetune_strategy: search the settings of the given plan.
        save_strategy_to_file: where to save the plan as JSON.
        **kargs: fields of `Options`: `time_limit`, `memory_budget`, `numerics`, `model_fn`, `plan_only`, `world_size`, `device`, `strict`
            and others.

    Raises:
        StrategyError: an argument or a method is wrong.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    >>> status, result, plan = auto_accelerate(
    ...     nn.Linear(4, 1), torch.optim.AdamW, data, lambda batch, output: nn.functional.mse_loss(output, batch[1]),
    ...     prepare_input=lambda batch, device: [part.to(device) for part in batch],
    ...     optim_args={"lr": 0.1}, dataloader_args={"batch_size": 8},
    ...     load_strategy=[("micro_batch", 4)], ignore_dryrun_on_load_strategy=True)
    >>> status, plan.batch.accumulation, len(result.dataloader)
    (True, 2, 8)

    Wrong input raises. A given plan that fails its trial, and a search in which nothing fits, return `(False, None, plan)` with
    `plan.failure`, or raise with `strict=True`; the model is then unchanged. A search whose trials all fail warns and changes nothing.
    """
    reject_inside_trial("auto_accelerate")
    valid = [item.name for item in fields(Options)]
    for name in [name for name in kargs if name not in valid]:
        hint = did_you_mean(name, valid) or f" Keywords: {', '.join(valid)}."
        raise TypeError(f"auto_accelerate() got an unexpected keyword argument {name!r}.{hint}")
    options = Options(**kargs)  # type: ignore[arg-type]
    check_model(model)
    if model_input_format not in _FORMATS:
        raise ConfigError(
            f"model_input_format={model_input_format!r}: expected None for model(x), 'unpack_sequence' for model(*x), or 'unpack_dict' for "
            "model(**x)."
        )
    if save_strategy_to_file is not None:
        reject_pickle_name(save_strategy_to_file)
    if load_strategy is None and finetune_strategy:
        raise ConfigError("finetune_strategy=True needs load_strategy, the plan to start from.")
    given = None if load_strategy is None else Strategy.load(load_strategy, allow_pickle=options.allow_pickle)
    task = TrainingTask(
        model=model, model_fn=options.model_fn, call=CallModel(model_input_format), loss_func=loss_func, prepare_input=prepare_input,
        optim_func=optim_func, optim_args=dict(optim_args or {}), optim_param_func=optim_param_func,
        find_unused_parameters=options.find_unused_parameters, count_items=options.count_items,
    )  # fmt: skip
    if lr_scheduler_args and lr_scheduler_cls is None:
        raise ConfigError("auto_accelerate: lr_scheduler_args was given without lr_scheduler_cls. Pass both.")
    scheduler = None if lr_scheduler_cls is None else partial(lr_scheduler_cls, **(lr_scheduler_args or {}))
    request = _Request(model, task, dataset, dict(dataloader_args or {}), distributed_sampler_cls, scheduler, options)
    if given is None or finetune_strategy or given.is_tunable():
        proceed = partial(request.search, request.constraints(included, excluded, given))
    else:
        proceed = partial(request.apply_plan, with_included(given, included, excluded))
    world = launched_world()
    if world is not None and world.world_size > 1 and not options.plan_only:
        init_distributed("gloo" if choose_device(options.device).type == "cpu" else None)
    status, result, plan = proceed()
    if status and save_strategy_to_file is not None and is_master():
        plan.save(save_strategy_to_file)
    if options.verbose and is_master():
        print_if_possible(plan.explain())
    return status, result, plan


@dataclass
class _Request:
    """One call's arguments, and the steps from a plan to a result."""

    model: nn.Module
    given: TrainingTask
    """The training as the arguments describe it, without its data."""
    dataset: object
    loader_args: Settings
    sampler_cls: object
    scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None
    options: Options

    @cached_property
    def task(self) -> TrainingTask:
        """The training as a value that plans are made and tried for."""
        samples = self._samples() if self.has_data else None
        task = replace(self.given, samples=samples, global_batch_size=self._global_size() or 1)
        if self.options.plan_only:
            return task
        task, collate = with_counted_loss(task), self.loader_args.get("collate_fn")
        rows_are_equal = task.items.kind == "elements" and collate is None
        if rows_are_equal or counts_rows_alike(task.items, self.dataset, collate):
            return replace(task, items=LOSS_OF_SAMPLES)
        return task

    @property
    def world(self) -> int:
        """For how many processes the plan is."""
        options = self.options
        return get_num_processes() if options.world_size is None else options.world_size

    @property
    def has_data(self) -> bool:
        """Whether there are samples to try a plan on."""
        return self.dataset is not None or self.options.sample_batch is not None

    @property
    def device(self) -> torch.device:
        """The device of this process. A plan for another machine is made on the CPU."""
        return choose_device("cpu" if self.options.spec is not None else self.options.device)

    def constraints(
        self, included: Iterable[object] | None, excluded: Iterable[str] | None, start: Strategy | None
    ) -> SearchConstraints:
        """Return the constraints of the search, checked, if there is what a search needs."""
        needs = {"optim_func": self.given.optim_func, "dataset (or sample_batch with batch_size)": self.has_data}
        if missing := [name for name, there in needs.items() if not there]:
            raise ConfigError(
                f"an automatic search needs {' and '.join(missing)}. Pass it, or give the plan: load_strategy=['parallel_mode', "
                "('amp_native', 'bf16'), 'compile', 'fused_optimizer']."
            )
        options, unwanted = self.options, frozenset(excluded or ())
        if options.find_unused_parameters:
            unwanted |= {"fsdp", "zero2"}  # it is a setting of DDP
        shared = ("numerics", "memory_budget", "plan_only", "spec", "strict", "allow_batch_rounding")
        return SearchConstraints(
            time_limit=120.0 if options.time_limit is None else options.time_limit,
            excluded=unwanted,
            included=tuple(included or ()),
            start=start,
            **{name: getattr(options, name) for name in shared},
        )

    def search(self, constraints: SearchConstraints) -> Outcome:
        """Find a plan and apply it."""
        from drivetrain.strategy.search.decision import plain_plan
        from drivetrain.strategy.search.find import find_plan

        device, world, start = self.device, self.world, constraints.start
        if start is not None and start.mesh is not None and mesh_size(start.mesh) != world:
            constraints = replace(constraints, start=start.rescale(world))
        report = print if self.options.verbose else None
        plan = find_plan(self.task, device=device, world=world, constraints=constraints, on_progress=report)
        plan = replace(plan, fingerprint=fingerprint(self.model, device, world, self.task.global_batch_size))
        if plan.failure is not None:
            if self.options.plan_only or plan.failure.kind == "infeasible":
                return False, None, plan
            plan = plain_plan(plan.failure.message, plan)
        if self.options.plan_only:
            return True, None, plan
        resolved = resolve_plan(plan, model=self.model, device=device, world=world)
        return self._applied(plan, resolved, self._plan_batch(resolved))

    def apply_plan(self, plan: Strategy) -> Outcome:
        """Check, try and apply a plan."""
        options, device, world = self.options, self.device, self.world
        searching = ("time_limit", "numerics", "memory_budget")
        if unused := [name for name in searching if getattr(options, name) != getattr(Options, name)]:
            warn(
                f"auto_accelerate: {', '.join(unused)} has no effect: load_strategy gives the plan, so none is searched.",
                NoEffectWarning,
            )
        rescaled: tuple[str, ...] = ()
        if plan.mesh is not None and mesh_size(plan.mesh) != world:
            plan = replace(plan.rescale(world), fingerprint=plan.fingerprint)
            rescaled = plan.reasons[-1:]
        resolved = resolve_plan(plan, model=self.model, device=device, world=world, strict=options.strict)
        sharded = [name for name in ("fsdp", "zero2") if resolved.config(name) is not None]
        if options.find_unused_parameters and sharded:
            raise ConflictError(
                f"find_unused_parameters=True is a setting of DDP, and {sharded[0]} does not need it. Remove it."
            )
        batch = self._plan_batch(resolved)
        mark = fingerprint(self.model, device, world, None if batch is None else batch.global_size)
        plan = replace(
            plan,
            reasons=(*resolved.reasons, *rescaled, *changes_since(plan.fingerprint, mark)),
            fingerprint=mark,
            failure=None,
            mesh=resolved.axes[::-1],
            batch=batch,
            dropped=resolved.dropped,
        )
        if options.plan_only:
            return True, None, plan
        outcome = self._dry_run(plan, device, batch)
        plan = replace(plan, reasons=(*plan.reasons, *outcome.notes))
        if outcome.failure is None:
            return self._applied(plan, resolved, batch)
        if options.strict:
            raise PlanInfeasible(f"the plan failed its trial ({outcome.failure.kind}): {outcome.failure.message}")
        return False, None, replace(plan, failure=outcome.failure)

    def _applied(self, plan: Strategy, resolved: ResolvedPlan, batch: BatchSplit | None) -> Outcome:
        """Apply a plan to the caller's own model."""
        make = None if self.dataset is None or batch is None else partial(self._make_loader, batch)
        ctx = self.task.shaped(self.model, resolved, batch, make)
        if isinstance(ctx.optimizer, PlannedOptimizer) and self.scheduler is not None:
            scheduler = PlannedScheduler(self.scheduler(ctx.optimizer.inner), ctx.optimizer)
            ctx.context.lr_scheduler = scheduler
        reasons = (*plan.reasons, *ctx.notes)
        plan = replace(plan, mesh=resolved.axes[::-1], batch=batch, dropped=resolved.dropped, reasons=reasons)
        watch_memory(ctx, plan)
        for reason in plan.reasons:
            if NOT_EXACT in reason and is_master():
                warn(f"auto_accelerate: {reason}")
        items = dict(ctx.context.items())
        result = AutoAccelerateResult(
            model=ctx.model,
            optim=ctx.optimizer,
            dataloader=items["loader"],
            loss_func=None if self.given.loss_func is None else ctx.stepping.loss,
            prepare_input=ctx.prepared,
            lr_scheduler=items["lr_scheduler"],
            args={
                "use_optim_backward": False,
                "requires_set_gradient_accumulation_boundary": False,
                "micro_batch_size": None if batch is None else batch.micro,
                "gradient_accumulation": 1 if batch is None else batch.accumulation,
                "context": ctx.context,
                "notes": ctx.notes,
            },
        )
        return True, result, plan

    def _global_size(self) -> int | None:
        """Return the number of samples in an update, as it was given; None where it is not known."""
        if self.loader_args.get("batch_sampler") is not None:
            return getattr(self.loader_args["batch_sampler"], "batch_size", None)
        size = self.loader_args.get("batch_size", self.options.batch_size)
        if size is not None and not is_whole(size):
            raise BatchSizeError(f"batch_size={size!r}: expected a whole number of at least 1, over all processes.")
        return size

    def _plan_batch(self, resolved: ResolvedPlan) -> BatchSplit | None:
        """Return how the global batch is split, or None when there is no data to split."""
        config = resolved.config("micro_batch")
        micro, accumulation = (None, None) if config is None else (config.size, config.accumulation)
        size, ranks, parts = self._global_size(), resolved.data_ranks, accumulation or 1
        # Batches of any size: parts of each, in turn.
        if size is None and self.loader_args.get("batch_sampler") is not None:
            return BatchSplit(global_size=ranks * parts, micro=1, accumulation=parts, data_ranks=ranks)
        if size is None and self.dataset is None and config is None:
            return None
        if size is None:
            size = 1 if self.dataset is not None else ranks * (micro or 1) * parts
        return plan_batch(size, ranks, micro, accumulation, allow_rounding=self.options.allow_batch_rounding)

    def _make_loader(self, batch: BatchSplit, ctx: Application) -> PlannedLoader:
        defaults = loaders.default_kwargs(ctx.device, self.dataset, 1)
        is_stream = isinstance(self.dataset, torch.utils.data.IterableDataset)
        workers = 0 if is_stream else defaults["num_workers"]
        arguments = {"pin_memory": defaults["pin_memory"], "num_workers": workers, **self.loader_args}
        return make_loader(self.dataset, arguments, batch, self.sampler_cls, self.options.sampler_seed)

    def _dry_run(self, plan: Strategy, device: torch.device, batch: BatchSplit | None) -> DryRunOutcome:
        if self.options.ignore_dryrun_on_load_strategy:
            return DryRunOutcome(notes=("dry run: skipped, because ignore_dryrun_on_load_strategy is set",))
        if missing := self.task.missing():
            return DryRunOutcome(notes=(f"dry run: skipped, because {missing}",))
        return verify_plan(plan, self.task, device=device, batch=batch)

    def _samples(self) -> object:
        """Return a few samples as a loader yields them, the same on all ranks."""
        if self.dataset is not None:
            try:
                return read_samples(self.dataset, self.loader_args.get("collate_fn"))
            except Exception:  # the first batch raises it again, unless a sampler leaves those samples out
                return None
        if not self.options.expand_sample_batch:
            return self.options.sample_batch
        return tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), self.options.sample_batch)
