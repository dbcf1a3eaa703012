"""Find the repeated blocks of any model: the units for checkpointing, compilation, sharding, pipeline cuts and cost.

Blocks are modules of one class that are side by side in a container, or attributes with one stem and running numbers. The outermost such
families are taken; a family goes one level down when a member holds more than a quarter of the model and consists of blocks itself (the
stages of a Swin or ConvNeXt). Where families hold less than half of the parameters, large leftover subtrees are added; where there are none
at all, the model is cut at module boundaries into about sixteen pieces.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.families import (
    FakeRun,
    Family,
    find_families,
    is_plain_container,
    num_matrices,
    runs_one_after_another,
)
from drivetrain.module.wrapping import parameter_places, unwrap, user_class

_GO_DOWN_SHARE = 0.25  # a member with more of the model than this is opened if it consists of blocks
_MIN_COVERAGE = 0.5  # families (or, inside a member, its families) must hold at least this much
_NUM_UNITS = 16  # into how many units a model without families is cut
_MIN_UNIT = 1_000_000  # and the smallest size of such a unit, in elements


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """Modules of one class that repeat, or one leftover subtree."""

    path: str
    """The dotted name of the place that holds all members; empty for the model itself."""
    cls: type[nn.Module]
    """The class the members share, as the user wrote it."""
    members: tuple[nn.Module, ...]
    """The blocks in definition order."""
    names: tuple[str, ...]
    """The members' dotted names."""
    params: int
    """Elements in the members' parameters; a parameter that is also used outside its member counts for neither."""
    share: float
    """`params` as a fraction of the whole model's."""

    @property
    def repeats(self) -> bool:
        """Return whether this is a family of blocks and not a single leftover unit."""
        return len(self.members) > 1

    @property
    def named(self) -> list[tuple[str, nn.Module]]:
        """Names and members."""
        return list(zip(self.names, self.members))


def find_blocks(model: nn.Module, sample: object = None) -> list[BlockGroup]:
    """Return the block groups of a model in definition order.

    `sample` (a tensor, a tuple of arguments or a dict of keywords) allows one run on fake tensors where the structure
    leaves open whether modules in a list run one after another; parallel experts do not count as blocks of their block.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = nn.Sequential(nn.Embedding(10, 8), nn.TransformerEncoder(layer, 3))
    >>> [(group.path, group.cls.__name__, len(group.members)) for group in find_blocks(model)]
    [('1.layers', 'TransformerEncoderLayer', 3)]
    """
    root = unwrap(model)
    sizes = _Sizes(root)
    fake_run = None if sample is None else FakeRun(root, sample)
    families = [
        inner
        for family in find_families(root)
        for inner in _go_down(family, sizes, fake_run)
        if sizes.of(inner.members) > 0
    ]
    covered = sum(sizes.of(family.members) for family in families)
    if covered < _MIN_COVERAGE * sizes.total:
        families += _leftover_units(root, families, sizes, missing=_MIN_COVERAGE * sizes.total - covered)
    if not families:
        families = [Family(cls=user_class(root), names=("",), members=(root,), owner=root)]
    order = {module: index for index, module in enumerate(root.modules())}
    families.sort(key=lambda family: order[family.members[0]])
    return [_as_group(family, sizes) for family in families]


def repeated_blocks(model: nn.Module, sample: object = None) -> list[tuple[str, nn.Module]]:
    """Return name and module of every block of every family, in definition order; empty when no class repeats."""
    return [pair for group in find_blocks(model, sample) if group.repeats for pair in group.named]


def select_modules(model: nn.Module, what: object, *, where: str = "blocks") -> list[tuple[str, nn.Module]]:
    """Return what `what` selects, by name: "auto", a class, a class name, a dotted name or pattern, a module, or a list."""
    root = unwrap(model)
    if isinstance(what, str) and what == "auto":
        return [pair for group in find_blocks(root) for pair in group.named]
    wanted = list(what) if isinstance(what, list | tuple | set | frozenset) else [what]
    chosen: dict[str, nn.Module] = {}
    for item in wanted:
        found = {name: module for name, module in root.named_modules() if name and _matches(item, name, module)}
        if not found:
            classes = dict.fromkeys(group.cls.__name__ for group in find_blocks(root))
            others = dict.fromkeys(user_class(module).__name__ for module in root.modules() if module is not root)
            shown = item if isinstance(item, str) else getattr(item, "__name__", repr(item))
            raise ConfigError(
                unknown_name("module class or name", shown, [*classes, *others], where=where)
                + f" Repeated blocks of {type(root).__name__}: {', '.join(classes) or 'none'}."
            )
        chosen.update(found)
    order = {module: index for index, module in enumerate(root.modules())}
    return sorted(chosen.items(), key=lambda pair: order[pair[1]])


