"""The search: which candidates there are, how they are ranked, and how a plan is found, verified, explained and agreed on."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from drivetrain.core.errors import BatchSizeError, ConfigError, ConflictError, PlanInfeasible, UnknownMethodError
from drivetrain.strategy import explain
from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.device_spec import DeviceSpec
from drivetrain.strategy.method import Method
from drivetrain.strategy.methods.kernels import CpuThreadsConfig
from drivetrain.strategy.registry import _methods, find_method, register_method
from drivetrain.strategy.search import find
from drivetrain.strategy.search.constraints import budget_bytes, parse_memory
from drivetrain.strategy.search.cost import Cost, parts_read
from drivetrain.strategy.search.decision import Comparison, Measurement, choose, summary
from drivetrain.strategy.search.find import SearchConstraints, find_plan
from drivetrain.strategy.search.knowledge import Knowledge, likely_mispredicted
from drivetrain.strategy.search.measure import Measuring, SearchTime, measuring_order
from drivetrain.strategy.search.ranking import (
    Scored,
    is_ruled_out,
    nearest_misses,
    order,
    pareto_front,
    predict,
    preferred,
    promising,
    sensitivity,
)
from drivetrain.strategy.search.space import SearchScope, build_space
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.trial.report import TrialResult
from drivetrain.strategy.value import Strategy
from tests.strategy.candidates import candidate, checkpoint_of, effects, profile_model, sharding_of
from tests.strategy.candidates import candidate as make_candidate
from tests.strategy.tasks import loss_func, make_data, make_model
from tests.strategy.test_cost_model import make_machine, make_profile

GPU = make_machine(flops={"float32": 5e13, "tf32": 3e14, "bfloat16": 6e14}, bandwidth=3e12, launch=5e-6)
CPU = make_machine(kind="cpu", flops={"float32": 1e11, "bfloat16": 5e10}, bandwidth=2e10, launch=3e-6)
H100 = DeviceSpec.preset("h100")
THREADS = {"cpu_threads": (CpuThreadsConfig(threads=1), CpuThreadsConfig(threads=4))}


def place(world=1, batch=64, machine=GPU, profile=None, model=None, **constraints):
    constraints = SearchConstraints(**({"spec": H100} if machine is GPU else {}), **constraints)
    task = TrainingTask(
        model=model, call=CallModel(), loss_func=loss_func, optim_func=torch.optim.AdamW, global_batch_size=batch
    )
    return SearchScope(
        task=task, constraints=constraints, profile=make_profile() if profile is None else profile, machine=machine,
        device=torch.device("cpu"), world=world,
    )  # fmt: skip


def space(*args, **kwargs):
    return build_space(place(*args, **kwargs))


# ---------------------------------------------------------------------------------------- the space


def test_thousands_of_candidates_share_one_global_batch_and_are_all_different():
    found = space(8).candidates
    assert 2000 < len(found) < 60_000 and len(set(found)) == len(found)
    assert {candidate.global_size for candidate in found} == {64} and {candidate.world for candidate in found} == {8}
    assert {sharding_of(c) for c in found} == {"none", "zero1", "zero2", "fsdp"}
    assert {checkpoint_of(c) for c in found} == {"none", "selective", "second", "full", "offload"}
    assert {c.effects.compiled for c in found} == {"none", "model", "block"}
    assert {c.effects.precision for c in found} == {"float32", "tf32", "bfloat16"}
    assert {candidate.micro * candidate.accumulation for candidate in found if candidate.data_ranks == 8} == {8}


@pytest.mark.filterwarnings("ignore:left out of the plan")  # what this device cannot run
def test_every_kind_of_candidate_is_a_valid_plan():
    for world in (8, 64):
        found = space(world, profile=make_profile(cross_entropy_head="head", parameter_bytes=10**11))
        seen = {}
        for one in found.candidates:
            seen.setdefault(tuple(one.names()), one)
        assert len(seen) > 100
        together = set().union(*seen)
        assert {"fsdp", "chunked_cross_entropy", "cpu_offload", "zero1"} <= together
        for one in seen.values():
            plan = found.plan(one)
            assert sorted(plan.opt_names()) == sorted(one.names())
            plan.validate(device="cpu", world_size=world)


def test_numerics_bound_the_precision():
    assert {c.effects.precision for c in space(numerics="exact").candidates} == {"float32"}
    assert {c.effects.precision for c in space(numerics="low").candidates} >= {"float32", "tf32", "bfloat16", "half"}
    old = make_machine(flops={"float32": 1e13, "float16": 1e14})
    assert {c.effects.precision for c in build_space(replace(place(), machine=old)).candidates} == {
        "float32",
        "float16",
    }


def test_a_cpu_is_searched_for_what_helps_there():
    found = space(2, machine=CPU, model=make_model()).candidates
    assert {sharding_of(c) for c in found} == {"none"} and not any(
        {"cpu_offload", "cuda_graphs"} & set(c.names()) for c in found
    )
    assert {c.effects.precision for c in found} == {"float32", "bfloat16"}
    assert "offload" not in {checkpoint_of(c) for c in found}


def test_on_a_cpu_numbers_of_threads_are_compared_and_none_is_trusted_without_a_trial():
    here = replace(place(machine=CPU, model=make_model()), local=THREADS)
    found = build_space(here)
    assert {c.effects.threads for c in found.candidates} == {None, 1, 4}
    chosen = candidate(micro=64, threads=4)
    assert chosen in found.candidates and "cpu_threads" in found.plan(chosen)
    assert found.plan(chosen)[0].config.threads == 4 and "threads 4" in chosen.kind
    machine = replace(CPU, threads=2)
    seconds = [predict(candidate(micro=64, threads=n), make_profile(), machine).seconds for n in (1, None, 4)]
    assert seconds == sorted(seconds, reverse=True)
    assert {c.effects.threads for c in build_space(replace(here, machine=GPU)).candidates} == {None}
    wanted = build_space(replace(here, constraints=SearchConstraints(included=(("cpu_threads", 3),))))
    assert {c.effects.threads for c in wanted.candidates} == {3}
    start = Strategy([("cpu_threads", 2), ("micro_batch", 8)])
    again = build_space(replace(here, constraints=SearchConstraints(start=start)))
    assert again.plain.effects.threads == 2 and {c.effects.threads for c in again.candidates} == {1, 2, 4}
    run = find._Search(make_task(), torch.device("cpu"), 1, SearchConstraints(), None)
    scored = [predict(c, make_profile(), machine) for c in (chosen, candidate(micro=64))]
    assert [item.candidate.effects.threads for item in run._trusted(scored)] == [None]
    asked = find._Search(make_task(), torch.device("cpu"), 1, SearchConstraints(included=("cpu_threads",)), None)
    assert len(asked._trusted(scored)) == 2


def test_a_batch_is_never_split_under_batch_norm():
    found = space(profile=make_profile(has_batchnorm=True))
    assert {c.accumulation for c in found.candidates} == {1}
    assert any("batch norms" in note for note in found.scope.notes)


def test_channels_last_needs_convolutions():
    conv = make_profile(has_convolution=True)
    assert {"channels_last" in c.names() for c in space(profile=conv, model=nn.Conv2d(3, 3, 3)).candidates} == {
        False,
        True,
    }
    assert {"channels_last" in c.names() for c in space().candidates} == {False}


def test_excluded_and_included_methods_and_groups():
    assert not any("native_dynamo" in c.names() for c in space(excluded=frozenset({"compile"})).candidates)
    assert {sharding_of(c) for c in space(4, excluded=frozenset({"zero"})).candidates} == {"none"}
    assert all(checkpoint_of(c) != "none" for c in space(included=("checkpoint",)).candidates)
    assert {sharding_of(c) for c in space(4, included=("zero",)).candidates} == {"zero1", "zero2", "fsdp"}
    fixed = space(included=(("micro_batch", 4), ("checkpoint", {"mode": "selective"}), ("amp_native", "bf16")))
    assert {(c.micro, checkpoint_of(c), c.effects.precision) for c in fixed.candidates} == {
        (4, "selective", "bfloat16")
    }
    assert all(
        "module_replace" in fixed.plan(c)
        for fixed in [space(included=("module_replace",))]
        for c in fixed.candidates[:5]
    )
    cpu = space(2, machine=CPU, included=("zero1",))
    assert {sharding_of(c) for c in cpu.candidates} == {"zero1"}


def test_unknown_and_contradictory_wishes_are_refused_before_anything_happens():
    with pytest.raises(UnknownMethodError, match="nope"):
        SearchConstraints(excluded=frozenset({"nope"}))
    with pytest.raises(ConflictError, match="both included and excluded"):
        SearchConstraints(excluded=frozenset({"half"}), included=("half",))
    with pytest.raises(ConflictError, match="load_strategy"):
        SearchConstraints(excluded=frozenset({"half"}), start=Strategy(["half"]))
    with pytest.raises(ConfigError, match="time_limit"):
        SearchConstraints(time_limit=-1)
    with pytest.raises(ConfigError, match="memory_budget"):
        SearchConstraints(memory_budget="lots")


def test_a_batch_that_no_mesh_divides_is_refused_with_the_nearest_sizes():
    with pytest.raises(BatchSizeError, match="8 and 12"):
        space(4, batch=10, machine=CPU)
    assert {c.global_size for c in space(4, batch=10, machine=CPU, allow_batch_rounding=True).candidates} == {8}


def test_finetuning_keeps_the_methods_and_varies_their_settings():
    start = Strategy(["checkpoint", ("micro_batch", 8), "fused_optimizer"])
    found = space(start=start)
    assert found.plan(found.candidates[0]) == Strategy(start, batch=found.candidates[0].batch)
    assert found.plain == found.candidates[0]
    names = {frozenset(found.plan(c).opt_names()) for c in found.candidates}
    assert names == {frozenset({"checkpoint", "micro_batch", "fused_optimizer"})}
    assert len({(checkpoint_of(c), c.micro) for c in found.candidates}) > 8
    tunable = space(start=Strategy([("checkpoint", None, True), ("micro_batch", 8)]))  # only what is marked is searched
    assert {c.micro for c in tunable.candidates} == {8} and len({checkpoint_of(c) for c in tunable.candidates}) > 2


class Turbo(Method):
    """A user's method: half the compute, twice the activations."""

    name, group = "turbo_of_a_user", "turbo"

    def estimate(self, cost: Cost, config) -> Cost:
        return cost.scaled(compute=0.5, activations=2.0)


