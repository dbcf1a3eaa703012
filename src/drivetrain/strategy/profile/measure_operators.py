"""Measure how long operators take on a device, over sizes: products, attention, convolutions, norms, reductions, memory traffic,
and the host's part.

Each kind is a grid of a few sizes, a factor of four or eight apart. On an accelerator only the device's own time counts: a delay
kernel keeps it busy until all calls are queued, so that the host does not matter. A point that is too large for the device, or
fails, is filled in from its nearest neighbour at the same efficiency.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.strategy.profile.operations import RECURRENCE

Call = Callable[[], object]
Axes = tuple[tuple[float, ...], ...]
_WAYS = ("forward", "backward")
_PAUSE = 2_000_000
"""Cycles that keep an accelerator busy while calls are put into its queue: about a millisecond."""


class OperatorBenchmark(NamedTuple):
    """One kind of operator: the axes of the grid, and what to run at a point (None if it is too large)."""

    key: str
    axes: Axes
    build: Callable[..., Call | None]


def measure_operators(
    device: torch.device, seconds: float, known: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield keys with grids (axes and seconds) as JSON values, the most useful first, until the time is up.

    Keys that are known already are left out.
    """
    end = time.perf_counter() + seconds
    for question in _operator_benchmarks(device):
        if question.key in known:
            continue
        values = []
        for point in itertools.product(*question.axes):
            if time.perf_counter() > end:
                return
            call, taken = None, None
            with suppress(RuntimeError, ValueError, NotImplementedError, torch.cuda.OutOfMemoryError):
                call = question.build(*point)
                taken = None if call is None else _device_seconds(call, device)
            del call
            values.append(taken)
        if any(value is not None for value in values):
            filled = fill_in(question.axes, values)
            yield question.key, {"axes": [list(axis) for axis in question.axes], "values": filled}
        if device.type == "cuda":
            torch.cuda.empty_cache()


def fill_in(axes: Axes, values: Sequence[float | None]) -> list[float]:
    """Return the values with each missing one filled in from its nearest measured neighbour, in proportion to the sizes.

    >>> fill_in(((1.0, 4.0, 16.0),), [1.0, 2.0, None])
    [1.0, 2.0, 8.0]
    """
    points = [tuple(map(math.log, point)) for point in itertools.product(*axes)]
    have = [(point, value) for point, value in zip(points, values) if value is not None]
    found = []
    for point, value in zip(points, values):
        if value is None:
            near, value = min(have, key=lambda one: sum(abs(a - b) for a, b in zip(one[0], point)))
            value *= math.exp(max(0.0, sum(point) - sum(near)))
        found.append(value)
    return found


def _device_seconds(call: Call, device: torch.device) -> float:
    call()
    if device.type != "cuda":
        call()
        best, begin = float("inf"), time.perf_counter()
        for _ in range(5):
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() - begin > 4e-3:
                break
        return best
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    count = int(min(max(2e-3 / (time.perf_counter() - start), 2), 12))
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_PAUSE)
    before.record()
    for _ in range(count):
        call()
    after.record()
    torch.cuda.synchronize(device)
    return max(before.elapsed_time(after) * 1e-3 / count, 1e-7)


def _operator_benchmarks(device: torch.device) -> Iterator[OperatorBenchmark]:
    """Yield what to measure, the most useful first."""
    is_gpu = device.type == "cuda"
    half = "bfloat16" if not is_gpu or torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    make = _Tensors(device)
    powers = (14, 18, 22, 25, 28, 30) if is_gpu else (12, 16, 20, 23)
    sizes: Axes = (tuple(2.0**power for power in powers),)
    for name in ("float32", half):
        yield from _first_traffic(make, name, sizes)
    first = (half, "float32") if is_gpu else ("float32", half)
    for name in (*first, *(("tf32",) if is_gpu else ())):
        yield OperatorBenchmark(f"product/{name}", _PRODUCTS[is_gpu], partial(_product, make, name, 0))
    if is_gpu:
        for word, more in (("odd", 1), ("even", 2)):
            yield OperatorBenchmark(f"product/{word}/{half}", _UNALIGNED, partial(_product, make, half, more))
        yield OperatorBenchmark("update/float32", sizes, partial(_update, make))
    for name in ("float32", half):
        yield from _more_traffic(make, name, sizes)
    for name in first:
        for kind, way in itertools.product(("full", "causal", "masked", "dropout"), _WAYS):
            attention = partial(_attention, make, name, kind, way)
            yield OperatorBenchmark(f"attention/{kind}/{way}/{name}", _ATTENTION[is_gpu], attention)
        yield OperatorBenchmark(f"batched/{name}", _BATCHED[is_gpu], partial(_batched, make, name))
        for way in _WAYS:
            yield OperatorBenchmark(f"recurrent/{way}/{name}", _RECURRENT[is_gpu], partial(_recurrent, make, name, way))
        yield from _convolutions(make, name)


