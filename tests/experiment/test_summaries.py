"""Summaries of metrics files agree with reading the files whole, and read only what was added."""

import json
import math
import os
import random

import pytest

from drivetrain.core.errors import StateError
from drivetrain.experiment import summaries
from drivetrain.experiment.summaries import FILE_NAME, summarize_metrics, summary_of
from drivetrain.record import jsonl
from drivetrain.record.jsonl import JsonlSink, read_metrics
from drivetrain.record.sink import Resume


def write_rows(file, rows):
    with open(file, "a") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")


def scalar(step, tag, value):
    return {"step": step, "time": 1.5, "kind": "scalar", "tag": tag, "value": value}


def by_reading_all(file):
    """Count, last and extremes of each metric from the rows themselves."""
    series = {}
    for row in read_metrics(file, kind="scalar"):
        series.setdefault(row["tag"], []).append((row["step"], float(row["value"])))
    found = {}
    for tag, points in series.items():
        finite = [point for point in points if math.isfinite(point[1])]
        low = min(finite, key=lambda point: point[1], default=(None, math.inf))
        high = max(finite, key=lambda point: point[1], default=(None, -math.inf))
        found[tag] = (len(points), points[-1][1], points[-1][0], low[1], low[0], high[1], high[0])
    return found


def check_agrees(file):
    found = {tag: tuple(vars(own).values()) for tag, own in summarize_metrics(file).tags.items()}
    assert repr(found) == repr(by_reading_all(file))


@pytest.mark.parametrize("seed", range(6))
def test_a_summary_that_grows_agrees_with_reading_the_whole_file(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(jsonl, "BLOCK", 700)  # many blocks
    draw, file, lines = random.Random(seed), tmp_path / "metrics.jsonl", 0
    for _ in range(12):
        rows = []
        for _ in range(draw.randrange(30)):
            value = draw.choice([draw.gauss(0, 1), draw.randrange(5), "nan", "inf", "-inf", 1e-300, -2.5e20])
            tag = draw.choice(["loss", "größe", 'quo"te', "a\\b", "eval/acc"])
            rows.append(scalar(lines + len(rows), tag, value))
        if draw.random() < 0.3:
            rows.append({"step": 1, "time": 1.0, "kind": "text", "tag": "t", "value": 'says "resume"'})
        if draw.random() < 0.4 and lines:
            resume = {"kind": "resume", "step": draw.randrange(lines + 1), "time": 1.0}
            rows.append(resume | ({"lines": draw.randrange(lines + 1)} if draw.random() < 0.7 else {}))
        write_rows(file, rows)
        lines += len(rows)
        check_agrees(file)


def test_rows_as_the_recorder_writes_them_are_summarized(tmp_path):
    sink = JsonlSink()
    sink.open(tmp_path, None)
    for step in range(300):
        sink.scalar("train/loss", 1.0 / (step + 1), step, 1.0)
    sink.flush()
    sink.close()
    sink = JsonlSink()
    sink.open(tmp_path, Resume(step=100, lines=100))
    sink.scalar("train/loss", math.nan, 100, 1.0)
    sink.flush()
    sink.close()
    check_agrees(tmp_path / "metrics.jsonl")
    own = summarize_metrics(tmp_path / "metrics.jsonl").tags["train/loss"]
    assert own.count == 101 and own.best("train/loss") == (0.01, 99) and math.isnan(own.last)


def test_only_added_rows_are_read(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    write_rows(file, [scalar(step, "loss", 1.0) for step in range(5000)])
    summarize_metrics(file)
    read = []
    original = jsonl.whole_blocks
    counting = lambda *a: (read.append(len(block)) or (n, block) for n, block in original(*a))
    for module in (summaries, jsonl):
        monkeypatch.setattr(module, "whole_blocks", counting)
    assert summarize_metrics(file).tags["loss"].count == 5000 and not read
    write_rows(file, [scalar(5000, "loss", 0.5)])
    assert summarize_metrics(file).tags["loss"].low == 0.5 and 0 < sum(read) < 300


def test_a_file_in_the_place_of_another_is_read_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_rows(file, [scalar(step, "loss", 1.0) for step in range(10)])
    summarize_metrics(file)
    file.unlink()
    write_rows(file, [scalar(step, "other", 2.0) for step in range(30)])
    assert list(summarize_metrics(file).tags) == ["other"]
    text = file.read_text().replace("2.0", "3.0")  # of the same size
    file.write_text(text)
    os.utime(file, ns=(1, 1))
    assert summarize_metrics(file).tags["other"].last == 3.0


def test_a_line_that_is_still_written_counts_when_it_is_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    line = json.dumps(scalar(1, "loss", 0.25))
    file.write_text(json.dumps(scalar(0, "loss", 0.5)) + "\n" + line[:20])
    assert summarize_metrics(file).tags["loss"].count == 1
    with open(file, "a") as stream:
        stream.write(line[20:] + "\n")
    assert summarize_metrics(file).tags["loss"].last == 0.25


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": 1}', '{"schema": 1, "tags": {"a": [1]}, "directions": {}}', "\0"]
)
def test_a_damaged_summary_is_made_again(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    write_rows(file, [scalar(0, "loss", 0.5)])
    (tmp_path / FILE_NAME).write_text(content)
    assert summarize_metrics(file).tags["loss"].last == 0.5


def test_damaged_and_missing_metrics_are_an_empty_summary(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert summary_of(file).tags == {}
    file.write_text("nonsense\n")
    assert summary_of(file).tags == {}
    with pytest.raises(StateError, match="line 1"):
        summarize_metrics(file)


def test_a_run_leaves_its_summary(tmp_path):
    from drivetrain.experiment import experiment
    from drivetrain.record.recorder import Recorder

    @experiment
    def short_one():
        recorder = Recorder(tensorboard=False)
        recorder.direction("cost", "min")
        for value in (3.0, 1.0, 2.0):
            recorder.scalar("cost", value)
            recorder.step()

    short_one.run(output_dir=str(tmp_path), run_name="one")
    folder = tmp_path / "short-one" / "one"
    stored = json.loads((folder / FILE_NAME).read_text())
    assert stored["tags"]["cost"][:3] == [3, 2.0, 2] and stored["size"] == (folder / "metrics.jsonl").stat().st_size
    summary = summarize_metrics(folder / "metrics.jsonl")
    assert summary.tags["cost"].best("cost", summary.directions) == (1.0, 1)
