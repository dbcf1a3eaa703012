"""Small models, and for each surgery algorithm a case: the model it works on, its settings, and data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import algorithms


class ConvBlock(nn.Module):
    """A residual block that keeps its shape."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.norm(self.conv1(x))))


class ConvNet(nn.Module):
    """A stem, two residual blocks, a strided convolution, a pool and a head."""

    def __init__(self, channels: int = 8, classes: int = 3):
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(channels) for _ in range(3)))
        self.norm = nn.GroupNorm(2, channels)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.stem(x)))
        x = self.pool(torch.relu(self.down(x)))
        return self.head(self.dropout(x.mean(dim=(2, 3))))


class Attention(nn.Module):
    """Causal self-attention that calls torch's kernel."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class TextNet(nn.Module):
    """Tokens, torch's own encoder, one class for every token."""

    def __init__(self, tokens: int = 16, width: int = 8, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(self.embed(tokens)))).transpose(1, 2)


def images(rows: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, 8, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (rows,), generator=generator))


def texts(rows: int = 24, length: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 16, (rows, length), generator=generator)
    return TensorDataset(x, x.roll(1, dims=1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One algorithm with settings under which it acts on a small model."""

    name: str
    settings: dict[str, Any]
    model: Callable[[], nn.Module] = ConvNet
    data: Callable[[], TensorDataset] = images
    events: tuple[str, ...] = ("init",)
    precision: str | None = None

    def algorithm(self) -> Any:
        return getattr(algorithms, self.name)(**self.settings)

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.model()

    def sample(self) -> Tensor:
        return self.data().tensors[0][:8]


CASES = [
    Case(name="BlurPool", settings={"min_channels": 8}),
    Case(name="BlurPool", settings={"min_channels": 8, "blur_first": False}),
    Case(name="ChannelsLast", settings={}),
    Case(name="SqueezeExcite", settings={"min_channels": 8, "latent_channels": 4}),
    Case(name="Factorize", settings={"min_channels": 8, "latent_channels": 2, "min_features": 8, "latent_features": 2}),
    Case(name="GhostBatchNorm", settings={"ghost_batch_size": 4}, events=("init", "fit_start")),
    Case(name="LowPrecisionGroupNorm", settings={}, precision="bf16"),
    Case(name="LowPrecisionLayerNorm", settings={}, model=TextNet, data=texts, precision="bf16"),
    Case(name="WeightStandardization", settings={"n_last_layers_ignore": 1}),
    Case(name="GatedLinearUnits", settings={}, model=TextNet, data=texts),
    Case(
        name="Alibi",
        settings={"max_sequence_length": 32, "train_sequence_length_scaling": 0.5},
        model=TextNet,
        data=texts,
        events=("init", "after_dataloader"),
    ),
    Case(name="StochasticDepth", settings={"drop_rate": 0.5}),
    Case(name="StochasticDepth", settings={"drop_rate": 0.5, "stochastic_method": "sample"}),
    Case(
        name="StochasticDepth",
        settings={"drop_rate": 0.5, "drop_warmup": 0.5, "drop_distribution": "uniform"},
        model=TextNet,
        data=texts,
        events=("init", "batch_start"),
    ),
    Case(name="GyroDropout", settings={"sigma": 4, "tau": 2}, events=("init", "fit_start", "batch_start")),
]


def label(case: Case) -> str:
    """Return what a test of the case is called."""
    return "-".join([case.name, *(str(value) for value in case.settings.values())])
