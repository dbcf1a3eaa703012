"""Reading a command line: `--k v`, `--k=v`, `--flag`, `--no-flag`, lists, and nothing by guesswork.

Written out rather than taken from argparse, which abbreviates options, takes `-inf` for an option and cannot tell `--flag` from
`--flag=false`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.display import printable_lines
from drivetrain.core.errors import ParameterError, nearest_name
from drivetrain.core.secret import MASK
from drivetrain.experiment.parameters import Parameter, ParameterSet
from drivetrain.experiment.resolve import PARAMS_FILE, Given

NUMBER = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)
CLI = "cli"


@dataclass
class Command:
    """What a command line asks for."""

    given: dict[str, Given] = field(default_factory=dict)
    wants_help: bool = False
    prints_params: bool = False
    force: bool = False
    """Accept parameters that differ from those of the run that is resumed."""


def parse(argv: Sequence[str], parameters: ParameterSet) -> Command:
    """Read the options of one experiment; anything that is not understood is a `ParameterError`."""
    command = Command()
    values: dict[str, Any] = {}
    tokens = [str(token) for token in argv]
    shown: Callable[[str], str] = repr
    while tokens:
        token = tokens.pop(0)
        if token == "--":
            if tokens:
                raise ParameterError(f"unexpected argument {tokens[0]!r}: values follow their option, as in --lr 0.1.")
            break
        if token == "-h":
            token = "--help"
        if not token.startswith("--"):
            raise ParameterError(f"unexpected argument {shown(token)}: values follow their option, as in --lr 0.1.")
        flag, has_value, text = token[2:].partition("=")
        name = flag.replace("-", "_")
        parameter = parameters.owner_of(name)
        shown = repr if parameter is None or not parameter.is_secret else lambda _: MASK
        if parameter is None:
            _own_option(command, name, token, bool(has_value), parameters)
        elif parameter.is_flag:
            values[parameter.name] = _flag_value(parameter, name, token, text if has_value else None)
        elif parameter.multiple:
            items = [text] if has_value else _take_values(tokens)
            values[parameter.name] = [*values.get(parameter.name, []), *items]
        else:
            value = text if has_value else _take_value(parameter, tokens)
            earlier = values.get(parameter.name, []) if parameter.name == PARAMS_FILE else None
            values[parameter.name] = value if earlier is None else [*earlier, value]
    command.given = {name: Given(value, CLI, is_text=True) for name, value in values.items()}
    return command


def _own_option(command: Command, name: str, token: str, has_value: bool, parameters: ParameterSet) -> None:
    options = {"help": "wants_help", "print_params": "prints_params", "force": "force"}
    if name not in options:
        valid = [parameter.flag for parameter in parameters.values() if not parameter.hidden]
        valid += [f"--no-{p.flag[2:]}" for p in parameters.values() if p.is_flag] + [
            "--help",
            "--print-params",
            "--force",
        ]
        near = nearest_name(token.partition("=")[0], valid)
        raise ParameterError(f"unknown option {token.partition('=')[0]}" + (f"; did you mean {near}?" if near else "."))
    if has_value:
        raise ParameterError(f"{token}: this option takes no value.")
    setattr(command, options[name], True)


def _flag_value(parameter: Parameter, name: str, token: str, text: str | None) -> Any:
    if name == parameter.name:
        return "true" if text is None else text
    if text is not None:
        raise ParameterError(f"{token}: --no-... takes no value. Write {parameter.flag} or {parameter.flag}=false.")
    return "false"


def _take_value(parameter: Parameter, tokens: list[str]) -> str:
    if not tokens or not _is_value(tokens[0]):
        found = f"found {tokens[0]!r}" if tokens else "found nothing"
        raise ParameterError(
            f"{parameter.flag} needs a value ({parameter.value_type.word}), {found}. A value that begins with a dash is "
            f"written {parameter.flag}=-..."
        )
    return tokens.pop(0)


def _take_values(tokens: list[str]) -> list[str]:
    taken = []
    while tokens and _is_value(tokens[0]):
        taken.append(tokens.pop(0))
    return taken


def _is_value(token: str) -> bool:
    return not token.startswith("-") or token == "-" or NUMBER.match(token) is not None


def program_name() -> str:
    """Return how this program was started, as usage prints it."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "experiment"
    return f"python {name}" if name.endswith(".py") else name


def exit_with_error(error: Exception, usage: str) -> None:
    """Print one error and the usage line, and leave with status 2."""
    print(printable_lines(f"Error: {error}\n{usage}"), file=sys.stderr)
    raise SystemExit(2)
