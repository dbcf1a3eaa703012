"""Trade time for memory: discard what a block computed and compute it again for backward (Chen et al., 2016).

The block's class becomes a generated subclass, so names, keys, deep copies and `isinstance` do not change. There are three modes:
`full` keeps only the block's inputs; `selective` also keeps what is expensive to compute, the results of matrix products,
convolutions and attention; `offload` keeps the inputs in host memory.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain.core.arguments import check_choice, check_count
from drivetrain.core.errors import ConfigError
from drivetrain.module.blocks import repeated_blocks, select_modules
from drivetrain.module.wrapping import GeneratedClass, add_mixin, user_class

Mode = Literal["full", "selective", "offload"]
# Keys and values remembered for generation. A second pass would append to them again, and training has no use for them.
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


class Checkpointed(GeneratedClass):
    """Makes a block recompute its forward pass in backward."""

    _checkpoint_mode: str
    _checkpoint_reentrant: bool
    _cache_positions: tuple[int, ...]

    def forward(self, *args: object, **kwargs: Any) -> object:
        """Run the block's own forward, keeping little of it if gradients are recorded."""
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if norms := tracking_norms(self):  # type: ignore[arg-type]
            run = _FrozenStatsOnRecompute(run, norms)
        kwargs |= {name: None for name in CACHE_ARGUMENTS if kwargs.get(name) is not None}
        args = tuple(None if index in self._cache_positions else value for index, value in enumerate(args))
        inputs = (*args, *kwargs.values())
        # Where no input needs a gradient, the older mechanism would not compute those of the parameters either.
        if self._checkpoint_reentrant and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            return _reentrant(run, args, kwargs)
        if self._checkpoint_mode == "selective":
            return checkpoint(run, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)
        if self._checkpoint_mode == "offload":
            is_on_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
            with torch.autograd.graph.save_on_cpu(pin_memory=is_on_cuda):
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _reentrant(run: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Run torch's older mechanism, which only knows tensors that are single arguments and single results."""
    forms: list[TreeSpec] = []

    def flat(*inputs: object) -> tuple[object, ...]:
        leaves, form = tree_flatten(run(*inputs[: len(args)], **dict(zip(kwargs, inputs[len(args) :]))))
        forms.append(form)
        return tuple(leaves)

    return tree_unflatten(checkpoint(flat, *args, *kwargs.values(), use_reentrant=True), forms[0])


def tracking_norms(module: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    """Return the norms inside a module that update running statistics in training."""
    norms = [child for child in module.modules() if isinstance(child, nn.modules.batchnorm._NormBase)]
    return [norm for norm in norms if norm.training and norm.track_running_stats and norm.running_mean is not None]


class _FrozenStatsOnRecompute:
    """Runs a block whose batch norms update their running statistics in the first pass only, not when it is computed again."""

    def __init__(self, run: Callable[..., object], norms: list[nn.modules.batchnorm._NormBase]):
        self.run, self.norms, self.is_first = run, norms, True

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.is_first:
            self.is_first = False
            return self.run(*args, **kwargs)
        kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in self.norms]
        for norm in self.norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            return self.run(*args, **kwargs)
        finally:
            for norm, momentum, count in kept:
                norm.momentum, norm.num_batches_tracked = momentum, count


def checkpoint_blocks(
    model: nn.Module,
    blocks: object = "auto",
    mode: Mode = "full",
    every: int = 1,
    max_modules: int | None = None,
    *,
    reentrant: bool = False,
) -> list[str]:
    """Checkpoint blocks of a model in place and return their names.

    `blocks` is "auto" for the repeated blocks, a class, a class name, a dotted name or pattern, or a list of these.
    `every=2` takes every second one; `max_modules` stops after so many. A second call with other settings replaces the
    first for the blocks it names. `reentrant` uses torch's older mechanism, in mode `full` only.
    """
    check_choice("mode", mode, get_args(Mode), owner="checkpoint_blocks")
    check_count("every", every, owner="checkpoint_blocks")
    if max_modules is not None:
        check_count("max_modules", max_modules, owner="checkpoint_blocks")
    if reentrant and mode != "full":
        raise ConfigError(f"checkpoint_blocks: reentrant checkpointing supports only mode 'full', not {mode!r}.")
    if isinstance(blocks, str) and blocks == "auto":
        found = repeated_blocks(model) or select_modules(model, "auto")
        found = [(name, module) for name, module in found if name]  # the model itself is not a block
    else:
        found = select_modules(model, blocks, where="checkpoint_blocks")
        # One recomputation inside another costs twice and saves nothing.
        inside = {child for _, module in found for child in module.modules() if child is not module}
        found = [(name, module) for name, module in found if module not in inside]
    chosen = found[::every][:max_modules]
    for _, block in chosen:
        # The places of remembered keys and values among the positional arguments.
        names = list(inspect.signature(user_class(block).forward).parameters)[1:]
        caches = tuple(index for index, name in enumerate(names) if name in CACHE_ARGUMENTS)
        add_mixin(block, Checkpointed, _checkpoint_mode=mode, _checkpoint_reentrant=reentrant, _cache_positions=caches)
    return [name for name, _ in chosen]


def _selective_contexts() -> "tuple[AbstractContextManager[object], AbstractContextManager[object]]":
    first, second = create_selective_checkpoint_contexts(keep_expensive)
    second.__class__ = _recomputing(type(second))  # type: ignore[arg-type]
    return first, second


@cache
def _recomputing(mode: type) -> type:
    """Return torch's mode of a recomputation, in which operations that are not kept may come in other numbers (casts, gathers)."""

    class Recomputing(mode):
        def __torch_dispatch__(
            self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
        ) -> object:
            if not _may_be_kept(_name_of(func)):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Recomputing


def _name_of(operation: object) -> str:
    return operation.name().partition(".")[0] if hasattr(operation, "name") else ""


def _may_be_kept(name: str) -> bool:
    return name in _EXPENSIVE or name in _BATCHED or "scaled_dot_product" in name or "flex_attention" in name


def keep_expensive(ctx: object, operation: object, *args: Any, **kwargs: object) -> object:
    """Keep the results of matrix products, convolutions and attention, and recompute element-wise operations."""
    name = _name_of(operation)
    if name not in _BATCHED and _may_be_kept(name):
        return CheckpointPolicy.MUST_SAVE
    if name in _BATCHED and len(args) >= 2:
        first, second = args[-2:] if name == "aten::baddbmm" else args[:2]
        # Attention scores (T x T from T x D) are larger than what they are made of; expert and value products are not.
        if first.shape[-2] * second.shape[-1] <= first[0].numel() + second[0].numel():
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_EXPENSIVE = frozenset(
    "aten::mm aten::addmm aten::convolution aten::_grouped_mm aten::_scaled_mm drivetrain::scaled_product".split()
)
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
