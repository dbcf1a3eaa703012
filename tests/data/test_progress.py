"""The progress bar: for people at a terminal, and for nobody else."""

import io

import pytest
import torch

from drivetrain.data import progress
from drivetrain.data.loader import SmartDataLoader


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    def open_terminal():
        screen = Terminal()
        monkeypatch.setattr("sys.stdout", screen)  # within the test: pytest changes it between setup and call
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
        return screen

    return open_terminal


def test_without_a_terminal_there_is_no_bar(capsys):
    list(SmartDataLoader(torch.zeros(4)))
    assert capsys.readouterr().out == ""


def test_the_bar_counts_from_the_restored_place_and_can_be_turned_off(open_terminal):
    terminal = open_terminal()
    loader = SmartDataLoader(torch.zeros(8), batch_size=2, random_seed=1, name="digits")
    loader.load_state_dict({"seed": 1, "epoch": 0, "position": 4, "length": 8, "version": 1})
    assert len(list(loader)) == 2
    text = terminal.getvalue()
    assert "digits" in text and "2/4" in text and "4/4" in text and "1/4" not in text
    loader.loading_bar = False
    list(loader)
    assert terminal.getvalue() == text


def test_only_rank_0_shows_it(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(progress, "is_master", lambda: False)
    list(SmartDataLoader(torch.zeros(4)))
    assert terminal.getvalue() == ""


def test_a_loop_inside_a_loop_goes_without_and_a_break_clears_the_bar(open_terminal):
    terminal = open_terminal()
    loader = SmartDataLoader(torch.zeros(4), batch_size=2, name="outer")
    inner = SmartDataLoader(torch.zeros(4), batch_size=2, name="inner")
    for _ in loader:
        list(inner)
        break
    assert "outer" in terminal.getvalue() and "inner" not in terminal.getvalue()
    list(inner)
    assert "inner" in terminal.getvalue(), "the bar of the broken loop is gone"
