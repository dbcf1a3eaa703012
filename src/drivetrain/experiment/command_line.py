"""One front for all command lines: argparse reads the verbs of `drivetrain`, `parse` the options of an experiment.

Options are never abbreviated, `-inf` is a value, `--flag` takes no word after it, and a mistake is explained with the nearest
valid option.
"""

import argparse
import codecs
import os
import re
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from drivetrain.core.types import Settings

if TYPE_CHECKING:
    from drivetrain.experiment.parameters import Parameter, ParameterSet
    from drivetrain.experiment.resolve import Given

BAD_INPUT = 2
STDOUT, STDERR = 1, 2
"""The file descriptors of the process, even when `sys.stdout` is replaced."""
NUMBER = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)
CLI = "cli"
POSITIONAL = "values follow their option, as in --lr 0.1 or lr=0.1."
OWN_OPTIONS = {
    "help": "Show this text and exit.",
    "print_params": "Print every value with its origin and exit.",
    "force": "Resume even if parameters differ.",
}
"""Options of every experiment that are not parameters. A parameter named `force` replaces the option."""


PLAIN = dict(zip("✓✗→–…·×µ±▁▂▃▄▅▆▇█", "+ x -> - ... - x u +- _ . - = + * # @".split(), strict=True))
"""Replacements for our own characters in encodings that lack them, such as ASCII or cp1252."""


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error(REPLACED := "drivetrain-replaced", _replaced)


def print_any_text() -> None:
    """Replace characters that the encoding of stdout or stderr lacks, instead of failing at them."""
    for stream in (sys.stdout, sys.stderr):
        errors = getattr(stream, "errors", None)
        is_narrow = errors == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8"  # the locale C
        if (errors == "strict" or is_narrow) and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=REPLACED)


@contextmanager
def closed_pipe_ends_quietly() -> Iterator[None]:
    """End the block where the reader of the output has what it wanted, as in `drivetrain ls | head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what Python still flushes when it ends


class VerbArgument(NamedTuple):
    """What `add_argument` takes, so that a verb can declare its arguments as a table."""

    names: tuple[str, ...]
    options: Settings


def argument(*names: str, **options: object) -> VerbArgument:
    """Declare one argument of a verb."""
    return VerbArgument(names, options)


JSON = argument("--json", action="store_true", help="print the same data as JSON")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations that reads `-inf` as a value and suggests the nearest option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._negative_number_matcher = NUMBER

    def error(self, message: str) -> NoReturn:
        """Print the usage and the problem, and exit with status 2."""
        self.print_usage(sys.stderr)
        from drivetrain.core.display import printable_lines

        self.exit(BAD_INPUT, printable_lines(f"Error: {message}") + "\n")

    def take_late(self, arguments: argparse.Namespace, words: list[str]) -> list[str]:
        """Add words that come after an option to the argument that takes several, and return those that are not understood."""
        several = next((one for one in self._actions if not one.option_strings and one.nargs in ("*", "+")), None)
        if several is None:
            return words
        getattr(arguments, several.dest).extend(word for word in words if not word.startswith("-"))
        return [word for word in words if word.startswith("-")]

    def hint(self, word: str) -> str:
        """Return the end of a sentence about an unknown option: the nearest one, if any is near."""
        from drivetrain.core.errors import nearest_name

        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        near = nearest_name(word.partition("=")[0], [flag for action in shown for flag in action.option_strings])
        return f"; did you mean {near}?" if near else "."


class Command(NamedTuple):
    """What a command line requests."""

    given: "dict[str, Given]"
    wants_help: bool = False
    prints_params: bool = False
    force: bool = False
    """Resume even if parameters differ from those of the run."""


def parse(argv: Sequence[str], parameters: "ParameterSet") -> Command:
    """Read the options of one experiment; anything that is not understood is a `ParameterError`.

    `name=value` is the same as `--name=value` where no option before it takes the word as its value.
    """
    from drivetrain.core.errors import ParameterError
    from drivetrain.experiment.resolve import Given, groups_of

    groups = groups_of(parameters)
    own = {flag: name for name in OWN_OPTIONS if name not in parameters for flag in _own_flags(name)}
    rest, values, asked = deque(map(str, argv)), dict[str, Any](), set[str]()
    last: Parameter | None = None

    def is_value(word: str) -> bool:
        flag = word.partition("=")[0]
        name = flag[2:].replace("-", "_")
        if flag in own or (flag[:2] == "--" and (name in groups or parameters.owner_of(name) is not None)):
            return False
        return word[:1] != "-" or word == "-" or NUMBER.match(word) is not None or " " in word

    def take(flag: str, parameter: "Parameter | None") -> str:
        """Return the next word as the value of an option; a config group has no parameter."""
        if rest and is_value(rest[0]):
            return rest.popleft()
        kind = "TEXT" if parameter is None else parameter.value_type.word
        found = "nothing" if not rest else repr(rest[0] if parameter is None else parameter.shown(rest[0]))
        raise ParameterError(
            f"{flag} needs a value ({kind}), found {found}. Write a value that starts with a dash as {flag}=-..."
        )

    while rest:
        word = rest.popleft()
        flag, has_value, text = word.partition("=")
        if word == "--" and rest:
            raise ParameterError(f"unexpected argument {rest[0]!r}: {POSITIONAL}")
        if word == "--":
            break
        is_assigned = bool(has_value) and not word.startswith("-")
        name = flag.removeprefix("--").replace("-", "_")
        parameter = parameters.owner_of(name) if is_assigned or flag.startswith("--") else None
        if flag in own:
            if has_value:
                raise ParameterError(f"{flag}: this option takes no value.")
            asked.add(own[flag])
        elif parameter is None and name in groups and (is_assigned or flag.startswith("--")):
            values[name] = text if has_value else take(flag, None)
        elif parameter is None:
            raise ParameterError(_unexpected(word, last, parameters))
        elif name != parameter.name and has_value:
            raise ParameterError(f"{word}: --no-... takes no value. Write {parameter.flag} or {parameter.flag}=false.")
        elif parameter.is_flag:
            values[parameter.name] = text if has_value else str(name == parameter.name).lower()
        elif parameter.multiple:
            items = values.setdefault(name, [])
            items += text_given(parameter, text) if is_assigned else [text] if has_value else []
            while rest and not has_value and is_value(rest[0]):
                items.append(rest.popleft())
        else:
            value = text if has_value else take(parameter.flag, parameter)
            values[name] = [*values.get(name, []), value] if name == "params_file" else value
        last = parameter
    given = {name: Given(value, CLI, is_text=True) for name, value in values.items()}
    return Command(given, *(name in asked for name in OWN_OPTIONS))


def _own_flags(option: str) -> list[str]:
    return ["-h", "--help"] if option == "help" else [f"--{option.replace('_', '-')}"]


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets.

    >>> split_values("[1,[2,3]],[4]")
    ['[1,[2,3]]', '[4]']
    """
    items, depth = [""], 0
    for sign in text:
        depth += (sign in "[({") - (sign in "])}")
        if sign == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += sign
    return [item.strip() for item in items]


