"""The benchmark of algorithms runs in small, adds up over sittings, and its numbers reach the cards."""

import json

import pytest
import torch
from torch import nn

from benchmarks import algorithm_tasks, algorithms, cards
from benchmarks.algorithm_tasks import LEFT_OUT, METHODS
from drivetrain.algorithms.registry import ALGORITHMS, names
from drivetrain.train.trainer import Trainer


def smoke(tmp_path, **kwargs):
    return algorithms.main(device="cpu", smoke=True, output=tmp_path / "results.json", **kwargs)


def test_sittings_add_up_and_nothing_is_measured_twice(tmp_path, capsys):
    first = smoke(tmp_path, tasks=["text"], methods=["EMA"], seeds=2)
    assert [(run["method"], run["seed"]) for run in first["runs"]] == [
        ("baseline", 0),
        ("baseline", 1),
        ("EMA", 0),
        ("EMA", 1),
    ]
    run = first["runs"][0]
    assert (
        len(run["curve"]) == 2 and run["curve"][0][0] < run["curve"][1][0] and run["curve"][1][1] < run["curve"][0][1]
    )
    second = smoke(tmp_path, tasks=["text"], methods=["GradientClipping"], seeds=1)
    assert [run["method"] for run in second["runs"][4:]] == ["GradientClipping"] and second["runs"][4]["sitting"] == 1
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(second))
    assert all(sitting["torch"] and sitting["date"] and sitting["cpu"] for sitting in second["sittings"])


def test_images_are_learnt_and_a_run_that_takes_too_long_is_ended(tmp_path, capsys):
    runs = smoke(tmp_path, tasks=["cifar"], methods=["RandomTranslation"], seeds=1, limit=1e-9)["runs"]
    assert all(run["stopped"] and "error" not in run and run["steps"] < 4 for run in runs) and len(runs) == 2


def test_a_method_that_fails_costs_only_itself(tmp_path, capsys, monkeypatch):
    def fail():
        raise ValueError("broken")

    monkeypatch.setitem(METHODS["text"], "EMA", algorithm_tasks.Method(make=fail))
    runs = smoke(tmp_path, tasks=["text"], methods=["EMA", "Lookahead"], seeds=1)["runs"]
    assert [run.get("error") for run in runs] == [None, "ValueError: broken", None]


def test_a_grid_grows_where_its_edge_is_best():
    def grid(**finals):
        return [{"lr": float(name[1:]), "final": final} for name, final in finals.items()]

    assert algorithms.beyond_edge(grid(r2=1.0, r4=2.0, r8=3.0), higher_is_better=True) == [16.0]
    assert algorithms.beyond_edge(grid(r2=1.0, r4=2.0, r8=3.0), higher_is_better=False) == [1.0]
    assert algorithms.beyond_edge(grid(r2=1.0, r4=3.0, r8=2.0), higher_is_better=True) == []
    assert algorithms.beyond_edge(grid(r2=1.0, r4=2.0, r8=3.0, r16=4.0, r32=5.0), higher_is_better=True) == []
    assert algorithms.beyond_edge(grid(r4=3.0), higher_is_better=True) == []


def test_files_of_several_processes_are_put_together(tmp_path):
    for name, method in (("a", "EMA"), ("b", "SWA"), ("c", "AGC")):
        algorithms.write_results(
            tmp_path / f"{name}.json", {"sittings": [{}], "runs": [{"method": method, "sitting": 0}]}
        )
    algorithms.merge(tmp_path / "a.json", [tmp_path / "b.json", tmp_path / "c.json"])
    merged = algorithms.read_results(tmp_path / "a.json")
    assert [(run["method"], run["sitting"]) for run in merged["runs"]] == [("EMA", 0), ("SWA", 1), ("AGC", 2)]
    assert len(merged["sittings"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("task", METHODS)
def test_every_method_runs(task, tmp_path, capsys, recwarn):
    runs = smoke(tmp_path, tasks=[task], seeds=1)["runs"]
    assert {run["method"]: run["error"] for run in runs if "error" in run} == {}


def test_every_algorithm_is_measured_or_left_out_with_a_reason():
    listed = {name for table in METHODS.values() for name in table} - {"baseline"}
    assert listed <= set(names()) and not listed & set(LEFT_OUT)
    assert listed | set(LEFT_OUT) == {name for entries in ALGORITHMS.values() for name in entries if "=" not in name}


def test_a_misspelt_method_and_missing_data_are_explained(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="Muon"):
        algorithms.main(methods=["Moun"], device="cpu", output=tmp_path / "none.json")
    monkeypatch.delenv("DRIVETRAIN_DATA", raising=False)
    with pytest.raises(SystemExit, match="DRIVETRAIN_DATA is not set"):
        algorithms.main(tasks=["text"], device="cpu", output=tmp_path / "none.json")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "make"), [("cifar", algorithm_tasks.SmallResNet), ("text", algorithm_tasks.SmallGPT)])
def test_every_method_changes_something_in_the_models_that_are_measured(task, make):
    for method in METHODS[task].values():
        if not method.needs_cuda:
            model = make()  # NoEffectWarning is an error here, as any warning is
            Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), (), algorithms=method.make())


