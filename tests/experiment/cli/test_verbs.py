"""The command as a whole: help, unknown words, exit statuses."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from drivetrain.experiment.cli.verbs import VERBS
from tests.experiment.folders import make_run

WITHOUT_TORCH = """
import sys
from drivetrain.__main__ import main
try:
    main({words!r})
except SystemExit as stop:
    assert stop.code == 0, stop.code
loaded = {{"torch", "numpy", "rich"}} & set(sys.modules)
assert not loaded, loaded
"""


def test_help_lists_every_verb_without_torch():
    done = subprocess.run([sys.executable, "-m", "drivetrain", "--help"], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in VERBS)
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH.format(words=["--help"])], check=True)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_needs_no_torch(verb):
    assert VERBS[verb][1]
    code = WITHOUT_TORCH.format(words=[verb, "--help"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: drivetrain {verb}")


LOOKING_WITHOUT_TORCH = """
import sys
from drivetrain.__main__ import main
for words in {commands!r}:
    assert main(words) == 0, words
    assert "torch" not in sys.modules, words
"""


def test_looking_at_runs_needs_no_torch(tmp_path):
    import torch

    from drivetrain.checkpoint.store import save_checkpoint

    runs = [make_run(tmp_path, name) for name in ("one", "two")]
    save_checkpoint({"weight": torch.ones(3)}, 1, path=runs[0] / "checkpoints")
    names = [str(folder) for folder in runs]
    commands = [["ls", str(tmp_path)], ["show", names[0]], ["compare", *names]]
    code = LOOKING_WITHOUT_TORCH.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-1" in done.stdout


def test_sweep_help_names_every_executor(command):
    _, out, _ = command("sweep", "--help")
    assert "inline, pool, submitit or ray" in " ".join(out.split())


def test_an_unknown_verb_is_named_with_the_nearest_one(command):
    status, _, err = command("shwo", "x")
    assert status == 2 and "Did you mean 'show'?" in err


def test_an_unknown_option_is_named_with_the_nearest_one(command):
    status, _, err = command("ls", "--statsu", "failed")
    assert status == 2 and "did you mean --status?" in err


def test_options_are_not_abbreviated(command):
    status, _, _ = command("ls", "--stat", "failed")
    assert status == 2


def test_no_verb_is_bad_input_and_lists_the_verbs(command):
    status, out, _ = command()
    assert status == 2 and re.search(r"compare +show how runs differ", out)


def test_a_second_run_where_one_is_expected_is_named_as_that(command):
    assert "b is one argument too many" in command("show", "a", "b")[2]


def test_version_is_printed(command):
    import drivetrain

    status, out, _ = command("--version")
    assert status == 0 and drivetrain.__version__ in out


def test_words_may_come_after_options(command, command_json, tmp_path):
    for number in range(4):
        make_run(tmp_path, f"run-{number}", lr=0.1 * (number + 1))
    found = command_json("ls", tmp_path, "-n", "2", "lr<0.35", "--json", "and", "lr>0.15", "--sort", "lr")
    assert [run["id"] for run in found] == ["run-1", "run-2"]
    pair = [tmp_path / "digits" / name for name in ("run-0", "run-1")]
    assert command_json("compare", pair[0], "--json", pair[1])["ids"] == ["run-0", "run-1"]
    status, _, err = command("ls", tmp_path, "--nope", "lr<1")
    assert status == 2 and "--nope is not a known argument" in err
    assert command("show", pair[0], "--json", "more")[0] == 2  # takes one run


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "ascii:surrogateescape"])
def test_a_terminal_that_lacks_our_characters_gets_others(encoding, tmp_path):
    folder = make_run(tmp_path, state="failed")
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"}
    encoding = encoding.partition(":")[0]  # the locale C keeps bytes of file names that it cannot read
    command = [sys.executable, "-m", "drivetrain"]
    for words in (["doctor", str(folder)], ["ls", str(tmp_path)], ["show", str(folder)]):
        done = subprocess.run([*command, *words], capture_output=True, env=environment, check=False)
        assert b"Error" not in done.stderr, done.stderr.decode()
        assert done.stdout.decode(encoding)
    assert (
        b"\n+ status.json: readable"
        in subprocess.run([*command, "doctor", str(folder)], capture_output=True, env=environment, check=False).stdout
    )


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["--help"]])
def test_a_closed_pipe_ends_the_command_quietly(words, tmp_path):
    make_run(tmp_path)
    words = [*words, str(tmp_path)] if words[0] == "ls" else words
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *words], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb_and_option(command, shell):
    status, out, _ = command("completion", shell)
    assert status == 0 and all(verb in out for verb in VERBS)
    assert ("--resume-check" in out) or ("-l resume-check" in out)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


def test_help_texts_with_an_apostrophe_stay_one_word_for_fish(command):
    descriptions = [shlex.split(line)[-1] for line in command("completion", "fish")[1].splitlines() if " -d " in line]
    assert descriptions == [text for _, text in VERBS.values()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"), [("drivetrain com", "compare completion"), ("drivetrain ls --rev", "--reverse")]
)
def test_bash_completes_verbs_and_options(command, words, found):
    script = command("completion", "bash")[1]
    script += f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _drivetrain; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found


def test_a_parameter_given_to_a_sweep_as_an_option_is_answered_with_its_form(command):
    status, _, err = command("sweep", "x.py", "lr=1,2", "--output-dir", "o")
    assert status == 2 and "--output-dir is not a known argument. A parameter" in err and "output_dir=VALUE" in err