def _convolutions(make: "_Tensors", name: str) -> Iterator[OperatorBenchmark]:
    """Yield convolutions of all kinds, the device's usual layout first."""
    is_gpu = make.is_gpu
    pixels = _CONVOLUTION[is_gpu][1]
    convolutions: Sequence[tuple[str, Axes, Callable[..., Call | None]]] = (
        ("conv/1", _CONVOLUTION[is_gpu], partial(_dense, 1)),
        ("conv/3", _CONVOLUTION[is_gpu], partial(_dense, 3)),
        ("conv/few", ((32.0, 64.0), pixels), _few),
        ("patch", ((48.0, 768.0), pixels[:3]), _patches),
        ("depthwise", _DEPTHWISE[is_gpu], _depthwise),
        ("grouped", _GROUPED[is_gpu], _grouped),
    )
    layouts = ("last", "first") if is_gpu else ("first", "last")
    for layout, way in itertools.product(layouts, _WAYS):
        for kind, axes, build in convolutions:
            yield OperatorBenchmark(f"{kind}/{layout}/{way}/{name}", axes, partial(build, make, name, layout, way))


_STEPS = (64.0, 256.0, 1024.0, 4096.0, 16384.0)
_PRODUCTS: dict[bool, Axes] = {True: ((*_STEPS, 65536.0), _STEPS, _STEPS), False: ((16.0, 128.0, 1024.0),) * 3}
_UNALIGNED: Axes = ((512.0, 32768.0), (256.0, 16384.0), (256.0, 1024.0, 32768.0))
_BATCHED: dict[bool, Axes] = {
    True: ((16.0, 128.0, 1024.0), (32.0, 128.0, 512.0, 2048.0), (32.0, 128.0, 512.0)),
    False: ((4.0, 64.0), (16.0, 128.0), (16.0, 128.0)),
}
_ATTENTION: dict[bool, Axes] = {
    True: ((16.0, 128.0, 1024.0), (64.0, 256.0, 1024.0, 4096.0), (32.0, 64.0, 128.0)),
    False: ((4.0, 32.0), (16.0, 128.0), (16.0, 64.0)),
}
_RECURRENT: dict[bool, Axes] = {
    True: ((16.0, 128.0), (128.0, 512.0, 2048.0)),
    False: ((4.0, 32.0), (16.0, 128.0)),
}
_CONVOLUTION: dict[bool, Axes] = {
    True: ((16.0, 64.0, 256.0, 1024.0), (2.0**12, 2.0**15, 2.0**18, 2.0**20)),
    False: ((8.0, 64.0), (2.0**8, 2.0**12)),
}
_DEPTHWISE: dict[bool, Axes] = {
    True: ((3.0, 5.0, 7.0), (32.0, 128.0, 512.0), (2.0**12, 2.0**15, 2.0**18)),
    False: ((3.0, 7.0), (16.0, 128.0), (2.0**8, 2.0**12)),
}
_GROUPED: dict[bool, Axes] = {
    True: ((8.0, 32.0, 64.0), (64.0, 256.0, 1024.0), (2.0**12, 2.0**15, 2.0**18)),
    False: ((8.0, 32.0), (64.0, 128.0), (2.0**8, 2.0**12)),
}


