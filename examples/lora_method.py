"""A method of your own: LoRA (Hu et al., 2021, arXiv 2106.09685) as a part of plans, searches and trials.

python examples/lora_method.py                          # a plan with LoRA, verified and trained
python examples/lora_method.py --search                 # a search that must use it, with the methods of the library around it
"""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import drivetrain.auto as dt
from drivetrain.strategy import Application, Method, Site, Stage, register_method
from drivetrain.strategy.effects import Effects
from drivetrain.strategy.method import Option
from drivetrain.strategy.search.space import SearchScope

WIDTH, CLASSES = 32, 4


class LoraLinear(nn.Module):
    """A frozen linear layer and a trainable update of low rank, which is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        generator = torch.Generator().manual_seed(layer.in_features)  # the same on every rank
        down = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
        self.down = nn.Parameter(down.to(**like))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.down), self.up)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What a user may write in a plan: plain values, so that plans are compared and saved as JSON."""

    rank: int = 4
    scale: float = 1.0


class Lora(Method[LoraConfig]):
    """Trains small updates of linear layers instead of the layers."""

    name, group, stage = "lora", "adapter", Stage.MODULE  # before layers are split, checkpointed or compiled
    Config = LoraConfig
    short = "rank"  # ("lora", 8) means ("lora", {"rank": 8})
    changes_gradient = True  # a check compares the loss, and whether anything moves
    why = "only updates of low rank are trained, so gradients and optimizer state are small"
    not_simulated = "its parameters are not in the profile of the model"

    def options(self, scope: SearchScope) -> list[Option]:
        """Return what a search may do with it: it trains something else, so it is used where it is included, not by surprise."""
        return super().options(scope) if scope.must(self.name) else []

    def affect(self, effects: Effects, config: LoraConfig) -> None:
        effects.update_passes *= 0.1  # about a tenth of the parameters is updated

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if not (isinstance(values.get("rank", 1), int) and values.get("rank", 1) >= 1):
            raise self.bad("rank", values["rank"], "a whole number of at least 1")
        return values

    def check(self, config: LoraConfig, site: Site) -> None:
        if site.model is not None and not any(isinstance(module, nn.Linear) for module in site.model.modules()):
            raise self.bad("config", config, "a model with linear layers")

    def apply(self, ctx: Application, config: LoraConfig) -> None:
        ctx.model.requires_grad_(False)
        layers = [
            (parent, name, child)
            for parent in ctx.model.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
        ]
        for parent, name, child in layers:
            setattr(parent, name, LoraLinear(child, config.rank, config.scale))
        if ctx.recipe is not None:  # the optimizer is made last: of what is trained then
            ctx.recipe.groups = lambda model: [p for p in model.parameters() if p.requires_grad]
            ctx.recipe.is_changed = True
        ctx.note(f"lora: {len(layers)} linear layers, rank {config.rank}")


class Rows(Dataset):
    """Points with labels that a linear map decides."""

    def __init__(self, size: int = 128):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.labels = (self.x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """A small network; nothing in it knows about LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.layers(x))


def loss_func(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Return the loss of prepared input and the model's output."""
    return cross_entropy(logits.float(), batch["labels"])


def main(search: bool = False, num_epochs: int = 8) -> tuple[list[float], Any]:
    """Train with LoRA and return the mean loss of each epoch, and the plan."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"load_strategy": [("lora", 8)]}
    if search:
        how = {"included": ["lora"], "time_limit": 60.0}
    status, result, plan = dt.auto_accelerate(
        Classifier(),
        torch.optim.AdamW,
        Rows(),
        loss_func,
        model_input_format="unpack_dict",
        optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": 32},
        **how,
    )
    assert status, plan.failure
    losses = []
    for _ in range(num_epochs):
        total = 0.0
        for batch in result.dataloader:
            batch = result.prepare_input(batch, result.context.device)
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            total += loss.item()
        losses.append(total / len(result.dataloader))
    return losses, plan


register_method(Lora)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true")
    losses, plan = main(**vars(parser.parse_args()))
    print(plan.explain())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
