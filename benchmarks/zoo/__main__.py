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
    from tests.workers import World

    world = World(2)
    for entry in entries:
        task = entry.build()
        for name, (plan, tolerance) in {"two ranks": (None, checks.CLOSE), **checks.PARALLEL}.items():
            if task.mixes_samples:
                yield entry.name, name, "not comparable: samples of a batch depend on each other"
                continue
            run = partial(world, checks.on_rank, partial(entry_named, entry.name), plan)
            yield entry.name, name, checks.judged(task, checks.hand_written(task), lambda run=run: run()[0], tolerance)
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


def table(results: Results) -> str:
    """Return the results as a table in Markdown: one row for each model, reasons below."""
    columns = list(dict.fromkeys(name for row in results.values() for name in row))
    lines = ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    reasons: dict[str, int] = {}
    for model, row in results.items():
        cells = []
        for name in columns:
            kind, _, reason = row.get(name, "").partition(": ")
            number = reasons.setdefault(reason, len(reasons) + 1) if reason else 0
            cells.append({"ok": "✓", "no effect": "–"}.get(kind, f"{kind} [{number}]" if reason else kind))
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())]) + "\n"


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
        given.table.write_text(table(results))
    bad = sum(o.startswith(("wrong", "error")) for row in results.values() for o in row.values())
    print(f"{len(results)} models, {sum(map(len, results.values()))} checks, {bad} wrong or in error")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
