"""Find out what a model computes and keeps without running it: two batch sizes on fake tensors, and straight lines through them.

No device is used and no memory is allocated for the model. Only shapes pass through the user's forward, loss, backward and
optimizer code, while allocations and operations are recorded. Everything that grows with the batch is linear in it, so two sizes
give the value for every other size. A model that cannot run on fake tensors (shapes that depend on values) is estimated from its
parameters and layers by closed forms, and the profile notes it.

What only some plans need (compiled graphs, checkpointed blocks) are separate parts. They are computed on request, because they
take longer than everything else.
"""

import functools
import gc
import math
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from drivetrain.core.errors import first_line
from drivetrain.core.types import Batch
from drivetrain.module.blocks import find_blocks
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.module.probing import attributes_set, silence_torch_logging
from drivetrain.strategy.profile.fake_world import (
    Deadline,
    OutOfTime,
    UnsupportedOpHandler,
    accelerator_rules,
    compiled_attention,
    fake_copy,
    prepared_inputs,
    preserve_model_state,
    structure_of,
)
from drivetrain.strategy.profile.few_blocks import (
    BLOCKS_RUN,
    DeeperTimeline,
    find_cuttable,
    watch_block,
    with_depth,
)
from drivetrain.strategy.profile.findings import (
    SIZES,
    Findings,
    closed_form_profile,
    optimizer_bytes,
    optimizer_with_state,
    state_bytes,
    state_tensors,
    storage_bytes,
    upper_lines,
)
from drivetrain.strategy.profile.operations import fused, tensors_of, work_of
from drivetrain.strategy.profile.step_memory import StepMemory, mean_of_outputs
from drivetrain.strategy.profile.torch_private import ROUNDING, captured_saved_bytes, fake_mode, traced_saved_bytes
from drivetrain.strategy.profile.unit_recorder import OperationList, UnitRecorder, hooked
from drivetrain.strategy.profile.values import ARITHMETICS, COMPILED, FUSED, PARTS, ModelProfile, line_through
from drivetrain.strategy.task import TrainingTask

MOST_CAPTURED = 3
"""A compiled graph of more equal blocks than this is captured with one and with two of them."""
LEAST_SECONDS = 5.0
"""What a run on fake tensors gets in any case, before closed forms take its place."""
_CAPTURE_STEPS = 10
"""How long the first capture is expected to take, in tracked steps."""


