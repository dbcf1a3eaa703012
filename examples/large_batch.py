"""Train with batches that do not fit: four small ones make one update, equal to a batch four times as large.

python examples/large_batch.py

The last window of an epoch may be short; it is then the mean of the batches it has.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.optim import NoamLr


def train(batch_size: int, accum_grad: int, num_epochs: int) -> tuple[nn.Module, int]:
    """Train one model and return it with its number of updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(208, 8, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    unit = NoamLr("Adam", {"lr": 1e-2}, model, warmup_steps=5, accum_grad=accum_grad)
    trainer = Trainer(model, nn.MSELoss(), unit, callbacks=())
    trainer.train(
        data,
        num_epochs=num_epochs,
        per_device_batch_size=batch_size,
        train_dataloader_kwargs={"shuffle": False},
    )
    return model, unit.update_count


def main(num_epochs: int = 2) -> float:
    small, small_updates = train(batch_size=16, accum_grad=4, num_epochs=num_epochs)
    large, large_updates = train(batch_size=64, accum_grad=1, num_epochs=num_epochs)
    difference = max((a - b).abs().max().item() for a, b in zip(small.parameters(), large.parameters()))
    print(f"{small_updates} updates of 4 x 16 samples, {large_updates} of 64: the weights differ by {difference:.1e}")
    assert small_updates == large_updates
    return difference


if __name__ == "__main__":
    main()
