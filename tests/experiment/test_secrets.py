"""A secret parameter appears in no file, log, table or message, and is asked for again when a run goes on."""

import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import yaml

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context
from drivetrain.core.errors import ParameterError, ResumeError, SweepError
from drivetrain.core.secret import MASK
from drivetrain.experiment import Choice, Param, Secret, Trial, experiment, find_runs, parameter, read_run, sweep
from drivetrain.experiment.reports import write_report
from drivetrain.record.recorder import Recorder

VALUE = "hunter2-9f1c"
VARIABLE = "DRIVETRAIN_SECRET_API_KEY"


@dataclass
class Login:
    user: str = "me"
    password: str = ""
    note: dict = field(default_factory=dict)


LOGIN = Login()


@experiment
def leaky(
    api_key: str | None = None,
    typed: Secret[str] | None = None,
    login: Login = LOGIN,
    fail: Annotated[bool, Param(resumable=True)] = False,
    lr: float = 0.1,
):
    """Use every way out that a value has."""
    import logging

    from drivetrain.experiment import params

    assert params["api_key"] == api_key
    logging.getLogger("mine").info("calling with %s", api_key)
    recorder = Recorder(tensorboard="auto", sinks=[Remembering()])
    recorder.params({"api_key": api_key, "login": {"password": login.password}, "typed": typed, **dict(params)})
    recorder.scalar("loss", 1.0)
    recorder.step()
    with Checkpointer(Context(x=1)) as keeper:
        keeper.save()
    if fail:
        raise ValueError(f"401 for {api_key}")
    return lr


class Remembering:
    """A sink that keeps what it is given, as a tracker would."""

    seen: list = []

    def params(self, values, step, time):
        self.seen.append(values)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    Remembering.seen = []


