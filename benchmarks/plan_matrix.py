"""Which plans are right on which architectures: every cell compares a plan with a plain loop, parameter by parameter.

    PYTHONPATH=src python -m benchmarks.plan_matrix --processes 12 --limit 600 --out matrix    # twelve shards side by side, for ten minutes
    PYTHONPATH=src python -m benchmarks.plan_matrix --shard 3/12 --limit 600 --out matrix      # one of them; a later call goes on
    PYTHONPATH=src python -m benchmarks.plan_matrix --merge matrix                             # results and docs/plan_matrix.md
    PYTHONPATH=src python -m benchmarks.plan_matrix --only llama --plan "tensor x data" --out matrix

Cells run on gloo ranks of this machine, with small models of transformers (`tests/strategy/architectures.py`). The ranks are started
once for each number of processes and serve all cells of a shard. A shard appends to a file of its own in `--out`, and cells that any
file there holds are not run again. `--merge` joins the files to `benchmarks/results/plan_matrix.json`.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations, product
from pathlib import Path

from tests.strategy import architectures
from tests.workers import World

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/plan_matrix.json", ROOT / "docs/plan_matrix.md"

TENSOR, PIECES = "tensor_parallel", ["tensor_parallel", {"sequence_parallel": True}]


def _over(**axes):
    return ["parallel_mode", [[axis, size] for axis, size in axes.items()]]


ALONE = {
    "data": lambda ranks: ["parallel_mode"],
    "zero1": lambda ranks: ["parallel_mode", "zero1"],
    "zero2": lambda ranks: ["parallel_mode", "zero2"],
    "fsdp": lambda ranks: ["parallel_mode", "fsdp"],
    "tensor": lambda ranks: [_over(tensor=ranks), TENSOR],
    "tensor on pieces": lambda ranks: [_over(tensor=ranks), PIECES],
    "sequence": lambda ranks: [_over(sequence=ranks), "sequence_parallel"],
    "pipe": lambda ranks: [_over(pipe=ranks), "pipeline_parallel"],
}
"""How a plan spreads a model and its samples over ranks by one method."""
LAYOUTS = {
    2: {name: plan(2) for name, plan in ALONE.items()},
    4: {
        **{name: plan(4) for name, plan in ALONE.items()},
        "zero x data": [_over(zero=2, data=2), "fsdp"],
        "tensor x data": [_over(tensor=2, data=2), TENSOR],
        "tensor x zero": [_over(tensor=2, zero=2), TENSOR, "fsdp"],
        "tensor on pieces x zero": [_over(tensor=2, zero=2), PIECES, "fsdp"],
        "sequence x data": [_over(sequence=2, data=2), "sequence_parallel"],
        "tensor x sequence": [_over(tensor=2, sequence=2), TENSOR, "sequence_parallel"],
        "pipe x data": [_over(pipe=2, data=2), "pipeline_parallel"],
        "pipe x zero": [_over(pipe=2, zero=2), "pipeline_parallel", "fsdp"],
        "tensor x pipe": [_over(tensor=2, pipe=2), TENSOR, "pipeline_parallel"],
    },
}
"""By the number of processes: how a plan spreads a model and its samples over them."""
CHANGES = {
    "compile": [["native_dynamo", "aot_eager"]],
    "checkpoint": ["checkpoint"],
    "selective checkpoint": [["checkpoint", {"mode": "selective"}]],
    "amp": [["amp_native", "bf16"]],
    "half": [["half", "bf16"]],
    "micro-batches": [["micro_batch", {"accumulation": 2}]],
    "fused": ["fused_optimizer"],
    "chunked loss": [["chunked_cross_entropy", 16]],
    "offload": ["cpu_offload"],
    "channels last": ["channels_last"],
    "replaced modules": ["module_replace"],
}
"""What a plan does in addition."""
EXCLUSIVE = [{"amp", "half"}, {"checkpoint", "selective checkpoint"}]
"""Changes that are two forms of one thing."""
SINGLE_ONLY = {
    "threads": [["cpu_threads", 1]],
    "tf32": ["tf32"],
    "fp8": ["fp8"],
    "cuda graphs": [["native_dynamo", "aot_eager"], "cuda_graphs"],
}
"""Methods that do nothing on these ranks, or are rejected on them."""
KINDS = ("ok", "warned", "rejected", "wrong", "crash")
SECONDS = 180.0
"""How long a cell may take."""


def plan_of(world, layout, changes):
    settings = CHANGES | SINGLE_ONLY
    return [*LAYOUTS[world][layout], *(item for name in changes for item in settings[name])]


def title(layout, changes):
    return ", ".join([layout, *changes])


def are_compatible(changes):
    return not any(group <= set(changes) for group in EXCLUSIVE)


def singles(world):
    """Return every layout alone, and every change in addition to plain data parallelism."""
    return [(layout, ()) for layout in LAYOUTS[world]] + [("data", (change,)) for change in (*CHANGES, *SINGLE_ONLY)]


def pairs(world):
    """Return every layout with every change, and every two changes in addition to plain data parallelism."""
    both = [("data", two) for two in combinations(CHANGES, 2) if are_compatible(two)]
    return list(product([layout for layout in LAYOUTS[world] if layout != "data"], [(one,) for one in CHANGES])) + both


def covering(world, changes, offset=0):
    """Return plans of up to three changes in which every layout meets every change, and every change every other one.

    `offset` gives each architecture other neighbours.
    """
    order = list(changes)
    met, rows = set(), []
    for index, layout in enumerate(LAYOUTS[world]):
        start = (offset + index) % len(order)
        left = order[start:] + order[:start]
        while left:
            group = [left.pop(0)]
            while len(group) < 3 and (fitting := [name for name in left if are_compatible([*group, name])]):
                best = max(fitting, key=lambda name: sum(frozenset((name, other)) not in met for other in group))
                group.append(best)
                left.remove(best)
            met |= {frozenset(two) for two in combinations(group, 2)}
            rows.append((layout, tuple(name for name in order if name in group)))
    missing = [two for two in combinations(order, 2) if frozenset(two) not in met and are_compatible(two)]
    return rows + [("data", two) for two in missing]


def smaller(layout, changes):
    """Return the plans that are tried where one with several changes is rejected: each leaves one change out."""
    return [(layout, tuple(one for one in changes if one != left)) for left in changes] if len(changes) > 1 else []


def cells():
    """Return (world, architecture, layout, changes) of the whole matrix, what matters most first."""
    known = load()
    for world in LAYOUTS:
        yield from ((world, name, *plan) for name in architectures.CONFIGS for plan in singles(world))
    for world in LAYOUTS:
        yield from ((world, name, *plan) for name in architectures.DENSE for plan in pairs(world))
    for world in LAYOUTS:
        for offset, name in enumerate(architectures.CONFIGS):
            if name in (*architectures.DENSE, *architectures.SINGLES):
                continue
            # A change that is rejected alone would hide the others of its row.
            own = [one for one in CHANGES if not known.get(key(2, name, "data", (one,)), "").startswith("rejected")]
            yield from ((world, name, *plan) for plan in covering(world, own, offset))


def key(world, name, layout, changes):
    return f"{world} | {name} | {title(layout, changes)}"


class Ranks(World):
    """A world whose ranks have only a moment left when one of them has rejected a plan or failed."""

    straggler_seconds = 30.0  # others may still compile on a busy machine

    def is_failure(self, answer):
        return super().is_failure(answer) or str(answer[1]).startswith(("crash", "rejected"))


def combined(results):
    """Return one answer of all ranks: the worst."""
    for kind in ("crash", "wrong", "rejected", "warned"):
        for rank, result in enumerate(results):
            if result.startswith(kind):
                return f"{result} [rank {rank}]" if len(set(results)) > 1 else result
    return results[0]


def run_cell(world, name, plan):
    try:
        return combined(world(architectures.try_cell, name, plan, timeout=SECONDS))
    except (RuntimeError, AssertionError) as error:
        return f"crash: {str(error)[:300]} ... {str(error)[-700:]}"


def load(folders=()):
    """Return the results that are kept, and those of the shards in some folders."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for line in _lines(folders):
        found[line["cell"]] = line["result"]
    return found


