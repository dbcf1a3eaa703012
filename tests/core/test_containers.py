"""Attributes that a block changes are restored, also after an error."""

from collections import namedtuple
from types import SimpleNamespace

import pytest

from drivetrain.core.containers import map_items, with_attributes


def fail_inside(owner):
    with with_attributes(owner, "named", given=10):
        assert owner.given == 10 and owner.named == 2
        owner.named = owner.other = 20
        raise KeyError


def test_values_are_given_for_a_block_and_what_is_named_is_restored():
    owner = SimpleNamespace(given=1, named=2, other=3)
    with pytest.raises(KeyError):
        fail_inside(owner)
    assert vars(owner) == {"given": 1, "named": 2, "other": 20}


def test_an_attribute_that_does_not_exist_is_an_error_before_anything_changes():
    owner = SimpleNamespace(given=1)
    with pytest.raises(AttributeError), with_attributes(owner, given=2, missing=3):
        pass
    assert owner.given == 1


class OwnConstructor(namedtuple("OwnConstructor", ["first", "second"])):
    def __new__(cls, first):
        return super().__new__(cls, first, first + 1)


def test_namedtuple_with_a_constructor_of_its_own_is_rebuilt():
    changed = map_items(OwnConstructor(1), str)
    assert type(changed) is OwnConstructor and changed == ("1", "2")
