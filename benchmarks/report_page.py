"""What the report of many runs costs: seconds to write it, its size, and how soon a browser shows it.

    python -m benchmarks.report_page [--runs 300] [--points 10000] [--repeats 5]

Each run has a loss at every step, and an accuracy and a learning rate at every hundredth. The runs share ten metrics files through
hard links. The browser is a headless Chromium without a GPU. "First paint" is the first content on the screen, "ready" the moment at
which table, plots and the charts near the window are drawn and the page answers.
"""

import argparse
import math
import os
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.many_runs import write_run
from benchmarks.timing import environment, write_result
from drivetrain.experiment.reports.page import write_report
from tools.browser import Browser, Page

GOAL_SECONDS = 2.0
PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
READY = "document.documentElement.dataset.ready === 'yes' && document.querySelectorAll('canvas').length > 0"


def write_metrics(file: Path, points: int, seed: int) -> None:
    """Write rows as the Recorder does."""
    draw = random.Random(seed)
    row = '{{"step": {}, "time": {:.3f}, "kind": "scalar", "tag": "{}", "value": {!r}}}\n'
    with open(file, "w") as stream:
        for step in range(points):
            loss = 0.3 + 0.1 * seed + math.exp(-5 * step / points) + draw.gauss(0, 0.05)
            stream.write(row.format(step, 1.77e9 + step, "train/loss", loss))
            if step % 100 == 99:
                stream.write(row.format(step, 1.77e9 + step, "eval/accuracy", 1 - loss / 3))
                stream.write(row.format(step, 1.77e9 + step, "lr", 0.1 * (1 - step / points)))


def milliseconds(page: Page, action: str) -> float:
    """Return how long it takes until an action is on the screen."""
    code = f"(async () => {{ const start = performance.now(); {action}; return (await {PAINTED}) - start; }})()"
    return float(page.evaluate(code))


def measure(browser: Browser, url: str) -> dict[str, float]:
    """Open the page once and use it."""
    with browser.open(url, height=2000) as page:
        page.wait_for(READY)
        page.evaluate(PAINTED)
        found = {
            "first paint": page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"),
            "ready": page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"),
            "sort by another column": milliseconds(page, "document.querySelectorAll('#table thead button')[3].click()"),
            "draw all runs": milliseconds(page, "byId('draw-all').click()"),
            "filter": milliseconds(page, "state.condition = readCondition('depth>3'), state.chosen = null, refresh()"),
        }
        assert page.problems() == [], page.problems()
        return found


def main(runs: int = 300, points: int = 10_000, repeats: int = 5) -> dict[str, Any]:
    """Measure and write the result."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, f"{number}.jsonl") for number in range(10)]
        for number, file in enumerate(files):
            write_metrics(file, points, number)
        folders = [write_run(Path(name, "many"), number) for number in range(runs)]
        for number, folder in enumerate(folders):
            os.link(files[number % len(files)], folder / "metrics.jsonl")
        start = time.process_time()
        report = write_report(folders, Path(name, "report.html"))
        written = time.process_time() - start
        with Browser() as browser:
            found = [measure(browser, report.as_uri()) for _ in range(repeats)]
        size = report.stat().st_size
    median = {what: statistics.median(one[what] for one in found) for what in found[0]}
    for what, value in median.items():
        print(f"{what:25} {value:8.0f} ms   (median of {repeats})")
    print(f"{'writing the page':25} {1e3 * written:8.0f} ms CPU\n{'size':25} {size / 1e6:8.1f} MB")
    facts = {
        "run_folders": runs,
        "points_per_run": points,
        "repeats": repeats,
        "goal_seconds_to_first_paint": GOAL_SECONDS,
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result = {
        "milliseconds": median,
        "all": found,
        "cpu_seconds_to_write": written,
        "bytes": size,
        "peak_memory_mib": peak,
    }
    write_result("report_page", result | facts | environment(repeats))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.runs, arguments.points, arguments.repeats)
