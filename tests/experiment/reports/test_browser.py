"""The page in a real browser: what a person does with it, by mouse and keyboard, and what it shows."""

import json
import random
import statistics
import threading

import pytest

from drivetrain.experiment.cli.listing import read_condition
from drivetrain.experiment.cli.runs import read_lines
from drivetrain.experiment.records import read_run
from drivetrain.experiment.reports import write_report
from drivetrain.experiment.reports.live import Board, Server
from tests.experiment.folders import make_run, write_png
from tests.experiment.reports.test_page import HOSTILE
from tools.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

READY = "document.documentElement.dataset.ready === 'yes'"
ROWS = "[...document.querySelectorAll('#table tbody tr')].map(row => row.cells[1].textContent)"
SETTLED = "new Promise(done => setTimeout(() => requestAnimationFrame(() => done(true)), 150))"
CONDITIONS = """
lr<0.35 and state=finished | lr >= 0.65 | lr=0.1 | lr!=0.1 | state=failed or lr<0.25 | lr=inf | lr<1e0 | lr>-1 | lr<zero
(state=failed or lr<0.25) and depth>1 | depth=none | depth!=none | optimizer~AD | optimizer="adam w" | optimizer='sgd' | optimizer<a
nesterov=true | nesterov=False | nesterov!=True | betas=0.9 | betas!=0.9 | betas~9 | train/loss<0.01 | train/loss>=0 | train/loss=nan
eval/accuracy>0.97 | accuracy=0.9 | name~run-1 | id=run-3 | experiment=digits | steps>10 | seconds<31 | seed=7 | tag=base | tag!=base
tag~AS | note~"two words" | last>0.9 | best>=0.98 | ghost=nan
""".replace("\n", "|")


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


def write_runs(place, number=10):
    """Write runs with parameters of all kinds, pictures, histograms and times."""
    folders = []
    for place_of in range(number):
        losses = [(place_of + 1) * 0.9**step for step in range(60)]
        folder = make_run(
            place,
            f"run-{place_of}",
            lr=0.1 * (place_of + 1),
            losses=losses,
            state="failed" if place_of == 6 else "finished",
        )
        parameters = {
            "lr": 0.1 * (place_of + 1),
            "optimizer": ["adam w", "sgd"][place_of % 2],
            "nesterov": place_of % 3 == 0,
            "betas": [0.9, 0.99] if place_of % 2 else [0.8],
            "epochs": 3,
        }
        if place_of:
            parameters["depth"] = place_of % 4
        (folder / "parameters.yaml").write_text(json.dumps(parameters))
        if place_of % 2:
            (folder / "remarks.json").write_text(json.dumps({"tags": ["base", "x"], "note": "of two words"}))
        metrics = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows = [row | {"time": 1e9 + 2 * row["step"]} for row in rows]
        rows += [
            {"step": s, "time": 1e9 + 2 * s, "kind": "scalar", "tag": "epoch", "value": s / 20}
            for s in range(0, 60, 10)
        ]
        rows += [
            {
                "step": s,
                "time": 1e9,
                "kind": "histogram",
                "tag": "weights",
                "value": {"low": -1, "high": 1 + s, "counts": [1, 5, 2]},
            }
            for s in (5, 10, 20)
        ]
        rows.append({"step": 60, "time": 1e9 + 120, "kind": "scalar", "tag": "ghost", "value": "nan"})
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in (1, 2, 30):
            write_png(folder / "images" / "sample" / f"{step}.png", 8 + step)
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory):
    return write_report(folders, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def shared(browser, report):
    with browser.open(report.as_uri(), height=2400) as page:
        page.wait_for(READY)
        yield page


@pytest.fixture
def page(shared):
    """The page as it is when it is opened; what a test has chosen is forgotten."""
    shared.evaluate(
        "state.chosen = null, state.sort = null, state.brushes.clear(), state.axis = byId('axis').value = 'step', state.smoothing = 0, "
        "state.filter = byId('filter').value = '', state.condition = () => true, byId('filter-error').textContent = '', refresh(), "
        "[...charts.values()].forEach(chart => { chart.hidden.clear(); chart.zoom = null; chart.isLog = false; chart.change(); })"
    )
    shared.wait_for("document.querySelectorAll('canvas').length > 1")
    return shared


def box_of(page, selector):
    """Return the middle, width and height of an element on the screen."""
    find = f"document.querySelector({json.dumps(selector)})"
    page.evaluate(f"{find}.scrollIntoView({{block: 'center'}})")
    return page.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2, r.width])({find}.getBoundingClientRect())")


