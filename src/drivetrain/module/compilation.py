"""Compile a model in place: `module.compile()` changes no name and no state-dict key.

Repeated blocks of one class share one compilation. So compiling block by block costs the time of one block, and hooks of sharding
can run between blocks. Compiling the whole model lets the compiler fuse across blocks.
"""

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.core.arguments import check_choice, check_count
from drivetrain.module.blocks import repeated_blocks, select_modules

Scope = Literal["auto", "block", "model"]


def compile_module(model: nn.Module, scope: Scope = "auto", **torch_compile_kwargs: object) -> nn.Module:
    """Compile a model in place and return it.

    `block` compiles each block that `find_blocks` finds, `model` the whole; `auto` takes blocks where a class repeats.
    Keywords are those of torch.compile. Blocks of one class but different shapes need one compilation each, so the
    limit is raised where it is too low for them.
    """
    check_choice("scope", scope, get_args(Scope), owner="compile_module")
    blocks = [] if scope == "model" else repeated_blocks(model)
    if scope == "block" and not blocks:
        blocks = select_modules(model, "auto")
    if not blocks:
        _compile_in_place(model, **torch_compile_kwargs)
        return model
    _raise_recompile_limit(blocks)
    for _, block in blocks:
        _compile_in_place(block, **torch_compile_kwargs)
    return model


def _compile_in_place(module: nn.Module, **torch_compile_kwargs: Any) -> None:
    """Do what `module.compile()` does, also for torch's own classes.

    The compiler passes over functions that torch itself defines unless other code calls them, so `nn.Sequential(...).compile()` leaves
    the module as slow as it was, silently. Under the hooks of `fully_shard` torch's classes still run uncompiled.
    """
    if str(getattr(type(module).forward, "__module__", "")).startswith("torch."):
        compiled = torch.compile(_caller(type(module)), **torch_compile_kwargs)  # type: ignore[arg-type]
        module._compiled_call_impl = functools.partial(compiled, module)
    else:
        module.compile(**torch_compile_kwargs)


@functools.cache
def _caller(cls: type) -> Callable[..., object]:
    """Return a function that calls a module, with code of its own for each class: what is compiled is counted, and limited, by code."""
    name = f"call_{cls.__name__}"
    return types.FunctionType(_call.__code__.replace(co_name=name), globals(), name)


def _call(module: nn.Module, *args: object, **kwargs: object) -> object:
    return module._call_impl(*args, **kwargs)


def compile_loss(loss_func: Callable[..., object], **torch_compile_kwargs: Any) -> Callable[..., object]:
    """Return a compiled loss function. A module is compiled in place, so that its keys do not change."""
    if isinstance(loss_func, nn.Module):
        _compile_in_place(loss_func, **torch_compile_kwargs)
        compiled: Callable[..., object] = loss_func
    else:
        compiled = torch.compile(loss_func, **torch_compile_kwargs)
    if not replays_graphs(compiled):
        return compiled
    return lambda *args, **kwargs: copied(compiled(*args, **kwargs))


GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""The modes of torch.compile that record CUDA graphs."""


def replays_graphs(compiled: object) -> bool:
    """Return whether a compiled function or model replays recorded CUDA graphs: its next call overwrites what this one returned."""
    calls = [compiled]
    if isinstance(compiled, nn.Module):
        calls += [call for module in compiled.modules() for call in (module, module._compiled_call_impl)]
    reads = [getattr(getattr(call, "func", call), "get_compiler_config", None) for call in calls]
    return any((read() or {}).get("triton.cudagraphs") for read in reads if read is not None)


def copied(results: Any) -> Any:
    """Return copies of what a recorded CUDA graph has returned."""
    return tree_map_only(Tensor, torch.clone, results)


LossGraph = Literal["apart", "outputs", "loss"]
"""What one graph of a model and its loss function must return: both the outputs and the loss, or the loss alone. `apart`: there is no such
graph, because something acts between the two."""
Function = Callable[..., object]
StepFunc = Callable[[nn.Module, Function, Function, object, bool], tuple[Any, Any]]
"""`(model, call, loss_func, batch, keep)`: calls `outputs = call(model, batch)` and `loss_func(batch, outputs)`. It returns the loss and,
with `keep`, the outputs."""


class JointStep(NamedTuple):
    """A model and its loss function that are compiled as one graph."""

    run: StepFunc
    loss_func: Function
    """The function to call inside the graph."""
    planned: Function
    """The function that everything else calls. If it was replaced, the graph computes another loss."""


def compile_step(**torch_compile_kwargs: Any) -> StepFunc:
    """Return a function that calls a model and its loss function in one compiled graph.

    The compiler then fuses the loss with the last layers and, where the outputs are not returned, writes their gradient into their
    memory. Returned outputs are detached, because a graph fills the gradients of outputs that get none with zeros.
    """
    own = types.FunctionType(_step.__code__.replace(co_name="step"), globals(), "step")  # see `_caller`
    compiled = torch.compile(own, **torch_compile_kwargs)
    if not replays_graphs(compiled):
        return compiled

    def run(*args: object) -> tuple[object, object]:
        loss, outputs = compiled(*args)
        return copied(loss), outputs

    return run


def _step(model: nn.Module, call: Function, loss_func: Function, batch: object, keep: bool) -> tuple[object, object]:
    outputs = call(model, batch)
    return loss_func(batch, outputs), tree_map_only(Tensor, Tensor.detach, outputs) if keep else None


def forget_shapes() -> None:
    """Reset which sizes the compiler treats as dynamic.

    It learns that per line of code, not per model: a trial of a copy with a small batch would make the size of every later batch a
    variable, and kernels for variable sizes are slower. Compiled code stays.
    """
    import torch._dynamo.pgo

    torch._dynamo.pgo.reset_code_state()


class GraphBreaks:
    """Counts graphs and graph breaks from its creation on. Code at a graph break runs uncompiled and ends a fusion."""

    def __init__(self) -> None:
        self._breaks, self._graphs = self._counted()

    def report(self) -> str:
        """Report the number of graph breaks and the first reasons, or that no graph was made."""
        breaks, graphs = self._counted()
        if graphs == self._graphs:  # torch 2.15 counts a function that is not compiled as a break
            return "no graph was made: nothing is compiled, or this process compiled it before"
        reasons = breaks - self._breaks
        if not reasons:
            return "no graph breaks"
        total = reasons.total()
        shown = "; ".join(reason.strip().splitlines()[0][:100] for reason in list(reasons)[:3])
        return f"{total} graph break{'s' if total > 1 else ''} ({shown})"

    @staticmethod
    def _counted() -> tuple[Counter[str], int]:
        from torch._dynamo.utils import counters

        return Counter(counters["graph_break"]), counters["stats"]["unique_graphs"]


def set_recompile_limit(n: int) -> int:
    """Set how often one function may be recompiled for new shapes before it runs uncompiled; return the old limit."""
    from torch._dynamo import config

    check_count("recompile limit", n)
    old = config.recompile_limit
    config.recompile_limit = n
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, n)
    return old


def _raise_recompile_limit(blocks: list[tuple[str, nn.Module]]) -> None:
    """Raise the limit to two compilations (training and evaluation) for each kind of block, with the default as reserve."""
    import torch._dynamo

    kinds: dict[type, set[tuple]] = {}
    for _, block in blocks:
        shapes = tuple((name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in block.named_parameters())
        kinds.setdefault(type(block), set()).add((repr(block), shapes))
    needed = 2 * max(len(signatures) for signatures in kinds.values())
    if needed > torch._dynamo.config.recompile_limit:
        set_recompile_limit(needed)
