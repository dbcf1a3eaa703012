"""Train a small classifier on MNIST, or on scikit-learn's digits when no MNIST folder is given.

python examples/train_mnist.py --data path/to/mnist     # the four original *-ubyte.gz files
torchrun --nproc-per-node 2 examples/train_mnist.py     # the same script on two processes
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset, random_split

from drivetrain.trainer import Trainer


class MNISTModel(nn.Module):
    def __init__(self, pixels: int):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(pixels, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
            nn.LogSoftmax(dim=1),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.main(input.view(input.shape[0], -1))


def read_idx(path: Path) -> torch.Tensor:
    """Read one of MNIST's idx files: a magic number whose last byte counts dimensions, their sizes, then bytes."""
    data = gzip.decompress(path.read_bytes())
    dims = data[3]
    shape = [int.from_bytes(data[4 + 4 * k : 8 + 4 * k], "big") for k in range(dims)]
    return torch.frombuffer(bytearray(data[4 + 4 * dims :]), dtype=torch.uint8).reshape(shape)


def load_data(folder: str | None) -> TensorDataset:
    if folder is not None:
        images = read_idx(Path(folder) / "train-images-idx3-ubyte.gz").float() / 255
        labels = read_idx(Path(folder) / "train-labels-idx1-ubyte.gz").long()
        return TensorDataset(images, labels)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))


def main(data: str | None = None, num_epochs: int = 8, max_num_train_steps: int | None = None) -> float:
    torch.manual_seed(0)
    dataset = load_data(data)
    held_out = len(dataset) // 12
    parts = random_split(dataset, [len(dataset) - held_out, held_out])
    train_dataset, validation_dataset = (TensorDataset(*dataset[torch.tensor(part.indices)]) for part in parts)
    model = MNISTModel(dataset.tensors[0][0].numel())
    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()},
    )
    history = trainer.train(
        train_dataset=train_dataset,
        eval_dataset=validation_dataset,
        num_epochs=num_epochs,
        max_num_train_steps=max_num_train_steps,
        per_device_batch_size=32,
    )
    return history.get_latest_metric("eval_accuracy_epoch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's original idx files")
    parser.add_argument("--num-epochs", type=int, default=8)
    arguments = parser.parse_args()
    main(arguments.data, arguments.num_epochs)
