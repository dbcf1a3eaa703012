"""What algorithms are measured on: a small residual network on CIFAR-10, and a small transformer on the bytes of a text.

Both are trained by AdamW in bfloat16 with the data on the device, so that ten seconds are enough to learn something and
a method shows its own cost, not that of the loader. `METHODS` says which algorithms apply to which task and how they
are set; `LEFT_OUT` says why the others do not.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import algorithms as a
from drivetrain.data.image_archive import load_image_archive

Make = Callable[[], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One algorithm as it is measured."""

    make: Make
    needs_cuda: bool = False
    has_schedule: bool = True
    """Whether the learning rate follows the task's schedule; False for methods that replace it."""
    own_rate: bool = False
    """Whether the method changes what a learning rate means, so that it searches the grid for itself."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and how it is trained."""

    name: str
    make_model: Callable[[], nn.Module]
    loss: Any
    train_set: Any
    eval_set: Any
    batch_size: int
    epochs: int
    lrs: tuple[float, ...]
    quality: str
    """The name of the metric in the history."""
    higher_is_better: bool
    margin: float
    """The target is the tuned baseline's final quality less this much."""


# ---------------------------------------------------------------------------------- images


class Residual(nn.Module):
    """Two convolutions, added to what they are given."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x + self.norm2(self.conv2(self.activation(self.norm1(self.conv1(x))))))


class Widen(nn.Sequential):
    """A convolution to more channels, on half the size after the first one."""

    def __init__(self, before: int, channels: int, stride: int):
        convolution = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(channels), nn.ReLU())


class SmallResNet(nn.Module):
    """Three widths of two residual blocks each, and a linear head."""

    def __init__(self, width: int = 32, classes: int = 10):
        super().__init__()
        layers: list[nn.Module] = []
        for before, channels, stride in ((3, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            layers += [Widen(before, channels, stride), Residual(channels), Residual(channels)]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


IMAGES: dict[str, Method] = {
    "baseline": Method(make=list),
    "AGC": Method(make=lambda: [a.AGC(0.01)]),
    "AlternatingFlip": Method(make=lambda: [a.AlternatingFlip()]),
    "BlurPool": Method(make=lambda: [a.BlurPool()]),
    "Cautious": Method(make=lambda: [a.Cautious()]),
    "ColOut": Method(make=lambda: [a.ColOut(batch=True)]),
    "CutMix": Method(make=lambda: [a.CutMix(1.0)]),
    "CutOut": Method(make=lambda: [a.CutOut(1, 0.5)]),
    "EMA": Method(make=lambda: [a.EMA(half_life="50ba")]),
    "Factorize": Method(make=lambda: [a.Factorize(min_channels=64, latent_channels=0.25)]),
    "FastDefaults": Method(make=lambda: [a.FastDefaults()]),
    "GhostBatchNorm": Method(make=lambda: [a.GhostBatchNorm(32)]),
    "GradientClipping": Method(make=lambda: [a.GradientClipping("norm", 1.0)]),
    "KernelNorm": Method(make=lambda: [a.KernelNorm()]),
    "LabelSmoothing": Method(make=lambda: [a.LabelSmoothing(0.1)]),
    "LayerFreezing": Method(make=lambda: [a.LayerFreezing(0.7, 0.5)]),
    "Lookahead": Method(make=lambda: [a.Lookahead(5, schedule="cubic")]),
    "MixUp": Method(make=lambda: [a.MixUp(0.2)]),
    "Muon": Method(make=lambda: [a.Muon()], own_rate=True),
    "ProgressiveResizing": Method(make=lambda: [a.ProgressiveResizing(initial_scale=0.5, size_increment=8)]),
    "RandomTranslation": Method(make=lambda: [a.RandomTranslation(2)]),
    "SAM": Method(make=lambda: [a.SAM(0.05)], own_rate=True),
    "ScheduleFree": Method(
        make=lambda: [a.ScheduleFree(warmup="40ba", bn_batches=10)], has_schedule=False, own_rate=True
    ),
    "SelectiveBackprop": Method(make=lambda: [a.SelectiveBackprop()]),
    "SOAP": Method(make=lambda: [a.SOAP()], own_rate=True),
    "SqueezeExcite": Method(make=lambda: [a.SqueezeExcite(latent_channels=16, min_channels=32)]),
    "StochasticDepth": Method(make=lambda: [a.StochasticDepth("Residual", "sample", 0.1)]),
    "SWA": Method(make=lambda: [a.SWA("0.6dur", "0.97dur", "1ep")]),
    "TestTimeFlip": Method(make=lambda: [a.TestTimeFlip(shift=1)]),
    "TorchCompile": Method(make=lambda: [a.TorchCompile()], needs_cuda=True),
    "WeightStandardization": Method(make=lambda: [a.WeightStandardization()]),
}


# ---------------------------------------------------------------------------------- text


class SmallGPT(nn.Module):
    """A causal transformer over bytes that returns its loss."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 256):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        hidden = self.embedding(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        logits = self.head(self.blocks(hidden, mask=self.mask[:length, :length], is_causal=True))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


