"""The time of a step from its operators: recorded by hand-counted sizes, timed by a made-up table, with exact arithmetic."""

import argparse
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.strategy.device_spec import DeviceSpec
from drivetrain.strategy.profile import machine as machines
from drivetrain.strategy.profile import measure_operators
from drivetrain.strategy.profile.machine import machine_from_plain, machine_from_spec, profile_machine
from drivetrain.strategy.profile.measure_operators import fill_in
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.operations import Called, described, fused, work_of
from drivetrain.strategy.profile.step_time import operator_seconds, pass_time, queued, step_seconds
from drivetrain.strategy.profile.values import Grid, Link, MachineProfile, Timetable, Work
from drivetrain.strategy.search.cost import predict_time
from drivetrain.strategy.search.knowledge import compile_seconds
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.trial.report import TrialResult
from tests.strategy.candidates import effects
from tests.strategy.test_cost_model import make_profile

WIDTH, HIDDEN, CLASSES = 8, 32, 4
HOST = {"forward": 10e-6, "backward": 5e-6, "view": 1e-6, "compiled": 4e-6, "graphed": 0.0}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.each = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.norm(self.each(self.dense(x))).mean((2, 3))


def mean_square(inputs, outputs):
    return outputs.square().mean()


def recorded(model, samples, arithmetic="float32"):
    task = TrainingTask(
        model=model, call=CallModel(), loss_func=mean_square, optim_func=torch.optim.SGD, optim_args={"lr": 0.1}, samples=samples
    )  # fmt: skip
    profile = ModelProfiler(task).profile()
    assert profile.evidence == "simulated", profile.notes
    return profile


@pytest.fixture(scope="module")
def mlp():
    return recorded(Mlp(), torch.randn(4, WIDTH))


def make_machine(kind="cuda", **changes):
    grids = {
        "product/float32": Grid(
            ((1.0, 2.0**20),) * 3, tuple(2.0 ** (20 * n) * 1e-12 for n in (0, 1, 1, 2, 1, 2, 2, 3))
        ),
        "elementwise": Grid(((1.0, 1e12),), (1e-9, 1e3)),  # a nanosecond a byte
        "update": Grid(((1.0, 1e12),), (1e-9, 1e3)),
    }
    values = {
        "device": "made up", "kind": kind, "memory": 2**34, "free": 2**34, "flops": {"float32": 1e12, "bfloat16": 4e12}, "bandwidth": 1e9,
        "launch": 1e-5, "intra": Link(latency=0.0, bandwidth=1e9), "inter": Link(latency=0.0, bandwidth=1e9),
        "times": Timetable(grids, HOST),
    }  # fmt: skip
    return MachineProfile(**{**values, **changes})


def of_kind(works, key, phase="forward"):
    return [work for work in works if work.key == key and work.phase == phase]


def test_kernels_depend_on_alignment_types_and_broadcasting():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.even = nn.Linear(WIDTH, 33, bias=False), nn.Linear(WIDTH, 34, bias=False)
            self.scale = nn.Parameter(torch.ones(34))

        def forward(self, x):
            return self.odd(x).float().sum() + (self.even(x).float() * self.scale).relu().mean(1)

    works = recorded(Mixed(), torch.randn(4, WIDTH)).work["bfloat16"]
    assert of_kind(works, "product/odd") and of_kind(works, "product/even") and not of_kind(works, "product")
    assert of_kind(works, "elementwise/broadcast") and of_kind(works, "elementwise")
    (mean,) = of_kind(works, "reduction/inner")
    assert mean.dims == ((34.0, 0.0), mean.moved)  # rows of 34, and the bytes moved
    padded = operator_seconds(of_kind(works, "product/odd")[0], 64, make_machine(), how="compiled")
    assert padded > 0  # the compiler pads: its time is that of an aligned product, and of a copy


