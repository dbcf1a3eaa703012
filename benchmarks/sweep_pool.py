"""What a trial of a pool costs above its work: forked from a server that has loaded torch, against a new interpreter.

    python -m benchmarks.sweep_pool [--trials 8] [--repeats 3]

The trial does nothing, and one runs at a time. The cost is that of each further trial: a sweep of `trials + 1` less a sweep of one.
"""

import argparse
import contextlib
import io
import tempfile
import time

from benchmarks.timing import environment, write_result
from drivetrain.experiment import experiment, sweep
from drivetrain.experiment.sweeps import pool

GOAL_SECONDS = 0.5


@experiment
def nothing(x: int = 0):
    """Return at once."""
    return float(x)


def sweep_seconds(trials: int) -> float:
    """Return how long a sweep takes."""
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        began = time.perf_counter()
        sweep(nothing, {"x": list(range(trials))}, params={"output_dir": folder, "cuda": False}, executor="pool")
        return time.perf_counter() - began


def main(trials: int = 8, repeats: int = 3) -> dict[str, float]:
    """Measure, print and write the result."""
    seconds = {}
    for name, preloads in (("forked from a loaded server", True), ("new interpreters", False)):
        pool.CAN_PRELOAD = preloads
        costs = []
        for _ in range(repeats):
            one = sweep_seconds(1)
            costs.append((sweep_seconds(trials + 1) - one) / trials)
        seconds[name] = min(costs)
        seconds[f"{name}: the first trial"] = one
    for name, value in seconds.items():
        print(f"{name:45} {value:7.3f} s")
    facts = {"trials": trials, "goal_seconds": GOAL_SECONDS}
    write_result("sweep_pool", {"seconds_per_trial": seconds, **facts} | environment(runs=repeats))
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.trials, arguments.repeats)
