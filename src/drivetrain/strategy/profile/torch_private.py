"""The only file that uses private parts of torch: fake tensors, dispatch keys, operation counts, ahead-of-time capture.

The docstring of each function names what it needs. If that is missing, it raises `PrivateFeatureMissing`, and callers fall back
to closed forms. Nothing else in this folder imports a name with an underscore from torch.
"""

import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from types import CodeType

    from torch._ops import OpOverload as Operation
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import GraphModule, Node


class PrivateFeatureMissing(RuntimeError):
    """This version of torch lacks something that the profile uses."""


def fake_mode() -> "FakeTensorMode":
    """Return a mode in which tensors have shapes and no memory, on a fake CPU. Enter it with `with`."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise PrivateFeatureMissing(f"no fake tensors in torch {torch.__version__}") from error
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    """Return whether a value is a fake tensor (or a wrapper of one, while a graph is captured)."""
    from torch._guards import detect_fake_mode

    return isinstance(value, Tensor) and detect_fake_mode(value) is not None


def faked(mode: "FakeTensorMode", tensor: Tensor) -> Tensor:
    """Return a fake tensor on the fake CPU, with the shape of a tensor on any device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    with mode, torch.no_grad():
        if tensor.layout is torch.strided:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")


def operation_flops(function: "Operation", args: tuple, kwargs: Mapping[str, object], result: object) -> float:
    """Return the floating-point operations of one dispatched operation; 0 except for products, convolutions and attention."""
    from torch.utils.flop_counter import flop_registry

    packet = function._overloadpacket
    if "scaled_dot_product" in str(packet):
        is_backward = "backward" in str(packet)
        query, key, value = args[1:4] if is_backward else args[:3]
        return _attention_flops(query, key, value, is_backward)
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, is_backward: bool) -> float:
    """Return the operations of attention: two products forward, five backward; keys and values may be shared by groups of heads.

    torch's own formulas ask for as many keys as queries, in some releases.
    """
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    widths = 3 * query.shape[-1] + 2 * value.shape[-1] if is_backward else query.shape[-1] + value.shape[-1]
    return 2.0 * scores * widths


def is_view_operation(function: "Operation") -> bool:
    """Return whether an operation returns a view of its input and moves no memory."""
    return bool(function.is_view) or function._schema.name in _VIEW_LIKE


_VIEW_LIKE = frozenset(
    {"aten::_unsafe_view", "aten::detach", "aten::alias", "aten::_reshape_alias", "aten::lift_fresh"}
)


Rule = Callable[..., Any]
"""Takes the operation and its arguments, and returns the result it would have on an accelerator."""


@contextmanager
def operation_rules(rules: Iterable[tuple[str, str, Rule]]) -> Iterator[None]:
    """Change how operations on fake CPU tensors behave: (name, dispatch key, rule). Real tensors are not affected.

    Kernels are registered for the time of the context and removed after it. An operation
    that this torch does not have, or has such a kernel for, is left out.
    """
    library, changed = torch.library.Library("aten", "IMPL"), []
    try:
        for name, key, rule in rules:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operation is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                changed.append(operation)
                library.impl(name, _kernel(operation, key, rule), key)
        yield
    finally:
        library._destroy()
        for operation in changed:  # tracing remembers which kernel it found, and would look for one that is gone
            operation._dispatch_cache.clear()


def _kernel(operation: "Operation", key: str, rule: Rule) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    is_autocast = key.startswith("Autocast")

    def kernel(*args: object, **kwargs: object) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if is_autocast:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                if tensors and is_fake(tensors[0]):
                    return rule(operation, *args, **kwargs)
                return operation(*args, **kwargs)
        if tensors and is_fake(tensors[0]):
            return rule(operation, *args, **kwargs)
        return operation.decompose(*args, **kwargs)

    return kernel


class _CaptureDone(Exception):
    """Carries what was found out of torch's machinery, which is then not asked to go on."""

    def __init__(self, saved: float):
        self.saved = saved


Partition = Callable[..., "tuple[GraphModule, GraphModule]"]
"""Cuts a joint graph into forward and backward."""


def _partitioner() -> Partition:
    try:
        from torch._functorch.partitioners import min_cut_rematerialization_partition
    except ImportError as error:
        raise PrivateFeatureMissing(f"no ahead-of-time capture in torch {torch.__version__}") from error
    return min_cut_rematerialization_partition