def test_a_copy_or_sum_of_what_is_transposed_has_a_kernel_of_its_own():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.across = nn.Linear(12, 12, bias=False)

        def forward(self, x):
            y = self.across(x.transpose(1, 2)).transpose(1, 2)  # the product reads rows: a copy
            heads = x.unflatten(2, (2, 8)).transpose(1, 2).contiguous()  # its rows stay: merely turned
            return (x + y).sum() + heads.square().sum()

    works = recorded(Mixer(), torch.randn(4, 12, 16)).work["float32"]
    assert of_kind(works, "copy/transposed") and of_kind(works, "copy/turned")
    assert of_kind(works, "elementwise/transposed") and of_kind(works, "elementwise")


def test_products_of_experts_are_done_group_by_group_unless_in_16_bits():
    left, right, ends = torch.ones(32, 8), torch.ones(4, 8, 16), torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    grouped = torch.ops.aten._grouped_mm.default

    def kind(*args):
        return described(grouped, "_grouped_mm", args, {}, list(args), [torch.ones(32, 16)])

    assert kind(left, right, ends) == ("product/group", (8.0, 16.0, 8.0, 4.0))
    assert kind(left.bfloat16(), right.bfloat16(), ends) == ("product", (32.0, 16.0, 8.0))
    assert kind(left.t(), torch.ones(32, 16), ends) == ("product/group", (8.0, 16.0, 8.0, 4.0))  # the weights' gradient
    machine = make_machine()
    works = [Work(key="product/group", dtype="float32", phase="forward", in_block=True, flops=(0.0, 0.0), moved=(0.0, 0.0),
                  dims=((0.0, 8.0), (16.0, 0.0), (8.0, 0.0), (4.0, 0.0)))]  # fmt: skip
    assert operator_seconds(works[0], 3, machine) == pytest.approx(4 * 3 * 8 * 16 * 8 * 1e-12)
    times = pass_time(works, 3, machine)
    place = ("forward", True)
    assert times.host[place] == pytest.approx(1.38 * 4 * 10e-6)  # the host starts four products,
    assert times.device[place] == pytest.approx(times.host[place] + 4 * 3 * 8 * 16 * 8 * 1e-12)  # and both wait in turn


def test_rows_wider_than_the_table_take_what_their_bytes_take():
    grids = {"softmax": Grid(((64.0, 1024.0), (1.0, 1e12)), (1e-9, 1e3) * 2)}
    machine = make_machine(times=Timetable(grids, HOST))
    softmax = Work(key="softmax/forward", dtype="float32", phase="forward", in_block=False, flops=(0.0, 0.0), moved=(1e6, 0.0),
                   dims=((50257.0, 0.0), (1e6, 0.0)))  # fmt: skip
    assert operator_seconds(softmax, 1, machine) == pytest.approx(1e-3)


def test_recurrent_layers_take_what_was_measured_for_each_step():
    grids = {"recurrent/forward": Grid(((1.0, 1e3), (1.0, 1e4)), (64e-6,) * 4)}
    machine = make_machine(times=Timetable(grids, HOST))
    layer = Work(key="recurrent/forward", dtype="float32", phase="forward", in_block=False, flops=(0.0, 0.0), moved=(0.0, 0.0),
                 dims=((100.0, 0.0), (0.0, 1.0), (96.0, 0.0), (32.0, 0.0), (32.0, 0.0)))  # fmt: skip
    assert operator_seconds(layer, 8, machine) == pytest.approx(
        100 * 1e-6 * 3 / 4
    )  # three gates where an LSTM has four


