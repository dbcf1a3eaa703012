"""Tests of what a plugin declares and remembers about itself."""

import copy
import json
import pickle
from dataclasses import dataclass

import pytest

from drivetrain.core.binding import check_plugin
from drivetrain.core.errors import ConfigTypeError
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Callback, Logger, NullLogger, Plugin, jsonable, plugin_name
from drivetrain.core.time import Time


class Smoothing(Algorithm):
    events = frozenset({Event.BEFORE_LOSS})

    def __init__(self, smoothing=0.1, target_key=1, *layers, when=Event.INIT, **others):
        self.smoothing = smoothing  # no super().__init__(), as users write it

    def apply(self, event, state, logger):
        """Do nothing."""


class Bare(Callback):
    def batch_end(self, state, logger):
        """Watch."""


@dataclass
class Settings(Algorithm):
    rate: float = 0.5
    every: str = "1ep"


def test_the_constructor_arguments_are_recorded_with_defaults():
    assert Smoothing(0.2).config() == {"smoothing": 0.2, "target_key": 1, "layers": [], "when": "init"}
    assert Smoothing(0.2, 0, "a", "b", depth=3).config() == {
        "smoothing": 0.2,
        "target_key": 0,
        "layers": ["a", "b"],
        "when": "init",
        "depth": 3,
    }
    assert Bare().config() == {}
    assert Settings(rate=0.1).config() == {"rate": 0.1, "every": "1ep"}


def test_recorded_arguments_rebuild_the_plugin():
    first = Settings(0.25, every="2ep")
    assert Settings(**json.loads(json.dumps(first.config()))) == first


def test_recording_survives_copying_and_pickling():
    for twin in (copy.deepcopy(Settings(0.3)), pickle.loads(pickle.dumps(Settings(0.3)))):
        assert twin.config() == {"rate": 0.3, "every": "1ep"}


def test_recording_does_not_swallow_wrong_arguments():
    with pytest.raises(TypeError, match="takes no arguments"):
        Bare(3)
    with pytest.raises(TypeError):
        Settings(1, 2, 3)


def test_values_become_what_json_can_hold():
    assert jsonable({"t": Time(3, "ep"), 1: (Event.INIT, None, True)}) == {"t": "3ep", "1": ["init", None, True]}
    assert jsonable({"b", "a"}) == ["a", "b"]
    assert jsonable(Settings(0.3)) == {"name": "Settings", "config": {"rate": 0.3, "every": "1ep"}}
    assert jsonable(len) == {"__repr__": "builtins.len"}
    assert jsonable(Settings) == {"__repr__": f"{__name__}.Settings"}
    assert jsonable(3 + 2j) == {"__repr__": "(3+2j)"}


def test_a_plugin_prints_as_it_was_written():
    assert str(Smoothing(0.2)) == "Smoothing"
    assert repr(Smoothing(0.2, depth=3)) == "Smoothing(0.2, depth=3)"
    assert plugin_name(object()) == "object"


def test_the_default_match_is_membership_and_changes_nothing():
    plugin = Smoothing()
    before = dict(vars(plugin))
    for _ in range(100):
        assert [event for event in Event if plugin.match(event, None)] == [Event.BEFORE_LOSS]
    assert vars(plugin) == before


def test_defaults_of_the_bases():
    plugin = Plugin()
    assert plugin.state_dict() == {} and plugin.load_state_dict({}) is None and plugin.inference_weights(None) is None
    assert plugin.close(None, NullLogger()) is None and plugin.post_close() is None
    assert (Plugin.phase, Algorithm.phase, Callback.phase) == ("algorithm", "algorithm", "callback")
    assert Callback.writes == () and not Algorithm.required_on_load()
    assert not Algorithm.find_unused_parameters and not Algorithm.backwards_create_graph
    with pytest.raises(NotImplementedError, match="apply"):
        plugin.apply(Event.INIT, None, NullLogger())


def test_the_null_logger_is_a_logger():
    logger = NullLogger()
    assert isinstance(logger, Logger)
    logger.log_metrics({"a": 1})
    logger.log_hyperparameters({"a": 1})
    logger.log_images([], name="x")


@pytest.mark.parametrize("events", [Event.BATCH_END, "batch_end"])
def test_one_event_without_a_set_is_named_as_such(events):
    class Alone(Smoothing):
        pass

    Alone.events = events
    with pytest.raises(ConfigTypeError, match=r"Alone.events is .*frozenset\(\{Event.BATCH_END\}\)"):
        check_plugin(Alone())
