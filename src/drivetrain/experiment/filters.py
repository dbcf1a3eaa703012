"""Conditions on runs, as in `lr<0.1 and (state=finished or tag=base)`: comparisons joined by `and`, `or` and brackets."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.core.errors import ParameterError, unknown_name

TOKEN = re.compile(r"""\s*(?:(<=|>=|!=|==|=|<|>|~)|([()])|"([^"]*)"|'([^']*)'|([^\s<>=!~()"']+))""")
LONGEST, MOST_BRACKETS = 2000, 50
"""Characters and opening brackets of a condition."""
EXPECTED = "Expected comparisons such as lr<0.1 or state=finished, joined by and, or and brackets; ~ is 'contains'."

Values = Mapping[str, object]
Condition = Callable[[Values], bool]


def read_condition(text: str) -> tuple[Condition, set[str]]:
    """Return a condition on the named values of a run, and the names it uses.

    >>> holds, names = read_condition("lr<0.1 and state=finished")
    >>> holds({"lr": 0.01, "state": "finished"}), holds({"lr": 0.01, "state": "failed"}), sorted(names)
    (True, False, ['lr', 'state'])
    """
    if len(text) > LONGEST:
        raise ParameterError(f"the condition has {len(text)} characters; at most {LONGEST} are read.")
    if (brackets := text.count("(")) > MOST_BRACKETS:
        raise ParameterError(f"the condition has {brackets} opening brackets; at most {MOST_BRACKETS} are read.")
    reader = _Reader(text)
    condition = reader.either()
    if reader.place < len(reader.tokens):
        raise reader.problem()
    return condition, reader.names


def check_names(names: Iterable[str], runs: Iterable[Values]) -> None:
    """Raise for a name that no run has."""
    runs = list(runs)
    known = dict.fromkeys(name for run in runs for name in run)
    for name in names:
        if runs and name not in known:
            raise ParameterError(unknown_name("name of a run's values", name, list(known)))


class _Reader:
    """Reads a condition from left to right."""

    def __init__(self, text: str):
        self.text, self.place = text, 0
        self.tokens: list[tuple[str, str]] = []
        self.names: set[str] = set()
        position = 0
        while position < len(text.rstrip()):
            found = TOKEN.match(text, position)
            if found is None:
                raise ParameterError(f"cannot parse the condition {text!r} from {text[position:]!r} on. {EXPECTED}")
            sign, bracket, double, single, word = found.groups()
            quoted = double if double is not None else single
            kind = "sign" if sign else "bracket" if bracket else "word" if word else "text"
            self.tokens.append((kind, sign or bracket or word or quoted or ""))
            position = found.end()

    def problem(self) -> ParameterError:
        """Return the error about the present token."""
        rest = " ".join(word for _, word in self.tokens[self.place :]) or "its end"
        return ParameterError(f"cannot parse the condition {self.text!r} from {rest!r} on. {EXPECTED}")

    def take(self, kind: str, *words: str) -> str | None:
        """Return the present token and move on if it is of this kind, and one of these words where some are given."""
        if self.place >= len(self.tokens):
            return None
        found, word = self.tokens[self.place]
        if found != kind or (words and word not in words):
            return None
        self.place += 1
        return word

    def either(self) -> Condition:
        """Read conditions joined by `or`."""
        parts = [self.both()]
        while self.take("word", "or"):
            parts.append(self.both())
        return lambda values: any(part(values) for part in parts)

    def both(self) -> Condition:
        """Read conditions joined by `and`."""
        parts = [self.one()]
        while self.take("word", "and"):
            parts.append(self.one())
        return lambda values: all(part(values) for part in parts)

    def one(self) -> Condition:
        """Read one comparison, or a condition in brackets."""
        if self.take("bracket", "("):
            inner = self.either()
            if not self.take("bracket", ")"):
                raise self.problem()
            return inner
        name = self.take("word") or self.take("text")
        sign = self.take("sign") if name is not None else None
        if name is None or sign is None:
            raise self.problem()
        quoted = self.take("text")
        wanted = quoted if quoted is not None else self.take("word")
        if wanted is None:
            raise self.problem()
        self.names.add(name)
        return lambda values: compare(values.get(name), sign, wanted)


def compare(value: Any, sign: str, wanted: str) -> bool:
    """Compare one value with a text: as numbers where both are, else as text; of a list one entry must match.

    >>> compare(0.1, "<", "2e-1"), compare("adam", "~", "ad"), compare(None, "<", "1"), compare(["a", "b"], "=", "b")
    (True, True, False, True)
    """
    if isinstance(value, list | tuple):
        found = [compare(item, "=" if sign == "!=" else sign, wanted) for item in value]
        return not any(found) if sign == "!=" else any(found)
    if sign == "~":
        return value is not None and wanted.lower() in _text(value).lower()
    number = _number(wanted)
    if isinstance(value, int | float) and not isinstance(value, bool) and number is not None:
        return {
            "=": value == number,
            "==": value == number,
            "!=": value != number,
            "<": value < number,
            "<=": value <= number,
            ">": value > number,
            ">=": value >= number,
        }[sign]
    same = _text(value) == (wanted.lower() if value is None or isinstance(value, bool) else wanted)
    return same if sign in ("=", "==") else not same if sign == "!=" else False


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
