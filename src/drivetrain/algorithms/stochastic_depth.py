"""Stochastic depth (Huang et al., 2016, arXiv 1603.09382): skip residual blocks at random in training, later ones more often.

A block changes its class to a generated subclass, so parameters, names and state-dict keys stay as they are. Which blocks are
skipped is drawn once per forward pass of the whole model, on the host, for all blocks at once: a skipped block is truly not run,
no step waits for the device, and a recomputation in backward meets the same choice. Where the whole model is compiled, blocks
always run and the choice is a factor, so that nothing is compiled twice.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, model_of, warn_no_effect
from drivetrain.algorithms.utils.run import progress_to
from drivetrain.context.state import State
from drivetrain.core import ConfigError, ConfigTypeError, Event, Logger, Time, TimeUnit, ensure_time
from drivetrain.core.arguments import check_choice, check_fractions
from drivetrain.core.types import Settings, StateDict
from drivetrain.module.blocks import repeated_blocks, select_modules
from drivetrain.module.probing import keeps_shape, restore_buffers_after
from drivetrain.module.surgery import check_unwrapped
from drivetrain.module.wrapping import GeneratedClass, subclass_of, user_class
from drivetrain.runtime.seeds import capture_rng, derive_seed, restore_rng

_BOTTLENECK_PARTS = ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "relu", "downsample")


class Skippable(GeneratedClass):
    """What a block that can be skipped knows about that."""

    drop_rate: float
    """The probability with which it is skipped now."""
    is_dropped: bool
    """Whether it is skipped in the present forward pass."""
    drops_samples: bool
    """Whether each sample has its own choice (method `sample`)."""
    keep: Tensor
    """`1 - drop_rate` as a tensor, so that a compiled model does not depend on the number."""
    training: bool

    def is_skipped(self) -> bool:
        """Return whether the block need not run at all in this pass."""
        return self.training and self.is_dropped and not self.drops_samples and not torch.compiler.is_compiling()

    def factor(self, x: Tensor) -> Tensor | None:
        """Return by what the block's change is multiplied, or None for 1; shape () or (batch, 1, ...)."""
        if not self.training:
            return self.keep.to(x.dtype)
        if not self.drops_samples and not torch.compiler.is_compiling():
            return None
        shape = (x.shape[0], *(1 for _ in x.shape[1:])) if self.drops_samples else ()
        return torch.floor(self.keep + torch.rand(shape, device=x.device)).to(x.dtype)


class BlockStochasticModule(Skippable):
    """Any block: dropped, it returns its input; in evaluation its change of the input is scaled down.

    Of a tuple the first entry is the block's result. If the others are None, a dropped block returns them without running; otherwise
    it runs for their sake.
    """

    returns: Literal["unknown", "tensor", "nones", "more"] = "unknown"
    """What it returns: a tensor, or a tuple with only None after its result, or with more."""
    others: tuple[None, ...]
    """What follows the result in a tuple of the kind `nones`."""

    def __call__(self, x: Tensor, *args: object, **kwargs: object) -> object:
        # Outside `forward`, so that a block that is compiled by itself is skipped without compiling the choice.
        is_skipped = self.is_skipped()
        if is_skipped and self.returns == "unknown":  # a run without a trace, since a resumed run learns it once more
            numbers = capture_rng(x.device)
            with torch.no_grad(), restore_buffers_after(self):  # type: ignore[arg-type]
                self._learn(super().__call__(x, *args, **kwargs))  # type: ignore[misc]
            restore_rng(numbers)
        if is_skipped and self.returns != "more":
            return x if self.returns == "tensor" else (x, *self.others)
        out = super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        if self.returns == "unknown" and not torch.compiler.is_compiling():
            self._learn(out)
        first = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(first, Tensor) or first.shape != x.shape:
            given = f"shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
            raise ConfigTypeError(
                f"StochasticDepth cannot skip {user_class(self).__name__}: it takes shape {tuple(x.shape)} and returns "  # type: ignore[arg-type]
                f"{given}. Blocks must return a tensor like their input, or a tuple that begins with one; name another class with "
                "target_layer_name."
            )
        factor = self.factor(x)
        if is_skipped:
            first = x
        elif factor is not None:
            first = torch.addcmul(x, factor, first - x)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    def _learn(self, out: object) -> None:
        others = out[1:] if isinstance(out, tuple) else ()
        has_more = any(other is not None for other in others)
        self.returns = "more" if has_more else "nones" if isinstance(out, tuple) else "tensor"
        self.others = () if has_more else others


