"""Text from elsewhere cannot command a terminal or a spreadsheet, and output that is gone does not end a process."""

import io
import json
import math

import pytest

from drivetrain.core.display import (
    SafeOutput,
    format_bytes,
    format_duration,
    parse_size,
    print_if_possible,
    printable,
    printable_json,
    printable_lines,
    sparkline,
    spreadsheet_cell,
)

ATTACKS = {
    "clear": "\x1b[2J",
    "title": "\x1b]0;owned\x07",
    "c1": "\x9b31m",
    "return": "fine\roverwritten",
    "line": "a\nfinished",
    "separator": "a\u2028b",
    "bidi": "\u202egpj.exe",
    "isolate": "\u2066a\u2069",
    "delete": "a\x7f",
    "half": "\udc80",
    "tags": "\U000e0041",
    "zero": "a\u200bb",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_what_a_terminal_obeys_or_hides_becomes_visible(text):
    shown = printable(text)
    assert shown != text and shown.isprintable()
    assert shown.encode().decode() == shown


def test_ordinary_text_stays_as_it_is():
    for text in ("train/loss", "größe ✓ 模型", "👩‍🔬", "a\tb", ""):
        assert printable(text) == text


def test_lines_stay_lines_and_their_content_is_made_visible():
    assert printable_lines("a\x1b[1m\n b\r\nc\rd") == "a\\x1b[1m\n b\nc\\rd"


def test_json_means_the_same_and_holds_no_control_characters():
    data = {"a": list(ATTACKS.values())}
    text = printable_json(json.dumps(data, ensure_ascii=False, indent=2))
    assert json.loads(text) == data and all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("text", ["=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "＝1", "=1", "-"])
def test_formulas_become_text_in_a_table(text):
    assert spreadsheet_cell(text) == "'" + text


def test_numbers_stay_numbers_in_a_table():
    for value in (1, -0.5, True, None, "-0.5", "+1e-3", "-inf", "train/loss"):
        assert spreadsheet_cell(value) == value


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes_are_shown_in_the_unit_that_suits_them(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 2**34),
        ("1.5 GB", 1_500_000_000),
        (".5 kib", 512),
        ("7", 7),
        ("7 XB", None),
        ("", None),
        ("-1GB", None),
        ("9" * 400, None),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.0125, "12.5 ms"),
        (59.5, "59.5 s"),
        (60, "1 min 0 s"),
        (7260, "2 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_are_shown_in_one_or_two_units(seconds, text):
    assert format_duration(seconds) == text


def test_a_sparkline_shows_the_shape_of_the_finite_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁" and sparkline([]) == "" and len(sparkline(range(1000))) == 40
    assert sparkline([0.0, math.nan, 1.0, math.inf]) == "▁█"


class Failing(io.StringIO):
    """A stream whose writes or flushes fail from some moment on."""

    def __init__(self, error, where):
        super().__init__()
        self.error, self.where = error, where

    def write(self, text):
        if self.where == "write":
            raise self.error
        return super().write(text)

    def flush(self):
        if self.where == "flush":
            raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed file")]
)
@pytest.mark.parametrize("where", ["write", "flush"])
def test_a_process_outlives_what_it_prints_to_and_warns_once(error, where, caplog, monkeypatch):
    monkeypatch.setattr(SafeOutput, "lost", set())
    for _ in range(3):
        print_if_possible("epoch", 1, file=Failing(error, where), flush=True)
    assert [record.message for record in caplog.records] == [
        f"the output cannot be written ({error}), so lines are lost. This process continues."
    ]


def test_characters_that_the_output_lacks_are_printed_as_escapes(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", newline=""))
    print_if_possible("runs/été", flush=True)
    assert raw.getvalue() == b"runs/\\xe9t\\xe9\n"
    monkeypatch.setattr("sys.stdout", None)
    print_if_possible("nobody reads this")


@pytest.mark.parametrize("encoding", ["cp437", "cp1252", "iso8859-2"])
def test_code_pages_print_what_they_lack_as_escapes(encoding):
    """Python's error calls each of them "charmap", which is not the code page."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_if_possible("\x81 \u2713", file=stream, flush=True)
    assert raw.getvalue().decode(encoding) in (r"\x81 \u2713" + "\n", "\x81 " + r"\u2713" + "\n")


def test_a_disk_that_is_full_when_an_escape_is_printed_ends_no_process(monkeypatch):
    class Full(io.StringIO):
        encoding = "ascii"

        def write(self, text):
            text.encode("ascii")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(SafeOutput, "lost", set())
    print_if_possible("\u2713", file=Full())
    assert SafeOutput.lost