def test_operators_of_a_small_model_are_those_counted_by_hand(mlp):
    works = mlp.work["float32"]
    up, down = of_kind(works, "product")
    assert up.flops == (0.0, 2.0 * WIDTH * HIDDEN) and down.flops == (0.0, 2.0 * HIDDEN * CLASSES)
    assert up.dims == ((0.0, 1.0), (HIDDEN, 0.0), (WIDTH, 0.0))  # a row for each sample
    assert up.moved == (4.0 * WIDTH * HIDDEN, 4.0 * (WIDTH + HIDDEN))  # the weight, and input and output of a sample
    # Backward: gradients of both weights, and of what the second layer was given; the samples have none.
    backward = of_kind(works, "product", "backward")
    assert sorted(work.flops[1] * work.count for work in backward) == sorted(
        [2.0 * WIDTH * HIDDEN, 2.0 * HIDDEN * CLASSES, 2.0 * HIDDEN * CLASSES]
    )
    relu = [work for work in of_kind(works, "elementwise") if work.moved[1] == 2 * 4.0 * HIDDEN]
    assert len(relu) == 1 and relu[0].flops == (0.0, 0.0)
    assert not any(work.in_block for work in works)


def test_autocast_adds_the_casts_and_computes_in_16_bits(mlp):
    products = [work for work in mlp.work["bfloat16"] if work.key == "product"]
    assert {work.dtype for work in products} == {"bfloat16"}
    casts = of_kind(mlp.work["bfloat16"], "copy")
    assert (6.0 * WIDTH * HIDDEN, 0.0) in {work.moved for work in casts}  # a weight: read in 32 bits, written in 16


def test_convolutions_are_told_apart_and_norms_have_a_direction():
    works = recorded(Picture(), torch.randn(4, 8, 6, 6)).work["float32"]
    (dense,) = of_kind(works, "conv/3/first/forward")
    assert (
        dense.dims == ((pytest.approx(math.sqrt(8 * 16)), 0.0), (0.0, 36.0)) and dense.flops[1] == 2 * 8 * 16 * 9 * 36
    )
    (each,) = of_kind(works, "depthwise/first/forward")
    assert each.dims == ((3.0, 0.0), (16.0, 0.0), (0.0, 36.0))
    assert of_kind(works, "norm/batch/backward", "backward") and of_kind(works, "depthwise/first/backward", "backward")


def test_operators_of_blocks_are_known_in_both_directions_and_few_blocks_stand_for_all():
    class Deep(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Mlp() for _ in range(depth)])
            for block in self.blocks:
                block.down = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    works = recorded(Deep(9), torch.randn(4, WIDTH)).work["float32"]
    inside = [work for work in works if work.in_block and work.key == "product"]
    for phase, times in (("forward", 1), ("backward", 2)):
        flops = sum(work.count * work.flops[1] for work in inside if work.phase == phase)
        assert flops == pytest.approx(times * 9 * 2 * 2 * WIDTH * HIDDEN)
    outside = sum(work.count * work.flops[1] for work in works if not work.in_block)
    assert outside == pytest.approx(2 * 2 * WIDTH * WIDTH)  # forward, and the weight's gradient


def call(key, inputs, outputs, phase="forward"):
    return Called(key, key, "float32", phase, False, 0.0, 0.0, (), tuple(inputs), tuple(outputs))


def test_a_compiler_reads_and_writes_only_what_crosses_a_kernels_edge():
    calls = [
        call("product", [(0, 8.0), (1, 8.0)], [(2, 100.0)]),
        call("elementwise", [(2, 100.0)], [(3, 100.0)]),
        call("elementwise", [(3, 100.0), (9, 4.0)], [(4, 100.0)]),
        call("norm/layer/forward", [(4, 100.0)], [(5, 50.0)]),
        call("product", [(5, 50.0), (1, 8.0)], [(6, 100.0)]),
        call("elementwise", [(4, 100.0)], [(7, 100.0)], "backward"),
    ]
    kernels = fused(calls)
    assert [kernel.key for kernel in kernels].count("product") == 2 and len(kernels) == 4
    (chain,) = [kernel for kernel in kernels if kernel.key == "fused/reduction"]
    assert chain.moved == 100 + 4 + 100 + 50  # in: a product and a bias; out: what backward reads, and the norm


def test_a_reduction_over_rows_ends_a_kernel():
    calls = [
        call("elementwise", [(0, 100.0)], [(1, 100.0)]),
        call("reduction/outer", [(1, 100.0)], [(2, 10.0)]),
        call("elementwise", [(2, 10.0)], [(3, 10.0)]),
    ]
    assert [kernel.key for kernel in fused(calls)] == ["fused/split", "fused/elementwise"]