def filter_by(page, text):
    page.evaluate(f"byId('filter').value = {json.dumps(text)}, byId('filter').dispatchEvent(new Event('input'))")
    page.evaluate(SETTLED)
    return page.evaluate(ROWS)


LOSS = "[...charts.values()].find(chart => chart.title === 'train/loss')"


def over(page):
    """Return middle and size of the drawing area of the loss."""
    page.evaluate(f"{LOSS}.figure.id = 'loss'")
    return box_of(page, "#loss .u-over")


def test_the_page_draws_asks_for_nothing_and_has_no_problem(page, report):
    assert page.problems() == [] and page.requests() == [report.as_uri()]
    assert page.evaluate("document.querySelector('h1').textContent") == "10 runs"
    titles = page.evaluate("[...charts.values()].map(chart => chart.title)")
    assert titles[0] == "eval/accuracy" and {"train/loss", "epoch"} <= set(titles)
    assert page.evaluate(f"{LOSS}.lines.length") == 8  # the best eight of ten
    assert page.evaluate(f"new Set({LOSS}.members.map(member => member.colour)).size") == 8


def test_columns_sort_and_the_best_is_marked(page):
    heads = "[...document.querySelectorAll('#table thead button')]"
    press = lambda name: page.evaluate(f"{heads}.find(head => head.textContent === {json.dumps(name)}).click()")
    press("lr")
    names = [f"run-{number}" for number in range(10)]
    assert page.evaluate(ROWS) == names
    assert page.evaluate("document.querySelector('#table th[aria-sort=ascending]').textContent") == "lr"
    press("lr")
    assert page.evaluate(ROWS) == names[::-1]
    press("depth")
    assert page.evaluate(ROWS)[-1] == "run-0"  # it has none
    press("train/loss (best)")
    assert page.evaluate(ROWS) == names
    heads = page.evaluate("[...document.querySelectorAll('#table thead th')].map(head => head.textContent)")
    assert "epochs" not in heads and {"lr", "optimizer", "nesterov", "betas", "depth"} <= set(heads)
    column = heads.index("train/loss (best)")
    assert page.evaluate(f"document.querySelectorAll('#table tbody tr')[0].cells[{column}].textContent").endswith(
        "★ best"
    )
    assert page.evaluate("document.querySelectorAll('td.best').length") == 1  # accuracies are all the same


def test_conditions_mean_what_they_mean_on_the_command_line(page, folders):
    lines = read_lines([read_run(folder) for folder in folders], {})
    conditions = [text.strip() for text in CONDITIONS.split("|") if text.strip()]
    code = "(texts => texts.map(text => runs.filter(readCondition(text)).map(run => run.id)))"
    found = page.evaluate(f"{code}({json.dumps(conditions)})")
    for text, own in zip(conditions, found):
        holds, _ = read_condition(text)
        assert own == [line.id for line in lines if holds(line.values())], text
    assert len(conditions) > 35 and len({str(own) for own in found}) > 12


def test_the_filter_takes_conditions_and_words_and_names_mistakes(page):
    assert filter_by(page, "lr<0.35 and state=finished") == ["run-0", "run-1", "run-2"]
    assert page.evaluate("byId('count').textContent") == "3 of 10 runs"
    assert page.evaluate(f"{LOSS}.lines.length") == 3  # charts follow
    assert filter_by(page, "failed") == ["run-6"]
    for text, message in (
        ("lr<", "its end"),
        ("lrr<1", "No run has a value “lrr”"),
        ("(lr<1", "Not understood"),
        ("lr<1 !", "from"),
    ):
        assert len(filter_by(page, text)) == 10 and message in page.evaluate("byId('filter-error').textContent")
    assert len(filter_by(page, "")) == 10 and page.evaluate("byId('filter-error').textContent") == ""


