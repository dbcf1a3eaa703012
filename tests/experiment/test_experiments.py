"""Declaring experiments and groups, as pystematic's users do it."""

import pytest

import drivetrain.experiment as pystematic
from drivetrain.core.errors import DrivetrainError, ParameterError
from drivetrain.experiment.plugins import App


def test_an_experiment_is_named_after_its_function():
    @pystematic.experiment
    def My_Experiment(params):
        pass

    @pystematic.experiment(name="other")
    def function(params):
        pass

    assert My_Experiment.name == "my-experiment" and function.name == "other"
    assert isinstance(function, pystematic.core.Experiment) and function.main_function.__name__ == "function"


def test_the_package_itself_is_the_decorator(tmp_path):
    @pystematic
    def function(x: int = 1):
        return x

    @pystematic(name="second")
    def other(x: int = 1):
        return x

    assert function(output_dir=str(tmp_path), x=2) == 2 and other.name == "second"


def test_parameters_may_stand_above_and_below(tmp_path):
    @pystematic.parameter(name="above", type=int, default=1)
    @pystematic.experiment
    @pystematic.parameter(name="below", type=int, default=2)
    def function(params):
        return params["above"], params["below"]

    assert function.run({"output_dir": str(tmp_path), "above": 5}) == (5, 2)
    assert [p.name for p in function.get_parameters()][-2:] == ["below", "above"]


def test_names_and_flags_that_clash_are_errors_at_declaration():
    for name in ("cuda", "no_cuda", "random_seed"):
        with pytest.raises(pystematic.core.Error, match="already"):

            @pystematic.parameter(name=name)
            @pystematic.experiment
            def function(params):
                pass

    with pytest.raises(DrivetrainError, match="'opt' is a parameter too|'opt.lr'"):

        @pystematic.parameter(name="opt")
        @pystematic.parameter(name="opt.lr")
        @pystematic.experiment
        def other(params):
            pass

    with pytest.raises(DrivetrainError, match="cannot have multiple"):
        pystematic.parameter("x", is_flag=True, multiple=True)
    with pytest.raises(DrivetrainError, match="expected a Python name"):
        pystematic.parameter("not-a-name")


def test_parameters_are_inherited_from_experiments_groups_functions_and_lists():
    @pystematic.parameter(name="a", type=int, default=1)
    @pystematic.experiment
    def first(params):
        pass

    @pystematic.param_group(
        "more", pystematic.parameter("b", default="x"), pystematic.parameter("a", type=int, default=1)
    )
    def base():
        pass

    @pystematic.experiment(inherit_params=[first, base], defaults={"a": 3})
    def second(params):
        pass

    assert second.resolve({}).values["a"] == 3 and second.resolve({}).values["b"] == "x"
    with pytest.raises(pystematic.core.Error, match="inherit_params"):
        pystematic.experiment(inherit_params="first")(lambda params: None)


def make_tree():
    @pystematic.parameter(name="size", type=int, default=1)
    @pystematic.group
    def tools():
        """Many tools."""
        raise AssertionError("a group is never called")

    @tools.experiment
    def hammer(params):
        """Hit it."""
        return "hammer", params["size"]

    @tools.experiment(name="drill", inherit_params_from_group=False, defaults={"debug": True})
    def any_name(params):
        return "drill", "size" in params, params["debug"]

    @tools.group
    def fine():
        pass

    @fine.experiment
    @pystematic.parameter(name="depth", default="low")
    def file(params):
        return "file", params["size"], params["depth"]

    return tools


