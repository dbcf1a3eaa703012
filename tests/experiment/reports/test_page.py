"""The report: what is in it, that it is safe and whole, and that a browser shows it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.experiment.reports import write_report
from drivetrain.experiment.reports.gather import gather_run, main_metric, summarize
from tests.experiment.folders import make_run, write_png

VOID = {"meta", "img", "input", "br", "hr", "link"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=2000"
).split()


class Balanced(HTMLParser):
    """Checks that every element is closed, and collects what would be loaded."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads = [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """An SVG element without content."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def rich_run(tmp_path):
    folder = make_run(tmp_path, "rich", diff="+new <line>\n-old")
    for step in (10, 20):
        write_png(folder / "images" / "eval.sample" / f"{step}.png")
    write_png(folder / "figures" / "confusion" / "20.png", 300)
    rows = [
        {
            "step": 50,
            "time": 1,
            "kind": "histogram",
            "tag": "weights",
            "value": {"low": -1, "high": 1, "counts": [1, 5, 2], "nonfinite": 0},
        },
        {"step": 50, "time": 1, "kind": "text", "tag": "sample", "value": "a <script>alert(1)</script> text"},
        {"step": 50, "time": 1, "kind": "summary", "tag": "summary", "value": {"final_score": 0.5, "parts": [1, 2]}},
    ]
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def test_one_run_has_curves_parameters_plan_environment_and_pictures(rich_run):
    path = write_report([rich_run])
    text = path.read_text()
    page = Balanced(text)
    assert path == rich_run / "report.html"
    for title in ("Curves", "Metrics", "Pictures", "Parameters", "Plan", "Environment", "Log"):
        assert f"<h2>{title}</h2>" in text
    for word in (
        "train/loss",
        "eval/accuracy",
        "amp_native",
        "0123456789abcdef",
        "final_score",
        "Histograms",
        "last line",
    ):
        assert word in text
    assert text.count('role="img"') == 3 and len(page.loads) == 3  # loss, accuracy, histogram; three pictures


def test_the_page_loads_nothing_and_forbids_it(rich_run):
    text = write_report([rich_run]).read_text()
    assert all(source.startswith("data:image/png;base64,") for source in Balanced(text).loads)
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"https?://", text)


def test_text_of_runs_is_never_taken_for_html(tmp_path):
    folder = make_run(
        tmp_path, state="failed", error="<img src=x onerror=alert(1)>", diff="+</pre><script>alert(2)</script>"
    )
    (folder / "log.txt").write_text("</pre><script>alert(3)</script>")
    lines = [
        {"step": step, "time": 1, "kind": "scalar", "tag": "\"'><script>alert(4)</script>", "value": 1.0}
        for step in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report([folder]).read_text()
    page = Balanced(text)
    assert page.loads == [] and text.count("<script>") == 1  # our own


def test_several_runs_stand_side_by_side(tmp_path):
    a, b = make_run(tmp_path, "a"), make_run(tmp_path, "b", lr=0.2, state="failed", error="it broke")
    text = write_report([a, b], tmp_path / "both.html").read_text()
    Balanced(text)
    assert "2 runs compared" in text and "only what differs" in text and "it broke" in text
    row = re.search(r'<tr class="(\w+)"><th scope="row">lr</th>(.*?)</tr>', text)
    assert row[1] == "differs" and re.findall(r">([\d.]+)<", row[2]) == ["0.1", "0.2"]
    assert re.search(r'<tr class="same"><th scope="row">epochs</th>', text)
    charts = [json.loads(found.replace("&quot;", '"')) for found in re.findall(r'data-curves="([^"]*)"', text)]
    assert [[curve["label"] for curve in chart] for chart in charts] == [["a", "b"], ["a", "b"]]


def test_training_and_evaluation_of_one_quantity_share_a_chart(tmp_path):
    folder = make_run(tmp_path)
    lines = [
        {"step": step, "time": 1, "kind": "scalar", "tag": tag, "value": 1.0 / (step + 1)}
        for step in range(3)
        for tag in ("train_loss_epoch", "eval_loss_epoch")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report([folder]).read_text()
    assert len(re.findall('class="chart"', text)) == 1 and "loss_epoch" in text


def test_a_bare_or_broken_run_still_has_a_report(tmp_path):
    folder = make_run(tmp_path, metrics=False)
    for name in ("manifest.json", "status.json", "parameters.yaml"):
        (folder / name).write_text("{broken")
    (folder / "metrics.jsonl").write_text("broken\n")
    text = write_report([folder]).read_text()
    Balanced(text)
    assert "the metrics cannot be read" in text


def test_values_that_are_not_finite_leave_gaps(tmp_path):
    folder = make_run(tmp_path, losses=[1.0, float("nan"), 2.0, 3.0, float("inf"), 1.0, 1.5])
    text = write_report([folder]).read_text()
    Balanced(text)
    assert "nan" not in re.sub(r'data-curves="[^"]*"', "", text).split("<h2>Metrics")[0].lower().replace("finance", "")


def test_a_long_run_makes_a_small_file(tmp_path):
    folder = make_run(tmp_path, losses=[1.0 / (step + 1) for step in range(20_000)])
    assert write_report([folder]).stat().st_size < 400_000


def test_old_and_huge_pictures_are_named_instead_of_shown(tmp_path):
    folder = make_run(tmp_path)
    for step in range(9):
        write_png(folder / "images" / "sample" / f"{step}.png")
    (folder / "images" / "sample" / "99.png").write_bytes(bytes(5_000_000))
    text = write_report([folder]).read_text()
    assert len(Balanced(text).loads) == 5 and "5 older or very large pictures" in text


def test_links_out_of_the_run_are_not_followed(tmp_path):
    folder = make_run(tmp_path)
    write_png(tmp_path / "secret.png")
    (folder / "images").mkdir()
    (folder / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    assert gather_run(folder).pictures == ()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="is not the folder of a run"):
        write_report([tmp_path])
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([])


def test_the_best_value_follows_the_metrics_name():
    points = ((0, 3.0), (1, 1.0), (2, 2.0), (3, float("nan")))
    assert summarize("eval/loss", points).best == 1.0 and summarize("eval/accuracy", points).best == 3.0
    assert main_metric({"lr": (), "train/loss": (), "eval/loss": (), "eval/accuracy": ()}) == "eval/accuracy"
    assert main_metric({"lr": (), "train/loss": ()}) == "train/loss" and main_metric({}) is None


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_and_runs_its_script(rich_run, tmp_path):
    page = write_report([rich_run, make_run(tmp_path, "other", lr=0.3)], tmp_path / "page.html")
    options = [CHROMIUM, *CHROMIUM_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "page.png"
    shot = [*options, "--window-size=1200,1600", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(shot, capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 20_000
    done = subprocess.run(
        [*options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'data-ready="yes"' in done.stdout  # set by the last line of the script
    assert done.stdout.count('<figure class="chart"') == page.read_text().count('<figure class="chart"')
    assert "Refused to" not in done.stderr
