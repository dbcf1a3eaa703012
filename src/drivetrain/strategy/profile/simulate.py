"""Run a plan without its hardware: the real code that applies it, on fake tensors, as rank 0 of a fake world of the real size.

One untracked step fills every cache (the first step of a sharded model computes layouts, which would count as memory). The second
step is tracked storage by storage. Models of many equal blocks are simulated with a few of them and extrapolated exactly. Nothing
here raises because of a model: if it cannot be simulated, the result has a `failure` with the reason.
"""

import gc
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.core.errors import first_line
from drivetrain.module import ddp, tensor_inference
from drivetrain.module.loss_items import UNKNOWN
from drivetrain.module.probing import attributes_set, silence_torch_logging
from drivetrain.module.tensor_inference import InferredPlan
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.environment import end_with_parent
from drivetrain.runtime.ranks import is_distributed
from drivetrain.strategy.profile import few_blocks
from drivetrain.strategy.profile.fake_world import (
    Deadline,
    GradientBuckets,
    OutOfTime,
    accelerator_rules,
    allow_fake_module_moves,
    fake_copy,
    fake_world,
    few_chunks,
    meta_copy,
    preserve_model_state,
    structure_of,
)
from drivetrain.strategy.profile.findings import optimizer_settings
from drivetrain.strategy.profile.step_memory import CATEGORIES, Record, StepMemory, Update, by_category
from drivetrain.strategy.profile.torch_private import ROUNDING, fake_mode, faked
from drivetrain.strategy.profile.unit_recorder import hooked
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.value import Strategy

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from drivetrain.strategy.profile.torch_private import FakeTensorMode


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a plan would hold and send on one rank in one update."""

    peak_bytes: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict)
    """By category, at the moment at which most is held: `params`, `grads`, `optimizer`, `activations`, `gathered`, `temporary`."""
    collectives: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By kind: how many in one update, and the bytes of their whole tensors."""
    notes: tuple[str, ...] = ()
    """What was left out or replaced."""
    failure: str | None = None
    """Why there are no numbers."""


def simulate(
    task: TrainingTask, plan: Strategy, *, world: int, device_kind: str = "cpu", time_limit: float | None = None
) -> Simulation:
    """Return what a plan would hold and send on rank 0 of a world of any size, for the kind of device "cpu" or "cuda"."""
    return simulate_plans(task, [plan], world=world, device_kind=device_kind, time_limit=time_limit)[0]


def simulate_plans(
    task: TrainingTask,
    plans: Sequence[Strategy],
    *,
    world: int,
    device_kind: str = "cpu",
    time_limit: float | None = None,
) -> list[Simulation]:
    """Simulate several plans one after another within the time limit. If a process group exists, this runs in one child process."""
    deadline = Deadline(time_limit)
    if is_distributed():
        return _in_child(task, plans, world, device_kind, deadline)
    with preserve_model_state(task.model), cache_tensor_plans():
        return [_simulate(task, plan, world, device_kind, deadline) for plan in plans]


@dataclass
class _Job:
    """One plan to simulate, and what was found out on the way."""

    task: TrainingTask
    plan: Strategy
    world: int
    kind: str
    deadline: Deadline
    notes: list[str] = field(default_factory=list)


