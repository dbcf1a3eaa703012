"""Searching with Optuna."""

import pytest

from drivetrain.core.errors import ParameterError
from drivetrain.experiment import Choice, IntRange, LogUniform, OptunaSampler, Uniform, experiment, report, sweep
from drivetrain.experiment.sweeps.space import make_space

pytest.importorskip("optuna")
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
        OptunaSampler(make_space([{"lr": 1.0}]), 3)

    @experiment
    def fails(lr: float = 0.5):
        raise ValueError("always")

    options = {"sampler": "optuna", "n_trials": 2, "params": {"output_dir": str(tmp_path)}}
    result = sweep(fails, {"lr": Uniform(0, 1)}, on_failure="return", **options)
    assert len(result.failed) == 2