def test_pointing_at_a_chart_shows_values(page):
    x, y, width = over(page)
    page.mouse("moved", x - 5, y)
    page.mouse("moved", x - width / 2 + 20.2 / 59 * width, y)
    text = page.wait_for("!byId('tooltip').hidden && byId('tooltip').textContent")
    row = "[...byId('tooltip').querySelectorAll('div')].find(row => row.textContent.includes('run-0')).textContent"
    assert text.startswith("step 20") and page.evaluate(row) == f"run-0{0.9**20:.4g}"
    page.evaluate("state.smoothing = 0.9")
    page.evaluate(f"{LOSS}.change()")
    page.mouse("moved", x - width / 2 + 20.1 / 59 * width, y)
    page.wait_for(f"{row}.startsWith('run-0{0.9**20:.4g} (smooth 0.1')")


def test_dragging_zooms_and_a_double_click_shows_everything_again(page):
    x, y, width = over(page)
    page.drag(x - width / 4, y, x + width / 4, y)
    low, high = page.wait_for(f"{LOSS}.zoom")
    assert low == pytest.approx(59 / 4, abs=0.8) and high == pytest.approx(59 * 3 / 4, abs=0.8)
    top = page.evaluate(f"{LOSS}.plotted.scales.y.max")
    assert top < 8 * 0.9**13 * 1.2  # the vertical range follows
    for clicks in (1, 2):
        page.mouse("pressed", x, y, clickCount=clicks)
        page.mouse("released", x, y, clickCount=clicks)
    page.wait_for(f"{LOSS}.zoom === null && {LOSS}.plotted.scales.x.min === 0 && {LOSS}.resetButton.hidden")


def fingers(page, kind, *points):
    page.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=[{"x": x, "y": y} for x, y in points])


def test_one_finger_reads_values_and_two_fingers_zoom_all_charts(page):
    x, y, width = over(page)
    fingers(page, "Start", (x, y))
    fingers(page, "Move", (x - width / 2 + 20.2 / 59 * width, y))
    text = page.wait_for("!byId('tooltip').hidden && byId('tooltip').textContent")
    assert text.startswith("step 20")
    fingers(page, "End")
    at = lambda share: (x - width / 2 + share * width, y)
    fingers(page, "Start", at(0.4), at(0.6))
    for reach in (0.15, 0.2, 0.3):
        fingers(page, "Move", at(0.5 - reach), at(0.5 + reach))
    page.wait_for(f"{LOSS}.zoom && {LOSS}.zoom[1] < 42")
    low, high = page.evaluate(f"{LOSS}.zoom")
    assert (low, high) == pytest.approx((59 / 3, 59 * 2 / 3), abs=0.7)  # what was under the fingers still is
    assert not page.evaluate(f"{LOSS}.resetButton.hidden")
    assert page.evaluate("[...charts.values()].every(chart => chart.zoom && chart.zoom[0] > 19)")  # drawn or not
    fingers(page, "Move", at(0.4), at(0.6))
    page.wait_for(f"{LOSS}.zoom === null")
    fingers(page, "End")
    assert page.evaluate("getComputedStyle(document.querySelector('.u-over')).touchAction") == "pan-y"
    assert page.problems() == []