def _unrun(gm: "GraphModule", example_inputs: object) -> object:
    """Stand for a compiler that compiles nothing."""
    return gm


def captured_saved_bytes(function: Callable[..., object], inputs: list[Tensor], round_to: int = 512) -> float:
    """Return the bytes that a compiled forward pass keeps for backward, beyond its inputs.

    The joint graph is traced on fake tensors with inductor's decompositions and cut by the min-cut partitioner, as `torch.compile`
    does; nothing is compiled or run. `inputs` are fake tensors, those that require gradients are leaves.
    """
    cut = _partitioner()
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    def partition(joint: "GraphModule", joint_inputs: object, **settings: object) -> "tuple[GraphModule, GraphModule]":
        forward, _ = cut(joint, joint_inputs, **settings)
        raise _CaptureDone(_saved_outputs(forward, slice(settings["num_fwd_outputs"], None), round_to))

    captured = aot_function(
        function,
        fw_compiler=_unrun,  # its protocol also names what only inductor reads
        bw_compiler=_unrun,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    try:
        try:
            captured(*inputs)
        except AttributeError:  # what poolings decompose with looks this up unimported; it takes a second to load
            if "torch._inductor.lowering" in sys.modules:
                raise
            importlib.import_module("torch._inductor.lowering")
            captured(*inputs)
    except _CaptureDone as found:
        return found.saved
    raise PrivateFeatureMissing(
        "the capture of a compiled forward pass returned without a graph: nothing requires a gradient"
    )


def traced_saved_bytes(function: Callable[..., Tensor], inputs: object, round_to: int = 512) -> float:
    """Return the same from the compiler's own front end, which follows code that tracing cannot and may make several graphs.

    What a graph returns to the next one counts as kept. What runs between graphs runs on fake tensors and is not counted. Nothing is
    compiled, and the compiler forgets what it saw here.
    """
    cut = _partitioner()
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import reset_code
    from torch._inductor.decomposition import select_decomp_table

    saved: list[float] = []
    returned: list[float] = []

    def partition(joint: "GraphModule", joint_inputs: object, **settings: object) -> "tuple[GraphModule, GraphModule]":
        forward, backward = cut(joint, joint_inputs, **settings)
        saved.append(_saved_outputs(forward, slice(settings["num_fwd_outputs"], None), round_to))
        returned.append(_saved_outputs(forward, slice(settings["num_fwd_outputs"]), round_to))
        return forward, backward

    def seen() -> "set[CodeType]":
        references = [*convert_frame.input_codes.seen, *convert_frame.output_codes.seen]
        return {code for reference in references if (code := reference()) is not None}

    backend = aot_autograd(
        fw_compiler=_unrun, bw_compiler=_unrun, partition_fn=partition, decompositions=select_decomp_table()
    )
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses")]
    levels, before = [logger.level for logger in loggers], seen()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        torch.compile(function, backend=backend, dynamic=False)(inputs)
    finally:
        for code in seen() - before:
            reset_code(code)
        pgo.reset_code_state()
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
    if not saved:
        raise PrivateFeatureMissing("the compiler's front end made no graph that needs a gradient")
    if len(saved) > _MOST_GRAPHS:
        raise PrivateFeatureMissing(
            f"the compiler's front end made {len(saved)} graphs, and what runs between them is not known"
        )
    return sum(saved) + sum(returned[:-1])


_MOST_GRAPHS = 3
"""More graphs than this leave too much uncounted."""


def _saved_outputs(forward: "GraphModule", which: slice, round_to: int) -> float:
    """Sum some of what a partitioned forward graph returns, each storage once, inputs and their views left out."""
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    values = output.args[0]
    total, seen = 0.0, set()
    for node in values[which]:
        value = getattr(node, "meta", {}).get("val")
        if getattr(node, "op", None) in (None, "placeholder") or not isinstance(value, Tensor):
            continue
        source = node
        while source.op == "call_function" and _is_view_node(source):
            source = source.args[0]
        if source.op == "placeholder" or source in seen:
            continue
        seen.add(source)
        kept = source.meta["val"]
        size = kept.numel() * kept.element_size() if isinstance(kept, Tensor) else value.numel() * value.element_size()
        total += -(-size // round_to) * round_to
    return total


def _is_view_node(node: "Node") -> bool:
    """Return whether a graph node is a view of its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and is_view_operation(node.target)
