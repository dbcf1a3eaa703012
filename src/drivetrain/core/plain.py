"""Values as plain data for files that people and other programs read: JSON, YAML and tables.

Nothing has to come back from it. What must be restored goes through the codec in `runtime`.
"""

import enum
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from typing import Any, TypeGuard

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LARGEST_INT = 10**290
"""Whole numbers beyond are text, because no float holds them, and readers of JSON reject them."""


def plain(value: object) -> Any:
    """Return a value as JSON and YAML can write it; what they cannot express becomes text.

    >>> from pathlib import Path
    >>> plain({"path": Path("a"), "betas": (0.9, 0.99)})
    {'path': 'a', 'betas': [0.9, 0.99]}
    """
    try:
        return _plain(value)
    except RecursionError:  # it is nested too deeply, or contains itself
        return plain_text(value)


def _plain(value: object) -> Any:
    if value is None:
        return None
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if callable(getattr(type(value), "model_dump", None)):  # a model of pydantic, without its computed fields
        value = value.model_dump(mode="json", round_trip=True)  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return hex(value)
    for kind in (bool, int, float):
        if isinstance(value, kind):  # a subclass too, such as a numpy float
            return kind(value)
    number = None if isinstance(value, str) else _number(value)
    return plain_text(value) if number is None else number


def plain_text(value: object) -> str:
    """Return a value as text that files hold: in UTF-8, and without the address that Python shows of an object."""
    try:
        text = str(value)
    except Exception as error:  # code of the user's
        text = f"<{type(value).__name__}, whose text cannot be made: {type(error).__name__}>"
    text = text if isinstance(value, str) else ADDRESS.sub("", text)
    return encodable(text)


def encodable(text: str) -> str:
    """Return a text that can be written as UTF-8; the name of a file on the disk need not be such a text."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return an error as one text."""
    return f"{type(error).__name__}: {plain_text(error)}"


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_plain(value: object) -> bool:
    """Return whether `plain` keeps everything of a value, so that it can be returned later."""
    try:
        if isinstance(value, Mapping):
            return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(is_plain(item) for item in value)
    except RecursionError:
        return False
    return value is None or isinstance(value, bool | int | float | str) or _number(value) is not None


def _number(value: object) -> int | float | None:
    """Return the number in a one-element tensor or array, None for anything else."""
    if isinstance(value, date | timedelta) or not hasattr(value, "item") or not hasattr(value, "dtype"):
        return None
    try:
        number = value.item()
    except (ValueError, RuntimeError, TypeError):
        return None
    return number if isinstance(number, int | float) else None


def spelled(value: object, other: Callable[[object], object] = lambda value: value) -> object:
    """Return plain data for JSON, which has no NaN and no infinity: they become text. `other` changes what is no container.

    >>> spelled({"loss": float("nan"), "steps": (1, 2)})
    {'loss': 'nan', 'steps': [1, 2]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): spelled(item, other) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(item, other) for item in value]
    return other(value)