# ---------------------------------------------------------------------------------- cards


def invented(tmp_path, **finals):
    """Write results in which a method's runs end at the given qualities, linearly over ten seconds (or what `times` says)."""
    runs = []
    for method, (qualities, seconds) in finals.items():
        for seed, quality in enumerate(qualities):
            facts = {"task": "cifar", "method": method, "lr": 0.002, "seed": seed, "device": "GPU", "sitting": 0}
            runs.append({**facts, "final": quality, "curve": [[seconds / 2, quality / 2], [seconds, quality]]})
        runs.append({**runs[-1], "lr": 0.1, "seed": 0, "final": 0.1, "curve": [[seconds, 0.1]]})
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"sittings": [{"date": "2026-01-02T03:04", "torch": "2.11"}], "runs": runs}))
    return path


def test_time_to_target_is_read_from_the_curve():
    curve = [(1.0, 2.0), (2.0, 1.0), (3.0, 0.5)]
    assert cards.time_to(1.5, curve, False) == 1.5 and cards.time_to(0.1, curve, False) is None
    assert cards.time_to(3.0, curve, False) == 1.0


def test_verdicts_weigh_quality_and_time(tmp_path):
    path = invented(
        tmp_path,
        baseline=((0.90, 0.91, 0.92), 10.0),
        EMA=((0.95, 0.951, 0.952), 10.0),
        MixUp=((0.80, 0.81, 0.82), 10.0),
        CutOut=((0.91, 0.905, 0.915), 10.0),
        ChannelsLast=((0.90, 0.91, 0.92), 7.0),
        SAM=((0.95, 0.951, 0.952), 20.0),
        Muon=((0.95, 0.96), 5.0),
    )
    target, found = cards.outcomes(algorithms.read_results(path), "cifar", "GPU")
    own = found["EMA"].method
    assert target == pytest.approx(0.90) and own.lr == 0.002 and len(own.finals) == 3
    said = {name: cards.verdict(one.method, one.baseline, True) for name, one in found.items()}
    assert said == {
        "baseline": "no effect measured",
        "EMA": "better",
        "MixUp": "worse",
        "CutOut": "no effect measured",
        "ChannelsLast": "better",
        "SAM": "mixed",
        "Muon": "too few runs",
    }


def test_a_method_is_compared_with_the_baseline_of_its_own_sitting(tmp_path):
    path = invented(tmp_path, baseline=((0.90, 0.91, 0.92), 10.0), EMA=((0.90, 0.91, 0.92), 10.0))
    results = algorithms.read_results(path)
    slow = algorithms.read_results(invented(tmp_path, baseline=((0.90, 0.91, 0.92), 20.0), SAM=((0.91,) * 3, 18.0)))
    few = algorithms.read_results(invented(tmp_path, CutOut=((0.91,) * 3, 15.0)))
    for number, other in enumerate((slow, few), 1):
        results["sittings"] += other["sittings"]
        results["runs"] += [{**run, "sitting": number} for run in other["runs"]]
    _, found = cards.outcomes(results, "cifar", "GPU")
    assert found["EMA"].baseline.time < 10 < found["CutOut"].baseline.time < found["SAM"].method.time
    assert found["SAM"].method.time < found["SAM"].baseline.time
    assert [len(found[name].baseline.finals) for name in ("EMA", "SAM", "CutOut")] == [3, 3, 6]


def test_cards_are_written_between_markers_and_a_second_run_changes_nothing(tmp_path):
    folder = tmp_path / "cards"
    folder.mkdir()
    (folder / "mixup.md").write_text(
        "# MixUp\n\n**Cost.** Little.\n\n**Measured effect.** Not measured yet.\n\nMore words.\n"
    )
    (folder / "augmix.md").write_text("# AugMix\n")
    (folder / "index.md").write_text("| class | verdict |\n|---|---|\n| [`MixUp`](mixup.md) | a | not measured |\n")
    nothing = tmp_path / "none.json"
    assert cards.update(folder, nothing, check=True) == ["augmix.md", "mixup.md"]
    assert "Not measured" not in (folder / "augmix.md").read_text()  # a check writes nothing
    cards.update(folder, nothing)
    card = (folder / "mixup.md").read_text()
    assert (
        card.count(cards.START) == card.count(cards.END) == 1
        and "Not measured yet." in card
        and card.endswith("More words.\n")
    )
    assert "on the host" in (folder / "augmix.md").read_text() and cards.update(folder, nothing) == []
    path = invented(tmp_path, baseline=((0.90, 0.91, 0.92), 10.0), MixUp=((0.95, 0.951, 0.952), 5.0))
    assert cards.update(folder, path) == ["mixup.md", "index.md"] and cards.update(folder, path) == []
    card = (folder / "mixup.md").read_text()
    assert "Not measured" not in card and "| better |" in card and "0.9100" in card and card.endswith("More words.\n")
    assert "| [`MixUp`](mixup.md) | a | try it first: better (cifar) |" in (folder / "index.md").read_text()


def test_the_cards_of_the_project_are_up_to_date():
    assert cards.update(check=True) == []