def text_given(parameter: "Parameter", text: str) -> str | list[str]:
    """Return the text of one value, or the items of a list: `1,2` or `[1,2]`; brackets around a value of JSON are its own."""
    if not parameter.multiple:
        return text
    items = split_values(text)
    if len(items) > 1 or parameter.value_type.takes_json or not (items[0][:1] == "[" and items[0][-1:] == "]"):
        return items
    return [item for item in split_values(items[0][1:-1]) if item]


def _unexpected(word: str, last: "Parameter | None", parameters: "ParameterSet") -> str:
    """Return the message about a word that is neither an option nor the value of one; `last` is the parameter before it."""
    hint = experiment_parser("", parameters).hint
    if word.startswith("--"):
        return f"unknown option {word.partition('=')[0]}{hint(word)}"
    name, has_value, _ = word.partition("=")
    if has_value and (last is None or not last.is_secret):
        return f"unknown parameter {name!r}{hint('--' + name.replace('_', '-'))}"
    shown = repr(word if last is None else last.shown(word))
    if last is not None and last.is_flag:
        return f"unexpected argument {shown}: write {last.flag}, --no-{last.flag[2:]} or {last.flag}=false."
    if last is not None and last.value_type.takes_json:
        return f"unexpected argument {shown}: {last.flag} takes one value. Write several as JSON: {last.flag} '[1, 2]'."
    return f"unexpected argument {shown}: {POSITIONAL}"


def experiment_parser(
    program: str, parameters: "ParameterSet", description: str = "", common: Iterable[str] = ()
) -> Parser:
    """Return a parser that prints the help of one experiment: its own parameters first, then the `common` ones."""
    usage = textwrap.fill(f"Usage: {program} [--option VALUE ...]", _width(), subsequent_indent="    ")
    parser = Parser(
        usage=_literal(usage.removeprefix("Usage: ")),
        description=description,
        formatter_class=_ExperimentHelp,
        add_help=False,
    )
    grouped = {parameter.name for group in parameters.groups for parameter in group.parameters}
    rest = set(common)
    sections = [
        ("Parameters", None, [name for name in parameters if name not in grouped | rest]),
        *((group.name, group.help, [entry.name for entry in group.parameters]) for group in parameters.groups),
        ("Every experiment has", None, [name for name in parameters if name in rest - grouped]),
    ]
    for title, text, names in sections:
        section = parser.add_argument_group(title, text)
        for parameter in (parameters[name] for name in names):
            section.add_argument(
                *([parameter.flag, f"--no-{parameter.flag[2:]}"] if parameter.is_flag else [parameter.flag]),
                nargs="*" if parameter.multiple else None,
                metavar="" if parameter.is_flag else parameter.value_type.word,
                help=argparse.SUPPRESS if parameter.hidden else _literal(_help_text(parameter)),
            )
    section = parser.add_argument_group("Options")
    for name, text in OWN_OPTIONS.items():
        if name not in parameters:
            section.add_argument(*_own_flags(name), action="store_true", help=text)
    return parser


