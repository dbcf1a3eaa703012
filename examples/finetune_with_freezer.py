"""Fine-tune in two stages: first the new head alone, then everything, at a smaller rate.

python examples/finetune_with_freezer.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.finetuning import ModelFreezer


def make_task(classes: int, seed: int) -> TensorDataset:
    """Return points around `classes` centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 16, generator=generator) * 2
    labels = torch.randint(0, classes, (512,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(512, 16, generator=generator), labels)


def main(num_epochs: int = 2) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()), nn.Linear(32, 4))
    pretraining = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2), callbacks=())
    pretraining.train(make_task(4, seed=1), num_epochs=num_epochs, per_device_batch_size=32)

    model[1] = nn.Linear(32, 6)  # the new task has six classes
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)  # everything but the last group
    optimizer = torch.optim.AdamW(freezer.get_trainable_parameters(), lr=1e-2)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=())
    task = make_task(6, seed=2)
    head_only = trainer.train(task, num_epochs=num_epochs, per_device_batch_size=32).get_latest_metric(
        "train_loss_epoch"
    )

    for group in freezer.unfreeze(from_index=0).values():
        optimizer.add_param_group({**group, "lr": 1e-3})
    whole = trainer.train(task, num_epochs=num_epochs, per_device_batch_size=32).get_latest_metric("train_loss_epoch")
    print(f"loss with the head alone {head_only:.3f}, with the whole model {whole:.3f}")
    return head_only, whole


if __name__ == "__main__":
    main()
