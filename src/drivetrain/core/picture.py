"""The loop as text, with every guest at its place: what `Engine.explain()` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.core.binding import Guest
from drivetrain.core.event import LOOP, Event


def draw(
    guests: Mapping[Event, Sequence[Guest]],
    measured: Mapping[tuple[Event, int], Sequence[float]],
    notes: Mapping[Event, str],
) -> str:
    """Return the picture of the loop with numbered guests under each event, and their time where it was measured."""
    lines: list[str] = []
    for line in LOOP.splitlines()[2:]:  # the first is the title, the second is empty
        lines.append(line)
        name, indent = line.split()[0], " " * (len(line) - len(line.lstrip()) + 4)
        if name not in Event.__members__:
            continue
        event = Event[name]
        if event in notes:
            lines.append(f"{indent}· {notes[event]}")
        for place, guest in enumerate(guests[event], start=1):
            lines.append(f"{indent}{place}. {_describe(guest, measured.get((event, id(guest.plugin))))}")
    return "\n".join(lines) + "\n"


def _describe(guest: Guest, measured: Sequence[float] | None) -> str:
    words = [f"{guest.name:<24}", guest.phase]
    words += [f"{verb} {', '.join(names)}" for verb, names in _declarations(guest.plugin) if names]
    if guest.wants_to is not None:
        words.append("asks match")
    if measured and measured[0]:
        calls, seconds = measured
        words.append(f"{seconds / calls * 1e6:.1f} µs × {int(calls)} calls")
    return "  ".join(words)


def _declarations(plugin: Any) -> tuple[tuple[str, Sequence[str]], ...]:
    return ("reads", getattr(plugin, "reads", ())), ("writes", getattr(plugin, "writes", ()))
