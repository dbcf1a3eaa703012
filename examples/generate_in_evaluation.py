"""Metrics of what a model generates: a small model learns to reverse digits and is judged by whole answers.

python examples/generate_in_evaluation.py
torchrun --nproc-per-node 2 examples/generate_in_evaluation.py

For the loss the model sees the right digits before each one that it predicts. Exact match asks for more: it reads its own digits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain import Trainer

DIGITS, START = 10, 10


class Reverser(nn.Module):
    """Reads digits with one GRU and writes with another; `generate` feeds it what it wrote."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, digits: Tensor, written: Tensor) -> Tensor:
        """Return the logits of the next digit after each one written: (batch, length, digits)."""
        read = self.reader(self.embedding(digits))[1]
        return self.head(self.writer(self.embedding(written), read)[0])

    def generate(self, digits: Tensor, max_new_tokens: int, synced_gpus: bool = False) -> Tensor:
        """Return the digits that the model writes; every rank writes equally many, so none has to wait (`synced_gpus`)."""
        written = torch.full_like(digits[:, :1], START)
        for _ in range(max_new_tokens):
            best = self(digits, written)[:, -1].argmax(-1, keepdim=True)
            written = torch.cat([written, best], dim=1)
        return written[:, 1:]


class ReversalTrainer(Trainer):
    """Trains on (digits, answer): the writer sees the answer one step late."""

    def calculate_train_batch_loss(self, batch):
        """Return the loss with the right digits at hand."""
        digits, answer = batch
        written = functional.pad(answer[:, :-1], (1, 0), value=START)
        logits = self.forward(digits, written)
        loss = self.compute_loss(logits.transpose(1, 2), answer)
        return {"loss": loss, "model_outputs": logits, "batch_size": len(digits)}

    calculate_eval_batch_loss = calculate_train_batch_loss

    def calculate_generation_batch(self, batch):
        """Generate from the digits alone."""
        return self.generate(batch[0])


def exact_match(generated: Tensor, answer: Tensor) -> Tensor:
    """Return the share of answers that are right in all places."""
    return (generated == answer).all(1).float().mean()


def make_data(rows: int, length: int, seed: int) -> TensorDataset:
    """Return rows of digits and their reversals."""
    digits = torch.randint(0, DIGITS, (rows, length), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(digits, digits.flip(1))


def main(num_epochs: int = 4, length: int = 3, rows: int = 2048) -> float:
    """Train, print the loss and the exact matches of each epoch, and return the last of these."""
    torch.manual_seed(0)
    model, test = Reverser(), make_data(256, length, seed=2)
    trainer = ReversalTrainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        callbacks=(),
        metrics={"exact_match": exact_match},
        generate={"max_new_tokens": length},
    )
    history = trainer.train(
        make_data(rows, length, seed=1), num_epochs=num_epochs, eval_dataset=test, per_device_batch_size=64
    )
    for name in ("eval_loss_epoch", "eval_exact_match_epoch"):
        trainer.print(name, [round(value, 3) for value in history.get_metric_values(name)])
    answers = trainer.predict(test, generate=True)
    trainer.print(f"{test[0][0].tolist()} reversed: {answers[0].tolist()}")
    return history.get_latest_metric("eval_exact_match_epoch")


if __name__ == "__main__":
    main()
