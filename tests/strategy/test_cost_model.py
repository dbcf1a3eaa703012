"""The closed forms of memory and time, against numbers computed by hand for a model of four equal blocks."""

import dataclasses

import pytest

from drivetrain.strategy.profile.values import Link, MachineProfile, ModelProfile, UnitProfile
from drivetrain.strategy.search.candidates import label_of
from drivetrain.strategy.search.cost import (
    Cost,
    activation_bytes,
    collective_time,
    communication_time,
    gathered_bytes,
    link_of,
    predict_memory,
    predict_time,
)
from tests.strategy.candidates import candidate as make_candidate
from tests.strategy.candidates import effects

MILLION = 10**6


def by_arithmetic(value):
    return {"float32": float(value), "bfloat16": value / 2}


def make_profile(**changes):
    """40 M parameters in four blocks and 10 M outside; 100 bytes saved by a block for each sample, 60 outside, 40 of them logits."""
    block = UnitProfile(
        path="blocks", count=4, parameters=10 * MILLION, forward_flops=20e6, saved_bytes=by_arithmetic(100 * MILLION),
        input_bytes=by_arithmetic(10 * MILLION), selective_bytes=by_arithmetic(50 * MILLION), traffic_bytes=by_arithmetic(200 * MILLION),
        operations=20, heads=8,
    )  # fmt: skip
    rest = dataclasses.replace(
        block, path="", count=1, parameters=10 * MILLION, saved_bytes=by_arithmetic(60 * MILLION), operations=5, heads=None,
    )  # fmt: skip
    values = {
        "units": (block, rest), "parameters": 50 * MILLION, "trainable": 50 * MILLION, "parameter_bytes": 200 * MILLION,
        "buffer_bytes": 0, "input_bytes": 0.0, "logits_bytes": by_arithmetic(40 * MILLION), "sequence_length": 128,
        "optimizer_bytes": 400 * MILLION, "optimizer_temporary_bytes": 200 * MILLION, "cross_entropy_head": "head",
    }  # fmt: skip
    return ModelProfile(**{**values, **changes})


def make_machine(**changes):
    values = {
        "device": "test", "kind": "cuda", "memory": 16 * 2**30, "free": 16 * 2**30, "flops": {"float32": 1e9, "bfloat16": 4e9},
        "bandwidth": 1e12, "launch": 0.0, "intra": Link(latency=0.0, bandwidth=1e9), "inter": Link(latency=0.0, bandwidth=1e8),
        "per_node": 4, "reserve_bytes": 0.0, "reserve_share": 0.0,
    }  # fmt: skip
    return MachineProfile(**{**values, **changes})


PROFILE, MACHINE = make_profile(), make_machine()


def peak(candidate, profile=PROFILE, machine=MACHINE):
    return sum(predict_memory(candidate, profile, machine).values()) / MILLION


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        # Large batches: parameters 200 + Adam 400 + activations; gradients arrive as activations leave.
        (effects(micro=10), 600 + 10 * 460),
        # Gradients outlive a pass inside a window.
        (effects(micro=5, accumulation=2), 800 + 5 * 460),
        # Checkpoints: inputs of four blocks, one block computed again, what is outside.
        (effects(micro=10, checkpoint="full"), 600 + 10 * (4 * 10 + 100 + 60)),
        (effects(micro=10, checkpoint="second"), 600 + 10 * (2 * 10 + 2 * 100 + 100 + 60)),
        (effects(micro=10, checkpoint="selective"), 600 + 10 * (4 * 50 + 100 + 60)),
        (effects(micro=10, checkpoint="offload"), 600 + 10 * (2 * 10 + 100 + 60)),
        # 16 bits: half the activations, and autocast's copies of 50 M weights.
        (effects(micro=10, precision="bfloat16"), 600 + 10 * 230 + 100),
        # Weights in 16 bits: 100 + Adam 400 + float32 copies 200.
        (effects(micro=10, precision="half"), 100 + 600 + 10 * 230),
        # A chunked loss keeps an eighth of the logits.
        (effects(micro=10, chunked_loss=True), 600 + 10 * (460 - 40 * 7 / 8)),
        # DDP on two ranks: its buckets hold the gradients all the time.
        (effects(data=2, micro=10), 800 + 10 * 460),
        (effects(data=4, sharding="zero1", micro=10), 400 + 100 + 10 * 460),
        # fsdp on four: (4 + 8)/4 bytes a parameter, the rest and two blocks gathered, one unit's gradient.
        (effects(zero=4, sharding="fsdp", micro=10), 150 + 10 * 460 + 4 * 30 + 40),
        (effects(zero=4, sharding="zero2", micro=10), 150 + 10 * 460 + 4 * 50 + 40),
        # ... and whole gradients in float32 inside a window.
        (effects(zero=4, sharding="fsdp", micro=10, accumulation=2), 150 + 50 + 10 * 460 + 4 * 30 + 40 + 200),
        # Tensor parallel over two: everything fixed halves, of the blocks' activations 10/34 + 24/34/2.
        (effects(tensor=2, micro=10), 300 + 10 * (400 * (10 + 12) / 34 + 60)),
        (effects(sequence=2, micro=10), 600 + 10 * 460 / 2),
        # Two stages and four micro-batches of two: two in flight on the first stage, 2 blocks each; gradients stay.
        (effects(pipe=2, micro=8, microbatches=4), 400 + 8 / 4 * max(2 * 200, 200 + 60)),
        # ... sharded too: torch keeps a stage gathered, and its gradients whole, until the last micro-batch.
        (effects(pipe=2, zero=4, sharding="fsdp", micro=8, microbatches=4), 100 + 8 / 4 * 2 * 200 + 4 * 25 + 40 + 100),
        (effects(micro=10, cpu_offload=True), 200 + 10 * 460),
    ],
)  # fmt: skip
def test_memory_is_what_a_pencil_gives(candidate, expected):
    assert peak(candidate) == pytest.approx(expected)