@pytest.fixture
def turbo():
    register_method(Turbo)
    yield
    del _methods["turbo_of_a_user"]


def test_a_users_method_takes_part_through_candidates_and_estimate(turbo):
    where = place()
    found = build_space(where)
    with_it = [c for c in found.candidates if "turbo_of_a_user" in c.names()]
    assert with_it and len(with_it) * 2 >= len(found.candidates) - 1
    one = replace(candidate(micro=64), methods=tuple(item for item in with_it[0].methods if item[0] == Turbo.name))
    plain = candidate(micro=64)
    ours, theirs = (predict(c, where.profile, where.machine) for c in (one, plain))
    assert ours.cost.time["compute"] == pytest.approx(theirs.cost.time["compute"] / 2)
    best = order(predict(c, where.profile, where.machine) for c in found.candidates)[0]
    assert "turbo_of_a_user" in found.plan(best.candidate)
    assert not any("turbo_of_a_user" in c.names() for c in space(excluded=frozenset({"turbo"})).candidates)


def test_a_thousand_ranks_are_enumerated_and_ranked_in_seconds():
    begin = time.process_time()
    where = place(1024, batch=2048)
    scored = order(predict(c, where.profile, where.machine) for c in build_space(where).candidates)
    assert len(scored) > 1000 and len(pareto_front(scored)) < 200
    assert time.process_time() - begin < 60


# ---------------------------------------------------------------------------------------- ranking


def scored(seconds, peak, **candidate):
    return Scored(make_candidate(**candidate), Cost({"params": float(peak)}, {"compute": float(seconds)}))


def test_the_front_holds_what_nothing_equals_or_beats():
    fast, small = scored(1, 10, fused=True), scored(3, 2, checkpoint="full")
    simple = scored(2, 8)
    worse = scored(2.5, 9, checkpoint="full", fused=True)
    assert pareto_front([worse, small, simple, fast]) == [fast, simple, small]