class ModelProfiler:
    """Profiles one model, and continues from its earlier results when more is requested."""

    def __init__(self, task: TrainingTask):
        self.task = task
        self._runs: _FakeRuns | None = None
        self._modelled: ModelProfile | None = None
        """Closed forms, where a run on fake tensors failed or took too long."""

    def profile(self, parts: Collection[str] = (), *, time_limit: float | None = None) -> ModelProfile:
        """Return the profile with further parts: names of `PARTS`. Parts requested before are not tried again.

        `time_limit` in seconds is looked at between parts: what was not found out in time is None, and `notes` name it. The caller's model
        and random streams stay as they are.
        """
        kept = preserve_model_state(self.task.model)
        with kept, accelerator_rules(), _no_cycles_collected(), silence_torch_logging(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's code warns in the real run
            return self._profile(parts, Deadline(time_limit))

    def _profile(self, parts: Collection[str], deadline: Deadline) -> ModelProfile:
        if self._modelled is not None:
            return self._modelled
        try:
            if self._runs is None:
                self._runs = _FakeRuns(self.task, deadline)
            self._runs.deadline = deadline
            return self._runs.profile(parts)
        except OutOfTime as late:
            why = f"its run on fake tensors was stopped after {late.seconds:.1f} s"
        except Exception as error:  # the user's code meets fake tensors here, and may fail in any way
            why = f"the model could not run on fake tensors ({type(error).__name__}: {first_line(error)})"
        self._runs = None
        self._modelled = closed_form_profile(self.task, f"{why}: estimated from its parameters and layers instead")
        return self._modelled


class _FakeRuns:
    """One fake model and the runs that are made with it."""

    def __init__(self, task: TrainingTask, deadline: Deadline):
        self.task, self.deadline, self.found = task, deadline, Findings()
        self.is_begun = False
        self._tried: set[str] = set()
        self._step_seconds = 0.0
        """How long the last tracked step took."""
        self._capture_seconds = 0.0
        if task.samples is None:
            raise ValueError("the task has no samples")
        self.mode = fake_mode()
        self.model = fake_copy(structure_of(task), self.mode).train()
        self._parameters, self._buffers = list(self.model.parameters()), list(self.model.buffers())
        self.groups = find_blocks(self.model)
        if len(self.groups) == 1 and self.groups[0].members[0] is self.model:
            self.groups = []  # a model without blocks is all rest
        self.inputs = {size: prepared_inputs(task, size, self.mode) for size in SIZES}
        self._note = self.found.notes.append
        self._is_regular = True  # whether blocks allocate alike, as far as is known
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizer_bytes, self.optimizer_temporaries = map(int, optimizer_bytes(task, self.model, self._note))
        self._add_optimizer()

    def profile(self, parts: Collection[str]) -> ModelProfile:
        """Make the runs that have not been made, the most useful first, and return the profile."""
        if not self.is_begun:
            with self.deadline.at_least(LEAST_SECONDS):
                for arithmetic in ARITHMETICS:
                    self._record_units(arithmetic)
            self.is_begun = True
        for part in (*ARITHMETICS, *PARTS):
            if part not in self._tried and (part in parts or part in ARITHMETICS):
                self._tried.add(part)
                self._find_out(part)
        optimizer = self.optimizer_bytes, self.optimizer_temporaries
        return self.found.profile(self.task, self.model, self.groups, self.inputs, *optimizer)

    def _find_out(self, part: str) -> None:
        """Make the runs of one part, where there is time for it."""
        arithmetic, _, what = part.partition("/")
        if f"/{what}" == COMPILED:
            self._capture(arithmetic)
            return
        if what and not any(group.repeats for group in self.groups):
            return
        name = f"the peak in {arithmetic}" + (f" with {what} checkpointing" if what else "")
        if not self.deadline.allows(len(SIZES) * self._step_seconds):
            self._note(f"out of time before {name} was tracked")
            return
        try:
            classes = [(module, "__class__", type(module)) for module in self.model.modules()] if what else []
            with attributes_set(classes):
                if what:
                    checkpoint_blocks(self.model, mode=what)  # type: ignore[arg-type]
                self._track_peak(arithmetic, part)
        except OutOfTime:
            self.model.zero_grad(set_to_none=True)
            self._note(f"out of time while {name} was tracked")

    def _add_optimizer(self) -> None:
        try:
            with self.mode:
                self.optimizer = optimizer_with_state(self.task, self.model)
            if self.optimizer is not None:
                self.optimizer_bytes = state_bytes(self.optimizer)
        except Exception as error:
            self.model.zero_grad(set_to_none=True)
            failed = f"on fake tensors it failed ({type(error).__name__}: {first_line(error)})"
            self._note(f"the optimizer's state is taken in proportion to a small step: {failed}")

    def _record_units(self, arithmetic: str) -> None:
        for size in SIZES:
            is_first = (arithmetic, size) == (ARITHMETICS[0], SIZES[0])
            run = self._recorded if is_first or not self._is_uniform else self._continued
            self.found.recorders[arithmetic, size] = run(arithmetic, size)

    def _recorded(self, arithmetic: str, size: int) -> UnitRecorder:
        """Return what one forward pass and its loss did and kept."""
        members = {member: index for index, group in enumerate(self.groups) for member in group.members}
        known = [*self.model.parameters(), *self.model.buffers(), *tensors_of(self.inputs[size])]
        recorder = UnitRecorder(members, len(self.groups), known, self.deadline.check)
        hooks = hooked(recorder.watch(self.model))
        with hooks, self.mode, UnsupportedOpHandler(), _autocast(arithmetic), recorder, recorder.count_saved_tensors():
            outputs = self.task.call(self.model, self.inputs[size])
            recorder.is_in_loss = True
            loss_of(self.task, self.inputs[size], outputs)
        recorder.output_bytes = float(storage_bytes(tensors_of(outputs)))
        return recorder

    def _continued(self, arithmetic: str, size: int) -> UnitRecorder:
        """Return the same from runs with two and with three of the blocks, extrapolated."""
        container = self._container
        assert container is not None
        runs = []
        for depth in (2, 3):
            with with_depth(container, depth):
                runs.append(self._recorded(arithmetic, size))
        recorder, longer = runs
        recorder.continue_to(longer, len(container) - 2)
        return recorder

    @functools.cached_property
    def _is_uniform(self) -> bool:
        """Return whether what blocks do and keep is found from few of them as from all."""
        container = self._container
        if container is None or len(container) <= 2 * (2 + 3):  # else nothing is saved
            return False
        first = ARITHMETICS[0], SIZES[0]
        return self._continued(*first).amounts() == self.found.recorders[first].amounts()

    def _track_peak(self, arithmetic: str, name: str) -> None:
        was_regular = self._is_regular
        timelines = {size: self._timeline(arithmetic, self.inputs[size]) for size in SIZES}
        if self._is_regular != was_regular:  # both sizes in the same way
            timelines = {size: self._timeline(arithmetic, self.inputs[size]) for size in SIZES}
        if name in ARITHMETICS:
            self._record_work(name, timelines)
        lines, are_alike = upper_lines(SIZES, [timelines[size] for size in SIZES])
        if not are_alike:
            self._note(f"{name}: the two runs allocated in a different order; the peak is interpolated between theirs")
        extra = 0.0 if self.optimizer is not None else float(self.optimizer_bytes)
        self.found.lines[name] = tuple((fixed + extra, each) for fixed, each in lines)

    def _record_work(self, name: str, timelines: Mapping[int, StepMemory | DeeperTimeline]) -> None:
        """Record the operators of both runs, as they are and as a compiler runs them; few blocks represent all."""
        lists = [timelines[size].operations for size in SIZES]
        small, large = ([] if one is None else one.calls for one in lists)
        container, is_deep = self._container, isinstance(timelines[SIZES[0]], DeeperTimeline)
        more = len(container) / BLOCKS_RUN if is_deep and container is not None else 1.0
        self.found.work[name] = work_of(SIZES, [small, large], more)
        self.found.work[name + FUSED] = work_of(SIZES, [fused(small), fused(large)], more)

    def _timeline(self, arithmetic: str, inputs: Batch) -> StepMemory | DeeperTimeline:
        """Return the allocations of one step, of a deep model found from four of its blocks."""
        container, timeline = self._container, StepMemory(ROUNDING, self.deadline.check)
        if container is None or len(container) <= BLOCKS_RUN or not self._is_regular:
            self._step(arithmetic, inputs, timeline)
            return timeline
        with with_depth(container, BLOCKS_RUN):
            hooks = [handle for index, block in enumerate(container) for handle in watch_block(block, timeline, index)]
            with hooked(hooks):
                self._step(arithmetic, inputs, timeline)
        deeper = DeeperTimeline.made_of(timeline, len(container) - BLOCKS_RUN)
        self._is_regular = deeper is not None
        return timeline if deeper is None else deeper

    def _step(self, arithmetic: str, inputs: Batch, timeline: StepMemory) -> None:
        """Record the allocations of a step that begins with optimizer state and without gradients."""
        started = time.monotonic()
        operations = timeline.operations = OperationList()
        blocks = [member for group in self.groups if group.repeats for member in group.members]
        with hooked(operations.watch(blocks)), self.mode, UnsupportedOpHandler(), timeline:
            # Of a model that runs with few of its blocks, too, all parameters are there.
            timeline.register([*self._parameters, *self._buffers], "params")
            timeline.register(state_tensors(self.optimizer) if self.optimizer is not None else [], "optimizer")
            timeline.register(tensors_of(inputs), "inputs")
            with _autocast(arithmetic):
                loss = loss_of(self.task, inputs, self.task.call(self.model, inputs))
            timeline.phase, operations.phase, operations.in_block = "temporary", "backward", False
            loss.backward()
            timeline.freeze()
        self.model.zero_grad(set_to_none=True)
        self._step_seconds = time.monotonic() - started

    def _capture(self, arithmetic: str) -> None:
        """Capture the compiled graphs at two batch sizes; of a deep model only one and two blocks, when that is all that differs."""
        what = f"compiled {arithmetic}"
        if any(work.key.startswith("recurrent") for work in self.found.work.get(arithmetic, ())):
            self._note(f"{what}: recurrent layers are not compiled and keep what eager mode keeps")
            return
        saved: list[float] = []
        for size in SIZES:
            if not self.deadline.allows(self._capture_seconds or _CAPTURE_STEPS * self._step_seconds):
                break
            started = time.monotonic()
            try:
                saved.append(self._captured(arithmetic, size))
                self._capture_seconds = time.monotonic() - started
            except Exception as error:  # code that the compiler cannot follow either
                self._note(f"{what}: the graph could not be captured ({type(error).__name__}: {first_line(error)})")
                return
        if not saved:
            self._note(f"{what}: out of time before the forward graph was captured")
            return
        if len(saved) == len(SIZES):
            fixed, each = line_through(SIZES, saved)
        else:
            fixed, each = 0.0, saved[0] / SIZES[0]
            self._note(f"{what}: there was time for one batch size, so memory is taken as proportional to it")
        self.found.compiled[arithmetic] = fixed, each
        state = float(storage_bytes([*self._parameters, *self._buffers]) + self.optimizer_bytes)
        gradients = sum(p.numel() * p.element_size() for p in self._parameters if p.requires_grad)
        inputs = storage_bytes(tensors_of(self.inputs[SIZES[1]])) / SIZES[1]
        self.found.lines[arithmetic + COMPILED] = ((state + gradients, inputs), (state + fixed, each + inputs))

    def _captured(self, arithmetic: str, size: int) -> float:
        def capture() -> float:
            with self.mode, compiled_attention():
                return compiled_saved_bytes(self.task, self.model, self.inputs[size], arithmetic)

        container = self._container
        if container is None:
            return capture()
        at_depth = []
        for depth in (1, 2):
            with with_depth(container, depth):
                at_depth.append(capture())
        return at_depth[0] + (len(container) - 1) * (at_depth[1] - at_depth[0])

    @functools.cached_property
    def _container(self) -> nn.ModuleList | nn.Sequential | None:
        """Return the list of blocks that can be shortened: a short model must do exactly what the whole one does, for fewer blocks."""
        families = find_cuttable(self.model, self.groups)
        if len(families) != 1 or sum(group.repeats for group in self.groups) != 1:
            return None
        container = self.model.get_submodule(families[0].container)
        if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) <= MOST_CAPTURED:
            return None
        if len(container) != len(families[0].names):
            return None
        first = ARITHMETICS[0], SIZES[0]
        whole = self.found.recorders[first].totals
        block = next(index for index, group in enumerate(self.groups) if group.repeats)
        try:
            with with_depth(container, 2):
                short = self._recorded(*first).totals
        except OutOfTime:
            raise
        except Exception:  # the forward asks for blocks by number, or counts them
            return None
        expected = {index: (2 / len(container) if index == block else 1.0) * whole[index].flops for index in whole}
        is_same = all(math.isclose(short[index].flops, flops, rel_tol=1e-6) for index, flops in expected.items())
        return container if is_same else None