def _lines(folders):
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.jsonl"))]
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def run(arguments):
    """Run the cells of a shard that have no result yet, until the time is over."""
    index, count = (int(part) for part in arguments.shard.split("/"))
    began, folder = time.monotonic(), Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    done = {} if arguments.again else {line["cell"]: line["result"] for line in _lines([folder])}
    worlds = {size: Ranks(size) for size in LAYOUTS}
    waiting = [cell for cell in cells() if _is_wanted(cell, arguments) and _shard(cell, count) == index % count]
    tried = 0
    try:
        with (folder / f"shard-{index}-of-{count}.jsonl").open("a") as file:
            while waiting:
                size, name, layout, changes = cell = waiting.pop(0)
                if key(*cell) in done:
                    continue
                if time.monotonic() - began > arguments.limit:
                    print(f"shard {index}: the time is over, {len(waiting) + 1} cells are left")
                    return
                start = time.monotonic()
                result = run_cell(worlds[size], name, plan_of(size, layout, changes))
                seconds, tried = time.monotonic() - start, tried + 1
                done[key(*cell)] = result
                file.write(json.dumps({"cell": key(*cell), "result": result, "seconds": round(seconds, 1)}) + "\n")
                file.flush()
                print(f"{key(*cell)} -> {result[:300]} ({seconds:.1f} s)", flush=True)
                if result.startswith("rejected") and name not in architectures.DENSE:
                    waiting[:0] = [(size, name, *plan) for plan in smaller(layout, changes)]
        print(f"shard {index}: done, {tried} cells in {time.monotonic() - began:.0f} s")
    finally:
        for world in worlds.values():
            world.close()


