"""Searching with Optuna."""

import os
import shutil

import pytest

from drivetrain.core.errors import ConfigError, ParameterError
from drivetrain.experiment import (
    Choice,
    IntRange,
    LogUniform,
    OptunaConfig,
    OptunaSampler,
    Uniform,
    experiment,
    report,
    sweep,
)
from drivetrain.experiment.parameters import ParameterSet
from drivetrain.experiment.sweeps.space import make_space
from drivetrain.experiment.sweeps.sweeping import continue_sweep
from drivetrain.experiment.sweeps.trial import JOURNAL

optuna = pytest.importorskip("optuna")
SPACE = {"lr": LogUniform(1e-4, 1.0), "size": IntRange(1, 8), "kind": Choice("a", "b")}


@experiment
def bowl(lr: float = 0.1, size: int = 1, kind: str = "a"):
    import math

    return (math.log10(lr) + 2) ** 2 + (size - 4) ** 2 / 10 + (kind == "a")


def run(tmp_path, **options):
    options = {"sampler": "optuna", "n_trials": 25, "seed": 1, "params": {"output_dir": str(tmp_path)}} | options
    return sweep(bowl, SPACE, **options)


def test_it_finds_a_good_point_and_repeats_itself(tmp_path):
    result = run(tmp_path)
    assert result.best.value < 0.5 and result.best.params["kind"] == "b"
    assert [t.params for t in result] == [t.params for t in run(tmp_path)]


def test_a_resumed_search_asks_only_for_what_is_missing(tmp_path):
    first = run(tmp_path, n_trials=6)
    longer = run(tmp_path, n_trials=9, resume=first.folder)
    assert [t.params for t in longer][:6] == [t.params for t in first] and len(longer) == 9


def test_an_unfinished_trial_is_asked_for_again_with_its_parameters(tmp_path):
    calls = []

    @experiment
    def stops(lr: float = 0.1, size: int = 1, kind: str = "a"):
        calls.append((lr, size, kind))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return lr

    options = {"sampler": "optuna", "n_trials": 5, "params": {"output_dir": str(tmp_path)}}
    with pytest.raises(KeyboardInterrupt):
        sweep(stops, SPACE, **options)
    (folder,) = (tmp_path / "stops" / "sweeps").iterdir()
    result = sweep(stops, SPACE, resume=folder, **options)
    assert len(result) == 5 and calls[2] == calls[3] and len(calls) == 6


def test_the_pruner_gives_bad_trials_up(tmp_path):
    @experiment
    def slow(lr: float = 0.5):
        for step in range(5):
            report(lr, step)
        return lr

    result = sweep(slow, {"lr": Uniform(0, 1)}, sampler="optuna", n_trials=15, params={"output_dir": str(tmp_path)})
    states = {t.status for t in result}
    assert states == {"finished", "pruned"} and not result.failed
    assert all(t.value is None for t in result if t.status == "pruned")


def test_a_list_of_points_and_failures_are_understood(tmp_path):
    with pytest.raises(ParameterError, match="searches ranges"):
        OptunaSampler(make_space([{"lr": 1.0}], ParameterSet()), 3)

    @experiment
    def fails(lr: float = 0.5):
        raise ValueError("always")

    options = {"sampler": "optuna", "n_trials": 2, "params": {"output_dir": str(tmp_path)}}
    result = sweep(fails, {"lr": Uniform(0, 1)}, on_failure="return", **options)
    assert len(result.failed) == 2


@experiment
def branches(kind: str = "a", lr: float = 0.5, depth: int = 1):
    return {"loss": (lr - 0.2) ** 2 + (kind == "b") + 0.1 * depth, "cost": lr + depth, "kind_is_a": float(kind == "a")}


BRANCHES = {"kind": Choice("a", "b"), "lr": Uniform(0, 1).when(kind="a"), "depth": IntRange(1, 5).when(kind="b")}


def test_conditions_reach_optuna_and_a_resumed_search_knows_them(tmp_path):
    options = {"sampler": "optuna", "objective": "loss", "params": {"output_dir": str(tmp_path)}, "seed": 3}
    first = sweep(branches, BRANCHES, n_trials=8, **options)
    assert all(set(t.params) == ({"kind", "lr"} if t.params["kind"] == "a" else {"kind", "depth"}) for t in first)
    assert {t.params["kind"] for t in first} == {"a", "b"}
    longer = sweep(branches, BRANCHES, n_trials=12, resume=first.folder, **options)
    assert [t.params for t in longer][:8] == [t.params for t in first] and len(longer) == 12