def _autocast(arithmetic: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic != "float32")


@contextmanager
def _no_cycles_collected() -> Iterator[None]:
    """Keep the order of releases the same in every run: nothing is collected in between. It also saves a third of a second each time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Forward(nn.Module):
    """A model with its loss, as one module."""

    def __init__(self, task: TrainingTask, model: nn.Module, low: bool):
        super().__init__()
        self.task, self.model, self.low = task, model, low

    def forward(self, inputs: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.low, cache_enabled=False):
            return loss_of(self.task, inputs, self.task.call(self.model, inputs))


def compiled_saved_bytes(task: TrainingTask, model: nn.Module, inputs: Batch, arithmetic: str) -> float:
    """Return what the compiled forward pass of a fake model keeps for backward, without parameters and inputs."""
    whole = _Forward(task, model, arithmetic != "float32")
    state = dict(whole.named_parameters()) | dict(whole.named_buffers())
    leaves, layout = tree_flatten(inputs)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Tensor:
        values = list(leaves)
        for index, tensor in zip(places, tensors[len(state) :]):
            values[index] = tensor
        named = dict(zip(state, tensors))
        return torch.func.functional_call(whole, named, (tree_unflatten(values, layout),), tie_weights=True)

    try:
        return captured_saved_bytes(run, [*state.values(), *(leaves[index] for index in places)])
    except OutOfTime:
        raise
    except Exception:  # code that asks for values, which the compiler's own front end steps over
        with UnsupportedOpHandler():
            return traced_saved_bytes(whole, inputs)


def loss_of(task: TrainingTask, inputs: Batch, outputs: object) -> Tensor:
    """Return the task's loss or, without one, the mean of everything that the model returns."""
    if task.loss_func is not None:
        return task.loss(inputs, outputs)
    return mean_of_outputs(outputs)