def _matches(item: object, name: str, module: nn.Module) -> bool:
    if isinstance(item, type):
        return isinstance(module, item)
    if isinstance(item, nn.Module):
        return module is item
    return user_class(module).__name__ == item or fnmatch.fnmatchcase(name, str(item))


class _Sizes:
    """Counts elements so that each parameter counts once, and for no module that shares it with the outside."""

    def __init__(self, root: nn.Module):
        self.total = sum(parameter.numel() for parameter in root.parameters())
        self.places = parameter_places(root)

    def own(self, module: nn.Module) -> int:
        """Return the elements of the parameters that are registered nowhere but inside this module."""
        inside = parameter_places(module)
        return sum(p.numel() for p, held in inside.items() if len(held) == len(self.places[p]))

    def of(self, modules: Iterable[nn.Module]) -> int:
        return sum(self.own(module) for module in modules)


def _go_down(family: Family, sizes: _Sizes, fake_run: FakeRun | None) -> list[Family]:
    """Return the family, or the families inside its members where those are the better units."""
    if max(sizes.own(member) for member in family.members) <= _GO_DOWN_SHARE * sizes.total:
        return [family]
    inner: dict[type[nn.Module], list[Family]] = {}
    for name, member in zip(family.names, family.members):
        for found in find_families(member, prefix=name):
            # A convolution with its norm is a layer: opening a block into layers would gain nothing.
            if max(map(num_matrices, found.members)) > 1 and runs_one_after_another(found, fake_run):
                inner.setdefault(found.cls, []).append(found)
    found_inside = {
        module for parts in inner.values() for part in parts for member in part.members for module in member.modules()
    }
    merged = [_across_stages(parts, family, found_inside) for parts in inner.values()]
    if sum(sizes.of(part.members) for part in merged) < _MIN_COVERAGE * sizes.of(family.members):
        return [family]
    return [deeper for part in merged for deeper in _go_down(part, sizes, fake_run)]


def _across_stages(parts: list[Family], outer: Family, taken: set[nn.Module]) -> Family:
    """Return one family with the blocks of all stages, also of those that have only one block and therefore no family."""
    known = {member: name for part in parts for name, member in zip(part.names, part.members)}
    cls, found = parts[0].cls, dict[nn.Module, str]()
    for prefix, stage in zip(outer.names, outer.members):
        here = {module: known[module] for module in stage.modules() if module in known}
        alike = ((f"{prefix}.{name}", m) for name, m in stage.named_modules() if user_class(m) is cls)
        lone = next(((name, module) for name, module in alike if module not in taken), None)
        if here:
            found |= here
        elif lone is not None:
            found[lone[1]] = lone[0]
    return Family(cls=cls, names=tuple(found.values()), members=tuple(found), owner=parts[0].owner)


def _leftover_units(root: nn.Module, families: list[Family], sizes: _Sizes, missing: float) -> list[Family]:
    """Return the largest subtrees outside the families that make up for what is missing."""
    members = {member for family in families for member in family.members}
    taken = {module for member in members for module in member.modules()}
    ancestors = {m for m in root.modules() if m not in members and not members.isdisjoint(m.modules())}
    smallest = max(sizes.total // _NUM_UNITS, _MIN_UNIT)
    units: list[tuple[str, nn.Module]] = []

    def cut(name: str, module: nn.Module, is_beside_family: bool) -> bool:
        """Collect units inside a module, or the module itself; return whether anything was taken."""
        is_above_family = module in ancestors
        if module in taken or (sizes.own(module) == 0 and not is_above_family):
            return False
        if is_above_family or sizes.own(module) > smallest:
            children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            taken_inside = [cut(key, child, is_above_family) for key, child in children]
            if any(taken_inside):
                return True
        if module is root or is_above_family or is_plain_container(module):
            return False
        if sizes.own(module) < smallest and not is_beside_family:
            return False
        units.append((name, module))
        return True

    cut("", root, False)
    units.sort(key=lambda unit: sizes.own(unit[1]), reverse=True)
    chosen = []
    for name, module in units:
        if missing <= 0 and families:
            break
        missing -= sizes.own(module)
        chosen.append(Family(cls=user_class(module), names=(name,), members=(module,), owner=module))
    return chosen


def _as_group(family: Family, sizes: _Sizes) -> BlockGroup:
    params, names = sizes.of(family.members), family.names
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*(name.split(".")[:-1] for name in names)))
    return BlockGroup(
        path=".".join(parts[0] for parts in common) if len(names) > 1 else names[0],
        cls=family.cls,
        members=family.members,
        names=names,
        params=params,
        share=params / sizes.total if sizes.total else 0.0,
    )
