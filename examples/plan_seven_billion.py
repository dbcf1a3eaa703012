"""Plan the training of a transformer with seven billion parameters, for eight, 64 and 1,024 devices that are not here.

The model is made on the meta device, where tensors have shapes and no memory, so this runs on a laptop:

    python examples/plan_seven_billion.py
    drivetrain plan examples/plan_seven_billion.py:training --world-size 64 --device h100-80g --out plan.json
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import auto_accelerate


@dataclass(frozen=True)
class Size:
    """The shape of a transformer; these are those of Llama 2 7B (Touvron et al., 2023)."""

    vocabulary: int = 32000
    width: int = 4096
    hidden: int = 11008
    heads: int = 32
    blocks: int = 32
    length: int = 2048


class Attention(nn.Module):
    """Causal self-attention; heads are counted where they are, so that the projections can be split over devices."""

    def __init__(self, size: Size):
        super().__init__()
        self.head_width = size.width // size.heads
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = [
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(size.width), nn.RMSNorm(size.width), Attention(size)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Transformer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_func(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def training(size: Size | None = None, batch_size: int = 1024) -> dict:
    """Return the arguments of `auto_accelerate`: what `drivetrain plan` asks a factory for."""
    size = size or Size()
    with torch.device("meta"):
        model = Transformer(size)
    tokens = torch.zeros(size.length, dtype=torch.long)
    return {
        "model": model,
        "optim_func": torch.optim.AdamW,
        "loss_func": loss_func,
        "optim_args": {"lr": 3e-4},
        "model_input_format": "unpack_dict",
        "sample_batch": {"tokens": tokens, "labels": tokens.clone()},
        "batch_size": batch_size,
        "excluded": ["pipeline_parallel"],  # pipelines cannot be simulated; their memory would only be modelled
    }


def main(
    worlds: tuple[int, ...] = (8, 64, 1024),
    device: str = "h100-80g",
    size: Size | None = None,
    batch_size: int = 1024,
    time_limit: float = 90,
) -> dict:
    """Print a plan for each number of devices, and return the plans."""
    plans = {}
    for world in worlds:
        place = {"plan_only": True, "world_size": world, "device": device, "time_limit": time_limit}
        _, _, plans[world] = auto_accelerate(**training(size, batch_size), **place)
        print(f"{world} x {device}\n{plans[world].explain()}\n")
    return plans


if __name__ == "__main__":
    main()
