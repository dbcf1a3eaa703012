"""What is around a model or was done to its class, and the state under the names that the user gave.

A *shell* is a separate module around the user's (DataParallel, DDP, torch.compile's OptimizedModule, the older FSDP, torch's checkpoint
wrapper); it adds a component to every name inside. It is recognised by its class, because users may call their own layers `module` too.
Classes that are expensive to import are looked up among the modules already imported. `fully_shard` and `module.compile()` change a
module in place, so there is no name to clean.

A *generated subclass* is the only way to intercept `forward` that keeps every parameter name and state-dict key and survives a deep
copy: a wrapper module renames, and a closure stored on the instance would still call the original after a copy.

A state from a DDP, compiled or plain model loads into any of them; so do files that other programs wrote with `module.` or `_orig_mod.`
in front. Sharded parameters take full tensors and full parameters take sharded ones. What does not fit is reported in one error, before
anything is changed.
"""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.core.errors import StateError, nearest_name
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import fit_tensor

# (package that defines it, class, attribute that holds the inner module)
_SHELLS_IMPORTED_LATE = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
_PRIVATE_COMPONENTS = frozenset(attribute for _, _, attribute in _SHELLS_IMPORTED_LATE)


def _class_if_imported(package: str, name: str) -> type | None:
    return getattr(sys.modules.get(package), name, None)