def _is_wanted(cell, arguments):
    world, name, layout, changes = cell
    return (
        (arguments.world is None or world == arguments.world)
        and (not arguments.only or name in arguments.only.split(","))
        and (not arguments.plan or title(layout, changes) in arguments.plan.split(";"))
    )


def _shard(cell, count):
    return int(hashlib.sha256(key(*cell).encode()).hexdigest(), 16) % count


def run_processes(arguments):
    """Run all shards side by side."""
    values = {name: getattr(arguments, name) for name in ("limit", "out", "world", "only", "plan")}
    given = [item for name, value in values.items() if value is not None for item in (f"--{name}", str(value))]
    given += ["--again"] if arguments.again else []
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    started = []
    for index in range(arguments.processes):
        log = (Path(arguments.out) / f"shard-{index}.log").open("w")
        command = [sys.executable, "-m", "benchmarks.plan_matrix", *given, "--shard", f"{index}/{arguments.processes}"]
        started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
    for process in started:
        process.wait()
    report({line["cell"]: line["result"] for line in _lines([arguments.out])})


def report(results):
    """Print how many cells came out how, and those that need a look."""
    print(len(results), "cells:", dict(Counter(kind_of(text) for text in results.values())))
    for cell, text in sorted(results.items()):
        if kind_of(text) in ("wrong", "crash"):
            print(cell, "->", text[:500])


def kind_of(text):
    return next((kind for kind in KINDS if text.startswith(kind)), "crash")


def merge(folders):
    """Join the results of shards, keep those of the present matrix, and write the page."""
    found = load(folders)
    present = {key(*cell): (layout, changes) for cell in cells() for _, _, layout, changes in [cell]}
    more = list(present)
    while more:  # what was tried in place of a plan that was rejected
        cell = more.pop()
        if found.get(cell, "").startswith("rejected"):
            world, name, _ = cell.split(" | ")
            for plan in smaller(*present[cell]):
                if (new := key(world, name, *plan)) in found and new not in present:
                    present[new] = plan
                    more.append(new)
    results = {cell: found[cell] for cell in present if cell in found}
    RESULTS.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    report(results)
    PAGE.write_text(page(results))


