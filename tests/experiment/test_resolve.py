"""Where values come from, and which source wins."""

import itertools

import pytest

from drivetrain.core.errors import ParameterError
from drivetrain.experiment import experiment, parameter
from drivetrain.experiment.command_line import parse
from drivetrain.experiment.resolve import Given, given_in_python, resolve


@parameter(name="lr", type=float, default=0.1, envvar="TEST_LR")
@parameter(name="names", multiple=True, envvar="TEST_NAMES")
@parameter(name="size", type=int, default=8)
@experiment(defaults={"size": 16})
def train(params):
    return params


def test_explicit_then_file_then_environment_then_defaults_then_default(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("# first\nlr: 0.2\n")
    env = {"TEST_LR": "0.3"}
    for explicit, environment, value, origin in [
        ({"lr": 0.5, "params_file": file}, env, 0.5, "run"),
        ({"params_file": file}, env, 0.2, "p.yaml:2"),
        ({}, env, 0.3, "env:TEST_LR"),
        ({}, {}, 0.1, "default"),
    ]:
        found = resolve(train.parameters, given_in_python(explicit, train.parameters), train.defaults, environment)
        assert (found.values["lr"], found.origins["lr"]) == (value, origin)
        assert (found.values["size"], found.origins["size"]) == (16, "defaults")


def test_command_line_and_python_follow_the_same_rule(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("lr: 0.2\nsize: 4\n")
    words = [["--lr", "0.7"], ["--params-file", str(file)]]
    for order in itertools.permutations(words):
        command = parse([word for pair in order for word in pair], train.parameters)
        found = resolve(train.parameters, command.given, train.defaults, {})
        assert (found.values["lr"], found.values["size"]) == (0.7, 4)
        assert (found.origins["lr"], found.origins["size"]) == ("cli", "p.yaml:2")
    for keys in itertools.permutations({"lr": 0.7, "params_file": str(file)}.items()):
        found = train.resolve(dict(keys))
        assert (found.values["lr"], found.values["size"]) == (0.7, 4)


def test_later_files_win_per_key(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 0.2\nsize: 4\n")
    (tmp_path / "b.json").write_text('{"lr": 0.9}')
    line = ["--params-file", str(tmp_path / "a.yaml"), "--params-file", str(tmp_path / "b.json")]
    found = resolve(train.parameters, parse(line, train.parameters).given, {}, {})
    assert (found.values["lr"], found.values["size"], found.origins["lr"]) == (0.9, 4, "b.json:1")
    assert len(found.values["params_file"]) == 2


def test_the_environment_is_read_only_where_it_is_declared(monkeypatch):
    @parameter(name="home", default="here", envvar=False)
    @parameter(name="path", default="there", envvar=None)
    @experiment
    def function(params):
        pass

    for name in ("HOME", "PATH", "DEBUG", "CUDA", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1") if name != "LOCAL_RANK" else monkeypatch.setenv(name, "0")
    found = function.resolve({})
    values = [found.values[name] for name in ("home", "path", "debug", "cuda", "local_rank")]
    assert values == ["here", "there", False, True, 0]
    assert {found.origins[name] for name in ("home", "path", "debug", "cuda", "local_rank")} == {"default"}


def test_environment_values_are_split_only_for_lists():
    @parameter(name="text", envvar="TEST_TEXT")
    @parameter(name="items", envvar="TEST_ITEMS", multiple=True)
    @experiment
    def function(params):
        pass

    env = {"TEST_TEXT": "a:b,c d", "TEST_ITEMS": "a:b,c 'd e'"}
    found = resolve(function.parameters, {}, {}, env)
    assert found.values["text"] == "a:b,c d" and found.values["items"] == ["a:b", "c", "d e"]
    with pytest.raises(ParameterError, match="env:TEST_ITEMS"):
        resolve(function.parameters, {}, {}, {"TEST_ITEMS": "'open"})


def test_launch_parameters_declare_their_variables():
    env = {"NODE_RANK": "1", "NPROC_PER_NODE": "auto", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    found = resolve(train.parameters, {}, {}, env)
    assert [found.values[name.lower()] for name in env] == [1, "auto", 2, "a", 1234]


def test_none_means_not_given():
    assert train.resolve({"lr": None}).values["lr"] == 0.1
    assert train.resolve({"names": None}).values["names"] is None


def test_callable_defaults_are_called_once_per_run():
    calls = iter(range(10))

    @parameter(name="n", type=int, default=lambda: next(calls))
    @experiment
    def function(params):
        pass

    assert [function.resolve({}).values["n"] for _ in range(3)] == [0, 1, 2]


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ParameterError, match="unknown parameter 'sise'. Did you mean 'size'"):
        train.resolve({"sise": 3})
    with pytest.raises(ParameterError, match="Did you mean 'size'"):
        experiment(defaults={"siz": 1})(lambda size=3: None).resolve({})
    with pytest.raises(ParameterError, match="defaults: size cannot be 'x'"):
        experiment(defaults={"size": "x"})(lambda size=3: None)


def test_a_behaviour_sees_given_values_only():
    seen = []

    class Watch:
        def on_value(self, parameter, value, values):
            seen.append((parameter.name, value))
            values["lr"] = 9.0

    @parameter(name="lr", type=float, default=0.1)
    @parameter(name="preset", behaviour=Watch())
    @experiment
    def function(params):
        pass

    assert function.resolve({}).values["lr"] == 0.1 and not seen
    assert function.resolve({"preset": "big"}).values["lr"] == 9.0 and seen == [("preset", "big")]


def test_a_name_given_twice_in_two_spellings_is_refused():
    with pytest.raises(ParameterError, match="random_seed is given twice"):
        train.resolve({"random-seed": 1, "random_seed": 2})
    assert resolve(train.parameters, {"lr": Given("2", "cli", True)}, {}, {}).values["lr"] == 2.0
