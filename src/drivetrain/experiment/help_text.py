"""Help that reads well at any width: what the experiment does, its own parameters first, then those every experiment has."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drivetrain.experiment.parameters import Parameter, ParameterSet

MIN_WIDTH, MAX_WIDTH = 30, 100
COLUMN = 26
"""Where help texts begin; an option that is longer has its text on the next line."""

OWN_OPTIONS = (
    ("-h, --help", "Show this text and exit."),
    ("--print-params", "Print every value with its origin and exit."),
    ("--force", "Resume although parameters differ."),
)


def usage_line(program: str) -> str:
    """Return the usage line of an experiment."""
    return f"Usage: {program} [--option VALUE ...]    (-h lists all options)"


def experiment_help(program: str, description: str, parameters: ParameterSet, standard: Iterable[str]) -> str:
    """Return the help of one experiment."""
    width = _width()
    grouped = {parameter.name for group in parameters.groups for parameter in group.parameters}
    common = set(standard)
    own = [p for name, p in parameters.items() if name not in grouped and name not in common]
    parts = [textwrap.fill(f"Usage: {program} [--option VALUE ...]", width, subsequent_indent="    ")]
    if description:
        parts.append(_paragraphs(description, width))
    if own:
        parts.append(_section("Parameters", None, own, parameters, width))
    for group in parameters.groups:
        parts.append(
            _section(group.name, group.help, [parameters[p.name] for p in group.parameters], parameters, width)
        )
    rest = [p for name, p in parameters.items() if name in common and name not in grouped]
    if rest:
        parts.append(_section("Every experiment has", None, rest, parameters, width))
    options = [option for option in OWN_OPTIONS if option[0] != "--force" or "force" not in parameters]
    parts.append("Options:\n" + "\n".join(_entry(flag, text, width) for flag, text in options))
    return "\n\n".join(parts)


def group_help(program: str, description: str, tree: str) -> str:
    """Return the help of a group of experiments."""
    usage = f"Usage: {program} EXPERIMENT [--option VALUE ...]    (EXPERIMENT -h lists its options)"
    parts = [textwrap.fill(usage, _width(), subsequent_indent="    ", replace_whitespace=False)]
    if description:
        parts.append(_paragraphs(description, _width()))
    return "\n\n".join([*parts, f"Experiments:\n{tree}"])


def params_table(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return every value with its origin, one a line."""
    rows = [
        (name, repr(value) if isinstance(value, str) else str(value), origins[name]) for name, value in values.items()
    ]
    widths = [max((len(row[place]) for row in rows), default=0) for place in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip() for name, value, origin in rows)


def _section(title: str, help: str | None, entries: Sequence[Parameter], parameters: ParameterSet, width: int) -> str:
    lines = [f"{title}:"]
    if help:
        lines.append(textwrap.fill(help, width, initial_indent="  ", subsequent_indent="  "))
    lines += [_entry(_option(p), _text(p), width) for p in entries if not p.hidden]
    return "\n".join(lines)


def _option(parameter: Parameter) -> str:
    if parameter.is_flag:
        return f"{parameter.flag}, --no-{parameter.flag[2:]}"
    word = parameter.value_type.word
    return f"{parameter.flag} {word}" + (" ..." if parameter.multiple else "")


def _text(parameter: Parameter) -> str:
    default = parameter.describe_default()
    notes = [] if default is None else [f"default: {default}"]
    notes += ["required"] if parameter.required and default is None else []
    notes += [f"or ${parameter.envvar}"] if parameter.envvar else []
    return " ".join([*([parameter.help] if parameter.help else []), *([f"({'; '.join(notes)})"] if notes else [])])


def _entry(option: str, text: str, width: int) -> str:
    column = min(COLUMN, width // 2)
    lines = textwrap.wrap(text, max(width - column, 15), break_on_hyphens=False)
    if len(option) + 4 > column or not lines:
        head = textwrap.wrap(option, width - 2, subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join([*("  " + part for part in head), *(" " * column + line for line in lines)])
    first, *rest = lines
    return "\n".join([f"  {option:<{column - 2}}{first}", *(" " * column + line for line in rest)])


def _paragraphs(text: str, width: int) -> str:
    """Wrap prose and leave indented lines, such as examples, as they are."""
    blocks = []
    for block in text.split("\n\n"):
        keep = any(line.startswith((" ", "\t")) for line in block.splitlines())
        blocks.append(block if keep else textwrap.fill(" ".join(block.split()), width))
    return "\n\n".join(blocks)


def _width() -> int:
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns))
