"""Switches that make most runs faster and change nothing else, set together and listed.

TF32 keeps float32's range and rounds the factors of matrix products to 10 bits; cuDNN measures convolution algorithms once; fused
optimizer kernels update all parameters in one launch; convolutions prefer channels-last memory. What belongs to the process is
restored when the run ends.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from drivetrain.algorithms.channels_last import apply_channels_last
from drivetrain.algorithms.surgery import model_of, torch_optimizers, warn_no_effect
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.module.convolutions import is_worth_channels_last
from drivetrain.module.optimizers import use_fused_kernels


class FastDefaults(Algorithm):
    """Sets what is fast at the start and restores the process at the end; `changes` lists what was done.

    `channels_last="auto"` acts where convolution kernels hold most of the parameters. `fused_loss` computes a cross-entropy over the
    last linear layer in chunks, so that the logits of a large vocabulary never exist at once; training outputs are then the inputs of
    that layer. In deterministic mode TF32 and cuDNN's measuring stay off.
    """

    allow_multiple = False
    events = frozenset({Event.INIT, Event.FIT_END})
    writes = ("model", "optimizers", "settings")
    after = ("#surgery", "#optimizer")

    def __init__(
        self,
        tf32: bool = True,
        cudnn_benchmark: bool = True,
        fused_optimizer: bool = True,
        channels_last: Literal["auto"] | bool = "auto",
        fused_loss: bool = False,
    ):
        if channels_last not in ("auto", True, False):
            raise ConfigError(f"FastDefaults(channels_last={channels_last!r}): expected 'auto', True or False.")
        self.tf32, self.cudnn_benchmark, self.fused_optimizer = tf32, cudnn_benchmark, fused_optimizer
        self.channels_last, self.fused_loss = channels_last, fused_loss
        if fused_loss:
            self.conflicts = {"#soft_targets": "a fused loss has no logits for soft targets. Remove fused_loss"}
        self.changes: list[str] = []
        self._undo: list[Callable[[], None]] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_END:
            return self.close(state, logger)
        self.changes = []
        if not torch.are_deterministic_algorithms_enabled():
            self._set_process()
        for optimizer in torch_optimizers(state) if self.fused_optimizer else []:
            if use_fused_kernels(optimizer):
                self.changes.append(f"fused kernels for {type(optimizer).__name__}")
        model = model_of(state, str(self))
        if self.channels_last is True or (self.channels_last == "auto" and is_worth_channels_last(model)):
            apply_channels_last(model)
            self.changes.append("channels-last memory for convolutions")
        if self.fused_loss:
            self._fuse_loss(state, model)
        logger.log_hyperparameters({"fast_defaults/changes": "; ".join(self.changes) or "none"})
        return None

    def _set_process(self) -> None:
        precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
        if self.tf32 and precision == "highest":
            torch.set_float32_matmul_precision("high")
            self._undo.append(lambda: torch.set_float32_matmul_precision(precision))
            self.changes.append("matrix products in TF32 where the device has it")
        if self.cudnn_benchmark and not benchmark:
            torch.backends.cudnn.benchmark = True
            self._undo.append(lambda: setattr(torch.backends.cudnn, "benchmark", benchmark))
            self.changes.append("cuDNN measures convolution algorithms")

    def _fuse_loss(self, state: State, model: nn.Module) -> None:
        head = next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None)
        fits = isinstance(state.loss_fn, nn.CrossEntropyLoss) and state.loss_fn.label_smoothing == 0
        if head is None or not fits or not hasattr(nn.functional, "linear_cross_entropy"):
            warn_no_effect(
                "FastDefaults(fused_loss=True) needs a model that ends in a linear layer, nn.CrossEntropyLoss without label "
                "smoothing, and a torch with linear_cross_entropy."
            )
            return
        state.loss_fn = FusedCrossEntropy(state.loss_fn, head)
        head.forward = partial(_pass_through, head)  # type: ignore[method-assign]
        self.changes.append("cross-entropy fused with the last linear layer")

    def close(self, state: State, logger: Logger) -> None:
        """Restore the process, also when a run broke off."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []


class FusedCrossEntropy(nn.Module):
    """Cross-entropy of a linear layer's outputs, given its inputs while training and its outputs otherwise."""

    def __init__(self, loss: nn.CrossEntropyLoss, head: nn.Linear):
        super().__init__()
        self.loss = loss
        self.__dict__["head"] = head  # not registered: its parameters are the model's

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        head, loss = self.__dict__["head"], self.loss
        if not head.training:
            return loss(inputs, target)
        if inputs.ndim > 2:  # nn.CrossEntropyLoss has classes in dimension 1, a linear layer has them last
            raise ConfigError(
                f"FastDefaults(fused_loss=True): the last layer's input has shape {tuple(inputs.shape)}; expected (rows, features). "
                "Flatten before the last layer."
            )
        return nn.functional.linear_cross_entropy(
            inputs, head.weight, target, linear_bias=head.bias, weight=loss.weight, reduction=loss.reduction,
            ignore_index=loss.ignore_index, options=nn.LinearCrossEntropyOptions(),
        )  # fmt: skip


def _pass_through(head: nn.Linear, x: Tensor) -> Tensor:
    """Replace the forward of a head whose product with the weight is part of the loss while training."""
    return x if head.training else nn.functional.linear(x, head.weight, head.bias)
