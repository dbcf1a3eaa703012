"""One front for all command lines: argparse reads the verbs of `drivetrain` and the options of an experiment.

Options are never abbreviated, `-inf` is a value, `--flag` takes no word after it, and a mistake is explained with the nearest
valid option.
"""

import argparse
import codecs
import os.path
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from drivetrain.core.types import Settings

if TYPE_CHECKING:
    from drivetrain.experiment.parameters import Parameter, ParameterSet
    from drivetrain.experiment.resolve import Given

BAD_INPUT = 2
NUMBER = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)
CLI = "cli"
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

    def add(self, arguments: Iterable[VerbArgument]) -> None:
        """Add the arguments of a table."""
        for entry in arguments:
            self.add_argument(*entry.names, **entry.options)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the problem, and exit with status 2; without `exit_on_error` raise."""
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, message)
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


class _ExperimentParser(Parser):
    """Leaves values as they were written; argparse would drop the value of `--name=--`."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        values = {None: arg_strings[0] if arg_strings else None, "*": arg_strings}
        return values[action.nargs] if action.nargs in values else super()._get_values(action, arg_strings)


class Command(NamedTuple):
    """What a command line requests."""

    given: "dict[str, Given]"
    wants_help: bool = False
    prints_params: bool = False
    force: bool = False
    """Resume even if parameters differ from those of the run."""


def parse(argv: Sequence[str], parameters: "ParameterSet") -> Command:
    """Read the options of one experiment; anything that is not understood is a `ParameterError`."""
    from drivetrain.core.errors import ParameterError
    from drivetrain.experiment.resolve import Given

    words = list(_spelled_out(argv, parameters))
    parser = experiment_parser("", parameters)
    try:
        found, extra = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ParameterError(_explained(error, words, parameters)) from None
    if extra:
        raise ParameterError(_unexpected(extra[0], words, parser, parameters))
    values = vars(found)
    own = [values.pop(_own(name), False) for name in OWN_OPTIONS]
    return Command({name: Given(value, CLI, is_text=True) for name, value in values.items()}, *own)


def _own(option: str) -> str:
    return f"?{option}"  # no parameter has such a name


