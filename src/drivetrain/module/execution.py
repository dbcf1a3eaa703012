"""Do the members of a family run one after another, or side by side like the experts of a mixture?

The structure answers most cases: nn.Sequential is a chain, and a list beside a layer that gives one number per member
is routed. Where a sample is given, the model runs once on fake tensors (no memory, no arithmetic) and the autograd
graph shows whether each member's input depends on the output of the one before.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.module.families import Family


def runs_one_after_another(family: Family, fake_run: "FakeRun | None" = None) -> bool:
    """Return whether the family's members form a chain."""
    if family.is_chain:
        return True
    seen = fake_run.shows_chain(family.members) if fake_run is not None else None
    return not _has_router(family) if seen is None else seen


def _has_router(family: Family) -> bool:
    """Return whether something beside the members, in the module that runs them, scores exactly as many choices as there
    are."""
    count, inside = len(family.members), {module for member in family.members for module in member.modules()}
    weights = [parameter for parameter in family.owner._parameters.values() if parameter is not None]
    for child in family.owner.children():
        if child not in inside and not any(module in inside for module in child.modules()):
            weights += child.parameters()
    return any(weight.ndim == 2 and weight.shape[0] == count != weight.shape[1] for weight in weights)


class FakeRun:
    """One run of a model on fake tensors, made when the first question is asked."""

    def __init__(self, root: nn.Module, sample: object):
        self.root, self.sample = root, sample
        self._calls: dict[nn.Module, tuple[list[object], list[object]]] | None = (
            None  # graph nodes into and out of a module
        )

    def shows_chain(self, members: tuple[nn.Module, ...]) -> bool | None:
        """Return whether each member's input depends on the output of the one before; None when the run does not show it."""
        if self._calls is None:
            self._calls = self._run()
        calls = [self._calls[member] for member in members if member in self._calls]
        if len(calls) < 2:
            return None
        return all(_reaches(into, set(out)) for (_, out), (into, _) in pairwise(calls))

    def _run(self) -> dict[nn.Module, tuple[list[object], list[object]]]:
        calls: dict[nn.Module, tuple[list[object], list[object]]] = {}

        def record(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            calls.setdefault(module, (_nodes((args, kwargs)), _nodes(output)))

        handles = [module.register_forward_hook(record, with_kwargs=True) for module in self.root.modules()]
        rng = torch.get_rng_state()
        try:
            _call_on_fake_tensors(self.root, self.sample)
        except Exception:  # shapes that depend on data, or code that fake tensors cannot follow: the structure decides
            return {}
        finally:
            torch.set_rng_state(rng)
            for handle in handles:
                handle.remove()
        return calls


def _call_on_fake_tensors(root: nn.Module, sample: object) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor.detach())

        state = {name: fake(p).requires_grad_(p.is_floating_point()) for name, p in root.named_parameters()}
        state |= {name: fake(buffer) for name, buffer in root.named_buffers()}
        inputs = tree_map_only(Tensor, fake, sample)
        kwargs = inputs if isinstance(inputs, dict) else {}
        args = () if isinstance(inputs, dict) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        torch.func.functional_call(root, state, args, kwargs, tie_weights=True)


def _nodes(value: object) -> list[object]:
    from torch.utils._pytree import tree_leaves

    return [leaf.grad_fn for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]


def _reaches(starts: Iterable[Any], goals: set[Any]) -> bool:
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
