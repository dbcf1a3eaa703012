"""A model and its loss compiled as one graph against two graphs, in the Trainer: time of a step and peak memory.

A small language model with a large vocabulary, where the loss costs most. Both Trainers train the same model on the same batch with the
same compiled plan; one has a callback between model and loss, which keeps them apart. The blocks of steps take turns. Prints the ratio of
the times and of the peaks; below 1, one graph is better.

    python -m benchmarks.joint_loss [--vocabulary 8000] [--width 128] [--tokens 2048] [--turns 10]
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import alternate, environment, low, write_result
from drivetrain import Trainer
from drivetrain.core.plugin import Callback

LENGTH = 64


class LanguageModel(nn.Module):
    """Predicts each token from itself: an embedding, two layers and a head."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.layers(hidden))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over tokens, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Between(Callback):
    """Listens after the forward pass, so that model and loss stay two graphs."""

    def after_forward(self, state: Any, logger: Any) -> None:
        """Do nothing."""


def trainer_of(arguments: argparse.Namespace, apart: bool) -> tuple[Trainer, Callable[[int], None]]:
    """Return a Trainer that has compiled its plan, and a function that trains so many steps."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel(arguments.vocabulary, arguments.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = [("amp_native", "bf16"), ("native_dynamo", {"scope": "model"})]
    callbacks = [Between()] if apart else []
    trainer = Trainer(model, token_loss, optimizer, callbacks=callbacks, strategy=plan, device=device)
    rows = arguments.tokens // LENGTH
    tokens = torch.randint(0, arguments.vocabulary, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(tokens, tokens)

    def run(steps: int) -> None:
        options = {"shuffle": False, "num_workers": 0}
        trainer.train(data, num_epochs=steps, per_device_batch_size=rows, train_dataloader_kwargs=options)

    run(2)
    return trainer, run


def peak_of(run: Callable[[int], None]) -> int:
    """Return the most bytes that a step holds in addition to what was held before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(2)
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(2)
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for _, size in changes:
        held += size
        most = max(most, held)
    return most


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()
    made = {"one graph": trainer_of(arguments, apart=False), "two graphs": trainer_of(arguments, apart=True)}
    joint, apart = (made[name][0].run.loss.joint is not None for name in made)
    assert joint and not apart, "the plans were not compiled as this benchmark needs them"
    peaks = {name: peak_of(run) for name, (_, run) in made.items()}
    seconds = alternate({name: run for name, (_, run) in made.items()}, arguments.turns, steps=3)
    times = {name: low(values, 0.5) for name, values in seconds.items()}
    result = {
        "settings": vars(arguments),
        "logits_bytes_bf16": arguments.tokens * arguments.vocabulary * 2,
        "seconds_per_step": times,
        "peak_bytes": peaks,
        "time_ratio": times["one graph"] / times["two graphs"],
        "peak_ratio": peaks["one graph"] / peaks["two graphs"],
        "blocks": seconds,
        "environment": environment(arguments.turns),
    }
    name = "joint_loss_cuda" if torch.cuda.is_available() else "joint_loss_cpu"
    print(json.dumps({key: result[key] for key in ("seconds_per_step", "peak_bytes", "time_ratio", "peak_ratio")}))
    print(write_result(name, result))


if __name__ == "__main__":
    main()