def test_runs_that_differ_are_taken_in_proportion():
    one, two = call("elementwise", [(0, 4.0)], [(1, 4.0)]), call("copy", [(0, 4.0)], [(1, 4.0)])
    (work,) = work_of((2, 4), [[one, two], [replace(one, moved=8.0)]])
    assert work.moved == (0.0, 2.0)


def test_a_grid_is_a_straight_line_in_logarithms_and_grows_beyond_its_end():
    grid = Grid(((1.0, 4.0), (1.0, 16.0)), (1.0, 16.0, 4.0, 64.0))  # seconds = product of both
    assert grid.seconds((2.0, 4.0)) == pytest.approx(8.0)
    assert grid.seconds((8.0, 32.0)) == pytest.approx(256.0)
    assert grid.seconds((0.1, 1.0)) == pytest.approx(1.0)
    assert fill_in(grid.axes, [1.0, 16.0, 4.0, None]) == pytest.approx([1.0, 16.0, 4.0, 64.0])


def test_time_is_that_of_the_table_with_exact_arithmetic(mlp):
    machine, batch = make_machine(), 4096
    (up, _), relu = of_kind(mlp.work["float32"], "product"), of_kind(mlp.work["float32"], "elementwise")[0]
    assert operator_seconds(up, batch, machine) == pytest.approx(batch * WIDTH * HIDDEN * 1e-12)
    assert operator_seconds(relu, batch, machine) == pytest.approx(batch * 2 * 4 * HIDDEN * 1e-9)
    works = mlp.work["float32"]
    expected = sum(work.count * operator_seconds(work, batch, machine) for work in works)
    found = pass_time(works, batch, machine)
    assert sum(found.device.values()) == pytest.approx(expected)
    calls = {
        phase: sum(w.count for w in works if w.phase == phase and w.key != "view") for phase in ("forward", "backward")
    }
    views = sum(work.count for work in works if work.key == "view")
    assert sum(found.host.values()) == pytest.approx(
        1.38 * (10e-6 * calls["forward"] + 5e-6 * calls["backward"] + 1e-6 * views)
    )
    assert step_seconds(found) == pytest.approx(expected, rel=0.01)  # so much work that the host is far ahead


def test_small_batches_take_what_the_host_takes_and_time_grows_with_the_batch(mlp):
    machine = make_machine()
    times = {size: step_seconds(pass_time(mlp.work["float32"], size, machine)) for size in (1, 2, 4, 64, 1024, 8192)}
    host = sum(pass_time(mlp.work["float32"], 1, machine).host.values())
    assert times[1] == times[2] == pytest.approx(host, rel=0.05)
    assert list(times.values()) == sorted(times.values()) and times[8192] > 10 * times[1]
    graphed = step_seconds(pass_time(mlp.work["float32/fused"], 1, machine, how="graphed"))
    compiled = step_seconds(pass_time(mlp.work["float32/fused"], 1, machine, how="compiled"))
    assert graphed < compiled


def test_a_cpu_adds_up_and_pays_for_every_call(mlp):
    machine = make_machine(kind="cpu")
    found = pass_time(mlp.work["float32"], 64, machine)
    assert not any(found.host.values())
    bare = sum(work.count * operator_seconds(work, 64, machine) for work in mlp.work["float32"])
    assert step_seconds(found) > bare


def test_a_host_that_is_ahead_helps_the_stretch_after_it():
    assert queued([(1.0, 5.0), (5.0, 1.0)]) == pytest.approx(6.0)
    assert queued([(1.0, 2.0), (1.0, 2.0)]) == pytest.approx(4.0)
    assert queued([(3.0, 1.0)]) == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["h100-80g", "t4", "cpu"])
