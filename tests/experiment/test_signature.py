"""Functions whose signature declares the parameters."""

from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from drivetrain.core.errors import DrivetrainError, ParameterError
from drivetrain.experiment import Param, experiment, parameter


@dataclass(frozen=True)
class Schedule:
    warmup: int = 0
    steps: list[int] = field(default_factory=lambda: [10, 20])


@dataclass(frozen=True)
class Optimizer:
    """How it learns.

    Args:
        lr: step size.
    """

    lr: float
    name: str = "sgd"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError("lr must not be negative")


def called_with(function, tmp_path, params=None, **values):
    """Run an experiment and return what its function was called with."""
    return experiment(function).run({"output_dir": str(tmp_path), **(params or {})}, **values)


@pytest.mark.parametrize("annotation", [None, dict, dict[str, Any], "dict"])
def test_one_plain_argument_receives_the_dict(tmp_path, annotation):
    def function(anything):
        return anything

    if annotation is not None:
        function.__annotations__["anything"] = annotation
    values = called_with(function, tmp_path)
    assert values["nnodes"] == 1 and values["output_dir"] == str(tmp_path)


def test_annotations_and_defaults_give_types(tmp_path):
    def function(
        a: int, b=0.5, *, c: list[int], d: tuple[float, ...] = (1.0,), e: bool = True, f: Path | None = None, g="x"
    ):
        return a, b, c, d, e, f, g

    made = experiment(function)
    values = made.run(output_dir=str(tmp_path), a="3", c=[1, 2.0])
    assert values == (3, 0.5, [1, 2], (1.0,), True, None, "x")
    by_hand = made.cli(
        ["--output-dir", str(tmp_path), "--a", "1", "--c", "4", "5", "--d", "2", "--no-e", "--f", "p", "--b", "1"]
    )
    assert by_hand == (1, 1.0, [4, 5], (2.0,), False, Path("p"), "x")
    with pytest.raises(ParameterError, match="'a' is required"):
        made.run(c=[1])


def test_dataclasses_become_dotted_names_and_are_built_again(tmp_path):
    def function(opt: Optimizer, other: Schedule | None = None):
        return opt, other

    made = experiment(function)
    names = [p.name for p in made.get_parameters()]
    own = ["opt.lr", "opt.name", "opt.schedule.warmup", "opt.schedule.steps", "other.warmup", "other.steps"]
    assert names[-6:] == own
    folder = {"output_dir": str(tmp_path)}
    assert made.run(folder, opt={"lr": 1, "schedule": {"warmup": 3}}) == (Optimizer(1.0, schedule=Schedule(3)), None)
    assert made.run({**folder, "opt.lr": 2, "other.warmup": 1}) == (Optimizer(2.0), Schedule(1))
    assert made.run(folder, opt=Optimizer(0.5, "adam")) == (Optimizer(0.5, "adam"), None)
    line = ["--output-dir", str(tmp_path), "--opt.lr", "3", "--opt.schedule.steps", "1", "2"]
    assert made.cli(line) == (Optimizer(3.0, schedule=Schedule(0, [1, 2])), None)
    with pytest.raises(ParameterError, match=r"'opt.lr' is required"):
        made.run(folder)
    with pytest.raises(ParameterError, match="lr must not be negative"):
        made.run({**folder, "opt.lr": -1})
    assert made.parameters["opt.lr"].help == "step size."


def test_a_dataclass_default_gives_the_defaults_of_its_fields(tmp_path):
    def function(opt: Optimizer = Optimizer(0.3, "adam")):
        return opt

    assert called_with(function, tmp_path) == Optimizer(0.3, "adam")


def test_annotated_adds_help_and_resumability():
    @experiment
    def function(epochs: Annotated[int, Param(help="passes", resumable=True)] = 3):
        pass

    assert function.parameters["epochs"].help == "passes" and function.parameters["epochs"].resumable