def test_promising_candidates_are_of_different_kinds():
    many = [scored(1 + i / 100, 10 - i, micro=i + 1, precision="bfloat16") for i in range(9)]
    other, far = scored(1.5, 20, compile="model", micro=1), scored(9, 0.1, compile="block")
    twin = scored(1.0, 9.5, micro=1, precision="bfloat16", cpu_offload=True)
    chosen = promising([*many, other, far, twin], 4)
    assert len(chosen) == 4 and other in chosen and many[0] in chosen and far not in chosen and twin not in chosen
    without = promising([*many, other], 4, lambda candidate: candidate.effects.compiled == "none")
    assert other not in without and len(without) == 4


def test_ties_go_to_the_simpler_plan():
    assert order([scored(1, 5, fused=True), scored(1, 5)])[0].candidate == candidate()


def measurement(seconds, outcome="ok", **candidate):
    item = scored(1, 1, **candidate)
    result = TrialResult(outcome=outcome, step_seconds=seconds if outcome == "ok" else None, message="x")
    return Measurement(item, item.candidate.plan(), result)


def test_predicted_ties_go_to_fewer_methods_where_nothing_is_measured():
    fast, simple, slow = scored(1.0, 1, fused=True, cpu_offload=True), scored(1.015, 1, fused=True), scored(1.03, 1)
    assert preferred([slow, fast, simple]) == [simple, fast, slow]
    assert preferred([]) == []


def test_measured_ties_within_two_percent_go_to_fewer_methods():
    simple, fused = measurement(1.019), measurement(1.0, fused=True)
    assert choose([simple, fused]) is simple
    assert choose([measurement(1.03), fused]) is fused
    assert choose([simple, fused], tie=0.0) is fused
    assert choose([measurement(0.5, "wrong"), fused]) is fused
    assert choose([measurement(None, "oom")]) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"micro": 16, "accumulation": 1}, True),
        ({"micro": 4, "accumulation": 4}, False),
        ({"checkpoint": "none"}, True),
        ({"checkpoint": "full"}, False),
        ({"zero": 1, "data": 4, "sharding": "none"}, True),
        ({"sharding": "zero2"}, True),
        ({"precision": "bfloat16"}, False),
    ],
)
def test_out_of_memory_rules_out_whatever_needs_as_much(changes, expected):
    words = {"micro": 8, "accumulation": 2, "checkpoint": "selective", "sharding": "fsdp", "zero": 4}
    assert is_ruled_out(candidate(**{**words, **changes}), [candidate(**words)]) is expected


def test_nearest_misses_and_sensitivity_have_numbers():
    small, large = scored(2, 100 * 2**30, checkpoint="full"), scored(1, 120 * 2**30)
    misses = nearest_misses([large, small], 90 * 2**30)
    assert misses[0] == (small, 10 * 2**30)
    text = sensitivity([small, large], small, 110 * 2**30)
    assert text.startswith("10.0 GiB more would allow fp32") and "-50 %" in text
    assert sensitivity([small, large], large, 130 * 2**30) is None


def test_rescaling_predicts_memory_in_proportion_and_refuses_what_no_longer_fits():
    found = Strategy(
        [("parallel_mode", [("zero", 8)]), "fsdp"], mesh=[("zero", 8)], batch=plan_batch(48, 8, micro=6), evidence="simulated",
        predicted={
            "memory": {"params": 10.0, "optimizer": 20.0, "grads": 10.0, "activations": 60.0, "gathered": 5.0, "reserve": 10.0},
            "time": {"compute": 1.0}, "peak_bytes": 115.0, "step_seconds": 1.0, "budget_bytes": 250.0,
        },
    )  # fmt: skip
    half = found.rescale(4)  # two passes of six samples: twice the shards, and gradients stay whole in the window
    assert half.batch.micro == 6 and half.batch.accumulation == 2 and half.evidence == "modelled"
    memory = half.predicted["memory"]
    assert (memory["params"], memory["optimizer"], memory["grads"]) == (20.0, 40.0, 80.0)
    assert (memory["activations"], memory["gathered"]) == (60.0, 5.0)
    assert memory["reserve"] == pytest.approx(10 * 205 / 105) and half.measured is None
    assert half.predicted["peak_bytes"] == pytest.approx(sum(memory.values())) and "time" not in half.predicted
    assert "earlier prediction in proportion" in half.explain() and "(modelled)" in half.explain()
    with pytest.raises(PlanInfeasible, match="does not fit on 2 processes: it would need .* short by"):
        found.rescale(2)
    assert found.rescale(8).predicted["memory"] == pytest.approx(found.predicted["memory"])
    data = Strategy(
        ["zero1"], mesh=[("data", 4)], batch=plan_batch(48, 4), predicted={"memory": {"params": 8.0, "optimizer": 4.0}}
    )
    assert data.rescale(2).predicted["memory"] == pytest.approx({"params": 8.0, "grads": 8.0, "optimizer": 8.0})
    unknown = replace(data, predicted=None).rescale(2)
    assert unknown.predicted is None and unknown.evidence == "given" and "not predicted" in unknown.explain()


def test_budgets_are_shares_bytes_or_texts():
    assert parse_memory("16GiB") == 16 * 2**30 and parse_memory("1.5 GB") == 1_500_000_000
    assert budget_bytes(0.5, 1000) == 500 and budget_bytes(300, 1000) == 300
    for wrong in (1.5, 0, -1, True, "16 apples"):
        with pytest.raises(ConfigError, match="memory_budget"):
            parse_memory(wrong)


# ---------------------------------------------------------------------------------------- measuring


@dataclass
class Trials:
    """Stands for the pool of trials: answers by label, and remembers what was asked."""

    answers: dict
    asked: list
    deadlines: list = field(default_factory=list)
    pid: int | None = 1

    def run(self, plan, **how):
        self.asked.append((plan, how["steps"], how["verify"]))
        self.deadlines.append(how["deadline"])
        return self.answers.get(
            tuple(plan.opt_names()), TrialResult(outcome="ok", step_seconds=1.0, steps=how["steps"])
        )


class AsPredicted:
    """Stands for what a search knows: nothing is learned, and nothing is missing."""

    def learn(self, one):
        pass

    def corrected(self, item):
        return item

    completed = corrected

    def compile_seconds(self, item):
        return 30.0


