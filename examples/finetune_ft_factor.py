"""Fine-tune with the schedule of the pretraining: `ft_factor` scales every learning rate and nothing else changes.

python examples/finetune_ft_factor.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.optim import OptimSet

CONFIG = {
    "optim_sches": {
        "type": "cosine.CosineLr",
        "conf": {"optim_type": "AdamW", "optim_conf": {"lr": 2e-2}, "warmup_steps": "0.1dur", "min_lr_ratio": 0.05},
    }
}


def make_task(shift: float, seed: int) -> TensorDataset:
    """Return a regression task; a small shift makes a related one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 8, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True) + shift))


def train(model: nn.Module, data: TensorDataset, num_epochs: int, ft_factor: float) -> tuple[list[float], float]:
    """Train with the one configuration and return the loss of each epoch and the highest rate used."""
    optim = OptimSet.from_config(CONFIG, model, ft_factor=ft_factor)
    trainer = Trainer(model, nn.MSELoss(), optim, callbacks=())
    history = trainer.train(data, num_epochs=num_epochs, per_device_batch_size=32)
    highest = max(optim["main"].lr_at(step) for step in range(1, optim["main"].real_step + 1))
    return history.get_metric_values("train_loss_epoch"), highest


def main(num_epochs: int = 3) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    pretraining, rate = train(model, make_task(0.0, seed=1), num_epochs, ft_factor=1.0)
    fine_tuning, small_rate = train(model, make_task(0.2, seed=2), num_epochs, ft_factor=0.1)
    print(f"pretraining: loss {pretraining[0]:.3f} -> {pretraining[-1]:.3f} at a peak rate of {rate:.3g}")
    print(f"fine-tuning: loss {fine_tuning[0]:.3f} -> {fine_tuning[-1]:.3f} at a peak rate of {small_rate:.3g}")
    return {"rate": rate, "small_rate": small_rate, "first": fine_tuning[0], "last": fine_tuning[-1]}


if __name__ == "__main__":
    main()
