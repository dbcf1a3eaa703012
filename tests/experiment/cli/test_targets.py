"""Finding experiments by file, attribute and module."""

import sys

import pytest

from drivetrain.core.errors import DrivetrainError, ExperimentError
from drivetrain.experiment.cli.targets import find_experiment, find_target


def test_a_file_with_one_experiment_needs_no_name(program):
    assert find_target(str(program("SMALL"))).name == "small"


def test_a_name_is_an_attribute_or_an_experiments_name(program):
    path = program("SEVERAL")
    assert find_target(f"{path}:first").name == "first"
    assert find_target(f"{path}:my_second") is find_target(f"{path}:my-second")


def test_several_experiments_without_a_name_are_listed(program):
    path = program("SEVERAL")
    with pytest.raises(ExperimentError, match=r"several experiments: first, my_second, family.*:first"):
        find_target(str(path))


def test_a_plain_script_is_rejected_before_it_runs(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text('"""Not an experiment."""\nopen(__file__ + ".ran", "w").close()  # trains\n')
    with pytest.raises(ExperimentError, match=r"so it was not run.*python .*plain\.py"):
        find_target(str(script))
    assert not (tmp_path / "plain.py.ran").exists()


def test_a_group_takes_the_experiment_from_the_next_word(program):
    path = program("SEVERAL")
    found, rest = find_experiment(f"{path}:family", ["member", "--y", "4"])
    assert found.name == "member" and rest == ["--y", "4"]
    with pytest.raises(DrivetrainError, match="did you mean 'member'"):
        find_experiment(f"{path}:family", ["membr"])


def test_a_module_is_found_by_name(program, tmp_path, monkeypatch):
    path = program("SMALL")
    monkeypatch.chdir(tmp_path)
    assert find_target(f"{path.stem}:small").name == "small"


def test_a_file_in_a_package_is_imported_under_its_full_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "target_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text("from drivetrain.experiment import experiment\n\n@experiment\ndef job(): ...\n")
    found = find_target(str(package / "work.py"))
    assert found.main_function.__module__ == "target_package.work" and str(package) not in sys.path


def test_a_file_named_like_a_loaded_module_is_still_loaded(tmp_path):
    (tmp_path / "json.py").write_text("from drivetrain.experiment import experiment\n\n@experiment\ndef job(): ...\n")
    import json

    found = find_target(str(tmp_path / "json.py"))
    assert found.name == "job" and sys.modules["json"] is json
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py", "there is no file nowhere.py"),
        ("no_such_module:x", "there is no module 'no_such_module'"),
        ("json:lods", "Did you mean 'loads'"),
    ],
)
def test_what_is_not_there_is_named(target, message):
    with pytest.raises(ExperimentError, match=message):
        find_target(target)


def test_something_that_is_no_experiment_is_refused():
    with pytest.raises(ExperimentError, match="is a function, not an experiment"):
        find_experiment("json:dumps", [])


def test_a_program_that_starts_its_experiment_while_it_is_imported_is_told_what_to_write(tmp_path, monkeypatch):
    for number, call in enumerate(("fit.cli()", "fit.run(lr=2.0)", "tools.cli()")):
        file = tmp_path / f"unguarded_{number}.py"
        file.write_text(
            "from drivetrain.experiment import experiment, group\n\n@group\ndef tools(params): ...\n\n"
            f"@experiment\ndef fit(lr: float = 1.0):\n    raise AssertionError('it ran')\n\n{call}\n"
        )
        with pytest.raises(ExperimentError, match="while it is imported. Put that call under `if __name__"):
            find_target(f"{file}:fit")
