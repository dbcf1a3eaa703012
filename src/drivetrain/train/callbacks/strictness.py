"""What `Trainer(strict=True)` adds: our warnings are errors, steps must not wait for the device, every parameter gets a gradient."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.train.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer

WARM_UP = 3  # the first steps allocate and initialise, which waits


@contextmanager
def warnings_as_errors(is_strict: bool) -> Iterator[None]:
    """Raise Drivetrain's own warnings inside the block, if strict; those of torch and others stay warnings."""
    if not is_strict:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", DrivetrainWarning)
        yield


class StrictSteps(TrainerCallback):
    """Makes a synchronisation inside a step an error, and a trainable parameter without a gradient in the first window."""

    def __init__(self) -> None:
        self._steps_seen = 0
        self._first_window = True

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Begin again with every run."""
        self._steps_seen, self._first_window = 0, True

    def batch_start(self, state: Any, logger: Any) -> None:
        """From here to the end of the batch the host must not wait; float16's scaler is the known exception."""
        self._steps_seen += 1
        if state.device.type == "cuda" and state.scaler is None and self._steps_seen > WARM_UP:
            torch.cuda.set_sync_debug_mode("error")

    def after_train_batch(self, state: Any, logger: Any) -> None:
        """Look at the first complete gradients."""
        if not self._first_window or not isinstance(state.model, nn.Module):
            return
        self._first_window = False
        missing = [name for name, p in state.model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
            raise ConfigError(
                f"strict: {len(missing)} trainable parameters got no gradient in the first window: {shown}. Does the loss depend on "
                "them? Set requires_grad=False for those it should not reach."
            )

    def batch_end(self, state: Any, logger: Any) -> None:
        """Allow waiting again between steps, where evaluation and saving happen."""
        if state.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: "Trainer", exception: BaseException | None = None, **kwargs: Any) -> None:
        """Leave the process as it was."""
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
