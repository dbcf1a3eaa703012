"""Split a model into consecutive stages, each with its own part of the user's modules under the user's own names.

A stage begins at a block. Values that the code before a cut computes from parameters and the code after it needs are sent from
stage to stage. Values computed from the inputs alone (masks, positions) are computed again, because every rank of a pipeline
holds the inputs. Cuts balance the floating-point operations of a sample or, without one, the parameters; embeddings do not count,
because a lookup costs almost nothing. A parameter that is used on both sides of a cut, such as a head tied to the embedding, is
held by each stage that uses it, and their gradients are summed.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.blocks import repeated_blocks
from drivetrain.module.pipeline_parts import COMPUTED_IN, StagePart, in_mode
from drivetrain.module.pipeline_tracing import FLOPS, VALUE, changed_copy, trace_chain
from drivetrain.module.wrapping import unwrap


@dataclass(frozen=True, kw_only=True)
class Split:
    """A model split into stages."""

    parts: tuple[StagePart, ...]
    starts: tuple[str, ...]
    """The module before which each stage but the first begins."""
    shares: tuple[float, ...]
    """Each stage's share of the work, as it was estimated."""
    signature: inspect.Signature
    """That of the model's forward."""
    inputs: frozenset[str]
    """Arguments that some stage uses."""
    unused: frozenset[str]
    """Arguments that no stage uses."""
    tied: tuple[Mapping[int, str], ...] = ()
    """Of each parameter that several stages hold, its name in each of them."""


def split_model(
    model: nn.Module,
    num_stages: int,
    *,
    split: str | Sequence[str] = "auto",
    given: Mapping[str, object] | None = None,
) -> Split:
    """Split a model into stages: at the modules that `split` names, or where the work is balanced.

    `given` holds the arguments of a sample call by name.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    >>> split = split_model(model, 2)
    >>> split.starts, [name for name, _ in split.parts[1].named_parameters()]
    (('2.0',), ['2.0.weight', '2.0.bias', '3.0.weight', '3.0.bias'])
    """
    model = unwrap(model)
    names = _candidates(model, num_stages) if isinstance(split, str) else _named(model, split, num_stages)
    opened = _ancestors(model, names)
    graph = trace_chain(model, opened, given)
    _follow_mode(model, opened, graph, given)
    _free_from_values(model, graph)
    nodes = list(graph.nodes)
    places = _places(model, nodes, names, are_given=not isinstance(split, str))
    if isinstance(split, str):
        cuts = _balanced(model, nodes, sorted(places.values()), num_stages)
    else:
        cuts = [places[name] for name in names]
        if cuts != sorted(cuts):
            raise ConfigError(
                f"split={list(split)}: the model runs these modules in another order. List them in the order of execution."
            )
    return _cut(model, nodes, cuts)


def _follow_mode(model: nn.Module, opened: set[nn.Module], graph: fx.Graph, given: Mapping[str, object] | None) -> None:
    """Let dropout between blocks follow the mode of its stage; reject other code there that does something else in evaluation."""
    modes = [(module, module.training) for module in opened]
    for module, mode in modes:
        module.training = not mode
    try:
        other = trace_chain(model, opened, given)
    finally:
        for module, mode in modes:
            module.training = mode
    for one, two in zip(_used(graph), _used(other)):
        name = getattr(one.target, "__name__", "")
        is_of_torch = one.target == two.target and getattr(nn.functional, name, None) is one.target
        if is_of_torch and one.kwargs.get("training") != two.kwargs.get("training"):
            for node in (one, two):
                node.args, node.target = (name, *node.args), in_mode
                node.kwargs = {name: value for name, value in node.kwargs.items() if name != "training"}
    if _steps_of(other) != _steps_of(graph):
        raise ConfigError(
            f"the forward of {type(model).__name__} behaves differently in training and evaluation between its "
            f"blocks. Move the code that depends "
            "on self.training into its own module."
        )


