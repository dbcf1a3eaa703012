"""A whole Trainer epoch against a bare PyTorch loop fed by torch's DataLoader, on the tiny model of `step_overhead.py`.

    python -m benchmarks.trainer_epoch [--blocks 20]

The Trainer pays for its events and wins by its loader; both train on 3,200 shuffled rows in batches of 32, default callbacks on our
side. Epochs alternate; low percentiles are compared, and the bare loop against itself shows the noise.
"""

import argparse
import contextlib
import io
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import environment, low, write_result


def make_task() -> tuple[nn.Module, TensorDataset, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    data = TensorDataset(torch.randn(3200, 32), torch.randint(0, 10, (3200,)))
    return model, data, torch.optim.SGD(model.parameters(), lr=0.01)


def bare_epoch() -> Callable[[], None]:
    model, data, optimizer = make_task()
    loader, loss_func = DataLoader(data, batch_size=32, shuffle=True), nn.CrossEntropyLoss()

    def run() -> None:
        for x, y in loader:
            loss_func(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def trainer_epoch() -> Callable[[], float]:
    from drivetrain import Trainer
    from drivetrain.callbacks import DEFAULT_CALLBACKS, TrainerCallback

    class Stopwatch(TrainerCallback):
        def epoch_start(self, state, logger):
            self.began = time.perf_counter()

        def epoch_end(self, state, logger):
            self.seconds = time.perf_counter() - self.began

    model, data, optimizer = make_task()
    watch = Stopwatch()
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(*DEFAULT_CALLBACKS, watch))

    def run() -> float:
        trainer.train(data, num_epochs=1, per_device_batch_size=32)
        return watch.seconds

    return run


def main(blocks: int = 20) -> float:
    torch.set_num_threads(1)
    runs = {"bare loop, torch DataLoader": bare_epoch(), "the same again": bare_epoch(), "Trainer": trainer_epoch()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in range(blocks + 1):
            for name, run in runs.items():
                began = time.perf_counter()
                own = run()
                if block:  # the first epoch warms up
                    times[name].append(own if isinstance(own, float) else time.perf_counter() - began)
    least = {name: low(values) for name, values in times.items()}
    for name, value in least.items():
        print(f"{name:28} {value * 1e3:7.2f} ms an epoch of 100 steps")
    ratio = least["Trainer"] / least["bare loop, torch DataLoader"]
    print(f"ratio of the Trainer's epoch to the bare loop's: {ratio:.3f}")
    write_result("trainer_epoch", {"seconds": least, "ratio": ratio, "blocks": blocks} | environment())
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    main(parser.parse_args().blocks)
