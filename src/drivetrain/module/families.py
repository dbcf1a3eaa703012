"""Which modules of one kind are in one row, and whether they run one after another: the families from which blocks are chosen.

The structure decides most cases: nn.Sequential is a chain, and a list next to a layer that returns one number per member is
routed, like the experts of a mixture. With a sample, the model runs once on fake tensors, and the autograd graph shows whether
each member's input depends on the output of the previous one.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from drivetrain.module.probing import call_on_fake_tensors
from drivetrain.module.wrapping import user_class

_PLAIN = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NUMBERED = re.compile(r"^(.*?)(\d+)$")

Named = tuple[str, nn.Module]
_Call = tuple[list[Node], list[Node]]  # graph nodes into and out of a module


@dataclass(frozen=True, kw_only=True)
class Family:
    """Modules of one class in one row."""

    cls: type[nn.Module]
    names: tuple[str, ...]
    members: tuple[nn.Module, ...]
    owner: nn.Module
    """The closest module above the row that is not a plain container; its forward decides how the members run."""
    is_chain: bool = False
    """Whether the row is in nn.Sequential, so that its members certainly run one after another."""


def is_plain_container(module: nn.Module) -> bool:
    """Return whether a module only holds others: torch's own ModuleList, Sequential or ModuleDict, not a subclass."""
    return user_class(module) in _PLAIN


def find_families(root: nn.Module, prefix: str = "") -> list[Family]:
    """Return the outermost families below a module."""
    return list(_search(root, prefix, root, set()))


def _search(module: nn.Module, name: str, owner: nn.Module, seen: set[nn.Module]) -> Iterator[Family]:
    """Yield the families in the rows of one module, and below whatever is in none."""
    if module in seen:
        return
    seen.add(module)
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):  # those have no forward of their own
        owner = module
    for row, is_chain in _rows(module, name):
        by_class: dict[type[nn.Module], dict[nn.Module, str]] = {}
        for child_name, child in row:
            by_class.setdefault(user_class(child), {}).setdefault(child, child_name)
        for cls, children in by_class.items():
            if len(children) > 1 and not _is_layer(children):
                names, members = tuple(children.values()), tuple(children)
                yield Family(cls=cls, names=names, members=members, owner=owner, is_chain=is_chain)
                seen.update(children)
        for child_name, child in row:
            yield from _search(child, child_name, owner, seen)


def _rows(module: nn.Module, name: str) -> Iterator[tuple[list[Named], bool]]:
    """Yield the children of a module as rows of things that belong side by side, plain containers replaced by their content."""
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield _expanded(children), isinstance(module, nn.Sequential)
        return
    numbered = _numbered_rows(children)
    in_row = {child for row in numbered for _, child in row}
    for row in numbered:
        yield _expanded(row), False
    others = [pair for pair in children if pair[1] not in in_row]
    if isinstance(module, nn.ModuleDict):  # its values are a row; containers among them stay apart, they have names
        yield [pair for pair in others if not is_plain_container(pair[1])], False
        others = [pair for pair in others if is_plain_container(pair[1])]
    for pair in others:
        yield [pair], False


def _numbered_rows(children: list[Named]) -> list[list[Named]]:
    """Return the children whose names have one stem and running numbers, such as `block1` to `block4`."""
    stems: dict[str, dict[int, Named]] = {}
    for name, child in children:
        match = _NUMBERED.match(name.rpartition(".")[2])
        if match and match.group(1):
            stems.setdefault(match.group(1), {})[int(match.group(2))] = (name, child)
    return [list(row.values()) for row in stems.values() if len(row) > 1 and max(row) - min(row) == len(row) - 1]


def _expanded(row: list[Named]) -> list[Named]:
    """Replace positional containers in a row by what they hold, so that the stages of a ResNet are one row of blocks."""
    result: list[Named] = []
    for name, child in row:
        if is_plain_container(child):
            result += _expanded([(f"{name}.{key}", grandchild) for key, grandchild in child.named_children()])
        else:
            result.append((name, child))
    return result


def num_matrices(module: nn.Module) -> int:
    """Return how many parameters of two or more dimensions a module holds."""
    return sum(parameter.ndim >= 2 for parameter in module.parameters())


def _is_layer(modules: dict[nn.Module, str]) -> bool:
    """Return whether modules are single layers, too small to be blocks: torch's own leaves, norms, leaves with one matrix."""
    first = next(iter(modules))
    matrices = max(num_matrices(module) for module in modules)
    if first._modules.keys() - {"parametrizations"}:
        return matrices == 0
    return user_class(first).__module__.startswith("torch.") or matrices < 2


def runs_one_after_another(family: Family, fake_run: "FakeRun | None" = None) -> bool:
    """Return whether the family's members form a chain."""
    if family.is_chain:
        return True
    seen = fake_run.shows_chain(family.members) if fake_run is not None else None
    return not _has_router(family) if seen is None else seen


def _has_router(family: Family) -> bool:
    """Return whether something next to the members, in the module that runs them, scores exactly as many choices as there are."""
    count, inside = len(family.members), {module for member in family.members for module in member.modules()}
    weights = [parameter for parameter in family.owner._parameters.values() if parameter is not None]
    for child in family.owner.children():
        if child not in inside and not any(module in inside for module in child.modules()):
            weights += child.parameters()
    return any(weight.ndim == 2 and weight.shape[0] == count != weight.shape[1] for weight in weights)


class FakeRun:
    """One run of a model on fake tensors, made at the first query."""

    def __init__(self, root: nn.Module, sample: object):
        self.root, self.sample = root, sample
        self._calls: dict[nn.Module, _Call] | None = None

    def shows_chain(self, members: tuple[nn.Module, ...]) -> bool | None:
        """Return whether each member's input depends on the output of the previous one; None if the run does not show it."""
        if self._calls is None:
            self._calls = self._run()
        calls = [self._calls[member] for member in members if member in self._calls]
        if len(calls) < 2:
            return None
        return all(_reaches(into, set(out)) for (_, out), (into, _) in pairwise(calls))

    def _run(self) -> dict[nn.Module, _Call]:
        calls: dict[nn.Module, _Call] = {}

        def record(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            calls.setdefault(module, (_nodes((args, kwargs)), _nodes(output)))

        sample = self.sample
        kwargs = sample if isinstance(sample, dict) else {}
        args = () if isinstance(sample, dict) else tuple(sample) if isinstance(sample, tuple | list) else (sample,)
        with ExitStack() as hooks:
            for module in self.root.modules():
                hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
            try:
                call_on_fake_tensors(self.root, args, kwargs, with_graph=True)
            except Exception:  # as for shapes that depend on data: the structure decides
                return {}
        return calls


def _nodes(value: object) -> list[Node]:
    return [leaf.grad_fn for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def _reaches(starts: Iterable[Node], goals: set[Node]) -> bool:
    """Return whether walking the autograd graph backwards from `starts` meets one of `goals`."""
    stack, seen = list(starts), set(starts)
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        for previous, _ in node.next_functions:
            if previous is not None and previous not in seen:
                seen.add(previous)
                stack.append(previous)
    return False
