"""The operators of one training step: their kinds, shapes and traffic, and what a compiler makes of them.

A tracked step on fake tensors shows every operator that is dispatched, with its operands. Two batch sizes give two lists in the same
order, so each size of each operator is a straight line in the batch. Operators that are alike become one `Work` with a count.

A compiler runs products, convolutions and attention as they are, and everything between them in few kernels. `fused` finds these kernels by
a simple rule: element-wise operators, row reductions and norms that follow each other are one kernel, which reads what comes from outside
and writes what is used outside. A reduction over rows ends a kernel, because its result is complete only after all rows were read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from drivetrain.strategy.profile.values import Line, Work, line_through

if TYPE_CHECKING:
    from drivetrain.strategy.profile.torch_private import Operation

VIEW = "view"
"""The key of operators that cost the host a call and the device nothing."""
EACH_GROUP = "product/group"
"""The key of products that torch does group by group, after the host has read where the groups end."""
RECURRENCE = (2, 32)
"""Layers and steps of the recurrent layers that are measured."""
SPLIT = "fused/split"
"""The key of compiled kernels that reduce over rows: parts of the rows first, then the parts, in two launches."""
BY_WIDTH = ("norm", "softmax", "reduction/inner", "reduction/outer")
"""Beginnings of keys whose time depends on the width of a row (or the number of channels) and on the bytes moved."""
_WHOLE = frozenset("product batched attention conv depthwise grouped patch scatter sort scan recurrent".split())
"""First parts of keys of operators that a compiler leaves as they are."""
_TWICE = frozenset({"norm/batch", "norm/group"})
"""Norms over more than a row: everything is read for the statistics, and again to be normalised."""


@dataclass(frozen=True)
class Called:
    """One dispatched operator."""

    key: str
    """Its kind, and what else decides which kernel runs: "norm/layer/backward"."""
    name: str
    dtype: str
    phase: str
    """"forward" (with the loss), "backward" or "update"."""
    in_block: bool
    flops: float
    moved: float
    dims: tuple[float, ...]
    """What the time of a product, a convolution or attention depends on."""
    inputs: tuple[tuple[int, float], ...] = ()
    """Numbers of the storages that are read, each with the bytes."""
    outputs: tuple[tuple[int, float], ...] = ()


def other_flops(key: str, dims: Sequence[float]) -> float:
    """Return the floating-point operations of operators for which torch has no formula: products of experts and recurrent layers."""
    if key.startswith("product"):
        return 2 * prod(dims)  # of all groups, where there are some
    if key.startswith("recurrent"):
        steps, batch, gates, inputs, hidden = dims
        return 2 * steps * batch * gates * (inputs + hidden) * (2 if key.endswith("backward") else 1)
    return 0.0


def by_number(tensors: Iterable[Tensor], number: Callable[[Tensor], int | None]) -> tuple[tuple[int, float], ...]:
    """Return storages with the bytes that are accessed, at most the size of each storage."""
    found: dict[int, float] = {}
    for tensor in tensors:
        key = number(tensor)
        if key is not None:
            found[key] = min(found.get(key, 0.0) + touched(tensor), float(tensor.untyped_storage().nbytes()))
    return tuple(found.items())


def touched(tensor: Tensor) -> int:
    """Return the bytes that reading or writing a tensor moves. An expanded tensor counts for its storage only."""
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return 0
    return min(tensor.numel() * tensor.element_size(), held)


def tensors_of(values: object) -> list[Tensor]:
    """Return the tensors inside nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# Which kind an operator is, and which sizes decide its time.