@dataclass(frozen=True)
class _Tensors:
    """Makes tensors on the device, and knows what is too large for it."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def __call__(self, *shape: float, dtype: str = "float32", grad: bool = False) -> Tensor:
        kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
        return torch.randn(*map(int, shape), device=self.device).to(kind).requires_grad_(grad)

    def allows(self, flops: float, dtype: str = "bfloat16", elements: float = 0.0) -> bool:
        """Return whether one call is short enough, and small enough."""
        if self.device.type != "cuda":
            return flops <= (2e7 if dtype == "bfloat16" else 2e8) and elements <= 2**24
        return flops <= {"float32": 1.5e11, "tf32": 5e11}.get(dtype, 1.2e12) and elements <= 2**30


def _way(function: Callable[..., Tensor], inputs: Sequence[Tensor], way: str, constant: int = 0) -> Call:
    """Return the forward call of a function, or the backward one alone; the first `constant` inputs have no gradient."""
    if way == "forward":
        return lambda: function(*inputs)
    learnt = [tensor.requires_grad_() for tensor in inputs[constant:]]
    result = function(*inputs)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, learnt, gradient, retain_graph=True)


def _product(make: _Tensors, dtype: str, more: int, rows: float, columns: float, depth: float) -> Call | None:
    """Build a product with `more` columns than the point says, so that rows are not aligned."""
    columns += more
    if not make.allows(2 * rows * columns * depth, dtype, rows * columns):
        return None
    left, right = make(rows, depth, dtype=dtype), make(columns, depth, dtype=dtype).t()

    def call() -> Tensor:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        return left @ right

    return call


def _batched(make: _Tensors, dtype: str, batch: float, side: float, depth: float) -> Call | None:
    if not make.allows(2 * batch * side * side * depth, dtype, batch * side * max(side, depth)):
        return None
    left, right = make(batch, side, depth, dtype=dtype), make(batch, depth, side, dtype=dtype)
    return lambda: torch.bmm(left, right)


def _attention(
    make: _Tensors, dtype: str, kind: str, way: str, rows: float, length: float, width: float
) -> Call | None:
    flops = (10 if way == "backward" else 4) * rows * length * length * width
    if not make.allows(flops, dtype, rows * length * width) or (kind == "masked" and length > 1024):
        return None
    heads = 4 if rows < 16 else 16
    inputs = [make(rows // heads, heads, length, width, dtype=dtype) for _ in range(3)]
    mask = make(rows // heads, 1, length, length, dtype=dtype) if kind == "masked" else None
    p = 0.1 if kind == "dropout" and make.device.type == "cuda" else 0.0
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=kind == "causal", dropout_p=p)
    return _way(attend, inputs, way)


def _recurrent(make: _Tensors, dtype: str, way: str, batch: float, hidden: float) -> Call | None:
    """Build an LSTM of two layers, which a device may run at the same time."""
    layers, steps = RECURRENCE
    if not make.allows(2 * 8 * layers * steps * batch * hidden**2 * (2 if way == "backward" else 1), dtype):
        return None
    lstm = torch.nn.LSTM(int(hidden), int(hidden), layers, batch_first=True)
    lstm.to(make.device, getattr(torch, "float32" if dtype == "tf32" else dtype))
    x = make(batch, steps, hidden, dtype=dtype)
    return _way(lambda x, *weights: lstm(x)[0], [x, *lstm.parameters()], way)


def _update(make: _Tensors, moved: float) -> Call:
    # The parameter, its gradient and Adam's two numbers are read; all but the gradient are written.
    parameter = make(max(1.0, moved / 28), grad=True)
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW([parameter], fused=True).step


def _laid_out(x: Tensor, layout: str) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if layout == "last" else x


def _images(make: _Tensors, dtype: str, layout: str, channels: float, pixels: float, stride: int = 1) -> Tensor:
    """Return pictures with so many pixels in all after a stride; the more channels, the smaller they are."""
    largest = next((side for most, side in ((16, 128), (64, 64), (256, 32)) if channels <= most), 16)
    side = min(int(math.sqrt(pixels)), largest)
    return _laid_out(make(max(1, pixels // side**2), channels, stride * side, stride * side, dtype=dtype), layout)


def _convolved(x: Tensor, weight: Tensor, way: str, constant: int = 0, **settings: Any) -> Call:
    """Build a convolution of a given layout; with `constant=1` pictures have no gradient."""
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        weight = weight.contiguous(memory_format=torch.channels_last)
    settings = {"padding": weight.shape[-1] // 2} | settings
    return _way(lambda x, weight: F.conv2d(x, weight, **settings), [x, weight], way, constant)


def _dense(
    kernel: int, make: _Tensors, dtype: str, layout: str, way: str, channels: float, pixels: float
) -> Call | None:
    flops = 2 * channels * channels * kernel**2 * pixels * (2 if way == "backward" else 1)
    if not make.allows(flops, "tf32" if dtype == "float32" else dtype, channels * pixels * 4):
        return None
    x = _images(make, dtype, layout, channels, pixels)
    return _convolved(x, make(channels, channels, kernel, kernel, dtype=dtype), way)


def _few(make: _Tensors, dtype: str, layout: str, way: str, channels: float, pixels: float) -> Call | None:
    kernel = 7 if channels > 32 else 3
    if not make.allows(2 * 3 * channels * kernel**2 * pixels, dtype, channels * pixels * 4):
        return None
    x = _images(make, dtype, layout, 3, pixels, stride=2)
    return _convolved(x, make(channels, 3, kernel, kernel, dtype=dtype), way, constant=1, stride=2)


def _patches(make: _Tensors, dtype: str, layout: str, way: str, depth: float, patches: float) -> Call | None:
    kernel = int(math.sqrt(depth / 3))
    if not make.allows(2 * 768 * depth * patches, dtype, 4 * depth * patches):
        return None
    side = min(16, int(math.sqrt(patches)))
    x = _laid_out(make(max(1, patches // side**2), 3, side * kernel, side * kernel, dtype=dtype), layout)
    weight = make(768 if kernel > 4 else 96, 3, kernel, kernel, dtype=dtype)
    return _convolved(x, weight, way, constant=1, stride=kernel, padding=0)


def _depthwise(
    make: _Tensors, dtype: str, layout: str, way: str, kernel: float, channels: float, pixels: float
) -> Call | None:
    if not make.allows(2 * channels * kernel**2 * pixels, dtype, channels * pixels * 4):
        return None
    x = _images(make, dtype, layout, channels, pixels)
    return _convolved(x, make(channels, 1, kernel, kernel, dtype=dtype), way, groups=int(channels))


def _grouped(
    make: _Tensors, dtype: str, layout: str, way: str, width: float, channels: float, pixels: float
) -> Call | None:
    if not make.allows(2 * channels * width * 9 * pixels, dtype, channels * pixels * 4) or width > channels:
        return None
    x = _images(make, dtype, layout, channels, pixels)
    return _convolved(x, make(channels, width, 3, 3, dtype=dtype), way, groups=int(channels // width))


# What is bound by memory, over the bytes that are moved; of norms and reductions also over the width of a row.

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_PASSES = {"forward": 2, "backward": 3}
"""How often norms and softmax read or write their rows."""


def _count(moved: float, dtype: str, passes: float, row: float) -> int:
    """Return how many rows of so many elements are moved; fewer than one are a ValueError."""
    count = int(moved / passes / _ELEMENT[dtype] / row)
    if count == 0:
        raise ValueError("too small for its shape")
    return count


def _on_rows(
    make: _Tensors,
    dtype: str,
    function: Callable[..., Tensor],
    passes: float,
    *shape: int,
    way: str = "forward",
    weights: int = 0,
) -> Callable[..., Call]:
    """Return what builds a call on rows of one shape; without a shape, of as many columns as the point says."""

    def build(*point: float) -> Call:
        *columns, moved = point
        row: tuple[float, ...] = shape or tuple(columns)
        x = make(_count(moved, dtype, passes, math.prod(row)), *row, dtype=dtype)
        return _way(function, [x, *(make(row[0], dtype=dtype) for _ in range(weights))], way)

    return build


def _first_traffic(make: _Tensors, dtype: str, sizes: Axes) -> Iterator[OperatorBenchmark]:
    """Yield what nearly every model does."""
    other = torch.bfloat16 if dtype == "float32" else torch.float32
    width, rows = _ELEMENT[dtype], partial(_on_rows, make, dtype)

    def elementwise(moved: float) -> Call:
        x, y = (make(_count(moved, dtype, 3, 1024), 1024, dtype=dtype) for _ in range(2))
        return lambda: x + y

    def mixed(moved: float) -> Call:
        x = make(max(1.0, moved / (8 + width)), dtype=dtype)
        y = x.to(other)
        return lambda: x + y

    def broadcast(moved: float) -> Call:
        x = make(_count(moved, dtype, 2, 65536), 64, 16, 64, dtype=dtype).transpose(1, 2)
        y = make(1, 1, 64, 64, dtype=dtype)
        return lambda: x * y

    narrow: Axes = ((96.0, 256.0, 1024.0), sizes[0][1:]) if make.is_gpu else ((64.0, 512.0), sizes[0])
    yield OperatorBenchmark(f"elementwise/{dtype}", sizes, elementwise)
    yield OperatorBenchmark(f"elementwise/mixed/{dtype}", sizes, mixed)
    yield OperatorBenchmark(f"elementwise/broadcast/{dtype}", sizes, broadcast)
    yield OperatorBenchmark(f"copy/{dtype}", sizes, rows(lambda x: x.to(other), 6 / width, 1024))
    side = 256 if make.is_gpu else 64
    across = rows(lambda x: x.transpose(1, 2).contiguous(), 2, side, side)
    yield OperatorBenchmark(f"copy/transposed/{dtype}", sizes, across)
    across = rows(lambda x: x + x.transpose(1, 2), 3, side, side)
    yield OperatorBenchmark(f"elementwise/transposed/{dtype}", sizes, across)
    yield OperatorBenchmark(f"reduction/outer/{dtype}", narrow, rows(lambda x: x.sum(0), 1))
    for way in _WAYS:
        norm = rows(lambda x, w, b: F.layer_norm(x, w.shape, w, b), _PASSES[way], way=way, weights=2)
        yield OperatorBenchmark(f"norm/layer/{way}/{dtype}", narrow, norm)


def _more_traffic(make: _Tensors, dtype: str, sizes: Axes) -> Iterator[OperatorBenchmark]:
    """Yield what fewer models do."""
    rows = partial(_on_rows, make, dtype)

    def batch_norm(layout: str, way: str, channels: float, moved: float) -> Call:
        side = 56 if channels < 100 else 28 if channels < 400 else 14
        count = _count(moved, dtype, _PASSES[way], channels * side * side)
        x = _laid_out(make(count, channels, side, side, dtype=dtype), layout)
        inputs = [x, make(channels), make(channels)]
        return _way(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), inputs, way)

    def gathered(moved: float) -> Call:
        count = _count(moved, dtype, 2, 768)
        table, index = make(8192, 768, dtype=dtype), torch.randint(8192, (count,), device=make.device)
        return lambda: F.embedding(index, table)

    def scattered(moved: float) -> Call:
        count = max(1, _count(moved, dtype, 1, 768) - 2048)
        index, gradient = torch.randint(2048, (count,), device=make.device), make(count, 768, dtype=dtype)
        return lambda: torch.ops.aten.embedding_dense_backward(gradient, index, 2048, -1, False)

    some = sizes[0][1:] if make.is_gpu else sizes[0]
    wide: Axes = ((64.0, 1024.0, 32768.0) if make.is_gpu else (64.0, 1024.0), some)
    channels: Axes = ((32.0, 128.0, 512.0) if make.is_gpu else (16.0, 64.0), some)
    turned = rows(lambda x: x.transpose(1, 2).contiguous(), 2, 64, 16, 64)
    yield OperatorBenchmark(f"copy/turned/{dtype}", sizes, turned)
    for way, layout in itertools.product(_WAYS, ("first", "last")):
        name = "/last" if layout == "last" else ""
        yield OperatorBenchmark(f"norm/batch{name}/{way}/{dtype}", channels, partial(batch_norm, layout, way))
    for way in _WAYS:
        norm = rows(lambda x, w, b: F.group_norm(x, 32, w, b), _PASSES[way], 128, 28, 28, way=way, weights=2)
        softmax = rows(lambda x: x.softmax(-1), _PASSES[way], way=way)
        pool = rows(lambda x: F.max_pool2d(x, 3, 2, 1), 1.25 if way == "forward" else 2.5, 64, 56, 56, way=way)
        yield OperatorBenchmark(f"norm/group/{way}/{dtype}", sizes, norm)
        yield OperatorBenchmark(f"softmax/{way}/{dtype}", wide, softmax)
        yield OperatorBenchmark(f"pool/{way}/{dtype}", sizes, pool)
    yield OperatorBenchmark(f"reduction/inner/{dtype}", wide, rows(lambda x: x.sum(-1), 1))
    yield OperatorBenchmark(f"reduction/all/{dtype}", sizes, rows(lambda x: x.sum(), 1, 1024))
    yield OperatorBenchmark(f"gather/{dtype}", sizes, gathered)
    yield OperatorBenchmark(f"scatter/{dtype}", sizes, scattered)
    yield OperatorBenchmark(f"scan/{dtype}", sizes, rows(lambda x: x.cumsum(-1), 2, 1024))
    yield OperatorBenchmark(f"sort/{dtype}", (sizes[0][:4],), rows(lambda x: x.sort(-1)[0], 2, 1024))