def test_help_comes_from_the_docstring():
    @experiment
    def google(lr: float = 0.1, size: int = 3):
        """Train.

        Args:
            lr (float): how far a step
                goes.
            size: of a batch.

        Returns:
            something.
        """

    @experiment
    def sphinx(lr: float = 0.1):
        """Train.

        :param lr: how far.
        :returns: something.
        """

    assert google.parameters["lr"].help == "how far a step goes." and google.parameters["size"].help == "of a batch."
    assert sphinx.parameters["lr"].help == "how far."
    assert "something" not in google.help() and "Train." in sphinx.help()


def test_a_standard_name_receives_that_parameter_and_sets_its_default(tmp_path):
    @experiment
    def function(random_seed=7, cuda=False, local_rank=0):
        return random_seed, cuda, local_rank

    assert function.run(output_dir=str(tmp_path)) == (7, False, 0)
    assert function.run(output_dir=str(tmp_path), random_seed=8) == (8, False, 0)
    assert [p.name for p in function.get_parameters()].count("cuda") == 1


def test_keyword_arguments_receive_the_rest(tmp_path):
    def function(a: int = 1, **rest):
        return a, rest

    a, rest = called_with(function, tmp_path, a=2)
    assert a == 2 and rest["debug"] is False and "a" not in rest


def test_positional_only_arguments_work(tmp_path):
    def function(a: int, /, b: int = 2):
        return a, b

    assert called_with(function, tmp_path, {"a": 1}) == (1, 2)


def test_a_function_as_default_is_a_value(tmp_path):
    def function(activation: Any = len):
        return activation

    assert called_with(function, tmp_path) is len


def test_a_mutable_default_is_not_shared_between_runs(tmp_path):
    @experiment
    def function(xs: list[int] = [1]):  # noqa: B006
        xs.append(2)
        return xs

    assert function.run(output_dir=str(tmp_path)) == function.run(output_dir=str(tmp_path)) == [1, 2]


def test_decorators_and_signature_mix(tmp_path):
    @parameter(name="name", help="above", default="up")
    @experiment
    @parameter(name="lr", type=float, help="below", allowed_values=[0.1, 0.2])
    def function(lr=0.1, name: str = "down"):
        return lr, name

    assert function.run(output_dir=str(tmp_path)) == (0.1, "up")
    assert function.parameters["lr"].help == "below" and function.parameters["name"].help == "above"
    with pytest.raises(ParameterError, match=r"expected one of 0.1, 0.2"):
        function.run(lr=0.3)


def test_what_cannot_be_declared_is_an_error_at_declaration():
    with pytest.raises(DrivetrainError, match="neither annotation nor default"):
        experiment(lambda a, b: None)
    with pytest.raises(DrivetrainError, match=r"\*args"):

        @experiment
        def function(*args):
            pass

    def unknown(x: "Nowhere" = None):  # noqa: F821
        pass

    with pytest.raises(DrivetrainError, match="Nowhere"):
        experiment(unknown)


@dataclass
class Base:
    decay: float = 0.0
    """Weight decay,
    of matrices only."""


@dataclass
class Explained(Base):
    """What a string, a comment and metadata say.

    Args:
        named: from the docstring.
    """

    lr: float = 0.1  # how far a step goes
    depth: int = 2
    width: tuple[int, ...] = (
        8,
        8,
    )
    # channels of each layer,
    # from the first on
    kind: str = field(default="a", metadata={"help": "from metadata"})
    """not this"""
    named: int = 1
    last: int = 0
    "Beneath."


def test_fields_have_the_help_of_metadata_docstring_string_or_comment():
    @experiment
    def train(opt: Explained):
        pass

    said = {name: parameter.help for name, parameter in train.parameters.items() if name.startswith("opt.")}
    assert said == {
        "opt.decay": "Weight decay, of matrices only.",
        "opt.lr": "how far a step goes",
        "opt.depth": None,
        "opt.width": "channels of each layer, from the first on",
        "opt.kind": "from metadata",
        "opt.named": "from the docstring.",
        "opt.last": "Beneath.",
    }
    assert "how far a step goes" in train.help()


