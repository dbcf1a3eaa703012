"""Reading values in their types."""

import enum
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, computed_field

from drivetrain.core.errors import ParameterError
from drivetrain.core.plain import plain
from drivetrain.experiment import Parameter
from drivetrain.experiment.values import BadValue, annotated_type


class Colour(enum.Enum):
    RED = 1
    GREEN = "green-value"


class Swapped(enum.Enum):
    a = "b"
    b = "a"


def read(kind, value, is_text=True):
    return annotated_type(kind).read(value, is_text)


class Numbered(enum.IntEnum):
    one = 1
    two = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(BaseModel):
    x: int = 0


class Loose(BaseModel, extra="allow"):
    x: int = 0


class Aliased(BaseModel):
    size: int = Field(3, alias="batch-size")

    @computed_field
    @property
    def double(self) -> int:
        return 2 * self.size


@dataclass
class Mapped:
    width: int = 1


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (int, "3", 3),
        (int, "-7", -7),
        (int, "1e3", 1000),
        (int, "1e30", 10**30),
        (int, 3.0, 3),
        (float, "-.5", -0.5),
        (float, "-inf", float("-inf")),
        (float, "1e-3", 1e-3),
        (float, 2, 2.0),
        (bool, "YES", True),
        (bool, "off", False),
        (bool, "t", True),
        (bool, 0, False),
        (str, "1.10", "1.10"),
        (str, 5, "5"),
        (Path, "a/b", Path("a/b")),
        (Literal["adam", "sgd"], "SGD", "sgd"),
        (Colour, "red", Colour.RED),
        (Colour, "green-value", Colour.GREEN),
        (int | None, "4", 4),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (tuple[int, str], '[1, "x"]', (1, "x")),
        (int | str, "3", 3),
        (int | str, '"3"', "3"),
        (int | str, "auto", "auto"),
        (float | str | None, "1e-3", 1e-3),
        (bool | str, "true", True),
        (Path | str, "3", "3"),
        (Swapped, "a", Swapped.a),
        (dict[str, Colour], '{"x": "red"}', {"x": Colour.RED}),
        (dict[Colour, int], '{"GREEN": 1}', {Colour.GREEN: 1}),
        (dict[str, int | None], '{"a": null, "b": "1e3"}', {"a": None, "b": 1000}),
        (Annotated[int, Field(gt=0)], "1e3", 1000),
        (Numbered, "2", Numbered.two),
        (list[Numbered], '["1"]', [Numbered.one]),
        (Access, "READ|write", Access.READ | Access.WRITE),
        (Access, Access.READ | Access.WRITE, Access.READ | Access.WRITE),
    ],
)
def test_values_are_read_in_their_type(kind, given, expected):
    found = read(kind, given)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (int, "2.5"),
        (int, 2.5),
        (int, 3.7),
        (int, True),
        (int, "1e999999999"),
        (int, "inf"),
        (int, "9" * 5000),
        (int, "three"),
        (float, "fast"),
        (float, True),
        (bool, "maybe"),
        (bool, 2),
        (str, 1.1),
        (str, ["a"]),
        (Path, 3),
        (Literal["adam", "sgd"], "adma"),
        (Colour, "blue"),
        (dict[str, int], '{"a": "x"}'),
        (dict[str, int], "{"),
        (tuple[int, str], "[1]"),
        (tuple[int, str], "1"),
        (Annotated[int, Field(gt=0)], "-1"),
        (Annotated[int | None, Field(gt=0)], "0"),
        (dict[str, int | None], '{"a": true}'),
        (Access, "READ|run"),
        (Point, '{"x": 1, "z": 2}'),
        (list[Mapped], '[{"width": 1}, {"wdith": 2}]'),
    ],
)
def test_values_of_another_type_are_refused(kind, given):
    with pytest.raises(BadValue, match="expected"):
        read(kind, given)


def test_the_rules_for_scalars_hold_inside_containers():
    assert read(dict[str, int], '{"a": "1e3", "b": 2.0}') == {"a": 1000, "b": 2}
    assert read(dict[str, list[bool]], '{"a": ["yes", 0]}') == {"a": [True, False]}
    with pytest.raises(BadValue, match="a: expected a whole number"):
        read(dict[str, int], '{"a": true}')


def test_nan_is_a_number():
    assert read(float, "nan") != read(float, "nan")


def test_an_error_names_parameter_place_value_and_nearest_choice():
    optimizer = Parameter("optimizer", allowed_values=["adam", "sgd"])
    with pytest.raises(
        ParameterError,
        match=r"train.yaml:3: optimizer cannot be 'adma': expected one of adam, sgd; did you mean 'adam'",
    ):
        optimizer.read("adma", is_text=False, where="train.yaml:3")


def test_a_custom_type_gets_text_from_the_command_line_and_values_from_python():
    seen = []
    custom = Parameter("x", type=lambda value: seen.append(value) or value)
    custom.read("1", is_text=True, where="--x")
    custom.read([1], is_text=False, where="run")
    assert seen == ["1", [1]]


def test_a_custom_type_that_refuses_is_a_parameter_error():
    with pytest.raises(ParameterError, match="halve rejects it"):
        Parameter("x", type=_halve).read("odd", is_text=True, where="--x")


def _halve(text):
    return int(text) // 2


_halve.__name__ = "halve"


def test_multiple_reads_every_item():
    assert Parameter("xs", type=int, multiple=True).read(["1", "2"], is_text=True, where="--xs") == [1, 2]
    assert Parameter("xs", type=int, multiple=True).read(3, is_text=False, where="run") == [3]


@pytest.mark.parametrize("given", [{1, 2}, frozenset({1, 2}), (1, 2), range(1, 3), deque([1, 2])])
def test_multiple_takes_any_container_of_items(given):
    assert Parameter("xs", type=int, multiple=True).read(given, is_text=False, where="run") == [1, 2]


def test_a_model_that_allows_unknown_keys_gets_them():
    assert read(Loose, '{"x": 1, "z": 2}').model_extra == {"z": 2}


def test_a_model_with_an_alias_and_a_computed_field_is_read_as_it_was_written():
    made = Aliased(**{"batch-size": 5})
    assert plain(made) == {"size": 5}
    assert read(Aliased, plain(made), is_text=False) == made == read(Aliased, '{"batch-size": 5}')


def test_help_names_the_members_of_a_union():
    assert annotated_type(int | str | None).word == "INT|TEXT"
