"""Help texts from a function's docstring: what it does, and what its arguments mean."""

import inspect
import re
from collections.abc import Callable
from typing import Any

SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns|return|raises|yields|example|examples|note|notes):?\s*$", re.I
)
ARGUMENT_SECTIONS = {"args", "arguments", "parameters", "params"}
ENTRY = re.compile(r"^\*{0,2}([A-Za-z_][\w.]*)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
FIELD = re.compile(r"^:param\s+(?:[^:]*\s)?([A-Za-z_][\w.]*)\s*:\s*(.*)$")
OTHER_FIELD = re.compile(r"^:\w+[^:]*:")


def description_of(function: Callable[..., Any]) -> str:
    """Return the docstring without its sections about arguments, results and errors."""
    return "\n".join(_split(function)[0]).strip()


def argument_help(function: Callable[..., Any]) -> dict[str, str]:
    """Return the help text of each argument, from an `Args:` section or from `:param name:` lines.

    >>> def train(lr): '''Train.
    ...
    ...     Args:
    ...         lr: how far each step goes,
    ...             before scaling.
    ... '''
    >>> argument_help(train)
    {'lr': 'how far each step goes, before scaling.'}
    """
    return {name: " ".join(words) for name, words in _split(function)[1].items()}


def _split(function: Callable[..., Any]) -> tuple[list[str], dict[str, list[str]]]:
    about: list[str] = []
    arguments: dict[str, list[str]] = {}
    section, current, indent = "", "", -1
    for line in (inspect.getdoc(function) or "").splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if field := FIELD.match(text):
            section, current = "", field[1]
            arguments[current] = [field[2]]
        elif depth == 0 and (title := SECTION.match(text)):
            section, current, indent = title[1].lower(), "", -1
        elif depth == 0 and text and not OTHER_FIELD.match(text):
            section, current = "", ""
            about.append(line)
        elif section in ARGUMENT_SECTIONS and text:
            indent = depth if indent < 0 else indent
            entry = ENTRY.match(text) if depth <= indent else None
            if entry:
                current = entry[1]
                arguments[current] = [entry[2]] if entry[2] else []
            elif current:
                arguments[current].append(text)
        elif not section and current and text and depth:
            arguments[current].append(text)
        elif not section and not current and not OTHER_FIELD.match(text):
            about.append(line)
    return about, arguments
