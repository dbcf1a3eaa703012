"""The table of scalars, read back with the csv module."""

import csv

import torch

from drivetrain.record import Recorder


def table(folder):
    with (folder / "scalars.csv").open(newline="", encoding="utf-8") as file:
        return [(int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]


def test_any_tag_survives(tmp_path):
    tags = ['a,"b"', "line\nbreak", "ü; x", " 'y'"]
    with Recorder(tmp_path, tensorboard=False) as recorder:
        recorder.scalars({tag: place for place, tag in enumerate(tags)})
    assert table(tmp_path) == [(0, tag, float(place)) for place, tag in enumerate(tags)]


def test_a_resumed_table_shows_no_step_twice(tmp_path):
    first = Recorder(tmp_path, tensorboard=False)
    first.scalar("loss", 0.1)
    first.step()
    state = first.state_dict()
    first.scalar("loss", 0.2)
    first.close()
    with Recorder(tmp_path, tensorboard=False) as second:
        second.load_state_dict(state)
        second.scalar("loss", torch.tensor(0.25))
    assert table(tmp_path) == [(0, "loss", 0.1), (1, "loss", 0.25)]


def test_without_files_only_the_journal_is_written(tmp_path):
    with Recorder(tmp_path, tensorboard=False, file=False) as recorder:
        recorder.scalar("loss", 1.0)
        recorder.image("x", torch.zeros(3, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_pictures_of_one_step_have_their_own_files(tmp_path):
    folder = tmp_path / "runs" / "one"
    with Recorder(folder, tensorboard=False) as recorder:
        for _ in range(2):
            recorder.image("../../x", torch.zeros(3, 3))
        recorder.step()
        recorder.image("../../x", torch.zeros(3, 3))
    found = sorted(str(path.relative_to(folder)) for path in tmp_path.rglob("*.png"))
    assert found == ["images/%2E%2E.%2E%2E.x/0-1.png", "images/%2E%2E.%2E%2E.x/0.png", "images/%2E%2E.%2E%2E.x/1.png"]