def test_a_machine_that_is_not_there_is_timed_from_its_data_sheet(mlp, name):
    machine = machine_from_spec(DeviceSpec.preset(name))
    assert machine.times is None
    times = [step_seconds(pass_time(mlp.work["float32"], size, machine)) for size in (1, 10**6, 10**7)]
    assert times == sorted(times) and times[2] > 5 * times[1]
    small = Work(key="product", dtype="float32", phase="forward", in_block=False, flops=(2.0 * 64**3, 0.0), moved=(4.0 * 3 * 64**2, 0.0),
                 dims=((64.0, 0.0),) * 3)  # fmt: skip
    large = replace(small, flops=(2.0 * 8192**3, 0.0), moved=(4.0 * 3 * 8192**2, 0.0), dims=((8192.0, 0.0),) * 3)
    rates = [work.flops[0] / operator_seconds(work, 1, machine) for work in (small, large)]
    assert rates[0] < rates[1] or name == "cpu"  # a small product does not fill an accelerator


def test_plans_are_timed_from_the_operators_that_were_recorded(mlp):
    machine = make_machine()
    times = {
        scope: predict_time(effects(micro=4096, compile=scope), mlp, machine)["compute"] for scope in ("none", "model")
    }
    plain, fused_ones = mlp.work["float32"], mlp.work["float32/fused"]
    assert times["none"] == pytest.approx(step_seconds(pass_time(plain, 4096, machine, rate="float32")))
    expected = pass_time(fused_ones, 4096, machine, rate="float32", how="compiled", is_channels_last=True)
    assert times["model"] == pytest.approx(step_seconds(expected))
    assert sum(work.count * work.moved[1] for work in fused_ones) < sum(work.count * work.moved[1] for work in plain)
    whole, parts = (predict_time(effects(micro=8 // n, accumulation=n), mlp, machine)["compute"] for n in (1, 8))
    assert parts > 7 * whole  # micro-batches that are too small wait for the host, each of them


def test_a_table_is_measured_once_and_comes_back_from_its_file(monkeypatch, tmp_path):
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path))
    calls = []

    def measured(device, limit, ranks, known=()):
        calls.append(device)
        grids = {"elementwise/float32": {"axes": [[1.0, 2.0]], "values": [1e-6, 2e-6]}}
        return {
            "flops": {"float32": 1e9}, "bandwidth": 1e9, "launch": 1e-6, "threads": 1, "times": {"grids": grids, "host": {"forward": 2e-6}},
        }  # fmt: skip

    monkeypatch.setattr(machines, "_measured", measured)
    first, second = (profile_machine(torch.device("cpu"), time_limit=60.0) for _ in range(2))
    assert len(calls) == 1 and first.times == second.times and second.times.host == {"forward": 2e-6}
    assert second.times.grid("elementwise", "float32").seconds([2.0]) == pytest.approx(2e-6)


def test_a_table_that_there_was_no_time_for_is_completed_later_and_then_never_again(monkeypatch, tmp_path):
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path))
    asked = []

    def measured(device, limit, ranks, known=()):
        asked.append(tuple(known))
        name = "copy" if known else "elementwise"
        times = {
            "grids": {name: {"axes": [[1.0, 2.0]], "values": [1e-6, 2e-6]}},
            "host": {"view": 1e-6},
            "is_complete": bool(known),
        }
        return {"flops": {"float32": 1e9}, "bandwidth": 1e9, "launch": 1e-6, "threads": 1, "times": times}

    monkeypatch.setattr(machines, "_measured", measured)
    found = [profile_machine(torch.device("cpu"), time_limit=limit) for limit in (60.0, 0.0, 60.0, 60.0)]
    assert asked == [(), ("elementwise",)]  # without time nothing is measured, and nothing twice
    assert [sorted(machine.times.grids) for machine in found] == [["elementwise"]] * 2 + [["copy", "elementwise"]] * 2


@pytest.mark.parametrize(
    "grid",
    [
        {"axes": [[2.0, 1.0]], "values": [1.0, 1.0]},
        {"axes": [[1.0]], "values": [-1.0]},
        {"axes": [[1.0]], "values": []},
    ],
)
def test_a_damaged_table_is_rejected(grid):
    with pytest.raises(ValueError, match="not a grid"):
        machines.timetable_from_plain({"grids": {"product": grid}, "host": {}})


