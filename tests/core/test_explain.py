"""Tests of the loop as text."""

from types import SimpleNamespace

from drivetrain.core.engine import Engine
from drivetrain.core.event import LOOP, Event
from drivetrain.core.plugin import Algorithm, Callback


class Mix(Algorithm):
    events, reads, writes = frozenset({Event.BEFORE_FORWARD}), ("batch",), ("batch", "loss")

    def apply(self, event, state, logger):
        """Mix."""


class Ask(Algorithm):
    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        """Act."""


class Watch(Callback):
    def on_train_step_end(self, trainer, **kwargs):
        """Watch."""


def test_without_guests_the_explanation_is_the_picture():
    assert Engine(SimpleNamespace()).explain() == LOOP.split("\n\n", 1)[1]


def test_guests_stand_under_their_event_with_what_they_read_and_write():
    lines = Engine(SimpleNamespace(), plugins=[Watch(), Mix()]).explain().splitlines()
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("BEFORE_FORWARD"))
    assert lines[place + 1].split() == ["1.", "Mix", "algorithm", "reads", "batch", "writes", "batch,", "loss"]
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("STEP_OUTPUT"))
    assert lines[place + 1].split() == ["1.", "Watch", "callback"]
    indent = [len(line) - len(line.lstrip()) for line in lines[place : place + 2]]
    assert indent[1] == indent[0] + 4


def test_a_plugin_that_must_be_asked_says_so_at_every_event():
    text = Engine(SimpleNamespace(), plugins=[Ask()]).explain()
    assert text.count("asks match") == 44


def test_notes_are_written_before_the_guests():
    text = Engine(SimpleNamespace(), plugins=[Watch()]).explain({Event.STEP_OUTPUT: "hook of MyTrainer"})
    lines = [line.strip() for line in text.splitlines()]
    place = lines.index("· hook of MyTrainer")
    assert lines[place - 1].startswith("STEP_OUTPUT") and lines[place + 1].startswith("1. Watch")
