"""Reading one value: text from a command line or the environment, or a plain value from Python or a file.

The handful of types that nearly every parameter has are read here, by rules people expect of a command line (`1e3` is a
whole number, `2.5` is not; `yes` is true). Every other annotation is given to pydantic's `TypeAdapter`, which is loaded when
the first such value is read, so that help and simple programs do without it.
"""

import enum
import functools
import json
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from drivetrain.core.errors import MissingExtra, nearest_name
from drivetrain.core.secret import Secret

TRUE_WORDS = ("yes", "true", "t", "y", "1", "on")
FALSE_WORDS = ("no", "false", "f", "n", "0", "off")
MAX_DIGITS = 40
"""Longest whole number that is written with an exponent; more would only fill memory."""


class BadValue(ValueError):
    """A value does not fit; the message says what was expected, the caller adds name and place."""


@dataclass(frozen=True)
class ValueType:
    """How values of one type are read, and the word that help prints for them."""

    read: Callable[[Any, bool], Any]
    """Takes the value and whether it came as text; raises `BadValue`."""
    word: str


def read_int(value: Any, is_text: bool) -> int:
    """Read a whole number; `1e3` and 3.0 are whole, 2.5 is not."""
    if isinstance(value, str):
        return _int_from_text(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise BadValue("expected a whole number, such as 3")


def _int_from_text(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        raise BadValue("expected a whole number, such as 3") from None
    if not number.is_finite() or number.adjusted() > MAX_DIGITS or number.as_tuple().exponent < -1000:  # type: ignore[operator]
        raise BadValue("expected a whole number, such as 3")
    if number != number.to_integral_value():
        raise BadValue(f"expected a whole number, such as {math.floor(number)}")
    return int(number)


def read_float(value: Any, is_text: bool) -> float:
    """Read a number; `-.5`, `1e-3`, `inf` and `nan` are numbers."""
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadValue("expected a number, such as 0.1 or 1e-3")


def read_bool(value: Any, is_text: bool) -> bool:
    """Read a truth value: yes, true, t, y, 1, on and their opposites."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise BadValue("expected true or false (yes, no, on, off, 1, 0)")


def read_str(value: Any, is_text: bool) -> str:
    """Read text; a number with a fraction is refused, because YAML has already shortened `1.10` to 1.1."""
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        return str(os.fspath(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadValue("expected text; put it in quotes")


def read_path(value: Any, is_text: bool) -> Path:
    """Read a path."""
    if isinstance(value, str | os.PathLike) and "\0" not in str(value):
        return Path(value)
    raise BadValue("expected a path")


def read_anything(value: Any, is_text: bool) -> Any:
    """Take a value as it is."""
    return value


SIMPLE: dict[Any, ValueType] = {
    int: ValueType(read_int, "INT"),
    float: ValueType(read_float, "FLOAT"),
    bool: ValueType(read_bool, "BOOL"),
    str: ValueType(read_str, "TEXT"),
    Path: ValueType(read_path, "PATH"),
    Any: ValueType(read_anything, "VALUE"),
    object: ValueType(read_anything, "VALUE"),
    type(None): ValueType(read_anything, "VALUE"),
}


def choice_of(values: Sequence[Any]) -> ValueType:
    """Return the type whose values are those listed; text matches whatever its case, and the listed value is returned."""
    words = [_word_of(value) for value in values]

    def read(value: Any, is_text: bool) -> Any:
        for candidate in values:
            if type(candidate) is type(value) and candidate == value:
                return candidate
        folded = _word_of(value).lower()
        for candidate, word in zip(values, words, strict=True):
            if word.lower() == folded:
                return candidate
        near = nearest_name(value, words)
        hint = f"; did you mean {near!r}" if near else ""
        raise BadValue(f"expected one of {', '.join(words)}{hint}")

    return ValueType(read, "{" + ",".join(words) + "}")


def _word_of(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


def enum_type(kind: type[enum.Enum]) -> ValueType:
    """Return the type of an Enum's members, given by name or by value."""
    by_name = choice_of(list(kind))

    def read(value: Any, is_text: bool) -> Any:
        for member in kind:
            if value is member or (type(value) is type(member.value) and value == member.value):
                return member
        return by_name.read(value, is_text)

    return ValueType(read, by_name.word)


def custom_type(function: Callable[[Any], Any]) -> ValueType:
    """Return the type that a function makes of text, or of the value itself from Python and files."""

    def read(value: Any, is_text: bool) -> Any:
        try:
            return function(value)
        except (ValueError, TypeError, ArithmeticError, LookupError, OSError) as error:
            raise BadValue(f"{getattr(function, '__name__', function)} refuses it: {error}") from error

    return ValueType(read, str(getattr(function, "__name__", "value")).strip("<>").upper())


def declared_type(kind: Any) -> ValueType:
    """Return the type of `parameter(type=...)`: a known type, an annotation, or any function of one value."""
    if (
        kind in SIMPLE
        or kind is Secret
        or typing.get_origin(kind) is not None
        or (isinstance(kind, type) and issubclass(kind, enum.Enum))
    ):
        return annotated_type(kind)
    if not callable(kind):
        raise BadValue(f"type={kind!r} is neither a type nor a function of one value")
    return custom_type(kind)


def wraps_secret(annotation: Any) -> bool:
    """Return whether values of this type are put into a `Secret`."""
    return annotation is Secret or typing.get_origin(annotation) is Secret


def is_secret_type(annotation: Any) -> bool:
    """Return whether values of this type hide themselves: `Secret[str]`, or pydantic's `SecretStr`."""
    return wraps_secret(annotation) or (isinstance(annotation, type) and hasattr(annotation, "get_secret_value"))


def secret_type(annotation: Any) -> ValueType:
    """Return the type whose values are read as those of X in `Secret[X]`, and then hidden."""
    inner = annotated_type(next(iter(typing.get_args(annotation)), str))

    def read(value: Any, is_text: bool) -> Any:
        return Secret(inner.read(value.reveal() if isinstance(value, Secret) else value, is_text))

    return ValueType(read, "SECRET")


def annotated_type(annotation: Any) -> ValueType:
    """Return the type an annotation of a signature means."""
    if wraps_secret(annotation):
        return secret_type(annotation)
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    if typing.get_origin(annotation) is Literal:
        return choice_of(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return enum_type(annotation)
    inner = without_none(annotation)
    return annotated_type(inner) if inner is not annotation else adapted_type(annotation)


def without_none(annotation: Any) -> Any:
    """Return X for `X | None`, and any other annotation as it is.

    >>> without_none(int | None)
    <class 'int'>
    """
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def adapted_type(annotation: Any) -> ValueType:
    """Return the type of any other annotation, checked by pydantic; text that looks like JSON is read as JSON."""
    name = getattr(annotation, "__name__", None) or str(annotation)

    def read(value: Any, is_text: bool) -> Any:
        if is_text and isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise BadValue(f"expected JSON for {name}: {error}") from None
        validate, error_type = _adapter(annotation)
        try:
            return validate(value)
        except error_type as error:
            details = "; ".join(_reason(entry) for entry in error.errors())  # type: ignore[attr-defined]
            raise BadValue(f"expected {name}: {details}") from None

    return ValueType(read, name.rpartition(".")[2].upper() if name.replace(".", "").isidentifier() else "VALUE")


def _reason(entry: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in entry["loc"])
    return f"{place}: {entry['msg']}" if place else str(entry["msg"])


@functools.cache
def _adapter(annotation: Any) -> tuple[Callable[[Any], Any], type[Exception]]:
    try:
        from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
    except ImportError as error:
        raise MissingExtra("pydantic", None, f"a parameter of type {annotation}") from error
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a type that brings its own configuration (a model, a typed dict) takes no second one
        adapter = TypeAdapter(annotation)
    return adapter.validate_python, ValidationError
