"""What a recorded scalar costs: the Recorder with all of its files against TensorBoard's SummaryWriter alone.

    python -m benchmarks.recorder [--blocks 60] [--steps 50]

Both write a loss tensor and nine Python floats a step. The Recorder keeps `metrics.jsonl`, `scalars.csv` and TensorBoard files
and is flushed as often as the SummaryWriter: once a block, inside the measured time. "the call" is what the training loop sees between
flushes. With a CUDA device all ten values are tensors there, which `add_scalar` has to wait for; nothing else runs on the device.
"""

import argparse
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


def main(blocks: int = 60, steps: int = 50, folder: Path | None = None) -> float:
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
    write_result("recorder", result | environment(runs=blocks), folder)
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    main(arguments.blocks, arguments.steps)
