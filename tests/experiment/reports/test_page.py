"""The report: what is in it, that it is safe and whole, and that it stays small."""

import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser

import pytest

from drivetrain.core.display import printable
from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.experiment.reports import write_report
from drivetrain.experiment.reports.curves import Curve
from drivetrain.experiment.reports.data import Limits, spread
from drivetrain.experiment.reports.gather import gather_run, main_metric, short
from drivetrain.experiment.reports.page import ASSETS
from tests.experiment.folders import make_run, write_png
from tests.experiment.reports.test_curves import decoded

VOID = {"meta", "img", "input", "br", "hr", "link"}
HOSTILE = "\"'></script><script>alert(1)</script><img src=x onerror=alert(2)>{{script}}<!--\u2028"


class Balanced(HTMLParser):
    """Checks that every element is closed, and collects what would be loaded, the scripts, and the data."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.scripts, self.texts = [], [], [], {}
        self.feed(text)
        assert not self.open, self.open
        self.data = json.loads(self.texts["application/json"])

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self.scripts += [dict(attrs).get("type", "script")] if tag == "script" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.texts[self.scripts[-1]] = self.texts.get(self.scripts[-1], "") + data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read_page(path):
    return Balanced(path.read_text()).data


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
    data = read_page(path)
    (run,) = data["runs"]
    assert path == rich_run / "report.html" and data["objective"] == "eval/accuracy" and data["live"] is False
    assert list(run["curves"]) == ["train/loss", "eval/accuracy"] and run["state"] == "finished" and run["steps"] == 50
    assert (
        run["parameters"]["lr"] == [0.1, "cli"]
        and "resume" not in run["parameters"]
        and set(run["telling"]) == {"epochs", "lr"}
    )
    assert next(iter(run["parameters"])) == "lr"  # given ones first
    assert run["environment"]["commit"] == "0123456789abcdef" and "amp_native" in run["plan"]
    assert (
        run["diff"] == "+new <line>\n-old" and run["log"].endswith("last line") and run["summary"]["final_score"] == 0.5
    )
    assert run["histograms"] == {"weights": [{"step": 50, "low": -1, "high": 1, "counts": [1, 5, 2]}]}
    assert [(entry["tag"], entry["step"]) for entry in run["pictures"]] == [
        ("confusion", 20),
        ("eval/sample", 10),
        ("eval/sample", 20),
    ]
    last, low, low_step, _, high_step, count, good = run["metrics"]["train/loss"]
    assert (low, low_step, high_step, count, good) == (last, 49, 0, 50, "min")


def test_the_page_loads_nothing_and_forbids_it(rich_run):
    text = write_report([rich_run]).read_text()
    page = Balanced(text)
    assert [source for source in page.loads if not source.startswith("#")] == []
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy and "connect-src" not in policy
    assert "MIT License" in text and "Leon Sorokin" in text


def test_text_of_runs_is_never_taken_for_html(tmp_path):
    folder = make_run(tmp_path, f"run{HOSTILE.replace('/', '')}", state="failed", error=HOSTILE, diff=f"+{HOSTILE}")
    (folder / "log.txt").write_text(HOSTILE)
    (folder / "parameters.yaml").write_text(json.dumps({HOSTILE: HOSTILE, "lr": 0.1}))
    lines = [{"step": step, "time": 1, "kind": "scalar", "tag": HOSTILE, "value": 1.0} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Balanced(write_report([folder]).read_text())
    assert page.scripts == ["application/json", "script", "script"]
    (run,) = page.data["runs"]
    shown = printable(HOSTILE)
    assert run["error"] == shown and shown in run["curves"] and run["parameters"][shown][0] == shown


def test_names_that_turn_the_direction_of_text_are_written_as_escapes(tmp_path):
    name = "loss\u202e\x1b[2J"
    folder = make_run(tmp_path, f"run{name}", state="finished")
    row = {"step": 0, "time": 1, "kind": "scalar", "tag": name, "value": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "log.txt").write_text(f"one\n{name}\n")
    text = write_report([folder], tmp_path / "page.html").read_text()
    (run,) = Balanced(text).data["runs"]
    assert list(run["curves"]) == ["loss\\u202e\\x1b[2J"] and run["log"] == "one\nloss\\u202e\\x1b[2J"
    assert "\u202e" not in text


def test_several_runs_are_in_one_page_and_share_what_is_the_same(tmp_path):
    diff, packages = "+x\n" * 2000, {f"package-{number}": "1.0" for number in range(200)}
    a = make_run(tmp_path, "a", diff=diff, packages=packages)
    b = make_run(tmp_path, "b", lr=0.2, state="failed", error="it broke", diff=diff, packages=packages)
    path = write_report([a, b], tmp_path / "both.html")
    data = read_page(path)
    one, two = data["runs"]
    assert "<title>2 runs" in path.read_text() and two["error"] == "it broke"
    assert one["diff"] == two["diff"] and one["packages"] == two["packages"] and len(data["blobs"]) == 2
    assert data["blobs"][one["diff"]["blob"]] == diff


def test_a_bare_or_broken_run_still_has_a_report(tmp_path):
    folder = make_run(tmp_path, metrics=False)
    for name in ("manifest.json", "status.json", "parameters.yaml"):
        (folder / name).write_text("{broken")
    row = {"step": 0, "time": 1, "kind": "scalar", "tag": "loss", "value": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\nbroken\n")
    (run,) = read_page(write_report([folder]))["runs"]
    assert "the metrics cannot be read" in run["notes"][0] and "line 2" in run["notes"][0]
    assert run["metrics"]["loss"][0] == 1.0  # what comes before the damage is kept


def test_values_that_are_not_finite_are_text_and_gaps(tmp_path):
    folder = make_run(tmp_path, losses=[1.0, float("nan"), 2.0, 3.0, float("inf"), 1.0, float("nan")])
    (run,) = read_page(write_report([folder]))["runs"]
    assert run["metrics"]["train/loss"][0] == "nan" and run["curves"]["train/loss"]["gaps"] == [1, 4, 6]
    assert decoded(run["curves"]["train/loss"]["x"]) == [0, 2, 3, 5]


def test_a_long_run_makes_a_small_file(tmp_path):
    folder = make_run(tmp_path, losses=[1.0 / (step + 1) for step in range(6_000)])
    assert write_report([folder]).stat().st_size < 400_000


def test_what_each_run_may_take_depends_on_how_many_there_are():
    alone, many = Limits.share(1, 10), Limits.share(300, 300 * 40)
    assert alone.points == 2000 and alone.picture_bytes == 24_000_000
    assert 60 <= many.points < 100 and many.points * 300 * 40 <= 1_000_000 and many.picture_bytes == 80_000
    assert Limits.share(300, 10**7).curves * 300 <= 30_000 and Limits.share(0, 0).points == 2000


def test_pictures_over_steps_are_spread_and_the_rest_is_named(tmp_path):
    folder = make_run(tmp_path)
    for step in range(60):
        write_png(folder / "images" / "sample" / f"{step}.png")
    (folder / "images" / "sample" / "99.png").write_bytes(bytes(5_000_000))
    (run,) = read_page(write_report([folder]))["runs"]
    steps = [entry["step"] for entry in run["pictures"]]
    assert (
        len(steps) == 23
        and steps[0] == 0
        and steps == sorted(steps)
        and max(b - a for a, b in itertools.pairwise(steps)) < 8
    )
    assert run["notes"] == ["38 older or very large pictures stay in the run folder only"]


def test_the_most_telling_places_come_first():
    assert spread(0) == [] and spread(1) == [0] and spread(2) == [1, 0]
    for count in (3, 10, 257):
        assert sorted(spread(count)) == list(range(count)) and spread(count)[:2] == [count - 1, 0]


def test_epochs_come_from_a_metric_of_that_name_or_from_means_of_epochs(tmp_path):
    folder = make_run(tmp_path, "means", metrics=False)
    rows = [(10, "train_loss_epoch"), (10, "eval_loss_epoch"), (20, "train_loss_epoch")]
    lines = [{"step": step, "time": step, "kind": "scalar", "tag": tag, "value": 1.0} for step, tag in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_page(write_report([folder]))["runs"]
    assert decoded(run["epochs"]["x"]) == [0, 10, 20] and decoded(run["epochs"]["y"]) == [0, 1, 2]
    assert decoded(run["clock"]["y"]) == [0, 0, 10]
    (folder / "metrics.jsonl").write_text(json.dumps(lines[0] | {"tag": "epoch", "value": 0.5}) + "\n")
    (run,) = read_page(write_report([folder]))["runs"]
    assert decoded(run["epochs"]["x"]) == [10] and decoded(run["epochs"]["y"]) == [0.5]
    assert read_page(write_report([make_run(tmp_path, "none")]))["runs"][0]["epochs"] is None


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
    curve = Curve()
    curve.extend([0, 1, 2, 3], [3.0, 1.0, 2.0, float("nan")])
    assert curve.best("eval/loss")[0] == 1.0 and curve.best("eval/accuracy")[0] == 3.0
    assert main_metric({"lr": (), "train/loss": (), "eval/loss": (), "eval/accuracy": ()}) == "eval/accuracy"
    assert main_metric({"lr": (), "train/loss": ()}) == "train/loss" and main_metric({}) is None


# What people without red or green cones see, in linear RGB (Machado, Oliveira and Fernandes, 2009).
SEEN_BY = {
    "most": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}


def lab_of(colour, matrix):
    """Return a colour of the style sheet in CIELAB, as somebody sees it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(row, linear)))) for row in matrix)
    x, y, z = (
        0.4124 * r + 0.3576 * g + 0.1805 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.95047, y, z / 1.08883))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("people", SEEN_BY)
@pytest.mark.parametrize(("scheme", "ground"), [(0, "#ffffff"), (1, "#1b1f25")])
def test_colours_of_curves_stay_apart_for_everybody(people, scheme, ground):
    found = re.findall(r"--c[0-7]: (#\w{6})", (ASSETS / "report.css").read_text())
    colours = [lab_of(colour, SEEN_BY[people]) for colour in (*found[8 * scheme :][:8], ground)]
    assert len(found) == 16 and min(math.dist(a, b) for a, b in itertools.combinations(colours, 2)) > 28


def test_the_charting_library_is_as_it_was_published():
    sizes = {"uPlot.iife.min.js": "19c8d4c6ad88929a79f4", "uPlot.min.css": "df630c6a8d6f8eeaff26"}  # version 1.6.32
    for name, digest in sizes.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest().startswith(digest)


def test_short_numbers():
    values = (0, 0.123456, 1234.0, 1e-8, 5e9, float("nan"))
    assert [short(value) for value in values] == ["0", "0.1235", "1234", "1e-08", "5G", "nan"]
