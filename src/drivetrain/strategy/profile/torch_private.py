"""The only file that uses private parts of torch: fake tensors, dispatch keys, operation counts, ahead-of-time capture.

Whatever fails here, callers fall back to closed forms.
"""

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

if TYPE_CHECKING:
    from types import CodeType

    from torch._ops import OpOverload as Operation
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import GraphModule


ROUNDING = 512
"""CUDA's allocator allocates multiples of this."""


class PrivateFeatureMissing(RuntimeError):
    """torch's compiler did not give what the profile asks it for."""


def fake_mode() -> "FakeTensorMode":
    """Return a mode in which tensors have shapes and no memory, on a fake CPU. Enter it with `with`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _start_autograd()
    return FakeTensorMode(allow_non_fake_inputs=True)


@functools.cache
def _start_autograd() -> None:
    """Run the first backward pass of this process on a real tensor.

    A build with CUDA has one fake GPU under fake tensors where it has no real one. A first pass there starts a thread for it, and a
    process that is forked later, as some trials are, can then run no backward pass.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).backward()


def is_fake(value: object) -> bool:
    """Return whether a value is a fake tensor (or a wrapper of one, while a graph is captured)."""
    from torch._guards import detect_fake_mode

    return isinstance(value, Tensor) and detect_fake_mode(value) is not None


def faked(mode: "FakeTensorMode", tensor: Tensor) -> Tensor:
    """Return a fake tensor on the fake CPU, with the shape of a tensor on any device."""
    with mode, torch.no_grad():
        if tensor.layout is torch.strided:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")


def operation_flops(function: "Operation", args: tuple, kwargs: Mapping[str, object], result: object) -> float:
    """Return the floating-point operations of one dispatched operation; 0 except for products, convolutions and attention."""
    from torch.utils.flop_counter import flop_registry

    packet = function._overloadpacket
    if "scaled_dot_product" in str(packet):
        # Two products forward, five backward. torch's formulas do not allow groups of heads to share keys, in some releases.
        is_backward = "backward" in str(packet)
        query, key, value = args[1:4] if is_backward else args[:3]
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        widths = 3 * query.shape[-1] + 2 * value.shape[-1] if is_backward else query.shape[-1] + value.shape[-1]
        return 2.0 * scores * widths
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def is_view_operation(function: "Operation") -> bool:
    """Return whether an operation returns a view of its input and moves no memory."""
    return bool(function.is_view) or function._schema.name in _VIEW_LIKE


_VIEW_LIKE = ("aten::_unsafe_view", "aten::detach", "aten::alias", "aten::_reshape_alias", "aten::lift_fresh")


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
        has_rule = bool(tensors) and is_fake(tensors[0])
        with torch._C._ExcludeDispatchKeyGuard(keys) if is_autocast else nullcontext():
            if has_rule:
                return rule(operation, *args, **kwargs)
            return operation(*args, **kwargs) if is_autocast else operation.decompose(*args, **kwargs)

    return kernel


class _CaptureDone(Exception):
    """Carries what was found out of torch's machinery, which is then not asked to go on."""

    def __init__(self, saved: float):
        self.saved = saved


def _no_op_compiler(gm: "GraphModule", example_inputs: object) -> object:
    """Compile nothing."""
    return gm


def _as_inductor_does(partition: Callable[..., object]) -> dict[str, Any]:
    """Return the settings of a capture with inductor's decompositions, whose graphs are cut and not compiled."""
    from torch._inductor.decomposition import select_decomp_table

    compilers = {"fw_compiler": _no_op_compiler, "bw_compiler": _no_op_compiler}
    return {**compilers, "partition_fn": partition, "decompositions": select_decomp_table()}


def captured_saved_bytes(function: Callable[..., object], inputs: list[Tensor]) -> float:
    """Return the bytes that a compiled forward pass keeps for backward, beyond its inputs.

    The joint graph is traced on fake tensors with inductor's decompositions and cut by the min-cut partitioner, as `torch.compile`
    does; nothing is compiled or run. `inputs` are fake tensors, those that require gradients are leaves.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition as cut

    def partition(joint: "GraphModule", joint_inputs: object, **settings: Any) -> "tuple[GraphModule, GraphModule]":
        forward, _ = cut(joint, joint_inputs, **settings)
        raise _CaptureDone(_saved_outputs(forward, slice(settings["num_fwd_outputs"], None)))

    captured = aot_function(function, **_as_inductor_does(partition))
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


def traced_saved_bytes(function: Callable[..., Tensor], inputs: object) -> float:
    """Return the same from the compiler's own front end, which follows code that tracing cannot and may make several graphs.

    What a graph returns to the next one counts as kept. What runs between graphs runs on fake tensors and is not counted. Nothing is
    compiled, and the compiler forgets what it saw here.
    """
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import reset_code
    from torch._functorch.partitioners import min_cut_rematerialization_partition as cut

    saved: list[float] = []
    returned: list[float] = []

    def partition(joint: "GraphModule", joint_inputs: object, **settings: Any) -> "tuple[GraphModule, GraphModule]":
        forward, backward = cut(joint, joint_inputs, **settings)
        saved.append(_saved_outputs(forward, slice(settings["num_fwd_outputs"], None)))
        returned.append(_saved_outputs(forward, slice(settings["num_fwd_outputs"])))
        return forward, backward

    def seen() -> "set[CodeType]":
        references = [*convert_frame.input_codes.seen, *convert_frame.output_codes.seen]
        return {code for reference in references if (code := reference()) is not None}

    backend = aot_autograd(**_as_inductor_does(partition))
    before = seen()
    try:
        torch.compile(function, backend=backend, dynamic=False)(inputs)
    finally:
        for code in seen() - before:
            reset_code(code)
        pgo.reset_code_state()
    if not saved:
        raise PrivateFeatureMissing("the compiler's front end made no graph that needs a gradient")
    if len(saved) > _MOST_GRAPHS:
        raise PrivateFeatureMissing(
            f"the compiler's front end made {len(saved)} graphs, and what runs between them is not known"
        )
    return sum(saved) + sum(returned[:-1])


_MOST_GRAPHS = 3
"""More graphs than this leave too much uncounted."""


def _saved_outputs(forward: "GraphModule", which: slice) -> float:
    """Sum some of what a partitioned forward graph returns, each storage once, inputs and their views left out."""
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    values = output.args[0]
    total, seen = 0.0, set()
    for node in values[which]:
        value = getattr(node, "meta", {}).get("val")
        if getattr(node, "op", None) in (None, "placeholder") or not isinstance(value, Tensor):
            continue
        source = node
        while isinstance(source.target, OpOverload) and is_view_operation(source.target):
            source = source.args[0]
        if source.op == "placeholder" or source in seen:
            continue
        seen.add(source)
        kept = source.meta["val"]
        kept = kept if isinstance(kept, Tensor) else value
        size = kept.numel() * kept.element_size()
        total += -(-size // ROUNDING) * ROUNDING
    return total
