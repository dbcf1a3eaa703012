"""What listing many long runs costs: CPU seconds of `drivetrain ls` over synthetic run folders.

    python benchmarks/many_runs.py [--runs 300] [--rows 1000000] [--repeats 3]

All runs share one metrics file by hard links, so that the disk holds it once. Each has its own summary, as a run leaves it at its end. The
first listing of a run without a summary, which reads its rows, is measured apart, and so is one after 1,000 rows were added.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import environment, write_result
from drivetrain.experiment.summaries import FILE_NAME, summarize_metrics

GOAL_SECONDS = 1.0


def write_metrics(file: Path, first: int, rows: int) -> None:
    """Append rows as the Recorder writes them: a loss and a learning rate at each step, an accuracy at every hundredth."""
    with open(file, "a") as stream:
        for row in range(first, first + rows):
            step = row // 2
            tag = ("eval/accuracy" if step % 100 == 99 else "lr") if row % 2 else "train/loss"
            value = 1.0 / (1.0 + step * 1e-4)
            stream.write(f'{{"step": {step}, "time": 1.000, "kind": "scalar", "tag": "{tag}", "value": {value!r}}}\n')


def write_run(place: Path, number: int) -> Path:
    """Write a finished run without metrics."""
    folder = place / "train" / f"2026-01-31_12-00-00_{number:06d}"
    folder.mkdir(parents=True)
    parameters = {"lr": 10.0 ** -(number % 5), "depth": number % 7, "epochs": 90} | {
        f"option_{i}": f"value {i}" for i in range(25)
    }
    (folder / "parameters.yaml").write_text("".join(f"{name}: {value}\n" for name, value in parameters.items()))
    packages = {f"package-{i}": f"{i}.0" for i in range(120)}
    manifest = {"schema": 1, "experiment": "train", "started": 1.77e9 + number, "origins": {}, "packages": packages}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"git": {"commit": "0" * 40, "diff": "+x\n" * 5000}}))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "step": 500_000, "seconds": 3600.0}))
    return folder


def cpu_seconds(*words: object) -> float:
    """Return user and system time of one command, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "drivetrain", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(runs: int = 300, rows: int = 1_000_000, repeats: int = 3) -> dict[str, float]:
    """Measure and write the result."""
    with tempfile.TemporaryDirectory() as name:
        place, alone = Path(name, "many"), Path(name, "one")
        first = write_run(alone, 0) / "metrics.jsonl"
        write_metrics(first, 0, rows)
        size = first.stat().st_size
        seconds = {"first listing of one run, its rows are read": cpu_seconds("ls", alone)}
        summarize_metrics(first)
        for number in range(runs):
            folder = write_run(place, number)
            os.link(first, folder / "metrics.jsonl")
            shutil.copy(first.with_name(FILE_NAME), folder)
        best = lambda *words: min(cpu_seconds(*words) for _ in range(repeats))
        seconds["ls"] = best("ls", place)
        seconds["ls with a condition, sorted"] = best("ls", place, "lr<0.1 and depth>2", "--sort", "eval/accuracy")
        seconds["ls --json"] = best("ls", place, "--json")
        seconds["compare"] = best("compare", place)
        shutil.rmtree(place)
        write_metrics(first, rows, 1000)
        seconds["listing of one run after 1,000 more rows"] = cpu_seconds("ls", alone)
    for what, value in seconds.items():
        print(f"{what:45} {value:7.3f} s CPU")
    facts = {
        "run_folders": runs,
        "rows_per_run": rows,
        "bytes_per_run": size,
        "repeats": repeats,
        "goal_seconds": GOAL_SECONDS,
    }
    write_result("many_runs", {"cpu_seconds": seconds, **facts} | environment())
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.runs, arguments.rows, arguments.repeats)
