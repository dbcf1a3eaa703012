"""`ls`, `compare`, `tag` and short ids with many runs."""

import json

import pytest

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment.cli.runs import find_run, locate
from tests.experiment.folders import make_run


def many(place, count=8, **options):
    return [
        make_run(place, f"2026-01-31_12-00-{number:02d}_aaaa{number:02d}", lr=0.1 * (number + 1), started=1e9 + number)
        for number in range(count)
    ]


def shown_rows(out, mark="aaaa"):
    return [line.split() for line in out.splitlines() if mark in line]


def test_ls_has_a_column_for_what_varies_and_marks_the_best(command, tmp_path, monkeypatch):
    many(tmp_path, 3)
    _, out, _ = command("ls", tmp_path, "--objective", "train/loss")
    head = next(line for line in out.splitlines() if " id " in line)
    assert "lr" in head.split() and "epochs" not in head and "random_seed" not in head
    assert [("*" in row) for row in shown_rows(out)] == [
        False,
        False,
        True,
    ]  # newest first; the smallest lr has the smallest loss
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = command("ls", tmp_path)
    assert "lr" in out and "not shown" in out and max(map(len, out.splitlines())) <= 60


def test_ls_sorts_filters_and_stops(command_json, tmp_path):
    many(tmp_path, 6)
    found = command_json("ls", tmp_path, "lr<0.35", "and", "state=finished", "--sort", "lr", "--json")
    assert [round(run["parameters"]["lr"], 2) for run in found] == [0.1, 0.2, 0.3]
    found = command_json("ls", tmp_path, "--sort", "train/loss", "-n", "2", "--json")
    assert [run["id"] for run in found] == ["aaaa00", "aaaa01"]
    found = command_json("ls", tmp_path, "--sort", "lr", "--reverse", "-n", "1", "--json")
    assert [run["id"] for run in found] == ["aaaa05"]


def test_sorting_by_a_score_puts_the_largest_first_and_missing_values_last(command_json, tmp_path):
    make_run(tmp_path, "few", steps=10)
    make_run(tmp_path, "none", metrics=False)
    make_run(tmp_path, "many", steps=50)
    found = command_json("ls", tmp_path, "--sort", "eval/accuracy", "--json")
    assert [run["id"] for run in found] == ["many", "few", "none"]


@pytest.mark.parametrize("words", [["lrr<1"], ["lr<"], ["--sort", "lrr"], ["-n", "0"]])
def test_a_mistake_in_a_condition_or_a_name_is_bad_input(command, tmp_path, words):
    many(tmp_path, 2)
    status, out, err = command("ls", tmp_path, *words)
    assert status == 2 and not out and err


def test_ls_takes_a_condition_without_a_place(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    many(tmp_path / "output", 3)
    assert len(shown_rows(command("ls", "lr>0.15")[1])) == 2
    assert "with lr>5" in command("ls", "lr>5")[1]


def test_every_verb_takes_short_ids(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = many(tmp_path / "output", 2)
    assert command("show", "aaaa01")[0] == 0
    assert command("compare", "aaaa00", "aaaa01")[0] == 0
    assert command("report", "aaaa01")[1].strip() == str(folders[1] / "report.html")
    assert command("doctor", "aaaa01")[0] in (0, 1)
    assert find_run("output/aaaa01").folder.name == folders[1].name
    with pytest.raises(ExperimentError, match="names 2 folders"):
        locate("aaaa")
    status, _, err = command("show", "bbbb")
    assert status == 2 and "there is no run bbbb" in err


def test_the_id_of_a_trial_names_its_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "output" / "digits" / "sweeps" / "2026-01-31_12-00-00_abc123"
    make_run(sweep.parent, "trial-0003", experiment=sweep.name)
    assert find_run("abc123/trial-0003").folder == sweep.relative_to(tmp_path) / "trial-0003"


def test_tags_and_notes_are_kept_shown_and_filtered_by(command, command_json, tmp_path):
    a, b = many(tmp_path, 2)
    assert command("tag", a, "--add", "base", "--add", "long", "--note", "the [bold]first[/bold] one")[0] == 0
    (found,) = command_json("tag", a, "--remove", "long", "--json")
    assert found["tags"] == ["base"] and found["note"].startswith("the [bold]")
    assert [run["id"] for run in command_json("ls", tmp_path, "tag=base", "--json")] == ["aaaa00"]
    out = command("ls", tmp_path)[1]
    assert "base" in out and "the [bold]first[/bold] one" in out
    assert "base" in command("show", a)[1] and command_json("show", b, "--json")["tags"] == []
    assert not (b / "remarks.json").exists() and command("tag", b)[0] == 0 and not (b / "remarks.json").exists()
    command("tag", tmp_path, "--note", "")
    assert command_json("tag", a, "--json")[0]["note"] == ""


def test_a_note_that_cannot_be_written_is_an_error_and_not_a_traceback(command, tmp_path):
    (folder,) = many(tmp_path, 1)
    (folder / "remarks.json").mkdir()
    status, _, err = command("tag", folder, "--add", "x")
    assert status == 2 and "cannot be written" in err


def test_more_than_five_runs_are_rows_with_what_differs_at_80_columns(command, tmp_path, monkeypatch):
    many(tmp_path, 8)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = command("compare", tmp_path)
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    rows = shown_rows(out)
    assert len(rows) == 8 and "lr" in out and "epochs" not in out and "eval/accuracy" not in out
    assert rows[0][0] == "aaaa00" and "*" in rows[0] and all("*" not in row for row in rows[1:])


def test_a_wide_comparison_is_printed_in_parts(command, tmp_path, monkeypatch):
    for number in range(7):
        folder = make_run(tmp_path, f"r{number}")
        with open(folder / "parameters.yaml", "a") as stream:
            stream.writelines(f"a_long_parameter_name_{place}: {number}\n" for place in range(8))
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command("compare", tmp_path)
    assert max(map(len, out.splitlines())) <= 80 and all(f"a_long_parameter_name_{place}" in out for place in range(8))
    assert out.count("r3 ") >= 3


def test_grouping_over_seeds_gives_mean_and_sample_deviation(command, command_json, tmp_path):
    for number, (lr, loss) in enumerate([(0.1, 1.0), (0.1, 3.0), (0.2, 5.0)]):
        make_run(tmp_path, f"r{number}", lr=lr, losses=[9.0, loss])
    groups = command_json("compare", tmp_path, "--group", "--json")["groups"]
    assert [(group["parameters"], group["runs"]) for group in groups] == [
        ({"lr": 0.1}, ["r0", "r1"]),
        ({"lr": 0.2}, ["r2"]),
    ]
    spread = groups[0]["metrics"]["train/loss"]
    assert spread["mean"] == 2.0 and spread["std"] == pytest.approx(2**0.5) and spread["count"] == 2
    assert groups[1]["metrics"]["train/loss"]["std"] is None
    out = command("compare", tmp_path, "--group")[1]
    assert "2 ± 1.414 *" in out and "group 1: r0, r1" in out
    assert "train/loss" in out and "accuracy" not in out  # which is the same in all groups


def test_hostile_names_are_printed_as_text(command, tmp_path):
    folder = make_run(tmp_path, "evil")
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "time": 1.0, "kind": "scalar", "tag": "\x1b[31mloss", "value": 1.0}) + "\n"
    )
    assert "\x1b" not in command("ls", tmp_path)[1]
    (folder / "remarks.json").write_text(json.dumps({"tags": ["\x1b]0;x\x07", 5], "note": ["no"]}))
    _, out, _ = command("ls", tmp_path)
    assert "\x1b" not in out and "\x07" not in out