def test_a_dataclass_without_source_has_no_help_of_its_own():
    made = make_dataclass("Made", [("x", int, 1)])

    @experiment
    def train(opt: made):
        pass

    assert train.parameters["opt.x"].help is None


def test_constraints_of_pydantic_hold(tmp_path):
    def function(
        n: Annotated[int, Field(gt=0), Param(help="how many")] = 1, xs: Annotated[list[int], Field(max_length=2)] = ()
    ):
        return n, xs

    made = experiment(function)
    assert made.cli(["--output-dir", str(tmp_path), "--n", "3", "--xs", "1", "2"]) == (3, [1, 2])
    assert "how many" in made.help()
    with pytest.raises(ParameterError, match="n cannot be 0: expected int: Input should be greater than 0"):
        made.run(n=0)
    with pytest.raises(ParameterError, match="xs cannot be .1, 2, 3.: expected list.int.: List should have at most 2"):
        made.run(xs=[1, 2, 3])


def test_lists_of_any_spelling_take_several_values(tmp_path):
    def function(a: Iterable[int], b: list[str | None], c: frozenset[int] = frozenset()):
        return a, b, c

    values = experiment(function).run(output_dir=str(tmp_path), a=[1, 2], b=["x", None], c=frozenset({3}))
    assert values == ([1, 2], ["x", None], frozenset({3}))


def test_the_default_of_a_path_is_shown_whole():
    def function(data: Path = Path("data/imagenet")):
        return data

    assert "default: data/imagenet" in experiment(function).help()


def test_a_run_that_changes_its_default_changes_no_other_run(tmp_path):
    def function(config: dict[str, list] = {"sizes": [1]}, options: Any = {"a": {"b": 1}}):  # noqa: B006
        config["sizes"].append(2)
        options["a"].pop("b")
        return config

    made = experiment(function)
    assert [made.run(output_dir=str(tmp_path)) for _ in range(2)] == [{"sizes": [1, 2]}] * 2


@dataclass(frozen=True)
class Decay:
    steps: int
    kind: str = "cosine"


def test_a_dataclass_that_may_be_none_needs_no_field_until_one_is_given(tmp_path):
    @experiment
    def train(decay: Decay | None = None):
        return decay

    assert train.run(output_dir=str(tmp_path)) is None
    assert train.run({"decay.steps": 3}, output_dir=str(tmp_path)) == Decay(3)
    with pytest.raises(ParameterError, match="'decay.steps' is required"):
        train.run({"decay.kind": "linear"}, output_dir=str(tmp_path))
    assert "required if there is decay" in " ".join(train.help().split())


def test_the_defaults_of_an_experiment_make_a_dataclass_that_may_be_none(tmp_path):
    @experiment(defaults={"decay": {"steps": 5}})
    def train(decay: Decay | None = None):
        return decay

    assert train.run(output_dir=str(tmp_path)) == Decay(5)


def test_a_dataclass_that_is_none_is_none_again_when_its_parameters_are_fed_back(tmp_path):
    @experiment
    def train(schedule: Schedule | None = None):
        return schedule

    assert train.run(output_dir=str(tmp_path), run_name="first") is None
    record = tmp_path / "train" / "first" / "parameters.yaml"
    assert train.run(params_file=record, output_dir=str(tmp_path)) is None


@dataclass(frozen=True)
class Momentum(Schedule):
    momentum: float = 0.9


@dataclass(frozen=True)
class Training:
    schedule: Schedule = field(default_factory=lambda: Momentum(warmup=3))


def test_a_default_of_a_derived_dataclass_keeps_its_class_and_its_fields(tmp_path):
    @experiment
    def train(training: Training, other: Schedule = Momentum(momentum=0.5)):
        return training.schedule, other

    assert train.run(output_dir=str(tmp_path)) == (Momentum(warmup=3), Momentum(momentum=0.5))
    changed = train.run({"other.momentum": 0.1, "training.schedule.warmup": 1}, output_dir=str(tmp_path))
    assert changed == (Momentum(warmup=1), Momentum(momentum=0.1))
