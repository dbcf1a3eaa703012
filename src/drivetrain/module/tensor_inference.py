"""Find out how a model's matrices can be split over ranks, for models without a written plan.

One block of each family runs on made-up weights. A layer whose input comes from layers that may be split along their outputs (`colwise`)
is split along its inputs (`rowwise`), and closes the pair (Shoeybi et al., 2019, arXiv 1909.08053). Then the block runs once for every
rank with that rank's share of the pair's weights, and the shares of the result must add up to the whole. This rejects code that counts
heads or features globally, queries, keys and values in one matrix, a norm over split features, and heads that do not divide. A pair with
parameters of its own in between is not split either, because their gradients would be partial.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.core.display import format_bytes
from drivetrain.core.errors import first_line
from drivetrain.module.blocks import find_blocks
from drivetrain.module.probing import attributes_set, tensors_in
from drivetrain.module.tensor_parallel import features, is_splittable, weight_dim
from drivetrain.module.tensor_trials import BlockTrial, agree, inputs_of_blocks, isolated_trial, structure_of

MOST_TRIED = 2**28
"""Parameters of the largest block that is tried; it runs on real weights in float32, here of 1 GiB."""
_ATTRIBUTE = "_feeds"  # which open layers a tensor was computed from


@dataclass(kw_only=True)
class InferredPlan:
    """The result: the style of each layer by dotted name, and why others are not split."""

    styles: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class _Pair(NamedTuple):
    """Layers that are split along outputs, and those that take these outputs in."""

    sources: set[str]
    sinks: set[str]


def infer_tp_plan(model: nn.Module, size: int) -> InferredPlan:
    """Return how the blocks of a model can be split over `size` ranks. The remarks of an empty plan give the reason."""
    plan = InferredPlan()
    families = [family for family in find_blocks(model) if family.repeats]
    if not families:
        plan.remarks.append("there are no repeated blocks")
        return plan
    inputs = inputs_of_blocks(model, families)
    for family in families:
        known: dict[object, dict[str, str]] = {}
        for name, block in family.named:
            structure = structure_of(block)
            if structure not in known:
                known[structure] = _infer_block(name, block, size, inputs.get(family.members[0]), plan.remarks)
            plan.styles.update({f"{name}.{layer}": style for layer, style in known[structure].items()})
    order = [name for name, _ in model.named_modules()]  # every rank must split in one order
    plan.styles = {name: plan.styles[name] for name in order if name in plan.styles}
    return plan


def _infer_block(name: str, block: nn.Module, size: int, given: Any, remarks: list[str]) -> dict[str, str]:
    """Return the styles of a block's layers, by their names inside it."""
    count = sum(parameter.numel() for parameter in block.parameters())
    if count > MOST_TRIED:
        remarks.append(
            f"{name} was not tried, because its {count / 1e6:.0f} million parameters would take {format_bytes(4 * count)}"
        )
        return {}
    with isolated_trial(block):
        try:
            trial = _SplitTrial(block, given)
        except Exception as error:  # the block needs other arguments, or code that cannot be followed
            remarks.append(f"{name} could not be tried ({type(error).__name__}: {first_line(error)})")
            return {}
        styles: dict[str, str] = {}
        for pair in trial.pairs:
            reason = trial.why_not(pair, size)
            if reason is None:
                styles |= dict.fromkeys(pair.sources, "colwise") | dict.fromkeys(pair.sinks, "rowwise")
            else:
                layers = ", ".join(sorted(pair.sources | pair.sinks))
                remarks.append(f"{name}: {layers} are not split, because {reason}")
        return styles