def test_with_few_activations_the_update_is_the_peak():
    light = make_profile(units=tuple(_lighter(unit) for unit in PROFILE.units))
    assert peak(effects(micro=1, fused=True), light) == pytest.approx(16 * 50)  # bytes a parameter, with Adam
    assert peak(effects(micro=1), light) == pytest.approx(20 * 50)  # and what an unfused step allocates


def _lighter(unit):
    return dataclasses.replace(
        unit,
        saved_bytes=by_arithmetic(MILLION),
        input_bytes=by_arithmetic(MILLION),
        selective_bytes=by_arithmetic(MILLION),
    )


def test_reserve_is_a_fixed_part_and_a_share():
    machine = make_machine(reserve_bytes=5.0 * MILLION, reserve_share=0.1)
    assert predict_memory(effects(micro=10), PROFILE, machine)["reserve"] == pytest.approx(
        5 * MILLION + 0.1 * 5200 * MILLION
    )


def test_compiled_plans_have_activations_of_their_own():
    profile = make_profile(
        compiled_bytes={"bfloat16": 115.0 * MILLION}, compiled_fixed_bytes={"bfloat16": 7.0 * MILLION}
    )
    whole = effects(micro=10, precision="bfloat16", compile="model")
    assert activation_bytes(whole, profile) == pytest.approx((10 * 115 + 7) * MILLION)
    output = 10 * (40 - 20)  # the gradient of the output in 16 bits; the copies of weights are among the fixed ones
    assert peak(whole, profile) == pytest.approx(600 + 10 * 115 + 7 + output)
    assert predict_memory(whole, profile, MACHINE)["temporary"] == pytest.approx(output * MILLION)
    chunked = effects(
        micro=10, precision="bfloat16", compile="model", chunked_loss=True
    )  # no whole output, no whole gradient
    assert predict_memory(chunked, profile, MACHINE).get("temporary", 0.0) == 0.0
    blocks = effects(
        micro=10, precision="bfloat16", compile="block"
    )  # half of the blocks' activations, and all outside of them
    assert activation_bytes(blocks, profile) == pytest.approx(10 * (200 * 0.5 + 30) * MILLION)
    other = effects(micro=10, compile="model")  # not captured: taken as in eager mode
    assert activation_bytes(other, profile) == pytest.approx(10 * 460 * MILLION)


def test_the_prediction_of_a_plain_plan_is_the_tracked_peak():
    lines = {
        "float32": ((900.0 * MILLION, 500.0 * MILLION), (1000.0 * MILLION, 0.0)),
        "float32/full": ((700.0 * MILLION, 250.0 * MILLION),),
    }
    profile = make_profile(peak_lines=lines)
    assert peak(effects(micro=10, fused=True), profile) == pytest.approx(900 + 5000)
    assert peak(effects(micro=10, fused=True, checkpoint="full"), profile) == pytest.approx(700 + 2500)
    excess = 5900 - 5200  # what lives for a moment is there on every rank
    assert peak(effects(data=2, micro=10, fused=True), profile) == pytest.approx(800 + 4600 + excess)


def test_gathered_parameters_are_in_16_bits_under_autocast():
    candidate = effects(zero=4, sharding="fsdp", precision="bfloat16", micro=1)
    assert gathered_bytes(candidate, PROFILE) == pytest.approx((2 * 30 + 40) * MILLION)


