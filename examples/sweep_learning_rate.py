"""Which learning rate? A sweep tries some, each in its own run folder, and ranks them.

python examples/sweep_learning_rate.py                  # one after the other
python examples/sweep_learning_rate.py --processes 2    # two at a time
python examples/sweep_learning_rate.py --sampler random # draws instead of a grid
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

from drivetrain.experiment import Choice, LogUniform, SweepResult, experiment, sweep


@experiment
def fit(lr: float = 0.1, width: int = 16, steps: int = 100):
    """Fit a sine with a small network."""
    x = torch.linspace(-3, 3, 64)[:, None]
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
    return loss.item()


def main(
    output_dir: str = "output", sampler: str = "grid", trials: int = 8, steps: int = 100, processes: int = 1
) -> SweepResult:
    """Run the sweep, print its table, and draw it."""
    rates = Choice(1e-4, 1e-3, 1e-2, 1e-1) if sampler == "grid" else LogUniform(1e-4, 1.0)
    result = sweep(
        fit,
        {"lr": rates, "width": Choice(4, 16)},
        sampler=sampler,
        n_trials=trials,
        executor="inline" if processes == 1 else "pool",
        num_processes=processes,
        params={"steps": steps, "random_seed": 0, "output_dir": output_dir},
    )
    print(result.table())
    print(f"best: {result.best.params} with a loss of {result.best.value:.2g}; all in {result.folder}")
    result.to_csv(result.folder / "trials.csv")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output-dir", default="output")
    parser.add_argument("--sampler", default="grid", choices=["grid", "random", "optuna"])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    sweep_result = main(**vars(parser.parse_args()))
    sweep_result.plot(sweep_result.folder / "trials.png")
