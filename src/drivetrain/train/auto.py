"""`auto_accelerate`: from a plain model, an optimizer class, a dataset and a loss to all of them made fast, by a plan.

The plan is given (`load_strategy=`), checked whole, tried on a copy, and applied. What comes back fits the loop that people write
anyway: `loss.backward()`, `optim.step()`, `optim.zero_grad()` are right for every plan, with any number of processes and any
accumulation. The global batch stays what was written, so more processes mean less work for each.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.core.errors import BatchSizeError, ConfigError, ConflictError, PlanInfeasible, nearest_name
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.group import init_distributed
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import PlanContext, check_model, prepared_input, shape
from drivetrain.strategy.batching import BatchPlan, plan_batch
from drivetrain.strategy.dry_run import DryRun, Outcome, try_plan
from drivetrain.strategy.fingerprint import changes_since, fingerprint
from drivetrain.strategy.loading import make_loader
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe
from drivetrain.strategy.reading import refuse_pickle_name
from drivetrain.strategy.registry import expand_names, group_names
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.stepping import PlannedScheduler, finish
from drivetrain.strategy.value import Failure, Strategy
from drivetrain.train import loaders

_CHECK_SAMPLES = 8
_FORMATS = (None, "unpack_sequence", "unpack_dict")


class AutoAccelerateResult(NamedTuple):
    """What a training loop needs."""

    model: nn.Module
    optim: Any
    dataloader: Any
    loss_func: Any
    prepare_input: Callable[[Any, Any], Any]
    lr_scheduler: Any
    args: dict[str, Any]

    @property
    def context(self) -> PlanContext:
        """The session as one object, which moves, saves and restores."""
        return self.args["context"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `auto_accelerate` beyond its named arguments."""

    time_limit: float | None = None
    """Seconds for an automatic search."""
    find_unused_parameters: bool = False
    ignore_dryrun_on_load_strategy: bool = False
    sample_batch: Any = None
    """One sample, or a batch with `expand_sample_batch=False`, where there is no dataset."""
    batch_size: int | None = None
    """The global batch size that goes with `sample_batch`."""
    expand_sample_batch: bool = True
    verbose: bool = False
    sampler_seed: int = 0
    model_fn: Callable[[], nn.Module] | None = None
    """Makes the model anew, for trials of a search."""
    numerics: str = "mixed"
    """How far a search may change precision: "exact", "mixed" or "low"."""
    memory_budget: float | int | str = 0.92
    """How much device memory a search may plan with."""
    allow_batch_rounding: bool = False
    plan_only: bool = False
    world_size: int | None = None
    device: Any = None
    allow_pickle: bool = False
    strict: bool = False


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., torch.optim.Optimizer] | None = None,
    dataset: Any = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    prepare_input: Callable[[Any, Any], Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], Any] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: Any = None,
    excluded: Iterable[str] | None = None,
    included: Iterable[Any] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: Any = None,
    **kargs: Any,
) -> tuple[bool, AutoAccelerateResult | None, Strategy]:
    """Apply a plan to a model and what trains it; return whether it worked, the result, and the plan as applied.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    >>> status, result, plan = auto_accelerate(
    ...     nn.Linear(4, 1), torch.optim.AdamW, data, lambda batch, output: nn.functional.mse_loss(output, batch[1]),
    ...     prepare_input=lambda batch, device: [part.to(device) for part in batch],
    ...     optim_args={"lr": 0.1}, dataloader_args={"batch_size": 8},
    ...     load_strategy=[("micro_batch", 4)], ignore_dryrun_on_load_strategy=True)
    >>> status, plan.batch.accumulation, len(result.dataloader)
    (True, 2, 8)

    Wrong input raises. A plan that fails its trial returns `(False, None, plan)` with `plan.failure`, or raises with `strict=True`; the
    model is then unchanged. The documentation's page on strategies explains every argument.
    """
    options = _options(kargs)
    check_model(model)
    if model_input_format not in _FORMATS:
        raise ConfigError(
            f"model_input_format={model_input_format!r}: expected None for model(x), 'unpack_sequence' for model(*x), or 'unpack_dict' for "
            "model(**x)."
        )
    if save_strategy_to_file is not None:
        refuse_pickle_name(save_strategy_to_file)
    _refuse_search(load_strategy, finetune_strategy)
    plan = Strategy.load(load_strategy, allow_pickle=options.allow_pickle)
    plan = _with_wishes(plan, included, excluded)
    world = launched_world()
    if world is not None and world.world_size > 1 and not options.plan_only:
        init_distributed("gloo" if choose_device(options.device).type == "cpu" else None)
    request = _Request(
        model, optim_func, dict(optim_args or {}), optim_param_func, dataset, dict(dataloader_args or {}), loss_func, prepare_input,
        model_input_format, distributed_sampler_cls, lr_scheduler_cls, dict(lr_scheduler_args or {}), options,
    )  # fmt: skip
    status, result, plan = request.fulfil(plan)
    if status and save_strategy_to_file is not None and is_master():
        plan.save(save_strategy_to_file)
    if options.verbose and is_master():
        print(plan.explain())
    return status, result, plan


