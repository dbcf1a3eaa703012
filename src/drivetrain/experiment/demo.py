"""The demonstration: a digit classifier on data that ships with scikit-learn, in well under a minute.

It is an experiment like any user's: parameters from the signature, a run folder, a Trainer that keeps its metrics and checkpoints
there, and a report at the end. Interrupted with Ctrl-C and started again, it continues where it stopped.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import CheckpointError, MissingExtra, ResumeError, StateError
from drivetrain.core.types import Settings
from drivetrain.experiment.experiments import experiment

if TYPE_CHECKING:
    from drivetrain.train.callbacks import TrainerCallback
    from drivetrain.train.trainer import Trainer

TARGET_ACCURACY = 0.97
SHOWN_MISTAKES = 6


@experiment
def digits(epochs: int = 12, lr: float = 3e-3, batch_size: int = 64, weight_decay: float = 0.05) -> Settings:
    """Train a small convolutional classifier on scikit-learn's 8 × 8 digits.

    Args:
        epochs: passes over the data
        lr: the highest learning rate, after two epochs of warm-up
        batch_size: samples per step
        weight_decay: how strongly weights are drawn to zero
    """
    import torch
    from torch import nn

    from drivetrain.context.context import Context
    from drivetrain.record.recorder import Recorder
    from drivetrain.runtime.device import choose_device
    from drivetrain.train.callbacks import LearningRateMonitor, MoveModulesToDeviceCallback, TerminateOnNaNCallback
    from drivetrain.train.schedulers import CosineLrScheduler
    from drivetrain.train.trainer import Trainer

    train_set, test_set = load_digits()
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    recorder = Recorder(tensorboard=False)
    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()},
        callbacks=(MoveModulesToDeviceCallback, TerminateOnNaNCallback, LearningRateMonitor, epoch_line(epochs)),
        loggers=[recorder],
        state=Context(recorder=recorder),  # its place in the metrics file is saved and restored with the rest
        # An accelerator's plan would compile longer than this trains.
        strategy="auto" if choose_device().type == "cpu" else None,
        strategy_time_limit=0,  # predicted and simulated only: measuring, too, would take longer than the run
    )
    history = trainer.train(
        train_set,
        num_epochs=epochs,
        eval_dataset=test_set,
        per_device_batch_size=batch_size,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=min(2, epochs - 1)),
    )
    record_mistakes(recorder, trainer.model, test_set)
    result = {
        "accuracy": history.get_latest_metric("eval_accuracy_epoch"),
        "loss": history.get_latest_metric("train_loss_epoch"),
        "updates": trainer.state.clock.step,
        "samples": trainer.state.clock.sample,
        "losses": history.get_metric_values("train_loss_epoch"),
        "device": str(trainer.device),
    }
    recorder.summary({"accuracy": result["accuracy"]})
    return result


def run_demo(epochs: int = 12, output_dir: str = "output", seed: int = 0) -> int:
    """Train, evaluate, keep, report, and print a summary; returns 0 when the classifier is as good as it should be."""
    params = {"epochs": epochs, "output_dir": output_dir, "random_seed": seed}
    require_data()
    try:
        with quiet_console(), one_thread():
            folder = _run(params)
    except KeyboardInterrupt:
        print("\nInterrupted. The run is saved; `drivetrain demo` with the same options resumes it.", file=sys.stderr)
        return 130
    return _print_summary(folder, epochs)


@contextmanager
def quiet_console() -> Iterator[None]:
    """Show warnings only: a run logs to the console by default, and one line per epoch is enough for the demo."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: with matrices this small several would mostly wait for each other, the more so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(params: Settings) -> Path:
    """Run the experiment, as the continuation of one that was interrupted if there is one, and return its folder."""
    from drivetrain.experiment.proxies import output_dir
    from drivetrain.experiment.resume import RunStart, choose_run_start

    try:
        beginning = choose_run_start(digits, digits.resolve({**params, "resume": "auto"}))
    except ResumeError:  # it is running at this moment
        beginning = RunStart()
    if beginning.record is not None and not beginning.is_finished:
        try:
            digits.run(params, resume="auto")
            return Path(output_dir)
        except (StateError, CheckpointError) as error:  # written by another version of this library, for example
            print(f"The interrupted run cannot be resumed, so a new one is started. ({error})", file=sys.stderr)
    digits.run(params)
    return Path(output_dir)


