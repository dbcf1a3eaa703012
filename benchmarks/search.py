"""How good is the plan that a search finds? Against every plan of a small space, against a hand-tuned loop, and in little memory.

    python -m benchmarks.search --parts exhaustive --models gpt2,resnet50,vit   # chosen over best of at most twelve plans
    python -m benchmarks.search --parts hand                                    # GPT-2 without hints in 120 s, over the hand-tuned loop
    python -m benchmarks.search --parts budget                                  # 16 GiB for a batch whose plain peak is far above
    python -m benchmarks.search --short 20                                      # many short searches: how many trials run out of memory
    python -m benchmarks.search --short 20 --slice 0/4 --memory 32GiB           # a quarter of them, beside three others on one device
    python -m benchmarks.search --smoke                                         # all of it, tiny, on the CPU

Every result is appended to `benchmarks/results/search.json` as soon as it is there, with the plan's explanation.
"""

import argparse
import functools
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import gpt2
from benchmarks.models import loss_func, make_batch, make_model
from benchmarks.timing import RESULTS, alternate, environment
from drivetrain.strategy.search.constraints import parse_memory
from drivetrain.strategy.search.find import SearchConstraints, find_plan
from drivetrain.strategy.search.measure import MORE_STEPS
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.trial.running import TrialPool
from drivetrain.strategy.value import Strategy

BATCHES = {"gpt2": 64, "resnet50": 256, "vit": 256, "bert": 64, "llama": 16}
SAMPLES = 32


class Bench:
    """What the parts share: the device, the size of things, and the file."""

    def __init__(self, smoke: bool, limit: float, folder: Path | None = None):
        self.smoke, self.limit = smoke, limit
        self.device = torch.device("cpu" if smoke or not torch.cuda.is_available() else "cuda")
        self.path = (RESULTS if folder is None else folder) / "search.json"

    def task(self, name: str, batch: int | None = None) -> TrainingTask:
        """Return the training of a model by name."""
        size = batch or (8 if self.smoke else BATCHES[name])
        build = functools.partial(make_model, name, tiny=self.smoke)
        return TrainingTask(
            model=build(),
            model_fn=build,
            call=CallModel("unpack_dict"),
            loss_func=loss_func,
            optim_func=torch.optim.AdamW,
            optim_args={"lr": 1e-4},
            samples=make_batch(name, min(size, SAMPLES), tiny=self.smoke),
            global_batch_size=size,
        )

    def search(self, task: TrainingTask, **constraints: Any) -> tuple[Strategy, float]:
        """Return the plan that a search finds, and the seconds it took."""
        if self.smoke:
            constraints["excluded"] = frozenset({*constraints.get("excluded", ()), "compile"})
        start = time.perf_counter()
        tell = functools.partial(print, flush=True)
        plan = find_plan(
            task,
            device=self.device,
            world=1,
            constraints=SearchConstraints(**{"time_limit": self.limit, **constraints}),
            on_progress=tell,
        )
        return plan, time.perf_counter() - start

    def keep(self, part: str, result: dict[str, Any]) -> None:
        """Append a result to the file and print its ratio."""
        rows = json.loads(self.path.read_text()) if self.path.exists() else []
        rows.append({"part": part, **environment(), "smoke": self.smoke, **result})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(rows, indent=2, default=str) + "\n")
        shown = {
            key: value for key, value in result.items() if not isinstance(value, list | dict) and key != "explained"
        }
        print(part, json.dumps(shown, default=str), flush=True)


