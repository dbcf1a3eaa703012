"""The verbs of the command, and what their errors mean for the exit status.

0 is done, 1 is a run that failed or a check that found something, 2 is bad input, 3 is a plan that fits nowhere, 130 and 143 are SIGINT
and SIGTERM.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

VERBS = {
    "run": ("running", "run an experiment"),
    "launch": ("launching", "run an experiment on several processes"),
    "sweep": ("sweeping", "run an experiment with many sets of parameters"),
    "resume": ("resuming", "continue a run from its newest valid checkpoint"),
    "ls": ("listing", "list runs"),
    "show": ("showing", "show one run"),
    "compare": ("comparing", "show how runs differ"),
    "plan": ("planning", "find the fastest way to train a model, here or on machines that are not here"),
    "report": ("reporting", "write one HTML file about one or several runs"),
    "doctor": ("checking", "check this machine, a run, or whether a program resumes exactly"),
    "demo": ("demonstrating", "train a small classifier on built-in data, on whatever is here"),
}
"""Each verb's module in this folder, and what it does."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and speaks of errors as all of the library does."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print the usage and what was wrong, and leave with status 2."""
        self.print_usage(sys.stderr)
        from drivetrain.core.display import printable_lines

        self.exit(BAD_INPUT, printable_lines(f"Error: {message}") + "\n")


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the command's parser; only the chosen verb's module is loaded, and no torch at all."""
    from drivetrain import __version__

    parser = Parser(prog="drivetrain", description="Trains plain PyTorch models, and keeps what they leave behind.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb, (module, text) in VERBS.items():
        own = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == chosen:
            loaded = importlib.import_module(f"drivetrain.experiment.cli.{module}")
            loaded.configure(own)
            own.set_defaults(execute=loaded.execute, parser=own)
    return parser


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in VERBS:
        return _refuse_verb(chosen)
    arguments, unknown = build_parser(chosen).parse_known_args(words)
    if unknown:
        _refuse_option(arguments.parser, unknown[0])
    from drivetrain.core.errors import DrivetrainError

    try:
        return int(arguments.execute(arguments))
    except DrivetrainError as error:
        from drivetrain.experiment.cli.output import print_error

        print_error(error, arguments.parser.format_usage().rstrip())
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `drivetrain ls | head`: the reader has what it wanted
        sys.stderr.close()
        return 0


def _refuse_option(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    from drivetrain.core.errors import nearest_name

    near = nearest_name(word.partition("=")[0], [flag for action in parser._actions for flag in action.option_strings])
    parser.error(f"{word} is not understood here" + (f"; did you mean {near}?" if near else "."))


def _refuse_verb(verb: str) -> int:
    from drivetrain.core.errors import unknown_name

    print(
        f"Error: {unknown_name('verb', verb, VERBS)}\nUsage: drivetrain VERB ...    (--help lists all verbs)",
        file=sys.stderr,
    )
    return BAD_INPUT
