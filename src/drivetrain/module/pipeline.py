"""Split a model into consecutive stages, each with its own part of the user's modules under the user's own names.

A stage begins at a block. Values that the code before a cut computes from parameters and the code after it needs are sent from stage to
stage. Values computed from the inputs alone (masks, positions) are computed again, because every rank of a pipeline holds the inputs.
Cuts balance the floating-point operations of a sample or, without one, the parameters outside embeddings. A parameter that is used on
both sides of a cut, such as a tied head, is held by each stage that uses it, and their gradients are summed.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.blocks import repeated_blocks
from drivetrain.module.pipeline_parts import RUNNING, StagePart, in_mode
from drivetrain.module.pipeline_tracing import FLOPS, VALUE, changed_copy, trace_chain
from drivetrain.module.probing import attributes_set
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
    model: nn.Module, num_stages: int, *, split: str | Sequence[str] = "auto", given: Mapping[str, object] | None = None
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
    paths = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    opened = {model, *map(model.get_submodule, paths)}
    graph = trace_chain(model, opened, given)
    _follow_mode(model, opened, graph, given)
    _replace_shape_only_values(model, graph)
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
    """Let dropout between blocks follow the mode of its stage; reject other code there that differs in evaluation."""
    with attributes_set((module, "training", not module.training) for module in opened):
        other = trace_chain(model, opened, given)
    for one, two in zip(_used(graph), _used(other)):
        name = getattr(one.target, "__name__", "")
        is_of_torch = one.target == two.target and getattr(nn.functional, name, None) is one.target
        if is_of_torch and one.kwargs.get("training") != two.kwargs.get("training"):
            for node in (one, two):
                node.args, node.target = (name, *node.args), in_mode
                node.kwargs = {name: value for name, value in node.kwargs.items() if name != "training"}
    if _steps_of(model, other) != _steps_of(model, graph):
        raise ConfigError(
            f"the forward of {type(model).__name__} behaves differently in training and evaluation between its blocks. Move the code "
            "that depends on self.training into its own module."
        )


def _used(graph: fx.Graph) -> list[fx.Node]:
    """Return the steps whose results are used, in order."""
    used, _ = _needed([node for node in graph.nodes if node.op == "output"], lambda node: False)
    return [node for node in graph.nodes if node in used]


def _steps_of(model: nn.Module, graph: fx.Graph) -> list[tuple[object, ...]]:
    """Return what a graph computes, without the names of its values."""
    numbers = {node: index for index, node in enumerate(_used(graph))}

    def named(node: fx.Node) -> object:
        # A tensor that the forward makes of constants has a new name in every trace.
        if node.op != "get_attr" or not str(node.target).startswith("_tensor_constant"):
            return str(node.target)
        value = getattr(model, str(node.target))
        return value.tolist() if type(value) is Tensor and not value.is_meta else str(value)

    return [
        (node.op, named(node), str(fx.node.map_arg((node.args, node.kwargs), lambda other: f"%{numbers[other]}")))
        for node in numbers
    ]


def _replace_shape_only_values(model: nn.Module, graph: fx.Graph) -> None:
    """Replace values of which a step uses only type and shape, as rotary embeddings do, by zeros that any stage can make."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and _sizes(node)]
    for node in list(graph.nodes):
        if node.op != "call_module" or VALUE not in node.meta:
            continue
        module = model.get_submodule(str(node.target))
        values = {a: a.meta.get(VALUE) for a in node.all_input_nodes if a.op != "placeholder"}
        given = [a for a, value in values.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if not given or next(module.parameters(), None) is not None or not _ignores(module, node, given):
            continue
        for argument in given:
            shape = _sizes(argument)
            rows = [one for one in inputs if _sizes(one)[0] == shape[0]] if shape else []
            if rows:
                source = max(rows, key=lambda one: sum(a == b for a, b in zip(_sizes(one), shape)))
                with graph.inserting_before(node):
                    zeros = graph.call_function(zeros_for, (source, shape, _sizes(source), argument.meta[VALUE].dtype))
                zeros.meta[VALUE] = argument.meta[VALUE]
                node.replace_input_with(argument, zeros)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Return the shape that a value has for the sample; empty for a number and what is not a tensor."""
    value = node.meta.get(VALUE)
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def zeros_for(source: Tensor, shape: tuple[int, ...], seen: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape, with the sizes of an input where they were those of the input when the model was traced."""
    sizes = [source.shape[i] if i < len(seen) and seen[i] == size else size for i, size in enumerate(shape)]
    return source.new_zeros((), dtype=RUNNING.get().compute_dtype or dtype).expand(sizes)


def _ignores(module: nn.Module, node: fx.Node, given: list[fx.Node]) -> bool:
    """Return whether a step gives the same for any values of some arguments: it is run twice, on random ones."""
    if any(tensor.is_meta for tensor in module.buffers()):
        return "rotary" in type(module).__name__.lower()

    def real(other: fx.Node) -> Any:
        value = other.meta[VALUE]
        if other in given:
            return torch.randn(value.shape).to(value.dtype)
        if isinstance(value, Tensor):
            return torch.arange(value.numel()).remainder(7).view(value.shape).to(value.dtype)
        return value

    results = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # forked: the numbers drawn here leave no trace
        for _ in range(2):
            try:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), real)
                out = tree_leaves(copy.deepcopy(module).cpu()(*args, **kwargs))
                results.append([x for x in out if isinstance(x, Tensor)])
            except Exception:  # it cannot be run on made-up values: it keeps the ones it has
                return False
    return bool(results[0]) and all(map(torch.equal, *results))