_PRODUCTS = {
    **dict.fromkeys(("mm", "_scaled_mm", "_int_mm", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "addmm_"), (1, 2)),
}
_BATCHED = {"bmm": (0, 1), "baddbmm": (1, 2)}
_RECURRENT = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
_NORMS = {
    "native_layer_norm": "norm/layer",
    "_fused_rms_norm": "norm/layer",
    "native_batch_norm": "norm/batch",
    "_native_batch_norm_legit": "norm/batch",
    "_native_batch_norm_legit_functional": "norm/batch",
    "_batch_norm_with_update": "norm/batch",
    "batch_norm": "norm/batch",
    "cudnn_batch_norm": "norm/batch",
    "native_group_norm": "norm/group",
}
_KEYS = {
    "softmax": "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp _safe_softmax",
    "gather": "embedding index _index gather index_select nll_loss_forward nll_loss2d_forward nll_loss_backward _unsafe_index",
    "scatter": "embedding_dense_backward index_put index_put_ _index_put_impl_ scatter scatter_ scatter_add scatter_add_ index_add "
    "index_add_ scatter_reduce index_copy _unsafe_index_put gather_backward index_select_backward",
    "copy": "_to_copy clone copy_ cat stack constant_pad_nd repeat roll flip split_with_sizes_copy slice_backward select_backward "
    "slice_scatter select_scatter as_strided_scatter fill_ fill zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones "
    "new_full arange _foreach_zero_",
    "pool": "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward adaptive_max_pool2d upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward avg_pool3d avg_pool1d im2col col2im",
    "sort": "sort topk argsort multinomial unique_dim _unique2 nonzero masked_select bincount histc",
    "scan": "cumsum cumprod cummax logcumsumexp",
}  # fmt: skip
_KEY_OF = {name: key for key, names in _KEYS.items() for name in names.split()}
_REDUCTIONS = frozenset(
    "sum mean amax amin max min argmax argmin var var_mean std norm linalg_vector_norm all any prod mse_loss smooth_l1_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits count_nonzero aminmax _local_response_norm".split()
)