def inner_attribute(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper keeps the wrapped module, None for any other module."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    for package, name, attribute in _SHELLS_IMPORTED_LATE:
        cls = _class_if_imported(package, name)
        if cls is not None and isinstance(module, cls):
            return attribute
    return None


def is_compiled_shell(module: nn.Module) -> bool:
    """Return whether `torch.compile(model)` made this module."""
    return inner_attribute(module) == "_orig_mod"


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to exactly this module."""
    cls = _class_if_imported("torch.distributed.fsdp", "FSDPModule")
    return cls is not None and isinstance(module, cls)


def wrapping_of(module: nn.Module) -> str | None:
    """Return how this module is wrapped (DDP, FSDP, compiled...), or None for a plain one."""
    if inner_attribute(module) is not None:
        return type(module).__name__
    if is_fully_sharded(module):
        return "fully_shard"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "module.compile()"
    return None


def is_wrapped(model: nn.Module) -> bool:
    """Return whether the model is a wrapper around another one, or is sharded by `fully_shard`."""
    return inner_attribute(model) is not None or is_fully_sharded(model)


def unwrap(model: nn.Module, keep_compile: bool = False) -> nn.Module:
    """Return the user's module inside any wrappers. `keep_compile` keeps torch.compile's wrapper.

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
    return model if bare is inner else type(model)(bare, model.dynamo_ctx)


def clean_name(name: str) -> str:
    """Return a parameter or module name without the components that wrappers add.

    Torch's private components are removed wherever they are. The word `module` may be the user's own, so it is
    removed only where DDP puts it: at the front, once. With the model at hand, `clean_key` is exact.

    >>> clean_name("module._orig_mod.encoder.weight")
    'encoder.weight'
    """
    parts = [part for part in name.split(".") if part not in _PRIVATE_COMPONENTS]
    if len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def clean_key(root: nn.Module, key: str) -> str:
    """Return a dotted name of something inside `root` without the components of wrappers, exactly."""
    module: nn.Module | None = root
    kept: list[str] = []
    for part in key.split(".") if key else ():
        while module is not None and (attribute := inner_attribute(module)) is not None:
            module = getattr(module, attribute)
            if part == attribute:  # the shell's own component; otherwise torch already left it out of the name
                break
        else:
            kept.append(part)
            module = module._modules[part] if module is not None and part in module._modules else None
    return ".".join(kept)


def named_clean_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters as the user's own module would, independent of wrappers around or inside it."""
    has_shells = any(inner_attribute(module) is not None for module in model.modules())
    firsts = getattr(model, "plain_names", {})  # of a pipeline's stage, which may hold a tied parameter by another name
    for name, parameter in model.named_parameters():
        clean = clean_key(model, name) if has_shells else name
        yield firsts.get(clean, clean), parameter


def parameter_places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return the modules and names under which each parameter of a model is registered; several for tied ones."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return places


class GeneratedClass:
    """Marks classes made by `subclass_of`; the class the user wrote is the next base."""

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle as an instance of the mixin and the written class, because the generated class cannot be imported."""
        reduced: tuple[object, ...] = super().__reduce_ex__(2)  # type: ignore[assignment]
        mixin, base = type(self).__bases__[0], type(self).__bases__[-1]
        return (_new_instance, (mixin, base), *reduced[2:])  # the rest is the instance's state


_generated: dict[tuple[type, type], type] = {}


def subclass_of(base: type[nn.Module], mixin: type[GeneratedClass]) -> type[nn.Module]:
    """Return the one subclass that puts `mixin` before `base`."""
    key = (mixin, base)
    if key not in _generated:
        name = mixin.__name__ + base.__name__
        _generated[key] = type(name, (mixin, base), {"__module__": base.__module__, "__qualname__": name})
    return _generated[key]


def add_mixin(module: nn.Module, mixin: type[GeneratedClass], **fields: object) -> None:
    """Put `mixin` before the class of a module, in place and once, and set attributes of this instance."""
    module.__dict__.update(fields)
    if not isinstance(module, mixin):
        module.__class__ = subclass_of(type(module), mixin)


def _new_instance(mixin: type[GeneratedClass], base: type[nn.Module]) -> nn.Module:
    cls = subclass_of(base, mixin)
    return cls.__new__(cls)


def user_class(module: nn.Module) -> type[nn.Module]:
    """Return the class the user wrote, below classes generated by us, by `fully_shard` or by parametrizations."""
    cls = type(module)
    if is_fully_sharded(module):
        cls = next(base for base in cls.__mro__[1:] if issubclass(base, nn.Module))
    while issubclass(cls, GeneratedClass) or (cls is type(module) and parametrize.is_parametrized(module)):
        cls = cls.__bases__[-1]
    return cls


COPIES = WeakIdKeyDictionary()
"""References to the more precise copies of parameters, which an optimizer trains instead."""

FaultKind = Literal["missing", "unexpected", "unfitting"]
"""What can be wrong with a saved state: missing, unexpected, or of another shape."""


class StateFault(NamedTuple):
    """One entry of a state that does not fit a module."""

    kind: FaultKind
    name: str
    reason: str = ""

    def line(self, valid: Mapping[str, object]) -> str:
        """Return the fault as one line of an error, with the nearest valid name for an unexpected one."""
        near = nearest_name(self.name, valid) if self.kind == "unexpected" else None
        return f"{self.name}: {self.reason or self.kind}" + (f" (nearest: {near})" if near else "")


def clean_state_dict(module: nn.Module) -> StateDict:
    """Return the module's state under its own names, with torch's `_metadata` kept.

    >>> list(clean_state_dict(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    module = unwrap(module)
    # The parts that this rank holds, also where `gather_on_request` gives the whole.
    state = type(module).state_dict(module)
    cleaned: OrderedDict[str, object] = OrderedDict((clean_key(module, key), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # A shell and what it holds get the same key; the inner one comes later and stays.
        cleaned._metadata = OrderedDict((clean_key(module, key), value) for key, value in metadata.items())  # type: ignore[attr-defined]
    return cleaned


def load_clean_state_dict(
    module: nn.Module, state: Mapping[str, object], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state into a module, independent of wrappers on either side, and return the missing and unexpected names.

    With `strict` anything missing, unexpected or of another shape raises a StateError that lists all of it, and the
    module is unchanged. Without it, what fits is loaded.
    """
    module = unwrap(module)
    live = type(module).state_dict(module, keep_vars=True)
    real_keys = {clean_key(module, key): key for key in live}
    given = _without_prefixes(state, real_keys)
    faults = _faults(module, given, {name: live[key] for name, key in real_keys.items()})
    if strict and faults:
        lines = "\n  ".join(fault.line(real_keys) for fault in faults)
        raise StateError(f"the state does not fit {type(module).__name__}; nothing was loaded.\n  {lines}")
    unfitting = {fault.name for fault in faults if fault.kind == "unfitting"}
    loadable: OrderedDict[str, object] = OrderedDict()
    for name, value in given.items():
        if name not in unfitting:
            key = real_keys.get(name, name)
            loadable[key] = fit_tensor(value, live[key]) if key in live and isinstance(value, Tensor) else value
    if (metadata := getattr(state, "_metadata", None)) is not None:  # a shell gets its inner module's
        paths = {path: clean_key(module, path) for path, _ in module.named_modules()}
        named = _without_prefixes(metadata, paths.values())
        loadable._metadata = OrderedDict((path, named[name]) for path, name in paths.items() if name in named)  # type: ignore[attr-defined]
    try:
        result = module.load_state_dict(loadable, strict=strict)
    except RuntimeError as error:  # a module with its own way of loading found a fault
        raise StateError(f"the state does not fit {type(module).__name__}: {error}") from error
    for key, parameter in module.named_parameters():
        copied, value = COPIES.get(parameter, lambda: None)(), loadable.get(key)
        if copied is not None and isinstance(value, Tensor) and value.dtype != parameter.dtype:
            copied.data.copy_(value)  # before it is rounded to the parameter's type
    missing, unexpected = ([clean_key(module, key) for key in keys] for keys in result)
    return missing, unexpected


def state_faults(module: nn.Module, state: Mapping[str, object]) -> list[StateFault]:
    """Return what `load_clean_state_dict` would raise for a state, without loading it."""
    bare = unwrap(module)
    live = clean_state_dict(bare)
    return _faults(bare, _without_prefixes(state, live), live)


def _faults(module: nn.Module, given: Mapping[str, object], live: Mapping[str, Tensor]) -> list[StateFault]:
    is_own_business, may_reshape = _custom_loading_names(module)
    faults = [StateFault("missing", name) for name in live if name not in given and not is_own_business(name)]
    faults += [StateFault("unexpected", name) for name in given if name not in live and not is_own_business(name)]
    for name, value in given.items():
        if name in live and not _fits(value, live[name]) and not may_reshape(name):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            faults.append(StateFault("unfitting", name, f"given {found}, expected shape {tuple(live[name].shape)}"))
    return faults


def _without_prefixes(state: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Remove wrapper prefixes from the given keys, in the way under which most of them are known."""

    def everywhere(key: str) -> str:
        return ".".join(part for part in clean_name(key).split(".") if part != "module")

    ways: list[Callable[[str], str]] = [
        str,
        lambda key: clean_name(f"module.{key}"),
        lambda key: key.removeprefix("module."),
        clean_name,
        everywhere,
    ]
    cleaned = [[way(key) for key in state] for way in ways]
    distinct = [keys for keys in cleaned if len(set(keys)) == len(keys)]
    known = set(names)
    return dict(zip(max(distinct, key=lambda keys: sum(key in known for key in keys)), state.values()))


def _fits(value: object, live: Tensor) -> bool:
    if is_lazy(live):  # takes the shape of whatever is loaded
        return True
    return not isinstance(live, Tensor) or (isinstance(value, Tensor) and value.shape == live.shape)


def _custom_loading_names(module: nn.Module) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    """Return tests for names whose module may invent or rename keys while loading, and for those it may also reshape."""
    inventing, reshaping = [], []
    for path, child in module.named_modules():
        loader = type(child)._load_from_state_dict
        if loader is nn.Module._load_from_state_dict and not child._load_state_dict_pre_hooks:
            continue
        prefix = clean_key(module, path)
        inventing.append(prefix)
        if child._load_state_dict_pre_hooks or not loader.__module__.startswith("torch.nn."):
            reshaping.append(prefix)  # torch's own layers (batch norm counts, packed attention) never change shapes

    def under(prefixes: list[str]) -> Callable[[str], bool]:
        return lambda name: any(not prefix or name == prefix or name.startswith(prefix + ".") for prefix in prefixes)

    return under(inventing), under(reshaping)


def num_inputs(model: object) -> int:
    """Return how many positional arguments a model's `forward` requires; one if that is not known.

    >>> class Pair(nn.Module):
    ...     def forward(self, left, right, mask=None): ...
    >>> num_inputs(Pair()), num_inputs(nn.Linear(1, 1))
    (2, 1)
    """
    if not isinstance(model, nn.Module):
        return 1
    bare = unwrap(model)
    # Methods of a plan replace forward by one of any arguments: the user's own has the names.
    for owner in (bare, *type(bare).__mro__):
        forward = vars(owner).get("forward")
        if forward is None:
            continue
        if not callable(forward):  # of a traced or scripted module
            declared = bare.forward.schema.arguments[1:]  # type: ignore[attr-defined]
            return max(1, sum(not argument.has_default_value() for argument in declared))
        parameters = list(inspect.signature(forward).parameters.values())[0 if owner is bare else 1 :]
        if any(p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD for p in parameters):
            positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            return max(1, sum(p.default is p.empty for p in positional))
    return 1


def own_loss(model: object) -> Callable[..., Tensor] | None:
    """Return the model's method `loss(outputs, batch)`, which `ComposerModel` has, or None where it has none."""
    loss = getattr(unwrap(model), "loss", None) if isinstance(model, nn.Module) else None
    return loss if inspect.ismethod(loss) and len(inspect.signature(loss).parameters) >= 2 else None
