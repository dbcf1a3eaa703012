"""Parameter files: what they may hold, and what happens to hostile ones."""

import enum
import json
import re
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from drivetrain.core.errors import ParameterError
from drivetrain.experiment import experiment, read_run, sweep
from drivetrain.experiment.cli.sweep import read_space


@experiment
def train(
    lr: float = 0.1,
    size: int = 3,
    names: list[str] | None = None,
    flag: bool = False,
    table: dict[str, int] | None = None,
):
    pass


def values_of(text, tmp_path, name="p.yaml"):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return train.resolve({"params_file": file})


def test_the_parameters_of_an_earlier_run_can_be_fed_back(tmp_path):
    seen = []

    @experiment
    def again(lr: float = 0.1, xs: list[int] | None = None, name: str = "x"):
        from drivetrain.runtime import current_run

        seen.append(current_run())
        return lr, xs, name

    first = again.run(output_dir=str(tmp_path), lr=0.7, xs=[1, 2], name="1e-3", run_name="first")
    second = again.run(params_file=seen[0].folder / "parameters.yaml")
    assert first == second == (0.7, [1, 2], "1e-3")
    assert seen[1].seed == seen[0].seed and seen[1].folder != seen[0].folder
    assert seen[1].folder.parent == seen[0].folder.parent


class Size(enum.Enum):
    small = "large"
    large = "small"


class Head(BaseModel):
    width: int = 4
    names: list[str] = []


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Size, Size.small),
        (dict[str, Size], {"a": Size.small}),
        (dict[Size, int], {Size.large: 1}),
        (frozenset[int], frozenset({1, 2})),
        (deque[int], deque([1, 2])),
        (list[int | None], [1, None]),
        (int | str, "3"),
        (int | str, 3),
        (bytes, b"abc"),
        (Head, Head(width=2, names=["x"])),
        (list[Head], [Head(), Head(width=3)]),
        (timedelta, timedelta(days=1, hours=2)),
        (Path, Path("a b/c")),
    ],
)
def test_values_of_every_type_can_be_fed_back(tmp_path, kind, value):
    def function(x, y: int = 0):
        return x

    function.__annotations__["x"] = kind
    made = experiment(function)
    assert made.run(x=value, output_dir=str(tmp_path), run_name="a") == value
    words = ["--params-file", str(tmp_path / "function" / "a" / "parameters.yaml"), "--output-dir", str(tmp_path)]
    again = made.cli(words, exit_on_error=False)
    assert again == value and type(again) is type(value)


def test_text_that_is_not_unicode_leaves_the_file_readable(tmp_path):
    def function(name: str = "x", lr: float = 0.1):
        return name

    experiment(function).run(name="caf\udce9", lr=0.2, output_dir=str(tmp_path), run_name="a")
    assert read_run(tmp_path / "function" / "a").parameters["lr"] == 0.2


def test_errors_name_file_and_line(tmp_path):
    for text, words in [
        ("lr: 0.1\nsise: 3\n", r"p.yaml:2: unknown parameter 'sise'. Did you mean 'size'"),
        ("lr: 0.1\nsize: 3.7\n", r"p.yaml:2: size cannot be 3.7: expected a whole number"),
        ("lr: 0.1\nlr: 0.2\n", r"p.yaml:2: the key 'lr' appears twice"),
        ("- 1\n", r"p.yaml:1: the file holds a list"),
        ("lr: [\n", r"p.yaml:\d"),
        (b"lr: \xff\n", r"p.yaml:1: the file is not UTF-8"),
    ]:
        with pytest.raises(ParameterError, match=words):
            values_of(text, tmp_path)
    with pytest.raises(ParameterError, match="no file"):
        train.resolve({"params_file": tmp_path / "missing.yaml"})
    with pytest.raises(ParameterError, match="expected a path"):
        train.resolve({"params_file": 3})


def test_a_python_tag_executes_nothing_and_is_refused(tmp_path):
    marker = tmp_path / "executed"
    for tag in ("!!python/object/apply:os.system", "!!python/object/new:os.system", "!!python/name:os.system"):
        with pytest.raises(ParameterError, match="not allowed"):
            values_of(f"lr: {tag} ['touch {marker}']\n", tmp_path)
    assert not marker.exists()


def test_keys_that_may_not_come_from_a_file_are_skipped(tmp_path):
    found = values_of("local_rank: 3\nsubprocess: x\nrun_name: y\nparams_file: z\nlr: 1\n", tmp_path)
    assert (found.values["local_rank"], found.values["subprocess"], found.values["run_name"]) == (0, None, None)
    assert found.values["lr"] == 1.0