def _used(graph: fx.Graph) -> list[fx.Node]:
    """Return the steps whose results are used, in order."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    used, waiting = {output}, [output]
    while waiting:
        more = [node for node in waiting.pop().all_input_nodes if node not in used]
        used.update(more)
        waiting += more
    return [node for node in graph.nodes if node in used]


def _steps_of(graph: fx.Graph) -> list[tuple[object, ...]]:
    """Return what a graph computes, without the names of its values."""
    numbers = {node: index for index, node in enumerate(_used(graph))}
    return [
        (node.op, str(node.target), str(fx.node.map_arg((node.args, node.kwargs), lambda other: f"%{numbers[other]}")))
        for node in numbers
    ]


def _free_from_values(model: nn.Module, graph: fx.Graph) -> None:
    """Let steps that look at the type and the shape of a value alone, as rotary embeddings do, be made again in every stage.

    What such a step is given is replaced by zeros of that type and shape, which any stage can make of the inputs.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and is_tensor(node.meta.get(VALUE))]
    for node in list(graph.nodes):
        if node.op != "call_module" or VALUE not in node.meta:
            continue
        module = model.get_submodule(str(node.target))
        given = [a for a in node.all_input_nodes if a.op != "placeholder" and is_tensor(a.meta.get(VALUE))]
        given = [a for a in given if a.meta[VALUE].is_floating_point()]
        if not given or next(module.parameters(), None) is not None or not _ignores(module, node, given):
            continue
        for argument in given:
            shape = tuple(argument.meta[VALUE].shape)
            rows = [one for one in inputs if one.meta[VALUE].shape[:1] == shape[:1] and one.meta[VALUE].dim() > 0]
            if rows:
                source = max(rows, key=lambda one: _same_sizes(one, shape))
                with graph.inserting_before(node):
                    zeros = graph.call_function(zeros_for, (source, shape, _sizes(source), argument.meta[VALUE].dtype))
                zeros.meta[VALUE] = argument.meta[VALUE]
                node.replace_input_with(argument, zeros)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, Tensor)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta[VALUE].shape)


def _same_sizes(node: fx.Node, shape: tuple[int, ...]) -> int:
    return sum(first == second for first, second in zip(_sizes(node), shape))


