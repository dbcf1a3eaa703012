"""Where a batch failed: which batch, which layer or loss function, and its inputs.

Everything is read from the traceback after the error, so a run without errors pays nothing. An error that torch raised in a layer
or in the loss of the first batch becomes a `BatchError`, which names what to check. Any other error is raised unchanged, with a
note.
"""

import errno
import inspect
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.context.state import State
from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import BatchError, BatchOutputError, NonFiniteError, first_line, warn
from drivetrain.core.plain import plain_text
from drivetrain.core.time import Clock
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.finite import NONFINITE, REJECTED
from drivetrain.module.stepper import Stepper
from drivetrain.runtime.device import waiting_allowed
from drivetrain.runtime.ranks import is_distributed
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train.batches import map_tensors
from drivetrain.train.tracking import MetricSet

if TYPE_CHECKING:
    from drivetrain.train.agreement import Agreement
    from drivetrain.train.checkpoints import CheckpointSchedule
    from drivetrain.train.logbook import Logbook
    from drivetrain.train.run import Run


_LOSS_HOOKS = ("calculate_train_batch_loss", "calculate_eval_batch_loss", "calculate_predict_batch")
_PHASES = {"_run_train_epoch": "train", "_run_eval_epoch": "evaluation", "run_prediction": "prediction"}
_DATA = ("torch.utils.data", "drivetrain.data", "drivetrain.train.loaders")
_DATA_NAMES = {"train": "train_dataset", "evaluation": "eval_dataset", "prediction": "dataset"}
_BUILT_IN = (RuntimeError, ValueError, IndexError, TypeError, KeyError, NotImplementedError)
_SHARED_MEMORY = (
    "Worker processes send batches through /dev/shm, which is often small in a container and may be full. Give the container more "
    "(docker run --shm-size=8g, or --ipc=host), or use fewer workers: train_dataloader_kwargs={'num_workers': 0} uses none."
)
_ADVICE = {
    "through the graph a second time": "A tensor that is kept from one batch to the next, such as a hidden state, still has its graph: "
    "detach() it.",
    "more than 1 value per channel": "A batch norm cannot train on one sample: train_dataloader_kwargs={'drop_last': True}, or another "
    "batch size.",
    "equal size": "Tensors that are stacked need one shape: pad or crop them; the samples of a batch in a collate_fn.",
    "default_collate: batch must contain": "The default collate_fn takes tensors, arrays, numbers, and dicts or lists of them: convert the "
    "samples in the dataset, or pass a collate_fn.",
    "shared memory object": _SHARED_MEMORY,
    "shared memory(shm)": _SHARED_MEMORY,
    "out of shared memory": _SHARED_MEMORY,  # not just "shared memory": a GPU has its own
    "must be Tensor, not list": "A list of numbers becomes a list of tensors, one for each position: make it a tensor in the dataset. One "
    "of Hugging Face datasets does it after dataset.with_format('torch').",
    "requires closure": "optimizer.needs_closure = True makes the Trainer pass one to step(). It computes the gradients again.",
    "does not have a grad_fn": "Evaluations and predictions compute no gradients: a hook that needs them writes `with "
    "torch.enable_grad():`. If the optimizer differentiates gradients, override backward_step(self, loss) with "
    "loss.backward(create_graph=True).",
}
"""What to do about mistakes that torch describes in these words."""