def test_an_alias_bomb_is_refused_quickly(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join(['*' + before] * 9)}]")
    began = time.process_time()
    with pytest.raises(ParameterError, match="aliases"):
        values_of("\n".join(lines), tmp_path)
    assert time.process_time() - began < 2


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["1e3", "-.5", ".inf", "yes", "~", "0x1f", "9" * 5000, "1e999999999", "!ref <lr>", "*a", "&a 1"]),
)
CONTAINERS = lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
VALUES = st.recursive(SCALARS, CONTAINERS, max_leaves=6)
KEYS = st.sampled_from(
    "lr size names flag table random_seed random-seed opt nproc_per_node deterministic sise local_rank".split()
)
TREES = st.dictionaries(KEYS, VALUES, max_size=5)
TAG = "!!python/name:os.system"
BROKEN = st.sampled_from(
    ["", "\x00", "\t", "---\n", "%YAML 1.3\n", "lr: 1\nlr: 2", "[", "{", "- a", "? ", TAG, "&a *a", "<<: 3", "\ufeff"]
)


def written(tree, style):
    """Write a tree as JSON, as YAML in flow style, or as loose `key: value` lines."""
    if style == "json":
        return json.dumps(tree)
    if style == "yaml":
        return "\n".join(f"{key}: {json.dumps(value)}" for key, value in tree.items())
    return "\n".join(f"{key}: {value}" for key, value in tree.items())


def check_file(tmp_path_factory, tree, style, broken, cut, raw):
    text = written(tree, style).encode("utf-8", "surrogatepass")
    if broken is not None:
        place = cut % (len(text) + 1)
        text = text[:place] + broken.encode() + text[place:]
    text += raw
    folder = tmp_path_factory.getbasetemp()
    began = time.process_time()
    try:
        found = values_of(text, folder, "f.json" if style == "json" else "f.yaml").values
    except ParameterError as error:
        problem = str(error)
    else:
        problem = None
        assert type(found["lr"]) is float and type(found["size"]) is int and type(found["flag"]) is bool
    assert problem is None or re.match(r"f\.(json|yaml):\d+: ", problem), problem
    assert time.process_time() - began < 2


