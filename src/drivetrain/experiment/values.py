"""Reading one value: text from a command line or the environment, or a plain value from Python or a file.

The scalar types follow the rules people expect of a command line (`1e3` is a whole number, `2.5` is not; `yes` is true). Every
other annotation is a pydantic `TypeAdapter` in which the same rules hold, loaded when the first such value is read, so that help and
simple programs do without pydantic. Errors are ours: what was expected, and the nearest choice.
"""

import enum
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal

from drivetrain.core.errors import nearest_name
from drivetrain.core.files import load_json
from drivetrain.core.secret import Secret

TRUE_WORDS = ("yes", "true", "t", "y", "1", "on")
FALSE_WORDS = ("no", "false", "f", "n", "0", "off")
MAX_DIGITS = 40
"""Longest whole number that is written with an exponent; more would only fill memory."""
WHOLE_NUMBER = "expected a whole number, such as 3"
CONTAINERS = (list, tuple, set, frozenset, dict, Sequence, Iterable, Mapping)
UNIONS = (typing.Union, types.UnionType)


class BadValue(ValueError):
    """A value does not fit; the message gives what was expected, the caller adds name and origin."""


@dataclass(frozen=True)
class ValueType:
    """How values of one type are read, and the word that help prints for them."""

    convert: Callable[[Any], Any]
    """Returns a value in this type, or raises `BadValue`."""
    word: str
    takes_json: bool = False
    is_union: bool = False

    def read(self, value: object, is_text: bool) -> Any:
        """Return a value in this type; text of a type that is written as JSON is parsed first.

        Of a union only what has no other meaning is text: `3` is a number for `int | str`, and `"3"` is text.
        """
        if self.takes_json and is_text and isinstance(value, str):
            is_container = value.lstrip()[:1] in ("[", "{")
            try:
                parsed = load_json(value)
            except ValueError as error:
                if is_container:
                    raise BadValue(f"expected JSON for {self.word}: {error}") from None
            else:
                if is_container:
                    return self.convert(parsed)
                with suppress(BadValue):
                    if self.is_union and parsed is not None:
                        return self.convert(parsed)
        return self.convert(value)