def table(results, names, rows, reasons):
    """Return lines of a table: a row for each plan, a column for each architecture; new reasons are added to `reasons`."""
    lines = ["| ranks | plan | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for world, layout, changes in rows:
        found = [results.get(key(world, name, layout, changes), "") for name in names]
        if any(found):
            cells_ = " | ".join(_cell(text, reasons) for text in found)
            lines.append(f"| {world} | {title(layout, changes)} | {cells_} |")
    return lines


def _cell(text, reasons):
    if not text or text.startswith("ok"):
        return "ok" if text else ""
    kind, _, reason = text.partition(": ")
    reason = " ".join(reason.removeprefix(reason.split(": ")[0] + ": ").split()).replace("|", "/")[:300]
    if reason not in reasons:
        reasons.append(reason)
    number = reasons.index(reason) + 1
    return (
        f"[{number}]" if kind == "rejected" else f"{kind} [{number}]" if kind == "warned" else f"**{kind}** [{number}]"
    )


def page(results):
    """Return the page of the documentation."""
    counts = Counter(kind_of(text) for text in results.values())
    missing = [cell for cell in cells() if key(*cell) not in results]
    compiled = sum("compile" in cell[3] for cell in missing)
    parts = [
        "# Which plans are right on which models\n",
        "Each cell compares two steps of a plan with a plain loop (SGD with momentum) on the same samples, parameter by parameter, on "
        "2 or 4 gloo ranks with a small model of `transformers`. Rows have different numbers of ignored labels, so a loss that is a "
        "mean over tokens must be weighted by them. *ok*: every parameter moves as in the plain loop, to 0.2 % in float32. In 16 bits to "
        "15 % (`amp`) or 25 % (`half`), as a trial allows, or to twice what plain autocast on one process does to that parameter (with "
        "`half` and under `fully_shard`, which casts weights: a plain loop in bfloat16). ResNet in 16 bits to 60 %, because batch "
        "norms over one or two samples amplify rounding; in float32 it is exact. Batch "
        "norms use the statistics of a pass, as in DDP, so the plain loop of ResNet makes the same passes. *warned*: the plan runs, and "
        "a warning says what is different. A number alone: the plan is rejected before the first step. The reasons are below. "
        "`python -m benchmarks.plan_matrix` runs it, and so does the slow test `tests/strategy/test_architectures.py`.\n",
        f"{len(results):,} cells were run: " + ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS) + ".\n",
        *([f"{len(missing)} cells have not been run yet, {compiled} of them with the compiler.\n"] if missing else []),
    ]
    names, reasons = [*architectures.CONFIGS], []
    for heading, of, columns in (
        ("Single methods and meshes", singles, names),
        ("Pairs of methods", pairs, [*architectures.DENSE]),
    ):
        lines = table(results, columns, [(world, *plan) for world in LAYOUTS for plan in of(world)], reasons)
        if len(lines) > 2:
            parts += [f"## {heading}\n", *lines, ""]
    others = {cell: text for cell, text in results.items() if cell.split(" | ")[1] not in architectures.DENSE}
    others = {cell: text for cell, text in others.items() if cell.split(" | ")[2].count(",") > 1}
    if others:
        parts += [
            "## Several methods on the other architectures\n",
            "Plans of up to three changes, in which every mesh meets every change and every change every other one. Where such a plan is "
            "rejected, smaller ones are tried in its place.\n",
            "| architecture | " + " | ".join(KINDS) + " |",
            "|---" * (len(KINDS) + 1) + "|",
        ]
        for name in names:
            own = Counter(kind_of(text) for cell, text in others.items() if cell.split(" | ")[1] == name)
            if own:
                parts.append(f"| {name} | " + " | ".join(str(own[kind]) for kind in KINDS) + " |")
        parts.append("")
    if reasons:
        parts += ["## Reasons\n", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""]
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help="run so many shards side by side")
    parser.add_argument("--shard", default="0/1", help="i/n: run the cells of the i-th of n parts")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further cell begins")
    parser.add_argument(
        "--out", default=str(ROOT / "benchmarks/results/plan_matrix"), help="the folder of the shards' files"
    )
    parser.add_argument("--world", type=int, choices=[*LAYOUTS], help="only plans for so many processes")
    parser.add_argument("--only", help="architectures, separated by commas")
    parser.add_argument("--plan", help="titles of plans, separated by semicolons")
    parser.add_argument("--again", action="store_true", help="run cells that have a result too")
    parser.add_argument("--merge", nargs="+", metavar="FOLDER", help="join the results of shards and write the page")
    given = parser.parse_args()
    if given.merge:
        merge(given.merge)
    elif given.processes:
        run_processes(given)
    else:
        run(given)


if __name__ == "__main__":
    main()