fuzz = given(
    TREES, st.sampled_from(["json", "yaml", "loose"]), st.none() | BROKEN, st.integers(0, 200), st.binary(max_size=3)
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@fuzz
def test_any_file_gives_parameters_or_a_parameter_error(tmp_path_factory, tree, style, broken, cut, raw):
    check_file(tmp_path_factory, tree, style, broken, cut, raw)


@pytest.mark.slow
@settings(max_examples=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@fuzz
def test_ten_thousand_files_give_parameters_or_a_parameter_error(tmp_path_factory, tree, style, broken, cut, raw):
    check_file(tmp_path_factory, tree, style, broken, cut, raw)


@dataclass
class Model:
    depth: int = 1
    width: int = 8
    name: str = "none"


@experiment
def grouped(
    model: Model, lr: float = 0.1, steps: int = 10, warmup: int = 0, tags: list[str] | None = None, note: str = ""
):
    return model


@pytest.fixture
def configs(tmp_path):
    texts = {
        "base.yaml": "lr: 0.5\nsteps: 100\n",
        "model/small.yaml": "depth: 2\nname: small\n",
        "model/large.yaml": "include: wide.yaml\ndepth: 24\nname: large-${lr}\n",
        "model/wide.yaml": "width: 1024\n",
        "train.yaml": "include:\n  - base.yaml\n  - model: large\nsteps: 200\nwarmup: ${steps}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_includes_others_and_a_choice_of_a_folder_and_its_own_keys_count(configs):
    resolved = grouped.resolve({"params_file": configs / "train.yaml"})
    values = {name: resolved.values[name] for name in ("lr", "steps", "model.depth", "model.width", "model.name")}
    assert values == {"lr": 0.5, "steps": 200, "model.depth": 24, "model.width": 1024, "model.name": "large-0.5"}
    assert resolved.values["warmup"] == 200
    assert resolved.origins["lr"] == "base.yaml:1" and resolved.origins["model.width"] == "wide.yaml:1"


def test_the_choice_and_every_key_can_be_overridden_from_the_command_line_and_from_python(configs, tmp_path):
    place = ["--output-dir", str(tmp_path / "o"), "--params-file", str(configs / "train.yaml")]
    assert grouped.cli([*place, "model=small"]) == Model(2, 8, "small")
    assert grouped.cli([*place, "--model", "small", "model.width=3"]) == Model(2, 3, "small")
    assert grouped.cli([*place, "lr=2", "steps=7"]) == Model(24, 1024, "large-2.0")
    resolved = grouped.resolve({"params_file": configs / "train.yaml", "model": "small", "steps": 7})
    assert (resolved.values["model.depth"], resolved.values["warmup"]) == (
        2,
        7,
    )  # references see what counts in the end
    with pytest.raises(ParameterError, match=r"no 'lage' in .*Did you mean 'large'.*Choices: large, small, wide"):
        grouped.resolve({"params_file": configs / "train.yaml", "model": "lage"})
    with pytest.raises(ParameterError, match="no parameter file offers a choice"):
        grouped.resolve({"model": "small"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("include: missing.yaml\n", r"p.yaml:1: there is no file"),
        ("lr: 1\ninclude: [p.yaml]\n", r"p.yaml:2: files include each other in a cycle"),
        ("include: [loop.yaml]\n", r"loop.yaml:1: files include each other in a cycle"),
        ("include: [{mdel: large}]\n", r"p.yaml:1: no parameter is within 'mdel'. Did you mean 'model'"),
        ("include: [{model: null}]\n", r"p.yaml:1: model needs a choice. Choices: large, small, wide"),
        ("include: [{model: ../base}]\n", r"there is no '../base' in"),
        ("include: 3\n", r"p.yaml:1: include: expected a file"),
        ("include: /etc/passwd\n", r"p.yaml:1: include: expected a file .*got '/etc/passwd'"),
        ("include: [base.yaml, folder.yaml]\n", r"p.yaml:1: include: folder.yaml is not a plain file"),
        ("include: bad.yaml\n", r"bad.yaml:2: unknown parameter 'lrr'"),
        ("note: ${lrr}\n", r"p.yaml:1: note refers to \$\{lrr\}: unknown parameter 'lrr'. Did you mean 'lr'"),
        ("steps: ${warmup}\nwarmup: ${steps}\n", r"references form a cycle: steps -> warmup -> steps"),
        ("steps: ${lr}\n", r"p.yaml:1: steps cannot be 0.1: expected a whole number"),
        ("note: ${__import__('os').getcwd()}\n", r"unknown parameter"),
    ],
)
def test_what_files_cannot_include_or_refer_to_is_named_with_its_line(configs, text, words):
    (configs / "p.yaml").write_text(text)
    (configs / "folder.yaml").mkdir()
    (configs / "loop.yaml").write_text("include: p.yaml\n")
    (configs / "bad.yaml").write_text("lr: 1\nlrr: 2\n")
    with pytest.raises(ParameterError, match=words):
        grouped.resolve({"params_file": configs / "p.yaml"})


def test_references_reach_into_lists_and_text_and_two_dollars_are_text(configs):
    (configs / "p.yaml").write_text('tags: ["lr=${lr}", "$${lr}", "${model.name}"]\nnote: a ${steps} b $${x} $5\n')
    values = grouped.resolve({"params_file": configs / "p.yaml", "lr": 3}).values
    assert values["tags"] == ["lr=3.0", "${lr}", "none"] and values["note"] == "a 10 b ${x} $5"


def test_a_reference_to_a_secret_is_an_error_and_the_record_of_a_run_is_read_as_it_is(tmp_path):
    @experiment
    def upload(api_key: str = "k", url: str = "", other_token: str = ""):
        return url

    file = tmp_path / "p.yaml"
    file.write_text("url: https://host/${api_key}\n")
    with pytest.raises(ParameterError, match="api_key, a secret"):
        upload.resolve({"params_file": file, "api_key": "hunter2"})
    upload.run(url="${nothing}", output_dir=str(tmp_path), run_name="first")
    again = upload.resolve({"params_file": tmp_path / "upload" / "first" / "parameters.yaml"})
    assert again.values["url"] == "${nothing}"


def test_a_sweep_may_vary_the_choice_of_a_config_group(configs, tmp_path):
    @experiment
    def depth_of(model: Model, lr: float = 0.1, steps: int = 1, warmup: int = 0):
        return model.depth

    fixed = {"params_file": str(configs / "train.yaml"), "output_dir": str(tmp_path / "o")}
    assert [t.value for t in sweep(depth_of, {"model": ["small", "large"]}, params=fixed)] == [2.0, 24.0]
    with pytest.raises(ParameterError, match="no 'smal' in"):
        sweep(depth_of, {"model": ["small", "smal"]}, params=fixed)
    space, _ = read_space(depth_of, ["model=small,large", "lr=1,2 if model=small"])
    assert [t.value for t in sweep(depth_of, space, params=fixed)] == [2.0, 2.0, 24.0]


def test_a_choice_is_not_a_default_of_an_experiment(tmp_path):
    @experiment(defaults={"model": "small"})
    def chosen(model: Model):
        pass

    with pytest.raises(ParameterError, match="defaults: 'model' has parameters of its own: model.depth"):
        chosen.run(output_dir=str(tmp_path))


def test_a_reference_to_none_means_not_given(tmp_path):
    @experiment
    def train(lr: float = 0.1, other: float | None = None):
        return lr

    file = tmp_path / "given.yaml"
    file.write_text("lr: ${other}\n")
    assert train.resolve({"params_file": file}).values["lr"] == 0.1
    file.write_text("lr: ${other}\nother: 0.5\n")
    assert train.resolve({"params_file": file}).values["lr"] == 0.5


def test_a_value_for_a_group_of_parameters_names_those_within(tmp_path):
    @experiment
    def depth_of(model: Model):
        return model.depth

    file = tmp_path / "given.yaml"
    file.write_text("model: 3\n")
    with pytest.raises(ParameterError, match=r"given.yaml:1: 'model' has parameters of its own: model\."):
        depth_of.resolve({"params_file": file})
