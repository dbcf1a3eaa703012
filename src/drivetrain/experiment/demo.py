"""The demonstration: a digit classifier on data that ships with scikit-learn, in well under a minute.

It is an ordinary use of the Trainer: a model, data, a loss; a progress bar, evaluation, checkpoints, and a table at the end that says
how well it went and where everything is.
"""

import time
from pathlib import Path
from typing import Any

TARGET_ACCURACY = 0.97


def run_demo(epochs: int = 30, output_dir: str = "output", seed: int = 0) -> int:
    """Train, evaluate, keep, and print a summary; returns 0 when the classifier is as good as it should be."""
    import torch
    from torch import nn

    from drivetrain.train.schedulers import CosineLrScheduler
    from drivetrain.train.trainer import Trainer

    torch.manual_seed(seed)
    train_set, test_set = load_digits()
    folder = Path(output_dir) / "digits" / time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime())
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()},
        seed=seed,
    )
    began = time.perf_counter()
    history = trainer.train(
        train_set,
        num_epochs=epochs,
        eval_dataset=test_set,
        per_device_batch_size=64,
        checkpoint_dir=folder / "checkpoints",
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=min(2, epochs - 1)),
    )
    seconds = time.perf_counter() - began
    accuracy = history.get_latest_metric("eval_accuracy_epoch")
    print_summary(
        {
            "accuracy on 360 unseen digits": f"{accuracy:.1%}",
            "training loss": f"{history.get_latest_metric('train_loss_epoch'):.4f}",
            "samples per second": f"{trainer.state.clock.sample / seconds:,.0f}",
            "device": str(trainer.device),
            "time": f"{seconds:.1f} s, {trainer.state.clock.step} updates",
            "run folder": str(folder),
        }
    )
    if accuracy < TARGET_ACCURACY:
        print(f"The accuracy is below {TARGET_ACCURACY:.0%}: {accuracy:.1%} after {epochs} epochs. Try more of them.")
        return 1
    return 0


def load_digits() -> tuple[Any, Any]:
    """Return 1,437 digits to train on and 360 to test on, as images of 8 × 8."""
    import torch
    from torch.utils.data import TensorDataset

    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        from drivetrain.core.errors import MissingExtra

        raise MissingExtra("scikit-learn", "demo", "the demo's data") from error
    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def print_summary(rows: dict[str, str]) -> None:
    """Print a small table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Drivetrain demo", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
