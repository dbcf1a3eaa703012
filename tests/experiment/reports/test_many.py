"""The table of a report on many runs: what is in it, that it is safe, and that a browser sorts and filters it."""

import json
import re
import subprocess

import pytest

from drivetrain.experiment.reports import write_report
from tests.experiment.folders import make_run
from tests.experiment.reports.test_page import CHROMIUM, CHROMIUM_OPTIONS, Balanced

HOSTILE = '<img src=x onerror=alert(1)>"'


@pytest.fixture
def page(tmp_path):
    folders = []
    for number in range(7):
        folder = make_run(
            tmp_path, f"run-{number}", lr=0.1 * (number + 1), state="failed" if number == 6 else "finished"
        )
        with open(folder / "parameters.yaml", "a") as stream:
            stream.write(f"label: {json.dumps(HOSTILE + str(number))}\n")
        with open(folder / "metrics.jsonl", "a") as stream:
            row = {"step": 0, "time": 1.0, "kind": "scalar", "tag": HOSTILE, "value": float(number)}
            stream.write(json.dumps(row) + "\n")
        folders.append(folder)
    return write_report(folders, tmp_path / "page.html")


def test_the_table_has_what_varies_and_marks_the_best(page):
    text = page.read_text()
    table = text[text.index('class="sortable"') :].partition("</table>")[0]
    heads = re.findall(r"<button[^>]*>(.*?)</button>", table)
    assert heads[:3] == ["run", "state", "lr"] and "epochs" not in heads and "train/loss (best)" in heads
    rows = table.split("<tr>")[2:]
    assert len(rows) == 7
    loss = heads.index("train/loss (best)") - 1
    cells = [re.findall(r"<td.*?</td>", row)[loss] for row in rows]
    assert ["★" in cell for cell in cells] == [True, *[False] * 6]


def test_names_from_runs_stay_text_and_nothing_is_loaded(page):
    text = page.read_text()
    assert "<img src=x" not in text and "&lt;img src=x onerror=alert(1)&gt;" in text
    assert Balanced(text).loads == []


def test_few_runs_have_no_such_table(tmp_path):
    folders = [make_run(tmp_path, f"run-{number}", lr=0.1 * (number + 1)) for number in range(5)]
    assert "sortable" not in write_report(folders, tmp_path / "page.html").read_text()


def test_curves_are_those_of_the_best_eight_runs(tmp_path):
    folders = [make_run(tmp_path, f"run-{number:02d}", losses=[50.0, abs(number - 6) + 1.0]) for number in range(12)]
    text = write_report(folders, tmp_path / "page.html").read_text()
    assert "The best 8 of 12 runs by train/loss" in text
    legends = set(re.findall(r"run-\d\d", text[text.index("<h2>Curves") :].partition("</section>")[0]))
    assert legends == {f"run-{number:02d}" for number in range(2, 10)}  # of 2 and 10, which are equal, the first


ACTIONS = """<script>
const order = () => [...document.querySelectorAll(".sortable tbody tr:not([hidden])")].map(row => row.cells[0].textContent).join();
const heads = [...document.querySelectorAll(".sortable th button")], input = document.querySelector(".search input"), found = {};
const press = name => heads.find(head => head.textContent === name).click();
const filter = text => { input.value = text; input.dispatchEvent(new Event("input")); return order(); };
press("lr"); press("lr"); found.descending = order();
press("run"); found.names = order();
found.comparison = filter("lr<0.35 and state=finished");
found.spaces = filter("lr >= 0.65");
found.word = filter("failed");
found.count = document.querySelector(".search output").textContent;
found.all = filter("").split(",").length;
document.documentElement.dataset.found = JSON.stringify(found);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_sorts_and_filters_the_table(page, tmp_path):
    page.write_text(page.read_text().replace("</body>", ACTIONS))
    options = [CHROMIUM, *CHROMIUM_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(re.search(r'data-found="(.*?)"', done.stdout)[1].replace("&quot;", '"'))
    names = [f"run-{number}" for number in range(7)]
    assert found["descending"] == ",".join(reversed(names)) and found["names"] == ",".join(names)
    assert found["comparison"] == "run-0,run-1,run-2" and found["spaces"] == "run-6" and found["word"] == "run-6"
    assert found["count"] == "1 of 7 runs" and found["all"] == 7