def _print_summary(folder: Path, epochs: int) -> int:
    from drivetrain.core.display import sparkline
    from drivetrain.experiment.cli.output import own_command, print_lines, print_table
    from drivetrain.experiment.records import read_run
    from drivetrain.experiment.reports.page import write_report

    record = read_run(folder)
    result, seconds = record.result, max(float(record.status["seconds"]), 1e-9)
    accuracy = float(result["accuracy"])
    report = write_report([folder])
    rows = [
        ("accuracy on 360 unseen digits", f"{accuracy:.1%}"),
        ("training loss", f"{sparkline(result['losses'])} {result['loss']:.4f}"),
        ("samples per second", f"{result['samples'] / seconds:,.0f}"),
        ("device", result["device"]),
        ("time", f"{seconds:.1f} s, {result['updates']} updates"),
        ("run folder", str(folder)),
        ("report", str(report)),
    ]
    print_table(["", ""], rows, title="Drivetrain demo")
    command = own_command()
    print_lines(
        "Next: open the report in a browser, then",
        f"  {command} show {shlex.quote(os.path.relpath(folder))}",
        f"  {command} ls {shlex.quote(os.path.relpath(folder.parents[1]))}",
    )
    if accuracy < TARGET_ACCURACY:
        print_lines(
            f"The accuracy is below {TARGET_ACCURACY:.0%}: {accuracy:.1%} after {epochs} epochs. Try more epochs."
        )
        return 1
    return 0


def epoch_line(num_epochs: int) -> "TrainerCallback":
    """Return a callback that prints one line per epoch."""
    from drivetrain.train.callbacks import TrainerCallback

    class EpochLine(TrainerCallback):
        """Prints loss and accuracy."""

        def on_eval_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
            """Print the line."""
            latest = trainer.run_history.get_latest_metric
            epoch = trainer.run_history.current_epoch
            loss, accuracy = latest("train_loss_epoch"), latest("eval_accuracy_epoch")
            trainer.print(f"epoch {epoch:2d} of {num_epochs}   loss {loss:.4f}   accuracy {accuracy:.1%}")

    return EpochLine()


def require_data() -> None:
    """Raise with the install line where the demo's data is missing, before a run begins."""
    import importlib.util

    if importlib.util.find_spec("sklearn") is None:
        raise MissingExtra("scikit-learn", "demo", "the demo's data")


def load_digits() -> tuple[object, object]:
    """Return 1,437 digits to train on and 360 to test on, as images of 8 × 8."""
    import torch
    from torch.utils.data import TensorDataset

    require_data()
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def record_mistakes(recorder: Any, model: Any, test_set: Any) -> None:
    """Record which digits are taken for which, and some of those the classifier gets wrong."""
    import torch

    images, labels = test_set.tensors
    model.eval()
    with torch.no_grad():
        device = next(model.parameters()).device
        answers = model(images.to(device)).argmax(-1).cpu()
    confusion = torch.zeros(10, 10)
    confusion.index_put_((labels, answers), torch.ones(len(labels)), accumulate=True)
    recorder.image("confusion (rows: digit, columns: answer)", confusion / confusion.sum(1, keepdim=True).clamp(min=1))
    for place in (answers != labels).nonzero().flatten()[:SHOWN_MISTAKES].tolist():
        recorder.image(f"mistakes/{int(labels[place])} taken for {int(answers[place])}", (images[place] + 1) / 2)
