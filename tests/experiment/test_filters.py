"""Conditions on runs."""

import pytest

from drivetrain.core.errors import ParameterError
from drivetrain.experiment.cli.listing import check_names, read_condition

RUN = {"lr": 0.05, "state": "finished", "tag": ["base", "long run"], "amp": True, "note": None, "eval/acc": 0.9, "n": 3}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("lr<0.1 and state=finished", True),
        ("lr < 0.1 and state = failed", False),
        ("lr>0.1 or state=finished", True),
        ("state=failed and lr>0.1 or n=3", True),  # and binds first
        ("state=failed and (lr>0.1 or n=3)", False),
        ("lr<=5e-2", True),
        ("lr!=0.05", False),
        ("n==3", True),
        ("n=3.0", True),
        ("state!=failed", True),
        ("state~fin", True),
        ("tag=base", True),
        ("tag='long run'", True),
        ('tag!="long run"', False),
        ("tag=other", False),
        ("amp=true", True),
        ("amp=True", True),
        ("note=none", True),
        ("note<3", False),
        ("eval/acc>=0.9", True),
        ("missing=1", False),
        ("missing!=1", True),
        ("state<5", False),
    ],
)
def test_conditions_hold_as_written(text, holds):
    assert read_condition(text)[0](RUN) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lr",
        "lr<",
        "<1",
        "lr<1 and",
        "(lr<1",
        "lr<1)",
        "lr<1 state=x",
        "lr ! 1",
        "and",
        "'",
        "x" * 3000,
        "lr<1 and or",
    ],
)
def test_what_is_not_a_condition_is_an_error(text):
    with pytest.raises(ParameterError):
        read_condition(text)


def test_a_name_that_no_run_has_is_an_error_with_the_nearest_one():
    with pytest.raises(ParameterError, match="lr"):
        check_names({"lrr"}, [RUN])
    check_names({"lr"}, [RUN])


@pytest.mark.parametrize("text", ["(" * 1900, "(" * 60 + "lr=1" + ")" * 60])
def test_a_condition_of_brackets_is_an_error_of_its_own(text):
    with pytest.raises(ParameterError, match="opening brackets"):
        read_condition(text)
