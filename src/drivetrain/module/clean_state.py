"""Read and write a module's state under the names of the user's own module.

A file written from a DDP, compiled or plain model has the same keys, and loads into any of them; so do files that other
programs wrote with `module.` or `_orig_mod.` in front. Sharded parameters take full tensors and full parameters take
sharded ones. What does not fit is found before anything is changed and reported in one error.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.core.errors import StateError, nearest_name
from drivetrain.module.distributed_tensors import fit_tensor
from drivetrain.module.wrappers import clean_key, clean_name, unwrap

FaultKind = Literal["missing", "unexpected", "unfitting"]
"""What can be wrong with a saved state: not there, not known here, or of another form."""


class StateFault(NamedTuple):
    """One entry of a state that does not fit a module."""

    kind: FaultKind
    name: str
    reason: str = ""


def clean_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the module's state under its own names, with torch's `_metadata` kept.

    >>> list(clean_state_dict(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    module = unwrap(module)
    state = type(module).state_dict(
        module
    )  # the parts that this rank holds, also where `gather_on_request` gives the whole
    cleaned: OrderedDict[str, object] = OrderedDict((clean_key(module, key), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # A shell and what it holds get the same key; the inner one comes later and stays.
        cleaned._metadata = OrderedDict((clean_key(module, key), value) for key, value in metadata.items())  # type: ignore[attr-defined]
    return cleaned


def load_clean_state_dict(
    module: nn.Module, state: Mapping[str, object], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state into a module, whatever is wrapped on either side, and return the missing and unexpected names.

    With `strict` anything missing, unexpected or of another shape raises a StateError that lists all of it, and the
    module is unchanged. Without it, what fits is loaded.
    """
    module = unwrap(module)
    live = type(module).state_dict(module, keep_vars=True)
    real_keys = {clean_key(module, key): key for key in live}
    given = _without_prefixes(state, real_keys)
    faults = _faults(module, given, {name: live[key] for name, key in real_keys.items()})
    if strict and faults:
        raise StateError(
            f"the state does not fit {type(module).__name__}; nothing was loaded.\n  "
            + "\n  ".join(_fault_line(fault, real_keys) for fault in faults)
        )
    unfitting = {fault.name for fault in faults if fault.kind == "unfitting"}
    loadable: OrderedDict[str, object] = OrderedDict()
    for name, value in given.items():
        if name not in unfitting:
            key = real_keys.get(name, name)
            loadable[key] = fit_tensor(value, live[key]) if key in live and isinstance(value, Tensor) else value
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        loadable._metadata = _real_metadata(module, metadata)  # type: ignore[attr-defined]
    try:
        result = module.load_state_dict(loadable, strict=strict)
    except RuntimeError as error:  # a module with its own way of loading found a fault
        raise StateError(f"the state does not fit {type(module).__name__}: {error}") from error
    return [clean_key(module, key) for key in result.missing_keys], [
        clean_key(module, key) for key in result.unexpected_keys
    ]


def state_faults(module: nn.Module, state: Mapping[str, object]) -> list[StateFault]:
    """Return what `load_clean_state_dict` would raise about a state, loading nothing."""
    bare = unwrap(module)
    live = clean_state_dict(bare)
    return _faults(bare, _without_prefixes(state, dict.fromkeys(live, "")), live)


def _faults(module: nn.Module, given: Mapping[str, Any], live: Mapping[str, Any]) -> list[StateFault]:
    is_own_business, may_reshape = _loaded_in_own_way(module)
    faults = [StateFault("missing", name) for name in live if name not in given and not is_own_business(name)]
    faults += [StateFault("unexpected", name) for name in given if name not in live and not is_own_business(name)]
    for name, value in given.items():
        if name in live and not _fits(value, live[name]) and not may_reshape(name):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            faults.append(StateFault("unfitting", name, f"given {found}, expected shape {tuple(live[name].shape)}"))
    return faults


def _fault_line(fault: StateFault, valid: Mapping[str, str]) -> str:
    if fault.reason:
        return f"{fault.name}: {fault.reason}"
    near = nearest_name(fault.name, valid) if fault.kind == "unexpected" else None
    return f"{fault.name}: {fault.kind}" + (f" (nearest: {near})" if near else "")


def _without_prefixes(state: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Take wrapper prefixes off the given keys, in the way under which most of them are known."""

    def front(key: str) -> str:
        return key.removeprefix("module.")

    def everywhere(key: str) -> str:
        return ".".join(part for part in clean_name(key).split(".") if part != "module")

    def private(key: str) -> str:
        return clean_name("module." + key)

    ways: list[Callable[[str], str]] = [str, private, front, clean_name, everywhere]
    best: list[str] = []
    most = -1
    for way in ways:
        keys = [way(key) for key in state]
        known = sum(key in names for key in keys)
        if known > most and len(set(keys)) == len(keys):
            best, most = keys, known
        if most == len(keys):
            break
    return dict(zip(best, state.values()))


def _fits(value: Any, live: Any) -> bool:
    if is_lazy(live):  # takes the shape of whatever is loaded
        return True
    return not isinstance(live, Tensor) or (isinstance(value, Tensor) and value.shape == live.shape)


def _loaded_in_own_way(module: nn.Module) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    """Return tests for names whose module may invent or rename keys while loading, and for those it may also
    reshape."""
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


def _real_metadata(module: nn.Module, metadata: Mapping[str, object]) -> "OrderedDict[str, Any]":
    """Spread the metadata of clean names over the module's real paths; a shell gets its inner module's."""
    paths = {path: clean_key(module, path) for path, _ in module.named_modules()}
    given = _without_prefixes(metadata, {clean: path for path, clean in paths.items()})
    return OrderedDict((path, given[clean]) for path, clean in paths.items() if clean in given)