def assert_nowhere(folder):
    """Look through every byte of a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert VALUE.encode() not in path.read_bytes(), path


def only(place):
    (record,) = find_runs(place)
    return record


def options(place, **extra):
    given = {"output_dir": place, "api_key": VALUE, "typed": VALUE, "login": {"password": VALUE}}
    return given | extra


def test_no_file_of_a_run_holds_a_secret(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    leaky.cli(["--output-dir", str(tmp_path), "--api-key", VALUE, f"--typed={VALUE}", "--login.password", VALUE], False)
    record = only(tmp_path)
    assert_nowhere(tmp_path)
    write_report([record.folder])
    assert_nowhere(tmp_path)
    assert record.parameters["api_key"] == record.parameters["typed"] == record.parameters["login.password"] == MASK
    assert record.parameters["login.user"] == "me" and record.parameters["lr"] == 0.1
    assert MASK in record.manifest["argv"] and MASK in (record.folder / "log.txt").read_text()
    assert VALUE not in str(Remembering.seen) and Remembering.seen[0]["api_key"] == MASK
    out, err = capsys.readouterr()
    assert VALUE not in out + err


def test_the_command_of_a_program_is_masked_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", VALUE, "--lr", "1", f"url?{VALUE}"])
    leaky.run(options(tmp_path))
    assert only(tmp_path).manifest["argv"] == ["train.py", "--hf-token", MASK, "--lr", "1", f"url?{MASK}"]


def test_an_error_that_holds_a_secret_is_recorded_without_it(tmp_path):
    with pytest.raises(ValueError, match="401"):
        leaky.run(options(tmp_path, fail=True))
    assert only(tmp_path).status["error"] == f"ValueError: 401 for {MASK}"
    assert_nowhere(tmp_path)


def test_files_and_folder_of_a_run_are_private(tmp_path):
    before = os.umask(0o002)
    try:
        leaky.run(options(tmp_path / "o"))
    finally:
        os.umask(before)
    folder = only(tmp_path / "o").folder
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("parameters.yaml", "manifest.json", ".")}
    assert modes == {"parameters.yaml": 0o600, "manifest.json": 0o600, ".": 0o700}
    assert stat.S_IMODE((folder / "log.txt").stat().st_mode) == 0o600


def test_parameters_can_be_printed(capsys):
    leaky.cli(["--api-key", VALUE, "--print-params"], exit_on_error=False)
    out, _ = capsys.readouterr()
    assert MASK in out and VALUE not in out and "0.1" in out


def test_help_names_the_variable_and_hides_a_default(capsys):
    @experiment
    def guarded(password: str = VALUE):
        pass

    text = guarded.help()
    assert VALUE not in text and "DRIVETRAIN_SECRET_PASSWORD" in text


@pytest.mark.parametrize("name", ["api_key", "typed"])
def test_a_resumed_run_asks_for_its_secret_by_name(tmp_path, name, monkeypatch):
    with pytest.raises(ValueError, match="401"):
        leaky.run(options(tmp_path, fail=True))
    folder = only(tmp_path).folder
    known = {"api_key": "renewed", "typed": "renewed", "login.password": "renewed"}
    given = {key: value for key, value in known.items() if key != name}
    variable = f"DRIVETRAIN_SECRET_{name.upper()}"
    with pytest.raises(ResumeError, match=rf"{name} is masked.*{variable}"):
        leaky.resume(folder, given | {"fail": False})
    monkeypatch.setenv(variable, "renewed")
    assert leaky.resume(folder, given | {"fail": False}) == 0.1
    assert only(tmp_path).origins["api_key"] == "run"


def test_a_file_of_parameters_is_fed_back_with_the_secret_from_elsewhere(tmp_path, monkeypatch):
    leaky.run(options(tmp_path / "a", typed=None, login={}, lr=0.5))
    file = only(tmp_path / "a").folder / "parameters.yaml"
    with pytest.raises(
        ParameterError, match=rf"parameters.yaml:\d+: the value of api_key is masked.*--api-key.*{VARIABLE}"
    ):
        leaky.run(params_file=file, output_dir=tmp_path / "b")
    monkeypatch.setenv(VARIABLE, VALUE)
    assert leaky.run(params_file=file, output_dir=tmp_path / "b") == 0.5
    assert only(tmp_path / "b").origins["api_key"] == f"env:{VARIABLE}"
    assert_nowhere(tmp_path)


def test_a_secret_that_is_in_the_code_needs_not_be_given_again(tmp_path):
    @experiment
    def coded(password: str = VALUE):
        return password

    coded.run(output_dir=tmp_path)
    file = only(tmp_path).folder / "parameters.yaml"
    assert yaml.safe_load(file.read_text())["password"] is None
    assert coded.resolve({"params_file": file}).values["password"] == VALUE


def test_another_key_is_no_other_run(tmp_path):
    with pytest.raises(ValueError, match="401"):
        leaky.run(options(tmp_path, fail=True))
    again = options(tmp_path, resume="auto", api_key="renewed-key", fail=False)
    assert leaky.run(again) == 0.1 and only(tmp_path).state == "finished"


def test_types_and_marks_decide_what_is_a_secret():
    @experiment
    @parameter("token_file", type=Path)
    @parameter("plain_key", secret=False)
    @parameter("greeting", secret=True)
    def declared(
        token: int = 3,
        key: bool = False,
        password: Path = Path("p"),
        hidden: Secret[int] = Secret(5),  # noqa: B008
        key_words: list[str] = ["a"],  # noqa: B006
        session_token: str | None = None,
        pad_token: str = "<pad>",
        sort_by_key: Annotated[str, Param(secret=False)] = "name",
    ):
        return hidden

    assert declared.parameters.secrets == {"greeting", "hidden", "session_token"}
    resolved = declared.resolve({"hidden": "7"})
    assert resolved.values["hidden"] == Secret(7) and declared.resolve({}).values["hidden"] == Secret(5)
    with pytest.raises(ParameterError) as caught:
        declared.resolve({"hidden": VALUE})
    assert VALUE not in str(caught.value) and MASK in str(caught.value)


def test_text_that_looks_like_a_mask_is_an_ordinary_value_elsewhere():
    @experiment
    def starred(pattern: str = "", config: dict = {}, plain_key: Annotated[str, Param(secret=False)] = ""):  # noqa: B006
        pass

    assert starred.resolve({"pattern": MASK, "plain_key": MASK}).values["pattern"] == MASK
    with pytest.raises(ParameterError, match="config is masked"):
        starred.resolve({"config": {"api_key": MASK}})


def test_objects_that_hold_values_do_not_print_them():
    resolved = leaky.resolve({"api_key": VALUE})
    trial = Trial(0, {"api_key": VALUE, "lr": 0.1})
    assert VALUE not in repr(resolved) and VALUE not in repr(trial) and "0.1" in repr(trial)


def test_pydantic_secrets_are_secrets():
    pydantic = pytest.importorskip("pydantic")

    @experiment
    def typed(login: pydantic.SecretStr):
        pass

    resolved = typed.resolve({"login": VALUE})
    assert typed.parameters.secrets == {"login"} and resolved.hidden() == {VALUE} and resolved.shown()["login"] == MASK


def test_a_stray_value_after_a_secret_option_is_not_repeated():
    with pytest.raises(ParameterError) as caught:
        leaky.cli(["--api-key", "first", VALUE], exit_on_error=False)
    assert VALUE not in str(caught.value)


def test_tables_files_and_errors_of_a_sweep_hold_no_secret(tmp_path):
    points = [{"api_key": VALUE, "lr": 0.1, "fail": True}, {"api_key": VALUE + "x", "lr": 0.2, "fail": True}]
    params = {"typed": VALUE, "output_dir": str(tmp_path)}
    with pytest.raises(SweepError) as caught:
        sweep(leaky, points, params=params)
    result = caught.value.result
    result.to_csv(tmp_path / "table.csv")
    assert_nowhere(tmp_path)
    for text in (str(caught.value), result.table(), str(result.rows()), repr(result), repr(list(result))):
        assert VALUE not in text
    assert stat.S_IMODE(result.folder.stat().st_mode) == 0o700
    entries = [json.loads(line) for line in (result.folder / "sweep.jsonl").read_text().splitlines()]
    assert entries[0]["params"]["typed"] == MASK and entries[1]["params"]["api_key"] == MASK


NOBODY = Secret("nobody")


@dataclass
class Service:
    login: Secret[str] = NOBODY
    url: str = ""


@experiment
def served(service: Service, api_key: str | None = None, x: int = 0):
    return service.login.reveal() != "nobody" or api_key is not None


@pytest.mark.parametrize(
    ("space", "fixed"),
    [
        ({"api-key": [VALUE]}, {}),
        ([{"api-key": VALUE}], {}),
        ({"x": [1]}, {"api-key": VALUE}),
        ({"x": [1]}, {"service": {"login": VALUE}}),
        ([{"service": {"login": VALUE, "url": "u"}}], {}),
        ({"service": Choice({"login": VALUE}, {"login": VALUE})}, {}),
    ],
)
def test_a_secret_of_a_sweep_is_masked_however_it_is_written(tmp_path, space, fixed):
    result = sweep(served, space, params={"output_dir": str(tmp_path), **fixed})
    result.to_csv(tmp_path / "table.csv")
    assert result.table() and VALUE not in result.table()
    assert_nowhere(tmp_path)
    assert all(read_run(trial.run_dir).result is True for trial in result)
