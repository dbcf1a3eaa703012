"""Which plans are right on which architectures: every cell compares a plan with a plain loop, parameter by parameter.

    python -m benchmarks.plan_matrix --world 2 --seconds 240      # run cells that have no result yet, for so long
    python -m benchmarks.plan_matrix --write                      # write docs/plan_matrix.md from the results
    python -m benchmarks.plan_matrix --world 4 --only llama --plan "tensor x data" --again

Cells run on gloo ranks of this machine, with small models of transformers (`tests/strategy/architectures.py`). Results are kept in
`benchmarks/results/plan_matrix.json`, so the matrix can be run in slices.
"""

import argparse
import json
import time
from itertools import combinations, product
from pathlib import Path

from tests.strategy import architectures
from tests.workers import World

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/plan_matrix.json", ROOT / "docs/plan_matrix.md"

TENSOR, PIECES = "tensor_parallel", ["tensor_parallel", {"sequence_parallel": True}]
LAYOUTS = {
    2: {
        "data": ["parallel_mode"],
        "zero1": ["parallel_mode", "zero1"],
        "zero2": ["parallel_mode", "zero2"],
        "fsdp": ["parallel_mode", "fsdp"],
        "tensor": [["parallel_mode", [["tensor", 2]]], TENSOR],
        "tensor on pieces": [["parallel_mode", [["tensor", 2]]], PIECES],
        "sequence": [["parallel_mode", [["sequence", 2]]], "sequence_parallel"],
        "pipe": [["parallel_mode", [["pipe", 2]]], "pipeline_parallel"],
    },
    4: {
        "zero x data": [["parallel_mode", [["zero", 2], ["data", 2]]], "fsdp"],
        "tensor x data": [["parallel_mode", [["tensor", 2], ["data", 2]]], TENSOR],
        "tensor x zero": [["parallel_mode", [["tensor", 2], ["zero", 2]]], TENSOR, "fsdp"],
        "tensor on pieces x zero": [["parallel_mode", [["tensor", 2], ["zero", 2]]], PIECES, "fsdp"],
        "sequence x data": [["parallel_mode", [["sequence", 2], ["data", 2]]], "sequence_parallel"],
        "tensor x sequence": [["parallel_mode", [["tensor", 2], ["sequence", 2]]], TENSOR, "sequence_parallel"],
        "pipe x data": [["parallel_mode", [["pipe", 2], ["data", 2]]], "pipeline_parallel"],
        "tensor x pipe": [["parallel_mode", [["tensor", 2], ["pipe", 2]]], TENSOR, "pipeline_parallel"],
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
"""What a plan does beside."""
SECONDS = 100.0


def plan_of(world, layout, changes):
    return [*LAYOUTS[world][layout], *(item for name in changes for item in CHANGES[name])]


def title(layout, changes):
    return ", ".join([layout, *changes])


def singles(world):
    """Return every layout alone, and every change beside plain data parallelism."""
    found = [(layout, ()) for layout in LAYOUTS[world]]
    return found + ([("data", (change,)) for change in CHANGES] if world == 2 else [])


def pairs(world):
    """Return every layout with every change; and every two changes beside plain data parallelism."""
    found = list(product(LAYOUTS[world], [(change,) for change in CHANGES]))
    return found + ([("data", two) for two in combinations(CHANGES, 2)] if world == 2 else [])


def covering(world, offset):
    """Return plans of three changes in which every layout meets every change; `offset` gives each architecture other neighbours."""
    names = [*CHANGES][offset % len(CHANGES) :] + [*CHANGES][: offset % len(CHANGES)]
    groups = [tuple(names[first : first + 3]) for first in range(0, len(names), 3)]
    groups = [tuple(name for name in group if name != "half") if "amp" in group else group for group in groups]
    return list(product(LAYOUTS[world], groups))


def cells(world, kind):
    """Return (architecture, layout, changes) of a part of the matrix."""
    for index, name in enumerate(architectures.CONFIGS):
        plans = singles(world) if kind == "single" else []
        if kind == "pairs":
            plans = pairs(world) if name in architectures.DENSE else covering(world, index)
        for layout, changes in plans:
            yield name, layout, changes


def combined(results):
    """Return one answer of all ranks: the worst."""
    for kind in ("crash", "wrong", "rejected"):
        for rank, result in enumerate(results):
            if result.startswith(kind):
                return f"{result} [rank {rank}]" if len(set(results)) > 1 else result
    return results[0]


def run_cell(world, name, plan):
    try:
        return combined(world(architectures.try_cell, name, plan, timeout=SECONDS))
    except (RuntimeError, AssertionError) as error:
        return f"crash: {str(error)[-700:]}"


def load():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def run(arguments):
    results, began = load(), time.monotonic()
    world = World(arguments.world)
    try:
        for name, layout, changes in list(cells(arguments.world, arguments.kind)):
            key = f"{arguments.world} | {name} | {title(layout, changes)}"
            if arguments.only and name not in arguments.only.split(","):
                continue
            if arguments.plan and title(layout, changes) not in arguments.plan.split(";"):
                continue
            old = results.get(key, "")
            if old and not (arguments.again or (arguments.bad and old.startswith(("wrong", "crash")))):
                continue
            if time.monotonic() - began > arguments.seconds:
                print("more cells are left")
                break
            start = time.monotonic()
            results[key] = run_cell(world, name, plan_of(arguments.world, layout, changes))
            print(f"{key} -> {results[key]} ({time.monotonic() - start:.1f} s)", flush=True)
            results |= {**load(), key: results[key]}  # another run may have added some
            RESULTS.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
    finally:
        world.close()


def table(results, names, rows):
    """Return lines of a table: a row for each plan, a column for each architecture; and the reasons that its cells refer to."""
    reasons: list[str] = []
    lines = ["| plan | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for world, layout, changes in rows:
        found = [results.get(f"{world} | {name} | {title(layout, changes)}", "") for name in names]
        if not any(found):
            continue
        lines.append(f"| {title(layout, changes)} | " + " | ".join(_cell(text, reasons) for text in found) + " |")
    return lines, reasons


def _cell(text, reasons):
    if not text or text.startswith("ok"):
        return "ok" if text else ""
    kind, _, reason = text.partition(": ")
    reason = " ".join(reason.partition(": ")[2].split()).replace("|", "/")[:300]
    if reason not in reasons:
        reasons.append(reason)
    number = reasons.index(reason) + 1
    return f"[{number}]" if kind == "rejected" else f"**{kind}** [{number}]"


def write():
    """Write the page from the results."""
    results = load()
    counts = {
        kind: sum(text.startswith(kind) for text in results.values()) for kind in ("ok", "rejected", "wrong", "crash")
    }
    parts = [
        "# Which plans are right on which models\n",
        "Each cell compares two steps of a plan with a plain loop (SGD with momentum) on the same samples, parameter by parameter, on "
        "2 or 4 gloo ranks with a small model of `transformers`. *ok*: every parameter moves as in the plain loop, to 0.2 % in float32. In "
        "16 bits to 15 % (`amp`) or 25 % (`half`), as a trial allows, or to twice what plain autocast on one process does to that "
        "parameter. Batch norms use the statistics of a pass, as in DDP, so the plain loop of ResNet makes the same passes. A number: the "
        "plan is rejected before the first step, for the reason below. `python -m benchmarks.plan_matrix` runs it, and "
        "`tests/strategy/test_architectures.py` (slow) tests it.\n",
        f"{len(results)} cells were run: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + ".\n",
    ]
    names = [*architectures.CONFIGS]
    for heading, kind in (("Single methods and meshes", singles), ("Pairs of methods", pairs)):
        rows = [(world, *plan) for world in LAYOUTS for plan in kind(world)]
        lines, reasons = table(results, names if kind is singles else [*architectures.DENSE], rows)
        if len(lines) > 2:
            parts += [f"## {heading}\n", *lines, "", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)), ""]
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, choices=[2, 4], default=2)
    parser.add_argument("--kind", choices=["single", "pairs"], default="single")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", help="architectures, separated by commas")
    parser.add_argument("--plan", help="titles of plans, separated by semicolons")
    parser.add_argument("--again", action="store_true", help="run cells that have a result too")
    parser.add_argument("--bad", action="store_true", help="run cells again that were wrong or crashed")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    write() if given.write else run(given)
