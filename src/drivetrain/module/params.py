"""Name, select and split the parameters of a model.

`muon_groups` decides which weights an optimizer for matrices (Muon, Jordan et al., 2024) may take: those of hidden layers, where
the gradient is a matrix that maps one hidden space to another. Embedding tables, input and output layers, gains and biases are
left to an element-wise optimizer.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.blocks import repeated_blocks
from drivetrain.module.wrapping import named_clean_parameters, parameter_places, unwrap

NamedParameters = tuple[tuple[str, nn.Parameter], ...]

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def select_parameters(model: nn.Module, patterns: str | Iterable[str], *, where: str = "") -> dict[str, nn.Parameter]:
    """Return the parameters that match any pattern, in the model's order.

    A pattern is a parameter's name, the dotted name of a module (all its parameters), or either with `*`, `?` and
    `[...]`. A pattern that matches nothing is an error; `where` says in the message where it was written.

    >>> model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    >>> list(select_parameters(model, ["encoder", "*.bias"]))
    ['encoder.weight', 'encoder.bias', 'head.bias']
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    named = dict(named_clean_parameters(model))
    chosen: set[str] = set()
    for pattern in wanted:
        matched = [name for name in named if _names(pattern, name)]
        if not matched:
            raise ConfigError(_no_match(model, pattern, named, where))
        chosen.update(matched)
    return {name: parameter for name, parameter in named.items() if name in chosen}


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern names a parameter or a module above it."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: end + 1]), pattern) for end in range(len(parts)))


def _no_match(model: nn.Module, pattern: str, named: Iterable[str], where: str) -> str:
    root = unwrap(model)
    depth = pattern.count(".")
    modules = [name for name, module in root.named_modules() if name and next(module.parameters(), None) is not None]
    # Names of the pattern's own depth are the likeliest; listing all names of a large model does not help.
    near = [name for name in [*modules, *named] if name.count(".") == depth] or modules
    first_level = [name for name in modules if "." not in name] or list(named)
    message = unknown_name(f"parameter or module of {type(root).__name__}", pattern, near[:20], where=where)
    return f"{message} First-level modules: {', '.join(first_level)}."


@dataclass(frozen=True, kw_only=True)
class MuonGroups:
    """The split of a model's parameters between Muon and another optimizer."""

    muon: NamedParameters
    """Weights of hidden layers; those with more than two dimensions are convolution kernels, to be viewed as (out, rest)."""
    other: NamedParameters
    """Everything else."""
    reasons: tuple[tuple[str, str], ...]
    """Each name with the reason for its side."""

    def explain(self) -> str:
        """Return one line per parameter, and the totals."""
        width = max((len(name) for name, _ in self.reasons), default=0)
        to_muon = {name for name, _ in self.muon}
        lines = [
            f"{label}: {len(group)} tensors, {sum(parameter.numel() for _, parameter in group):,} elements"
            for label, group in (("muon", self.muon), ("other", self.other))
        ]
        for name, reason in self.reasons:
            lines.append(f"{'muon' if name in to_muon else 'other':5}  {name:{width}}  {reason}")
        return "\n".join(lines)


def muon_groups(model: nn.Module, *, other: str | Iterable[str] = ()) -> MuonGroups:
    """Split the parameters of a model for Muon, with those that are frozen now and may be trained later.

    `other` names further parameters that Muon must not take.

    >>> groups = muon_groups(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
    >>> [name for name, _ in groups.muon], [name for name, _ in groups.other]
    (['1.weight'], ['0.weight', '1.bias', '2.weight', '2.bias'])
    """
    root = unwrap(model)
    excluded = select_parameters(root, other, where="other") if other else {}
    places, head = parameter_places(root), _output_head(root)
    muon: list[tuple[str, nn.Parameter]] = []
    rest: list[tuple[str, nn.Parameter]] = []
    reasons = []
    for name, parameter in named_clean_parameters(root):
        users = [module for module, _ in places[parameter]]
        reason = "named in `other`" if name in excluded else _unsuitable(name, parameter, users, head)
        (rest if reason else muon).append((name, parameter))
        kind = "convolution kernel, viewed as (out, rest)" if parameter.ndim > 2 else "hidden weight"
        reasons.append((name, reason or kind))
    return MuonGroups(muon=tuple(muon), other=tuple(rest), reasons=tuple(reasons))


def _output_head(root: nn.Module) -> nn.Module | None:
    """Return the last linear layer, unless it belongs to a repeated block: then the model has no head of its own."""
    linear = [module for module in root.modules() if isinstance(module, nn.Linear)]
    if not linear:
        return None
    inside = {module for _, block in repeated_blocks(root) for module in block.modules()}
    return None if linear[-1] in inside else linear[-1]


def _unsuitable(name: str, parameter: nn.Parameter, users: list[nn.Module], head: nn.Module | None) -> str | None:
    """Return why Muon must not take a parameter, or None."""
    if parameter.ndim < 2:
        return "vector"
    for user in users:
        if isinstance(user, nn.Embedding | nn.EmbeddingBag):
            return "embedding" if len(users) == 1 else "tied to an embedding"
        if user is head:
            return "output head"
        if isinstance(user, _NORMS) or "norm" in type(user).__name__.lower():
            return "normalisation"
        if "embed" in type(user).__name__.lower() or "embed" in name.rpartition(".")[2].lower():
            return "embedding"
        has_layers = any(next(child.parameters(), None) is not None for child in user.children())
        if has_layers and not type(user).__module__.startswith("torch."):
            return "held next to layers, not by one: a table, token or gain"
        if parameter.ndim > 2 and not isinstance(user, _ConvNd):
            return "stack of matrices, not one"
    if min(parameter.shape[0], parameter[0].numel()) == 1:
        return "one row or column"
    return None