def explain_failure(error: BaseException, model: object, loss_func: object, batch_index: int) -> BaseException:
    """Return the error to raise: the same one with a note, or a `BatchError` if torch could not process the first batch."""
    if not isinstance(error, Exception) or isinstance(error, BatchError):
        return error
    batch: object = None
    layer: nn.Module | None = None  # the innermost that was running
    tensors: list[Tensor] = []  # that it was called with
    phase, in_loss, in_data, by_torch, starts_workers = "", False, False, False, False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        function, module, owner = frame.f_code.co_name, frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        phase = _PHASES.get(function, phase)
        if function in _LOSS_HOOKS:
            batch = frame.f_locals.get("batch")
        in_data = in_data or module.startswith(_DATA)
        starts_workers = starts_workers or module.startswith("multiprocessing.")
        if frame.f_code is inspect.unwrap(MetricSet.update).__code__:  # inside no_grad
            outputs, targets = (_shown(frame.f_locals.get(name)) for name in ("outputs", "targets"))
            error.add_note(
                f"The metric {frame.f_locals.get('name')!r} was called with outputs {outputs} and targets {targets}."
            )
        in_loss = in_loss or frame.f_code is getattr(loss_func, "__code__", None)
        if isinstance(owner, nn.Module) and function == "forward":
            in_loss, layer = in_loss or owner is loss_func, owner
            arguments = [frame.f_locals.get(argument) for argument in inspect.getargvalues(frame).args]
            tensors = [value for value in arguments if isinstance(value, Tensor)]
        if not module.startswith("drivetrain."):  # ours may be between a layer and its operation
            by_torch = module.startswith("torch.")
    in_data = in_data and batch is None
    advice = "".join(f" {advice}" for words, advice in _ADVICE.items() if words in plain_text(error))
    if starts_workers and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        advice += f" {_SHARED_MEMORY}"
    if not phase or (batch is None and not in_data):
        if advice:
            error.add_note(advice.strip())
        return error
    data, number = _DATA_NAMES[phase], f"batch {batch_index + 1}" if phase == "train" else "a batch"
    number = number if batch_index else "the first batch"
    if in_data:
        text = f"Reading {number} for {phase} failed: look at {data} and its collate_fn."
    else:
        where = f" in the loss function ({_name(loss_func)})" if in_loss else _layer_name(layer, model)
        called = f", called with {', '.join(map(_shown, tensors))}." if tensors else "."
        text = (
            f"{data}: {number} for {phase} ({_shown(batch)}) failed{where}{called}{_about_input(layer, tensors, error)}"
        )
    text += advice
    if loss_func is None and isinstance(batch, list | tuple) and layer is None and isinstance(error, TypeError):
        text += " Without a loss_func the model gets the whole batch and returns its loss. Pass Trainer(model, loss_func=...)."
        if phase == "evaluation":
            text = f"{text[:-1]}, or override calculate_eval_batch_loss like calculate_train_batch_loss."
    if "device-side assert" in plain_text(error):
        text += (
            " A CUDA kernel found a wrong value, often a label or an index out of range, and the layer named may be a later one. "
            "Run the same batch with Trainer(device='cpu') to see it."
        )
    if batch_index == 0 and by_torch and type(error) in _BUILT_IN and not in_data:
        return BatchError(f"{text} {type(error).__name__}: {first_line(error)}")
    error.add_note(text)
    return error


def _about_input(layer: nn.Module | None, tensors: Sequence[Tensor], error: Exception) -> str:
    """Return what is wrong with the indices or the dtype that a layer was called with, after a space."""
    weight = None if layer is None else next(layer.parameters(recurse=False), None)
    if weight is None or not tensors:
        return ""
    first = tensors[0]
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if not isinstance(error, IndexError) or not first.is_cpu or not first.numel():
            return ""
        return f" Its {len(weight)} rows have the indices 0 to {len(weight) - 1}, and those given go from {first.min()} to {first.max()}."
    if first.dtype != weight.dtype == torch.float32 and "type" in plain_text(error):
        return " Its weights are float32: convert the input with .float(), best in the dataset."
    return ""


def _layer_name(layer: nn.Module | None, model: object) -> str:
    if layer is None:
        return ""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    path = next((name for name, module in modules if module is layer), None)
    where = f"layer {path!r}" if path else "the model" if layer is model else "a layer"
    return f" in {where} ({type(layer).__name__ if list(layer.children()) else repr(layer)})"


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shown(value: object, depth: int = 0) -> str:
    """Return types and shapes of a batch, such as `(float32[8, 6], int64[8])`."""
    if isinstance(value, Tensor):
        return f"{_dtype(value)}{list(value.shape)}"
    if depth < 2 and isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(item, depth + 1)}" for key, item in list(value.items())[:8]) + "}"
    if depth < 2 and isinstance(value, list | tuple):
        return "(" + ", ".join(_shown(item, depth + 1) for item in value[:8]) + ")"
    return type(value).__name__