def read_int(value: Any) -> int:
    """Read a whole number; `1e3` and 3.0 are whole, 2.5 is not."""
    if isinstance(value, str):
        return _int_from_text(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise BadValue(WHOLE_NUMBER)


def _int_from_text(text: str) -> int:
    with suppress(ValueError):
        return int(text)
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        raise BadValue(WHOLE_NUMBER) from None
    if not number.is_finite() or number.adjusted() > MAX_DIGITS or int(number.as_tuple().exponent) < -1000:
        raise BadValue(WHOLE_NUMBER)
    if number != number.to_integral_value():
        raise BadValue(f"expected a whole number, such as {math.floor(number)}")
    return int(number)


def read_float(value: Any) -> float:
    """Read a number; `-.5`, `1e-3`, `inf` and `nan` are numbers."""
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise BadValue("expected a number, such as 0.1 or 1e-3")


def read_bool(value: object) -> bool:
    """Read a truth value: yes, true, t, y, 1, on and their opposites."""
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word in (*TRUE_WORDS, *FALSE_WORDS):
        return word in TRUE_WORDS
    raise BadValue("expected true or false (yes, no, on, off, 1, 0)")


def read_str(value: object) -> str:
    """Read text; a number with a fraction is an error, because YAML has already shortened `1.10` to 1.1."""
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        return str(os.fspath(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadValue("expected text; put it in quotes")


def read_path(value: object) -> Path:
    """Read a path."""
    if isinstance(value, str | os.PathLike) and "\0" not in str(value):
        return Path(value)
    raise BadValue("expected a path")


ANYTHING = ValueType(lambda value: value, "VALUE")
SIMPLE: dict[Any, ValueType] = {
    int: ValueType(read_int, "INT"),
    float: ValueType(read_float, "FLOAT"),
    bool: ValueType(read_bool, "BOOL"),
    str: ValueType(read_str, "TEXT"),
    Path: ValueType(read_path, "PATH"),
    **dict.fromkeys((Any, object, type(None)), ANYTHING),
}


def choice_of(values: Sequence[object]) -> ValueType:
    """Return the type whose values are those listed; text matches in any case, an Enum's member also by its value."""
    words = [_word_of(value) for value in values]
    contents = [value.value if isinstance(value, enum.Enum) else value for value in values]

    def convert(value: object) -> object:
        # The name of a member before the value of another: files hold names.
        for spellings in (values, words, contents, [str(content) for content in contents]):
            for candidate, own in zip(values, spellings, strict=True):
                if type(own) is type(value) and own == value:
                    return candidate
        folded = _word_of(value).lower()
        for candidate, word in zip(values, words, strict=True):
            if word.lower() == folded:
                return candidate
        near = nearest_name(value, words)
        hint = f"; did you mean {near!r}" if near else ""
        raise BadValue(f"expected one of {', '.join(words)}{hint}")

    return ValueType(convert, "{" + ",".join(words) + "}")


def _flags_of(kind: type[enum.Flag]) -> ValueType:
    """Return the type of flags, which combine: `READ|WRITE`."""
    one = choice_of(list(kind))

    def convert(value: object) -> enum.Flag:
        if isinstance(value, kind):
            return value
        words = value.split("|") if isinstance(value, str) else [value]
        return functools.reduce(operator.or_, map(one.convert, words))

    return ValueType(convert, one.word)


def _word_of(value: object) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


def declared_type(kind: object) -> ValueType:
    """Return the type of `parameter(type=...)`: a known type, an annotation, or any function of one value."""
    is_enum = isinstance(kind, type) and issubclass(kind, enum.Enum)
    if kind in SIMPLE or kind is Secret or typing.get_origin(kind) is not None or is_enum:
        return annotated_type(kind)
    if not callable(kind):
        raise BadValue(f"type={kind!r} is neither a type nor a function of one value")
    name = str(getattr(kind, "__name__", "value"))

    def convert(value: object) -> object:
        try:
            return kind(value)
        except BadValue:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError, OSError) as error:
            raise BadValue(f"{name} rejects it: {error}") from error

    return ValueType(convert, name.strip("<>").upper())


def wraps_secret(annotation: object) -> bool:
    """Return whether values of this type are put into a `Secret`."""
    return annotation is Secret or typing.get_origin(annotation) is Secret


def is_secret_type(annotation: object) -> bool:
    """Return whether values of this type hide themselves: `Secret[str]`, or pydantic's `SecretStr`."""
    return wraps_secret(annotation) or (isinstance(annotation, type) and hasattr(annotation, "get_secret_value"))


def annotated_type(annotation: object) -> ValueType:
    """Return the type an annotation of a signature means."""
    if wraps_secret(annotation):
        inner = annotated_type(next(iter(typing.get_args(annotation)), str))
        read = lambda value: Secret(inner.convert(value.reveal() if isinstance(value, Secret) else value))
        return ValueType(read, "SECRET", inner.takes_json)
    origin = typing.get_origin(annotation)
    if origin is None and annotation in SIMPLE:
        return SIMPLE[annotation]
    if origin is Literal:
        return choice_of(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _flags_of(annotation) if issubclass(annotation, enum.Flag) else choice_of(list(annotation))
    value = without_none(annotation)
    if value is annotation:
        return adapted_type(annotation)
    inner = annotated_type(value)
    return replace(inner, convert=lambda given: None if given is None else inner.convert(given))


def without_none(annotation: object) -> Any:
    """Return X for `X | None`, and any other annotation as it is.

    >>> without_none(int | None)
    <class 'int'>
    """
    if typing.get_origin(annotation) in UNIONS:
        rest = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def adapted_type(annotation: object) -> ValueType:
    """Return the type of any other annotation, checked by pydantic; on a command line it is written as JSON."""
    shown: object = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    origin = typing.get_origin(shown)
    name = shown.__name__ if isinstance(shown, type) and origin is None else str(shown).replace("typing.", "")
    adapter = functools.cache(lambda: _adapter(annotation))

    def convert(value: object) -> object:
        validate, error_type = adapter()
        try:
            return validate(value)
        except error_type as error:
            reasons = [
                ": ".join(filter(None, (".".join(map(str, entry["loc"])), entry["msg"].removeprefix("Value error, "))))
                for entry in error.errors()  # type: ignore[attr-defined]
            ]
            form = ", written as JSON" if isinstance(value, str) and origin in CONTAINERS else ""
            raise BadValue(f"expected {name}{form}: {'; '.join(reasons)}") from None

    if shown is not annotation:
        word = annotated_type(shown).word
    elif origin in UNIONS:
        word = "|".join(annotated_type(kind).word for kind in typing.get_args(shown) if kind is not type(None))
    else:
        word = getattr(shown, "__name__", "value").upper()
    return ValueType(convert, word, takes_json=True, is_union=origin in UNIONS)


def _adapter(annotation: object) -> tuple[Callable[[Any], Any], type[Exception]]:
    from pydantic import BeforeValidator, ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    def with_rules(inner: object) -> Any:
        """Apply the rules for scalars and choices inside containers, too."""
        origin, items = typing.get_origin(inner), typing.get_args(inner)
        if origin is Annotated:
            return Annotated[(with_rules(items[0]), *items[1:])]
        if origin in CONTAINERS:
            return origin[tuple(map(with_rules, items))]
        value = without_none(inner)
        if value is not inner:
            return with_rules(value) | None
        is_choice = origin is Literal or (isinstance(inner, type) and issubclass(inner, enum.Enum))
        if is_choice or (origin is None and SIMPLE.get(inner, ANYTHING) is not ANYTHING):
            return Annotated[inner, BeforeValidator(annotated_type(inner).convert)]
        return inner

    ruled = with_rules(annotation)
    try:
        try:
            adapter = TypeAdapter(ruled, config=ConfigDict(arbitrary_types_allowed=True))
        # A type that brings its own configuration (a model, a typed dict) takes no second one.
        except PydanticUserError:
            adapter = TypeAdapter(ruled)
    except PydanticUserError as error:
        raise BadValue(f"expected a type that pydantic can read: {error.message.rstrip('.')}") from None
    # Models ignore unknown keys unless one of them declares otherwise; here a misspelled key is an error.
    declares_extra = "extra_fields_behavior" in str(adapter.core_schema)
    extra: Literal["forbid"] | None = None if declares_extra else "forbid"
    # Files hold the names of fields, whatever their aliases are.
    return functools.partial(adapter.validate_python, extra=extra, by_name=True), ValidationError
