"""`ls`, `show`, `compare` and `report` on run folders."""

import json

import pytest

from drivetrain.experiment.cli.compare import first_difference
from tests.experiment.folders import hold_lock, make_run


def test_ls_lists_runs_newest_first_with_their_state(command, tmp_path):
    make_run(tmp_path, "a", started=1000.0)
    make_run(tmp_path, "b", started=2000.0, state="failed")
    make_run(tmp_path, "c", started=3000.0, state="running")
    status, out, _ = command("ls", tmp_path)
    rows = [line.split() for line in out.splitlines() if "digits" in line]
    assert status == 0 and [row[:2] for row in rows] == [["c", "lost"], ["b", "failed"], ["a", "finished"]]
    assert "eval/accuracy (best)" in out and "0.9804 (0.9804)" in out and rows[2][-1].endswith("/digits/a")


def test_ls_takes_several_folders_as_a_shell_expands_them(command_json, tmp_path):
    folders = [make_run(tmp_path, name, started=started) for name, started in (("a", 2.0), ("b", 1.0), ("c", 3.0))]
    found = command_json("ls", *folders[:2], folders[0], "state=finished", "--json")
    assert [run["id"] for run in found] == ["a", "b"]


def test_ls_shortens_the_name_of_a_metric_that_leaves_no_room(command, tmp_path):
    folder = make_run(tmp_path, "a")
    row = {"step": 0, "time": 1, "kind": "scalar", "tag": "loss" * 100, "value": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    _, out, _ = command("ls", tmp_path)
    assert "losslos… (best)" in out and "steps" in out and "loss" * 11 not in out


def test_a_run_whose_lock_is_held_is_running(command_json, tmp_path):
    with hold_lock(make_run(tmp_path, state="running")):
        assert [run["state"] for run in command_json("ls", tmp_path, "--json")] == ["running"]


def test_ls_filters_and_speaks_json(command_json, tmp_path):
    make_run(tmp_path, "a", state="failed", losses=[1.0, float("nan")])
    make_run(tmp_path, "b", experiment="other", metrics=False)
    assert [run["experiment"] for run in command_json("ls", tmp_path, "--experiment", "other", "--json")] == ["other"]
    (run,) = command_json("ls", tmp_path, "--status", "failed", "--json")
    assert run["metric"] == "train/loss" and run["last"] == "nan" and run["best"] == 1.0


def test_ls_of_an_empty_place_says_so_and_a_missing_one_is_bad_input(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = command("ls")
    assert status == 0 and "no runs in output" in out
    assert command("ls", tmp_path / "nowhere")[0] == 2
    assert "'lr<' at its end. Expected comparisons" in command("ls", "lr<")[2]


def test_show_prints_parameters_environment_metrics_log_and_error(command, tmp_path):
    folder = make_run(tmp_path, state="failed", error="ValueError: [bold]bad[/bold] input")
    status, out, _ = command("show", folder)
    assert status == 0
    for text in ("lr", "cli", "3.11.2", "train/loss", "last line", "ValueError: [bold]bad[/bold] input", "amp_native"):
        assert text in out


def test_show_names_damaged_checkpoints(command_json, tmp_path):
    import torch

    from drivetrain.checkpoint.store import save_checkpoint

    folder = make_run(tmp_path)
    for step in (1, 2):
        path = save_checkpoint({"weight": torch.ones(3)}, step, path=folder / "checkpoints")
    tensors = path / "tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    lines = {line["name"]: line["problem"] for line in command_json("show", folder, "--json")["checkpoints"]}
    assert lines["checkpoint-1"] is None and "SHA-256" in lines["checkpoint-2"]


def test_show_accepts_a_file_in_the_run_and_suggests_the_nearest_folder(command, tmp_path):
    folder = make_run(tmp_path, "baseline")
    assert command("show", folder / "metrics.jsonl")[0] == 0
    status, _, err = command("show", folder.parent / "basline")
    assert status == 2 and "Did you mean" in err and "baseline" in err


def test_damaged_metrics_are_a_note_not_an_end(command_json, tmp_path):
    folder = make_run(tmp_path)
    (folder / "metrics.jsonl").write_text("nonsense\n")
    data = command_json("show", folder, "--json")
    assert data["metrics"] == {} and "line 1" in data["notes"][0]


def test_compare_shows_only_what_differs_and_where_losses_part(command_json, tmp_path):
    a = make_run(tmp_path, "a", losses=[3.0, 2.0, 1.0], diff="+one")
    b = make_run(
        tmp_path, "b", losses=[3.0, 2.0, 1.5], lr=0.2, diff="+two", packages={"torch": "2.13.0", "numpy": "2.0.0"}
    )
    found = command_json("compare", a, b, "--json")
    assert found["parameters"] == {"lr": [0.1, 0.2]}
    assert found["packages"] == {"torch": ["2.11.0", "2.13.0"]} and found["hardware"] == {}
    assert "-+one" in found["code"]["diff"] and "++two" in found["code"]["diff"]
    assert found["losses_differ_from"] == {"train/loss": 2}
    assert found["metrics"]["train/loss"]["best"] == [1.0, 1.5]


def test_compare_takes_a_folder_of_runs_and_prints_tables(command, tmp_path):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    status, out, _ = command("compare", tmp_path)
    assert status == 0 and "parameters: no difference" in out and "the same at every common step" in out


def test_compare_needs_two_runs(command, tmp_path):
    folder = make_run(tmp_path)
    status, _, err = command("compare", folder)
    assert status == 2 and "at least two" in err


def test_nan_does_not_differ_from_nan():
    nan = float("nan")
    assert first_difference([[(0, nan), (1, 1.0)], [(0, nan), (1, 1.0), (2, 5.0)]]) is None


def test_report_is_written_into_the_run_and_its_path_printed(command, tmp_path):
    folder = make_run(tmp_path)
    status, out, _ = command("report", folder)
    assert status == 0 and out.strip() == str(folder / "report.html") and (folder / "report.html").is_file()
    status, out, _ = command("report", tmp_path, "--output", tmp_path / "all.html", "--json")
    assert status == 0 and json.loads(out)["runs"] == [str(folder)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("report", "{}", "--watch", "--output", "x.html"), "--output writes a file"),
        (("report", "{}", "--port", "8000"), "Add --watch"),
        (("board", "nowhere"), "there is no folder nowhere"),
    ],
)
def test_options_that_do_not_fit_together_are_errors(command, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path)
    status, _, err = command(*(word.replace("{}", str(folder)) for word in words))
    assert status == 2 and message in err


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tables_fit_the_width(command, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    make_run(tmp_path)
    _, out, _ = command("ls", tmp_path)
    assert max(map(len, out.splitlines())) <= columns


def test_colours_are_not_printed_where_they_are_not_wanted(command, tmp_path, monkeypatch):
    folder = make_run(tmp_path, state="failed", error="x")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal that could show them
    _, out, _ = command("show", folder)
    assert "\033[3" not in out and "failed" in out


def test_no_best_is_shown_where_the_direction_is_unknown_unless_the_command_line_gives_it(
    tmp_path, command, command_json
):
    folder = make_run(tmp_path, metrics=False)
    rows = [
        {"step": s, "time": 1.0, "kind": "scalar", "tag": "speed", "value": v} for s, v in enumerate([2.0, 5.0, 3.0])
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = command_json("ls", tmp_path, "--json")
    assert run["last"] == 3.0 and run["best"] is None
    shown = next(line for line in command("ls", tmp_path)[1].splitlines() if "finished" in line)
    assert "3" in shown.split() and "(" not in shown
    assert command_json("show", folder, "--json")["metrics"]["speed"]["best"] is None
    assert command_json("show", folder, "--json", "--direction", "speed=max")["metrics"]["speed"]["best"] == 5.0
    status, _, err = command("ls", tmp_path, "--direction", "speed=up")
    assert status == 2 and "'speed': 'up' is not valid" in err


def test_what_only_belongs_to_one_start_is_not_shown_as_a_parameter(tmp_path, command_json):
    first = make_run(tmp_path, "one")
    second = make_run(tmp_path, "two")
    text = (second / "parameters.yaml").read_text().replace("resume: never", "resume: auto\nrun_name: two")
    (second / "parameters.yaml").write_text(text)
    assert "resume" not in command_json("show", second, "--json")["parameters"]
    assert not {"resume", "run_name"} & command_json("compare", first, second, "--json")["parameters"].keys()
