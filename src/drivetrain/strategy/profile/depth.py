"""Run a deep model with fewer of its blocks: what one block adds is the difference between two depths, and the rest is a straight line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from drivetrain.module.blocks import BlockGroup
from drivetrain.strategy.profile.few_blocks import find_cuttable


def shortened_container(model: nn.Module, groups: Sequence[BlockGroup]) -> nn.ModuleList | nn.Sequential | None:
    """Return the list that holds all repeated blocks and nothing else, if they are of one shape; None where there is no such list."""
    families = find_cuttable(model, groups)
    if len(families) != 1 or sum(group.repeats for group in groups) != 1:
        return None
    container = model.get_submodule(families[0].container)
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(families[0].names):
        return None
    return container


@contextmanager
def with_depth(container: nn.Module, depth: int) -> Iterator[None]:
    """Leave only the first blocks of a list for a while."""
    blocks = dict(container._modules)
    for name in list(blocks)[depth:]:
        del container._modules[name]
    try:
        yield
    finally:
        container._modules.clear()
        container._modules.update(blocks)
