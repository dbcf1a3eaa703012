"""`drivetrain completion`: print a script that lets a shell complete verbs and options. It runs nothing when a key is pressed."""

import argparse
import importlib

from drivetrain.experiment.cli.verbs import VERBS
from drivetrain.experiment.command_line import argument

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


def completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    options = {verb: _options(verb) for verb in VERBS}
    if arguments.shell == "fish":
        print("# drivetrain completion fish | source")
        for verb, (_, text) in VERBS.items():
            print(f"complete -c drivetrain -n __fish_use_subcommand -a {verb} -d '{text}'")
            for flag in options[verb]:
                kind, name = ("-l", flag[2:]) if flag.startswith("--") else ("-s", flag[1:])
                print(f"complete -c drivetrain -n '__fish_seen_subcommand_from {verb}' {kind} {name}")
        return 0
    cases = "\n".join(f'        {verb}) options="{" ".join(flags)}" ;;' for verb, flags in options.items())
    script = BASH.format(verbs=" ".join(VERBS), cases=cases)
    print(ZSH + script.partition("\n")[2] if arguments.shell == "zsh" else script, end="")
    return 0


def _options(verb: str) -> list[str]:
    loaded = importlib.import_module(f"drivetrain.experiment.cli.{VERBS[verb][0]}")
    return [name for entry in loaded.ARGUMENTS[verb] for name in entry.names if name.startswith("-")]
