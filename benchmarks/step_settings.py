"""What a step costs with other data and settings than the plain ones: the Trainer against the loop one would write for each by hand.

    python -m benchmarks.step_settings [NAME ...] [--blocks 20] [--steps 50]

Each pair takes turns in short blocks. The time is that of the process, which a busy machine disturbs less, and the least of the blocks.
Next to it stand the Python and C calls of a step, which do not depend on the machine. `plain` shows what the Trainer saves by leaving
out torch's marks for the profiler: an option costs what its difference has over that.
"""

import argparse
import contextlib
import cProfile
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.step_overhead import Steps, make_task
from benchmarks.timing import environment, low, write_result
from drivetrain import Trainer
from drivetrain.algorithms import SAM
from drivetrain.callbacks import TrainerCallback

Run = Callable[[int], float]  # runs so many steps and returns their seconds
LOSS = nn.CrossEntropyLoss()


class Lengthless(Steps):
    """The same batches from an iterable without a length."""

    __len__ = None  # type: ignore[assignment]


class Stopwatch(TrainerCallback):
    """Times the last epoch: the first one finds out what later ones need not ask."""

    def epoch_start(self, state, logger):
        self.began = time.thread_time()

    def epoch_end(self, state, logger):
        self.seconds = time.thread_time() - self.began


def trainer(
    data: Callable[[list, int], Any] = Steps, make_optimizer=None, algorithms=(), strict=False, **settings
) -> Run:
    model, batches, optimizer = make_task()
    optimizer = optimizer if make_optimizer is None else make_optimizer(model)
    watch = Stopwatch()
    run = Trainer(model, LOSS, optimizer, callbacks=(watch,), algorithms=algorithms, strict=strict)

    def steps(count: int) -> float:
        run.train(data(batches, count), num_epochs=2, **settings)
        return watch.seconds

    return steps


def by_hand(data: Callable[[list, int], Any] = Steps, make_optimizer=None, step=None) -> Run:
    model, batches, optimizer = make_task()
    optimizer = optimizer if make_optimizer is None else make_optimizer(model)
    step = plain_step if step is None else step

    def steps(count: int) -> float:
        model.train()
        loader = data(batches, count)
        began = time.thread_time()
        for number, (x, y) in enumerate(loader):
            step(model, optimizer, x, y, number)
        return time.thread_time() - began

    return steps


def plain_step(model, optimizer, x, y, number) -> None:
    LOSS(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulating(model, optimizer, x, y, number) -> None:
    (LOSS(model(x), y) / 4).backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


def splitting(model, optimizer, x, y, number) -> None:
    for part, target in zip(x.split(8), y.split(8)):
        (LOSS(model(part), target) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipping(model, optimizer, x, y, number) -> None:
    LOSS(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def perturbing(model, optimizer, x, y, number) -> None:
    LOSS(model(x), y).backward()
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters]
    scale = 0.05 / (nn.utils.get_total_norm(grads) + 1e-12)
    moves = [grad * scale for grad in grads]
    with torch.no_grad():
        torch._foreach_add_(parameters, moves)
    optimizer.zero_grad()
    LOSS(model(x), y).backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, moves)
    optimizer.step()
    optimizer.zero_grad()


def searching(model, optimizer, x, y, number) -> None:
    def closure():
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def both(model, optimizers, x, y, number) -> None:
    LOSS(model(x), y).backward()
    for optimizer in optimizers.values():
        optimizer.step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()


def two_optimizers(model) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(model[index].parameters(), lr=0.01) for name, index in (("first", 0), ("last", 2))}


def lbfgs(model) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)


def samples(batches, count) -> DataLoader:
    rows = [(x, y) for batch in batches for x, y in zip(*batch)]
    return DataLoader(rows[: 8 * count], batch_size=8)


PAIRS: dict[str, Callable[[], tuple[Run, Run]]] = {
    "plain": lambda: (by_hand(), trainer()),
    "iterable without a length": lambda: (by_hand(Lengthless), trainer(Lengthless)),
    "the same, accumulating 4": lambda: (
        by_hand(Lengthless, step=accumulating),
        trainer(Lengthless, gradient_accumulation_steps=4),
    ),
    "DataLoader of samples": lambda: (by_hand(samples), trainer(samples)),
    "accumulating 4": lambda: (by_hand(step=accumulating), trainer(gradient_accumulation_steps=4)),
    "4 micro-batches": lambda: (by_hand(step=splitting), trainer(microbatch_size=8)),
    "clipping": lambda: (by_hand(step=clipping), trainer(gradient_clip_norm=1.0)),
    "SAM": lambda: (by_hand(step=perturbing), trainer(algorithms=[SAM(rho=0.05)])),
    "LBFGS": lambda: (by_hand(make_optimizer=lbfgs, step=searching), trainer(make_optimizer=lbfgs)),
    "two optimizers": lambda: (
        by_hand(make_optimizer=two_optimizers, step=both),
        trainer(make_optimizer=two_optimizers),
    ),
    "strict": lambda: (by_hand(), trainer(strict=True)),
}


def calls_of(run: Run, steps: int, epochs: int) -> float:
    """Return the Python and C calls of one step."""

    def count(number: int) -> int:
        with cProfile.Profile() as profile:
            run(number)
        return sum(entry.callcount for entry in profile.getstats())

    return (count(2 * steps) - count(steps)) / steps / epochs


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def main(names: list[str] | None = None, blocks: int = 20, steps: int = 50) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name in names or PAIRS:
        hand, own = PAIRS[name]()
        with quiet():
            hand(steps), own(steps)
            calls = calls_of(hand, steps, 1), calls_of(own, steps, 2)
            times = [(hand(steps), own(steps)) for _ in range(blocks)]
        least = [low(column, 0.0) / steps * 1e6 for column in zip(*times)]
        row = {"by_hand": least[0], "trainer": least[1], "difference": least[1] - least[0]}
        found[name] = {key: round(value, 1) for key, value in row.items()}
        found[name] |= {"calls_by_hand": round(calls[0], 1), "calls_trainer": round(calls[1], 1)}
        figures = f"{least[0]:8.1f} µs by hand {least[1]:8.1f} µs {least[1] - least[0]:+8.1f}"
        print(f"{name:28} {figures}   calls {calls[0]:6.1f} {calls[1]:6.1f}", flush=True)
    if not names:
        write_result(
            "step_settings", {"microseconds": found, "blocks": blocks, "steps": steps} | environment(runs=blocks)
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PAIRS, []])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    main(arguments.names, arguments.blocks, arguments.steps)