def described(
    func: "Operation",
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[str, tuple[float, ...]]:
    """Return the key of an operator and the sizes that determine its time."""
    way = "backward" if name.endswith("_backward") else "forward"
    if name in _PRODUCTS:
        left, right = (args[index] for index in _PRODUCTS[name])
        sizes = float(left.shape[-2]), float(right.shape[-1]), float(left.shape[-1])
        return _grouped_product(args, kwargs, sizes) if name == "_grouped_mm" else (_product(left, right), sizes)
    if name in _RECURRENT:
        x, gates, hidden = args[:3]
        sizes = (*x.shape[:2], gates.shape[0], gates.shape[1], hidden.shape[1])
        return f"recurrent/{way}", tuple(map(float, sizes))
    if name in _BATCHED:
        left, right = (args[index] for index in _BATCHED[name])
        batch = max(left.shape[0] if left.ndim == 3 else 1, right.shape[0] if right.ndim == 3 else 1)
        return "batched", (float(batch), sqrt(left.shape[-2] * right.shape[-1]), float(left.shape[-1]))
    if name in ("convolution", "convolution_backward", "_convolution", "convolution_overrideable"):
        return _convolution(name, args)
    if "scaled_dot_product" in name:
        return _attention(name, args, kwargs)
    if (norm := _NORMS.get(name.removesuffix("_backward"))) is not None:
        layout = "/last" if norm == "norm/batch" and _channels_last(inputs[0]) else ""
        width = inputs[0].shape[1] if norm != "norm/layer" and inputs[0].ndim > 1 else _normalised(args)
        return f"{norm}{layout}/{way}", (float(width),)
    if (known := _KEY_OF.get(name)) is not None:
        if known == "copy":
            return (_copy(inputs[-1], outputs[0]) if inputs and outputs else "copy"), ()
        if known == "softmax":
            return f"softmax/{'backward' if 'backward' in name else 'forward'}", (float(max(1, *inputs[0].shape[-1:])),)
        return f"pool/{way}" if known == "pool" else known, ()
    if name in _REDUCTIONS or torch.Tag.reduction in func.tags:
        return _reduction(inputs[0], outputs[0])
    if torch.Tag.pointwise in func.tags or name.endswith(("_", "_backward")):
        return _elementwise(inputs, outputs), ()
    return "other", ()


def _product(left: Tensor, right: Tensor) -> str:
    """Return whether rows of 16-bit operands begin where kernels need them to: at multiples of eight elements, of two, or anywhere."""
    if left.element_size() != 2:
        return "product"
    rows = [next((size for size, step in zip(t.shape, t.stride()) if step == 1), 8) for t in (left, right)]
    rows.append(right.shape[-1])
    sizes = [size for size in rows if size > 1]
    if any(size % 2 for size in sizes):
        return "product/odd"
    return "product/even" if any(size % 8 for size in sizes) else "product"


def _grouped_product(
    args: Sequence[Any], kwargs: Mapping[str, object], sizes: tuple[float, float, float]
) -> tuple[str, tuple[float, ...]]:
    """Return a product in which every row meets one expert: one kernel in 16 bits, else torch multiplies group by group."""
    left, right = args[:2]
    ends = args[2] if len(args) > 2 else kwargs.get("offs")
    if left.element_size() == 2 or not isinstance(ends, Tensor):
        return "product", sizes
    rows, columns, depth = sizes
    count = float(max(1, ends.shape[0]))
    if left.ndim == right.ndim:  # the gradient of the experts' weights: groups along the sum
        return EACH_GROUP, (rows, columns, depth / count, count)
    return EACH_GROUP, (rows / count, columns, depth, count)


def _normalised(args: Sequence[object]) -> int:
    """Return the elements that a norm is over: its shape is the first list among the arguments."""
    shape = next((value for value in args if isinstance(value, list | tuple)), (1,))
    return prod(size for size in shape if isinstance(size, int))


def _copy(source: Tensor, result: Tensor) -> str:
    """Return whether a copy changes the order of dimensions, and whether neighbours in the result are apart in the source."""
    before, after = _order(source), _order(result)
    if before == after:
        return "copy"
    return "copy/transposed" if before[-1:] != after[-1:] else "copy/turned"


def _elementwise(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """Return whether all operands look alike; kernels for others (broadcast or turned ones, other types) are slower."""
    operands = [tensor for tensor in inputs if tensor.numel() > 1]
    result = outputs[0] if outputs else operands[0] if operands else None
    if result is None or result.numel() <= 1:
        return "elementwise"
    order = _order(result)
    if any(tensor.numel() == result.numel() and _order(tensor)[-1:] != order[-1:] for tensor in operands):
        return "elementwise/transposed"
    if any(tensor.numel() != result.numel() or _order(tensor) != order for tensor in operands):
        return "elementwise/broadcast"
    return "elementwise/mixed" if len({tensor.dtype for tensor in (*operands, result)}) > 1 else "elementwise"


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest one; those of one element, or repeated, mean nothing."""
    dims = enumerate(zip(tensor.stride(), tensor.shape))
    strides = [(stride, index) for index, (stride, size) in dims if size > 1 and stride]
    return tuple(index for _, index in sorted(strides, reverse=True))


def _channels_last(tensor: Tensor) -> bool:
    return tensor.ndim > 2 and tensor.stride(1) == 1 and prod(tensor.shape[2:]) > 1 and tensor.shape[1] > 1


def _reduction(source: Tensor, result: Tensor) -> tuple[str, tuple[float, ...]]:
    """Return whether a reduction is over all elements, over the last dimension, or over others, and how wide its rows are."""
    if result.numel() <= 1:
        return "reduction/all", ()
    keeps_last = result.ndim > 0 and source.ndim > 0 and result.shape[-1] == source.shape[-1] and source.shape[-1] > 1
    if keeps_last:
        return "reduction/outer", (float(source.shape[-1]),)
    return "reduction/inner", (max(1.0, source.numel() / result.numel()),)


def _attention(name: str, args: Sequence[Any], kwargs: Mapping[str, object]) -> tuple[str, tuple[float, ...]]:
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]
    length = sqrt(query.shape[-2] * key.shape[-2])
    if kwargs.get("attn_mask") is not None:
        kind = "masked"
    elif any(isinstance(value, float) and value > 0 for value in args):
        kind = "dropout"
    else:
        kind = "causal" if next((value for value in args if isinstance(value, bool)), False) else "full"
    way = "backward" if is_backward else "forward"
    return f"attention/{kind}/{way}", (float(prod(query.shape[:-2])), length, float(query.shape[-1]))


def _convolution(name: str, args: Sequence[Any]) -> tuple[str, tuple[float, ...]]:
    """Return the kind of a convolution: of all channels with all, in groups, of each channel, or of separate patches."""
    is_backward = name == "convolution_backward"
    gradient = args[0] if is_backward else None
    x, weight, _, stride, _, _, transposed, _, groups = args[1:10] if is_backward else args[:9]
    way, layout = "backward" if is_backward else "forward", "last" if _channels_last(x) else "first"
    kernel = prod(weight.shape[2:])
    if isinstance(gradient, Tensor):
        pixels = gradient.shape[0] * prod(gradient.shape[2:])
    elif transposed:
        pixels = x.shape[0] * prod(size * step for size, step in zip(x.shape[2:], stride * x.ndim))
    else:
        pixels = x.shape[0] * prod(-(-size // step) for size, step in zip(x.shape[2:], list(stride) * (x.ndim - 2)))
    inner, outer = (weight.shape[0], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[0])
    width = max(1.0, sqrt(kernel))
    if weight.ndim == 3:  # one dimension: a kernel of so many taps
        width = float(kernel)
    if groups > 1 and weight.shape[1] == 1 and groups == x.shape[1]:
        return f"depthwise/{layout}/{way}", (width, float(x.shape[1]), float(pixels))
    if groups > 1:
        return f"grouped/{layout}/{way}", (float(inner), float(outer), float(pixels))
    size = "1" if kernel == 1 else "3"
    if kernel > 1 and list(stride) == list(weight.shape[2:]):  # patches do not overlap: each is one row of a product
        if inner < 8:
            return f"patch/{layout}/{way}", (float(inner * kernel), float(pixels))
        rows = x.shape[0] * prod(x.shape[2:]) if transposed else pixels
        return f"conv/1/{layout}/{way}", (sqrt(inner * kernel * outer), float(rows))
    if inner < 8:
        return f"conv/few/{layout}/{way}", (float(outer), float(pixels))
    return f"conv/{size}/{layout}/{way}", (sqrt(inner * outer) * (width / 3 if size == "3" else 1.0), float(pixels))


# From two lists to work.


def work_of(sizes: tuple[int, int], lists: Sequence[Sequence[Called]], more: float = 1.0) -> tuple[Work, ...]:
    """Return the operators of two runs as lines in the batch size. Those of blocks count `more` times.

    Runs that did not do the same are not compared: the larger one is taken as proportional to its batch.
    """
    small, large = lists
    is_same = [call.name for call in small] == [call.name for call in large]
    found: dict[Work, float] = defaultdict(float)
    for index, after in enumerate(large):
        before = small[index] if is_same and len(small[index].dims) == len(after.dims) else None

        def line(first: float | None, second: float) -> Line:
            return (0.0, second / sizes[1]) if first is None else line_through(sizes, (first, second))

        work = Work(
            key=after.key,
            dtype=after.dtype,
            phase=after.phase,
            in_block=after.in_block,
            flops=line(None if before is None else before.flops, after.flops),
            moved=line(None if before is None else before.moved, after.moved),
            dims=tuple(
                line(before.dims[place] if before else None, value) if before or value > 0 else (value, 0.0)
                for place, value in enumerate(after.dims)
            ),
        )
        found[work] += more if after.in_block else 1.0
    return tuple(replace(work, count=count) for work, count in found.items())


# What a compiler makes of them.


def fused(calls: Sequence[Called]) -> list[Called]:
    """Return the kernels of a compiled step: some operators unchanged, and each chain of all others as one kernel."""
    calls = [call for call in calls if call.key != VIEW]
    writer: dict[int, int] = {}
    levels: list[int] = []
    group = list(range(len(calls)))

    def find(index: int) -> int:
        while group[index] != index:
            group[index] = group[group[index]]
            index = group[index]
        return index

    readers: dict[tuple[int, int], int] = {}  # storage and level -> a fusable operator that reads it
    for index, call in enumerate(calls):
        stays = is_whole(call)
        level, near = 0, []
        for number, _ in call.inputs:
            source = writer.get(number)
            if source is None:
                continue
            ends = is_whole(calls[source]) or _ends(calls[source]) or calls[source].phase != call.phase
            level = max(level, levels[source] + (1 if ends else 0))
            if not ends:
                near.append(source)
        levels.append(level)
        if not stays:
            for source in near:
                if levels[source] == level:
                    group[find(index)] = find(source)
            for number, _ in call.inputs:
                other = readers.get((number, level))
                if other is not None and calls[other].phase == call.phase:
                    group[find(index)] = find(other)
                readers[number, level] = index
        for number, _ in call.outputs:
            writer[number] = index
    members: dict[int, list[int]] = defaultdict(list)
    for index in range(len(calls)):
        members[find(index)].append(index)
    used: dict[int, set[int]] = defaultdict(set)  # writer -> groups that read what it wrote
    current: dict[int, int] = {}
    for index, call in enumerate(calls):
        for number, _ in call.inputs:
            if number in current:
                used[current[number]].add(find(index))
        for number, _ in call.outputs:
            current[number] = index
    last = set(current.values())
    return [_kernel(root, [calls[i] for i in found], found, used, last) for root, found in sorted(members.items())]


def is_whole(call: Called) -> bool:
    """Return whether a compiler leaves an operator unchanged."""
    return call.key.partition("/")[0] in _WHOLE


def _ends(call: Called) -> bool:
    """Return whether a kernel ends with this operator: its result is known only when everything has been read."""
    return call.key in ("reduction/outer", "reduction/all") or _reads_twice(call)


def _reads_twice(call: Called) -> bool:
    return call.key.rpartition("/")[0].removesuffix("/last") in _TWICE


def _kernel(root: int, calls: list[Called], places: list[int], used: Mapping[int, set[int]], last: set[int]) -> Called:
    """Return a group of operators as one kernel: it reads what comes from outside and writes what is used there, or not at all."""
    first = calls[0]
    if len(calls) == 1 and is_whole(first):
        return first
    made: set[int] = set()
    read: dict[int, float] = {}
    written: dict[int, float] = {}
    again = 0.0
    for place, call in zip(places, calls):
        for number, size in call.inputs:
            if number not in made:
                read[number] = max(read.get(number, 0.0), size)
        made.update(number for number, _ in call.outputs)
        if used.get(place, set()) - {root} or (place in last and not used.get(place)):
            written |= {number: max(size, written.get(number, 0.0)) for number, size in call.outputs}
        if (_ends(call) and len(calls) > 1) or _reads_twice(call):
            again += sum(size for _, size in call.inputs)
    reduces = any(call.key.startswith(("reduction", "norm", "softmax")) for call in calls)
    return replace(
        first,
        key=SPLIT if any(map(_ends, calls)) else "fused/reduction" if reduces else "fused/elementwise",
        name="+".join(dict.fromkeys(call.name for call in calls))[:60],
        flops=0.0,
        moved=sum(read.values()) + sum(written.values()) + again,
        dims=(),
        inputs=tuple(read.items()),
        outputs=tuple(written.items()),
    )