def test_several_objectives_are_searched_together_and_reports_stop_nothing(tmp_path):
    @experiment
    def two(x: float = 0.5):
        report(x, 0)
        return {"near": abs(x - 0.2), "far": abs(x - 0.8)}

    options = {"objective": ["near", "far"], "params": {"output_dir": str(tmp_path)}}
    result = sweep(two, {"x": Uniform(0, 1)}, sampler="optuna", n_trials=14, **options)
    assert {t.status for t in result} == {"finished"} and result.direction == ("min", "min")
    assert all(0.2 <= t.params["x"] <= 0.8 for t in result.front) and len(result.front) >= 2
    assert sweep(two, {"x": Uniform(0, 1)}, sampler="optuna", n_trials=15, resume=result.folder, **options)[14].values


@pytest.mark.parametrize("name", ["median", "hyperband", "halving", "percentile", "none"])
def test_every_pruner_has_its_name(name):
    assert isinstance(OptunaConfig(pruner=name).make_pruner(), optuna.pruners.BasePruner)


@pytest.mark.parametrize("file", ["study.db", "study.log"])
def test_a_study_in_a_file_is_continued_and_shared(tmp_path, file):
    place = tmp_path / file
    config = OptunaConfig(storage=str(place), study_name="together", pruner="none")
    options = {"sampler": config, "params": {"output_dir": str(tmp_path)}, "seed": 1}
    first = sweep(bowl, SPACE, n_trials=3, **options)
    again = sweep(bowl, SPACE, n_trials=2, **options)  # another sweep, the same study
    study = optuna.load_study(study_name="together", storage=config.make_storage())
    assert [t.user_attrs["sweep"] for t in study.trials] == [first.folder.name] * 3 + [again.folder.name] * 2
    journal = first.folder / JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:6]))  # the second trial was running when the power failed
    shutil.rmtree(first[2].run_dir)
    result = continue_sweep(bowl, first.folder)
    assert [t.params for t in result][:2] == [t.params for t in first][:2] and len(result) == 3
    study = optuna.load_study(study_name="together", storage=config.make_storage())
    values = {t.user_attrs["trial"]: t.value for t in study.trials if t.user_attrs["sweep"] == first.folder.name}
    assert values[0] == first[0].value and values[1] == pytest.approx(first[1].value)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open files")
@pytest.mark.parametrize("address", ["{}", "sqlite:///{}"])
def test_a_search_leaves_no_database_open(tmp_path, address):
    place = (tmp_path / "study.db").resolve()
    sampler = OptunaSampler(make_space(SPACE, ParameterSet()), 2, config=OptunaConfig(storage=address.format(place)))
    result = sweep(bowl, SPACE, sampler=sampler, params={"output_dir": str(tmp_path)})
    assert len(result) == len(sampler.study.trials) == 2
    opened = [os.path.realpath(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd")]
    assert place.is_file() and str(place) not in opened


def test_a_database_in_memory_is_kept_from_query_to_query():
    storage = OptunaConfig(storage="sqlite:///:memory:").make_storage()
    optuna.create_study(storage=storage)
    assert len(optuna.get_all_study_summaries(storage=storage)) == 1
    storage.remove_session(), storage.engine.dispose()


def test_settings_of_optuna_are_checked_and_a_password_is_not_written():
    with pytest.raises(ConfigError, match="Did you mean 'median'"):
        OptunaConfig(pruner="medan")
    with pytest.raises(ConfigError, match="without a storage"):
        OptunaConfig(study_name="x")
    with pytest.raises(ConfigError, match="storage"):
        OptunaSampler(make_space(SPACE, ParameterSet()), 1, config=OptunaConfig(storage="nodatabase://x"))
    kept = OptunaConfig(storage="postgresql://me:hunter2@host/db").as_data()
    assert "hunter2" not in str(kept)
    with pytest.raises(ParameterError, match="password"):
        OptunaConfig.from_data(kept)
    with pytest.raises(ConfigError, match="OptunaConfig or a Sampler"):
        sweep(bowl, SPACE, sampler=3)


def test_a_stored_study_without_a_name_gets_one_that_the_resumed_sweep_finds(tmp_path):
    config = OptunaConfig(storage=str(tmp_path / "study.log"))
    options = {"sampler": config, "params": {"output_dir": str(tmp_path)}}
    first = sweep(bowl, SPACE, n_trials=2, **options)
    sweep(bowl, SPACE, n_trials=3, resume=first.folder, **options)
    continue_sweep(bowl, first.folder)
    summaries = optuna.get_all_study_summaries(storage=config.make_storage())
    assert [summary.n_trials for summary in summaries] == [3]
