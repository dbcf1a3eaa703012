"""Write what was measured into the cards of the algorithms, between two marker comments, and the verdicts into their
table.

    python -m benchmarks.cards [--check]

Reads `results/algorithms.json`. The target of a task is the mean final quality of its tuned baseline less a margin;
time to target is read from each run's curve, between two evaluations in a straight line. A method is compared with the
baseline of its own sitting, because times of two machines say nothing about each other. A card whose algorithm was not
measured says so. Nothing outside the markers changes, and a second run changes nothing. `--check` only says whether a
card is out of date.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.algorithm_tasks import LEFT_OUT
from benchmarks.algorithms import FILE, best_rate, read_results
from drivetrain.algorithms.registry import ALGORITHMS

CARDS = Path(__file__).parent.parent / "docs" / "algorithms"
START, END = "<!-- measured: written by benchmarks/cards.py -->", "<!-- end of measured -->"
NOT_MEASURED = "**Measured effect.** Not measured yet."
NO_EVIDENCE = "not measured"
NEUTRAL = "no effect measured"

TASKS = {
    "cifar": ("small ResNet on CIFAR-10, accuracy", True, 0.01),
    "text": ("small GPT on bytes, loss", False, 0.02),
}
"""What a task is called, whether more is better, and the margin of its target."""
SEEDS = 3
"""The fewest runs that say something."""
FASTER = 1.05
"""By how much a mean time must differ to count."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The runs of one method on one task, at the rate that was best."""

    lr: float
    finals: tuple[float, ...]
    times: tuple[float | None, ...]
    """Seconds to the target, None where it was not reached."""
    was_cut: bool = False
    """Whether a run was ended by the limit of time, before its schedule was."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.finals)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return statistics.stdev(self.finals) / math.sqrt(len(self.finals)) if len(self.finals) > 1 else 0.0

    @property
    def time(self) -> float | None:
        """The mean time to the target, if every run reached it."""
        reached = [time for time in self.times if time is not None]
        return statistics.mean(reached) if len(reached) == len(self.times) else None


def time_to(target: float, curve: Sequence[Sequence[float]], higher_is_better: bool) -> float | None:
    """Return when a curve of (seconds, quality) first reaches the target, or None.

    >>> time_to(0.5, [(1.0, 0.2), (2.0, 0.6)], True)
    1.75
    """
    sign = 1 if higher_is_better else -1
    before: Sequence[float] | None = None
    for seconds, quality in curve:
        if sign * (quality - target) >= 0:
            if before is None or quality == before[1]:
                return seconds
            return before[0] + (seconds - before[0]) * (target - before[1]) / (quality - before[1])
        before = (seconds, quality)
    return None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A method and what it is compared with."""

    method: Outcome
    baseline: Outcome