def zeros_for(source: Tensor, shape: tuple[int, ...], seen: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape, with the sizes of an input where they were those of the input when the model was traced."""
    sizes = [source.shape[i] if i < len(seen) and seen[i] == size else size for i, size in enumerate(shape)]
    return source.new_zeros((), dtype=COMPUTED_IN.get() or dtype).expand(sizes)


def _ignores(module: nn.Module, node: fx.Node, given: list[fx.Node]) -> bool:
    """Return whether a step gives the same for any values of some arguments: it is run twice, on random ones."""
    if any(tensor.is_meta for tensor in module.buffers()):
        return "rotary" in type(module).__name__.lower()

    def real(other: fx.Node) -> Any:
        value = other.meta[VALUE]
        if other in given:
            return torch.randn(value.shape).to(value.dtype)
        whole = torch.arange(max(1, value.numel())).remainder(7)[: value.numel()] if is_tensor(value) else value
        return whole.view(value.shape).to(value.dtype) if is_tensor(value) else value

    results = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # forked: the numbers drawn here leave no trace
        for _ in range(2):
            try:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), real)
                results.append([x for x in tree_leaves(copy.deepcopy(module).cpu()(*args, **kwargs)) if is_tensor(x)])
            except Exception:  # it cannot be run on made-up values: it keeps the ones it has
                return False
    return bool(results[0]) and all(map(torch.equal, *results))


def _candidates(model: nn.Module, num_stages: int) -> list[str]:
    """Return the modules before which a cut may stand: repeated blocks, or else all that hold parameters themselves."""
    blocks = [name for name, _ in repeated_blocks(model)]
    if len(blocks) >= num_stages:
        return blocks
    own = [
        name
        for name, module in model.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    names: list[str] = []
    for name in own:
        parents = [model.get_submodule(name.rsplit(".", depth)[0]) for depth in range(1, name.count(".") + 1)]
        compound = [parent for parent in parents if _is_compound_layer(parent)]
        if compound:  # torch's own layers of several parts are run as one
            name = next(path for path, module in model.named_modules() if module is compound[-1])
        if name not in names:
            names.append(name)
    if len(names) < num_stages:
        raise ConfigError(
            f"{type(model).__name__} has {len(names)} modules with parameters, too few for {num_stages} stages. Use a smaller pipe axis."
        )
    return names


def _is_compound_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )


def _named(model: nn.Module, split: Sequence[str], num_stages: int) -> list[str]:
    modules = [name for name, _ in model.named_modules() if name]
    for name in split:
        if name not in modules:
            raise ConfigError(unknown_name("module", name, modules, where="pipeline_parallel split"))
    if len(set(split)) != len(split) or len(split) != num_stages - 1:
        raise ConfigError(
            f"split={list(split)} names {len(split)} modules; {num_stages} stages need {num_stages - 1} different ones, besides the first "
            f"stage."
        )
    return list(split)


def _ancestors(model: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    paths = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return {model, *(model.get_submodule(path) for path in paths)}


def _places(model: nn.Module, nodes: list[fx.Node], names: Sequence[str], are_given: bool) -> dict[str, int]:
    """Return where each module is first run, of those that are; all names of one module are the same place."""
    first: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_module":
            first.setdefault(id(model.get_submodule(str(node.target))), index)
    places: dict[str, int] = {}
    for name in names:
        place = first.get(id(model.get_submodule(name)))
        if place is not None:
            places[name] = place
        elif are_given:
            raise ConfigError(f"the module {name} is not called by the model's forward, so no stage can start at it.")
    return places


def _balanced(model: nn.Module, nodes: list[fx.Node], places: list[int], num_stages: int) -> list[int]:
    """Return the places to cut at: the largest stage is as small as can be, then the stages as even as can be."""
    places = sorted(set(places))
    if places and not any(_work(model, node) for node in nodes[: places[0]]):
        places = places[1:]  # nothing to do before the first block
    if len(places) < num_stages - 1:
        raise ConfigError(
            f"{type(model).__name__} can be cut in {len(places)} places, too few for {num_stages} stages. Use a smaller pipe axis."
        )
    edges = [0, *places, len(nodes)]
    work = [sum(_work(model, node) for node in nodes[a:b]) for a, b in pairwise(edges)]
    total = sum(work) or 1.0
    sums = [0.0]
    for item in work:
        sums.append(sums[-1] + item / total)
    best: list[tuple[float, float, tuple[int, ...]]] = [(sums[end], sums[end] ** 2, ()) for end in range(len(sums))]
    for stages in range(2, num_stages + 1):
        best = [
            min(
                (
                    (max(best[k][0], sums[end] - sums[k]), best[k][1] + (sums[end] - sums[k]) ** 2, (*best[k][2], k))
                    for k in range(stages - 1, end)
                ),
                default=(float("inf"), float("inf"), ()),
            )
            for end in range(len(sums))
        ]
    return [edges[k] for k in best[-1][2]]


def _work(model: nn.Module, node: fx.Node) -> float:
    """Return about how much work a step is: counted operations, or else parameters outside embeddings."""
    if node.op != "call_module":
        return 0.0
    if FLOPS in node.meta:
        return float(node.meta[FLOPS])
    modules = model.get_submodule(str(node.target)).modules()
    lookups = (nn.Embedding, nn.EmbeddingBag)
    return float(sum(p.numel() for m in modules if not isinstance(m, lookups) for p in m.parameters(recurse=False)))


# Taking the graph apart.


def _cut(model: nn.Module, nodes: list[fx.Node], cuts: list[int]) -> Split:
    num_stages = len(cuts) + 1
    stage_of = {node: sum(cut <= index for cut in cuts) for index, node in enumerate(nodes)}
    order = {node: index for index, node in enumerate(nodes)}
    again = _made_again(model, nodes)
    (output,) = [node for node in nodes if node.op == "output"]
    wanted: list[fx.Node] = [output]
    pieces: list[tuple[list[fx.Node], list[fx.Node], list[fx.Node]]] = []
    for stage in reversed(range(num_stages)):
        inside, received = _needed(wanted, stage, stage_of, again)
        in_order = sorted(inside, key=order.__getitem__)
        from_before = sorted(received, key=order.__getitem__)
        pieces.append((in_order, from_before, wanted))
        wanted = from_before
    pieces.reverse()
    tied = _tied(model, [piece[0] for piece in pieces])
    parts = tuple(_part(model, *piece) for piece in pieces)
    work = [sum(_work(model, node) for node in piece[0]) for piece in pieces]
    signature = inspect.signature(model.forward)
    inputs = frozenset(name for part in parts for name in part.inputs)
    traced = {str(node.target).lstrip("*") for node in nodes if node.op == "placeholder"}
    return Split(
        parts=parts,
        starts=tuple(str(nodes[cut].target) for cut in cuts),
        shares=tuple(item / (sum(work) or 1.0) for item in work),
        signature=signature,
        inputs=inputs,
        unused=frozenset(node_name for node_name in traced - inputs if _is_unused(nodes, node_name)),
        tied=tied,
    )


def _is_unused(nodes: list[fx.Node], name: str) -> bool:
    (node,) = [node for node in nodes if node.op == "placeholder" and str(node.target).lstrip("*") == name]
    return not node.users


def _needed(
    wanted: list[fx.Node], stage: int, stage_of: Mapping[fx.Node, int], again: set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the steps a stage must take for what is wanted of it, and what it must receive."""
    inside: set[fx.Node] = set()
    received: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in inside or node in received:
            continue
        if stage_of[node] < stage and node not in again:
            received.add(node)
        else:
            inside.add(node)
            waiting += node.all_input_nodes
    return inside, received


def _made_again(model: nn.Module, nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the values that any stage makes for itself: of inputs and buffers alone, or sizes of what it receives."""
    result: set[fx.Node] = set()
    for node in nodes:
        value = node.meta.get(VALUE)
        if node.op == "placeholder" or (VALUE in node.meta and not _holds_tensors(value)):
            result.add(node)
        elif node.op == "get_attr":
            if not isinstance(_attribute(model, str(node.target)), nn.Parameter):
                result.add(node)
        elif node.op == "output" or _is_random(model, node):
            continue
        elif all(argument in result for argument in node.all_input_nodes):
            module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
            if module is None or next(module.parameters(), None) is None:
                result.add(node)
    return result


def _holds_tensors(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _is_random(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a step may draw random numbers, so that making its value twice would give two values."""
    if node.op == "call_module":
        return any(
            isinstance(m, nn.modules.dropout._DropoutNd) for m in model.get_submodule(str(node.target)).modules()
        )
    target = node.args[0] if node.target is in_mode else node.args[1] if node.target is changed_copy else node.target
    name = str(getattr(target, "__name__", target))
    return any(word in name for word in ("rand", "dropout", "bernoulli", "multinomial", "normal"))


def _attribute(model: nn.Module, path: str) -> object:
    found: Any = model
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _tied(model: nn.Module, steps: list[list[fx.Node]]) -> tuple[Mapping[int, str], ...]:
    """Return the parameters that several stages hold, by their names in each of them."""
    held: dict[int, dict[int, str]] = {}
    for stage, nodes in enumerate(steps):
        for node in nodes:
            path, found = str(node.target), []
            if node.op == "call_module":
                named = model.get_submodule(path).named_parameters(remove_duplicate=False)
                found = [(f"{path}.{name}", parameter) for name, parameter in named]
            elif node.op == "get_attr" and isinstance(parameter := _attribute(model, path), nn.Parameter):
                found = [(path, parameter)]
            for name, parameter in found:
                held.setdefault(id(parameter), {}).setdefault(stage, name)
    return tuple(names for names in held.values() if len(names) > 1)


def _part(model: nn.Module, inside: list[fx.Node], received: list[fx.Node], wanted: list[fx.Node]) -> StagePart:
    """Return the module of one stage."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"received_{node.name}") for node in received}
    inputs = [node for node in inside if node.op == "placeholder"]
    copies |= {node: graph.placeholder(str(node.target).lstrip("*")) for node in inputs}
    for node in inside:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if wanted and wanted[0].op == "output":
        graph.output(fx.node.map_arg(wanted[0].args[0], copies.__getitem__))
    else:
        passed = {
            node: graph.call_method("view_as", (copies[node], copies[node])) for node in wanted if node in received
        }
        graph.output(tuple(passed.get(node, copies[node]) for node in wanted))
    graph.lint()
    return StagePart(model, graph, [node.name for node in received], [str(node.target).lstrip("*") for node in inputs])