def test_what_is_known_is_not_measured_again(monkeypatch):
    asked = []

    def questions(device):
        for key in ("one", "two"):
            yield measure_operators.OperatorBenchmark(
                key, ((1.0,),), lambda size, key=key: asked.append(key) or (lambda: None)
            )

    monkeypatch.setattr(measure_operators, "_operator_benchmarks", questions)
    found = dict(measure_operators.measure_operators(torch.device("cpu"), 10.0, known=["one"]))
    assert asked == ["two"] and list(found) == ["two"]
    assert not dict(measure_operators.measure_operators(torch.device("cpu"), -1.0))  # no time, no grid


def test_a_recurrent_layer_and_a_condition_on_values_are_recorded():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True)

        def forward(self, x):
            if torch.rand(()) < 0.0:
                return x
            return F.relu(self.lstm(x)[0])

    works = recorded(Recurrent(), torch.randn(4, 5, WIDTH)).work["float32"]
    (layer,) = of_kind(works, "recurrent/forward")
    assert layer.flops[1] == pytest.approx(2 * 5 * 4 * HIDDEN * (WIDTH + HIDDEN))
    assert operator_seconds(layer, 8, make_machine()) > 0


def test_a_machine_without_a_table_is_still_read():
    held = {"times": None, **{key: value for key, value in vars(make_machine()).items() if key != "times"}}
    held["intra"] = held["inter"] = {"latency": 0.0, "bandwidth": 1.0}
    assert machine_from_plain(held).times is None


def test_compiling_takes_longer_for_more_and_for_other_kernels_and_less_for_blocks():
    def profile(*counts, in_block=True):
        works = tuple(
            Work(
                key="product",
                dtype="float32",
                phase="forward",
                in_block=in_block,
                flops=(float(n), 0.0),
                moved=(0.0, 0.0),
                count=count,
            )
            for n, count in enumerate(counts)
        )
        return make_profile(work={"float32": works, "float32/fused": works})

    machine, whole, blocks = make_machine(), effects(micro=1, compile="model"), effects(micro=1, compile="block")
    few, many, other = profile(100.0), profile(1000.0), profile(*[10.0] * 100)
    assert compile_seconds(effects(micro=1), few, machine) == 0.0
    assert (
        compile_seconds(whole, few, machine)
        < compile_seconds(whole, many, machine)
        < compile_seconds(whole, other, machine)
    )
    assert compile_seconds(blocks, many, machine) < compile_seconds(whole, many, machine)
    slow = make_machine(corrections={"compilation": 3.0})
    assert compile_seconds(whole, few, slow) == pytest.approx(3 * compile_seconds(whole, few, machine))


def test_a_trial_teaches_how_long_compiling_takes():
    result = TrialResult(outcome="ok", step_seconds=0.1, steps=3, startup_seconds=60.0)
    learnt = machines.learnt(
        make_machine(), machines.Prediction(kind="k", step_seconds=0.1, peak_bytes=1.0, compile_seconds=20.0), result
    )
    assert learnt.corrections == {"k": pytest.approx(1.0), "compilation": pytest.approx(3.0)}


