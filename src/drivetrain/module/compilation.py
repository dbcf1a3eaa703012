"""Compile a model in place: `module.compile()` changes no name and no state-dict key.

Repeated blocks of one class share one compilation, so compiling block by block costs the time of one block, and leaves
the edges between blocks free for hooks of sharding. Compiling the whole model lets the compiler fuse across blocks.
"""

from typing import Any, Literal

from torch import nn

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.blocks import find_blocks, repeated_blocks

Scope = Literal["auto", "block", "model"]


def compile_module(model: nn.Module, scope: Scope = "auto", **torch_compile_kwargs: Any) -> nn.Module:
    """Compile a model in place and return it.

    `block` compiles each block that `find_blocks` finds, `model` the whole; `auto` takes blocks where a class repeats.
    Keywords are those of torch.compile. Blocks of one class but different shapes need one compilation each, so the
    limit is raised where it is too low for them.
    """
    if scope not in ("auto", "block", "model"):
        raise ConfigError(unknown_name("scope", scope, ["auto", "block", "model"], where="compile_module"))
    blocks = [] if scope == "model" else repeated_blocks(model)
    if scope == "block" and not blocks:
        blocks = [pair for group in find_blocks(model) for pair in zip(group.names, group.members)]
    if not blocks:
        model.compile(**torch_compile_kwargs)
        return model
    _make_room_for(blocks)
    for _, block in blocks:
        block.compile(**torch_compile_kwargs)
    return model


def set_recompile_limit(n: int) -> int:
    """Set how often one function may be recompiled for new shapes before it runs uncompiled; return the old limit."""
    import torch._dynamo

    if n < 1:
        raise ConfigError(f"recompile limit {n} is impossible: it must be at least 1.")
    config = torch._dynamo.config
    old = config.recompile_limit
    config.recompile_limit = n
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, n)
    return old


def _make_room_for(blocks: list[tuple[str, nn.Module]]) -> None:
    """Raise the limit to two compilations (training and evaluation) for each kind of block, with the default as
    reserve."""
    import torch._dynamo

    kinds: dict[type, set[tuple]] = {}
    for _, block in blocks:
        shapes = tuple((name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in block.named_parameters())
        kinds.setdefault(type(block), set()).add((repr(block), shapes))
    needed = 2 * max(len(signatures) for signatures in kinds.values())
    if needed > torch._dynamo.config.recompile_limit:
        set_recompile_limit(needed)
