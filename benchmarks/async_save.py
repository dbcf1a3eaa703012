"""How long a background save holds training, against a plain copy of the same tensors.

    python -m benchmarks.async_save [--gigabytes 1] [--device cpu] [--repeats 5] [--folder DIR]

The copy is the least any snapshot can cost: the tensors, copied into host memory that is already there (pinned, for an
accelerator), until the last byte has arrived. The save is `Checkpointer.save(async_save=True)` until training can go on,
waiting for the device as well; it also walks the state, writes its structure and starts the thread. Target: at most 1.5
times the copy. The file itself is written meanwhile; how long that takes depends on the disk and is printed too.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import environment, low, write_result
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context

TENSOR_BYTES = 32 * 2**20


def make_context(num_bytes: int, device: str) -> Context:
    """Return a state of tensors of 32 MiB, and a hundred small ones as biases and norms are."""
    count = max(1, num_bytes // TENSOR_BYTES)
    size = num_bytes // count // 4
    ctx = Context(weights={f"w{index}": torch.randn(size, device=device) for index in range(count)})
    ctx.biases = {f"b{index}": torch.randn(256, device=device) for index in range(100)}
    return ctx


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until an action and the device are done."""
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(num_bytes: int, device: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Copy and save in turns; the least of each counts, because a busy machine only adds time."""
    ctx = make_context(num_bytes, device)
    live = [*ctx.weights.values(), *ctx.biases.values()]
    buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device == "cuda") for t in live]

    def copy() -> None:
        for buffer, tensor in zip(buffers, live):
            buffer.copy_(tensor, non_blocking=True)

    copies, stalls, files = [], [], []
    with Checkpointer(ctx, dir=folder, keep=1, async_save=True, signals=False) as keeper:
        for turn in range(repeats + 1):  # the first turn makes the buffers and does not count
            copies.append(timed(copy))
            stalls.append(timed(lambda turn=turn: keeper.save(turn)))
            files.append(timed(keeper.wait))
    copy_time, stall = low(copies[1:]), low(stalls[1:])
    return {
        "bytes": sum(t.numel() * t.element_size() for t in live),
        "device": device,
        "copy_seconds": copy_time,
        "stall_seconds": stall,
        "ratio": stall / copy_time,
        "first_stall_seconds": stalls[0],
        "file_seconds": low(files[1:]),
        "all_copies": copies,
        "all_stalls": stalls,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print one ratio, keep the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--results", type=Path, default=None)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measure(int(given.gigabytes * 1e9), given.device, given.repeats, Path(folder))
    print(
        f"{result['bytes'] / 1e9:.2f} GB on {given.device}: copy {result['copy_seconds']:.3f} s, "
        f"training held for {result['stall_seconds']:.3f} s (first save {result['first_stall_seconds']:.3f} s), "
        f"file after another {result['file_seconds']:.2f} s"
    )
    print(f"ratio to a plain copy: {result['ratio']:.2f} (target: at most 1.5)")
    write_result(f"async_save_{given.device}", {**environment(given.repeats), **result}, given.results)
    return result


if __name__ == "__main__":
    main()