def check_loss_inputs(loss_func: object, outputs: object, targets: object) -> None:
    """Check the first batch before a loss of torch receives it: outputs must be a tensor, and labels must be valid classes.

    Labels are read back to the host, once. On a GPU a label out of range would end the process' use of the device.
    """
    name = _name(loss_func)
    if getattr(nn, name, None) is not type(loss_func) and getattr(nn.functional, name, nn) is not loss_func:
        return
    if not isinstance(outputs, Tensor):
        entries = f" with the entries {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
        entry = next(iter(outputs), 0) if isinstance(outputs, Mapping) else 0
        raise BatchOutputError(
            f"the model returned a {type(outputs).__name__}{entries}, and loss_func ({name}) takes a tensor. Pass a "
            f"loss_func that picks its entry, such as lambda outputs, targets: loss(outputs[{entry!r}], targets), or override "
            "calculate_train_batch_loss."
        )
    takes_logits = name in ("CrossEntropyLoss", "cross_entropy")
    if type(targets) is not Tensor or type(outputs) is not Tensor or not outputs.dim():
        return
    if takes_logits and outputs.dim() > 1 < outputs.shape[1] and outputs.is_floating_point():
        rows = outputs[:16].detach().float()
        if bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < 0.01).all()):
            warn(f"the outputs are probabilities, and {name} takes logits: remove the softmax at the end of the model.")
    if (takes_logits or name in ("NLLLoss", "nll_loss")) and (problem := _label_problem(loss_func, outputs, targets)):
        raise BatchError(f"the labels of the first batch ({_shown(targets)}) do not fit {name}: {problem}")


def _label_problem(loss_func: object, outputs: Tensor, targets: Tensor) -> str:
    """Return what is wrong with labels and what to do, or nothing where they are classes, or torch explains it well."""
    form, dims = _shown(outputs), outputs.dim()
    classes = outputs.shape[1] if dims > 1 else outputs.shape[0]
    if targets.dim() == dims > 1 and targets.shape[1] == 1 < classes:
        return "they have a dimension too many, expected one class for each sample. Use targets.squeeze(1)."
    if targets.shape == outputs.shape and not targets.is_floating_point():
        return "they look like one-hot vectors of whole numbers. Use targets.argmax(1), or targets.float() for probabilities."
    if targets.dim() != dims - 1 or targets.is_complex():
        return ""
    if targets.dtype not in (torch.int64, torch.uint8):
        return f"they are {_dtype(targets)}, expected whole numbers of type int64, one class for each sample. Use targets.long()."
    if dims > 2 and outputs.shape[:-1] == targets.shape != (*outputs.shape[:1], *outputs.shape[2:]):
        return (
            f"the outputs {form} have their classes last, expected (batch, classes, ...). Use outputs.flatten(0, -2) and "
            "targets.flatten(), or outputs.movedim(-1, 1), in a loss_func of your own."
        )
    labels = targets.detach()[targets != getattr(loss_func, "ignore_index", -100)]
    if not labels.numel():
        return ""
    lowest, highest = (int(bound) for bound in torch.aminmax(labels.long()))
    if lowest >= 0 and highest < classes:
        return ""
    advice = "Renumber the labels" + f", or give the last layer {highest + 1} outputs" * (lowest >= 0)
    return (
        f"they are from {lowest} to {highest}, and the model's outputs ({form}) have {classes} classes, numbered 0 to {classes - 1}. "
        f"{advice}; if one label, such as -1 or 255, means 'no label', pass it to the loss as ignore_index."
    )


# ---------------------------------------------------------------------- updates that are left out
# A run goes on without them, stops, or returns to the last good state. The test and the counts are `drivetrain.module.finite`'s. A rollback
# restores weights, optimizer, schedules, scaler, algorithms and random numbers, while clock, data and history stay. So the batches between
# the last good state and the bad one are passed over, as large runs do by hand after a loss spike (Chowdhery et al., 2022, section 5.1).

_POSITION = frozenset(
    ["clock", "train_dataloader", "dataset_state", "history", "epoch_loss", "loggers", "gradients", "window_batches"]
    + ["custom_entries", "callbacks", "train_metrics", "eval_metrics", "max_duration"]
)
"""What a rollback does not change."""


