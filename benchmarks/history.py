"""What a long history costs: the time and memory of a save after 10^4 ... 10^7 logged values.

    python -m benchmarks.history [--values 10000000] [--folder FOLDER]

A Trainer's State with a tiny model is saved every tenth of the values, as a Trainer with `checkpoint_dir` saves it. A save should take as
long after ten million values as after ten thousand: it writes what was recorded since the last save. So at each size two saves are timed,
one that writes a tenth of all values and one after 1,000 further values. Memory is what `tracemalloc` counts after the last save, and
the process's largest size. The resume at the end reads everything back and compares it.
"""

import argparse
import resource
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import environment, write_result
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.state import State
from drivetrain.train.tracking import InMemoryRunHistory

NAMES = ("loss", "lr", "grad_norm", "tokens")
FEW = 1000


def make_state() -> State:
    """Return a State as a Trainer fills it, as far as the history is concerned."""
    state = State(model=torch.nn.Linear(4, 4))
    state.history = state._side_file = InMemoryRunHistory()
    return state


def log(history: InMemoryRunHistory, values: int) -> float:
    """Record values under several names and return the seconds for each."""
    started = time.perf_counter()
    for place in range(values):
        history.update_metric(NAMES[place % len(NAMES)], 0.5 * place)
    return (time.perf_counter() - started) / max(values, 1)


def measure(folder: Path, values: int) -> dict[str, Any]:
    """Log values with ten saves on the way, and time what comes then."""
    state = make_state()
    checkpointer = Checkpointer(state, dir=folder, keep=1, async_save=False, signals=False)
    tracemalloc.start()
    for part in range(10):
        per_value = log(state.history, values // 10)
        started = time.perf_counter()
        checkpointer.save(id=part)
        tenth = time.perf_counter() - started
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    few = []
    for part in range(5):
        log(state.history, FEW)
        started = time.perf_counter()
        path = checkpointer.save(id=f"few-{part}")
        few.append(time.perf_counter() - started)
    started = time.perf_counter()
    other = make_state()
    Checkpointer(other, dir=folder, signals=False).restore()
    resumed = time.perf_counter() - started
    for name in NAMES:
        assert other.history._series[name].numbers == state.history._series[name].numbers
        assert other.history._series[name].steps == state.history._series[name].steps
    return {
        "values": values,
        "microseconds_per_logged_value_with_tracemalloc": round(1e6 * per_value, 3),
        "seconds_of_a_save_with_a_tenth_of_the_values": round(tenth, 4),
        f"seconds_of_a_save_with_{FEW}_new_values": round(min(few), 4),
        "bytes_of_state_json": (path / "state.json").stat().st_size,
        "bytes_of_history_file": (folder / "history.bin").stat().st_size,
        "bytes_in_memory_per_value": round(memory / values, 1),
        "seconds_to_resume": round(resumed, 3),
        "largest_process_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main(values: int = 10_000_000, folder: Path | None = None) -> float:
    """Measure, print and write; return the time of a save after all values divided by that after the fewest."""
    sizes = [size for size in (10**4, 10**5, 10**6, 10**7) if size < values] + [values]
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as place:
            rows.append(measure(Path(place), size))
        print(rows[-1], flush=True)
    key = f"seconds_of_a_save_with_{FEW}_new_values"
    ratio = rows[-1][key] / rows[0][key]
    print(f"a save after {sizes[-1]:,} values takes {ratio:.2f} times as long as after {sizes[0]:,}")
    write_result("history", {"rows": rows, "ratio": round(ratio, 3)} | environment(runs=5), folder)
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    main(arguments.values, arguments.folder)
