"""What each algorithm is worth: time to a stated target and final quality, against a tuned baseline.

    DRIVETRAIN_DATA=folder python -m benchmarks.algorithms [--tasks cifar text] [--methods Muon EMA] [--seeds 3] [--limit 10]

The baseline searches a grid of learning rates with the first seed, and so does a method that replaces the optimizer; a grid
whose best rate is its first or last grows there. The best rate is run with the other seeds. Every other method runs at the
baseline's rate: it is to help a run that is tuned already. The clock runs while training does, from the third step on: what
comes before (compilation, tuning of kernels) is kept as start-up. Several processes may share a device (`--beside` says so in the
file, `--merge` puts their files together); times then compare with each other, not with a device of one's own. Runs are
appended to `results/algorithms.json`, and those that are there already are not repeated, so several sittings add up.
`benchmarks/cards.py` turns the file into tables. `--smoke` runs a tiny version of invented data.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.algorithm_tasks import METHODS, Method, Task, make_task, names_for
from benchmarks.timing import RESULTS, environment
from drivetrain import Trainer
from drivetrain.algorithms import NoEffectWarning
from drivetrain.callbacks import TrainerCallback
from drivetrain.core.errors import unknown_name
from drivetrain.optim import as_lr_lambda
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.seeds import set_seed

FILE = RESULTS / "algorithms.json"
STARTUP_STEPS = 2
WARMUP = 0.1  # of the run


class Clock(TrainerCallback):
    """Keeps the training time and the quality at every evaluation, and ends a run that takes too long."""

    def __init__(self, quality: str, limit: float):
        self.quality, self.limit = quality, limit
        self.curve: list[tuple[float, float]] = []
        self.startup = self.seconds = self._began = self._started = self._paused = 0.0
        self.was_stopped = False

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self._trainer, self._began = trainer, self._now(trainer.state)

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.clock.batch == STARTUP_STEPS:
            self._started = self._now(state)
            self.startup = self._started - self._began
        elif state.clock.batch > STARTUP_STEPS and time.perf_counter() - self._started > self.limit:
            self.was_stopped = True
            self._trainer.request_stop(f"{self.limit:g} s are over")

    def eval_start(self, state: Any, logger: Any) -> None:
        self._paused = self._now(state)
        self.seconds = self._paused - self._started

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.curve.append((round(self.seconds, 4), float(trainer.run_history.get_latest_metric(self.quality))))
        self._started += self._now(trainer.state) - self._paused  # evaluation does not count

    @staticmethod
    def _now(state: Any) -> float:
        if state.device.type != "cpu":
            torch.get_device_module(state.device).synchronize()
        return time.perf_counter()


def accuracy(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float().mean()


def run_once(task: Task, method: Method, lr: float, seed: int, device: torch.device, limit: float) -> dict[str, Any]:
    """Train once and return the curve of qualities over training time."""
    set_seed(seed)
    model = task.make_model().to(device)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, **fused)
    clock = Clock(task.quality, limit)
    trainer = Trainer(
        model,
        task.loss,
        optimizer,
        callbacks=[clock],
        algorithms=method.make(),
        device=device,
        seed=seed,
        precision="bf16" if device.type == "cuda" else None,
        metrics={"accuracy": accuracy} if task.higher_is_better else None,
    )
    rows = len(task.train_set["labels"] if isinstance(task.train_set, dict) else task.train_set)
    steps = rows // task.batch_size * task.epochs
    follow = as_lr_lambda("cosine", total_steps=steps, warmup_steps=max(1, int(WARMUP * steps)))
    trainer.train(
        task.train_set,
        task.epochs,
        task.eval_set,
        task.batch_size,
        create_scheduler_fn=(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, follow))
        if method.has_schedule
        else None,
        train_dataloader_kwargs={"num_workers": 0, "drop_last": True, "pin_memory": False},
        eval_dataloader_kwargs={"num_workers": 0, "pin_memory": False},
    )
    return {
        "final": round(clock.curve[-1][1], 5) if clock.curve else None,
        "curve": clock.curve,
        "startup_seconds": round(clock.startup, 3),
        "steps": trainer.state.clock.step,
        "stopped": clock.was_stopped,
    }


def measure(
    task: Task, name: str, seeds: int, device: torch.device, limit: float, lrs: Sequence[float], known: dict[str, dict]
) -> Iterator[dict[str, Any]]:
    """Yield the runs of one method: the rates with the first seed, the best one with the others; known ones are not repeated."""

    def run(lr: float, seed: int) -> dict[str, Any]:
        facts = {
            "task": task.name,
            "method": name,
            "lr": lr,
            "seed": seed,
            "epochs": task.epochs,
            "batch": task.batch_size,
        }
        facts["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        done = known.get(key_of(facts))
        if done is not None:
            return done
        try:
            return {**facts, **run_once(task, METHODS[task.name][name], lr, seed, device, limit)}
        except Exception as error:  # one method that fails must not cost the sitting
            return {**facts, "error": f"{type(error).__name__}: {error}", "final": None}

    grid, waiting = [], list(lrs)
    while waiting:
        grid.append(run(waiting.pop(0), 0))
        yield grid[-1]
        if not waiting:
            waiting = beyond_edge(grid, task.higher_is_better)
    best = best_rate(grid, task.higher_is_better)
    if best is not None:
        for seed in range(1, seeds):
            yield run(best, seed)


def best_rate(runs: Sequence[dict[str, Any]], higher_is_better: bool) -> float | None:
    """Return the rate whose run ended best, or None if none ended."""
    ended = [run for run in runs if run.get("final") is not None and run["final"] == run["final"]]
    sign = 1 if higher_is_better else -1
    return max(ended, key=lambda run: sign * run["final"])["lr"] if ended else None


def beyond_edge(grid: Sequence[dict[str, Any]], higher_is_better: bool) -> list[float]:
    """Return the next rate to try where the best one is the first or the last of a grid; at most two are added."""
    best, rates = best_rate(grid, higher_is_better), sorted(run["lr"] for run in grid)
    if best is None or not 3 <= len(rates) < 5 or best not in (rates[0], rates[-1]):
        return []
    return [best / 2 if best == rates[0] else best * 2]


def key_of(run: dict[str, Any]) -> str:
    """Return what tells a run from others."""
    return json.dumps([run[name] for name in ("task", "method", "lr", "seed", "epochs", "batch", "device")])


def read_results(path: Path) -> dict[str, Any]:
    """Return what earlier sittings left."""
    if not path.is_file():
        return {"sittings": [], "runs": []}
    return json.loads(path.read_text())


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write the file anew, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    runs = ",\n".join("  " + json.dumps(run) for run in results["runs"])
    sittings = ",\n".join("  " + json.dumps(sitting) for sitting in results["sittings"])
    unfinished.write_text(f'{{"sittings": [\n{sittings}\n], "runs": [\n{runs}\n]}}\n')
    os.replace(unfinished, path)


def merge(path: Path, others: Sequence[Path]) -> None:
    """Add the sittings of other files to a file."""
    results = read_results(path)
    for other in map(read_results, others):
        first = len(results["sittings"])
        results["sittings"] += other["sittings"]
        results["runs"] += [{**run, "sitting": first + run["sitting"]} for run in other["runs"]]
    write_results(path, results)


def main(
    tasks: Sequence[str] = ("cifar", "text"),
    methods: Sequence[str] | None = None,
    seeds: int = 3,
    limit: float = 10.0,
    lrs: Sequence[float] | None = None,
    device: str = "auto",
    smoke: bool = False,
    again: bool = False,
    cache_dir: str | Path | None = None,
    output: Path | None = None,
    beside: int = 0,
) -> dict[str, Any]:
    """Measure, append to the file after every run, and return its contents."""
    every = {name for task in tasks for name in METHODS[task]}
    for name in methods or ():
        if name not in every:
            raise SystemExit(unknown_name("method", name, sorted(every), where="--methods"))
    place = choose_device(device)
    path = output or FILE
    results = read_results(path)
    known = {} if again else {key_of(run): run for run in results["runs"] if "error" not in run}
    sitting = len(results["sittings"])
    results["sittings"].append({**environment(seeds), "limit_seconds": limit, "smoke": smoke, "beside": beside})
    for task_name in tasks:
        task = make_task(task_name, place, smoke=smoke, cache_dir=cache_dir)
        grid = tuple(lrs or task.lrs)
        if place.type == "cuda":
            run_once(task, METHODS[task_name]["baseline"], grid[0], 0, place, limit=2.0)  # wakes the device; not kept
        tuned: tuple[float, ...] = grid
        for name in names_for(task_name, methods, place.type == "cuda"):
            rates = grid if name == "baseline" or METHODS[task_name][name].own_rate else tuned
            done: list[dict[str, Any]] = []
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                if not smoke:  # a method that changes nothing has not been measured
                    warnings.simplefilter("error", NoEffectWarning)
                for run in measure(task, name, seeds, place, limit, rates, known):
                    done.append(run)
                    if key_of(run) in known and known[key_of(run)] is run:
                        continue
                    results["runs"].append({**run, "sitting": sitting})
                    write_results(path, results)
                    shown = run.get("error") or run["final"]
                    print(f"{task_name:6} {name:24} lr {run['lr']:<8g} seed {run['seed']}: {shown}", flush=True)
            if name == "baseline":
                best = best_rate([run for run in done if run["seed"] == 0], task.higher_is_better)
                tuned = grid if best is None else (best,)
    write_results(path, results)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(METHODS), default=["cifar", "text"])
    parser.add_argument("--methods", nargs="+", help="class names; the baseline always takes part")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of training per run")
    parser.add_argument("--lrs", nargs="+", type=float, help="another grid, for baseline and methods alike")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smoke", action="store_true", help="tiny models and invented data")
    parser.add_argument("--again", action="store_true", help="repeat runs that are in the file already")
    parser.add_argument("--cache-dir", help="where decoded pictures are kept")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="how many other processes use the device")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="only add these files' runs to the output"
    )
    given = vars(parser.parse_args())
    files = given.pop("merge")
    if files:
        merge(given["output"] or FILE, files)
    else:
        main(**given)