def test_a_group_runs_what_its_first_word_names(tmp_path, capsys):
    tools = make_tree()
    place = ["--output-dir", str(tmp_path)]
    assert tools.cli(["hammer", "--size", "3", *place]) == ("hammer", 3)
    assert tools.cli(["drill", *place]) == ("drill", False, True)
    assert tools.cli(["fine", "file", "--depth", "high", *place]) == ("file", 1, "high")
    assert [entry.name for entry in tools.experiments] == ["hammer", "drill", "fine"]
    assert (tmp_path / "file").is_dir()
    with pytest.raises(SystemExit) as stop:
        tools.cli(["hamer"])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert "did you mean 'hammer'" in printed and "  fine\n    file" in printed and "Hit it." in printed
    for argv in ([], ["--size", "3"]):
        with pytest.raises(ParameterError, match="names the experiment"):
            tools.cli(argv, exit_on_error=False)
    with pytest.raises(SystemExit) as stop:
        tools.cli(["--help"])
    assert stop.value.code == 0 and "Many tools." in capsys.readouterr().out
    with pytest.raises(pystematic.core.Error, match="already"):
        tools.experiment(name="drill")(lambda params: None)


def test_what_is_no_function_or_no_parameter_is_refused():
    with pytest.raises(ParameterError, match="needs a function"):
        pystematic.experiment("name")("not a function")
    with pytest.raises(ParameterError, match="is not a parameter"):
        pystematic.param_group("name", "help", "not a parameter")
    with pytest.raises(ParameterError, match="also name a folder"):
        pystematic.experiment(name="../x")(lambda params: None)


def test_every_public_name_resolves():
    for name in pystematic.__dir__():
        assert getattr(pystematic, name) is not None or name.startswith("__")
    with pytest.raises(AttributeError, match="Did you mean 'param_matrix'"):
        pystematic.parm_matrix


class EntryPoint:
    def __init__(self, name, function):
        self.name, self.value, self._function = name, f"pkg:{name}", function

    def load(self):
        return self._function


def test_a_plugin_that_fails_is_named_and_the_others_are_loaded(monkeypatch, caplog):
    seen = []

    def bad(app):
        raise RuntimeError("no licence")

    found = [EntryPoint("bad", bad), EntryPoint("good", lambda app: seen.append(app))]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == "drivetrain.plugins" else [])
    app = App()
    app.load_all_plugins()
    app.load_all_plugins()
    assert seen == [app] and "'bad'" in caplog.text and "no licence" in caplog.text


def test_callbacks_are_called_in_order_of_priority_and_may_replace_the_experiment():
    app, seen = App(), []
    app.on_experiment_created(lambda experiment: seen.append("late"), priority=90)
    app.on_experiment_created(lambda experiment: seen.append("early") or "other", priority=10)
    assert app.experiment_created("experiment") == "other" and seen == ["early", "late"]
    assert app.get_api_object() is pystematic


def test_a_parameter_inherited_twice_must_be_the_same():
    first = pystematic.experiment(pystematic.parameter("x", type=int, default=1)(lambda params: None))
    same = pystematic.experiment(
        pystematic.parameter("x", type=int, default=1, help="other words")(lambda params: None)
    )
    other = pystematic.experiment(pystematic.parameter("x", type=float, default=2)(lambda params: None))

    made = pystematic.experiment(inherit_params=[first, same])(lambda params: None)
    assert made.parameters["x"].default == 1
    with pytest.raises(
        pystematic.core.Error, match=r"'x' is inherited twice, with different type, default: .*default=1 and 2"
    ):
        pystematic.experiment(inherit_params=[first, other])(lambda params: None)


def test_a_parameter_inherited_twice_inside_groups_of_parameters_must_be_the_same():
    def source(title, default):
        @pystematic.param_group(title, pystematic.parameter("x", type=int, default=default))
        @pystematic.experiment
        def made(params): ...

        return made

    accepted = pystematic.experiment(inherit_params=[source("a", 1), source("b", 1)])(lambda params: None)
    assert accepted.parameters["x"].default == 1
    with pytest.raises(pystematic.core.Error, match="'x' is inherited twice"):
        pystematic.experiment(inherit_params=[source("a", 1), source("b", 2)])(lambda params: None)


def test_standard_parameters_with_another_default_are_not_a_clash():
    @pystematic.experiment
    def seeded(random_seed: int = 3): ...

    made = pystematic.experiment(inherit_params=seeded)(lambda params: None)
    assert made.parameters["random_seed"].default != 3
