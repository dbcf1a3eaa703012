"""Run the stages of a model as a pipeline: one call is the whole schedule, forward and backward, over all micro-batches.

The schedules are torch's (`torch.distributed.pipelining`): GPipe (Huang et al., 2019, arXiv 1811.06965), 1F1B and interleaved 1F1B
(Narayanan et al., 2021, arXiv 2104.04473). Every rank of a pipeline is called with the same batch, so inputs are not sent, and
the loss of the last stage is the value that all ranks get. What the loss is and how its gradient is weighed comes from outside
(`connect`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.core import errors
from drivetrain.core.errors import BatchSizeError, ConfigError, DistributedError, unknown_name
from drivetrain.core.plain import plain_text
from drivetrain.module.accumulation import Count, as_factor, share_of
from drivetrain.module.distributed_tensors import is_dtensor, local_part
from drivetrain.module.loss_items import without_empty
from drivetrain.module.pipeline import Split
from drivetrain.module.pipeline_parts import (
    EqualSampleWeights,
    FlatCall,
    LossWeights,
    broadcast_from_first_stage,
    is_batched,
    mount,
    sum_over,
)
from drivetrain.module.probing import use_copied_buffers
from drivetrain.module.wrapping import is_fully_sharded, unwrap
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.device import wide_dtype
from drivetrain.runtime.seeds import capture_rng, restore_rng

SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe")


class PipelineOutput:
    """What a pipeline returns on ranks without the model's output: the loss in training, nothing in evaluation."""

    def __init__(self, loss: Tensor | None = None):
        self._loss = loss

    @property
    def loss(self) -> Tensor:
        """The mean loss of the batch, the same on all ranks. Its gradient has already been computed."""
        if self._loss is None:
            raise ConfigError(
                "in evaluation the output of a pipeline is on the ranks of its last stage. Call loss_func on all ranks with what the "
                "model returned there, or look at the output on the last stage only."
            )
        return self._loss

    def __repr__(self) -> str:
        return f"PipelineOutput(loss={self._loss})"