def test_the_legend_hides_curves_by_mouse_and_keyboard(page):
    over(page)
    press = "document.querySelector('#loss .legend button')"
    label = page.evaluate(f"{press}.textContent")
    page.evaluate(f"{press}.click()")
    page.evaluate(SETTLED)
    assert page.evaluate(f"{press}.getAttribute('aria-pressed')") == "false"
    assert label not in page.evaluate(f"{LOSS}.lines.map(line => line.label)")
    page.evaluate(f"{press}.focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)
    page.wait_for(f"{LOSS}.lines.length === 8")
    assert page.evaluate("document.activeElement.closest('.legend') !== null")  # the focus stays


def test_arrow_keys_read_values_and_zoom(page):
    over(page)
    page.evaluate("document.querySelector('#loss .plot').focus()")
    page.key("Home")
    assert page.evaluate("byId('status').textContent").startswith("step 0: run-0 1, run-1 2")
    page.key("ArrowRight")
    assert page.evaluate("byId('status').textContent").startswith("step 1: ")
    page.key("+")
    assert page.wait_for(f"{LOSS}.zoom")[1] < 40
    page.key("0")
    page.wait_for(f"{LOSS}.zoom === null")


def test_the_horizontal_axis_can_be_epochs_or_time(page):
    over(page)
    for axis, extent in (("epoch", [0, 59 / 20]), ("time", [0, 118]), ("step", [0, 59])):
        page.evaluate(f"byId('axis').value = '{axis}', byId('axis').dispatchEvent(new Event('change')), {SETTLED}")
        assert page.evaluate(f"{LOSS}.extent") == pytest.approx(extent)


def test_several_values_at_one_step_are_all_drawn(page):
    lines = "[{x: [0, 1, 1, 1, 2], y: [0, 5, 9, 1, 0]}, {x: [0, 1, 2], y: [1, null, 3]}]"
    x, first, second = page.evaluate(
        f"aligned({lines}, [0, 2]).map(row => row.map(one => one === undefined ? 'none' : one))"
    )
    assert x == pytest.approx([0, 1, 1, 1, 2]) and first == [0, 5, 9, 1, 0]
    assert second == [1, None, "none", "none", 3]


def test_very_many_curves_share_a_grid_that_keeps_their_spikes(page):
    make = "Array.from({length: 300}, (_, n) => ({x: Array.from({length: 500}, (_, i) => i * 20 + n), y: Array(500).fill(1)}))"
    code = f"(lines => {{ lines[7].y[250] = 99; lines[9].y[3] = -99; return aligned(lines, [0, 10279]); }})({make})"
    page.evaluate(f"window.grid = {code}.map(row => row.map(value => value ?? 0)), 0")
    found = page.evaluate("[grid.length, grid[0].length, Math.max(...grid[8]), grid[10].includes(-99)]")
    assert found[0] == 301 and found[1] <= 2000 and found[2:] == [99, True]


def test_a_logarithmic_axis_has_round_numbers(page):
    splits = page.evaluate("[[0.5012, 1.9], [0.02, 3], [1e-6, 4e5], [0.97, 1.01]].map(range => logSplits(...range))")
    assert splits[0] == [0.7, 1] and splits[1] == [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]
    assert splits[2] == pytest.approx([1e-6, 1e-4, 1e-2, 1, 1e2, 1e4]) and len(splits[3]) >= 4
    over(page)
    page.evaluate("document.querySelector('#loss [aria-pressed=false]').click()")
    page.wait_for(f"{LOSS}.plotted.scales.y.distr === 3 && {LOSS}.plotted.scales.y.min > 0")


def test_a_single_outlier_does_not_set_the_vertical_range(page):
    values = [1.0 + 0.01 * (place % 10) for place in range(100)] + [1000.0]
    code = "state.robust = {}, rangeOf(" + json.dumps(values) + ", false)"
    robust, everything = (page.evaluate(code.replace("{}", word)) for word in ("true", "false"))
    page.evaluate("state.robust = true")
    assert robust["outside"] == 1 and robust["range"][1] < 1.2
    assert everything["outside"] == 0 and everything["range"][1] > 1000


def test_smoothing_does_not_lag_and_keeps_a_constant(page):
    line, constant = [float(place) for place in range(200)], [3.0] * 200
    page.evaluate("state.smoothing = 0.9")
    smooth = page.evaluate(f"[{line}, {constant}].map(y => smoothed({{x: {line}, y}}, 199))")
    assert smooth[0][60:140] == pytest.approx(line[60:140], abs=0.01) and smooth[1] == pytest.approx(constant)
    gap = page.evaluate("smoothed({x: [0, 1, 2], y: [1, null, 3]}, 2)")
    assert gap[1] is None and gap[0] == pytest.approx(1, abs=0.01)


def test_runs_are_chosen_in_the_table(page):
    page.evaluate("byId('draw-none').click()")
    assert page.evaluate("drawn().length") == 0
    page.evaluate("document.querySelector('#table tbody input').click()")
    assert page.evaluate("drawn().length") == 1
    page.evaluate("byId('draw-all').click()")
    page.evaluate(SETTLED)
    assert page.evaluate("drawn().length") == 10 and page.problems() == []


def test_dragging_along_an_axis_chooses_runs(page):
    names = page.evaluate("[...document.querySelectorAll('#parallel .handle')].length")
    at = page.evaluate(
        "(g => (r => [r.x + r.width / 2, r.y, r.height])(g.querySelector('.handle').getBoundingClientRect()))"
        "([...document.querySelectorAll('#parallel svg > g')].find(g => g.textContent.includes('lr')))"
    )
    assert names == 6  # five parameters and the objective
    x, y, height = at
    page.drag(x, y + 0.61 * height, x, y + height - 2)
    assert page.wait_for("state.brushes.size") == 1
    assert sorted(page.evaluate(ROWS)) == [f"run-{number}" for number in range(4)]
    page.evaluate("byId('clear-brushes').click()")
    assert len(page.evaluate(ROWS)) == 10


@pytest.mark.parametrize("plot", ["parallel", "scatter"])
def test_arrow_keys_go_from_run_to_run(page, plot):
    page.evaluate(f"byId('{plot}').focus()")
    page.key("ArrowRight")
    first = page.evaluate("byId('status').textContent")
    page.key("ArrowRight")
    second = page.evaluate("byId('status').textContent")
    assert first.startswith("run-") and "eval/accuracy 0.9836" in first and "lr 0." in first and second != first
    page.key("Escape")
    assert page.evaluate("byId('tooltip').hidden")


def ranks_of(values):
    """Return ranks from 1 on, equal values with their mean rank."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def importance(page, columns, scores):
    return page.evaluate(f"forestImportance({json.dumps(columns)}, {json.dumps(scores)})")


def test_importance_sees_parameters_that_act_only_together(page):
    draw = random.Random(3)
    a, b, noise = ([draw.random() for _ in range(200)] for _ in range(3))
    names = [draw.choice("abcd") for _ in a]
    scores = [((x > 0.5) != (y > 0.5)) + 0.1 * draw.random() for x, y in zip(a, b)]
    found = importance(page, [a, b, noise, names], scores)
    assert min(found["shares"][:2]) > 0.3 and max(found["shares"][2:]) < 0.05
    assert found == importance(page, [a, b, noise, names], scores)  # a page does not change when it is opened again


def test_importance_is_the_share_of_the_variance_and_takes_all_kinds_of_values(page):
    draw = random.Random(4)
    a, b, noise = ([draw.random() for _ in range(200)] for _ in range(3))
    names, flags = [draw.choice("abcd") for _ in a], [draw.random() < 0.5 for _ in a]
    both = importance(page, [a, b, noise, names, flags], [x + 2 * y for x, y in zip(a, b)])
    assert both["shares"] == pytest.approx([0.2, 0.8, 0, 0, 0], abs=0.08) and both["fit"] > 0.9
    middle = importance(page, [a, b, noise], [(x - 0.5) ** 2 for x in a])
    assert middle["shares"] == pytest.approx([1, 0, 0], abs=0.1)
    named = importance(page, [names, flags, noise], ["badc".index(name) + 0.1 * x for name, x in zip(names, a)])
    assert named["shares"] == pytest.approx([1, 0, 0], abs=0.15)
    given = [x if name == "a" else None for x, name in zip(a, names)]  # varied under a condition only
    assert (
        importance(page, [given, noise], [2 * x if name == "a" else 1 for x, name in zip(a, names)])["shares"][0] > 0.4
    )
    nothing = importance(page, [a, names, flags], noise)
    assert max(nothing["shares"]) < 0.05 and nothing["fit"] == 0


def test_the_importance_of_the_runs_on_the_page_is_shown_with_their_rank_correlation(page):
    page.evaluate("state.objective = 'train/loss', refresh()")
    rows = page.evaluate(
        "[...document.querySelectorAll('#importance tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    trends = {name: trend for name, _, trend in rows}
    scores, depths = [float(place) for place in range(1, 10)], [place % 4 for place in range(1, 10)]
    depth = statistics.correlation(ranks_of(depths), ranks_of(scores))
    assert rows[0][0] == "lr" and rows[0][1].endswith(" %") and trends["lr"] == "+1.00" and trends["optimizer"] == "–"
    assert trends["depth"] == f"{'−' if depth < 0 else '+'}{abs(depth):.2f}"
    assert "by train/loss when one parameter is shuffled" in page.evaluate("byId('importance-text').textContent")
    page.evaluate("state.objective = null, refresh()")


def test_pictures_and_histograms_have_sliders_over_steps(page):
    images = "[...document.querySelectorAll('#picture-list img')]"
    page.wait_for(f"{images}.length === 8 && {images}.every(image => image.complete)")
    newest = page.evaluate(f"{images}[0].naturalWidth")
    page.evaluate(
        "(s => { s.value = 0; s.dispatchEvent(new Event('input')); })(document.querySelector('#picture-list input'))"
    )
    page.wait_for(f"{images}.every(image => image.complete)")
    assert newest == 38 and page.evaluate(f"{images}[0].naturalWidth") == 9
    label = "document.querySelector('#histogram-list svg').getAttribute('aria-label')"
    assert "at step 20: 8 values from -1 to 21" in page.evaluate(label)
    page.evaluate(
        "(s => { s.value = 0; s.dispatchEvent(new Event('input')); })(document.querySelector('#histogram-list input'))"
    )
    assert "at step 5: 8 values from -1 to 6" in page.evaluate(label)


def test_everything_that_can_be_used_has_a_name(page):
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button",
        "checkbox",
        "combobox",
        "slider",
        "searchbox",
        "textbox",
        "table",
        "image",
        "img",
        "link",
        "region",
    }
    used = [node for node in nodes if not node["ignored"] and node.get("role", {}).get("value") in roles]
    assert len(used) > 60
    assert not [node["role"]["value"] for node in used if not node.get("name", {}).get("value", "").strip()]
    page.call("Accessibility.disable")


def test_names_from_runs_stay_text(browser, tmp_path):
    folders = []
    for number in range(4):
        folder = make_run(tmp_path, f"run-{number}", state="failed", error=HOSTILE, diff=f"+{HOSTILE}")
        (folder / "parameters.yaml").write_text(
            json.dumps({HOSTILE: f"{HOSTILE}{number}", "lr": number, "__proto__": number})
        )
        (folder / "remarks.json").write_text(json.dumps({"tags": [HOSTILE], "note": HOSTILE}))
        (folder / "log.txt").write_text(HOSTILE)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {"experiment": HOSTILE, "devices": [HOSTILE], "plan": HOSTILE, "packages": {HOSTILE: HOSTILE}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        tags = (HOSTILE, "constructor", "__proto__")
        row = {"step": 0, "time": 1, "kind": "scalar"}
        rows = [row | {"step": step, "tag": tag, "value": step + number} for step in range(3) for tag in tags]
        rows += [{"step": 1, "time": 1, "kind": "text", "tag": HOSTILE, "value": HOSTILE}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    path = write_report(folders, tmp_path / "page.html")
    with browser.open(path.as_uri(), height=3000) as page:
        page.wait_for(READY)
        page.evaluate("byId('draw-all').click()")
        page.evaluate(SETTLED)
        page.evaluate("[...document.querySelectorAll('details')].forEach(part => { part.open = true; })")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("document.scripts.length") == 3
        assert HOSTILE.strip() in page.evaluate("byId('table').textContent") and page.problems() == []
        assert page.requests() == [path.as_uri()]


def test_the_page_fits_a_phone_and_follows_the_colour_scheme(browser, report):
    with browser.open(report.as_uri(), width=390, height=844) as page:
        page.wait_for(READY)
        page.evaluate(SETTLED)
        assert page.evaluate("Math.max(document.documentElement.scrollWidth, innerWidth)") == 390
        columns = "getComputedStyle(document.querySelector('.gallery')).gridTemplateColumns.split(' ').length"
        assert page.evaluate(columns) == 2  # small pictures side by side
        shade = "getComputedStyle(document.body).backgroundColor"
        light, line = page.evaluate(shade), page.evaluate(f"{LOSS}.members[0].colour")
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert page.evaluate(shade) != light
        page.wait_for(f"{LOSS}.members[0].colour !== '{line}'")
        assert page.problems() == []


def test_one_run_has_cards_and_one_colour_for_each_metric(browser, tmp_path):
    folder = make_run(tmp_path)
    row = {"time": 1, "kind": "scalar"}
    tags = ("train_loss", "eval_loss")
    rows = [row | {"step": step, "tag": tag, "value": 1 / (step + 1)} for step in range(3) for tag in tags]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with browser.open(write_report([folder]).as_uri()) as page:
        page.wait_for(READY)
        page.wait_for("document.querySelectorAll('canvas').length === 1")
        (colours,) = page.evaluate("[...charts.values()].map(chart => chart.members.map(one => [one.tag, one.colour]))")
        assert [tag for tag, _ in colours] == list(tags) and len({colour for _, colour in colours}) == 2
        assert page.evaluate("byId('runs').hidden && byId('influence').hidden && !byId('summary').hidden")
        assert (
            "eval_loss; best 0.3333 at step 2" in page.evaluate("byId('cards').textContent") and page.problems() == []
        )


def test_a_live_page_follows_its_runs(browser, tmp_path):
    with Server(Board([tmp_path])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with browser.open(server.url, height=2000) as page:
                page.wait_for(READY)
                assert page.evaluate("document.querySelector('h1').textContent") == "No runs yet"
                first = make_run(tmp_path, "first")
                page.wait_for("[...charts.values()].some(chart => chart.lines.length)")
                assert page.evaluate("document.querySelector('h1').textContent").startswith("digits/first")
                with open(first / "metrics.jsonl", "a") as stream:
                    stream.write('{"step": 100, "time": 1.0, "kind": "scalar", "tag": "train/loss", "value": 0.125}\n')
                make_run(tmp_path, "second", lr=0.2)
                page.wait_for("poll() && runs.length === 2")
                page.wait_for(f"{LOSS}.lines.length === 2 && {LOSS}.extent[1] === 100")
                assert sorted(page.evaluate(ROWS)) == ["first", "second"] and page.problems() == []
                assert page.evaluate("byId('live-text').textContent").startswith("live, ")
                assert {url.partition("?")[0] for url in page.requests()} == {server.url, server.url + "data"}
                page.evaluate("window.fetch = () => Promise.reject(new Error('gone')), poll()")
                page.wait_for("byId('live-text').textContent.startsWith('not connected')")
        finally:
            server.shutdown()
            thread.join()


def test_a_chart_has_numbers_at_its_axis_at_any_size(browser, tmp_path):
    folder = make_run(tmp_path, "sizes", state="finished")
    rows = [
        {"step": step, "time": 1, "kind": "scalar", "tag": f"size/{size}", "value": (3 + step) * 10.0**size}
        for size in (-30, -3, 0, 7, 38)
        for step in range(30)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page_file = write_report([folder], tmp_path / "page.html")
    with browser.open(page_file.as_uri(), height=2400) as page:
        page.wait_for(f"{READY} && document.querySelectorAll('canvas').length > 4")
        numbers = "[...charts.values()].map(chart => chart.plotted.axes[1]._values.filter(text => text).length)"
        assert all(3 <= number <= 9 for number in page.evaluate(numbers)), page.evaluate(numbers)
