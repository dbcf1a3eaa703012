"""What importing costs: `import drivetrain` alone, `from drivetrain import Trainer` over `import torch`, and `--help` over a bare Python.

    python benchmarks/import_time.py [--runs 7]

Each import runs in a fresh interpreter, the cases in turn; the least time of each counts. The cases without torch are short and run
twenty times as often, so that a busy machine has a quiet moment for each.
"""

import argparse
import math
import subprocess
import sys
import time

from benchmarks.timing import environment, write_result

GOAL_HELP = 0.05
MORE = 20
CASES = {
    "nothing": "pass",
    "import drivetrain": "import drivetrain",
    "import torch": "import torch",
    "import torch, then Trainer": "import torch; from drivetrain import Trainer",
    "python -m drivetrain --help": None,
}


def seconds(code: str | None) -> float:
    command = [sys.executable, "-m", "drivetrain", "--help"] if code is None else [sys.executable, "-c", code]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main(runs: int = 7) -> dict[str, float]:
    times = dict.fromkeys(CASES, math.inf)
    for turn in range(MORE * runs):
        for name, code in CASES.items():
            if turn % MORE == 0 or "torch" not in name:
                times[name] = min(times[name], seconds(code))
    own = times["import drivetrain"] - times["nothing"]
    help_text = times["python -m drivetrain --help"] - times["nothing"]
    trainer = times["import torch, then Trainer"] - times["import torch"]
    for name, value in times.items():
        print(f"{name:32} {value * 1e3:8.0f} ms")
    print(
        f"import drivetrain: {own * 1e3:.0f} ms; Trainer over torch: {trainer * 1e3:.0f} ms, {trainer / times['import torch']:.3f} of it"
    )
    print(f"--help: {help_text * 1e3:.0f} ms over a bare Python, the goal is {GOAL_HELP * 1e3:.0f} ms")
    result = {"seconds": times, "own": own, "trainer_over_torch": trainer, "help": help_text, "goal_help": GOAL_HELP}
    write_result("import_time", result | environment(runs=runs))
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    main(parser.parse_args().runs)
