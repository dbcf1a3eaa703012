"""Run the zoo: `python -m benchmarks.zoo [names] [--checks trains,resumes] [--out FILE] [--table FILE]`.

`--out` is written after every model, and what it holds is not run again: a run that was stopped goes on. `--shard 2/4` does a fourth
of the models; `--merge a.json b.json --out all.json --table zoo.md` joins the files of shards. Where there is a GPU, models and the
reference are on it, and checks of ranks are left out.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.timing import environment
from benchmarks.zoo import checks, from_timm, from_transformers, own_models
from benchmarks.zoo.task import Entry
from drivetrain.core.files import replace_bytes

ENTRIES = {entry.name: entry for entry in (*from_transformers.ENTRIES, *from_timm.ENTRIES, *own_models.ENTRIES)}
Results = dict[str, dict[str, str]]


def the_checks(kinds: set[str]) -> dict[str, Callable[[Entry], str]]:
    """Return every check of the chosen kinds by name, those of one process first."""
    found: dict[str, Callable[[Entry], str]] = {}
    if "trains" in kinds:
        found["trains"] = checks.check_trains
    if "resumes" in kinds:
        found["resumes"] = checks.check_resumes
    if "methods" in kinds:
        found |= {name: partial(checks.check_method, method=name) for name in checks.METHODS}
    if "automatic" in kinds:
        found["automatic"] = checks.check_automatic
    if "surgery" in kinds:
        found |= {name: partial(checks.check_surgery, name=name) for name in checks.SURGERY}
    return found


def entry_named(name: str) -> Entry:
    """Return an entry; ranks look it up by name."""
    return ENTRIES[name]


def on_two_ranks(entries: list[Entry]) -> Iterator[tuple[str, str, str]]:
    """Train on two ranks, plainly and with each method for ranks: the weights are those of one process."""
    from benchmarks.zoo.__main__ import entry_named as named  # by its importable name: ranks have another __main__
    from tests.workers import World

    world = World(2)
    for entry in entries:
        task = entry.build()
        for name, (plan, tolerance) in {"two ranks": (None, checks.CLOSE), **checks.PARALLEL}.items():
            if task.mixes_samples:
                yield entry.name, name, "not comparable: samples of a batch depend on each other"
                continue
            run = partial(world, checks.on_rank, partial(named, entry.name), plan)
            yield (
                entry.name,
                name,
                checks.judged(task, checks.hand_written(task), lambda run=run: checks.received(run()[0]), tolerance),
            )
    world.close()


def run(
    entries: list[Entry],
    kinds: set[str],
    say: Callable[[str], None],
    results: Results | None = None,
    keep: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Run the checks on the entries that `results` does not hold, and `keep` the results after every model."""
    results = {} if results is None else results
    for entry in entries:
        row = results.setdefault(entry.name, {})
        start = time.perf_counter()
        for name, check in the_checks(kinds).items():
            if name not in row:
                row[name] = check(entry)
        say(f"{entry.name:24} {time.perf_counter() - start:6.1f} s  {summary(row)}")
        keep(results)
    if "ranks" in kinds and checks.DEVICE == "cpu":
        for model, name, outcome in on_two_ranks([e for e in entries if "two ranks" not in results[e.name]]):
            results[model][name] = outcome
            say(f"{model:24} {name:12} {outcome}")
            keep(results)
    return results


def summary(row: dict[str, str]) -> str:
    """Return how often each kind of outcome occurred, and in full what is wrong."""
    kinds = Counter(outcome.split(":")[0] for outcome in row.values())
    bad = [f"{name}: {outcome}" for name, outcome in row.items() if outcome.startswith(("wrong", "error"))]
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) + "".join(f"\n    {line}" for line in bad)


GROUPS = {
    "trains": ("trains",),
    "resumes": ("resumes",),
    "methods": tuple(checks.METHODS),
    "two ranks": ("two ranks", *checks.PARALLEL),
    "automatic": ("automatic",),
    "surgery": checks.SURGERY,
}
"""Columns of the page and the checks that each of them sums up."""

PAGE = """# Models that nobody prepared for

This page is written by `make zoo` (`benchmarks/zoo`). It builds {models} models with random weights: small versions of architectures of
transformers and timm, and hand-written ones with unusual parts. No part of the library knows any of them by name.
Results of {date}, torch {torch}, on {device}.

- **trains**: the Trainer's weights equal those of a loop written by hand (SGD with momentum, parameter by parameter).
- **resumes**: stopped in the middle and resumed by a new Trainer, bit for bit the run that was not stopped.
- **methods**: {methods}. Each gives the weights of the plain loop, or is rejected with a reason.
- **two ranks**: plain data parallelism, {parallel} on two processes, compared with one process.
- **automatic**: `strategy="auto"` finds a plan in a few seconds and trains with it.
- **surgery**: algorithms that change the model do so, or say why they have no effect.

A number counts the checks that passed, `r` those that were rejected, `warned` those that differ with a
warning, `n` surgery without a target in the model, and `–` those that cannot be compared:
batch norms make the samples of a batch depend on each other. {wrong}

"""


