"""Small models and data that the tests of algorithms share."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer

CARDS = Path(__file__).parents[2] / "docs" / "algorithms"


class ConvNet(nn.Module):
    """Two convolutions with batch norm and dropout, for images of any size."""

    def __init__(self, classes: int = 3, channels: int = 3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class TinyTransformer(nn.Module):
    """One attention block over tokens, with additive masks and positions; returns logits (B, S, V) or a loss."""

    def __init__(self, vocabulary: int = 17, width: int = 12):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def logits(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embedding(input_ids) + self.positions(position_ids)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        is_causal = attention_mask is None
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=is_causal)
        return self.head(self.norm(x + self.out(attended.squeeze(1))))

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None, position_ids: Any = None) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class TokenData(Dataset):
    """Documents of one length, as mappings."""

    def __init__(self, rows: int = 24, length: int = 16, vocabulary: int = 17):
        self.tokens = torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Documents(Dataset):
    """Documents of different lengths."""

    def __init__(self, rows: int = 40, vocabulary: int = 17):
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, 12, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index]}


def image_data(rows: int = 24, size: int = 8, channels: int = 3, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(rows, channels, size, size, generator=generator)
    return TensorDataset(images, torch.randint(0, classes, (rows,), generator=generator))


def conv_trainer(*algorithms: Any, callbacks: Any = (), loss: Any = None, **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kwargs.setdefault("seed", 7)
    return Trainer(model, loss or nn.CrossEntropyLoss(), optimizer, callbacks, algorithms=algorithms, **kwargs)


def text_trainer(*algorithms: Any, callbacks: Any = (), **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kwargs.setdefault("seed", 7)
    return Trainer(model, None, optimizer, callbacks, algorithms=algorithms, **kwargs)


def train(trainer: Trainer, data: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("num_epochs", 2)
    kwargs.setdefault("per_device_batch_size", 6)
    loader = {"num_workers": 0, **kwargs.pop("train_dataloader_kwargs", {})}
    return trainer.train(data, train_dataloader_kwargs=loader, **kwargs)


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of all parameters and buffers."""
    return [value.detach().clone() for value in model.state_dict().values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


class Watch(TrainerCallback):
    """Keeps what a function of the state returns at an event."""

    allow_multiple = True

    def __init__(self, event: Event, look: Any):
        self.values: list[Any] = []
        setattr(self, event.value, lambda state, logger: self.values.append(look(state)))


class PullPlug(TrainerCallback):
    """Ends the process, as far as the trainer can tell, before a batch."""

    def __init__(self, at: int):
        self.at = at

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.state.clock.batch == self.at:
            raise RuntimeError("the plug is pulled")


class Log:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.append(dict(metrics))

    def log_hyperparameters(self, hyperparameters: Any) -> None: ...

    def log_images(self, images: Any, name: str = "images", step: Any = None) -> None: ...


def make_state(batch: Any = None, seed: int = 0, max_duration: str = "10ep", length: int = 10, **fields: Any) -> State:
    """Return a state in the middle of nowhere, with a batch in hand."""
    state = State(model=fields.pop("model", None), rank_zero_seed=seed, max_duration=max_duration)
    state.set_dataloader(range(length), "train")
    state.batch = batch
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def run(algorithm: Any, state: State, *events: Event, log: Any = None) -> Any:
    """Apply an algorithm at events, as an engine with no other guest would."""
    engine = Engine(state, log, [algorithm])
    for event in events:
        engine.fire(event)
    return state.batch


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
