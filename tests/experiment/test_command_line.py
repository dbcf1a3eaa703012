"""Command lines: what they mean, how help looks, and how mistakes are explained."""

import importlib.machinery
import os
import subprocess
import sys
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.core.errors import ConfigError, DrivetrainError, ParameterError
from drivetrain.experiment import experiment, group, param_group, parameter, read_run
from drivetrain.experiment.command_line import parse, program_name
from drivetrain.experiment.resolve import resolve


@experiment
def train(
    learning_rate: float = 0.1,
    n: int = 3,
    xs: list[int] | None = None,
    shuffle: bool = True,
    name: str = "x",
    batch_size: int = 8,
):
    """Train a [red]model[/red] on [x] data.

    Args:
        learning_rate: how far.
    """
    return learning_rate


def values(*argv):
    return resolve(train.parameters, parse(argv, train.parameters).given, train.defaults, {}).values


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (["--n", "5"], "n", 5),
        (["--n=5"], "n", 5),
        (["--batch-size", "2"], "batch_size", 2),
        (["--batch_size=2"], "batch_size", 2),
        (["--n", "1", "--n", "2"], "n", 2),
        (["--shuffle"], "shuffle", True),
        (["--no-shuffle"], "shuffle", False),
        (["--shuffle=false"], "shuffle", False),
        (["--no_shuffle"], "shuffle", False),
        (["--learning-rate", "-.5"], "learning_rate", -0.5),
        (["--learning-rate", "-inf"], "learning_rate", float("-inf")),
        (["--learning-rate", "-1e-3"], "learning_rate", -1e-3),
        (["--xs", "1", "-2"], "xs", [1, -2]),
        (["--xs", "1", "--xs", "2"], "xs", [1, 2]),
        (["--xs"], "xs", []),
        (["--name=-x"], "name", "-x"),
        (["--name", "-"], "name", "-"),
        (["--name="], "name", ""),
        (["--n", "1", "--"], "n", 1),
        (["--n=1e3"], "n", 1000),
        (["n=5"], "n", 5),
        (["batch-size=2"], "batch_size", 2),
        (["learning_rate=-1e-3", "--n", "1"], "learning_rate", -1e-3),
        (["--n", "1", "learning_rate=0.5"], "learning_rate", 0.5),
        (["--shuffle", "n=5"], "n", 5),
        (["shuffle=false"], "shuffle", False),
        (["xs=1,-2", "n=4"], "xs", [1, -2]),
        (["xs=1,-2", "n=4"], "n", 4),
        (["xs=[1,-2]"], "xs", [1, -2]),
        (["xs=[]"], "xs", []),
        (["--name", "n=5"], "name", "n=5"),
        (["--name=a", "n=5"], "n", 5),
        (["name=a=b"], "name", "a=b"),
    ],
)
def test_options_mean_what_they_say(argv, name, expected):
    assert values(*argv)[name] == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--n"], "--n needs a value"),
        (["--n", "--shuffle"], "--n needs a value"),
        (["--name", "-x"], "as --name=-"),
        (["--n", "2.5"], "--n: n cannot be '2.5'"),
        (["--lerning-rate", "1"], "did you mean --learning-rate"),
        (["--learn", "1"], "unknown option --learn"),
        (["--no-n"], "unknown option"),
        (["--no-shuffle=true"], "takes no value"),
        (["--shuffle", "false"], "unexpected argument 'false'"),
        (["5"], "unexpected argument '5'"),
        (["--", "5"], "unexpected argument '5'"),
        (["-n", "5"], "unexpected argument '-n'"),
        (["--help=3"], "takes no value"),
        (["--deterministic", "strikt"], "did you mean 'strict'"),
    ],
)
def test_mistakes_are_explained_and_end_with_status_2(argv, words, capsys):
    with pytest.raises(ParameterError, match=words.replace("?", r"\?")):
        train.cli(argv, exit_on_error=False)
    with pytest.raises(SystemExit) as stop:
        train.cli(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.err.startswith("Error: ") and words in printed.err
    assert "Usage: " in printed.err and not printed.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--resume", "nowhere"], "resume: nowhere is neither the folder of a run"),
        (["--resume", "nowhere", "--distributed", "--nproc-per-node", "2"], "resume: nowhere is neither the folder"),
        (["--run-name", "taken"], "already exists. Choose another --run-name"),
        (["--run-name", "taken", "--distributed"], "already exists. Choose another --run-name"),
        (["--distributed", "--node-rank", "3"], "node_rank=3 does not fit nnodes=1"),
        (["--device", "cuda:99"], "cuda"),
        (["--output-dir", "file"], "cannot create the run folder"),
    ],
)
def test_what_prevents_a_run_is_explained_like_a_mistake(tmp_path, monkeypatch, argv, words, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output" / "train" / "taken").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(DrivetrainError, match=words):
        train.cli(argv, exit_on_error=False)
    with pytest.raises(SystemExit) as stop:
        train.cli(argv)
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.startswith("Error: ") and words in printed and "Usage: " in printed


@pytest.mark.parametrize("argv", [[], ["--distributed"]])
def test_an_error_within_a_run_keeps_its_traceback(tmp_path, argv):
    with pytest.raises(DrivetrainError, match="within"):
        misled.cli(["--output-dir", str(tmp_path), *argv])


@experiment
def misled():
    raise ConfigError("within")


def test_help_fits_any_width_and_prints_brackets_as_they_are(monkeypatch, capsys):
    for width in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit) as stop:
            train.cli(["-h"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and "[red]model[/red] on [x] data" in " ".join(text.split())
        long = [line for line in text.splitlines() if len(line) > width]
        assert not long, long
    assert "how far. (default: 0.1)" in text and "Args" not in text


def test_help_lists_every_standard_parameter_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = " ".join(train.help().split())
    for name, default in {
        "checkpoint": None,
        "cuda": True,
        "distributed": False,
        "node-rank": 0,
        "nproc-per-node": 1,
        "nnodes": 1,
        "master-addr": "127.0.0.1",
        "master-port": 29500,
        "output-dir": "./output",
        "random-seed": "random 32 bits",
        "resume": "never",
        "device": "auto",
    }.items():
        assert f"(default: {default}" in text.partition(f"--{name}")[2][:230], name
    assert "--subprocess" not in text and "--local-rank" not in text


def test_groups_of_parameters_have_their_own_section():
    @param_group(
        "optimizer", "How it learns.", parameter("lr", type=float, default=0.1), parameter("momentum", type=float)
    )
    @experiment
    def function(params):
        pass

    text = function.help()
    assert "optimizer:\n  How it learns.\n  --lr FLOAT" in text
    assert [group.name for group in function.get_param_groups()] == ["optimizer"]


def test_print_params_shows_every_value_with_its_origin(capsys):
    with pytest.raises(SystemExit) as stop:
        train.cli(["--print-params", "--n", "4"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert stop.value.code == 0 and ["n", "4", "cli"] in lines and ["name", "'x'", "default"] in lines
    assert train.cli(["--print-params"], exit_on_error=False) is None


def test_a_reader_that_closes_the_pipe_ends_help_without_a_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from drivetrain.experiment import experiment\nexperiment(name='x')(lambda a=1: a).cli(['--help'])\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, str(script)], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_started_as_a_module_is_named_as_one(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "fit.py").write_text(
        "from drivetrain.experiment import experiment\nexperiment(name='x')(lambda a=1: a).cli(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-m", "tools.fit"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Usage: python -m tools.fit "), done.stderr


def test_a_tilde_that_the_shell_has_left_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given.yaml").write_text("n: 4\n")
    values = train.resolve({"output_dir": "~/runs", "params_file": "~/given.yaml", "checkpoint": "~/c"}).values
    assert (values["output_dir"], values["n"], values["checkpoint"]) == (f"{tmp_path}/runs", 4, tmp_path / "c")


def test_a_parameter_called_force_takes_the_word_over(tmp_path):
    made = experiment(_with_force)
    assert made.cli(["--output-dir", str(tmp_path), "--force"]) is True
    assert "--force, --no-force" in made.help()
    with pytest.raises(ParameterError, match="an option of the command line"):
        parameter("help")


def _with_force(force: bool = False):
    return force


def test_a_script_explains_itself_without_loading_torch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom drivetrain.experiment import experiment\n\n"
        "@experiment\ndef digits(lr: float = 0.1):\n    '''Train.'''\n\n"
        "try:\n    digits.cli()\nfinally:\n"
        "    print(sorted({'torch', 'numpy', 'pydantic', 'yaml', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]" and "Usage: python script.py" in done.stdout
    done = subprocess.run([sys.executable, str(script), "--lt", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean --lr?" in done.stderr and "Traceback" not in done.stderr


WORDS = st.one_of(
    st.sampled_from(
        [
            "--n",
            "--xs",
            "--shuffle",
            "--no-shuffle",
            "--name",
            "--",
            "-h",
            "--n=",
            "--learning-rate",
            "-.5",
            "-inf",
            "1e3",
            "-",
            "--force",
        ]
    ),
    st.text(max_size=6),
    st.from_regex(r"--[a-z_.-]{0,12}(=[^\x00]{0,5})?", fullmatch=True),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS, max_size=6))
def test_any_command_line_is_read_or_refused(argv):
    try:
        command = parse(argv, train.parameters)
        found = resolve(train.parameters, {k: v for k, v in command.given.items() if k != "params_file"}, {}, {})
    except ParameterError:
        return
    assert set(found.values) == set(train.parameters)


def test_an_override_of_an_unknown_parameter_names_the_nearest_one():
    with pytest.raises(ParameterError, match="unknown parameter 'batchsize'; did you mean --batch-size"):
        parse(["batchsize=2"], train.parameters)
    with pytest.raises(ParameterError, match="lr=0.1"):
        parse(["word"], train.parameters)


def test_a_word_after_a_flag_or_a_tuple_is_explained():
    @experiment
    def function(verbose: bool = False, size: tuple[int, int] = (1, 2), xs: list[list[list[int]]] | None = None):
        return xs

    with pytest.raises(ParameterError, match="write --verbose, --no-verbose or --verbose=false"):
        function.cli(["--verbose", "false"], exit_on_error=False)
    with pytest.raises(ParameterError, match="--size takes one value. Write several as JSON"):
        function.cli(["--size", "3", "4"], exit_on_error=False)
    with pytest.raises(ParameterError, match=r"size cannot be '3': expected tuple\[int, int\], written as JSON"):
        function.cli(["--size", "3"], exit_on_error=False)
    given = parse(["xs=[[1,2],[3]],[[4]]"], function.parameters).given
    assert given["xs"].value == ["[[1,2],[3]]", "[[4]]"]


def test_the_command_of_a_run_in_a_group_names_the_experiment(tmp_path):
    @group
    def tools():
        pass

    @tools.experiment
    def fit(x: int = 1):
        return x

    tools.cli(["fit", "--x", "2", "--output-dir", str(tmp_path), "--run-name", "a"], program="tools")
    assert read_run(tmp_path / "fit" / "a").manifest["argv"][:3] == ["tools fit", "--x", "2"]


def test_a_debugger_and_a_profiler_start_a_program_under_its_own_name(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/work/train.py"])
    del main.__spec__  # as pdb does
    assert program_name() == "python train.py"
    main.__spec__ = importlib.machinery.ModuleSpec("cProfile", None, origin="/lib/cProfile.py")
    assert program_name() == "python train.py"
    main.__spec__ = importlib.machinery.ModuleSpec("pack.train", None, origin="/work/train.py")
    assert program_name() == "python -m pack.train"
