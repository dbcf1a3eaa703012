"""Train by a plan: written by hand once, or found by a search; saved as JSON, and used again.

python examples/auto_accelerate.py                                                    # one process
torchrun --nproc-per-node 2 examples/auto_accelerate.py                               # the same plan, half the batch for each
python examples/auto_accelerate.py --plan plan.json                                   # the plan that the first run saved
python examples/auto_accelerate.py --plan auto --time-limit 60                        # the plan that a search finds here
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import drivetrain.auto as dt

VOCABULARY, LENGTH = 64, 32


class Counting(Dataset):
    """Sequences that count upwards from a random start: easy to learn, and easy to get wrong."""

    def __init__(self, size: int = 512):
        self.starts = torch.randint(0, VOCABULARY, (size,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.starts[index] + torch.arange(LENGTH + 1)) % VOCABULARY
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Decoder(nn.Module):
    """A small causal transformer; nothing in it knows about plans."""

    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def loss_func(batch: dict[str, torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Model input and model output go in, the loss comes out."""
    return cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


PLAN = [
    "parallel_mode",
    ("amp_native", "bf16"),
    ("checkpoint", {"mode": "selective"}),
    ("micro_batch", 16),
    "fused_optimizer",
]


def main(
    epochs: int = 2,
    plan: str | Path | list = PLAN,
    save_to: str | Path = "plan.json",
    time_limit: float = 60.0,
) -> list[float]:
    """Train for some epochs and return the mean loss of each; the plan "auto" is searched for, within the time limit."""
    torch.manual_seed(0)
    status, result, applied = dt.auto_accelerate(
        Decoder(),
        torch.optim.AdamW,
        dataset=Counting(),
        loss_func=loss_func,
        model_input_format="unpack_dict",
        optim_args={"lr": 3e-3},
        dataloader_args={"batch_size": 64, "shuffle": True, "num_workers": 0},
        load_strategy=None if plan == "auto" else plan,
        model_fn=Decoder,  # trials build the model again in their own processes
        time_limit=time_limit if plan == "auto" else None,
        save_strategy_to_file=save_to,
    )
    if not status:
        raise SystemExit(applied.explain())
    print(applied.explain())
    means = []
    for epoch in range(epochs):
        losses = []
        for batch in result.dataloader:
            batch = result.prepare_input(batch, result.context.device)
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            losses.append(loss.detach())
        means.append(torch.stack(losses).mean().item())
        print(f"epoch {epoch}: loss {means[-1]:.3f}")
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--plan", default=PLAN)
    parser.add_argument("--save-to", default="plan.json")
    parser.add_argument("--time-limit", type=float, default=60.0)
    main(**vars(parser.parse_args()))
