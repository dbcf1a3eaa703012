"""Stop in the middle of an epoch, go on later, and get exactly the batches an uninterrupted run gets.

    python examples/smart_loader.py

The dataset augments: it adds noise from numpy and flips with Python's `random`. The second half is read with worker processes and
a fresh loader, as after a crash; the random numbers are the same all the same.
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain.data import SmartDataLoader


class NoisyDigits(Dataset[tuple[Tensor, int]]):
    """Small images with noise and random flips."""

    def __init__(self, length: int = 100):
        self.images = torch.rand(length, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index] + torch.from_numpy(np.random.normal(0, 0.1, (8, 8))).float()
        return (image.flip(-1) if random.random() < 0.5 else image), index % 10


def make_loader(num_workers: int = 0) -> SmartDataLoader:
    """Return the loader that every part of this example uses."""
    return SmartDataLoader(NoisyDigits(), shuffle=True, random_seed=42, batch_size=8, num_workers=num_workers)


def main(stop_after: int = 5, num_workers: int = 2) -> bool:
    """Read an epoch with an interruption and one without; return whether they are the same, bit for bit."""
    uninterrupted = list(make_loader())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loader.pt"

        loader = make_loader()
        first_part = []
        for batch in loader:
            first_part.append(batch)
            if len(first_part) == stop_after:
                torch.save(loader.state_dict(), path)  # the batch in hand counts as used
                break
        print(f"stopped at sample {loader.position} of epoch {loader.epoch}: {loader.state_dict()}")

        loader = make_loader(num_workers)
        loader.load_state_dict(torch.load(path, weights_only=True))
        second_part = list(loader)

    print(f"{len(first_part)} batches before the stop, {len(second_part)} after it, {len(uninterrupted)} without one")
    pairs = zip(first_part + second_part, uninterrupted, strict=True)
    same = all(torch.equal(x, other_x) and torch.equal(y, other_y) for (x, y), (other_x, other_y) in pairs)
    print("the same batches, bit for bit" if same else "they differ")
    return same


if __name__ == "__main__":
    main()