def small_space(batch: int, smoke: bool) -> dict[str, list[Any]]:
    """Return at most twelve plans that people would try by hand."""
    fused, bf16 = "fused_optimizer", ("amp_native", "bf16")
    plans: dict[str, list[Any]] = {"plain": [], "fused": [fused], "bf16": [bf16], "bf16 fused": [bf16, fused]}
    if smoke:
        return plans
    whole, blocks = ("compile", {"scope": "model"}), ("compile", {"scope": "block"})
    plans |= {
        "tf32 fused": ["tf32", fused],
        "bf16 compile": [bf16, whole],
        "bf16 compile fused": [bf16, whole, fused],
        "bf16 compile blocks fused": [bf16, blocks, fused],
        "bf16 fused, half the batch": [bf16, fused, ("micro_batch", batch // 2)],
    }
    return plans


def exhaustive(bench: Bench, name: str, without: Sequence[str] = ()) -> None:
    """Measure all plans of the small space and the one that a search chooses, alike."""
    task = bench.task(name)
    plan, seconds = bench.search(task)
    plans = {key: Strategy(methods) for key, methods in small_space(task.global_batch_size, bench.smoke).items()}
    if "resnet" in name:  # a batch under batch norm is not split
        plans = {key: found for key, found in plans.items() if "micro_batch" not in found}
    plans = {key: found for key, found in plans.items() if key not in without}
    measured: dict[str, float | None] = {}
    with TrialPool(task, device=bench.device) as pool:
        for key, candidate in {"chosen": Strategy(list(plan), batch=plan.batch), **plans}.items():
            result = pool.run(candidate, steps=MORE_STEPS, deadline=time.monotonic() + 240, verify=False)
            measured[key] = result.step_seconds
            print(f"{key:40} {result.outcome} {result.step_seconds}", flush=True)
    chosen = measured.pop("chosen")
    others = {key: value for key, value in measured.items() if value is not None}
    best = min(others, key=lambda key: others[key])
    bench.keep(
        "exhaustive",
        {
            "model": name,
            "ratio": None if chosen is None else others[best] / chosen,
            "best": best,
            "chosen_seconds": chosen,
            "search_seconds": seconds,
            "measured": measured,
            "left_out": list(without),
            "explained": plan.explain(),
            "trials": plan.search and plan.search["measured"],
        },
    )


def hand(bench: Bench, name: str = "gpt2") -> None:
    """Search GPT-2 without hints, then let the plan and the hand-tuned loop take turns."""
    task = bench.task(name)
    plan, seconds = bench.search(task)
    length = task.samples["inputs"].shape[1]
    size = task.global_batch_size
    steps = 2 if bench.smoke else 10
    setting = gpt2.Setting(
        device=bench.device,
        rows=gpt2.markov_rows(size * steps * 4, length, 64 if bench.smoke else 50304),
        size=size,
        tiny=bench.smoke,
        backend="eager" if bench.smoke else "inductor",
        lr=1e-4,
    )
    ours = planned(setting, plan)
    loops: dict[str, Callable[[int], float | None]] = {"hand": gpt2.hand_written(setting), "plan": ours}
    blocks = alternate(loops, blocks=2 if bench.smoke else 8, steps=steps)
    tokens = {key: setting.tokens / median(values) for key, values in blocks.items()}
    bench.keep(
        "hand",
        {
            "model": name,
            "ratio": tokens["plan"] / tokens["hand"],
            "plan_tokens": tokens["plan"],
            "hand_tokens": tokens["hand"],
            "search_seconds": seconds,
            "explained": plan.explain(),
            "trials": plan.search and plan.search["measured"],
        },
    )


def planned(setting: gpt2.Setting, plan: Strategy) -> gpt2.Variant:
    """Return the loop of a found plan; accumulation makes several passes a step."""
    from drivetrain.auto import auto_accelerate

    status, result, strategy = auto_accelerate(
        make_model("gpt2", tiny=setting.tiny),
        torch.optim.AdamW,
        dataset=setting.dataset(0, len(setting.rows) // setting.size),
        loss_func=loss_func,
        prepare_input=gpt2.as_input,
        model_input_format="unpack_dict",
        optim_args={"lr": setting.lr},
        dataloader_args={"batch_size": setting.size},
        load_strategy=plan,
        ignore_dryrun_on_load_strategy=True,
        device=setting.device,
        strict=True,
    )
    assert status and result is not None, strategy.failure
    batches = gpt2.endless(result.dataloader)
    passes = result.args["gradient_accumulation"]
    variant = gpt2.Variant(run=lambda first, steps: None)

    def run(first: int, steps: int) -> None:
        for _ in range(steps * passes):
            batch = result.prepare_input(next(batches), setting.device)
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            variant.losses.append(loss.detach().clone())

    variant.run = run
    return variant


def budget(bench: Bench, name: str = "gpt2") -> None:
    """Give a batch whose plain peak is about eight times 16 GiB a budget of 16 GiB."""
    plain = bench.search(
        bench.task(name),
        time_limit=0,
        included=(),
        numerics="exact",
        excluded=frozenset({"compile", "fused_optimizer"}),
    )[0]
    peak = (plain.predicted or {}).get("peak_bytes", 1.0)
    allowed = int(peak) if bench.smoke else 16 * 2**30  # tiny models are all reserve
    task = bench.task(name)
    size = task.global_batch_size
    while not bench.smoke and peak * size / task.global_batch_size < 8 * allowed:
        size *= 2
    plan, seconds = bench.search(bench.task(name, size), memory_budget=allowed)
    peak_bytes = (plan.measured or {}).get("peak_bytes")
    bench.keep(
        "budget",
        {
            "model": name,
            "global_batch": size,
            "budget_gib": allowed / 2**30,
            "plain_gib": peak * size / task.global_batch_size / 2**30,
            "ratio": None if peak_bytes is None else peak_bytes / allowed,
            "failure": plan.failure and plan.failure.message,
            "search_seconds": seconds,
            "explained": plan.explain(),
            "trials": plan.search and plan.search["measured"],
        },
    )


def short(bench: Bench, count: int, part: tuple[int, int] = (0, 1), memory: int | None = None) -> None:
    """Run many short searches over models, batches and budgets; count those in which a trial ran out of its budget.

    Budgets are shares of the device, or of `memory`, so that several processes may search beside each other.
    """
    names = ("gpt2", "bert", "vit", "resnet50", "llama")
    cases = [
        (name, factor, share)
        for factor, share in ((1, 0.92), (2, 0.92), (4, 0.5), (8, 0.25), (1, 0.1), (16, 0.92))
        for name in names
    ]
    out_of_memory = done = 0
    for name, factor, share in cases[:count][part[0] :: part[1]]:
        task = bench.task(name, (8 if bench.smoke else BATCHES[name]) * factor)
        limit = 15.0 if bench.smoke else 25.0
        allowed = share if memory is None else int(share * memory)
        plan, seconds = bench.search(task, time_limit=limit, memory_budget=allowed, excluded=frozenset({"compile"}))
        trials = (plan.search or {}).get("measured", [])
        is_out = any(item["outcome"] == "oom" for item in trials)
        done, out_of_memory = done + 1, out_of_memory + is_out
        bench.keep(
            "short",
            {
                "model": name,
                "global_batch": task.global_batch_size,
                "share": share,
                "of_bytes": memory,
                "beside": part[1] - 1,
                "out_of_memory": is_out,
                "measured": len(trials),
                "evidence": plan.evidence,
                "failure": plan.failure and plan.failure.kind,
                "plan": plan.opt_names(),
                "batch": str(plan.batch),
                "search_seconds": seconds,
                "trials": trials,
            },
        )
        gc.collect()
    print(f"searches without a trial out of memory: {1 - out_of_memory / max(done, 1):.3f} of {done}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="comma-separated: exhaustive, hand, budget")
    parser.add_argument("--models", default="gpt2,resnet50,vit", help="models of the part 'exhaustive'")
    parser.add_argument("--without", default="", help="comma-separated plans that the part 'exhaustive' leaves out")
    parser.add_argument("--short", type=int, default=0, metavar="N", help="so many short searches")
    parser.add_argument("--slice", default="0/1", metavar="K/N", help="every N-th short search, from the K-th on")
    parser.add_argument("--memory", type=parse_memory, help="what the budgets of short searches are shares of: '32GiB'")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one search")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where the result goes instead of benchmarks/results")
    args = parser.parse_args()
    bench = Bench(args.smoke, 20.0 if args.smoke else args.limit, args.folder)
    parts = [part for part in args.parts.split(",") if part]
    if args.smoke and not parts and not args.short:
        parts, args.models, args.short = ["exhaustive", "hand", "budget"], "gpt2", 1
    unknown = [part for part in parts if part not in ("exhaustive", "hand", "budget")]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: exhaustive, hand or budget")
    for part in parts:
        if part == "exhaustive":
            for name in args.models.split(","):
                exhaustive(bench, name, [plan for plan in args.without.split(",") if plan])
        else:
            {"hand": hand, "budget": budget}[part](bench)
    if args.short:
        first, every = (int(number) for number in args.slice.split("/"))
        short(bench, args.short, (first, every), args.memory)


if __name__ == "__main__":
    main()
