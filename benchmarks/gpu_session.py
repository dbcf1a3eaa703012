"""Everything that a short time on a GPU should answer, in one call and in the order of its worth.

The short tests come first, then what steps wait for, one graph of model and loss, predicted times and peaks, and the remaining tests as far
as the time goes. Each part is a process of its own with its own limit, so that one that hangs costs only itself. After every part
`session.json` in the output folder holds what is known; each part leaves its log and its result files there.

    python -m benchmarks.gpu_session [--minutes 9] [--out FOLDER] [--only first,joint]
    python -m benchmarks.gpu_session --dry  # small versions on the CPU: do the commands work?

It runs from a source tree. Pure dependencies that the machine lacks may be in `carry/` (which git ignores).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import RESULTS, environment

ROOT = Path(__file__).parents[1]
FIRST, WAITS = "tests/test_first_on_gpu.py", "tests/train/test_host_waits.py"
OUTCOME = re.compile(r"^(FAILED|ERROR) (\S+)", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


class Part(NamedTuple):
    """One command: the module to run, its arguments, those of a dry run, and its share of the time in seconds."""

    module: str
    arguments: tuple[str, ...]
    dry: tuple[str, ...]
    seconds: float


TESTS = ("-m", "gpu", "-rfE", "-o", "addopts=-q --strict-markers -p no:cacheprovider", "--timeout", "120")
PARTS = {
    "first": Part("pytest", (*TESTS, FIRST), (*TESTS, FIRST), 150),
    "waits": Part("pytest", (*TESTS, WAITS), (*TESTS, WAITS), 90),
    "joint": Part("benchmarks.joint_loss", ("--vocabulary", "32000", "--width", "1024", "--tokens", "16384"),
                  ("--vocabulary", "50", "--width", "8", "--tokens", "128", "--turns", "1"), 100),
    "times": Part("benchmarks.step_prediction", ("--models", "lstm,resnet50,gpt2", "--limit", "170"),
                  ("--models", "lstm", "--modes", "eager", "--tiny", "--cpu", "--limit", "60"), 180),
    "memory": Part("benchmarks.memory_prediction", ("--models", "gpt2,resnet50"), ("--smoke",), 60),
    "rest": Part("pytest",
                 (*TESTS, "tests", f"--deselect={FIRST}", f"--deselect={WAITS}"), (*TESTS, "--collect-only", "tests/record"), 540),
}  # fmt: skip


def run(name: str, part: Part, out: Path, seconds: float, dry: bool) -> dict[str, Any]:
    """Run a part and return what came of it."""
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "carry"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", part.module, *(part.dry if dry else part.arguments)]
    log, began, clock = out / f"{name}.log", time.time(), time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    text = log.read_text(errors="replace")
    found: dict[str, Any] = {"command": command[1:], "status": status, "seconds": round(time.monotonic() - clock, 1)}
    if part.module == "pytest":
        summary = text[-4000:]
        found |= {kind: int(number) for number, kind in COUNT.findall(summary)}
        found["failed_tests"] = [test for _, test in OUTCOME.findall(text)]
    for path in RESULTS.glob("*.json"):
        if path.stat().st_mtime > began:
            shutil.copy(path, out / path.name)
    return found


def main() -> None:
    """Run the parts in order until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "output/gpu_session")))
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; separated by commas")
    parser.add_argument("--dry", action="store_true", help="small versions on the CPU")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - PARTS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    end = time.monotonic() + 60 * arguments.minutes
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    session: dict[str, Any] = {"environment": environment(), "dry": arguments.dry, "parts": {}}
    for name in arguments.only.split(","):
        part, left = PARTS[name], end - time.monotonic()
        if left < 10:
            session["parts"][name] = {"status": None, "why": "no time was left"}
            continue
        found = session["parts"][name] = run(
            name, part, out, min(left, part.seconds * (3 if arguments.dry else 1)), arguments.dry
        )
        print(name, json.dumps({key: value for key, value in found.items() if key != "command"}), flush=True)
        (out / "session.json").write_text(json.dumps(session, indent=1) + "\n")


if __name__ == "__main__":
    main()