def _simulate(task: TrainingTask, plan: Strategy, world: int, kind: str, deadline: Deadline) -> Simulation:
    methods = [(find_method(name), config, tunable) for name, config, tunable in plan]
    entries = [(one.name, one.simulated(config), tunable) for one, config, tunable in methods if not one.not_simulated]
    # Labels of fake tensors cannot be counted, and weights take no memory.
    task = replace(task, count_items=None, items=UNKNOWN)
    job = _Job(task, replace(plan, opt_list=entries), world, kind, deadline)
    job.notes += [f"{one.name}: not simulated, {one.not_simulated}" for one, _, _ in methods if one.not_simulated]
    try:
        job.deadline.check()
        for entry in plan:
            if (reason := find_method(entry.name).prevents_simulation) is not None:
                raise NotImplementedError(reason)
        with silence_torch_logging(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a plan would warn about is said when it is applied
            _leave_out_replicas(job)
            result = _numbers(job, *_run(job))
    except OutOfTime:
        result = Simulation(failure="the time limit ended the simulation")
    except NotImplementedError as error:
        result = Simulation(failure=str(error))
    except Exception as error:  # a model may do anything; why it cannot be simulated is the result
        result = Simulation(failure=f"{type(error).__name__}: {first_line(error)}")
    finally:
        gc.collect()
    return replace(result, notes=tuple(job.notes))


_REPLICAS = 2


def _leave_out_replicas(job: _Job) -> None:
    """Make the world smaller where that changes nothing for one rank: replicas along `data` hold the same and average with the others.

    A world of many ranks along several axes has thousands of groups, and making them takes longer than the step.
    """
    resolved = resolve_plan(job.plan, model=job.task.model, device="cpu", world=job.world)
    data = resolved.site.axis("data")
    is_split = any(
        method.splits_optimizer or (method.shards_axis is not None and resolved.site.axis(method.shards_axis) == 1)
        for _, method, _ in resolved.steps
    )
    if data <= _REPLICAS or is_split or resolved.rank_order is not None:
        return
    batch = resolved.batch_of(job.plan, job.task.global_batch_size)
    ranks = batch.data_ranks // data * _REPLICAS
    batch = replace(batch, data_ranks=ranks, global_size=batch.micro * batch.accumulation * ranks)
    job.world, job.plan = job.world // data * _REPLICAS, replace(job.plan, mesh=None, batch=batch)
    job.notes.append(f"{_REPLICAS} of {data} identical replicas along 'data' were simulated")


def _run(job: _Job) -> tuple[Record, int]:
    """Return the record of one update, and the passes that its window has; few blocks where that is possible, else all."""
    model = structure_of(job.task)
    families = few_blocks.find_cuttable(model)
    runs = few_blocks.choose_counts(families, job.plan)
    full = tuple(len(family.names) for family in families)
    if runs:
        try:
            records = [_follow(job, model, families, counts) for counts in runs]
        except OutOfTime:
            raise
        except Exception as error:  # it may count on all of its blocks; then all are simulated
            reason = f"{type(error).__name__}: {error}"
            job.notes.append(f"simulated in full, because it does not run with fewer blocks ({reason})")
        else:
            base = runs[0]
            cut = [index for index, count in enumerate(base) if count < full[index]]
            period = runs[1][cut[0]] - base[cut[0]]
            others = list(zip(cut, [record for record, _ in records[1:]]))
            shown = ", ".join(f"{full[index]} blocks of {families[index].container or 'the model'}" for index in cut)
            job.notes.append(f"continued to {shown} from {base[cut[0]]} and {base[cut[0]] + period}")
            return few_blocks.continued(records[0][0], others, base, full, period), records[0][1]
    return _follow(job, model, families, full)


def _follow(
    job: _Job, model: nn.Module, families: Sequence[few_blocks.BlockFamily], counts: few_blocks.Counts
) -> tuple[Record, int]:
    """Apply the plan to a fake copy with so many blocks, warm it up, and follow one update."""
    job.deadline.check()
    mode = fake_mode()
    copied = fake_copy(model, mode)
    copied.train(model.training)
    plan = job.plan
    is_whole = counts == tuple(len(family.names) for family in families)
    if not is_whole:
        plan = few_blocks.pinned(plan, model, families, counts)
        few_blocks.cut_model(copied, families, counts)
    buckets: list[GradientBuckets] = []

    def in_buckets(model: nn.Module, **settings: Any) -> nn.Module:
        buckets.append(GradientBuckets(model, mode, settings.get("bucket_cap_mb")))
        return model

    rules = accelerator_rules() if job.kind != "cpu" else nullcontext()
    in_python = attributes_set([(ddp, "TransparentDDP", in_buckets)])
    with fake_world(job.world), allow_fake_module_moves(), few_chunks(), in_python, rules:
        task = _fake_task(job, mode)
        resolved = resolve_plan(plan, model=copied, device="cpu", world=job.world)
        whole = resolved.batch_of(job.plan, job.task.global_batch_size)
        length = min(whole.accumulation, 2)  # all passes of a window but the last are alike
        batch = replace(whole, accumulation=length, global_size=whole.micro * length * whole.data_ranks)
        ctx = task.shaped(copied, resolved, batch)
        job.deadline.check()
        if is_whole:
            job.notes += ctx.notes
        step = Update(task, ctx, batch, buckets, job.deadline.check)
        with mode:
            tracker = StepMemory(ROUNDING if job.kind == "cuda" else 1)
            step.run(None)
            for bucket in buckets:
                bucket.build()
            if buckets:
                step.run(None)
            with hooked(few_blocks.watch_blocks(unwrap(ctx.model), families, counts, tracker)):
                step.run(tracker)
        return tracker.record(), whole.accumulation


def _fake_task(job: _Job, mode: "FakeTensorMode") -> TrainingTask:
    """Return the task with fake samples, and with the optimizer's loop over parameters that the device would choose."""
    task = job.task
    changes: dict[str, Any] = {"samples": tree_map_only(Tensor, lambda tensor: faked(mode, tensor), task.samples)}
    given = {"fused", "foreach"} & {key for key, value in task.optim_args.items() if value is not None}
    is_set = given or any(find_method(entry.name).sets_update_loop for entry in job.plan)
    if job.kind == "cuda" and not is_set and "foreach" in optimizer_settings(task):
        changes["optim_args"] = {**task.optim_args, "foreach": True}
    return replace(task, **changes)


def _numbers(job: _Job, record: Record, accumulation: int) -> Simulation:
    """Return the largest of all moments, and the collectives of the whole window."""
    methods = [(find_method(entry.name), entry.config) for entry in job.plan]
    is_sharded = any(method.shards_axis is not None for method, _ in methods)
    on_host = {part for method, config in methods for part in method.on_host(config, is_sharded)}
    host = [part for part in CATEGORIES if part in on_host]  # fake tensors are all on one device
    if host:
        job.notes.append(f"in host memory and not counted: {', '.join(host)}")
    best: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for amounts in record.segments.values():
        here = by_category(amounts, host)
        if sum(here.values()) > sum(best.values()):
            best = here
    collectives: dict[str, tuple[int, float]] = {}
    for part, entries in record.collectives.items():
        times = accumulation - 1 if part == "open" else 1
        for name, (count, size) in entries.items():
            before = collectives.get(name, (0, 0.0))
            collectives[name] = (before[0] + times * count, before[1] + times * size)
    return Simulation(peak_bytes=sum(best.values()), memory=best, collectives=dict(sorted(collectives.items())))


# In a child process.


def _in_child(
    task: TrainingTask, plans: Sequence[Strategy], world: int, kind: str, deadline: Deadline
) -> list[Simulation]:
    """Simulate in a process of its own, which has no process group yet; it gets the structure of the model, not its memory."""
    try:
        model = None if task.model is None else meta_copy(task.model)
        samples = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), task.samples)
        sent = replace(task, model=model, samples=samples)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        args = theirs, sent, list(plans), world, kind, deadline.left()
        child = context.Process(target=_child, args=args, daemon=True)
        child.start()
    except Exception as error:  # a model that cannot be copied or sent
        failure = f"it cannot be sent to a child process ({type(error).__name__}: {error})"
        return [Simulation(failure=failure)] * len(plans)
    theirs.close()
    results: list[Simulation] = []
    failure = "the time limit ended the simulation"
    try:
        while len(results) < len(plans) and ours.poll(deadline.left()):
            results.append(ours.recv())
    except EOFError:
        child.join()
        failure = f"the child process ended with status {child.exitcode}"
    finally:
        child.kill()
        child.join()
        ours.close()
    return results + [Simulation(failure=failure)] * (len(plans) - len(results))


