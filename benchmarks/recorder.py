"""What a recorded scalar costs: the Recorder with all of its files against TensorBoard's SummaryWriter alone.

    python -m benchmarks.recorder [--blocks 60] [--steps 50] [--long 1000000]

Both write a loss tensor and nine Python floats a step. The Recorder keeps `metrics.jsonl`, `scalars.csv` and TensorBoard files
and is flushed as often as the SummaryWriter: once a block, inside the measured time. "the call" is what the training loop sees between
flushes. With a CUDA device all ten values are tensors there, which `add_scalar` has to wait for; nothing else runs on the device.
A long run of one scalar a step shows that memory does not grow with the number of steps.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Block, compare, environment, write_result
from drivetrain.record import Recorder

TAGS = tuple(f"train/metric_{place}" for place in range(10))


def values_of_a_step() -> list[Any]:
    """Return what is recorded in each step."""
    if torch.cuda.is_available():
        return list(torch.rand(len(TAGS), device="cuda").unbind())
    return [torch.tensor(0.5), *(0.1 * place for place in range(1, len(TAGS)))]


def recording(recorder: Recorder, values: list[Any], flushes: bool = True) -> Block:
    """Return a loop that records with the Recorder."""

    def loop(steps: int) -> None:
        for _ in range(steps):
            for tag, value in zip(TAGS, values):
                recorder.scalar(tag, value)
            recorder.step()
        if flushes:
            recorder.flush()

    return loop


def writing(writer: Any, values: list[Any]) -> Block:
    """Return a loop that writes with a SummaryWriter."""
    count = 0

    def loop(steps: int) -> None:
        nonlocal count
        for _ in range(steps):
            for tag, value in zip(TAGS, values):
                writer.add_scalar(tag, value, count)
            count += 1
        writer.flush()

    return loop


GOAL_MICROSECONDS = 15.0


def resident_megabytes() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_of_a_long_run(steps: int, parts: int = 10) -> dict[int, float]:
    """Record one scalar a step with all files; return the memory of the process after each tenth of the steps."""
    found = {}
    with tempfile.TemporaryDirectory() as aside, Recorder(aside, flush_every="1s") as recorder:
        for step in range(1, steps + 1):
            recorder.scalar("train/loss", 1.0 / step)
            recorder.step()
            if step % (steps // parts) == 0:
                recorder.flush()
                found[step] = round(resident_megabytes(), 1)
    return found


def main(blocks: int = 60, steps: int = 50, folder: Path | None = None, long: int = 1_000_000) -> float:
    """Measure, print and write; return the Recorder's cost divided by the SummaryWriter's."""
    from torch.utils.tensorboard import SummaryWriter

    values = values_of_a_step()
    with tempfile.TemporaryDirectory() as aside:
        place = Path(aside)
        recorders = {
            name: Recorder(place / name, tensorboard=name == "all files", flush_every="1h")
            for name in ("all files", "no tb", "call")
        }
        writer = SummaryWriter(str(place / "summary_writer"))
        seconds = compare(
            {
                "Recorder: JSONL, CSV and TensorBoard": recording(recorders["all files"], values),
                "Recorder: JSONL and CSV": recording(recorders["no tb"], values),
                "Recorder: the call": recording(recorders["call"], values, flushes=False),
                "SummaryWriter": writing(writer, values),
                "SummaryWriter again": writing(writer, values),
            },
            blocks,
            steps,
        )
        writer.close()
        for recorder in recorders.values():
            recorder.close()
    micro = {name: value / len(TAGS) * 1e6 for name, value in seconds.items()}
    for name, cost in micro.items():
        print(f"{name:40} {cost:8.2f} µs a scalar")
    ratio = micro["Recorder: JSONL, CSV and TensorBoard"] / micro["SummaryWriter"]
    print(f"recording to JSONL, CSV and TensorBoard takes {ratio:.2f} of the time of TensorBoard's SummaryWriter alone")
    result = {"microseconds_per_scalar": micro, "ratio": ratio, "blocks": blocks, "steps": steps}
    result["goal_microseconds"] = GOAL_MICROSECONDS
    if long:
        memory = memory_of_a_long_run(long)
        print(
            f"memory after {min(memory):,} and {max(memory):,} steps: {memory[min(memory)]} and {memory[max(memory)]} MB"
        )
        result["megabytes_after_steps"] = memory
    write_result("recorder", result | environment(runs=blocks), folder)
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--long", type=int, default=1_000_000)
    arguments = parser.parse_args()
    main(arguments.blocks, arguments.steps, long=arguments.long)
