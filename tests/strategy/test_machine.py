"""What is known about a machine: presets, files, measurements in child processes, and what trials teach."""

import dataclasses
import json

import pytest
import torch

from benchmarks import memory_prediction
from drivetrain.core.errors import ConfigError
from drivetrain.strategy.device_spec import PRESETS, DeviceSpec, parse_size, preset_named_like
from drivetrain.strategy.profile import machine as machines
from drivetrain.strategy.profile.machine import (
    Prediction,
    cache_file,
    cache_folder,
    learn,
    link_of,
    machine_from_spec,
    memory_bytes,
    profile_machine,
    read_machine,
    write_machine,
)
from drivetrain.strategy.profile.measure_machine import measure
from drivetrain.strategy.trial.report import TrialResult

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep every test's measurements to itself."""
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measured():
    """A machine as a measurement leaves it."""
    return dataclasses.replace(
        machine_from_spec(DeviceSpec.preset("h200")), evidence="measured", corrections={"a": 1.5}
    )


# Data sheets.


def test_a_preset_has_its_aliases_and_a_misspelt_one_is_named():
    assert DeviceSpec.preset("h100") is DeviceSpec.preset("H100-80G") is PRESETS["h100-80g"]
    with pytest.raises(ConfigError, match="h200"):
        DeviceSpec.preset("h20")


@pytest.mark.parametrize(
    ("name", "float32", "tf32", "float8"),
    [("h100", 67e12, 494.5e12, 1978e12), ("a100", 19.5e12, 156e12, None), ("l40s", 91.6e12, 181e12, 724e12)],
)
def test_rates_are_those_of_the_data_sheet(name, float32, tf32, float8):
    rates = DeviceSpec.preset(name).rates
    assert (rates["float32"], rates["tf32"], rates.get("float8")) == (float32, tf32, float8)


def test_a_device_without_bfloat16_has_no_rate_for_it():
    assert sorted(DeviceSpec.preset("v100").rates) == ["float16", "float32"]


@pytest.mark.parametrize(
    ("reported", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_drivers_name_leads_to_the_preset(reported, preset):
    assert preset_named_like(reported).name == preset


def test_an_unknown_device_has_no_preset():
    assert preset_named_like("Voodoo 2") is None


def test_a_device_is_loaded_from_fields_a_file_or_a_name(tmp_path):
    own = {"name": "mine", "memory": "48GiB", "flops": 1e14, "bandwidth": 1e12, "capability": [8, 9]}
    spec = DeviceSpec.load(own)
    assert (spec.memory, spec.capability, spec.per_node) == (48 * 2**30, (8, 9), 8)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own))
    assert DeviceSpec.load(path) == DeviceSpec.load(str(path)) == DeviceSpec.load(spec) == spec
    assert DeviceSpec.load("b200") is PRESETS["b200"]
    changed = DeviceSpec.load({"preset": "h100", "per_node": 4})
    assert changed == dataclasses.replace(PRESETS["h100-80g"], per_node=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "x", "memory": 1, "flops": 1.0, "bandwith": 1.0}, "bandwidth"),
        ({"name": "x", "memory": 1}, "bandwidth, flops missing"),
        ({"preset": "h100", "memory": "80 gigs"}, "80GiB"),
        ({"preset": "h100", "memory": 0}, "more than 0"),
        ({"preset": "h100", "flops": "fast"}, "expected a number"),
        ({"preset": "h100", "capability": 9}, r"\[9, 0\]"),
        (7, "expected a DeviceSpec"),
    ],
)
def test_a_wrong_device_says_what_is_expected(given, message):
    with pytest.raises(ConfigError, match=message):
        DeviceSpec.load(given)


