"""An epoch of tensor data through SmartDataLoader and through torch's DataLoader.

    python -m benchmarks.loader [--blocks 30] [--batch-size 32]

Both read a TensorDataset of 8192 images of 28 x 28 floats with their labels, in one process and one torch thread. The ratios are
time per batch, ours over torch's, shuffled and in order; the target is at most 0.2, and 0.1 where the memory allows. The third
line reads a dataset with `__getitem__`, where both must run the same user code and ours also seeds the three generators around it.
`A/A` is torch's loader against itself: how much of a difference is noise.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.timing import Block, compare, environment, write_result
from drivetrain.data.loader import SmartDataLoader


class Items(Dataset[tuple[torch.Tensor, int]]):
    """The same images behind `__getitem__`."""

    def __init__(self, images: torch.Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index] * 2, index % 10


def reading(loader: Any) -> Block:
    """Return a loop that takes so many batches, going on with the next epoch where one ends."""

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()

    def block(steps: int) -> None:
        for _ in range(steps):
            next(batches)

    return block


def main(
    blocks: int = 30, batch_size: int = 32, num_samples: int = 8192, folder: Path | None = None
) -> dict[str, float]:
    """Measure, print and write the ratios."""
    torch.set_num_threads(1)
    images, labels = torch.randn(num_samples, 1, 28, 28), torch.randint(0, 10, (num_samples,))
    tensors, items = TensorDataset(images, labels), Items(images)
    steps = num_samples // batch_size
    loops: dict[str, Block] = {}
    for name, data, shuffle in (("shuffled", tensors, True), ("in order", tensors, False), ("items", items, True)):
        loops[f"torch {name}"] = reading(DataLoader(data, batch_size=batch_size, shuffle=shuffle))
        loops[f"ours {name}"] = reading(SmartDataLoader(data, shuffle, 1, batch_size=batch_size, loading_bar=False))
    loops["torch again"] = reading(DataLoader(tensors, batch_size=batch_size, shuffle=True))
    seconds = compare(loops, blocks, steps)
    ratios = {name: seconds[f"ours {name}"] / seconds[f"torch {name}"] for name in ("shuffled", "in order", "items")}
    ratios["A/A"] = seconds["torch again"] / seconds["torch shuffled"]
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f} of torch's DataLoader")
    micros = {name: round(value * 1e6, 2) for name, value in seconds.items()}
    result = {"ratios": ratios, "microseconds_per_batch": micros, "batch_size": batch_size, "num_samples": num_samples}
    write_result("loader", {**result, "blocks": blocks, "environment": environment()}, folder)
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    main(arguments.blocks, arguments.batch_size)
