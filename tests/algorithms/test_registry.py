"""Algorithms by name: what a checkpoint names can be made again, and nothing else."""

import pytest

from drivetrain.algorithms import registry
from drivetrain.algorithms.mixup import MixUp
from drivetrain.core.event import Event
from drivetrain.core.one_of import OneOf
from drivetrain.core.plugin import Algorithm


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "OneOf"])
def test_every_name_is_a_class_of_that_name_or_an_alias(name):
    cls = registry.find(name)
    assert issubclass(cls, Algorithm) and (cls.__name__ == name or name == "FusedLayerNorm")


@pytest.mark.parametrize(
    "name",
    [
        "MixUp",
        "CutMix",
        "ColOut",
        "RandAugment",
        "ProgressiveResizing",
        "SeqLengthWarmup",
        "BatchSizeWarmup",
        "Resolution",
    ],
)
def test_an_algorithm_survives_its_own_config(name):
    first = registry.create(name, {})
    second = registry.create(name, first.config())
    assert second.config() == first.config() and second.events == first.events


def test_a_composite_is_made_again_with_its_members():
    first = OneOf(MixUp(0.3), registry.create("CutMix", {"alpha": 0.5}), weights=(1, 3), per="epoch")
    second = registry.create("OneOf", first.config())
    assert isinstance(second, OneOf) and second.per == "epoch" and second.weights == (1.0, 3.0)
    assert [member.config() for member in second.members] == [member.config() for member in first.members]


def test_unknown_names_and_arguments_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'MixUp'"):
        registry.create("MixUpp", {})
    with pytest.raises(ValueError, match="Did you mean 'alpha'"):
        registry.create("MixUp", {"alhpa": 1})
    with pytest.raises(ValueError, match="cannot be restored"):
        registry.create("MixUp", {"input_key": {"__repr__": "function f"}})


class Own(Algorithm):
    events = frozenset({Event.INIT})

    def __init__(self, width=2):
        self.width = width

    def apply(self, event, state, logger): ...

    @staticmethod
    def required_on_load():
        return True


def test_ones_own_algorithm_can_be_registered_once(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ValueError, match="unknown algorithm"):
        registry.find("Own")
    assert registry.register(Own) is Own and registry.register(Own) is Own
    assert registry.create("Own", {"width": 5}).width == 5
    with pytest.raises(ValueError, match="already"):
        registry.register(type("MixUp", (Own,), {}))
    with pytest.raises(TypeError, match="Algorithm"):
        registry.register(int)


def test_required_algorithms_that_are_missing_are_made(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {"Own": Own})
    saved = [
        {"name": "Own", "config": {"width": 3}, "state": {}, "required": True},
        {"name": "Own", "config": {"width": 4}, "state": {}, "required": True},
        {"name": "MixUp", "config": {}, "state": {}, "required": False},
    ]
    assert [one.width for one in registry.restore_required(saved)] == [3, 4]
    assert [one.width for one in registry.restore_required(saved, [Own(3)])] == [4]
    assert registry.restore_required(saved, exclude=["Own"]) == []
