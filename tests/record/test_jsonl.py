"""The journal and its reader."""

import json
import math

import pytest

from drivetrain.core.errors import StateError
from drivetrain.record.jsonl import FILE_NAME, JsonlSink, iterate_metrics, read_metrics
from drivetrain.record.sink import Resume


def write(folder, values, resume=None, tag="loss"):
    sink = JsonlSink()
    sink.open(folder, resume)
    for step, value in values:
        sink.scalar(tag, value, step, 1.5)
    sink.close()


def read(folder):
    return [(row["step"], row["value"]) for row in read_metrics(folder)]


def test_numbers_come_back_as_they_were(tmp_path):
    values = [0.1, -0.0, 1e300, 5e-324, 3, 2**60, math.inf, -math.inf]
    write(tmp_path, enumerate(values), tag='a,"b"\n/ü')
    rows = read_metrics(tmp_path)
    assert [repr(row["value"]) for row in rows] == list(map(repr, values))
    assert {row["tag"] for row in rows} == {'a,"b"\n/ü'} and rows[0]["time"] == 1.5
    write(tmp_path, [(9, math.nan)])
    assert math.isnan(read_metrics(tmp_path)[-1]["value"])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no bare NaN


def test_rows_from_the_resumed_step_on_are_superseded(tmp_path):
    write(tmp_path, [(0, 1.0), (1, 1.1), (2, 1.2)])
    write(tmp_path, [(1, 2.1), (2, 2.2)], Resume(step=1))
    assert read(tmp_path) == [(0, 1.0), (1, 2.1), (2, 2.2)]
    write(tmp_path, [(2, 3.2)], Resume(step=2))
    assert read(tmp_path) == [(0, 1.0), (1, 2.1), (2, 3.2)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8  # nothing is ever lost


def test_the_number_of_lines_tells_rows_of_one_step_apart(tmp_path):
    write(tmp_path, [(1, 1.0), (1, 1.1), (1, 9.0)])  # saved after the second row
    write(tmp_path, [(1, 1.2)], Resume(step=1, lines=2))
    assert read(tmp_path) == [(1, 1.0), (1, 1.1), (1, 1.2)]


def test_a_torn_last_line_is_ignored_and_cut_off_by_the_next_writer(tmp_path):
    write(tmp_path, [(0, 1.0), (1, 1.1)])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert read(path) == [(0, 1.0)]
    write(tmp_path, [(1, 2.0)], Resume(step=1))
    assert read(tmp_path) == [(0, 1.0), (1, 2.0)]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"kind": "scalar"}', '{"kind": "scalar", "step": "1", "tag": "x", "value": 1}', "\x00"]
)
def test_a_damaged_line_within_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "text", "step": 1, "tag": "a", "value": "b"}}\n{line}\n')
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_rows_can_be_chosen(tmp_path):
    write(tmp_path, [(0, 1.0)])
    write(tmp_path, [(0, 2.0)], tag="acc")
    assert [row["value"] for row in read_metrics(tmp_path, tag="acc")] == [2.0]
    assert read_metrics(tmp_path, kind="image") == []


def test_a_write_that_fails_leaves_whole_lines(tmp_path, monkeypatch):
    import os

    sink = JsonlSink()
    sink.open(tmp_path, None)
    sink.scalar("loss", 1.0, 0, 0.0)
    sink.flush()
    real = os.write

    def full_disk(file, data):
        if len(data) > 10:
            return real(file, data[:10])
        raise OSError(28, "No space left on device")

    sink.scalar("loss", 2.0, 1, 0.0)
    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        sink.flush()
    monkeypatch.undo()
    sink.scalar("loss", 3.0, 2, 0.0)
    sink.close()
    assert read(tmp_path) == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_long_file_is_read_row_by_row(tmp_path):
    import tracemalloc

    file = tmp_path / FILE_NAME
    row = '{"step": %d, "time": 1.0, "kind": "scalar", "tag": "loss", "value": 0.5}\n'
    with file.open("w") as stream:
        for step in range(20_000):
            stream.write(row % step)
        stream.write('{"kind": "resume", "step": 19000, "time": 2.0, "lines": 19500}\n' + row % 19_500)
    tracemalloc.start()
    steps = 0
    for number, found in enumerate(iterate_metrics(file)):
        assert found["step"] == number
        steps += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == 19_501 and peak < 1_000_000 < file.stat().st_size


def test_newer_checkpoint_after_an_older_one_has_its_own_rows_again(tmp_path):
    """Rows that the first resume superseded count again when a later resume goes on behind them."""
    write(tmp_path, [(step, step * 1.0) for step in range(6)])
    write(tmp_path, [(3, 30.0)], resume=Resume(step=3, lines=3))
    assert read(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    write(tmp_path, [(6, 99.0)], resume=Resume(step=6, lines=6))
    assert read(tmp_path) == [*((step, step * 1.0) for step in range(6)), (6, 99.0)]
    write(tmp_path, [(1, 7.0)], resume=Resume(step=1))
    assert read(tmp_path) == [(0, 0.0), (1, 7.0)]
