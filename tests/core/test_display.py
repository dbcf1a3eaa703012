"""Text from elsewhere cannot command a terminal or a spreadsheet."""

import json

import pytest

from drivetrain.core.display import printable, printable_json, printable_lines, spreadsheet_cell

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
