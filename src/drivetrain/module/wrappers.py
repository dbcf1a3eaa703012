"""Which modules are shells around another module, and how to look through them.

A shell is recognised by its class, never by having an attribute called `module`: users give that name to their own
layers. Classes from packages that are expensive to import are looked up among the modules already imported; what has
never been imported cannot have wrapped anything.

There are two kinds. A *shell* is a separate module around the user's (DataParallel, DDP, torch.compile's
OptimizedModule, the older FSDP, torch's checkpoint wrapper); it adds a component to every name inside. `fully_shard`
and `module.compile()` change a module in place, so there is nothing to take off and no name to clean.
"""

import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# (package that defines it, class, attribute that holds the inner module)
_SHELLS_IMPORTED_LATE = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
_PRIVATE_COMPONENTS = frozenset(attribute for _, _, attribute in _SHELLS_IMPORTED_LATE)


def _late_class(package: str, name: str) -> type | None:
    return getattr(sys.modules.get(package), name, None)


def inner_attribute(module: nn.Module) -> str | None:
    """Return the attribute under which a shell keeps the wrapped module, None for any other module."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    for package, name, attribute in _SHELLS_IMPORTED_LATE:
        cls = _late_class(package, name)
        if cls is not None and isinstance(module, cls):
            return attribute
    return None


def is_compiled_shell(module: nn.Module) -> bool:
    """Return whether `torch.compile(model)` made this module."""
    return inner_attribute(module) == "_orig_mod"


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to this very module."""
    cls = _late_class("torch.distributed.fsdp", "FSDPModule")
    return cls is not None and isinstance(module, cls)


def wrapping_of(module: nn.Module) -> str | None:
    """Name what was done to this module (DDP, FSDP, compiled...), or None for a plain one."""
    if inner_attribute(module) is not None:
        return type(module).__name__
    if is_fully_sharded(module):
        return "fully_shard"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "module.compile()"
    return None


def is_wrapped(model: nn.Module) -> bool:
    """Return whether the model is a shell around another one, or is sharded by `fully_shard`."""
    return inner_attribute(model) is not None or is_fully_sharded(model)


def unwrap(model: nn.Module, keep_compile: bool = False) -> nn.Module:
    """Return the user's module inside any shells; `keep_compile` leaves torch.compile's shell on.

    >>> layer = nn.Linear(2, 2)
    >>> unwrap(nn.DataParallel(layer)) is layer
    True
    """
    attribute = inner_attribute(model)
    if attribute is None:
        return model
    inner = getattr(model, attribute)
    if not (keep_compile and is_compiled_shell(model)):
        return unwrap(inner, keep_compile)
    bare = unwrap(inner, keep_compile)
    return model if bare is inner else _recompiled(model, bare)


def _recompiled(shell: nn.Module, inner: nn.Module) -> nn.Module:
    """Put the compile settings of one shell around another module."""
    return type(shell)(inner, shell.dynamo_ctx)


def clean_name(name: str) -> str:
    """Return a parameter or module name without the components that shells add.

    Torch's private components are removed wherever they stand. The word `module` may be the user's own, so it is
    removed only where DDP puts it: at the front, once. With the model at hand, `clean_key` is exact.

    >>> clean_name("module._orig_mod.encoder.weight")
    'encoder.weight'
    """
    parts = [part for part in name.split(".") if part not in _PRIVATE_COMPONENTS]
    if len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def clean_key(root: nn.Module, key: str) -> str:
    """Return a dotted name of something inside `root` without the components of shells, exactly."""
    module: nn.Module | None = root
    kept: list[str] = []
    for part in key.split(".") if key else ():
        while module is not None and (attribute := inner_attribute(module)) is not None:
            module = getattr(module, attribute)
            if part == attribute:  # the shell's own component; otherwise torch already left it out of the name
                break
        else:
            kept.append(part)
            module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def named_clean_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters as the user's own module would, whatever is wrapped around or inside it."""
    has_shells = any(inner_attribute(module) is not None for module in model.modules())
    for name, parameter in model.named_parameters():
        yield (clean_key(model, name) if has_shells else name), parameter
