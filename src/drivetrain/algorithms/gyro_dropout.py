"""Gyro dropout (Lee et al., MLSys 2022): train a fixed set of subnetworks instead of a new random one at every step.

`sigma` masks are drawn once; at any time `tau` of them are in use, each for its part of the batch, and stay in use for a while, so
that each subnetwork is trained long enough to become a member of an ensemble.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, warn_no_effect
from drivetrain.algorithms.utils.run import num_batches
from drivetrain.context.state import State
from drivetrain.core import ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts, check_fractions
from drivetrain.module.surgery import replace_module_classes
from drivetrain.runtime.seeds import derive_seed


class GyroDropoutLayer(nn.Module):
    """Dropout with masks out of a fixed set.

    Masks and choices are made when the first training batch shows their shape. They are buffers, as is the count of steps, so a
    resumed run continues with them. In your own loop each forward pass in training mode is a step. The Trainer counts batches
    instead (`GyroDropout` calls `choose`), because one batch may take several passes: microbatches, SAM's second pass, recomputation.
    """

    masks: Tensor | None
    """Shape (sigma, *features), of 0 and 1."""
    picks: Tensor | None
    """Shape (tau,): the masks in use."""
    steps: Tensor
    """How many training steps have passed."""

    def __init__(self, iters_per_epoch: int = 0, max_epoch: int = 0, p: float = 0.5, sigma: int = 256, tau: int = 16):
        super().__init__()
        check_gyro("GyroDropoutLayer", p, sigma, tau)
        self.p, self.sigma, self.tau = p, sigma, tau
        self.total_iterations = iters_per_epoch * max_epoch
        self._count = 0  # the host's copy of `steps`, so that no step waits for the device
        self.counts_passes = True
        """Whether each forward pass is a step; False if the loop marks the steps."""
        self.seed: int | None = None
        """What masks and choices depend on, the same on all ranks; None: on torch's generators."""
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("masks", None)
        self.register_buffer("picks", None)

    @property
    def interval(self) -> int:
        """For how many steps a choice of masks stays."""
        return max(1, int(self.total_iterations / self.sigma) * self.tau)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or isinstance(x, FakeTensor):
            return x  # a trial on fake tensors must leave no masks behind
        if self.p == 1:
            return x * 0
        if self.counts_passes or self.masks is None or self.picks is None:
            self._prepare(x)
        assert self.masks is not None and self.picks is not None
        if self.masks.shape[1:] != x.shape[1:]:
            raise ConfigError(
                f"GyroDropout keeps masks of shape {tuple(self.masks.shape[1:])}, but got features of shape {tuple(x.shape[1:])}. "
                "All inputs must have the same size."
            )
        rows = torch.arange(x.shape[0], device=x.device) * self.tau // x.shape[0]
        return x * self.masks[self.picks][rows].to(x.dtype) / (1 - self.p)

    @torch.compiler.disable
    def _prepare(self, x: Tensor) -> None:
        """Draw the masks when the first batch shows their shape; count the pass where that is the layer's own task."""
        if self.masks is None:
            drawn = torch.rand(self.sigma, *x.shape[1:], device=x.device, generator=self._generator("masks"))
            self.masks = (drawn >= self.p).to(torch.uint8)
        if self.counts_passes:
            self.choose(self._count)
        elif self.picks is None:  # a pass before the first step
            self._pick(0)

    def begin_run(self, total_iterations: int, seed: int) -> None:
        """Take the length of a run whose loop marks the steps, and a seed that all ranks share."""
        self.total_iterations, self.seed, self.counts_passes = total_iterations, seed, False

    def choose(self, step: int) -> None:
        """Begin a training step: choose other masks where the interval is over."""
        if self.picks is None or step % self.interval == 0:
            self._pick(step)
        self._count = step + 1
        self.steps += 1

    def _pick(self, step: int) -> None:
        device = self.steps.device
        self.picks = torch.randint(self.sigma, (self.tau,), device=device, generator=self._generator("picks", step))

    def _generator(self, use: str, *step: int) -> torch.Generator | None:
        if self.seed is None:
            return None
        return torch.Generator(self.steps.device).manual_seed(derive_seed(self.seed, use, *step))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        # A new layer has no masks yet, and torch would call the saved ones unexpected.
        for name in ("masks", "picks"):
            saved = state_dict.get(prefix + name)
            setattr(self, name, None if saved is None else torch.empty_like(saved, device=self.steps.device))
        if prefix + "steps" in state_dict:
            self._count = int(state_dict[prefix + "steps"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"


def check_gyro(who: str, p: float, sigma: int, tau: int) -> None:
    """Reject impossible settings."""
    check_fractions(who, p=p)
    check_counts(who, 1, sigma=sigma, tau=tau)


def apply_gyro_dropout(
    model: nn.Module,
    iters_per_epoch: int,
    max_epoch: int,
    p: float = 0.5,
    sigma: int = 256,
    tau: int = 16,
    optimizers: Optimizers = None,
) -> None:
    """Replace the dropout layers of a model; the run has `iters_per_epoch * max_epoch` steps."""
    check_gyro("apply_gyro_dropout", p, sigma, tau)
    make = lambda module, index: GyroDropoutLayer(iters_per_epoch, max_epoch, p, sigma, tau)
    replace_module_classes(model, {nn.Dropout: make}, optimizers)
    layers = [module for module in model.modules() if isinstance(module, GyroDropoutLayer)]
    for layer in layers:
        layer.total_iterations = iters_per_epoch * max_epoch
    if not layers:
        warn_no_effect(f"GyroDropout found no Dropout in {type(model).__name__}.")


class GyroDropout(ModelSurgery):
    """Replaces the dropout layers at INIT, gives them the length of the run when that is known, and each batch is a step of theirs."""

    events = frozenset({Event.INIT, Event.FIT_START, Event.BATCH_START})
    writes = ("model",)

    def __init__(self, p: float = 0.5, sigma: int = 256, tau: int = 16):
        check_gyro("GyroDropout", p, sigma, tau)
        self.p, self.sigma, self.tau = p, sigma, tau
        self._layers: list[GyroDropoutLayer] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            super().apply(event, state, logger)
        elif event is Event.BATCH_START:
            for layer in self._layers:
                layer.choose(state.clock.batch)
        else:
            self._begin(state)

    def _begin(self, state: State) -> None:
        total = num_batches(state)
        if total is None:
            raise ConfigError(
                f"GyroDropout spreads its masks over the run and cannot count the batches of max_duration={state.max_duration}: give it in "
                "batches, or in epochs of a loader with a length."
            )
        self._layers = [module for module in state.model.modules() if isinstance(module, GyroDropoutLayer)]
        for index, layer in enumerate(self._layers):
            layer.begin_run(total, derive_seed(state.seed, type(self).__name__, index))

    def operate(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        apply_gyro_dropout(model, 0, 0, self.p, self.sigma, self.tau, optimizers)