def _child(
    pipe: "Connection", task: TrainingTask, plans: list[Strategy], world: int, kind: str, time_limit: float | None
) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    deadline = Deadline(time_limit)
    with cache_tensor_plans():
        for plan in plans:
            pipe.send(_simulate(task, plan, world, kind, deadline))
    pipe.close()


def cache_tensor_plans() -> AbstractContextManager[None]:
    """Cache the results of `infer_tp_plan` inside this context. Nested contexts share one cache."""
    infer = tensor_inference.infer_tp_plan
    if hasattr(infer, "known"):
        return nullcontext()
    known: list[tuple[type, int, dict[str, torch.Size], InferredPlan]] = []

    def cached_infer_tp_plan(model: nn.Module, size: int) -> InferredPlan:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        found = [  # for the same layers, or more of them
            plan
            for cls, ranks, layers, plan in known
            if type(model) is cls and size == ranks and shapes.items() <= layers.items()
        ]
        plan = found[0] if found else infer(model, size)
        if not found:
            known.append((type(model), size, shapes, plan))
        present = {name for name, _ in model.named_modules()}
        styles = {name: style for name, style in plan.styles.items() if name in present}
        return InferredPlan(styles=styles, remarks=list(plan.remarks))

    cached_infer_tp_plan.known = known  # type: ignore[attr-defined]
    return attributes_set([(tensor_inference, "infer_tp_plan", cached_infer_tp_plan)])
