"""Plain models of well-known shapes, with random data and one loss: what plans and searches are measured on.

    model, batch = make_model("gpt2"), make_batch("gpt2", 8)
    loss = loss_func(batch, model(**batch))

`gpt2` is GPT-2 124M (Radford et al., 2019) with a vocabulary padded to a multiple of 128, `llama` a small model of Llama's kind (Touvron
et al., 2023), `bert` BERT-base with its masked-token head (Devlin et al., 2019), `vit` ViT-small at 224 pixels (Dosovitskiy et al.,
2021), `resnet50` ResNet-50 (He et al., 2016). `tiny=True` is the same structure in a size that a test can afford. Everything is
importable, so that another process can build it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""The label of a position that has no part in the loss."""


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, is_causal: bool) -> Tensor:
    """Return multi-head attention of `batch x time x width` tensors."""
    batch, time, width = q.shape
    q, k, v = (x.view(batch, time, heads, width // heads).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).reshape(batch, time, width)


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, is_causal: bool):
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(*self.qkv(x).chunk(3, dim=-1), self.heads, self.is_causal))


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class PreNormBlock(nn.Module):
    """A transformer block that normalises what enters each branch."""

    def __init__(self, width: int, heads: int, is_causal: bool):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, is_causal)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNormBlock(PreNormBlock):
    """A transformer block that normalises each sum, as BERT does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Gpt2(nn.Module):
    """A decoder with learned positions and a head that is tied to the embedding."""

    def __init__(self, vocabulary: int = 50304, length: int = 1024, depth: int = 12, heads: int = 12, width: int = 768):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([PreNormBlock(width, heads, is_causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        initialise(self, depth)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bert(nn.Module):
    """An encoder with a transform and a tied head over its last layer."""

    def __init__(self, vocabulary: int = 30592, length: int = 512, depth: int = 12, heads: int = 12, width: int = 768):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList([PostNormBlock(width, heads, is_causal=False) for _ in range(depth)])
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight
        initialise(self, depth)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.norm(self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions (Su et al., 2021), keys and values shared by groups of heads."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, width = x.shape
        q = rotate(self.q(x).view(batch, time, self.heads, self.size).transpose(1, 2), rotation)
        k = rotate(self.k(x).view(batch, time, self.kv_heads, self.size).transpose(1, 2), rotation)
        v = self.v(x).view(batch, time, self.kv_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """A pre-norm block with RMS norms, rotary attention and a gated layer."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), RotaryAttention(width, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(width), GatedMlp(width, hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A decoder of Llama's kind, with an output head of its own."""

    def __init__(
        self,
        vocabulary: int = 32000,
        depth: int = 12,
        heads: int = 16,
        kv_heads: int = 4,
        width: int = 1024,
        hidden: int = 2816,
    ):
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([LlamaBlock(width, heads, kv_heads, hidden) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        initialise(self, depth)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        x, rotation = self.tokens(inputs), rotation_of(inputs.shape[1], self.size, inputs.device)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def rotation_of(time: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, `time x size / 2` each."""
    frequencies = 10000.0 ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of halves of the last dimension by its position's angle."""
    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Vit(nn.Module):
    """An encoder over patches of an image, with a class token."""

    def __init__(
        self, classes: int = 1000, pixels: int = 224, patch: int = 16, depth: int = 12, heads: int = 6, width: int = 384
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (pixels // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList([PreNormBlock(width, heads, is_causal=False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        initialise(self, depth)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patches(inputs).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of bottlenecks."""

    def __init__(self, classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        stages, channels = [], width
        for stage, depth in enumerate(depths):
            own = width * 2**stage
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(channels, own, 2 if stage > 0 and index == 0 else 1))
                channels = 4 * own
            stages.append(nn.Sequential(*blocks))
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, classes)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(inputs))), 3, 2, 1)
        return self.head(self.stages(x).mean((2, 3)))


def initialise(model: nn.Module, depth: int) -> None:
    """Draw weights as GPT-2 does: standard deviation 0.02, less for layers that add to the residual stream."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith(("attention.out", "mlp.down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if last else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


# What belongs to each name.


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model's class, what it reads, and its small version."""

    build: type[nn.Module]
    sample: tuple[int, ...]
    """Shape of one sample: `(time,)` of tokens, or `(3, pixels, pixels)`."""
    classes: int
    tiny: Mapping[str, Any]
    """Arguments of the small version."""
    tiny_sample: tuple[int, ...]
    tiny_classes: int
    masked: float = 0.0
    """Share of the positions that have a label, where not all have one."""


_SMALL = {"vocabulary": 128, "depth": 2, "heads": 2, "width": 32}
SPECS: Mapping[str, Spec] = {
    "gpt2": Spec(
        build=Gpt2, sample=(1024,), classes=50304, tiny={**_SMALL, "length": 16}, tiny_sample=(16,), tiny_classes=128
    ),
    "llama": Spec(
        build=Llama,
        sample=(1024,),
        classes=32000,
        tiny={**_SMALL, "kv_heads": 1, "hidden": 64},
        tiny_sample=(16,),
        tiny_classes=128,
    ),
    "bert": Spec(
        build=Bert,
        sample=(512,),
        classes=30592,
        tiny={**_SMALL, "length": 16},
        tiny_sample=(16,),
        tiny_classes=128,
        masked=0.15,
    ),
    "vit": Spec(
        build=Vit,
        sample=(3, 224, 224),
        classes=1000,
        tiny={"classes": 10, "pixels": 16, "patch": 4, "depth": 2, "heads": 2, "width": 32},
        tiny_sample=(3, 16, 16),
        tiny_classes=10,
    ),
    "resnet50": Spec(
        build=ResNet,
        sample=(3, 224, 224),
        classes=1000,
        tiny={"classes": 10, "depths": (1, 1), "width": 8},
        tiny_sample=(3, 16, 16),
        tiny_classes=10,
    ),
}


def make_model(name: str, *, tiny: bool = False, seed: int = 0) -> nn.Module:
    """Return a model by name, always with the same weights."""
    spec = SPECS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return spec.build(**spec.tiny) if tiny else spec.build()


def make_batch(name: str, size: int, *, tiny: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return random inputs and labels of so many samples; there is nothing to learn in them."""
    spec, generator = SPECS[name], torch.Generator().manual_seed(seed)
    shape, classes = (spec.tiny_sample, spec.tiny_classes) if tiny else (spec.sample, spec.classes)
    if len(shape) == 3:
        images = torch.randn(size, *shape, generator=generator)
        return {"inputs": images, "labels": torch.randint(classes, (size,), generator=generator)}
    rows = torch.randint(classes, (size, shape[0] + 1), generator=generator)
    if spec.masked:
        labels = rows[:, :-1].clone()
        labels[torch.rand(labels.shape, generator=generator) >= spec.masked] = IGNORED
        return {"inputs": rows[:, :-1].contiguous(), "labels": labels}
    return {"inputs": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of a Trainer's `(outputs, targets)`, in float32."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def loss_func(batch: Mapping[str, Tensor], outputs: Tensor) -> Tensor:
    """Return the loss as `auto_accelerate` takes it: of model input and output."""
    return cross_entropy(outputs, batch["labels"])
