"""An experiment around a hand-written loop: parameters from the signature, one folder per run, resume with the same command.

python examples/experiment_digits.py --help
python examples/experiment_digits.py --lr 0.05 --resume auto      # stop it with Ctrl-C, start it again: it goes on
python examples/experiment_digits.py --distributed --nproc-per-node 2
"""

from typing import Annotated

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import drivetrain as dt
from drivetrain.experiment import Param, experiment, output_dir
from drivetrain.record.recorder import Recorder


def make_data() -> TensorDataset:
    """Return the 1,797 handwritten digits of scikit-learn as rows of 64 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))


@experiment
def digits(
    epochs: Annotated[int, Param(help="passes over the data", resumable=True)] = 10,
    lr: float = 0.1,
    batch_size: int = 64,
):
    """Train a small classifier of handwritten digits.

    Args:
        lr: step size.
        batch_size: images per step and process.
    """
    ctx = dt.Context(epoch=0)
    ctx.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    ctx.optimizer = torch.optim.SGD(ctx.model.parameters(), lr=lr, momentum=0.9)
    ctx.loader = dt.SmartDataLoader(make_data(), batch_size=batch_size, shuffle=True)
    ctx.recorder = Recorder()
    ctx.autotransform()  # follows --checkpoint, --resume, --cuda, --distributed
    with dt.Checkpointer(ctx, every="200ba", keep=3) as keeper:
        while ctx.epoch < epochs:
            for x, y in ctx.loader:  # after a resume: continues inside the epoch
                ctx.optimizer.zero_grad()
                loss = cross_entropy(ctx.model(x), y)
                loss.backward()
                ctx.optimizer.step()
                ctx.recorder.scalar("train/loss", loss)  # no device sync
                ctx.recorder.step()
                keeper.step()  # saves when due; on SIGTERM saves and exits with 143
            ctx.epoch += 1
        keeper.save()
    loss = ctx.recorder.last("train/loss")
    if dt.is_master():
        print(f"loss after {epochs} epochs: {loss:.4f}; the run is in {output_dir}")
    return {"loss": loss}


def main(epochs: int = 10, output_dir: str = "output", **params: object) -> float:
    """Run once from Python and return the last loss."""
    return digits.run({"epochs": epochs, "output_dir": output_dir, **params})["loss"]


if __name__ == "__main__":
    digits.cli()