def make_sweep(place):
    """Write a sweep of three trials that is judged by a cost, the last one pruned."""
    sweep = place / "output" / "digits" / "sweeps" / "2026-01-31_12-00-00_abc123"
    for number, cost in enumerate((3.0, 1.0, None)):
        folder = make_run(sweep.parent, f"trial-000{number}", experiment=sweep.name, lr=0.1 * (number + 1))
        for name, change in (
            ("manifest.json", {"experiment": "digits", "trial": {"sweep": sweep.name, "index": number}}),
            ("status.json", {"result": cost and {"cost": cost}, "pruned": cost is None, "error": "TrialPruned: x"}),
        ):
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    (sweep / "sweep.jsonl").write_text('{"kind": "sweep", "objective": "cost", "direction": "min"}\n')
    return sweep


def test_trials_are_judged_by_the_objective_of_their_sweep(command, command_json, tmp_path):
    sweep = make_sweep(tmp_path)
    found = command_json("ls", sweep, "--sort", "best", "--json")
    assert [(run["id"][-1], run["metric"], run["best"]) for run in found] == [
        ("1", "cost", 1.0),
        ("0", "cost", 3.0),
        ("2", None, None),
    ]
    _, out, _ = command("ls", sweep)
    assert "cost (best)" in out and "1 (1) *" in out
    make_run(sweep.parent.parent.parent, "alone")  # judged by nothing that a sweep has chosen
    assert {run["metric"] for run in command_json("ls", tmp_path / "output", "--json")} == {"eval/accuracy"}


def test_sorting_by_the_best_value_means_the_given_objective(command_json, tmp_path):
    many(tmp_path, 3)  # all have the same accuracy
    found = command_json("ls", tmp_path, "--objective", "train/loss", "--sort", "best", "--json")
    assert [run["id"] for run in found] == ["aaaa00", "aaaa01", "aaaa02"]


def test_a_trial_that_its_sweep_stopped_is_pruned_and_has_no_error_in_the_report(command, command_json, tmp_path):
    sweep = make_sweep(tmp_path)
    assert [run["id"] for run in command_json("ls", sweep, "status=pruned", "--json")] == ["abc123/trial-0002"]
    assert len(command_json("ls", sweep, "--status", "pruned", "--json")) == 1
    assert "pruned after" in command("doctor", sweep / "trial-0002")[1]


def test_the_report_of_a_sweep_begins_with_its_objective(tmp_path):
    from drivetrain.experiment.reports.data import Blobs, Limits, main_objective, run_as_data
    from drivetrain.experiment.reports.gather import gather_run

    sweep = make_sweep(tmp_path)
    data = [run_as_data(gather_run(folder), Blobs(), Limits()) for folder in sorted(sweep.glob("trial-*"))]
    assert main_objective(data) == "cost" and [run["state"] for run in data] == ["finished", "finished", "pruned"]
    assert main_objective([run | {"objective": "missing"} for run in data]) == "eval/accuracy"
    assert main_objective([*data, data[0] | {"objective": None}]) == "eval/accuracy"
