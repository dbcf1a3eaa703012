"""Measure this machine, as a separate program: `python -m drivetrain.strategy.profile.measure_machine '{"device": "cpu"}'`.

It runs in a child process, so that the parent does not initialize a device. The result is one JSON line on standard output. With
several processes, each takes its rank and all of them time collectives of three sizes; rank 0 prints the result.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.strategy.profile.measure_operators import Call, measure_operators

Figures = dict[str, Any]
"""What was measured, as JSON holds it."""
_SHAPES = {
    "cuda": ((16384, 768, 3072), (8192, 4096, 4096), (4096, 4096, 4096)),
    "cpu": ((512, 512, 512), (1024, 256, 1024)),
}
_SIZES = {"cuda": (2**20, 2**24, 2**27), "cpu": (2**14, 2**18, 2**22)}


def measure(
    device: torch.device,
    seconds: float,
    rank: int = 0,
    world: int = 1,
    store: str = "",
    known: Sequence[str] = (),
    report: Callable[[Figures], None] = lambda found: None,
) -> Figures:
    """Return the figures of one device within about so many seconds. Operators that are already known are skipped.

    `report` gets what there is after each kind of operator.
    """
    end, share = time.perf_counter() + seconds, min(seconds / 16, 0.5)
    _warm_up(device, share)
    found: Figures = {"flops": _matrix_rates(device, share)}
    found["bandwidth"] = _bandwidth(device, share)
    found["launch"] = _launch_seconds(device)
    found["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"memory": total, "free": free, "name": torch.cuda.get_device_name(device)}
        found["host_bandwidth"] = _host_bandwidth(device)
    if world > 1:
        found["link"] = _link(device, rank, world, store)
    if rank == 0:
        found["times"] = {"host": _host_seconds(device), "grids": {}, "is_complete": False}
        for name, grid in measure_operators(device, end - time.perf_counter(), known):
            found["times"]["grids"][name] = grid
            report(found)
        found["times"]["is_complete"] = time.perf_counter() < end
    return found


def _warm_up(device: torch.device, limit: float) -> None:
    """Keep an accelerator busy for a moment: its clock is low at first, and what is measured first would come out too slow."""
    if device.type != "cuda":
        return
    tensor = torch.randn(4096, 4096, device=device)
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        tensor @ tensor
        _wait(device)


def _seconds_of(work: Call, device: torch.device, limit: float, most: int = 20) -> float:
    """Return the shortest time of one call; a busy machine only ever adds."""
    work()
    _wait(device)
    best, end = float("inf"), time.perf_counter() + limit
    for _ in range(most):
        start = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matrix_rates(device: torch.device, limit: float) -> dict[str, float]:
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if device.type == "cuda":
        kinds |= {"tf32": torch.float32, "float16": torch.float16}
        if torch.cuda.get_device_capability(device) < (8, 0):
            del kinds["bfloat16"], kinds["tf32"]
    rates = {}
    for name, dtype in kinds.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rates[name] = _rate(device, dtype, limit / len(kinds))
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        with suppress(RuntimeError, AttributeError, TypeError):  # the device could, this torch cannot
            rates["float8"] = _float8_rate(device, limit / len(kinds))
    return rates


def _rate(device: torch.device, dtype: torch.dtype, limit: float) -> float:
    """Return operations per second over shapes such as models have: all their work over all their time.

    A small product goes first: where the type has no fast kernel, as 16-bit numbers on many CPUs, it says enough.
    """
    rate = _products_rate(device, dtype, ((128, 128, 128),), limit)
    shapes = _SHAPES["cuda" if device.type == "cuda" else "cpu"]
    work = sum(2.0 * rows * inner * columns for rows, inner, columns in shapes)
    return _products_rate(device, dtype, shapes, limit) if device.type == "cuda" or 2 * work / rate < limit else rate


def _products_rate(
    device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...], limit: float
) -> float:
    work = seconds = 0.0
    repeats = 4 if device.type == "cuda" else 1
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(inner, columns, device=device).to(dtype)
        products = partial(_repeat, repeats, torch.matmul, left, right)
        seconds += _seconds_of(products, device, limit / len(shapes)) / repeats
        work += 2.0 * rows * inner * columns
    return work / seconds


def _repeat(times: int, function: Callable[..., object], *args: object) -> None:
    for _ in range(times):
        function(*args)


def _float8_rate(device: torch.device, limit: float) -> float:
    size = 4096
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    # `torch._scaled_mm` is what `F.scaled_mm` of later versions calls.
    multiply = partial(torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return 4 * 2.0 * size**3 / _seconds_of(partial(_repeat, 4, multiply), device, limit)


def _bandwidth(device: torch.device, limit: float) -> float:
    size = 2**28 if device.type == "cuda" else 2**25
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_of(lambda: target.copy_(source), device, limit)


def _launch_seconds(device: torch.device) -> float:
    """Return what one small operation costs the host when it is dispatched with gradients recorded."""
    x, count = torch.ones(8, device=device, requires_grad=True), 300

    def work() -> None:
        for _ in range(count):
            x + 1

    return _seconds_of(work, device, 0.1, most=5) / count


def _host_bandwidth(device: torch.device) -> float:
    size = 2**27
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _seconds_of(lambda: target.copy_(source, non_blocking=True), device, 0.2, most=5)


def _link(device: torch.device, rank: int, world: int, store: str) -> list[list[float]]:
    """Return bytes and seconds of an all-reduce, for three sizes."""
    from datetime import timedelta

    import torch.distributed as dist

    from drivetrain.runtime.store import keep_to_loopback

    keep_to_loopback()
    backend = "nccl" if device.type == "cuda" else "gloo"
    place, limit = f"file://{store}", timedelta(seconds=20)
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=world, timeout=limit)
    try:
        points = []
        for size in _SIZES["cuda" if device.type == "cuda" else "cpu"]:
            tensor = torch.zeros(size // 4, device=device)
            best = float("inf")
            for _ in range(6):
                dist.barrier()
                _wait(device)
                start = time.perf_counter()
                dist.all_reduce(tensor)
                _wait(device)
                best = min(best, time.perf_counter() - start)
            points.append([float(size), best])
        return points
    finally:
        dist.destroy_process_group()


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view and func._schema.name != "aten::detach"
        return func(*args, **(kwargs or {}))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x)))


_DEPTH = 25


def _host_seconds(device: torch.device) -> dict[str, float]:
    """Return what the host pays for an operator of a small model in both directions, and for a view."""
    model, x = nn.Sequential(*[_Residual() for _ in range(_DEPTH)]).to(device), torch.ones(8, 8, device=device)
    with _Counting() as forward:
        loss = model(x).sum()
    with _Counting() as backward:
        loss.backward()
    losses: list[Tensor] = []
    flat = torch.ones(64, device=device)
    return {
        "forward": _shortest(lambda: losses.append(model(x).sum()), device) / forward.count,
        "backward": _shortest(lambda: losses.pop().backward(), device) / max(1, backward.count),
        "view": _shortest(lambda: [flat.view(8, 8) for _ in range(100)], device) / 100,
    }


def _shortest(work: Call, device: torch.device) -> float:
    """Return the host's shortest time for a call."""
    best = float("inf")
    for _ in range(12):
        _wait(device)
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _report(found: Figures) -> None:
    """Print what is known so far: the last line counts, also of a process that is ended."""
    print(json.dumps(found), flush=True)


def main(arguments: str) -> None:
    """Measure what a JSON object requests, and print the result."""
    asked = json.loads(arguments)
    device = torch.device(asked["device"])
    if asked.get("threads"):
        torch.set_num_threads(asked["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = measure(device, asked["seconds"], asked["rank"], asked["world"], asked["store"], asked["known"], _report)
    if asked["rank"] == 0:
        _report(found)


if __name__ == "__main__":
    main(sys.argv[1])