def _spelled_out(argv: Sequence[str], parameters: "ParameterSet") -> Iterator[str]:
    """Yield the words with options in one spelling, and flags with their value, so that the next word is never taken for it.

    `name=value` is the same as `--name=value` where no option before it takes the word as its value.
    """
    from drivetrain.core.errors import ParameterError
    from drivetrain.experiment.resolve import groups_of

    groups = groups_of(parameters)
    takes: Parameter | None = None  # the words that follow are its values
    for place, word in enumerate(map(str, argv)):
        flag, has_value, text = word.partition("=")
        if takes is None and has_value and not word.startswith("-"):
            owner = parameters.owner_of(flag.replace("-", "_"))
            if owner is not None and owner.multiple:
                yield from (owner.flag, *split_values(text))
                continue
            is_option = owner is not None or flag.replace("-", "_") in groups
            flag, word = (f"--{flag}", f"--{word}") if is_option else (flag, word)
        name = flag[2:].replace("-", "_")
        parameter = parameters.owner_of(name) if flag.startswith("--") else None
        if flag.startswith("--"):
            takes = parameter if parameter is not None and not parameter.is_flag and not has_value else None
        elif takes is not None and not takes.multiple:
            takes = None
        if word == "--":
            if argv[place + 1 :]:
                raise ParameterError(_positional(repr(argv[place + 1])))
            return
        if parameter is None:
            yield "--" + name.replace("_", "-") + has_value + text if name in groups and flag.startswith("--") else word
        elif has_value and name != parameter.name:
            raise ParameterError(f"{word}: --no-... takes no value. Write {parameter.flag} or {parameter.flag}=false.")
        elif has_value or not parameter.is_flag:
            yield parameter.flag + has_value + text
        else:
            yield f"{parameter.flag}={'true' if name == parameter.name else 'false'}"


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets.

    >>> split_values("[1,2],[3]")
    ['[1,2]', '[3]']
    """
    return [item.strip() for item in re.split(r",(?![^\[({]*[\])}])", text)]


def _positional(shown: str) -> str:
    return f"unexpected argument {shown}: values follow their option, as in --lr 0.1 or lr=0.1."


def _explained(error: argparse.ArgumentError, words: list[str], parameters: "ParameterSet") -> str:
    flag = str(error.argument_name).rpartition("/")[2]
    parameter = parameters.owner_of(flag[2:].replace("-", "_"))
    if parameter is None:
        return f"{flag}: this option takes no value."
    following = [after for word, after in zip(words, [*words[1:], ""]) if word == flag and after[:1] in ("", "-")]
    found = "nothing" if not following or not following[0] else repr(parameter.shown(following[0]))
    return (
        f"{flag} needs a value ({parameter.value_type.word}), found {found}. Write a value that starts with a dash as "
        f"{flag}=-..."
    )


def _unexpected(word: str, words: list[str], parser: Parser, parameters: "ParameterSet") -> str:
    if word.startswith("--"):
        return f"unknown option {word.partition('=')[0]}{parser.hint(word)}"
    options = [option for option in words[: words.index(word)] if option.startswith("--")]
    owner = parameters.owner_of(options[-1].partition("=")[0][2:].replace("-", "_")) if options else None
    name, has_value, _ = word.partition("=")
    if has_value and (owner is None or not owner.is_secret):
        return f"unknown parameter {name!r}{parser.hint('--' + name.replace('_', '-'))}"
    return _positional(repr(word) if owner is None else repr(owner.shown(word)))


def experiment_parser(
    program: str, parameters: "ParameterSet", description: str = "", common: Iterable[str] = ()
) -> Parser:
    """Return the parser of one experiment; its help shows the experiment's own parameters first, then the `common` ones."""
    from drivetrain.experiment.resolve import groups_of

    usage = textwrap.fill(f"Usage: {program} [--option VALUE ...]", _width(), subsequent_indent="    ")
    parser = _ExperimentParser(
        usage=_literal(usage.removeprefix("Usage: ")),
        description=description,
        formatter_class=_ExperimentHelp,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        exit_on_error=False,
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
        for name in names:
            _add_parameter(section, parameters[name])
    for name in groups_of(parameters):  # a choice of a config group, which a parameter file offers
        if name not in OWN_OPTIONS and parameters.owner_of(name) is None:
            parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=argparse.SUPPRESS)
    section = parser.add_argument_group("Options")
    for name, text in OWN_OPTIONS.items():
        flags = ["-h", "--help"] if name == "help" else [f"--{name.replace('_', '-')}"]
        if name not in parameters:
            section.add_argument(*flags, dest=_own(name), action="store_true", help=text)
    return parser


def _add_parameter(section: "argparse._ArgumentGroup", parameter: "Parameter") -> None:
    repeats = parameter.name == "params_file"
    section.add_argument(
        *([parameter.flag, f"--no-{parameter.flag[2:]}"] if parameter.is_flag else [parameter.flag]),
        dest=parameter.name,
        action="extend" if parameter.multiple else "append" if repeats else "store",
        nargs="*" if parameter.multiple else None,
        metavar="" if parameter.is_flag else parameter.value_type.word,
        help=argparse.SUPPRESS if parameter.hidden else _literal(_help_text(parameter)),
    )


def _help_text(parameter: "Parameter") -> str:
    default = parameter.describe_default()
    notes = [] if default is None else [f"default: {default}"]
    notes += ["required"] if parameter.required and default is None else []
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
        return self._fill_text(text, self._width, " " * self._current_indent) + "\n" * (
            1 if self._current_indent else 2
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return paragraphs(text, width, indent)

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
    parts = [textwrap.fill(usage, _width(), subsequent_indent="    ", replace_whitespace=False)]
    return "\n\n".join([*parts, *([paragraphs(description, _width())] if description else []), f"Experiments:\n{tree}"])


def params_table(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    """Return every value with its origin, one a line."""
    rows = [(name, repr(value) if isinstance(value, str) else str(value)) for name, value in values.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {origins[name]}".rstrip() for name, text in rows)


def usage_line(program: str) -> str:
    """Return the usage line of an experiment."""
    return f"Usage: {program} [--option VALUE ...]    (-h lists all options)"


def program_name() -> str:
    """Return how this program was started, as usage prints it."""
    name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c") else "experiment"
    return f"python {name}" if name.endswith(".py") else name


def print_error(message: object, usage: str = "") -> None:
    """Print an error, and the usage line, to stderr; line ends stay, other control characters are escaped."""
    from drivetrain.core.display import printable_lines

    print(printable_lines(f"Error: {message}" + (f"\n{usage}" if usage else "")), file=sys.stderr)


def _width() -> int:
    return max(30, min(100, shutil.get_terminal_size((80, 24)).columns))