class LastGoodState:
    """A copy in host memory of what an update changes, for a rollback.

    It is taken when a run begins, every so many updates, and with every checkpoint: so a resumed run returns to the same state.
    """

    def __init__(self, state: State, stepper: Stepper):
        self._session, self._stepper = weakref.ref(state), stepper  # the state may hold what holds this
        self._state: StateDict = {}
        self._rng: StateDict = {}
        self.step = 0  # the number of updates made when the copy was taken

    def _live(self) -> State:
        state = self._session()
        assert state is not None, "the State was deleted"
        return state

    def begin(self) -> None:
        """Take the first copy, when the run has its random states."""
        if not self._state:
            self.take()

    def at_boundary(self) -> None:
        """Take a copy if it is due."""
        clock = self._live().clock
        is_due = clock.step != self.step and clock.step % self._stepper.guard.policy.every == 0
        if is_due and self._stepper.window.count == 0:
            self.take()

    def take(self) -> None:
        """Copy the state. Every rank must call this."""
        state = self._live()
        copied = lambda t: t.detach().clone() if is_dtensor(t) else t.detach().to("cpu", copy=True)
        with with_attributes(state, _excluded=state._excluded | _POSITION):
            self._state = map_tensors(copied, state.state_dict())
        self._rng, self.step = capture_rng(), state.clock.step

    def restore(self) -> None:
        """Roll back to the copy, except for the position in the data."""
        state = self._live()
        with waiting_allowed(), with_attributes(state, _before_load=None):
            # An optimizer keeps the tensors it loads, so it is given a second copy.
            state.load_state_dict(map_tensors(torch.clone, self._state), strict=False)
        restore_rng(self._rng)


def prepare_recovery(
    run: "Run", state: State, plugins: Sequence[Any], logbook: "Logbook", report: Callable[[str], None]
) -> None:
    """Decide once whether and how updates are tested, and whether there is a state to roll back to."""
    stepper, guard = run.stepper, run.stepper.guard
    watches = [plugin for plugin in plugins if getattr(plugin, "rejects_batches", False)]
    returns_after_rejection = any(plugin.rolls_back for plugin in watches)
    rolls_back = guard.policy.action == "rollback" or returns_after_rejection
    run.good = LastGoodState(state, stepper) if rolls_back else None
    stepper.prepare(
        is_split=run.microbatch_size is not None,
        is_exchanged=is_distributed(),
        tests=guard.policy.action != "ignore" or bool(watches),
    )
    run.measures.tracker.leaves_out_nonfinite = guard.is_active
    for plugin in watches:
        plugin.guard = guard if guard.is_active else None
    assert run.checkpoints is not None
    run.checkpoints.good = run.good
    run.recovery = Recovery(
        stepper, run.good, run.agreement, run.checkpoints, state.clock, logbook, report, returns_after_rejection
    )


@dataclass(eq=False)
class Recovery:
    """Records skipped updates, and stops or rolls back if the policy requires it. All ranks act at the same step."""

    _stepper: Stepper
    _good: LastGoodState | None
    _agreement: "Agreement"
    _checkpoints: "CheckpointSchedule"
    _clock: Clock
    _logbook: "Logbook"
    _report: Callable[[str], None]
    _returns_after_rejection: bool

    def act_on(self, verdict: int) -> None:
        """Act on the result of the guard."""
        guard, batch = self._stepper.guard, self._clock.batch + 1
        policy, is_nonfinite = guard.policy, bool(verdict & NONFINITE)
        if is_nonfinite:
            self._logbook.history.update_metric("nonfinite_update", batch)
        reason = "a gradient or the loss is not finite" if is_nonfinite else "the batch was rejected"
        what = f"batch {batch}: {reason}; the update was skipped ({guard.in_a_row} in a row, {guard.total} in all)."
        is_scaled = self._stepper.scaler is not None  # float16 looks for its scale by overflowing
        if policy.action == "stop" and is_nonfinite and not is_scaled:
            self._stop(f"{what} Use nonfinite='skip' to continue.")
        if guard.in_a_row >= policy.limit:
            self._stop(f"{what} The limit is {policy.limit} in a row.")
        returns = policy.action == "rollback" and is_nonfinite and not is_scaled
        if self._good is not None and (returns or (verdict & REJECTED and self._returns_after_rejection)):
            self._good.restore()
            self._report(f"{what} Rolled back to the state after update {self._good.step}.")
        elif not is_scaled:
            self._report(what)

    def _stop(self, message: str) -> None:
        last = self._checkpoints.last
        self._agreement.is_reached = True  # the verdict is the same on all ranks
        raise NonFiniteError(
            f"{message} Usual causes: a learning rate that is too high, float16 without scaling, an empty or masked-out batch, a log or "
            f"division of zero.{'' if last is None else f' The last checkpoint is {last}.'}"
        )