def test_attention_that_the_compiler_writes_out_keeps_more_than_eager_mode():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = self.inner(x).unflatten(-1, (3, 2, WIDTH // 2)).unbind(2)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    task = TrainingTask(model=Attention(), call=CallModel(), loss_func=mean_square, samples=torch.randn(4, 64, WIDTH))
    profile = ModelProfiler(task).profile(["bfloat16/compiled"])
    scores = 2 * 64 * 64 * 4  # two heads, in float32
    assert profile.compiled_bytes["bfloat16"] > scores > profile.saved_bytes("bfloat16")
    works = profile.work["bfloat16"]
    assert of_kind(works, "attention/dropout/forward") and of_kind(works, "attention/dropout/backward", "backward")
    (attention,) = of_kind(works, "attention/dropout/forward")
    machine = make_machine()
    assert operator_seconds(attention, 4, machine, how="compiled") > 4 * scores * 4 * 1e-9  # its passes over the scores


class AsksForValues(nn.Module):
    """Its condition on values stops a trace, and the compiler's front end goes around it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x):
        x = self.up(x).relu()
        if (x.detach().sum() > 1e9).all():
            x = x / 2
        return self.down(x)


def test_code_that_asks_for_values_is_captured_by_the_compilers_front_end():
    task = TrainingTask(model=AsksForValues(), call=CallModel(), loss_func=mean_square, samples=torch.randn(4, WIDTH))
    profile = ModelProfiler(task).profile(["float32/compiled"])
    assert not profile.notes and profile.compiled_bytes["float32"] >= 4 * 1024  # what the second layer was given
    assert profile.peak("float32/compiled", 64) > profile.peak("float32/compiled", 2)


def test_the_benchmark_counts_errors_and_knows_what_is_left(tmp_path):
    from benchmarks import step_prediction as bench

    rows = [
        {"model": "gpt2", "mode": "eager", "batch": size, "predicted_seconds": 1.0 + size / 10, "seconds": 1.0}
        | {"predicted_bytes": 1.0, "bytes": 1.0}
        for size in (2, 8, 32)
    ]  # fmt: skip
    found = bench.summary(rows)
    assert found["eager seconds"] == {"rows": 3, "median_error": pytest.approx(0.8), "within_30%": pytest.approx(1 / 3)}
    assert found["all bytes"]["median_error"] == 0.0 and "compiled seconds" not in found
    assert "gpt2" in bench.shown(rows[0]) and len(bench.SUBJECTS) == 20
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"environment": {}, "rows": rows[:2]}))
    chosen = argparse.Namespace(
        resume=str(path), only=None, limit=1.0, tiny=False, cpu=True, modes=["eager"], dump=None
    )
    assert bench.Parent(chosen, path)._rows_of("gpt2") == [("eager", 32)]


def test_attention_with_a_learnt_bias_keeps_its_scores_in_both_modes():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.zeros(1, 2, 64, 64))

        def forward(self, x):
            q, k, v = self.inner(x).unflatten(-1, (3, 2, WIDTH // 2)).unbind(2)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype))

    profile = recorded(Biased(), torch.randn(4, 64, WIDTH))
    assert profile.saved_bytes("bfloat16") > 2 * 64 * 64 * 4  # the shares of two heads, in float32
    assert not any(work.key.startswith("attention") for work in profile.work["bfloat16"])


def test_patches_are_products_and_deconvolutions_count_what_goes_in():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut, self.grow = nn.Conv2d(3, 16, 4, stride=4), nn.ConvTranspose2d(16, 8, 2, stride=2)

        def forward(self, x):
            return self.grow(self.cut(x))

    works = recorded(Patches(), torch.randn(4, 3, 16, 16)).work["float32"]
    (cut,) = of_kind(works, "patch/first/forward")
    assert cut.dims == ((48.0, 0.0), (0.0, 16.0))  # 16 patches of 3 x 4 x 4 numbers
    (grow,) = of_kind(works, "conv/1/first/forward")
    assert grow.dims[1] == (0.0, 16.0)


def test_what_a_late_child_has_printed_counts():
    assert machines._last_line('{"flops": 1}\n{"flops": 2}\n{"flo') == {"flops": 2}
    assert machines._last_line("no answer") is None and machines._last_line("") is None


def test_recurrent_layers_are_not_counted_as_compiled():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    task = TrainingTask(model=Recurrent(), call=CallModel(), loss_func=mean_square, samples=torch.randn(4, 5, WIDTH))
    profile = ModelProfiler(task).profile(["float32/compiled"])
    assert profile.compiled_bytes is None and any("recurrent" in note for note in profile.notes)
