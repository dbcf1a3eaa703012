"""Trainings that `drivetrain plan` is asked about."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_model():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))


def make_data():
    return TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))


def prepare(batch, device):
    return [part.to(device) for part in batch]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x, y=None):
        return self.inner(x)


def loss_func(batch, logits):
    return nn.functional.cross_entropy(logits, batch[1])


def arguments():
    print("a factory may print")
    return {
        "model": Classifier(),
        "optim_func": torch.optim.AdamW,
        "dataset": make_data(),
        "loss_func": loss_func,
        "model_input_format": "unpack_sequence",
        "dataloader_args": {"batch_size": 16},
    }


def trainer():
    from drivetrain.trainer import Trainer

    model = make_model()
    return Trainer(
        model=model,
        loss_func=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(make_data(), batch_size=8),
    )


def trainer_without_data():
    from drivetrain.trainer import Trainer

    model = make_model()
    return Trainer(
        model=model, loss_func=nn.functional.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )


def misspelt():
    return {**arguments(), "time_limt": 5}


def something_else():
    return 3