def test_a_file_that_is_no_object_is_refused(tmp_path):
    path = tmp_path / "device.json"
    for text, message in (("{", "not JSON"), ("[1]", "expected an object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            DeviceSpec.load(path)


def test_sizes_are_bytes_or_carry_a_unit():
    assert parse_size("70GiB", where="x") == 70 * 2**30
    assert parse_size("1.5 GB", where="x") == 1_500_000_000
    assert parse_size(12, where="x") == 12
    with pytest.raises(ConfigError, match="x: True given"):
        parse_size(True, where="x")


def test_a_data_sheet_is_believed_in_part():
    spec = DeviceSpec.preset("h200")
    machine = machine_from_spec(spec)
    assert machine.flops["bfloat16"] == pytest.approx(0.55 * spec.flops)
    assert machine.evidence == "modelled" and machine.kind == "cuda" and machine.free == spec.memory
    assert machine.bandwidth < spec.bandwidth and machine.intra.bandwidth < spec.intra_bw
    assert machine_from_spec(DeviceSpec.preset("cpu")).kind == "cpu"


# The cache.


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DRIVETRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "drivetrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "drivetrain"


def test_a_machine_comes_back_from_its_file_as_it_was(measured):
    path = cache_file(device="a", torch="b")
    assert path != cache_file(device="a", torch="c")
    assert read_machine(path) is None
    assert write_machine(path, measured)
    assert read_machine(path) == measured
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written is left


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": ', '"version": 99'),
        lambda text: text.replace('"bandwidth"', '"bandwith"'),
        lambda text: text.replace('"intra": {', '"intra": 3, "x": {'),
    ],
)
def test_a_damaged_file_is_as_good_as_none(measured, damage):
    path = cache_file(device="a")
    write_machine(path, measured)
    path.write_text(damage(path.read_text()))
    assert read_machine(path) is None
    assert write_machine(path, measured) and read_machine(path) == measured


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch, measured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "file" / "below"))
    assert not write_machine(cache_file(device="a"), measured)


# Measuring.


def test_a_cpu_is_measured_in_a_moment():
    found = measure(CPU, 0.2)
    assert found["flops"].keys() == {"float32", "bfloat16"} and min(found["flops"].values()) > 1e6
    assert found["bandwidth"] > 1e7 and 1e-8 < found["launch"] < 1e-2 and found["threads"] >= 1
    assert "link" not in found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_children_measure_the_machine_and_its_link_once(monkeypatch, size):
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    started = torch.get_rng_state()
    machine = profile_machine(CPU, time_limit=200)
    assert machine.evidence == "measured" and machine.kind == "cpu"
    assert size == 1 or (0 < machine.intra.latency < 1 and machine.intra.bandwidth > 1e5)
    assert 0 < machine.free <= machine.memory
    assert torch.equal(torch.get_rng_state(), started)
    asked = []  # a table of operators that there was no time for is completed, and nothing else is measured again
    monkeypatch.setattr(machines, "_measured", lambda device, limit, ranks, known: asked.append(known))
    again = profile_machine(CPU)
    assert asked == ([] if machine.times.is_complete else [tuple(machine.times.grids)])
    assert (again.flops, again.intra, again.times) == (machine.flops, machine.intra, machine.times)
    changed = learn(
        again, Prediction(kind="plain", step_seconds=1.0, peak_bytes=100.0), TrialResult(outcome="ok", step_seconds=2.0)
    )
    assert changed.corrections == {"plain": 2.0}
    assert profile_machine(CPU).corrections == {"plain": 2.0}  # kept for the next search


def test_without_time_the_machine_is_presumed_and_nothing_is_started(monkeypatch):
    monkeypatch.setattr(machines, "_measured", lambda *_: pytest.fail("measured"))
    machine = profile_machine(CPU, time_limit=0)
    assert machine.evidence == "modelled" and machine.flops["float32"] > 0
    assert machine.memory == memory_bytes(CPU)[0]


def test_a_child_that_fails_or_hangs_leaves_a_presumed_machine(monkeypatch):
    monkeypatch.setattr(machines.sys, "executable", "/bin/false")
    assert profile_machine(CPU).evidence == "modelled"
    monkeypatch.setattr(machines.sys, "executable", "/bin/cat")  # answers nothing that could be read
    assert profile_machine(CPU).evidence == "modelled"