def _candidates(model: nn.Module, num_stages: int) -> list[str]:
    """Return the modules before which a cut may be: repeated blocks, or else all that hold parameters themselves."""
    blocks = [name for name, _ in repeated_blocks(model)]
    if len(blocks) >= num_stages:
        return blocks
    names = list(_layers(model, ""))
    if len(names) < num_stages:
        raise ConfigError(
            f"{type(model).__name__} has {len(names)} modules with parameters, too few for {num_stages} stages. Use a smaller pipe axis."
        )
    return names


def _layers(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of modules with parameters of their own; torch's layers of several parts run as one."""
    for name, child in module.named_children():
        is_container = isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        is_one = type(child).__module__.startswith("torch.nn.") and not is_container
        if next(child.parameters(recurse=is_one), None) is not None:
            yield prefix + name
        if not is_one:
            yield from _layers(child, f"{prefix}{name}.")


def _named(model: nn.Module, split: Sequence[str], num_stages: int) -> list[str]:
    modules = [name for name, _ in model.named_modules() if name]
    for name in split:
        if name not in modules:
            raise ConfigError(unknown_name("module", name, modules, where="pipeline_parallel split"))
    if len(set(split)) != len(split) or len(split) != num_stages - 1:
        raise ConfigError(
            f"split={list(split)} names {len(split)} modules; {num_stages} stages need {num_stages - 1} different ones, one for each stage "
            "but the first."
        )
    return list(split)


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
    sums = list(accumulate((item / total for item in work), initial=0.0))
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
    stage_of = {node: sum(cut <= index for cut in cuts) for index, node in enumerate(nodes)}
    again = _recomputable_values(model, nodes)
    wanted = [node for node in nodes if node.op == "output"]
    pieces: list[tuple[list[fx.Node], list[fx.Node], list[fx.Node]]] = []
    for stage in reversed(range(len(cuts) + 1)):
        inside, received = _needed(wanted, lambda node: stage_of[node] < stage and node not in again)  # noqa: B023
        from_before = [node for node in nodes if node in received]
        pieces.insert(0, ([node for node in nodes if node in inside], from_before, wanted))
        wanted = from_before
    parts = tuple(_part(model, *piece) for piece in pieces)
    parts[-1].hold(model, _unused(model, parts))
    work = [sum(_work(model, node) for node in piece[0]) for piece in pieces]
    inputs = frozenset(name for part in parts for name in part.inputs)
    ignored = {str(node.target).lstrip("*") for node in nodes if node.op == "placeholder" and not node.users}
    return Split(
        parts=parts,
        starts=tuple(str(nodes[cut].target) for cut in cuts),
        shares=tuple(item / (sum(work) or 1.0) for item in work),
        signature=inspect.signature(model.forward),
        inputs=inputs,
        unused=frozenset(ignored - inputs),
        tied=_tied(model, [piece[0] for piece in pieces]),
    )


def _unused(model: nn.Module, parts: Sequence[StagePart]) -> set[str]:
    """Return modules and tensors that no stage uses. One must hold them, or they could not be saved."""
    targets = {target for part in parts for target in part.targets}
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    found = set()
    for first, *others in names.values():
        if not any(name == target or name.startswith(f"{target}.") for name in (first, *others) for target in targets):
            owner = first.rpartition(".")[0]
            is_whole = bool(owner) and not any(target.startswith(f"{owner}.") for target in targets)
            found.add(owner if is_whole else first)
    return found


def _needed(wanted: list[fx.Node], is_received: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the steps to take for what is wanted, and what must be received for them."""
    inside: set[fx.Node] = set()
    received: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in inside or node in received:
            continue
        if is_received(node):
            received.add(node)
        else:
            inside.add(node)
            waiting += node.all_input_nodes
    return inside, received


def _recomputable_values(model: nn.Module, nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the values that any stage makes for itself: of inputs and buffers alone, or sizes of what it receives."""
    result: set[fx.Node] = set()
    for node in nodes:
        is_size = VALUE in node.meta and not any(isinstance(x, Tensor) for x in tree_leaves(node.meta[VALUE]))
        if node.op == "placeholder" or is_size:
            result.add(node)
        elif node.op == "get_attr":
            if not isinstance(attrgetter(str(node.target))(model), nn.Parameter):
                result.add(node)
        elif node.op == "output" or _is_random(model, node):
            continue
        elif all(argument in result for argument in node.all_input_nodes):
            module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
            if module is None or next(module.parameters(), None) is None:
                result.add(node)
    return result


def _is_random(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a step may draw random numbers, so that making its value twice would give two values."""
    if node.op == "call_module":
        modules = model.get_submodule(str(node.target)).modules()
        return any(isinstance(module, nn.modules.dropout._DropoutNd) for module in modules)
    target = node.args[0] if node.target is in_mode else node.args[1] if node.target is changed_copy else node.target
    name = str(getattr(target, "__name__", target))
    return any(word in name for word in ("rand", "dropout", "bernoulli", "multinomial", "normal"))


def _tied(model: nn.Module, steps: list[list[fx.Node]]) -> tuple[Mapping[int, str], ...]:
    """Return the parameters that several stages hold, by their names in each of them."""
    held: dict[int, dict[int, str]] = {}
    for stage, nodes in enumerate(steps):
        for node in nodes:
            path, found = str(node.target), []
            if node.op == "call_module":
                named = model.get_submodule(path).named_parameters(remove_duplicate=False)
                found = [(f"{path}.{name}", parameter) for name, parameter in named]
            elif node.op == "get_attr" and isinstance(parameter := attrgetter(path)(model), nn.Parameter):
                found = [(path, parameter)]
            for name, parameter in found:
                held.setdefault(id(parameter), {}).setdefault(stage, name)
    return tuple(names for names in held.values() if len(names) > 1)


def _part(model: nn.Module, inside: list[fx.Node], received: list[fx.Node], wanted: list[fx.Node]) -> StagePart:
    """Return the module of one stage."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"received_{node.name}") for node in received}
    inputs = {node: str(node.target).lstrip("*") for node in inside if node.op == "placeholder"}
    copies |= {node: graph.placeholder(name) for node, name in inputs.items()}
    for node in inside:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if wanted and wanted[0].op == "output":
        graph.output(fx.node.map_arg(wanted[0].args[0], copies.__getitem__))
    else:
        for node in received:  # what is only passed on is a new tensor
            if node in wanted:
                copies[node] = graph.call_method("view_as", (copies[node], copies[node]))
        graph.output(tuple(copies[node] for node in wanted))
    graph.lint()
    return StagePart(model, graph, [node.name for node in received], list(inputs.values()))