def measure(items, answers, limit=1000.0, budget=1e12):
    trials = Trials(answers, [])
    found = build_space(place(machine=CPU))
    measuring = Measuring(
        found, torch.device("cpu"), SearchTime(limit), budget, trials, lambda text: None, AsPredicted()
    )
    plain = next((item for item in items if item.candidate.names() == []), None)
    measuring.round(measuring_order(items, plain))
    measuring.refine()
    return measuring, trials


def test_no_plan_is_measured_twice_and_the_plain_one_is_among_the_first():
    items = [scored(1 + i / 100, 1, micro=64 // 2**i, accumulation=2**i) for i in range(1, 7)]
    items.append(scored(9, 1, micro=64))
    measuring, trials = measure(items, {})
    first_round = [plan for plan, steps, _ in trials.asked if steps == 3]
    assert len(first_round) == 4 and len(set(first_round)) == 4
    assert first_round[1].opt_names() == []  # the plain plan, right after the best prediction
    plans = [one.plan for one in measuring.found]
    assert len(plans) == len(set(plans)) == 4
    again = [(plan, verify) for plan, steps, verify in trials.asked if steps == 10]
    assert len(again) == 2 and not any(verify for _, verify in again)  # more steps for the closest two, checked already


def test_out_of_memory_prunes_the_round():
    items = [
        scored(1, 1, micro=32, accumulation=2),
        scored(2, 1, micro=64, fused=True),
        scored(3, 1, micro=16, accumulation=4),
    ]
    oom = TrialResult(outcome="oom", message="no memory")
    measuring, trials = measure([items[0], scored(2, 1, micro=64)], {("micro_batch",): oom, (): oom})
    assert len(trials.asked) == 1  # a larger micro-batch must fail as well
    assert [one.result.outcome for one in measuring.found] == ["oom"]


def test_what_cannot_be_sent_anywhere_is_not_a_failure():
    unsendable = TrialResult(outcome="error", message="not tried", error_class="Unsendable")
    measuring, trials = measure([scored(1, 1, micro=64), scored(2, 1, micro=32, accumulation=2)], {(): unsendable})
    assert measuring.obstacle == "not tried" and not measuring.found and len(trials.asked) == 1


def test_nothing_is_begun_without_the_time_for_it():
    measuring, trials = measure([scored(1, 1, micro=64)], {}, limit=2.0)
    assert not trials.asked and not measuring.found


def test_a_better_plan_that_the_time_limit_leaves_out_is_named_with_what_it_would_bring():
    quick = {(): TrialResult(outcome="ok", step_seconds=4.0, steps=3, startup_seconds=2.0)}
    items = [scored(0.1, 1, micro=64, compile="model"), scored(0.5, 1, micro=64)]
    measuring, _ = measure(items, quick, limit=14.0)
    missed = measuring.missed()
    assert "too short to try" in missed and "compile" in missed and "20% of the best plan's time" in missed
    limit = float(missed.rpartition("about ")[2].split()[0])
    assert measure(items, quick, limit=limit + 5)[0].missed() is None
    assert measure([items[1], scored(0.6, 1, micro=64, compile="model")], quick, limit=14.0)[0].missed() is None


def test_a_plan_whose_compilation_did_not_end_in_time_is_named_too():
    late = TrialResult(outcome="timeout", message="compiling took more than 40 s")
    answers = {(): TrialResult(outcome="ok", step_seconds=4.0, steps=3, startup_seconds=2.0), ("native_dynamo",): late}
    items = [scored(0.1, 1, micro=64, compile="model"), scored(0.5, 1, micro=64)]
    measuring, _ = measure(items, answers, limit=100.0)
    assert "20% of the best plan's time" in measuring.missed()


def test_what_an_untried_plan_would_bring_is_not_measured_against_corrected_predictions_of_others():
    """The machine is busy: whatever was tried took eight times as long as predicted, and so will a compiled plan."""
    answers = {(): TrialResult(outcome="ok", step_seconds=4.0, steps=3, startup_seconds=2.0)}
    measuring, _ = measure([scored(0.4, 1, micro=64, compile="model"), scored(0.5, 1, micro=64)], answers, limit=14.0)

    def corrected(item):
        slower = 1.0 if item.candidate.is_compiled else 8.0
        return replace(item, cost=replace(item.cost, time={part: slower * s for part, s in item.cost.time.items()}))

    measuring.known.corrected = corrected
    assert "80% of the best plan's time" in measuring.missed()


def test_an_error_that_the_plain_model_raises_too_ends_the_trials():
    error = TrialResult(outcome="error", message="TypeError: the loss wants a tensor")
    kinds = {"fused": True}, {"precision": "bfloat16"}, {}
    items = [scored(0.1 * (2 + i), 1, micro=64, **kind) for i, kind in enumerate(kinds)]
    names = [tuple(build_space(place(machine=CPU)).plan(item.candidate).opt_names()) for item in items]
    _, same = measure(items, dict.fromkeys(names, error))
    assert len(same.asked) == 2
    _, other = measure(items, dict.fromkeys(names[:2], error))  # the plain model works
    assert len({plan for plan, _, _ in other.asked}) == 3


def test_reports_name_the_plan_the_best_so_far_and_how_many_may_follow():
    items = [scored(1 + i / 100, 1, micro=64 // 2**i, accumulation=2**i) for i in range(4)]
    lines = []
    measuring = Measuring(
        build_space(place(machine=CPU)),
        torch.device("cpu"),
        SearchTime(1000.0),
        1e12,
        Trials({}, []),
        lines.append,
        AsPredicted(),
    )
    measuring.round(items)
    tried = [line for line in lines if line.startswith("measuring")]
    assert "best so far" not in tried[0] and "up to 3 more" in tried[0]
    assert "best so far" in tried[-1] and "more after it" not in tried[-1]


def test_a_summary_has_at_most_six_lines():
    trials = [
        {"plan": "fp32", "outcome": "ok", "step_seconds": 0.2},
        {"plan": "bf16", "outcome": "ok", "step_seconds": 0.1},
        {"plan": "compile", "outcome": "error", "message": "no compiler"},
        {"plan": "other", "outcome": "oom"},
    ]
    plan = Strategy(
        [("amp_native", "bf16")], measured={"step_seconds": 0.1}, predicted={"step_seconds": 9, "peak_bytes": 2**20, "budget_bytes": 2**30},
        search={"candidates": 9, "fitting": 5, "seconds": {"measure": 3.0}, "measured": trials, "plain": "fp32"},
        reasons=("search: first", "profile: not shown", "search: second", "search: third"),
    )  # fmt: skip
    lines = summary(plan)
    assert (
        len(lines) == 6
        and "amp_native" in lines[0]
        and "2.00 x the plain model" in lines[1]
        and "4 were tried" in lines[2]
    )
    assert "no compiler" in lines[3] and "and 1 more" in lines[3] and "third" in lines[5]
    assert summary(Strategy()) == ["plan: the unchanged model"]


def test_what_may_win_gets_the_time_that_nobody_else_needs():
    quick = {(): TrialResult(outcome="ok", step_seconds=0.4, steps=3, startup_seconds=2.0)}
    items = [scored(0.1, 1, micro=64, compile="model"), scored(0.5, 1, micro=64)]
    _, trials = measure(items, quick, limit=30.0)  # a compiled plan is expected to take longer than that
    assert [plan.opt_names() for plan, _, _ in trials.asked] == [[], ["native_dynamo"]]
    _, trials = measure(items, quick, limit=14.0)  # less than half of it
    assert [plan.opt_names() for plan, _, _ in trials.asked] == [[]]
    slow = [scored(0.45, 1, micro=64, compile="model"), items[1]]
    _, trials = measure(slow, quick, limit=30.0)  # it would not win
    assert [plan.opt_names() for plan, _, _ in trials.asked] == [[]]


def test_a_better_prediction_is_tried_whatever_has_been_measured():
    slow = [scored(2.0 + i, 1, micro=64 // 2**i, accumulation=2**i) for i in range(1, 5)]
    fast = scored(0.14, 1, micro=64, precision="bfloat16")
    known = TrialResult(outcome="ok", step_seconds=2.16, steps=3)
    answers = {(): known, ("micro_batch",): known, ("amp_native",): replace(known, step_seconds=0.2)}

    def tried(is_valid=lambda candidate: True, left=1000.0):
        measuring, trials = measure(slow, answers)
        before, measuring.clock = len(trials.asked), SearchTime(left)
        measuring.measure_promising([fast, *slow], is_valid)
        return [plan.opt_names() for plan, _, _ in trials.asked[before:]], choose(measuring.found).seconds

    assert tried() == ([["amp_native"]], 0.2)
    assert tried(is_valid=lambda candidate: False) == ([], 2.16)
    assert tried(left=0.0) == ([], 2.16)  # there is no time for it
    late, _ = measure([*slow, fast], answers)
    assert choose(late.found).seconds == 0.2  # nor does a number of measured plans end the round before it


@pytest.mark.parametrize(("limit", "compilations"), [(150.0, 1), (250.0, 2)])
def test_where_a_compilation_took_too_long_another_needs_as_long(limit, compilations, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("drivetrain.strategy.search.measure.time.monotonic", lambda: now[0])

    class Slow(Trials):
        def run(self, plan, **how):
            now[0] += 90.0 if plan.opt_names() else 2.0
            return super().run(plan, **how)

    late = TrialResult(outcome="timeout", message="compiling took more than 90 s")
    plain = TrialResult(outcome="ok", step_seconds=0.4, steps=3, startup_seconds=2.0)
    trials = Slow({("native_dynamo",): late, (): plain}, [])
    space = build_space(place(machine=CPU))
    measuring = Measuring(
        space, torch.device("cpu"), SearchTime(limit, 0.0), 1e12, trials, lambda text: None, AsPredicted()
    )
    items = [scored(0.1, 1, micro=64, compile=scope) for scope in ("model", "block")]
    measuring.round(measuring_order([*items, scored(0.5, 1, micro=64)], None))
    assert sum(bool(plan.opt_names()) for plan, _, _ in trials.asked) == compilations


def test_what_needs_no_compiler_is_tried_first():
    fast = TrialResult(outcome="ok", step_seconds=0.01, steps=3)
    items = [
        scored(0.1, 1, micro=64, compile="model", precision="bfloat16"),
        scored(0.2, 1, micro=64, compile="block", precision="bfloat16"),
        scored(0.3, 1, micro=64, precision="bfloat16"),
        scored(0.5, 1, micro=64),
    ]
    _, trials = measure(items, {("amp_native", "native_dynamo"): fast})
    names = [plan.opt_names() for plan, _, _ in trials.asked]
    assert names[:3] == [["amp_native"], [], ["amp_native", "native_dynamo"]]


@pytest.mark.parametrize(("limit", "kept"), [(120.0, 2.0), (20.0, 1.0)])
def test_trials_end_before_the_search_must(limit, kept):
    before = time.monotonic()
    measuring, trials = measure([scored(0.1, 1, micro=64)], {}, limit=limit)
    assert len(trials.deadlines) == 1
    assert (
        trials.deadlines[0] == pytest.approx(measuring.clock.begin + limit - kept) and measuring.clock.begin >= before
    )


def test_a_process_that_must_be_started_anew_needs_time_for_it():
    measuring, trials = measure(
        [scored(0.1, 1, micro=64)], {(): TrialResult(outcome="ok", step_seconds=0.1, steps=3)}, limit=20.0
    )
    item = measuring.found[0].scored
    measuring.startups[False], measuring.clock.begin = 1.0, time.monotonic() - 15.5  # 3.5 s are left for trials
    assert measuring._has_time(item, 3)
    trials.pid = None
    assert not measuring._has_time(item, 3)


@pytest.mark.parametrize(("seconds_now", "threads"), [(0.2, 4), (0.08, None)])
def test_other_threads_are_chosen_only_if_the_same_plan_is_slower_with_those_of_now(seconds_now, threads):
    here = build_space(replace(place(machine=CPU), local={"cpu_threads": (CpuThreadsConfig(threads=4),)}))
    other, plain = scored(0.1, 1, micro=64, fused=True, threads=4), scored(0.3, 1, micro=64)
    answers = {
        ("fused_optimizer", "cpu_threads"): TrialResult(outcome="ok", step_seconds=0.1, steps=3),
        ("fused_optimizer",): TrialResult(outcome="ok", step_seconds=seconds_now, steps=3),
        (): TrialResult(outcome="ok", step_seconds=0.3, steps=3),
    }
    trials = Trials(answers, [])
    measuring = Measuring(
        here, torch.device("cpu"), SearchTime(1000.0), 100.0, trials, lambda text: None, AsPredicted()
    )
    measuring.round([other, plain])
    assert len(trials.asked) == 2
    measuring.refine()
    assert choose(measuring.found).scored.candidate.effects.threads == threads
    assert any(one.scored.candidate == candidate(micro=64, fused=True) for one in measuring.found)


class CountingProfiler:
    """Knows what it is asked for, and remembers it."""

    def __init__(self):
        self.parts, self.limits = [], []

    def profile(self, parts=(), *, time_limit=None):
        self.parts.append(set(parts))
        self.limits.append(time_limit)
        compiled = {part.partition("/")[0]: 1000.0 for part in set().union(*self.parts) if part.endswith("compiled")}
        return make_profile(compiled_bytes=compiled or None)


def known(clock=None, seconds=30.0, **values):
    profiler = CountingProfiler()
    clock = SearchTime(120.0) if clock is None else clock
    return Knowledge(make_profile(compiled_bytes=None), GPU, clock, seconds, profiler, **values), profiler


def test_a_profile_grows_by_what_candidates_read_and_nothing_is_asked_twice():
    about, profiler = known()
    eager, compiled = candidate(micro=64), candidate(micro=64, precision="bfloat16", compile="model")
    again = candidate(micro=64, precision="bfloat16", compile="block", checkpoint="second")
    assert parts_read(eager.effects) == frozenset() and parts_read(compiled.effects) == {"bfloat16/compiled"}
    assert parts_read(again.effects) == {"bfloat16/compiled", "bfloat16/full"}
    assert parts_read(effects(micro=64, precision="tf32", compile="block", checkpoint="selective")) == {
        "float32/compiled",
        "float32/selective",
    }
    before = about.predicted([eager, compiled])
    assert about.missing(before) == {"bfloat16/compiled"}
    item = about.completed(next(one for one in before if one.candidate == compiled))
    assert item.cost.memory["activations"] < 64 * make_profile().saved_bytes("bfloat16")
    assert item == predict(compiled, about.profile, GPU)
    assert profiler.parts == [{"bfloat16/compiled"}] and about.completed(item) is item
    assert about.again(before, {"bfloat16/compiled"}) == about.predicted([eager, compiled])
    assert about.missing([scored(1, 1), *about.predicted([again])]) == {"bfloat16/full"}
    assert known(excluded=frozenset({"bfloat16/compiled"}))[0].missing(before) == set()


def test_a_profile_takes_only_its_share_of_the_time():
    about, profiler = known(seconds=2.0)
    about.find_out({"float32/full"})
    late, other = known(clock=SearchTime(10.0, time.monotonic() - 9.0))
    late.find_out({"float32/full"})
    assert profiler.limits[0] == 2.0 and about.seconds < 2.0 and 0.0 <= other.limits[0] < 0.5


def test_plans_that_do_not_fit_as_far_as_is_known_are_looked_into_if_they_would_be_fast():
    slow, fast, hopeless = scored(2.0, 1), scored(1.0, 9), scored(3.0, 9)
    assert likely_mispredicted([fast, slow, hopeless], [slow], 5.0) == [fast]
    assert likely_mispredicted([fast, hopeless], [], 5.0) == [fast, hopeless]


def test_a_search_captures_graphs_only_for_the_plans_that_are_tried_first():
    profiler = CountingProfiler()
    constraints = SearchConstraints(spec=H100, excluded=frozenset({"checkpoint"}))
    run = find._Search(make_task(batch=64), torch.device("cpu"), 1, constraints, None)
    run.reason = None  # as if the device were here
    about = Knowledge(make_profile(compiled_bytes=None), GPU, run.thinking, 30.0, profiler)
    run.known, run.budget = about, 1e15
    found = run.space = build_space(run._scope())
    candidates, top = run._select_promising(about.predicted(found.candidates))
    assert top and not about.asked  # all of them fit easily, and will be measured
    run.budget = 1.5 * max(item.peak for item in top)
    candidates, top = run._select_promising(candidates)
    assert about.asked == {"bfloat16/compiled"} and profiler.parts == [about.asked]
    assert top and len(candidates) == len(found.candidates)
    assert any(parts_read(item.candidate.effects) - about.asked for item in candidates)
    run.budget = 1.0
    run._select_promising(candidates)
    assert about.asked == {"bfloat16/compiled", "float32/compiled"}  # nothing fits: it matters what each of them keeps


def learning(ratio, **first):
    """Measure one compiled plan in `ratio` times its predicted time; return the measuring, its experience and a maker of items."""
    profile, machine = make_profile(), GPU
    machine = replace(machine, evidence="modelled", flops={name: rate / 1e6 for name, rate in machine.flops.items()})
    clock = SearchTime(1000.0)
    known = Knowledge(profile, machine, clock, 30.0, None)

    def item(**values):
        return predict(candidate(**{"micro": 64, "precision": "bfloat16", **values}), profile, machine)

    measuring = Measuring(
        build_space(place(machine=CPU)), torch.device("cpu"), clock, 1e15, Trials({}, []), lambda text: None, known
    )  # fmt: skip
    tried = item(compile="model", **first)
    one = Measurement(tried, Strategy([]), TrialResult(outcome="ok", step_seconds=ratio * tried.seconds, steps=3))
    measuring.found.append(one)
    known.learn(one)
    return measuring, tried, item


def test_a_trial_corrects_the_predictions_of_its_kind_and_its_nearest_in_the_same_search():
    measuring, tried, item = learning(1.5)
    for same in (tried, item(compile="model", graphs=True), item(compile="block")):
        before, now = same.cost.time, measuring.known.corrected(same).cost.time
        assert now["compute"] == pytest.approx(1.5 * before["compute"], rel=0.05) and same.seconds == sum(
            before.values()
        )
        assert measuring.known.corrected(same).cost.memory == same.cost.memory
    eager = item()
    assert measuring.known.corrected(eager).seconds == pytest.approx(eager.seconds)
    slower, other = item(compile="block", checkpoint="full"), item(compile="none")
    assert measuring._rerank([slower, other])[0].candidate == other.candidate  # a kind that was not tried


def test_what_cannot_win_any_more_is_not_tried():
    measuring, tried, item = learning(1.0)
    assert measuring._cannot_win(item(compile="model", graphs=True))  # no launches to save: a tie at best
    assert measuring._cannot_win(item(compile="model", checkpoint="full"))  # a third more work, of a kind that is known
    near = scored(tried.seconds * 1.5, 1, micro=64)
    assert not measuring._cannot_win(near)  # half as much again is within the doubt about a kind that was not tried
    assert measuring._cannot_win(scored(tried.seconds * 2, 1, micro=32, accumulation=2))
    assert not measuring._cannot_win(scored(tried.seconds * 50, 1, micro=64))  # the plain plan is always worth knowing
    assert replace(near.candidate) == measuring.space.plain


# ---------------------------------------------------------------------------------------- finding


def test_a_plan_that_cannot_be_applied_is_not_chosen_however_fast_it_is_predicted_to_be():
    run = find._Search(make_task(batch=64), torch.device("cpu"), 8, SearchConstraints(spec=H100), None)
    sizes = {"zero": 8, "micro": 8, "sharding": "fsdp"}
    rejected, valid = scored(1, 1, chunked_loss=True, cpu_offload=True, **sizes), scored(2, 1, **sizes)
    plain = scored(9, 1, data=8, micro=8)
    run.space = build_space(place(8))
    assert run._unmeasured([rejected, valid, plain], plain, []) == valid
    assert "cannot be used together" in run._rejected
    assert run._unmeasured([rejected], plain, []) == plain


def test_what_would_be_chosen_without_a_trial_is_looked_at_first():
    run = find._Search(make_task(batch=64), torch.device("cpu"), 8, SearchConstraints(spec=H100), None)
    run.space = build_space(place(8))
    simple, fastest = scored(1.01, 2, data=8, micro=8), scored(1, 1, zero=8, micro=8, sharding="fsdp")
    run.compared = Comparison(run.space, 1e9, [fastest, simple])
    assert run._close([fastest]) == ([simple, fastest], [])


def test_after_trials_that_failed_nothing_is_chosen_that_was_not_tried(monkeypatch):
    @contextmanager
    def fail(search):
        yield Trials(dict.fromkeys([("fused_optimizer",), ("cpu_threads",)], failed), [])

    failed = TrialResult(outcome="error", message="AttributeError: a copy has no attribute 'extra'")
    monkeypatch.setattr(find._Search, "_trials", fail)
    monkeypatch.setattr(
        find, "measuring_order", lambda ranked, plain, **how: [one for one in ranked if one != plain][:1]
    )
    monkeypatch.setattr(find.Measuring, "measure_promising", lambda *args: None)
    monkeypatch.setattr(Trials, "run", lambda trials, plan, **how: failed)
    plan = search(time_limit=600, excluded=frozenset({"compile", "checkpoint", "micro_batch", "amp"}))
    assert plan.opt_names() == [] and plan.measured is None and plan.failure is None
    assert "no trial succeeded" in plan.explain(1000) and "'extra'" in plan.explain(1000)


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8).double()

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize(
    ("model", "absent", "present"),
    [
        (Doubles, "amp_native", "fused_optimizer"),
        (lambda: nn.Embedding(8, 8, sparse=True), "fused_optimizer", "amp_native"),
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), "fused_optimizer", "amp_native"),
    ],
    ids=["float64", "sparse", "complex"],
)
def test_methods_without_an_effect_on_a_model_are_not_offered(model, absent, present):
    scope = place(machine=CPU, model=model())
    assert not find_method(absent).options(scope) and find_method(present).options(scope)


def test_a_search_that_fails_does_not_end_a_training(monkeypatch):
    def fail(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(find, "build_space", fail)
    failure = search().failure
    assert failure.kind == "error" and "RuntimeError: out of luck" in failure.message
    with pytest.raises(RuntimeError, match="luck"):
        search(strict=True)


def make_task(model=None, batch=8, **changes):
    data = make_data(16)
    samples = {key: torch.stack([data[i][key] for i in range(16)]) for key in ("tokens", "labels")}
    values = {
        "model": make_model() if model is None else model, "model_fn": make_model, "call": CallModel("unpack_dict"), "loss_func": loss_func,
        "optim_func": torch.optim.AdamW, "optim_args": {"lr": 1e-3}, "samples": samples, "global_batch_size": batch,
    }  # fmt: skip
    return TrainingTask(**{**values, **changes})


def search(task=None, world=1, **constraints):
    constraints = SearchConstraints(**{"time_limit": 0, "excluded": frozenset({"compile"}), **constraints})
    return find_plan(
        make_task() if task is None else task, device=torch.device("cpu"), world=world, constraints=constraints
    )


def make_quick(patch):
    """Let a search use a machine from a table and a model's profile that is made once: both have tests of their own."""

    class Profiler:
        def __init__(self, task):
            self.task = task

        def profile(self, parts=(), **how):
            key = type(self.task.model), self.task.loss_func is None
            if key not in _PROFILES:
                _PROFILES[key] = profile_model(self.task, compiled=False)
            return _PROFILES[key]

    patch.setattr(find, "_SIMULATED", 2)
    patch.setattr(find, "ModelProfiler", Profiler)
    patch.setattr(find, "profile_machine", lambda device, **how: replace(CPU, reserve_bytes=2.0**20))


@pytest.fixture(autouse=True)
def quick_search(monkeypatch):
    make_quick(monkeypatch)


_PROFILES: dict = {}


@pytest.fixture(scope="module")
def simulated_plan():
    """One search that measures nothing, for those that look at its result only."""
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        return search()


@pytest.mark.slow
def test_a_search_without_time_measures_nothing_and_says_simulated():
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    plan = search(make_task(model))
    assert torch.equal(torch.rand(1), expected)  # random streams are the caller's own
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert plan.evidence == "simulated" and plan.measured is None and plan.failure is None
    assert not {"amp_native", "native_dynamo"} & set(plan.opt_names())  # on a CPU these must prove themselves
    assert any("time_limit is 0" in reason for reason in plan.reasons)
    assert Strategy.from_json(plan.to_json()).search == plan.search


@pytest.mark.slow
def test_without_a_loss_the_plan_stays_simulated():
    plan = search(make_task(loss_func=None), time_limit=5)
    assert plan.evidence in ("simulated", "modelled") and any("no loss_func" in reason for reason in plan.reasons)


@pytest.mark.slow
def test_a_plan_is_found_measured_and_verified():
    plan = search(time_limit=60, excluded=frozenset({"compile", "checkpoint", "micro_batch", "fused_optimizer"}))
    assert plan.evidence == "measured" and plan.measured["is_verified"] and plan.measured["step_seconds"] > 0
    tried = plan.search["measured"]
    assert any(item["plan"] == "fp32, 8 x 1" for item in tried) and len({item["plan"] for item in tried}) == len(tried)
    text = plan.explain()
    for word in ("measured", "predicted", "batch   8 = 8 x 1 x 1", "evidence: measured", "rejected", "checked loss"):
        assert word in text, text
    assert len(text.splitlines()) <= 30


@pytest.mark.slow
def test_a_small_budget_picks_smaller_batches_or_checkpoints_and_an_impossible_one_names_the_shortfall():
    task = make_task(batch=4096)
    roomy = search(task)
    assert roomy.batch.accumulation == 1
    peak = roomy.predicted["peak_bytes"]
    tight = search(task, memory_budget=int(peak / 4))
    assert tight.batch.accumulation > 1 or "checkpoint" in tight
    assert tight.predicted["peak_bytes"] <= peak / 4
    failed = search(task, memory_budget="1MiB")
    assert failed.failure.kind == "infeasible" and failed.failure.shortfall_bytes > 0
    assert isinstance(failed.failure.nearest, Strategy) and "short by" in failed.failure.message
    assert "FAILED (infeasible)" in failed.explain()
    with pytest.raises(PlanInfeasible, match="short by"):
        search(task, memory_budget="1MiB", strict=True)


@pytest.mark.slow
def test_plans_for_other_hardware_need_neither_it_nor_a_measurement():
    plan = search(make_task(batch=1024), world=64, spec=H100, plan_only=True, excluded=frozenset())
    assert (
        plan.evidence in ("simulated", "modelled")
        and dict(plan.mesh).get("data", 1) * dict(plan.mesh).get("zero", 1) <= 64
    )
    assert "native_dynamo" in plan  # what a CPU would have to prove first; 16 bits gain nothing for so small a model
    assert any("another machine" in reason for reason in plan.reasons)


def test_explain_and_json_say_the_same(simulated_plan):
    plan = simulated_plan
    data = json.loads(plan.to_json())
    assert data["predicted"]["memory"] and data["predicted"]["time"] and data["search"]["candidates"] > 50
    assert data["evidence"] in plan.explain() and f"chosen from {data['search']['candidates']}" in plan.explain()


def test_the_picture_shows_candidates(tmp_path, simulated_plan):
    pytest.importorskip("matplotlib")
    plan = simulated_plan
    plan.picture(tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes()[:4] == b"\x89PNG"
    Strategy.from_json(plan.to_json()).picture(tmp_path / "again.png")
    axes = SimpleNamespace(
        **{name: Mock() for name in ("scatter", "annotate", "axvline", "set_title", "grid", "legend")}
    )
    for peaks, scale in (
        ([1.0, 9.0], "linear"),
        ([1.0, 11.0], "log"),
    ):  # the ticks of a narrow logarithmic axis are crooked
        axes.set = Mock()
        points = [f"0.1 {peak * 2**30} float32, eager" for peak in peaks]
        explain._draw(axes, Strategy([]), {"points": points, "candidates": 2, "fitting": 2}, ["black"])
        assert axes.set.call_args.kwargs["xscale"] == scale
    with pytest.raises(ConfigError, match="not found by a search"):
        Strategy(["checkpoint"]).picture(tmp_path / "none.png")


def broken_loss(batch, logits):
    raise RuntimeError("the loss of a test fails")


@pytest.mark.slow
def test_a_training_that_fails_in_itself_is_reported_as_such():
    plan = search(
        make_task(loss_func=broken_loss),
        time_limit=40,
        excluded=frozenset({"compile", "checkpoint", "micro_batch", "amp", "fused_optimizer"}),
    )
    assert plan.failure.kind == "error" and "the loss of a test fails" in plan.failure.message
    assert "the loss of a test fails" in plan.explain()


def search_on_all_ranks(limit):
    excluded = frozenset({"compile", "checkpoint", "micro_batch", "fused_optimizer"})
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        plan = find_plan(
            make_task(),
            device=torch.device("cpu"),
            world=2,
            constraints=SearchConstraints(time_limit=limit, excluded=excluded),
        )
    try:
        find_plan(
            make_task(),
            device=torch.device("cpu"),
            world=2,
            constraints=SearchConstraints(excluded=frozenset({"nope"})),
        )
    except UnknownMethodError as error:
        return plan.to_json(), str(error)


@pytest.mark.slow
def test_two_ranks_agree_on_every_number(world2):
    (first, error), (second, same_error) = world2(search_on_all_ranks, 60.0, timeout=200)
    assert first == second and error == same_error and "nope" in error
    plan = Strategy.from_json(first)
    assert plan.evidence == "measured" and plan.mesh == (("data", 2),) and plan.batch.micro == 4
    assert "parallel_mode" in plan and plan.measured["is_verified"]


LARGE = """
import resource, torch
from torch import nn
from drivetrain.strategy.device_spec import DeviceSpec
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.search.find import SearchConstraints, find_plan
from drivetrain.strategy.task import CallModel, TrainingTask
from drivetrain.strategy.value import Strategy

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128256, 16384)
        layer = dict(nhead=128, dim_feedforward=65536, batch_first=True, dropout=0.0)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16384, **layer) for _ in range(120)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

with torch.device("meta"):
    model = Large()
assert sum(p.numel() for p in model.parameters()) > 380e9
task = TrainingTask(
    model=model, call=CallModel("unpack_dict"), loss_func=lambda inputs, y: y.float().square().mean(), optim_func=torch.optim.AdamW,
    samples={"tokens": torch.zeros(4, 2048, dtype=torch.long)}, global_batch_size=1024,
)
constraints = SearchConstraints(time_limit=120.0, spec=DeviceSpec.preset("h100"), plan_only=True)
plan = find_plan(task, device=torch.device("cpu"), world=1024, constraints=constraints)
assert plan.failure is None, plan.failure
resolve_plan(Strategy.load(plan.to_json()), model=model, device="cpu", world=1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_planning_for_400_billion_parameters_takes_less_than_two_gigabytes():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LARGE], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 2e9