def _options(kargs: Mapping[str, Any]) -> Options:
    valid = [item.name for item in fields(Options)]
    for name in kargs:
        if name not in valid:
            near = nearest_name(name, valid)
            hint = f" Did you mean {near!r}?" if near else f" Keywords: {', '.join(valid)}."
            raise TypeError(f"auto_accelerate() got an unexpected keyword argument {name!r}.{hint}")
    options = Options(**kargs)
    if options.numerics not in ("exact", "mixed", "low"):
        raise ConfigError(f"numerics={options.numerics!r}: expected 'exact', 'mixed' or 'low'.")
    if options.sample_batch is not None and options.batch_size is None:
        raise ConfigError(
            "sample_batch was given without batch_size, the number of samples in a global batch. Pass both."
        )
    return options


def _refuse_search(load_strategy: Any, finetune: bool) -> None:
    if load_strategy is None and finetune:
        raise ConfigError("finetune_strategy=True needs load_strategy, the plan to start from.")
    if load_strategy is None:
        raise ConfigError(
            "auto_accelerate was called without load_strategy. The automatic search is not in this version yet: pass the plan, for example "
            "load_strategy=['parallel_mode', ('amp_native', 'bf16'), 'compile', 'fused_optimizer']."
        )
    if finetune:
        raise ConfigError(
            "finetune_strategy=True searches the configurations of the loaded plan, and the search is not in this version yet. Leave "
            "it out."
        )


def _with_wishes(plan: Strategy, included: Iterable[Any] | None, excluded: Iterable[str] | None) -> Strategy:
    """Return the plan with what must be in it, after refusing what must not."""
    wanted = [item if isinstance(item, tuple | list) else (item,) for item in included or ()]
    unwanted = expand_names(excluded or ())
    both = expand_names(item[0] for item in wanted) & unwanted
    if both:
        raise ConflictError(f"{', '.join(sorted(both))}: both included and excluded. Take it from one of the lists.")
    present = [name for name in plan.opt_names() if name in unwanted]
    if present:
        raise ConflictError(
            f"{', '.join(present)}: excluded, but in the plan that load_strategy gives. Take it from one of them."
        )
    for item in wanted:
        members = expand_names(item[:1])
        if members & set(plan.opt_names()):
            continue
        if item[0] in group_names() and len(members) > 1:
            raise ConfigError(
                f"included={item[0]!r} is a group, and the plan has none of its methods: {', '.join(sorted(members))}. Name one of them."
            )
        plan = plan.add_opt(item)
    return plan


