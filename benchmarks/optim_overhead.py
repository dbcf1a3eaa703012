"""What a unit costs above the torch optimizer it owns, on a model so small that nothing else matters.

Three questions, each answered by two loops that take turns: a set of one unit against the bare optimizer and a schedule
set by hand; the same with clipping; and two units that follow one loss against one, since their backward must run
once. Prints the microseconds a step that a unit adds, and the ratio of two units to one.

    python benchmarks/optim_overhead.py [--blocks 120] [--steps 100]
"""

import argparse
import json
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import alternate, environment, low, write_result
from drivetrain.optim import CosineLr, OptimSet

Loop = Callable[[int], None]
TOTAL = 10_000_000


def tiny_model() -> nn.Module:
    """Return a model whose step costs some tens of microseconds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def bare_loop(x: Tensor, clip: float | None) -> Loop:
    """Return the loop one writes by hand: forward, backward, clip, rate, step, clear."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    done = 0

    def run(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            done += 1
            loss = model(x).mean()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * done / TOTAL)) / 2
            optimizer.step()
            optimizer.zero_grad()

    return run


def unit_loop(x: Tensor, clip: float | None) -> Loop:
    """Return the same loop with a set of one unit."""
    model = tiny_model()
    nonfinite = "ignore" if clip is None else "skip"
    optim = OptimSet(main=CosineLr("SGD", {"lr": 1e-3}, model, total_steps=TOTAL, grad_clip=clip, nonfinite=nonfinite))
    done = 0

    def run(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            done += 1
            optim.begin_batch(done, 1)
            loss = model(x).mean()
            optim.backward({"loss": loss})
            optim.step()
            optim.zero_grad()

    return run


def several_units_loop(units: int) -> Loop:
    """Return a loop over so many units on one loss, in a model whose backward outweighs everything else."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)), nn.Linear(256, 1))
    conf = {
        "optim_type": "SGD",
        "optim_conf": {"lr": 1e-3},
        "model": model,
        "total_steps": TOTAL,
        "grad_clip": None,
        "nonfinite": "ignore",
    }
    parts = [["0", "1"], ["2", "3"]] if units == 2 else [["0", "1", "2", "3"]]
    optim = OptimSet({f"unit{index}": CosineLr(**conf, updated_modules=part) for index, part in enumerate(parts)})
    assert len(optim.passes()) == 1

    def run(steps: int) -> None:
        for _ in range(steps):
            optim.backward({"loss": model(x).mean()})
            optim.step()
            optim.zero_grad()

    return run


def main(blocks: int = 120, steps: int = 100, write: bool = True) -> dict[str, float]:
    """Measure, print and return the added microseconds and the ratio of two units to one."""
    x = torch.randn(4, 8)
    added: dict[str, float] = {}
    for name, clip in (("plain", None), ("clipped", 1.0)):
        seconds = alternate(
            {"bare": bare_loop(x, clip), "again": bare_loop(x, clip), "unit": unit_loop(x, clip)}, blocks, steps
        )
        bare = low(seconds["bare"])
        added[f"{name}_us"] = (low(seconds["unit"]) - bare) * 1e6
        added[f"{name}_noise_us"] = (low(seconds["again"]) - bare) * 1e6
        print(
            f"{name}: bare {bare * 1e6:.1f} us a step, a unit adds {added[f'{name}_us']:.1f} us (noise {added[f'{name}_noise_us']:+.1f} us)"
        )
    seconds = alternate({"one": several_units_loop(1), "two": several_units_loop(2)}, blocks, max(1, steps // 10))
    added["two_units_ratio"] = low(seconds["two"]) / low(seconds["one"])
    print(f"two units on one loss cost {added['two_units_ratio']:.2f} of one unit: the backward runs once")
    if write:
        write_result("optim_overhead", {**added, "environment": environment(blocks)})
    return added


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = main(options.blocks, options.steps)
    if options.json:
        print(json.dumps(result))