def _help_text(parameter: "Parameter") -> str:
    default = parameter.describe_default()
    notes = [] if default is None else [f"default: {default}"]
    if parameter.required and default is None:
        around = parameter.optional_within[:1]
        notes += [f"required if there is {around[0]}" if around else "required"]
    notes += [f"or ${parameter.envvar}"] if parameter.envvar else []
    return " ".join(filter(None, (parameter.help, f"({'; '.join(notes)})" if notes else "")))


def _literal(text: str) -> str:
    return text.replace("%", "%%")  # argparse formats usage and help with %


class _ExperimentHelp(argparse.HelpFormatter):
    """Help that reads well at any width and prints text as it was written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_width(), max_help_position=26)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Add the usage line."""
        super().add_usage(usage, actions, groups, "Usage: ")

    def _format_text(self, text: str) -> str:
        filled = paragraphs(text, self._width, " " * self._current_indent)
        return filled + ("\n" if self._current_indent else "\n\n")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        words = [", ".join(action.option_strings), str(action.metavar or ""), "..." if action.nargs == "*" else ""]
        return " ".join(filter(None, words))


def paragraphs(text: str, width: int, indent: str = "") -> str:
    """Wrap prose and leave indented lines, such as examples, as they are."""
    blocks = []
    for block in text.split("\n\n"):
        keep = any(line.startswith((" ", "\t")) for line in block.splitlines())
        filled = textwrap.fill(" ".join(block.split()), width, initial_indent=indent, subsequent_indent=indent)
        blocks.append(block if keep else filled)
    return "\n\n".join(blocks)


def group_help(program: str, description: str, tree: str) -> str:
    """Return the help of a group of experiments."""
    usage = f"Usage: {program} EXPERIMENT [--option VALUE ...]    (EXPERIMENT -h lists its options)"
    filled = textwrap.fill(usage, _width(), subsequent_indent="    ", replace_whitespace=False)
    return "\n\n".join(filter(None, (filled, paragraphs(description, _width()), f"Experiments:\n{tree}")))


def params_table(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    """Return every value with its origin, one a line."""
    from drivetrain.core.display import aligned

    text_of = lambda value: repr(value) if isinstance(value, str) else str(value)
    return "\n".join(aligned([(name, text_of(value), origins[name]) for name, value in values.items()]))


def usage_line(program: str) -> str:
    """Return the usage line of an experiment."""
    return f"Usage: {program} [--option VALUE ...]    (-h lists all options)"


def program_name() -> str:
    """Return how this program was started, as usage prints it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:  # python -m, and not a profiler that is started like this
        return f"python -m {spec.name.removesuffix('.__main__')}"
    name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c") else "experiment"
    return f"python {name}" if name.endswith(".py") else name


_imports = 0
"""How many targets are being imported at this moment."""


@contextmanager
def importing() -> Iterator[None]:
    """Import the program of an experiment within the block."""
    global _imports
    _imports += 1
    try:
        yield
    finally:
        _imports -= 1


def check_is_program(name: str) -> None:
    """Raise where a program that starts an experiment is only imported: by a verb, or by another process of a run."""
    processes = sys.modules.get("multiprocessing.process")
    if _imports or (processes is not None and getattr(processes.current_process(), "_inheriting", False)):
        from drivetrain.core.errors import ExperimentError

        raise ExperimentError(
            f"the program starts {name!r} while it is imported. Put that call under `if __name__ == '__main__':`, so that "
            "other processes and the verbs of drivetrain can import it."
        )


def print_error(message: object, usage: str = "") -> None:
    """Print an error, and the usage line, to stderr; line ends stay, other control characters are escaped."""
    from drivetrain.core.display import printable_lines

    print(printable_lines(f"Error: {message}" + (f"\n{usage}" if usage else "")), file=sys.stderr)


def _width() -> int:
    return max(30, min(100, shutil.get_terminal_size((80, 24)).columns))