class StochasticBottleneck(Skippable):
    """The bottleneck of a ResNet: only its branch is skipped, so that a block that changes the shape can be skipped too."""

    def forward(self, x: Tensor) -> Tensor:
        part: Any = self
        identity = x if part.downsample is None else part.downsample(x)
        if self.is_skipped():
            return x if part.downsample is None else part.relu(identity)
        out = part.relu(part.bn1(part.conv1(x)))
        out = part.relu(part.bn2(part.conv2(out)))
        out = part.bn3(part.conv3(out))
        factor = self.factor(x)
        return part.relu(out + identity if factor is None else torch.addcmul(identity, factor, out))


class DrawChoices:
    """Draws, before each training pass of a model, which of its blocks to skip."""

    def __init__(self, blocks: list[Skippable], generator: torch.Generator | None):
        self.blocks, self.generator = blocks, generator

    def __call__(self, module: nn.Module, args: object) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        for block, number in zip(self.blocks, torch.rand(len(self.blocks), generator=self.generator).tolist()):
            block.is_dropped = number < block.drop_rate

    def __deepcopy__(self, memo: dict[int, object]) -> "DrawChoices":
        generator = None if self.generator is None else self.generator.clone_state()
        return DrawChoices(copy.deepcopy(self.blocks, memo), generator)


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str | type[nn.Module] = "auto",
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
    optimizers: Optimizers = None,
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Let blocks of a model be skipped in training; block i of n with `drop_rate * i / n`, or all with `drop_rate`.

    `target_layer_name` is "auto" for the repeated blocks that keep the shape of their input, a class, a class name, or
    "ResNetBottleneck". `generator` (on the host) draws which blocks to skip; per-sample choices come from the device's own.
    """
    check_stochastic_depth("apply_stochastic_depth", stochastic_method, drop_rate, drop_distribution)
    check_unwrapped(model, "apply_stochastic_depth")
    blocks = find_blocks_to_skip(model, target_layer_name)
    if not blocks:
        shown = target_layer_name.__name__ if isinstance(target_layer_name, type) else target_layer_name
        shown = "repeated blocks that keep the shape of their input" if shown == "auto" else shown
        warn_no_effect(f"StochasticDepth found no {shown} in {type(model).__name__}, so no block is skipped.")
        return
    if drop_rate == 0:
        warn_no_effect("StochasticDepth(drop_rate=0) skips nothing.")
    for block in blocks:
        if isinstance(block, Skippable):
            continue
        mixin = StochasticBottleneck if _is_bottleneck(block) else BlockStochasticModule
        block.__class__ = subclass_of(type(block), mixin)
        device = next((tensor.device for tensor in block.parameters()), None)
        block.register_buffer("keep", torch.ones((), device=device), persistent=False)
        block.drops_samples = stochastic_method == "sample"
        block.is_dropped = False
    set_drop_rates(blocks, drop_rate, drop_distribution)
    has_draws = any(isinstance(hook, DrawChoices) for hook in model._forward_pre_hooks.values())
    if stochastic_method == "block" and not has_draws:
        model.register_forward_pre_hook(DrawChoices(blocks, generator))


def set_drop_rates(blocks: list[Skippable], drop_rate: float, distribution: str) -> None:
    """Set how often each block is skipped from now on."""
    for index, block in enumerate(blocks, start=1):
        block.drop_rate = drop_rate * index / len(blocks) if distribution == "linear" else drop_rate
        block.keep.fill_(1 - block.drop_rate)


def stochastic_blocks(model: nn.Module) -> list[Skippable]:
    """Return the blocks of a model that can be skipped."""
    return [module for module in model.modules() if isinstance(module, Skippable)]


def find_blocks_to_skip(model: nn.Module, target: str | type[nn.Module]) -> list[Any]:
    """Return the blocks that `target` names, none where a known kind does not occur; a name of nothing is an error."""
    if target == "ResNetBottleneck":
        return [module for module in model.modules() if _is_bottleneck(module)]
    if isinstance(target, type):
        return [module for module in model.modules() if module is not model and isinstance(module, target)]
    if target == "auto":
        candidates = [module for _, module in repeated_blocks(model)]
        return [block for block in candidates if _is_bottleneck(block) or keeps_shape(block) is not False]
    return [module for _, module in select_modules(model, target, where="StochasticDepth(target_layer_name=)")]


def _is_bottleneck(module: nn.Module) -> bool:
    return "Bottleneck" in user_class(module).__name__ and all(hasattr(module, part) for part in _BOTTLENECK_PARTS)


def check_stochastic_depth(who: str, method: str, drop_rate: float, distribution: str) -> None:
    """Reject impossible settings."""
    check_choice("stochastic_method", method, ("block", "sample"), owner=who)
    check_fractions(who, drop_rate=drop_rate)
    check_choice("drop_distribution", distribution, ("linear", "uniform"), owner=who)


class StochasticDepth(ModelSurgery):
    """Skips residual blocks at random; with a warm-up, more and more often.

    All processes skip the same blocks, so that sharded and synchronised models stay in step.
    """

    find_unused_parameters = True
    counts = {"stochastic_depth/num_stochastic_layers": Skippable}  # type: ignore[dict-item]  # a part of generated modules

    def __init__(
        self,
        target_layer_name: str | type[nn.Module] = "auto",
        stochastic_method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: float | str | Time = 0.0,
    ):
        check_stochastic_depth("StochasticDepth", stochastic_method, drop_rate, drop_distribution)
        self.target_layer_name, self.stochastic_method = target_layer_name, stochastic_method
        self.drop_rate, self.drop_distribution = drop_rate, drop_distribution
        self.drop_warmup = ensure_time(drop_warmup, TimeUnit.DURATION)
        if self.drop_warmup.unit is TimeUnit.DURATION:
            check_fractions("StochasticDepth", drop_warmup=self.drop_warmup.value)
        self._warms_up = self.drop_warmup.value > 0
        if self._warms_up and stochastic_method == "sample":
            raise ConfigError(
                "StochasticDepth: drop_warmup works with stochastic_method='block' only; 'sample' was given."
            )
        if self._warms_up:
            self.events = frozenset({Event.INIT, Event.BATCH_START})
        self._generator = torch.Generator()
        self._blocks: list[Skippable] = []
        self._warmed_up = 0.0 if self._warms_up else 1.0  # the share of the rate that is in force

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_START:
            self._warmed_up = progress_to(self.drop_warmup, state, str(self))
        else:
            # Without the rank: everybody draws the same. Among the state's, it is set back with them for a repeated pass.
            self._generator.manual_seed(derive_seed(state.seed, type(self).__name__))
            state.generators[type(self).__name__] = self._generator
            super().apply(event, state, logger)
            self._blocks = stochastic_blocks(model_of(state, str(self)))
        self._set_rates()

    def operate(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        method, rate, distribution = self.stochastic_method, self.drop_rate, self.drop_distribution
        apply_stochastic_depth(model, self.target_layer_name, method, rate, distribution, generator=self._generator)

    def _set_rates(self) -> None:
        set_drop_rates(self._blocks, self.drop_rate * self._warmed_up, self.drop_distribution)

    def config(self) -> Settings:
        """Return the arguments; a class by its name, which a file can hold."""
        target = self.target_layer_name
        return {**super().config(), "target_layer_name": target.__name__ if isinstance(target, type) else target}

    def state_dict(self) -> StateDict:
        # Also here, because another number of ranks gives the state's generators a seed for each rank.
        return {"generator": self._generator.get_state(), "warmed_up": self._warmed_up}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        if self._warms_up:
            self._warmed_up = state["warmed_up"]
            self._set_rates()  # an evaluation may come before the next batch