def test_free_memory_is_asked_anew_each_time(monkeypatch, measured):
    write_machine(machines._cache_file(CPU, 1), dataclasses.replace(measured, kind="cpu", free=1))
    assert profile_machine(CPU).free > 2**20
    total, free = memory_bytes(CPU)
    assert 0 < free <= total


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_link_is_recovered_from_times_of_three_sizes(ranks):
    latency, bandwidth = 2e-5, 3e9
    points = [(s, 2 * (ranks - 1) * (latency + s / (ranks * bandwidth))) for s in (2**14, 2**18, 2**22)]
    link = link_of(points, ranks)
    assert link.latency == pytest.approx(latency) and link.bandwidth == pytest.approx(bandwidth)


def test_times_that_do_not_grow_still_give_a_link():
    link = link_of([(1e4, 3e-4), (1e5, 2e-4), (1e6, 1e-4)], 2)
    assert link.latency > 0 and link.bandwidth == pytest.approx(1e10)


# Learning.


def test_a_trial_teaches_fragmentation_quickly_and_forgets_it_slowly(measured):
    predicted = Prediction(kind="a", step_seconds=1.0, peak_bytes=100.0)
    up = learn(measured, predicted, TrialResult(outcome="ok", reserved_bytes=120))
    down = learn(up, predicted, TrialResult(outcome="ok", reserved_bytes=101))
    assert measured.reserve_share < down.reserve_share < up.reserve_share <= 0.2
    assert up.reserve_share - measured.reserve_share > up.reserve_share - down.reserve_share


def test_a_trial_teaches_the_time_of_its_kind_only(measured):
    result = TrialResult(outcome="ok", step_seconds=0.06)
    first = learn(measured, Prediction(kind="b", step_seconds=0.05, peak_bytes=1.0), result)
    assert first.corrections == {"a": 1.5, "b": pytest.approx(1.2)}
    second = learn(first, Prediction(kind="a", step_seconds=0.01, peak_bytes=1.0), result)
    assert second.corrections["a"] == pytest.approx((1.5 * 6) ** 0.5)


def test_a_failed_trial_teaches_nothing(measured):
    predicted = Prediction(kind="a", step_seconds=1.0, peak_bytes=1.0)
    assert learn(measured, predicted, TrialResult(outcome="oom", step_seconds=9.0)) is measured


# The benchmark that goes with it.


@pytest.mark.slow
def test_the_benchmark_of_predictions_runs_without_a_device(capsys):
    rows = memory_prediction.main(["--smoke"])
    assert {row["way"] for row in rows} == set(memory_prediction.WAYS)
    assert "gpt2" in capsys.readouterr().out


def test_results_of_the_benchmark_are_appended_and_kept_while_they_grow(tmp_path):
    path = tmp_path / "results" / "memory.json"
    for number in (1, 2):
        results = memory_prediction.ResultFile(path, {"run": number})
        for rows in ([{"model": "a"}], [{"model": "a"}, {"model": "b"}]):
            results.keep(rows)
            assert json.loads(path.read_text())[-1] == {"run": number, "rows": rows}
    assert [run["run"] for run in json.loads(path.read_text())] == [1, 2]


@pytest.mark.gpu
def test_a_cuda_device_is_measured_by_a_child(monkeypatch):
    machine = profile_machine(torch.device("cuda", 0), time_limit=60)
    while machine.times is None or not machine.times.is_complete:  # on a busy machine the rest is measured next time
        machine = profile_machine(torch.device("cuda", 0), time_limit=60)
    assert machine.evidence == "measured" and machine.kind == "cuda"
    assert machine.flops["bfloat16"] > machine.flops["float32"] > 1e11
    assert machine.bandwidth > 5e10 and machine.launch < 1e-3 and machine.host_bandwidth > 1e8
    monkeypatch.setattr(machines, "_measured", lambda *_: pytest.fail("measured twice"))
    assert profile_machine(torch.device("cuda", 0)).flops == machine.flops