def cell(outcomes: list[str]) -> str:
    """Return outcomes as one cell: "8", or "6, 2 r"."""
    kinds = Counter(
        {"rejected": "r", "no effect": "n", "not comparable": "–"}.get(kind, kind) for kind in map(kind_of, outcomes)
    )
    passed = kinds.pop("ok", 0)
    return ", ".join([str(passed)] * bool(passed) + [f"{count} {kind}" for kind, count in sorted(kinds.items())])


def kind_of(outcome: str) -> str:
    """Return the first word of an outcome: ok, rejected, wrong ..."""
    return outcome.partition(":")[0]


def table(results: Results, about: dict[str, str] | None = None) -> str:
    """Return the page in Markdown: a row for each model, and below it every reason of a rejection with the models it concerns."""
    outcomes = [outcome for row in results.values() for outcome in row.values()]
    bad = sum(kind_of(outcome) in ("wrong", "error") for outcome in outcomes)
    text = PAGE.format_map(
        {"date": "?", "torch": "?", "device": "?", **(about or {})}
        | {
            "models": len(results),
            "methods": ", ".join(f"`{name}`" for name in checks.METHODS),
            "parallel": ", ".join(f"`{name}`" for name in checks.PARALLEL),
            "wrong": f"Of {len(outcomes):,} checks {bad or 'none'} failed.",
        }
    )
    shown = {
        name: group for name, group in GROUPS.items() if any(one in row for row in results.values() for one in group)
    }
    lines = ["| model | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for model, row in sorted(results.items()):
        lines.append(
            f"| {model} | " + " | ".join(cell([row[o] for o in group if o in row]) for group in shown.values()) + " |"
        )
    reasons: dict[tuple[str, str], list[str]] = {}
    for model, row in sorted(results.items()):
        for name, outcome in row.items():
            if kind_of(outcome) in ("rejected", "wrong", "error"):
                # One reason for models that differ in the name of a class alone.
                reasons.setdefault((name, outcome.replace("`", "'")), []).append(model)
    lines += ["", "## What was rejected, and why", "", "| check | reason | models |", "|---|---|---|"]
    lines += [
        f"| {name} | {outcome.partition(': ')[2].replace('|', '/')} | {', '.join(models)} |"
        for (name, outcome), models in sorted(reasons.items())
    ]
    return text + "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the zoo from the command line; the exit code is 1 where a result is wrong or an error."""
    parser = argparse.ArgumentParser(prog="benchmarks.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of them without a name")
    parser.add_argument("--checks", default="trains,resumes,methods,surgery,ranks,automatic")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--table", type=Path, help="a Markdown file for the table")
    parser.add_argument("--shard", default="1/1", help="i/n: the models of the i-th of n parts")
    parser.add_argument("--merge", type=Path, nargs="+", default=(), help="files of results to join instead of running")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in ENTRIES]
    if unknown:
        parser.error(f"no model is named {unknown[0]!r}; expected some of {', '.join(ENTRIES)}")
    chosen = [ENTRIES[name] for name in given.names] or list(ENTRIES.values())
    missing = {entry.needs for entry in chosen if entry.needs is not None and find_spec(entry.needs) is None}
    for package in sorted(missing):
        print(f"{package} is not installed: its models are left out", file=sys.stderr)
    results: Results = {}
    for path in [*given.merge, *([given.out] if given.out and given.out.is_file() else ())]:
        for name, row in json.loads(path.read_text())["results"].items():
            results.setdefault(name, {}).update(row)
    part, parts = map(int, given.shard.split("/"))
    chosen = [e for e in chosen[part - 1 :: parts] if e.needs not in missing and not given.merge]

    def keep(found: Results) -> None:
        if given.out:
            content = {"environment": environment(), "device": checks.DEVICE, "results": found}
            replace_bytes(given.out, json.dumps(content, indent=1).encode())

    run(chosen, set(given.checks.split(",")), partial(print, flush=True), results, keep)
    keep(results)
    if given.table:
        versions = environment()
        about = {"date": str(versions["date"])[:10], "torch": versions["torch"], "device": checks.DEVICE.upper()}
        given.table.write_text(table(results, about))
    bad = sum(o.startswith(("wrong", "error")) for row in results.values() for o in row.values())
    print(f"{len(results)} models, {sum(map(len, results.values()))} checks, {bad} wrong or in error")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
