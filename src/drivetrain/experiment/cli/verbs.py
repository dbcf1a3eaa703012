"""The verbs of the command, and what their errors mean for the exit status.

0 is done, 1 is a run that failed or a check that found a problem, 2 is bad input, 3 is a plan that fits nowhere, 130 and 143 are
SIGINT and SIGTERM. The verb `completion` is about the others, so it is here too: it prints a script, and nothing is run when a key
is pressed.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence

from drivetrain.experiment.command_line import (
    BAD_INPUT,
    Parser,
    argument,
    closed_pipe_ends_quietly,
    print_any_text,
    print_error,
)

VERBS = {
    "run": ("run", "run an experiment"),
    "launch": ("run", "run an experiment on several processes"),
    "sweep": ("sweep", "run an experiment with many sets of parameters"),
    "resume": ("resume", "continue a run from its newest valid checkpoint, or a sweep"),
    "ls": ("listing", "list runs and the parameters that differ"),
    "show": ("look", "show one run or sweep"),
    "tag": ("listing", "add tags and notes to runs"),
    "compare": ("compare", "show how runs differ"),
    "plan": ("plan", "find the fastest plan to train a model, on this machine or for another one"),
    "report": ("look", "write one HTML file about one or several runs"),
    "board": ("look", "serve a live page about runs, on this machine only"),
    "doctor": ("doctor", "check this machine, a run, or whether a program resumes exactly"),
    "completion": ("verbs", "print a script that lets bash, zsh or fish complete verbs and options"),
    "demo": ("run", "train a small classifier on built-in data, on this machine's device"),
}
"""Each verb's module in this folder, and what it does. The module has the verb's function and its `ARGUMENTS`.

The function returns the exit status; None is 0.
"""

FAILED, INTERRUPTED = 1, 130


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the command's parser; only the chosen verb's module is loaded, and no torch at all."""
    from drivetrain import __version__

    parser = Parser(prog="drivetrain", description="Trains plain PyTorch models and records their runs.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb, (module, text) in VERBS.items():
        own = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == chosen:
            loaded = importlib.import_module(f"drivetrain.experiment.cli.{module}")
            own.usage = getattr(loaded, "USAGE", None)
            for names, options in loaded.ARGUMENTS[verb]:
                own.add_argument(*names, **options)
            own.set_defaults(execute=getattr(loaded, verb), parser=own)
    return parser


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    print_any_text()
    with closed_pipe_ends_quietly():
        return _run_verb([str(word) for word in (sys.argv[1:] if argv is None else argv)])
    return 0


def _run_verb(words: list[str]) -> int:
    if not words:
        build_parser().print_help()
        return BAD_INPUT
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in VERBS:
        from drivetrain.core.errors import unknown_name

        print_error(unknown_name("verb", chosen, VERBS), "Usage: drivetrain VERB ...    (--help lists all verbs)")
        return BAD_INPUT
    arguments, unknown = build_parser(chosen).parse_known_args(words)
    unknown = arguments.parser.take_late(arguments, unknown)
    if unknown:
        is_option, hint = unknown[0].startswith("-"), arguments.parser.hint(unknown[0])
        if chosen == "sweep" and hint == ".":
            name = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
            hint = f". A parameter of the experiment is written {name}=VALUE."
        problem = f"is not a known argument{hint}" if is_option else "is one argument too many."
        arguments.parser.error(f"{unknown[0]} {problem}")
    from drivetrain.core.errors import DrivetrainError

    try:
        return int(arguments.execute(arguments) or 0)
    except DrivetrainError as error:
        print_error(error, arguments.parser.format_usage().rstrip())
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


BASH = """\
# eval "$(drivetrain completion bash)"
_drivetrain() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" options=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$options --help" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _drivetrain drivetrain
"""
ZSH = """\
# eval "$(drivetrain completion zsh)", after compinit
autoload -U +X bashcompinit && bashcompinit
"""

ARGUMENTS = {
    "completion": [argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")]
}


def completion(arguments: argparse.Namespace) -> None:
    """Print the script."""
    options = {}
    for verb, (module, _) in VERBS.items():
        entries = importlib.import_module(f"drivetrain.experiment.cli.{module}").ARGUMENTS[verb]
        options[verb] = [name for names, _ in entries for name in names if name.startswith("-")]
    if arguments.shell == "fish":
        print("# drivetrain completion fish | source")
        for verb, (_, text) in VERBS.items():
            print(f"complete -c drivetrain -n __fish_use_subcommand -a {verb} -d {shlex.quote(text)}")
            for flag in options[verb]:
                kind, name = ("-l", flag[2:]) if flag.startswith("--") else ("-s", flag[1:])
                print(f"complete -c drivetrain -n '__fish_seen_subcommand_from {verb}' {kind} {name}")
        return
    cases = "\n".join(f'        {verb}) options="{" ".join(flags)}" ;;' for verb, flags in options.items())
    script = BASH.format(verbs=" ".join(VERBS), cases=cases)
    print(ZSH + script.partition("\n")[2] if arguments.shell == "zsh" else script, end="")
