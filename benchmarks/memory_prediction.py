"""How well is a step's memory predicted before it is run? Predicted over measured peak, five models, four ways to train them.

    python -m benchmarks.memory_prediction            # on a CUDA device, about three minutes
    python -m benchmarks.memory_prediction --models llama,vit
    python -m benchmarks.memory_prediction --smoke    # a tiny model, predictions only

The prediction comes from fake tensors on the host, at batches of two and four samples; the measurement is
`torch.cuda.max_memory_allocated()` of a steady step with fused AdamW at the batch size below. Results are appended to
`benchmarks/results/memory_prediction.json` after each model; the last line printed is the worst ratio.
"""

import argparse
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import loss_func, make_batch, make_model
from benchmarks.timing import RESULTS, environment
from drivetrain.module.checkpointing import checkpoint_blocks
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.values import PARTS, ModelProfile
from drivetrain.strategy.task import CallModel, TrainingTask

SIZES = {"gpt2": 16, "llama": 8, "bert": 32, "vit": 128, "resnet50": 128}
WAYS = ("eager float32", "eager bfloat16", "eager bfloat16 checkpointed", "compiled bfloat16")
_CALL = CallModel("unpack_dict")
_GIB = 2**30
CUDA_WORKSPACE_BYTES = 2 * 32 * 2**20
"""What matrix products allocate on recent CUDA devices in addition to tensors, once for the forward and once for the backward thread."""


def predict(name: str, *, tiny: bool = False) -> tuple[ModelProfile, float]:
    """Return a model's profile and the seconds it took."""
    task = TrainingTask(
        model_fn=functools.partial(make_model, name, tiny=tiny),
        call=_CALL,
        loss_func=loss_func,
        optim_func=torch.optim.AdamW,
        optim_args={"lr": 1e-4},
        samples=make_batch(name, 4, tiny=tiny),
    )
    start = time.perf_counter()
    return ModelProfiler(task).profile(PARTS), time.perf_counter() - start


def predicted_bytes(profile: ModelProfile, way: str, size: int) -> float | None:
    """Return the predicted peak of one way to train, with a fused optimizer; None where the profile could not say."""
    kinds = {"eager float32": "float32", "eager bfloat16": "bfloat16", "compiled bfloat16": "bfloat16/compiled"}
    peak = profile.peak(kinds.get(way, "bfloat16/full"), size)
    return None if peak is None else peak + CUDA_WORKSPACE_BYTES


def measure(name: str, way: str, size: int, *, steps: int = 3) -> float:
    """Return the largest number of bytes allocated in a steady step on the device."""
    device = torch.device("cuda")
    model = make_model(name).to(device)
    batch = {key: value.to(device) for key, value in make_batch(name, size).items()}
    if way.endswith("checkpointed"):
        checkpoint_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled="bfloat16" in way):
            return loss_func(batch, _CALL(model, batch))

    run = torch.compile(forward) if way.startswith("compiled") else forward
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        run().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    peak = float(torch.cuda.max_memory_allocated())
    torch._dynamo.reset()
    return peak


def compare(names: list[str], ways: list[str], keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Return predicted and measured peaks of all models and ways; `keep` gets what there is after each model."""
    rows: list[dict[str, Any]] = []
    for name in names:
        profile, seconds = predict(name)
        for way in ways:
            predicted = predicted_bytes(profile, way, SIZES[name])
            try:
                measured: float | None = measure(name, way, SIZES[name])
            except torch.cuda.OutOfMemoryError:
                measured = None
            gc.collect()
            torch.cuda.empty_cache()
            ratio = predicted / measured if predicted and measured else None
            rows.append(
                {
                    "model": name,
                    "way": way,
                    "batch": SIZES[name],
                    "predicted": predicted,
                    "measured": measured,
                    "ratio": ratio,
                    "profile_seconds": seconds,
                    "notes": list(profile.notes),
                }
            )
            print(_line(rows[-1]), flush=True)
        keep(rows)
        print(f"{name:9} profiled in {seconds:.1f} s" + "".join(f"\n  {note}" for note in profile.notes), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    def gib(value: float | None) -> str:
        return f"{value / _GIB:8.2f}" if value is not None else "       -"

    ratio = f"{row['ratio']:7.3f}" if row["ratio"] is not None else "      -"
    return f"{row['model']:9} {row['way']:28} {row['batch']:4} {gib(row['predicted'])} {gib(row['measured'])} {ratio}"


class ResultFile:
    """Adds a run to those that a file holds, again and again while it grows: a run that is ended has left what it found."""

    def __init__(self, path: Path, result: dict[str, Any]):
        self.path, self.result = path, result
        self._held = json.loads(path.read_text()) if path.is_file() else []

    def keep(self, rows: list[dict[str, Any]]) -> None:
        """Write the file with these rows as this run's."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps([*self._held, self.result | {"rows": rows}], indent=2, default=str) + "\n")


def smoke() -> list[dict[str, Any]]:
    """Predict for a tiny model, on any machine, and check that every way has a figure that grows with the batch."""
    rows = []
    profile, seconds = predict("gpt2", tiny=True)
    for way in WAYS:
        small, large = (predicted_bytes(profile, way, size) for size in (64, 4096))
        assert small is not None and large is not None and small < large, (way, profile.notes)
        row = {"model": "gpt2", "way": way, "batch": 64, "predicted": small, "measured": None, "ratio": None}
        rows.append(row | {"profile_seconds": seconds})
        print(_line(row))
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Compare predictions with a device, or only make them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES), help="names, separated by commas")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out the compiled way, which takes most of the time"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, predictions only; needs no device")
    chosen = parser.parse_args(arguments)
    print(f"{'model':9} {'way':28} {'size':>4} {'predicted':>8} {'measured':>8} {'ratio':>7}   (GiB)")
    if chosen.smoke:
        return smoke()
    if not torch.cuda.is_available():
        raise SystemExit("memory_prediction measures on a CUDA device; use --smoke without one.")
    ways = [way for way in WAYS if not (chosen.no_compile and way.startswith("compiled"))]
    names = chosen.models.split(",")
    for name in names:
        if name not in SIZES:
            parser.error(f"--models: {name!r} is none of {', '.join(SIZES)}")
    results = ResultFile(RESULTS / "memory_prediction.json", {"environment": environment()})
    rows = compare(names, ways, results.keep)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=float("nan"))
    print(f"predicted / measured, worst of {len(ratios)}: {worst:.3f}")
    return rows


if __name__ == "__main__":
    main()