def outcomes(results: dict[str, Any], task: str, device: str) -> tuple[float | None, dict[str, Comparison]]:
    """Return the target of a task on a device and every method's outcome there; later sittings replace equal runs."""
    _, higher, margin = TASKS[task]
    runs: dict[tuple[str, float, int], dict[str, Any]] = {}
    baselines: list[dict[str, Any]] = []
    smoke = {number for number, sitting in enumerate(results["sittings"]) if sitting.get("smoke")}
    for run in results["runs"]:
        if (
            run["task"] == task
            and run["device"] == device
            and run["sitting"] not in smoke
            and run.get("final") is not None
        ):
            runs[run["method"], run["lr"], run["seed"]] = run
            if run["method"] == "baseline":
                baselines.append(run)
    chosen: dict[str, tuple[float, list[dict[str, Any]]]] = {}
    for method in dict.fromkeys(name for name, _, _ in runs):
        grid = [run for (name, _, seed), run in runs.items() if name == method and seed == 0]
        lr = best_rate(grid, higher)
        if lr is not None:
            chosen[method] = lr, [run for (name, rate, _), run in runs.items() if name == method and rate == lr]
    if "baseline" not in chosen:
        return None, {}
    baselines = [run for run in baselines if run["lr"] == chosen["baseline"][0]]
    target = statistics.mean(run["final"] for run in baselines) - (margin if higher else -margin)

    def outcome(lr: float, own: Sequence[dict[str, Any]]) -> Outcome:
        return Outcome(
            lr=lr,
            finals=tuple(run["final"] for run in own),
            times=tuple(time_to(target, run["curve"], higher) for run in own),
            was_cut=any(run.get("stopped") for run in own),
        )

    def beside(own: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        sittings = {run["sitting"] for run in own}
        same = [run for run in baselines if run["sitting"] in sittings]
        return same if len({run["seed"] for run in same}) >= SEEDS else baselines

    return target, {
        method: Comparison(method=outcome(lr, own), baseline=outcome(chosen["baseline"][0], beside(own)))
        for method, (lr, own) in chosen.items()
    }


def verdict(method: Outcome, baseline: Outcome, higher_is_better: bool) -> str:
    """Return what the runs show: better, worse, mixed, or no effect measured; with fewer than three seeds nothing."""
    if min(len(method.finals), len(baseline.finals)) < SEEDS:
        return "too few runs"
    gain = (method.mean - baseline.mean) * (1 if higher_is_better else -1)
    noise = 2 * math.hypot(method.error, baseline.error)
    is_faster = baseline.time is not None and method.time is not None and baseline.time / method.time >= FASTER
    is_slower = baseline.time is not None and (method.time is None or method.time / baseline.time >= FASTER)
    good, bad = is_faster or gain > noise, is_slower or gain < -noise
    return "mixed" if good and bad else "better" if good else "worse" if bad else NEUTRAL


def overall(verdicts: Sequence[str]) -> str:
    """Return the advice for the table, with what was measured on each task.

    >>> overall(["better (text)"]), overall(["better (text)", "worse (cifar)"])
    ('try it first: better (text)', 'depends on the task: better (text), worse (cifar)')
    >>> overall(["worse (text)"]), overall(["no effect measured (text)"])
    ('not for short runs: worse (text)', 'long runs only: no effect measured (text)')
    """
    words = {verdict.partition(" (")[0] for verdict in verdicts}
    is_good, is_bad = bool(words & {"better", "mixed"}), bool(words & {"worse", "mixed"})
    if is_good:
        advice = "depends on the task" if is_bad else "try it first"
    else:
        advice = "not for short runs" if is_bad else "long runs only"
    return f"{advice}: {', '.join(verdicts)}"


def measured(name: str, results: dict[str, Any]) -> tuple[str, str]:
    """Return what a card says about an algorithm, and its verdict in a few words."""
    lines, verdicts = [], []
    for task, (label, higher, _) in TASKS.items():
        for device in dict.fromkeys(run["device"] for run in results["runs"]):
            target, found = outcomes(results, task, device)
            if name not in found or target is None:
                continue
            own, base = found[name].method, found[name].baseline
            said = verdict(own, base, higher)
            verdicts.append(f"{said} ({task})")
            lines.append(
                f"| {label} ({device}, target {target:.4f}, lr {own.lr:g} / {base.lr:g}, {len(own.finals)} seeds) | {_number(base)} | "
                f"{_number(own)} | {_seconds(base)} | {_seconds(own)} | {said} |"
            )
    if not lines:
        reason = f" Left out of `benchmarks/algorithms.py`: {LEFT_OUT[name]}" if name in LEFT_OUT else ""
        return NOT_MEASURED + reason, NO_EVIDENCE
    dates = sorted({sitting["date"][:10] for sitting in results["sittings"] if not sitting.get("smoke")})
    versions = sorted({str(sitting.get("torch")) for sitting in results["sittings"] if not sitting.get("smoke")})
    table = [
        "| task (learning rate with it / without) | quality without | with it | time to target without | with it | in these runs |",
        "|---|---|---|---|---|---|",
        *lines,
    ]
    at_once = 1 + max((sitting.get("beside", 0) for sitting in results["sittings"]), default=0)
    crowd = f", up to {at_once} at once on the device" if at_once > 1 else ""
    facts = (
        f"Runs of at most ten seconds ({', '.join(dates)}, torch {', '.join(versions)}{crowd}). They say little about runs of "
        "hours. Quality ± standard error. `cut short`: the time limit ended a run before its schedule did."
    )
    return "\n".join([f"**Measured effect.** {facts}", "", *table]), overall(verdicts)


def _number(outcome: Outcome) -> str:
    return f"{outcome.mean:.4f} ± {outcome.error:.4f}{' (cut short)' if outcome.was_cut else ''}"


def _seconds(outcome: Outcome) -> str:
    reached = sum(time is not None for time in outcome.times)
    return f"{outcome.time:.2f} s" if outcome.time is not None else f"reached by {reached} of {len(outcome.times)}"


def with_effect(card: str, effect: str) -> str:
    """Return a card with the effect between its markers; a card without them gets them where it speaks of it."""
    block = f"{START}\n{effect}\n{END}"
    if START in card:
        return re.sub(re.escape(START) + r".*?" + re.escape(END), lambda _: block, card, flags=re.DOTALL)
    paragraph = re.search(
        r"^\*\*Measured effect\.\*\* ?(?:Not measured yet\.)?\s?(.*?)(?=\n\n|\n*\Z)", card, re.DOTALL | re.MULTILINE
    )
    if paragraph is None:
        return card.rstrip("\n") + f"\n\n{block}\n"
    own_words = f"\n\n{paragraph[1]}" if paragraph[1] else ""
    return card[: paragraph.start()] + block + own_words + card[paragraph.end() :]


def with_verdicts(index: str, verdicts: dict[str, str]) -> str:
    """Return the table of algorithms with the last column of each known row replaced."""

    def renew(row: re.Match[str]) -> str:
        return f"{row[1]}| {verdicts[row[2]]} |" if row[2] in verdicts else row[0]

    return re.sub(r"^(\| \[`(\w+)`\].*)\|[^|\n]*\|$", renew, index, flags=re.MULTILINE)


def update(folder: Path = CARDS, results_file: Path = FILE, check: bool = False) -> list[str]:
    """Bring cards and table up to date and return the names of those that were not."""
    results = read_results(results_file)
    verdicts: dict[str, str] = {}
    texts: dict[Path, str] = {}
    own = {name: module if name == names[0] else name.lower() for module, names in ALGORITHMS.items() for name in names}
    for name, page in own.items():
        effect, verdicts[name] = measured(name, results)
        card = folder / f"{page}.md"
        if card.is_file():
            texts[card] = with_effect(card.read_text(), effect)
    index = folder / "index.md"
    if index.is_file():
        texts[index] = with_verdicts(index.read_text(), verdicts)
    stale = [path for path, text in texts.items() if path.read_text() != text]
    for path in stale if not check else ():
        path.write_text(texts[path])
    return [path.name for path in stale]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    changed = update(check=given.check)
    print(f"{len(changed)} {'out of date' if given.check else 'written'}: {', '.join(changed) or 'none'}")
    sys.exit(1 if given.check and changed else 0)