def test_time_of_one_rank():
    time = predict_time(effects(micro=10, fused=True), PROFILE, MACHINE)
    weights = 3 * 200 * MILLION / 1e12  # read by forward, and twice by backward
    traffic = 3 * 10 * 5 * 0.8 * 200 * MILLION / 1e12  # what is not in matrix products
    assert time["compute"] == pytest.approx(
        3 * 10 * 5 * 20e6 / 1e9 + traffic + weights
    )  # five units; backward counts twice
    assert time["optimizer"] == pytest.approx((3 * 200 + 2 * 400) * MILLION / 1e12)
    slower = predict_time(effects(micro=10, checkpoint="full"), PROFILE, MACHINE)
    assert slower["recompute"] == pytest.approx(10 * 4 * 20e6 / 1e9 + traffic * 4 / 15)
    half = predict_time(effects(micro=10, checkpoint="second"), PROFILE, MACHINE)["recompute"]
    assert half == pytest.approx(slower["recompute"] / 2)
    assert slower["optimizer"] == pytest.approx(2.5 * time["optimizer"])
    faster = predict_time(effects(micro=10, precision="bfloat16"), PROFILE, MACHINE)
    assert faster["compute"] == pytest.approx(3.0 / 4 + traffic / 2 + weights / 2)


def test_few_large_passes_beat_many_small_ones():
    large, small = (predict_time(effects(micro=10 // n, accumulation=n), PROFILE, MACHINE)["compute"] for n in (2, 5))
    each = (3 * 200 + 3 * 200) * MILLION / 1e12  # weights, and gradients that are added up
    work = 3.0 + 3 * 10 * 5 * 0.8 * 200 * MILLION / 1e12
    assert (large, small) == (pytest.approx(work + 2 * each), pytest.approx(work + 5 * each))


def test_a_unit_takes_arithmetic_and_traffic_one_after_the_other_or_its_launches():
    traffic = make_machine(
        bandwidth=1e9
    )  # 200 MB at 1 GB/s for a sample of each unit, 80 % of it between products, 30 % when compiled
    weights, products = 0.6, 3.0
    eager = predict_time(effects(micro=10), PROFILE, traffic)
    assert eager["compute"] == pytest.approx(3 * 5 * 10 * 0.16 + products + weights)
    fused = predict_time(effects(micro=10, compile="model"), PROFILE, traffic)
    assert fused["compute"] == pytest.approx(3 * 5 * 10 * 0.06 + products + weights)
    launches = make_machine(launch=1.0, bandwidth=1e15)
    assert predict_time(effects(micro=1), PROFILE, launches)["compute"] == pytest.approx(3 * 85, rel=1e-5)
    assert predict_time(effects(micro=1, compile="model"), PROFILE, launches)["compute"] == pytest.approx(
        3 * 85 / 4, rel=1e-5
    )
    graphs = predict_time(effects(micro=1, compile="model", graphs=True), PROFILE, launches)
    assert graphs["compute"] == pytest.approx(3 * 5 * 20e6 / 1e9, rel=1e-5)


def test_gpt2_on_an_h200_takes_what_was_measured_there():
    """Measured with torch 2.11, 64 x 1,024 tokens, three steps each: 121.4 ms compiled, 171.9 ms in eager mode, both in bfloat16."""
    mebi = 2.0**20
    block = dataclasses.replace(
        PROFILE.units[0], count=12, parameters=7_087_872, forward_flops=17.717e9,
        traffic_bytes={"float32": 114.06 * mebi, "bfloat16": 78.06 * mebi}, operations=10,
    )  # fmt: skip
    head = dataclasses.replace(
        block, path="", count=1, parameters=39_421_440, forward_flops=79.121e9,
        traffic_bytes={"float32": 804.02 * mebi, "bfloat16": 1003.52 * mebi}, operations=8,
    )  # fmt: skip
    parameters = 124_475_904
    profile = make_profile(
        units=(block, head), parameters=parameters, trainable=parameters, parameter_bytes=4 * parameters, optimizer_bytes=8 * parameters
    )  # fmt: skip
    h200 = make_machine(flops={"float32": 3.89e13, "bfloat16": 6.44e14}, bandwidth=3.83e12, launch=5e-6)
    for scope, measured in (("model", 0.1214), ("none", 0.1719)):
        candidate = effects(micro=64, precision="bfloat16", fused=True, compile=scope)
        assert sum(predict_time(candidate, profile, h200).values()) == pytest.approx(measured, rel=0.05)


def test_measured_corrections_multiply_the_kind_they_are_for():
    machine = make_machine(corrections={effects(precision="bfloat16").kind: 1.5}, bandwidth=1e18)
    plain = predict_time(effects(micro=10), PROFILE, machine)["compute"]
    assert predict_time(effects(micro=10, precision="bfloat16"), PROFILE, machine)["compute"] == pytest.approx(
        plain / 4 * 1.5
    )


def test_collectives_follow_latency_and_bandwidth():
    link = Link(latency=1e-3, bandwidth=1e9)
    assert collective_time(8e9, 8, link) == pytest.approx(7 * (1e-3 + 1.0))
    assert collective_time(8e9, 1, link) == 0.0


def test_only_what_compute_cannot_hide_is_exposed():
    ddp = effects(data=2, micro=10)
    reduce = 2 * 200e6 / 2 / 1e9  # twice (n - 1) · S / (n β)
    assert communication_time(ddp, PROFILE, MACHINE, busy=0.0) == pytest.approx(reduce)
    assert communication_time(ddp, PROFILE, MACHINE, busy=3.0) == 0.0
    assert communication_time(ddp, PROFILE, MACHINE, busy=0.15) == pytest.approx(reduce - 0.1)  # behind backward alone
    window = effects(data=2, micro=5, accumulation=2)  # and behind the backward of the last pass alone
    assert communication_time(window, PROFILE, MACHINE, busy=0.15) == pytest.approx(reduce - 0.05)
    fsdp = effects(zero=2, sharding="fsdp", micro=10)
    assert communication_time(fsdp, PROFILE, MACHINE, busy=0.0) == pytest.approx(3 * 0.1)
    zero2 = effects(zero=2, sharding="zero2", micro=5, accumulation=2)
    assert communication_time(zero2, PROFILE, MACHINE, busy=0.0) == pytest.approx(3 * 0.1)


def test_axes_inside_a_node_use_the_fast_link():
    candidate = effects(data=2, zero=4, sharding="fsdp")
    assert link_of(candidate, "zero", MACHINE) is MACHINE.intra and link_of(candidate, "data", MACHINE) is MACHINE.inter
    hybrid = communication_time(candidate, PROFILE, MACHINE, busy=0.0)
    inside = 3 * 3 * 200e6 / 4 / 1e9
    assert hybrid == pytest.approx(inside + 2 * (200e6 / 4) / 2 / 1e8)


def test_a_pipeline_stands_still_at_both_ends():
    time = predict_time(effects(pipe=2, micro=8, microbatches=4), PROFILE, make_machine(bandwidth=1e18))
    busy = 8 * 3 * (2 + 1) * 20e6 / 1e9  # half of the blocks, and what is outside
    assert time["compute"] == pytest.approx(busy)
    assert time["bubble"] == pytest.approx(busy * 1 / 4)  # of the whole: (p - 1)/(m + p - 1)
    assert time["bubble"] / (time["bubble"] + busy) == pytest.approx(1 / 5)


def test_tensor_parallel_activations_are_never_hidden():
    time = communication_time(effects(tensor=2, micro=1), PROFILE, MACHINE, busy=1e9)
    assert time == pytest.approx(4 * 4 * 2 * 10e6 / 2 / 1e9)


def test_offloaded_state_travels_over_the_host_link():
    machine = make_machine(host_bandwidth=1e8)
    time = predict_time(effects(micro=1, cpu_offload=True), PROFILE, machine)
    assert time["transfer"] == pytest.approx(2 * 200e6 / 1e8)


def test_a_cost_adds_up_and_scales_by_name():
    cost = Cost({"params": 1.0, "activations": 3.0}, {"compute": 2.0, "recompute": 1.0})
    assert (cost.peak_bytes, cost.step_seconds) == (4.0, 3.0)
    assert cost.scaled(activations=0.5, recompute=0.0).peak_bytes == 2.5
    with pytest.raises(ValueError, match="not a part of a cost"):
        cost.scaled(activation=0.5)


def test_candidates_become_plans_and_labels():
    candidate = make_candidate(
        zero=4,
        data=2,
        sharding="fsdp",
        precision="bfloat16",
        checkpoint="second",
        micro=4,
        accumulation=2,
        compile="block",
        fused=True,
    )
    plan = candidate.plan()
    assert plan.opt_names() == [
        "parallel_mode",
        "micro_batch",
        "fsdp",
        "amp_native",
        "native_dynamo",
        "checkpoint",
        "fused_optimizer",
    ]
    configs = {entry.name: entry.config for entry in plan}
    assert configs["parallel_mode"].axes == (("zero", 4), ("data", 2))
    assert (configs["checkpoint"].mode, configs["checkpoint"].every) == ("full", 2)
    assert configs["micro_batch"].size == 4 and configs["native_dynamo"].scope == "block"
    assert plan.batch.global_size == 64 and plan.mesh == (("data", 2), ("zero", 4))
    plan.validate(device="cpu", world_size=8)
    assert label_of(candidate) == "data 2, zero 4, fsdp, bf16, compile blocks, checkpoint second, fused, 4 x 2"