class _SplitTrial(BlockTrial):
    """One block: how it runs whole, and how it would run split."""

    def __init__(self, block: nn.Module, given: Any):
        super().__init__(block, given)
        self.layers = {name: module for name, module in block.named_modules() if is_splittable(module)}
        self.results: dict[str, list[Tensor]] = {}
        """What each layer returned, call by call, when nothing was split."""
        self.inside: set[str] = set()
        """Layers whose outputs met other parameters."""
        self.pairs = self._follow()

    def _follow(self) -> list[_Pair]:
        """Run the block whole and pair its layers by what reaches them, in the order in which they run."""
        closed_by: dict[str, set[str]] = {}  # sinks and the sources they close
        own = {name for layer in self.layers for name in (f"{layer}.weight", f"{layer}.bias")}
        others = {key for key, name in self.parameters().items() if name not in own}
        with ExitStack() as hooks:
            for name, layer in self.layers.items():

                def before(module: nn.Module, args: Any, name: str = name) -> None:
                    feeds: frozenset[str] = getattr(args[0], _ATTRIBUTE, frozenset())
                    open_sources = {source for source in feeds if source not in closed_by}
                    if open_sources and name not in closed_by:
                        closed_by[name] = open_sources

                def after(module: nn.Module, args: object, out: Tensor, name: str = name) -> None:
                    self.results.setdefault(name, []).append(out.detach().clone())
                    setattr(out, _ATTRIBUTE, frozenset({name}))

                hooks.enter_context(layer.register_forward_pre_hook(before))
                hooks.enter_context(layer.register_forward_hook(after))
            hooks.enter_context(_DependencyTracker(others, self.inside))
            self.whole = self.call(self.state, self.args, self.kwargs)
        return _pairs(closed_by)

    def why_not(self, pair: _Pair, size: int) -> str | None:
        """Return why a pair cannot be split over so many ranks, or None if it can."""
        if pair.sources & self.inside:
            return "parameters between them would have partial gradients"
        for name in pair.sources | pair.sinks:
            if features(self.layers[name], "colwise" if name in pair.sources else "rowwise") % size:
                return f"the features of {name} do not divide over {size} ranks"
        if any(len(self.results.get(name, ())) != 1 for name in pair.sinks):
            return "a layer runs more than once"
        shares: dict[str, list[Tensor]] = {name: [] for name in pair.sinks}
        for rank in range(size):
            try:
                outputs = self._run_share(pair, rank, size, shares)
            except Exception as error:  # whatever a model raises about sizes, assertions among it
                return f"the code between them uses the global number of features ({first_line(error)})"
            if not agree(self.whole, outputs):
                return "their outputs are used elsewhere too"
        for name, parts in shares.items():
            bias = self.state.get(f"{name}.bias")
            total = sum(parts[1:], parts[0])
            if not agree(self.results[name], [total if bias is None else total + bias]):
                return "the partial results do not add up to the full result: the code between them mixes features of different ranks"
        return None

    def _run_share(self, pair: _Pair, rank: int, size: int, shares: dict[str, list[Tensor]]) -> list[Tensor]:
        """Run the block as one rank would; after each sink go on with the whole result, as if the shares had been added."""
        state = dict(self.state)
        for name in pair.sources | pair.sinks:
            style = "colwise" if name in pair.sources else "rowwise"
            weight, bias = f"{name}.weight", f"{name}.bias"
            state[weight] = _share(state[weight], weight_dim(self.layers[name], style), rank, size)
            if bias in state:
                is_split = style == "colwise"
                state[bias] = _share(state[bias], 0, rank, size) if is_split else torch.zeros_like(state[bias])
        # Layers that remember their width (transformers' Conv1D) have one rank's share of it.
        sources = [self.layers[name] for name in pair.sources]
        wide: list[Any] = [layer for layer in sources if not isinstance(layer, nn.Linear)]
        with ExitStack() as hooks, attributes_set((layer, "nf", layer.nf // size) for layer in wide):
            for name in pair.sinks:

                def after(module: nn.Module, args: object, out: Tensor, name: str = name) -> Tensor:
                    shares[name].append(out.detach().clone())
                    return self.results[name][0].view_as(out).clone()

                hooks.enter_context(self.layers[name].register_forward_hook(after))
            return self.call(state, self.args, self.kwargs)


class _DependencyTracker(TorchFunctionMode):
    """Notes on every tensor from which layers it was computed, and which of them met other parameters on the way."""

    def __init__(self, others: set[int], inside: set[str]):
        super().__init__()
        self.others, self.inside = others, inside

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs))
        feeds = frozenset().union(*(getattr(x, _ATTRIBUTE, frozenset()) for x in tensors))
        if feeds:
            if any(id(x) in self.others for x in tensors):
                self.inside |= feeds
            for x in tensors_in(out):
                setattr(x, _ATTRIBUTE, feeds)
        return out


def _pairs(closed_by: Mapping[str, set[str]]) -> list[_Pair]:
    """Return the pairs of sinks and their sources; sinks that share a source are one."""
    pairs: list[_Pair] = []
    for sink, sources in closed_by.items():
        joined = [pair for pair in pairs if pair.sources & sources]
        pairs = [pair for pair in pairs if pair not in joined]
        pairs.append(_Pair(sources.union(*(p.sources for p in joined)), {sink}.union(*(p.sinks for p in joined))))
    return pairs


def _share(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, dim)[rank].contiguous()