class PipelinedModel(nn.Module):
    """This rank's stages of a model, under the user's own names. Calling it runs the stages of all ranks."""

    _loss_func: Callable[[Any, Any], Any] | None
    _weights: LossWeights
    _replicas: int

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        own: Sequence[int],
        *,
        schedule: str,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        super().__init__()
        self.split, self.own = split, tuple(own)
        """All stages, and which of them are this rank's."""
        self.parts: list[nn.Module] = [split.parts[index] for index in own]
        """This rank's stages, in DDP or sharded; what they hold is registered here, they themselves are not."""
        self.schedule, self.microbatches, self.group, self.device = schedule, microbatches, group, device
        self.all_names = frozenset(model.state_dict(keep_vars=True))
        """Every key of the whole model's state."""
        firsts = {id(parameter): name for name, parameter in model.named_parameters()}
        names = {name: firsts[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self.plain_names = {name: first for name, first in names.items() if name != first}
        """The first name of each parameter that the whole model has under several."""
        self._runs: dict[object, _ScheduleRun] = {}
        self._full_size = 0
        mount(self, model, {name for index in own for name in split.parts[index].targets})
        self.connect(None, EqualSampleWeights())

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.split.parts)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so the output."""
        return self.own[-1] == self.num_stages - 1

    def connect(self, loss_func: Callable[[Any, Any], Any] | None, weights: LossWeights, replicas: int = 1) -> None:
        """Set the loss and the weights of its parts. `replicas` ranks (of a tensor axis) hold each loss."""
        # A loss may be a module, which is not part of this one.
        vars(self).update(_loss_func=loss_func, _weights=weights, _replicas=replicas)

    def wrap_parts(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Replace each stage by the result of `wrap`: in DDP, sharded, or computing in low precision."""
        parts = self.parts
        for index, part in enumerate(parts):
            parts[index] = wrap(part)
        for part in parts:  # sharding replaces the parameters in containers
            inner = unwrap(part)
            for name in inner.targets:  # type: ignore[union-attr]
                holder, _, last = name.rpartition(".")
                source = inner.get_submodule(holder)._parameters
                if last in source:
                    self.get_submodule(holder)._parameters[last] = source[last]
        self._runs.clear()
        for parameter, ranks in self.tied_parameters():  # each stage may have made its own
            broadcast_from_first_stage(local_part(parameter.detach()), ranks, self.group, self.device)

    def tied_parameters(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Return the parameters of this rank that others hold too, with the pipeline ranks that do, in the same order on all."""
        ranks = dist.get_world_size(self.group)
        return [
            (unwrap(part).get_parameter(names[index]), sorted(stage % ranks for stage in names))
            for names in self.split.tied
            for index, part in zip(self.own, self.parts)
            if index in names
        ]

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Sum the gradients of parameters that several stages hold, so that all of them make the same step."""
        for parameter, ranks in self.tied_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif is_dtensor(parameter):  # a lookup's gradient may be whole where the table is split
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            sum_over(local_part(parameter.grad), ranks, self.group, self.device)

    def train(self, mode: bool = True) -> "PipelinedModel":
        """Set the mode of all stages."""
        super().train(mode)
        for part in self.parts:
            for module in part.modules():
                module.training = mode
        return self

    def forward(self, *args: object, **kwargs: object) -> Any:
        """In training, run forward and backward and return a `PipelineOutput`; in evaluation, the output on the last stage."""
        if args and kwargs:
            raise ConfigError(
                "call a pipelined model as model(x), model(*x) or model(**x), as loss_func takes x; not mixed."
            )
        batch = kwargs or (args[0] if len(args) == 1 else args)
        inputs, rows = self._bind(args, kwargs), _rows(batch)
        is_training = self.training and torch.is_grad_enabled()
        if is_training and self._loss_func is None:
            raise ConfigError("a pipeline runs forward and backward together and needs loss_func. Pass it.")
        chunks = self._chunks(rows, is_training)
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        key = (is_training, chunks, shapes)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _ScheduleRun(self, chunks, is_training)
        return run(inputs, batch)

    def joined_loss(self, inputs: object, outputs: object, loss_func: Callable[[Any, Any], Any]) -> Tensor:
        """Return the loss of an evaluation on all ranks. Each of them must call this."""
        with torch.no_grad():
            loss = loss_func(inputs, outputs) if self.is_last else torch.zeros((), device=self.device)
            loss = loss[0] if isinstance(loss, list | tuple) else loss
        return self._reduce_over_last_stages(loss, self._weights.items_of(inputs))

    def _reduce_over_last_stages(self, loss: Tensor, items: Count | None) -> Tensor:
        """Return the mean over the global batch, or the sum, of what the ranks of the last stages hold."""
        total = torch.zeros(2, dtype=wide_dtype(self.device), device=self.device)
        if self.is_last:
            amount = self._weights.amount(items)
            own = (loss if items is None else without_empty(loss, items)).detach().reshape(())
            total[0], total[1] = own * (1 if self._weights.is_sum else amount), amount
        dist.all_reduce(total)
        return (total[0] / (self._replicas if self._weights.is_sum else total[1])).float()

    def _bind(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that stages use, by name."""
        try:
            given = self.split.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"wrong call of the model: {error}") from None
        inputs = {name: value for name, value in given.items() if name in self.split.inputs}
        missing = self.split.inputs - set(inputs)
        if missing:
            raise ConfigError(
                f"the pipeline was split for calls that give {', '.join(sorted(missing))}, but this call does not. Call the model as in "
                "training."
            )
        parameters = self.split.signature.parameters
        for name, value in given.items():
            if name in inputs or name in self.split.unused or value is parameters[name].default:
                continue
            raise ConfigError(
                f"the pipeline was split for calls without {name!r}, but this call passes it. Include it in the data that the plan is made "
                "with, or remove it."
            )
        return inputs

    def _chunks(self, rows: int, is_training: bool) -> int:
        """Return into how many equal micro-batches a batch is cut; a short last one into fewer."""
        if rows % self.microbatches == 0:
            if is_training:
                self._full_size = max(rows, self._full_size)
            return self.microbatches
        if is_training and rows >= self._full_size:
            below = rows // self.microbatches * self.microbatches
            sizes = f"{below} or {below + self.microbatches}" if below else f"{self.microbatches}"
            divisors = [m for m in range(1, rows + 1) if rows % m == 0]
            raise BatchSizeError(
                f"pipeline_parallel: {rows} samples cannot be cut into {self.microbatches} equal micro-batches. Give batches of {sizes} "
                f"samples on each data rank, or one of these for microbatches: {', '.join(map(str, divisors))}."
            )
        return max(m for m in range(1, self.microbatches + 1) if rows % m == 0)


def free_other_stages(model: nn.Module, pipeline: PipelinedModel) -> None:
    """Free the parameters of a model that are in no stage of this rank: they become tensors without memory."""
    kept = {id(parameter) for parameter in pipeline.parameters()}
    held = {id(module) for part in pipeline.parts for module in part.modules()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept and id(module) not in held:
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)


class _ScheduleRun:
    """The schedule for batches of one shape."""

    _schedule: Any

    def __init__(self, pipeline: PipelinedModel, chunks: int, is_training: bool):
        self.pipeline, self.chunks, self.is_training = pipeline, chunks, is_training
        self._batch: Any = None
        self._values: dict[int, Tensor] = {}
        self._last: Any = None
        self._weights: Sequence[Count] = ()  # of the gradients of micro-batches
        self._shares: Sequence[Count] = ()  # of micro-batches in the loss of the batch
        self._is_first = True

    def _make_schedule(self) -> Any:
        from torch.distributed import pipelining

        pipeline, chunks = self.pipeline, self.chunks
        stages = [
            pipelining.PipelineStage(part, index, pipeline.num_stages, pipeline.device, group=pipeline.group)
            for part, index in zip(pipeline.parts, pipeline.own)
        ]
        schedule: Any  # batches too short for the one asked for run all forwards first
        if len(stages) > 1:
            divides = chunks % (pipeline.num_stages // len(stages)) == 0
            schedule = pipelining.ScheduleInterleaved1F1B if divides else pipelining.ScheduleLoopedBFS
        else:
            is_1f1b = pipeline.schedule == "1F1B" and chunks >= pipeline.num_stages
            schedule = pipelining.Schedule1F1B if is_1f1b else pipelining.ScheduleGPipe
        return schedule(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=chunks,
            loss_fn=self._loss if self.is_training else None,
            scale_grads=False,  # gradients of earlier batches may be in the parameters already; the loss is divided instead
        )

    def __call__(self, inputs: dict[str, Any], batch: object) -> Any:
        """Run all micro-batches of one batch."""
        pipeline = self.pipeline
        if self._is_first:
            self._try_stages(inputs, batch)
        calls = [
            FlatCall(inputs, is_last=self._is_last(index), probing=self._is_first, collects=not self.is_training)
            for index in pipeline.own
        ]
        for part, call in zip(pipeline.parts, calls):
            unwrap(part).begin(call)  # type: ignore[operator]
        self._batch, self._last = batch, calls[-1]
        step = partial(self._schedule.step, **calls[0].batched, return_outputs=False)
        if not self.is_training:
            with torch.no_grad():
                step()
            self._is_first, self._batch = False, None
            return calls[-1].joined_output(self._shares_of(batch)[1]) if pipeline.is_last else PipelineOutput()
        items, self._shares = self._shares_of(batch)
        factor = pipeline._weights.gradient_weight(items)
        self._weights = [factor * share for share in self._shares]
        kept = self._stash_gradients()
        step(target=torch.arange(self.chunks), losses=[])
        with torch.no_grad():
            for parameter, grad in kept:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        if pipeline._weights.is_last_pass:
            pipeline.sum_tied_gradients()
        return PipelineOutput(self._joined(items))

    def _is_last(self, stage: int) -> bool:
        return stage == self.pipeline.num_stages - 1

    def _shares_of(self, batch: object) -> tuple[Count | None, list[Count]]:
        """Return the items of a batch, None where samples count, and the weight of each micro-batch's loss in that of the batch."""
        weights = self.pipeline._weights
        if (items := weights.items_of(batch)) is None:
            return None, [1.0 if weights.is_sum else 1 / self.chunks] * self.chunks
        counts = [weights.items_of(self._chunk(batch, place)) for place in range(self.chunks)]
        return items, [share_of(count, items) for count in counts if count is not None]

    def _chunk(self, batch: object, place: int) -> Any:
        return tree_map(lambda leaf: leaf.tensor_split(self.chunks)[place] if is_batched(leaf) else leaf, batch)

    def _loss(self, output: object, index: Tensor) -> Tensor:
        """Return what is back-propagated for one micro-batch, and keep its true value."""
        pipeline = self.pipeline
        place = int(index)  # on the CPU, so nothing waits for a device
        assert pipeline._loss_func is not None
        loss = pipeline._loss_func(self._chunk(self._batch, place), self._last.unflatten_output(output))
        loss = without_empty(loss, self._shares[place])
        self._values[place] = loss.detach()
        return loss * as_factor(self._weights[place], loss)

    def _joined(self, items: Count | None) -> Tensor:
        """Return the loss of the whole batch, as a leaf whose backward reaches no parameter."""
        pipeline, loss = self.pipeline, torch.zeros((), device=self.pipeline.device)
        if pipeline.is_last:
            first, *rest = (self._values[place].float() * share for place, share in enumerate(self._shares))
            loss = sum(rest, first)
        self._batch, self._values, self._is_first = None, {}, False
        return pipeline._reduce_over_last_stages(loss, items).requires_grad_()

    # Before the first step of a shape.

    def _try_stages(self, inputs: dict[str, Any], batch: object) -> None:
        """Run a micro-batch through one stage after the other, so that an error in one of them ends all ranks at once."""
        pipeline, random_state = self.pipeline, capture_rng()
        rank, ranks = dist.get_rank(pipeline.group), dist.get_world_size(pipeline.group)
        passed: list[tuple[list[int], torch.dtype]] = []
        for stage in range(-1, pipeline.num_stages):  # the first time, the schedule itself is made
            error, made = None, passed
            try:
                if stage < 0:
                    self._schedule = self._make_schedule()
                elif stage % ranks == rank:
                    made = self._try_stage(stage, inputs, batch, passed)
            except Exception as caught:  # whatever the user's model raises
                error = caught
            described = None if error is None else (type(error).__name__, plain_text(error))
            outcomes = all_gather_values((described, made))
            for failed, (description, _) in enumerate(outcomes):
                if description is not None:
                    raise error if error is not None else _failure(failed, stage, *description)
            passed = outcomes[dist.get_global_rank(pipeline.group, stage % ranks)][1]
        restore_rng(random_state)

    def _try_stage(
        self, stage: int, inputs: dict[str, Any], batch: object, passed: Sequence[tuple[list[int], torch.dtype]]
    ) -> list[tuple[list[int], torch.dtype]]:
        """Run a stage of this rank once, on zeros in place of what it receives; return the sizes and types of what it passes on."""
        pipeline = self.pipeline
        is_last = self._is_last(stage)
        part = pipeline.parts[pipeline.own.index(stage)]
        call = FlatCall(self._chunk(inputs, 0), is_last=is_last, probing=True, collects=False)
        received = [torch.zeros(sizes, dtype=dtype, device=pipeline.device) for sizes, dtype in passed]
        unwrap(part).begin(call)  # type: ignore[operator]
        # The backward of shards would begin to reduce gradients, which is left to the schedule.
        has_backward = self.is_training and not is_fully_sharded(part)
        with torch.set_grad_enabled(has_backward), use_copied_buffers(part), _gradients_kept(part):
            for tensor in received:
                tensor.requires_grad_(has_backward and (tensor.is_floating_point() or tensor.is_complex()))
            output = part(*received, **call.batched)
            ends: Sequence[Tensor] = output
            if is_last and self.is_training:
                assert pipeline._loss_func is not None
                loss = pipeline._loss_func(self._chunk(batch, 0), call.unflatten_output(output))
                if isinstance(loss, list | tuple):
                    raise ConfigError(
                        "pipeline_parallel: loss_func returns more than the loss, and the rest would exist only on the last stage. Return "
                        "the loss alone."
                    )
                ends = [loss]
            ends = [tensor for tensor in ends if tensor.requires_grad]
            with torch.autograd.set_detect_anomaly(False):  # zeros may well give gradients that are not finite
                torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        return [(list(tensor.shape), tensor.dtype) for tensor in output]

    def _stash_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take the gradients of sharded stages, which the first step of a shape clears when it finds out what stages exchange."""
        if not (self._is_first and any(map(is_fully_sharded, self.pipeline.parts))):
            return []
        kept = [(p, p.grad) for part in self.pipeline.parts for p in part.parameters() if p.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept


@contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """Restore the gradients of a module afterwards."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def _failure(rank: int, stage: int, kind: str, text: str) -> Exception:
    """Return the error of another rank as this rank raises it: a mistake of the user's as it is."""
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, ConfigError):
        return cls(text)
    where = "in the schedule" if stage < 0 else f"in stage {stage}"
    return DistributedError(f"rank {rank} failed {where} of the pipeline: {kind}: {text}")


def read_schedule(name: str) -> str:
    """Return the schedule with a name, in any letter case."""
    by_lower = {schedule.lower(): schedule for schedule in SCHEDULES}
    found = by_lower.get(name.lower().removeprefix("schedule"))
    if found is None:
        raise ConfigError(unknown_name("schedule", name, ["auto", *SCHEDULES], where="pipeline_parallel"))
    return found


def _rows(batch: object) -> int:
    """Return the number of samples, which is the first size of every tensor."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if is_batched(leaf)]
    if not sizes or len(set(sizes)) > 1:
        raise ConfigError(
            f"a pipeline cuts every tensor of the batch along its first dimension, but their lengths are {sorted(set(sizes))}. Give "
            f"tensors with one row per sample; scalars and other values are allowed next to them."
        )
    return sizes[0]
