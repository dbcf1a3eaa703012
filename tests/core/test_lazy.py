"""Lower folders use what is implemented above them without importing it."""

import sys
import types

import pytest

from drivetrain.core import lazy
from drivetrain.core.lazy import Slot, lazy_exports


@pytest.fixture
def provider(monkeypatch):
    """Name a provider made for the test, and return it."""
    module = types.ModuleType("provider_of_a_test")
    module.SLOTS, module.EXPORTS, module.MODULES = {}, {}, {}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(lazy, "_provider", module.__name__)
    return module


def test_a_slot_loads_the_function_or_the_module_that_is_registered(provider):
    provider.SLOTS = {"a function": "colorsys:rgb_to_hsv", "a module": "colorsys"}
    import colorsys

    assert Slot("a function").load() is colorsys.rgb_to_hsv
    assert Slot("a module").load() is colorsys


def test_making_a_slot_loads_nothing(provider):
    provider.SLOTS = {"absent": "no_such_module:name"}
    slot = Slot("absent")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        slot.load()


def test_a_slot_that_nobody_fills_is_named(provider):
    with pytest.raises(LookupError, match="'unknown' in provider_of_a_test.SLOTS"):
        Slot("unknown").load()


def test_a_slot_is_empty_while_the_root_package_is_imported(monkeypatch):
    monkeypatch.setattr(lazy, "_provider", None)
    with pytest.raises(LookupError, match="unknown"):
        Slot("unknown").load()


def test_names_of_the_provider_come_after_the_own_ones_of_a_package(provider, monkeypatch):
    package = types.ModuleType("package_of_a_test")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    provider.EXPORTS = {package.__name__: {"colorsys": ["second=hls_to_rgb"]}}
    get, _, names = lazy_exports(package.__name__, {"colorsys": ["first=rgb_to_hsv"], "math": ["pi"]})
    import colorsys

    assert names == ["first", "pi", "second"]
    assert get("first") is colorsys.rgb_to_hsv and get("second") is colorsys.hls_to_rgb