@dataclass
class _Request:
    """One call's arguments, and the steps from a plan to a result."""

    model: nn.Module
    optim_func: Any
    optim_args: dict[str, Any]
    optim_param_func: Any
    dataset: Any
    loader_args: dict[str, Any]
    loss_func: Any
    prepare_input: Any
    input_format: str | None
    sampler_cls: Any
    scheduler_cls: Any
    scheduler_args: dict[str, Any]
    options: Options

    def fulfil(self, plan: Strategy) -> tuple[bool, AutoAccelerateResult | None, Strategy]:
        """Check, try and apply a plan."""
        options = self.options
        world = options.world_size if options.plan_only and options.world_size else get_num_processes()
        if plan.mesh is not None and _size_of(plan.mesh) != world:
            plan = replace(plan.rescale(world), fingerprint=plan.fingerprint)
        device = self._device()
        resolved = resolve_plan(plan, model=self.model, device=device, world=world, strict=options.strict)
        sharded = [name for name in ("fsdp", "zero2") if resolved.config(name) is not None]
        if options.find_unused_parameters and sharded:
            raise ConflictError(
                f"find_unused_parameters=True is a setting of DDP, and {sharded[0]} does not need it. Leave it out."
            )
        batch = self._plan_batch(resolved)
        mark = fingerprint(self.model, device, world, None if batch is None else batch.global_size)
        plan = replace(
            plan,
            mesh=resolved.axes[::-1],
            batch=batch,
            reasons=(*resolved.reasons, *changes_since(plan.fingerprint, mark)),
            dropped=resolved.dropped,
            fingerprint=mark,
            failure=None,
        )
        if options.plan_only:
            return True, None, plan
        outcome = self._dry_run(resolved, batch)
        plan = replace(plan, reasons=(*plan.reasons, *outcome.notes))
        if outcome.failure is not None:
            return False, None, self._failed(plan, outcome.failure)
        ctx = self._apply(self.model, resolved, batch)
        plan = replace(plan, reasons=(*plan.reasons, *ctx.notes))
        return True, self._result(ctx, batch), plan

    def _device(self) -> torch.device:
        given = self.options.device
        if self.options.plan_only and not isinstance(given, torch.device | type(None)):
            return choose_device("cpu")  # a preset or a DeviceSpec describes a machine that is not here
        return choose_device(given)

    def _failed(self, plan: Strategy, failure: Failure) -> Strategy:
        if self.options.strict:
            raise PlanInfeasible(f"the plan failed its trial ({failure.kind}): {failure.message}")
        return replace(plan, failure=failure)

    def _plan_batch(self, resolved: ResolvedPlan) -> BatchPlan | None:
        """Return how the global batch is split, or None when there is no data to split."""
        config = resolved.config("micro_batch")
        micro, accumulation = (None, None) if config is None else (config.size, config.accumulation)
        size = self.loader_args.get("batch_size", self.options.batch_size)
        if self.loader_args.get("batch_sampler") is not None:
            size = getattr(self.loader_args["batch_sampler"], "batch_size", None)
            if size is None:  # batches of any size: parts of each, in turn
                return BatchPlan(
                    global_size=resolved.data_ranks * (accumulation or 1), micro=1, accumulation=accumulation or 1,
                    data_ranks=resolved.data_ranks,
                )  # fmt: skip
        if size is None:
            if self.dataset is None and config is None:
                return None
            size = 1 if self.dataset is not None else resolved.data_ranks * (micro or 1) * (accumulation or 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BatchSizeError(f"batch_size={size!r}: expected a whole number of at least 1, over all processes.")
        return plan_batch(
            size, resolved.data_ranks, micro, accumulation, allow_rounding=self.options.allow_batch_rounding
        )

    # Applying it.

    def _apply(
        self, model: nn.Module, resolved: ResolvedPlan, batch: BatchPlan | None, quietly: bool = False
    ) -> PlanContext:
        """Shape a model and everything around it; `quietly` leaves out the loader."""
        recipe = None
        if self.optim_func is not None:
            groups = self.optim_param_func or (lambda final: final.parameters())
            recipe = OptimizerRecipe(build=self.optim_func, settings=dict(self.optim_args), groups=groups)
        ctx = PlanContext(model, resolved, recipe, self.loss_func, self.prepare_input, self._sample_runner())
        if self.options.find_unused_parameters:
            ctx.ddp_settings["find_unused_parameters"] = True
        shape(ctx)
        loader = None
        if self.dataset is not None and batch is not None and not quietly:
            arguments = {**self._loader_defaults(ctx), **self.loader_args}
            loader = make_loader(self.dataset, arguments, batch, self.sampler_cls, self.options.sampler_seed)
        finish(ctx, loader, batch)
        if ctx.optimizer is not None and self.scheduler_cls is not None:
            inner = self.scheduler_cls(ctx.optimizer.inner, **self.scheduler_args)
            ctx.lr_scheduler = PlannedScheduler(inner, ctx.optimizer)
        return ctx

    def _loader_defaults(self, ctx: PlanContext) -> dict[str, Any]:
        defaults = loaders.default_kwargs(ctx, self.dataset, 1)
        is_stream = isinstance(self.dataset, torch.utils.data.IterableDataset)
        return {"pin_memory": defaults["pin_memory"], "num_workers": 0 if is_stream else defaults["num_workers"]}

    def _result(self, ctx: PlanContext, batch: BatchPlan | None) -> AutoAccelerateResult:
        return AutoAccelerateResult(
            model=ctx.model,
            optim=ctx.optimizer,
            dataloader=ctx.loader,
            loss_func=None if self.loss_func is None else ctx.stepping.loss,
            prepare_input=ctx.prepared,
            lr_scheduler=ctx.lr_scheduler,
            args={
                "use_optim_backward": False,
                "requires_set_gradient_accumulation_boundary": False,
                "micro_batch_size": None if batch is None else batch.micro,
                "gradient_accumulation": 1 if batch is None else batch.accumulation,
                "context": ctx,
            },
        )

    # Trying it.

    def _dry_run(self, resolved: ResolvedPlan, batch: BatchPlan | None) -> Outcome:
        if self.options.ignore_dryrun_on_load_strategy:
            return Outcome(notes=("dry run: left out, because ignore_dryrun_on_load_strategy was given",))
        has_data = self.dataset is not None or self.options.sample_batch is not None
        needs = {"optim_func": self.optim_func is not None, "loss_func": self.loss_func is not None, "data": has_data}
        missing = [name for name, there in needs.items() if not there]
        if missing:
            return Outcome(notes=(f"dry run: left out, because there is no {' and no '.join(missing)}",))
        run = DryRun(
            make=lambda model: self._apply(model, resolved, batch, quietly=True),
            batch=self._check_batch(),
            call=self._call,
            loss=self.loss_func,
            prepare_input=self.prepare_input,
        )
        return try_plan(self.model, resolved, run)

    def _check_batch(self) -> Any:
        """Return a few samples as a loader yields them, the same on all ranks; reading them disturbs no random state."""
        random_state = capture_rng()
        try:
            return self._read_check_batch()
        finally:
            restore_rng(random_state)

    def _read_check_batch(self) -> Any:
        options = self.options
        if self.dataset is None:
            if not options.expand_sample_batch:
                return options.sample_batch
            from torch.utils._pytree import tree_map_only

            return tree_map_only(torch.Tensor, lambda tensor: tensor.unsqueeze(0), options.sample_batch)
        collate = self.loader_args.get("collate_fn")
        return next(iter(DataLoader(self.dataset, batch_size=_CHECK_SAMPLES, collate_fn=collate)))

    def _sample_runner(self) -> Callable[[nn.Module], Any] | None:
        """Return what runs a model on a few samples, or None without data."""
        if self.dataset is None and self.options.sample_batch is None:
            return None

        def run(model: nn.Module) -> Any:
            place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            inputs = prepared_input(self._check_batch(), place, self.prepare_input)
            mode = model.training
            model.eval()
            try:
                with torch.no_grad():
                    return self._call(model, inputs)
            finally:
                model.train(mode)

        return run

    def _call(self, model: nn.Module, inputs: Any) -> Any:
        if self.input_format == "unpack_dict":
            return model(**inputs)
        return model(*inputs) if self.input_format == "unpack_sequence" else model(inputs)


def _size_of(mesh: Iterable[tuple[str, int]]) -> int:
    size = 1
    for _, axis_size in mesh:
        size *= axis_size
    return size
