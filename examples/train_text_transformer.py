"""Train a small byte-level transformer on a text file: dict batches, a loss that is a mean over tokens, a cosine schedule.

python examples/train_text_transformer.py --text path/to/file.txt --num-epochs 1
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain import Trainer
from drivetrain.schedulers import CosineLrScheduler

SAMPLE = "To turn a wheel you need a road, and to find a road you need to turn a wheel. " * 60


class ByteTransformer(nn.Module):
    """A causal transformer over bytes that returns logits and, given labels, its own loss."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, length: int = 64):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        hidden = self.embed(input_ids) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class TextWindows(torch.utils.data.Dataset):
    """Consecutive windows of a text, as bytes."""

    def __init__(self, text: bytes, length: int):
        usable = len(text) // length * length
        self.rows = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).long().view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main(
    text: str | None = None, num_epochs: int = 1, max_num_train_steps: int | None = None, length: int = 64
) -> list[float]:
    torch.manual_seed(0)
    data = TextWindows(Path(text).read_bytes() if text else SAMPLE.encode(), length)
    model = ByteTransformer(length=length)
    trainer = Trainer(model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), count_items="labels")
    history = trainer.train(
        data,
        num_epochs=num_epochs,
        max_num_train_steps=max_num_train_steps,
        per_device_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_clip_norm=1.0,
        train_dataloader_kwargs={"num_workers": 0},
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(),
    )
    return list(history.get_metric_values("train_loss_epoch"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a text file; without one, a sentence is repeated")
    parser.add_argument("--num-epochs", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.text, arguments.num_epochs)
