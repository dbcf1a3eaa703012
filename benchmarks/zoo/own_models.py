"""Models written out by hand, each with something that the others do not have."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.task import Entry, Sample, Task, make_samples, mixes_samples


class Recurrent(nn.Module):
    """A recurrent network over a sequence, classified by its last state."""

    def __init__(self, cell: type[nn.RNNBase]):
        super().__init__()
        self.embedding, self.layers, self.head = (
            nn.Embedding(32, 16),
            cell(16, 16, 2, batch_first=True),
            nn.Linear(16, 4),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids))[0][:, -1])


class Waveform(nn.Module):
    """Convolutions over a wave with weight norm and strides."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first, self.second = norm(nn.Conv1d(1, 8, 9, stride=4)), norm(nn.Conv1d(8, 16, 5, stride=2))
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 4)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head(self.norm(F.gelu(self.second(F.gelu(self.first(wave))))).mean(-1))


class UNet(nn.Module):
    """Down and up again, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = F.relu(self.down1(image))
        coarse = F.relu(self.middle(F.relu(self.down2(fine))))
        return self.last(torch.cat([self.up(coarse), fine], 1))


class GraphLayer(nn.Module):
    """Sums what the neighbours of a node send."""

    def __init__(self, width: int):
        super().__init__()
        self.own, self.sent = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges.unbind(1)
        index = source.unsqueeze(-1).expand(-1, -1, nodes.shape[-1])
        messages = self.sent(nodes).gather(1, index)
        received = torch.zeros_like(nodes).scatter_add(
            1, target.unsqueeze(-1).expand_as(messages), messages.to(nodes.dtype)
        )
        return F.relu(self.own(nodes) + received)


class Graph(nn.Module):
    """A graph network over scattered messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GraphLayer(8), GraphLayer(8), nn.Linear(8, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.head(self.second(self.first(nodes, edges), edges).mean(1))


class Detector(nn.Module):
    """Returns its losses from `forward` while it trains and boxes while it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.classes = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, images: Tensor, boxes: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = F.relu(self.body(images)).mean((2, 3))
        found, scores = self.boxes(features), self.classes(features)
        if boxes is None or labels is None:
            return {"boxes": found, "scores": scores}
        return {"loss": F.smooth_l1_loss(found, boxes) + F.cross_entropy(scores, labels), "scores": scores}


class Branching(nn.Module):
    """Takes another way when the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.seldom, self.head = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.often(hidden) if hidden.mean() > 0 else self.seldom(hidden)
        return self.head(torch.tanh(hidden))


@dataclass
class Scores:
    """An output that is neither a tensor nor a mapping."""

    logits: Tensor
    hidden: Tensor


class Structured(nn.Module):
    """Returns its output in a container."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> object:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        if self.kind == "tuple":
            return logits, hidden
        return {"logits": logits, "hidden": hidden} if self.kind == "dict" else Scores(logits, hidden)


def structured_loss(outputs: object, targets: Tensor) -> Tensor:
    """Look into any of the containers."""
    if isinstance(outputs, tuple):
        logits = outputs[0]
    else:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits, targets)


class Tied(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids)))).transpose(1, 2)


class Counting(nn.Module):
    """Keeps a buffer that every training step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
                self.steps += 1
        return self.head(hidden - self.mean)


class Bags(nn.Module):
    """Sparse gradients from a bag of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(64, 16, sparse=True), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


class Spectrum(nn.Module):
    """Multiplies in the frequency domain with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64) / 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=16))


class Double(nn.Module):
    """Works in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Frozen(nn.Module):
    """Trains only its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), nn.Linear(16, 4)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Autoencoder(nn.Module):
    """Learns a distribution, from noise that it draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.sin(mean.detach() * 37.0)  # noise that two runs share
        decoded = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return {"loss": F.mse_loss(decoded, x) + 0.01 * divergence}


class Attention(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)).mean(1))


def _class(generator: torch.Generator, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, (), generator=generator)


def _vector(generator: torch.Generator, width: int = 8, dtype: torch.dtype = torch.float32) -> Sample:
    return torch.randn(width, generator=generator).to(dtype), _class(generator)


def _ids(generator: torch.Generator, length: int = 10, vocabulary: int = 32) -> Sample:
    return torch.randint(0, vocabulary, (length,), generator=generator), _class(generator)


def _language(generator: torch.Generator) -> Sample:
    ids = torch.randint(0, 32, (11,), generator=generator)
    return ids[:-1], ids[1:]


def _graph(generator: torch.Generator) -> Sample:
    edges = torch.randint(0, 6, (2, 12), generator=generator)
    return torch.randn(6, 8, generator=generator), edges, _class(generator)


def _boxes(generator: torch.Generator) -> Sample:
    image = torch.randn(3, 16, 16, generator=generator)
    return {"images": image, "boxes": torch.rand(4, generator=generator), "labels": _class(generator)}


def _entry(
    name: str,
    family: str,
    model: Callable[[], nn.Module],
    sample: Callable[[torch.Generator], Sample],
    loss: Callable[..., Tensor] | None = F.cross_entropy,
    mixes: bool = False,
) -> Entry:
    def build() -> Task:
        torch.manual_seed(0)
        built = model()
        return Task(model=built, data=make_samples(sample), loss_func=loss, mixes_samples=mixes or mixes_samples(built))

    return Entry(name=name, family=family, build=build)


def _moons(generator: torch.Generator) -> Sample:
    angle = torch.rand((), generator=generator) * math.pi
    return torch.stack([angle.cos(), angle.sin()] * 4), _class(generator)


ENTRIES = [
    _entry("lstm", "recurrent", lambda: Recurrent(nn.LSTM), _ids),
    _entry("gru", "recurrent", lambda: Recurrent(nn.GRU), _ids),
    _entry("waveform", "audio, weight norm", Waveform, lambda g: (torch.randn(1, 200, generator=g), _class(g))),
    _entry(
        "unet",
        "skip connections",
        UNet,
        lambda g: (torch.randn(1, 16, 16, generator=g), torch.randint(0, 3, (16, 16), generator=g)),
    ),
    _entry("graph", "scattered messages", Graph, _graph),
    _entry("detector", "losses inside forward", Detector, _boxes, None),
    _entry("branching", "control flow on data", Branching, _moons, mixes=True),
    _entry("tuple output", "outputs", lambda: Structured("tuple"), _vector, structured_loss),
    _entry("dict output", "outputs", lambda: Structured("dict"), _vector, structured_loss),
    _entry("dataclass output", "outputs", lambda: Structured("dataclass"), _vector, structured_loss),
    _entry("tied", "shared weights", Tied, _language),
    _entry("counting", "buffers that change", Counting, _vector, mixes=True),
    _entry("bags", "sparse gradients", Bags, lambda g: _ids(g, 5, 64)),
    _entry("spectrum", "complex weights", Spectrum, lambda g: _vector(g, 16)),
    _entry("double", "float64", Double, lambda g: _vector(g, 8, torch.float64)),
    _entry("frozen", "frozen layers", Frozen, _vector),
    _entry("autoencoder", "loss in the output", Autoencoder, lambda g: {"x": torch.randn(8, generator=g)}, None),
    _entry("attention", "torch's encoder", Attention, _ids),
]
