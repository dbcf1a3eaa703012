"""Repeat the forward and backward passes of an update, for optimizers that evaluate the loss more than once (SAM, LBFGS).

While such an optimizer is in use, the batches of the open accumulation window are stored with their random states. Evaluating
again runs the same passes: same batches, same dropout, same mixing. Plugins see only one pass. Callbacks, loggers, trackers and
metrics are disabled, buffers (running statistics) are restored, and only algorithms run again, because what they do to batch,
outputs, loss and gradients is part of the function that is minimised. With any other optimizer nothing is stored.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drivetrain.context.moving import move_to_device
from drivetrain.context.state import State
from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import ConfigError, ResumeError
from drivetrain.core.types import StateDict
from drivetrain.module.accumulation import Count
from drivetrain.module.gradient_sync import start_sum_over_ranks
from drivetrain.module.optimizers import requires_closure
from drivetrain.module.stepper import Stepper
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.train.batches import map_tensors
from drivetrain.train.items import KnownBatch
from drivetrain.train.run import Measures, Run

if TYPE_CHECKING:
    from drivetrain.train.hooks import TrainerHooks

_STEP_FIELDS = ("batch", "outputs", "loss", "losses", "batch_output", "sample_index")


@dataclass(kw_only=True)
class _Memory:
    """A batch of the window and everything its passes depend on."""

    batch: object
    step: int
    synchronises: bool
    sizes: tuple[int, int] | None  # samples of the batch on this rank and on all of them, where the loader counts them
    rng: StateDict
    generators: dict[str, Tensor]


class WindowRepeat:
    """Stores the batches of a window, steps the optimizer with a closure, and is that closure. The State saves it."""

    def __init__(self, device: torch.device):
        self._device = device
        self.stepper: Stepper | None = None  # of the run; its window knows whether there is something to save
        self.is_wanted = False  # whether the optimizer of this run evaluates more than once
        self._memories: list[_Memory] = []
        self._returns_loss = False
        self._overflowed = False

    def prepare(self, optimizer: object, scaler: torch.amp.GradScaler | None) -> bool:
        """Inspect the optimizer of the run when everything is loaded. Return whether it evaluates more than once."""
        self._returns_loss = requires_closure(optimizer)
        self.is_wanted = self._returns_loss or bool(getattr(optimizer, "needs_closure", False))
        if not self.is_wanted:
            self._memories = []
        elif self._returns_loss and scaler is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates the loss itself, which float16 with scaled gradients does not support. Use "
                "precision='bf16' or full precision."
            )
        return self.is_wanted

    def remember(self, run: Run, state: State, batch: object) -> None:
        """Store a batch of the window before anything changes it."""
        if run.stepper.window.opens:
            self._memories = []
        info = None if run.data.source is None else run.data.source.batch_info
        self._memories.append(
            _Memory(
                batch=_shallow(batch),
                step=state.step,
                synchronises=run.stepper.synchronises,
                sizes=None if info is None else (info.size, info.global_size),
                **state.capture_random(),
            )
        )

    def step(self, passes: "TrainerHooks") -> None:
        """Step the optimizer, which may evaluate the window again. Non-finite gradients skip the step and lower the scale."""
        stepper, self._overflowed = passes.run.stepper, False
        scaler = stepper.scaler
        before = None if scaler is None else scaler.get_scale()
        stepper.step(partial(self.evaluate, passes))
        if self._overflowed and scaler is not None and before is not None:
            scaler.update(before * scaler.get_backoff_factor())
            stepper.was_skipped = True
        self._memories = []

    def evaluate(self, passes: "TrainerHooks") -> Tensor | None:
        """Compute the gradients of the window at the current weights. Return its loss to an optimizer that reads it."""
        run, state, stepper = passes.run, passes.state, passes.run.stepper
        if not self._memories:
            raise ConfigError("there is no batch to evaluate again: a closure works only inside the Trainer's step.")
        with torch.enable_grad(), self._stash_side_effects(run, state):
            passes.optimizer_zero_grad()
            stepper.end()
            losses, sizes = [], []
            for memory in self._memories:
                self._restore_memory(run, state, memory)
                passes._perform_forward_and_backward_passes(state.batch, memory.step)
                output = state.batch_output
                losses.append(output["loss"].detach())
                sizes.append(output["batch_size"] if output.get("num_items") is None else output["num_items"])
            stepper.finish()
            passes._clip_gradients()
            run.fire.after_train_batch()
            if stepper.guard.is_active and stepper.scaler is None:
                stepper.guard.drop_nonfinite(stepper.parameters)
        return self._mean(stepper, losses, sizes) if self._returns_loss else None

    def _restore_memory(self, run: Run, state: State, memory: _Memory) -> None:
        state.restore_random(memory.rng, memory.generators)
        state.batch = _shallow(memory.batch)
        run.stepper.synchronises = memory.synchronises
        if memory.sizes is not None:
            run.data.source = KnownBatch(*memory.sizes)

    def _mean(self, stepper: Stepper, losses: list[Tensor], sizes: list[Count]) -> Tensor:
        """Return the loss of the window over all ranks, so that every rank decides alike."""
        total, count = torch.stack([loss * size for loss, size in zip(losses, sizes)]).sum(), sum(sizes)
        if num_data_ranks() > 1:
            sums = [start_sum_over_ranks(value, stepper.device) for value in (total, count)]
            total, count = torch.as_tensor(sums[0](), dtype=total.dtype, device=total.device), sums[1]()
        return total if stepper.window.is_sum or not count else total / count

    @contextmanager
    def _stash_side_effects(self, run: Run, state: State) -> Iterator[None]:
        """Hide everything that a pass leaves behind apart from gradients."""
        engine, stepper = run.algorithms_only, run.stepper
        assert engine is not None
        counts, scaler = stepper.window.state_dict(), None if stepper.scaler is None else _SecondScale(stepper.scaler)
        buffers = unwrap(state.model).buffers() if isinstance(state.model, nn.Module) else ()
        copies = [(buffer, buffer.detach().clone()) for buffer in buffers]
        with (
            state.preserve_random(),
            with_attributes(self, is_wanted=False),
            with_attributes(run, fire=engine.on, measures=Measures(train_items=run.measures.train_items)),  # never read
            with_attributes(run.data, "source"),
            with_attributes(stepper, "synchronises", "is_finished", scaler=scaler),
            with_attributes(state, *_STEP_FIELDS),
        ):
            try:
                yield
            finally:
                self._overflowed = scaler is not None and scaler.overflowed
                stepper.window.load_state_dict(counts)
                with torch.no_grad():
                    for buffer, values in copies:
                        buffer.copy_(values)

    def state_dict(self) -> StateDict:
        """Return the batches of an open window, so that a resumed run can evaluate it again."""
        is_open = self.stepper is not None and self.stepper.window.count > 0
        return {"memories": [vars(memory) for memory in self._memories] if is_open else []}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the batches of the open window."""
        self._memories = []
        for saved in state["memories"]:
            # A copy: tensors of a file may begin anywhere in memory, where sums are rounded differently.
            kept = {**saved, "batch": map_tensors(torch.clone, move_to_device(self._device, saved["batch"]))}
            kept["sizes"] = None if saved["sizes"] is None else tuple(saved["sizes"])
            kept["generators"] = {name: value.cpu() for name, value in saved["generators"].items()}
            self._memories.append(_Memory(**kept))


def merge_memories(saved: Sequence[Sequence[object]], rank: int) -> list[object]:
    """Return the remembered batches for another number of ranks: none, since those of an open window cannot be divided."""
    if any(saved):
        raise ResumeError(
            f"the checkpoint was taken inside an accumulation window whose batches {len(saved)} ranks evaluate again. Resume with as many, "
            "or from a checkpoint between two updates."
        )
    return []


class _SecondScale:
    """A gradient scaler for the repeated passes: the real one has unscaled this update's gradients already and would raise."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler
        self.overflowed = False

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the scale out; gradients that are not finite are dropped, so that the step has nothing to go by."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return
        torch._foreach_mul_(gradients, 1.0 / self.scaler.get_scale())
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.overflowed = not torch.isfinite(norm)  # the host waits here, as float16 makes it do once per step anyway
        if self.overflowed:
            for parameter in parameters:
                parameter.grad = None


def _shallow(batch: object) -> object:
    """Return a batch whose entries can be replaced without changing the one given."""
    return batch if isinstance(batch, Tensor | tuple) else copy.copy(batch)