TEXT: dict[str, Method] = {
    "baseline": Method(make=list),
    "AGC": Method(make=lambda: [a.AGC(0.01)]),
    # Training on shorter sequences pays where attention is what takes the time, which it is not at this length.
    "Alibi": Method(make=lambda: [a.Alibi(max_sequence_length=LENGTH, train_sequence_length_scaling=1.0)]),
    "Cautious": Method(make=lambda: [a.Cautious()]),
    "EMA": Method(make=lambda: [a.EMA(half_life="30ba")]),
    "FastDefaults": Method(make=lambda: [a.FastDefaults()]),
    "FP8Linear": Method(make=lambda: [a.FP8Linear(min_features=256), a.TorchCompile()], needs_cuda=True),
    "GatedLinearUnits": Method(make=lambda: [a.GatedLinearUnits()]),
    "GradientClipping": Method(make=lambda: [a.GradientClipping("norm", 1.0)]),
    "GyroDropout": Method(make=lambda: [a.GyroDropout(0.1, 32, 8)]),
    "LayerFreezing": Method(make=lambda: [a.LayerFreezing(0.7, 0.5)]),
    "Lookahead": Method(make=lambda: [a.Lookahead(5, schedule="cubic")]),
    "LowPrecisionLayerNorm": Method(make=lambda: [a.LowPrecisionLayerNorm()], needs_cuda=True),
    "Muon": Method(make=lambda: [a.Muon()], own_rate=True),
    "SAM": Method(make=lambda: [a.SAM(0.05)], own_rate=True),
    "ScheduleFree": Method(make=lambda: [a.ScheduleFree(warmup="30ba")], has_schedule=False, own_rate=True),
    "SeqLengthWarmup": Method(make=lambda: [a.SeqLengthWarmup(0.3, LENGTH // 4, LENGTH, max(1, LENGTH // 8))]),
    "SOAP": Method(make=lambda: [a.SOAP()], own_rate=True),
    "StochasticDepth": Method(make=lambda: [a.StochasticDepth("TransformerEncoderLayer", "sample", 0.1)]),
    "SWA": Method(make=lambda: [a.SWA("0.6dur", "0.97dur", "1ep")]),
    "TorchCompile": Method(make=lambda: [a.TorchCompile()], needs_cuda=True),
}

METHODS = {"cifar": IMAGES, "text": TEXT}

LEFT_OUT = {
    "AugMix": "it works on single pictures on the host; in ten seconds on a GPU only the decoding would be measured.",
    "RandAugment": "it works on single pictures on the host; in ten seconds on a GPU only the decoding would be measured.",
    "ChannelsLast": "every run here has it, the baseline too: without it a step of the small ResNet took 2.5 times as long on an H200.",
    "BatchSizeWarmup": "it needs accumulation, which runs of this size do not have.",
    "DeviceResidentData": "every run here keeps its data on the device, the baseline too.",
    "LowPrecisionGroupNorm": "neither model here has a group norm.",
    "NoOpModel": "it is a measuring tool.",
    "Resolution": "pictures of 32 pixels leave nothing to crop.",
    "ScaleSchedule": "it changes the length of the run, which is the measure here.",
    "SequencePacking": "the text here has no documents of different lengths.",
    "Whitening": "it belongs to a first layer of its own shape; `examples/cifar10_speedrun.py` uses it.",
}
"""Why an algorithm is not measured here."""

LENGTH = 256
SMOKE_LENGTH = 16


def make_task(name: str, device: torch.device, *, smoke: bool = False, cache_dir: str | Path | None = None) -> Task:
    """Return a task with its data on the device; `smoke` makes a tiny one of invented data."""
    return (_images if name == "cifar" else _text)(device, smoke, cache_dir)


def _images(device: torch.device, smoke: bool, cache_dir: str | Path | None) -> Task:
    if smoke:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(64) % 4
        images = torch.randint(0, 100, (64, 3, 32, 32), generator=generator) + 35 * labels.view(-1, 1, 1, 1)
        train = test = (images.to(torch.uint8), labels)
    else:
        splits = load_image_archive(data_folder() / "cifar10-jpeg.tar.xz", cache_dir)
        train, test = splits["train"], splits["test"]
    shift, scale = torch.tensor((0.4914, 0.4822, 0.4465)), torch.tensor((0.2470, 0.2435, 0.2616))

    def place(images: Tensor, labels: Tensor) -> TensorDataset:
        x = (images.to(device) / 255 - shift.to(device).view(1, 3, 1, 1)) / scale.to(device).view(1, 3, 1, 1)
        return TensorDataset(x.to(memory_format=torch.channels_last), labels.to(device))

    return Task(
        name="cifar",
        make_model=lambda: SmallResNet(8 if smoke else 32).to(memory_format=torch.channels_last),
        loss=nn.CrossEntropyLoss(),
        train_set=place(*train),
        eval_set=place(*test),
        batch_size=32 if smoke else 500,
        epochs=2 if smoke else 4,
        lrs=(1e-2,) if smoke else (2e-3, 4e-3, 8e-3),
        quality="eval_accuracy_epoch",
        higher_is_better=True,
        margin=0.01,
    )


def _text(device: torch.device, smoke: bool, cache_dir: str | Path | None) -> Task:
    length = SMOKE_LENGTH if smoke else LENGTH
    text = b"all work and no play. " * 60 if smoke else (data_folder() / "tinyshakespeare.txt").read_bytes()
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // length * length].view(-1, length)
    rows = rows.to(device)
    border = int(0.9 * len(rows))

    def windows(part: Tensor) -> dict[str, Tensor]:
        return {"input_ids": part, "labels": part}

    return Task(
        name="text",
        make_model=lambda: SmallGPT(32, 2, 2, length) if smoke else SmallGPT(length=length),
        loss=None,
        train_set=windows(rows[:border]),
        eval_set=windows(rows[border:]),
        batch_size=16 if smoke else 64,
        epochs=2 if smoke else 6,
        lrs=(1e-2,) if smoke else (2e-3, 4e-3, 8e-3),
        quality="eval_loss_epoch",
        higher_is_better=False,
        margin=0.02,
    )


def data_folder() -> Path:
    """Return the folder of real data, or say how to name it."""
    folder = os.environ.get("DRIVETRAIN_DATA")
    if not folder or not Path(folder).is_dir():
        given = f"DRIVETRAIN_DATA={folder!r} is no folder" if folder else "DRIVETRAIN_DATA is not set"
        raise SystemExit(
            f"{given}. Set it to a folder with cifar10-jpeg.tar.xz (train/<class>/NNNN.jpg, test/...) and tinyshakespeare.txt, or try "
            "--smoke, which needs no data."
        )
    return Path(folder)


def names_for(task: str, wanted: Sequence[str] | None, on_cuda: bool) -> list[str]:
    """Return the methods to measure on a task, the baseline first; those that need a GPU only there."""
    table = METHODS[task]
    chosen = (
        list(table) if not wanted else ["baseline", *(name for name in wanted if name in table and name != "baseline")]
    )
    return [name for name in chosen if on_cuda or not table[name].needs_cuda]
