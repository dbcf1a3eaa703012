"""The two tags with a grammar of their own: `!ref <key>` and the bracketed text of `!tuple` and `!list`.

A reference is a placeholder until the whole file is read, so it may point forward, at other references and into
containers. What it yields is a copy: two places of a configuration never share a list.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import did_you_mean
from drivetrain.core.types import Settings

_BRACKETED = re.compile(r"<([^<>]*)>")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(-?[0-9]+)\]")
_TOKEN = re.compile(
    r"""\s*(?:([()\[\],])|'((?:[^']|'')*)'|"([^"]*)"|([^,()\[\]'"\s](?:[^,()\[\]]*[^,()\[\]\s])?))\s*"""
)
_MAX_NESTING = 20  # brackets in one text
_MAX_DEPTH = 128  # containers and references within each other


class ReferenceProblem(Exception):
    """A reference cannot be resolved; `line` says where it was written."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


class BracketProblem(Exception):
    """A bracketed text is malformed."""


@dataclass(frozen=True, eq=False)
class RefTag:
    """A `!ref` that waits for the rest of the file."""

    text: str
    line: int


def resolve_references(data: Settings, *, limit: int) -> Settings:
    """Replace every RefTag by a copy of what it names; a result of more than `limit` values and characters fails."""
    resolved = _Resolver(data, limit).resolve(data)
    assert isinstance(resolved, dict)
    return resolved


class _Resolver:
    def __init__(self, root: dict[str, object], limit: int):
        self.root, self.left = root, limit
        self.active: list[RefTag] = []  # the references being followed, outermost first
        self.depth = 0

    def resolve(self, value: object) -> object:
        """Return a copy of `value` in which no RefTag is left."""
        self._spend(1 + (len(value) if isinstance(value, str) and self.active else 0))
        if not isinstance(value, (RefTag, dict, list, tuple)):
            return value
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ReferenceProblem(self._line(), f"references and containers are nested more than {_MAX_DEPTH} deep.")
        copy: object
        if isinstance(value, RefTag):
            copy = self._follow(value)
        elif isinstance(value, dict):
            copy = {key: self.resolve(item) for key, item in value.items()}
        else:
            copy = type(value)([self.resolve(item) for item in value])
        self.depth -= 1
        return copy

    def _line(self) -> int:
        return self.active[0].line if self.active else 1

    def _spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise ReferenceProblem(self._line(), "references expand to too many values.")

    def _follow(self, reference: RefTag) -> object:
        if reference in self.active:
            chain = self.active[self.active.index(reference) :] + [reference]
            raise ReferenceProblem(reference.line, f"references form a cycle: {' -> '.join(r.text for r in chain)}.")
        self.active.append(reference)
        try:
            whole = _BRACKETED.fullmatch(reference.text.strip())
            if whole:
                return self._look_up(reference, whole[1])
            text = _BRACKETED.sub(lambda match: str(self._look_up(reference, match[1])), reference.text)
            self._spend(len(text))
            return text
        finally:
            self.active.pop()

    def _look_up(self, reference: RefTag, path: str) -> object:
        """Walk `a.b[0]` from the top of the file."""
        value: Any = self.root
        position, walked = 0, ""
        path = path.strip()
        if not path:
            raise ReferenceProblem(reference.line, "`!ref <>` is empty; write the name of a top-level key.")
        while position < len(path):
            match = _STEP.match(path, position)
            if match is None:
                raise ReferenceProblem(
                    reference.line, f"!ref <{path}>: expected names and indexes such as <a.b>, <a[0]> or <a[0][1]>."
                )
            if isinstance(value, RefTag):
                value = self.resolve(value)
            value = self._enter(reference, path, walked, value, match)
            walked, position = path[: match.end()], match.end()
        return self.resolve(value)

    def _enter(self, reference: RefTag, path: str, walked: str, value: object, match: re.Match[str]) -> object:
        """Return the entry of a container that one step of a path names."""
        if match[1] is not None:
            key = match[1].strip()
            if isinstance(value, dict) and key in value:
                return value[key]
            problem = f"no keys; it is {_kind(value)}."
            if isinstance(value, dict):
                names = ", ".join(list(value)[:20]) or "none"
                problem = f"no key {key!r}.{did_you_mean(key, value)} Keys: {names}."
        else:
            index = int(match[2])
            if isinstance(value, (list, tuple)) and -len(value) <= index < len(value):
                return value[index]
            problem = f"no items; it is {_kind(value)}."
            if isinstance(value, (list, tuple)):
                problem = f"{len(value)} items, there is no [{index}]."
        raise ReferenceProblem(reference.line, f"!ref <{path}>: {repr(walked) if walked else 'the file'} has {problem}")


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "a mapping", list: "a list", tuple: "a tuple"}
    return names.get(type(value), f"the value {str(value)[:40]!r}")


def parse_brackets(text: str, plain: Callable[[str], object]) -> list[object]:
    """Read `(a, b, (c, d))` or `[a, b]`: quoted items are text, others what `plain` makes of them.

    >>> parse_brackets("(1, (2, x), [])", str)
    ['1', ('2', 'x'), []]
    """
    if not text.lstrip().startswith(("(", "[")):
        raise BracketProblem("expected items in brackets, for example (0.9, 0.98) or [0.9, 0.98].")
    opened: list[tuple[str, list[object]]] = []  # brackets that are not closed yet, with their items so far
    whole: list[object] | None = None
    position, expects_item = 0, True
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise BracketProblem(f"cannot read {text[position : position + 20]!r}.")
        symbol, single, double, word = match.groups()
        shown, position = match[0].strip(), match.end()
        if whole is not None:
            raise BracketProblem(f"unexpected {shown!r} after the closing bracket.")
        if symbol == ",":
            if expects_item:
                raise BracketProblem("an item is missing before ','.")
            expects_item = True
            continue
        item: object
        if symbol in (")", "]"):
            opening, items = opened.pop()
            if opening + symbol not in ("()", "[]"):
                raise BracketProblem(f"{opening!r} is closed by {symbol!r}.")
            item = tuple(items) if symbol == ")" else items
            whole = None if opened else items
        elif not expects_item:
            raise BracketProblem(f"a ',' is missing before {shown!r}.")
        elif symbol:
            if len(opened) == _MAX_NESTING:
                raise BracketProblem(f"brackets are nested more than {_MAX_NESTING} deep.")
            opened.append((symbol, []))
            continue
        elif word is not None:
            item = plain(word)
        else:
            item = double if single is None else single.replace("''", "'")
        expects_item = False
        if opened:
            opened[-1][1].append(item)
    if whole is None:
        raise BracketProblem(
            f"{opened[-1][0]!r} is never closed. Inside {{ }} a comma ends the text, so write a list there: !tuple [0.9, 0.98]."
        )
    return whole
