"""Trials of plans: what they find out, and that nothing of them is left afterwards."""

import copy
import json
import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.runtime import limits
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.seeds import capture_rng, same_state
from drivetrain.strategy.dry_run import verify_plan
from drivetrain.strategy.registry import _methods, register_method
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.trial import measuring, memory
from drivetrain.strategy.trial.checking import compute_reference_results
from drivetrain.strategy.trial.process import MARK, reject_inside_trial
from drivetrain.strategy.trial.report import Report, merge
from drivetrain.strategy.trial.running import TrialPool
from drivetrain.strategy.value import Strategy
from tests.strategy import trial_tasks
from tests.strategy.trial_tasks import Liar, build, build_randomly, loss_func, make_task

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def soon(seconds=90.0):
    return time.monotonic() + seconds


def attempt(task, plan=(), device=CPU, steps=2, seconds=90.0, **kwargs):
    """Run one trial and check that its process is gone."""
    with TrialPool(task, device=device, patience=kwargs.pop("patience", 30.0)) as pool:
        pids = []
        end = pool._start

        def start():
            end()
            pids.append(pool.pid)

        pool._start = start
        result = pool.run(Strategy(list(plan)), steps=steps, deadline=soon(seconds), **kwargs)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
    return result


@pytest.mark.slow
def test_one_process_tries_several_plans_and_the_caller_stays_as_it_was():
    task = make_task()
    before, random = copy.deepcopy(task.model.state_dict()), capture_rng()
    with TrialPool(task, device=CPU) as pool:
        pool.start()
        first = pool.run(Strategy([]), steps=3, deadline=soon())
        pid = pool.pid
        second = pool.run(Strategy([("amp_native", "bf16")]), steps=3, deadline=soon())
        third = pool.run(Strategy(["checkpoint", ("micro_batch", 4)]), steps=1, deadline=soon(), verify=False)
        assert pid == pool.pid is not None
    for result in (first, second, third):
        assert result.outcome == "ok" and result.step_seconds > 0 and result.peak_bytes >= 0, result
    assert (first.steps, third.steps, third.is_verified, third.loss) == (3, 1, False, None)
    model = task.model.eval()
    batch = task.batch(8)
    expected = loss_func(batch, model(batch))
    norm = torch.stack([g.norm() for g in torch.autograd.grad(expected, list(model.parameters()))]).norm()
    assert first.loss == first.plain_loss == pytest.approx(expected.item(), rel=1e-6)
    assert first.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert first.is_verified and second.is_verified and second.plain_loss == first.plain_loss
    assert second.loss != first.loss and second.loss == pytest.approx(first.loss, rel=2e-2)
    assert "plain" in dict(first.phases) and "plain" not in dict(second.phases)  # it is run once for all plans
    assert all(torch.equal(before[key], value) for key, value in task.model.state_dict().items())
    assert not any(parameter.is_shared() for parameter in task.model.parameters())
    assert same_state(random, capture_rng())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("hurts", "outcome", "message"),
    [
        pytest.param(trial_tasks.sleeps, "timeout", "no progress for 5 s", marks=pytest.mark.slow),
        pytest.param(trial_tasks.overflows, "nonfinite", "training step 1 is nan", marks=pytest.mark.slow),
        pytest.param(trial_tasks.runs_out, "oom", "Tried to allocate 2.00 GiB", marks=pytest.mark.slow),
        pytest.param(trial_tasks.exits, "error", "exit code 7", marks=pytest.mark.slow),
        pytest.param(trial_tasks.is_killed, "error", "signal SIGKILL", marks=pytest.mark.slow),
        pytest.param(trial_tasks.raises, "error", "ValueError: the model has a bad day", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_misbehaves_costs_its_trial_and_nothing_else(hurts, outcome, message):
    patience = 5.0 if hurts is trial_tasks.sleeps else 30.0
    result = attempt(make_task(hurts), patience=patience)
    assert result.outcome == outcome and message in result.message, result
    assert result.step_seconds is None


def write_counts(folder, group=None, machine=0, gibibytes=64):
    """Write what a Linux system says about kills for want of memory; `group` None: its control groups cannot be read."""
    (folder / "own").write_text("3:cpu:/\n0::/job\n")
    (folder / "job").mkdir(exist_ok=True)
    if group is not None:
        (folder / "job" / "memory.events").write_text(f"low 0\noom 9\noom_kill {group}\n")
    (folder / "vmstat").write_text(f"nr_free 1\noom_kill {machine}\n")
    (folder / "meminfo").write_text(f"MemTotal: {gibibytes << 20} kB\n")


def read_counts_from(folder, monkeypatch):
    monkeypatch.setattr(limits, "GROUPS", folder)
    monkeypatch.setattr(limits, "OWN_GROUPS", folder / "own")
    monkeypatch.setattr(memory, "_MACHINE", folder / "vmstat")
    monkeypatch.setattr(memory, "_MEMORY", folder / "meminfo")


def test_a_killed_process_ran_out_of_memory_only_if_the_system_says_so_of_its_own_group(tmp_path, monkeypatch):
    read_counts_from(tmp_path, monkeypatch)
    write_counts(tmp_path, group=1, machine=5)
    kills = memory.MemoryKills()
    write_counts(tmp_path, group=1, machine=8)  # another container of this machine ran out of memory
    assert not kills.explain(resident=60 << 30)
    write_counts(tmp_path, group=2, machine=8)
    assert kills.explain(resident=0)


def test_where_only_the_machine_counts_a_small_process_was_not_meant(tmp_path, monkeypatch):
    read_counts_from(tmp_path, monkeypatch)
    write_counts(tmp_path, machine=5)
    kills = memory.MemoryKills()
    assert not kills.explain(resident=60 << 30)  # the count has not risen
    write_counts(tmp_path, machine=6)
    assert kills.explain(resident=60 << 30) and not kills.explain(resident=1 << 30)
    assert memory.resident_bytes_of(os.getpid()) > 50 << 20


@pytest.mark.slow
def test_a_pool_goes_on_after_a_failed_plan_and_a_registered_method_travels():
    register_method(Liar)
    try:
        with TrialPool(make_task(model_fn=build, model=None), device=CPU) as pool:
            wrong = pool.run(Strategy(["liar"]), steps=2, deadline=soon())
            assert pool.pid is None
            right = pool.run(Strategy([]), steps=2, deadline=soon())
            cut = pool.run(Strategy([]), steps=10**6, deadline=soon(3.0), verify=False)
            assert pool.pid is None
    finally:
        del _methods["liar"]
    assert wrong.outcome == "wrong" and "the plan changes the loss" in wrong.message and not wrong.is_verified
    assert right.outcome == "ok" and right.is_verified and "plain" in dict(right.phases)
    assert cut.outcome == "ok" and 0 < cut.steps < 10**6 and f"{cut.steps} of 1000000 steps" in " ".join(cut.notes)


def test_a_model_without_gradients_in_evaluation_mode_is_compared_in_training_mode():
    model = trial_tasks.Recurrent()
    model.layers[1].eval()  # a frozen part
    task = make_task(model=model)
    before, random = copy.deepcopy(model.state_dict()), capture_rng()
    outcome = verify_plan(Strategy(["checkpoint", ("micro_batch", 4)]), task, device=CPU)
    assert outcome.failure is None and "parameters compared" in outcome.notes[-1], outcome
    found = compute_reference_results(model, task, CPU, 8, steady=True)
    assert found.is_quiet and not found.is_random and found.split_error < 1e-5
    assert model.training and not model.layers[1].training and model.recurrent.dropout == 0.5
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert same_state(random, capture_rng())
    register_method(Liar())
    try:
        lied = verify_plan(Strategy(["liar"]), task, device=CPU)
    finally:
        del _methods["liar"]
    assert lied.failure.kind == "wrong" and "the plan changes the loss" in lied.failure.message


def test_a_model_that_draws_random_numbers_is_tried_and_not_compared():
    task = make_task(model=trial_tasks.Recurrent(noise=1.0))
    outcome = verify_plan(Strategy([("micro_batch", 4)]), task, device=CPU)
    assert outcome.failure is None and "not compared, because the loss depends on random numbers" in outcome.notes[-1]


@pytest.mark.parametrize("hurts", [None, pytest.param("exits", marks=pytest.mark.slow)])
def test_what_cannot_be_sent_is_tried_in_a_forked_process(hurts):
    class Local(trial_tasks.Net):
        pass

    task = make_task(model=Local(getattr(trial_tasks, hurts or "", None)), loss_func=lambda *args: loss_func(*args))
    before, random = copy.deepcopy(task.model.state_dict()), capture_rng()
    for share in (None, 0.7)[: 2 if hurts else 1]:
        result = attempt(task, ["checkpoint"], memory_share=share)
        if hurts:
            assert result.outcome == "error" and "exit code 7" in result.message
        else:
            assert result.outcome == "ok" and result.is_verified and result.steps == 2 and not result.is_in_process
            assert any("forked process" in note and "Local" in note for note in result.notes), result.notes
    assert all(torch.equal(before[key], value) for key, value in task.model.state_dict().items())
    assert same_state(random, capture_rng())


@pytest.mark.slow
def test_a_forked_process_computes_with_several_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = torch.randn(4096, 512, requires_grad=True)
        (rows @ rows.T[:, :512]).relu().sum().backward()  # this thread has workers now, which a forked process lacks
        wide = nn.Sequential(nn.Linear(8, 2048), nn.LayerNorm(2048), nn.Linear(2048, 1))
        task = make_task(
            model=trial_tasks.Wrapped(wide), loss_func=lambda *args: loss_func(*args), global_batch_size=512
        )
        result = attempt(task, patience=20.0)
    finally:
        torch.set_num_threads(threads)
    assert result.outcome == "ok", result


@pytest.mark.slow
def test_where_no_process_can_be_forked_a_copy_is_tried_in_the_callers_only_when_small(monkeypatch):
    class Local(trial_tasks.Net):
        pass

    monkeypatch.setattr(TrialPool, "_can_fork", lambda pool: False)
    task = make_task(model=Local())
    before, random = copy.deepcopy(task.model.state_dict()), capture_rng()
    settings = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    with TrialPool(task, device=CPU) as pool:
        result, *refused = (
            pool.run(Strategy(["checkpoint"]), steps=2, deadline=soon(), memory_share=share)
            for share in (0.1, None, 0.7)
        )
    assert result.outcome == "ok" and result.is_in_process and result.is_verified and result.steps == 2
    assert any("process of the caller" in note and "Local" in note for note in result.notes)
    assert all(torch.equal(before[key], value) for key, value in task.model.state_dict().items())
    assert same_state(random, capture_rng())
    assert settings == (torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision)
    for one in refused:
        assert one.outcome == "error" and "not tried" in one.message and "model_fn" in one.message
    with TrialPool(make_task(model=Local(trial_tasks.overflows)), device=CPU) as pool:
        for seconds, outcome in ((90.0, "nonfinite"), (-1.0, "timeout")):
            result = pool.run(Strategy([]), steps=2, deadline=soon(seconds), memory_share=0.1)
            assert result.outcome == outcome and result.is_in_process, result


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_measured_and_hears_the_hint_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys, time
        import torch
        from drivetrain.strategy.trial.running import TrialPool
        from drivetrain.strategy.value import Strategy
        from tests.strategy.trial_tasks import make_task

        print("begins", flush=True)
        with TrialPool(make_task(), device=torch.device("cpu")) as pool:
            result = pool.run(Strategy([]), steps=1, deadline=time.monotonic() + 60)
        print(json.dumps([result.outcome, result.message, result.notes]))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    lines = done.stdout.splitlines()
    assert lines.count("begins") == 2, done.stderr  # once more in the one process for trials, which starts none itself
    outcome, message, notes = json.loads(lines[-1])
    assert outcome == "ok" and any("forked process: the script has no main guard" in note for note in notes), message
    assert done.stderr.count("__main__") == 1 and "Traceback" not in done.stderr


def test_a_trial_inside_a_trial_is_refused(monkeypatch):
    reject_inside_trial("auto_accelerate")
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(ConfigError, match="main guard"):
        TrialPool(make_task(), device=CPU)
    with pytest.raises(ConfigError, match="main guard"):
        verify_plan(Strategy([]), make_task(), device=CPU)


def test_a_task_without_loss_or_samples_is_refused_at_once():
    with pytest.raises(ConfigError, match="loss_func and samples"):
        TrialPool(make_task(loss_func=None), device=CPU)


def reports(*ranks):
    made = []
    for seconds, failure in ranks:
        report = Report()
        for value in seconds:
            report.take({"event": "step", "seconds": value, "loss": 1.0, "peak": int(value), "reserved": None})
        if failure is not None:
            kind, is_echo = failure
            report.take({"event": "failed", "kind": kind, "message": kind, "error_class": "", "is_echo": is_echo})
        made.append(report)
    return made


def test_time_is_the_median_over_steps_of_the_slowest_rank():
    result = merge(reports(([1, 5, 2], None), ([4, 1, 3, 9], None)), 3, "cpu")
    assert (result.step_seconds, result.steps, result.peak_bytes) == (4, 3, 9)


def test_the_cause_of_a_failure_is_named_before_its_echoes():
    echo, silence, real = ([1], ("error", True)), ([1], ("timeout", False)), ([1], ("oom", False))
    assert merge(reports(echo, silence, real), 1, "cpu").message == "rank 2: oom"
    assert merge(reports(echo, silence), 1, "cpu").message == "rank 1: timeout"
    assert merge(reports(([1], None), echo), 1, "cpu").message == "rank 1: error"
    assert merge(reports(([1], None), ([], None)), 1, "cpu").outcome == "timeout"


def on_two_ranks(*names):
    """Try plans whose process misbehaves on rank 1, or only dawdles there; all in one visit."""
    found, pids = {}, []
    for name in names:
        task = make_task(getattr(trial_tasks, name))
        with TrialPool(task, device=CPU, patience=4.0 if name == "sleeps_on_rank_1" else 30.0) as pool:
            assert pool.obstacle() is None
            pids.append(pool.pid)
            result = pool.run(Strategy(["parallel_mode"]), steps=3, deadline=soon())
            found[name] = (result.outcome, result.message, result.step_seconds, result.steps, result.is_verified)
            if name == "dawdles_on_rank_1":
                sharded = pool.run(Strategy(["fsdp", ("micro_batch", 4)]), steps=1, deadline=soon())
                found["fsdp"] = (sharded.outcome, sharded.message, sharded.is_verified)
                dead = pool.run(Strategy(["parallel_mode", ("micro_batch", 2)]), steps=1, deadline=soon())
                found["dead"] = (dead.outcome, dead.message)
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert all_gather_values(os.getpid())  # the caller's group still works
    return found, left


def agreed_on_two_ranks(world2, *names):
    (first, left), (second, left_there) = world2(on_two_ranks, *names, timeout=280)
    assert first == second and not left and not left_there
    return first


@pytest.mark.slow
def test_two_ranks_agree_when_one_hangs(world2):
    found = agreed_on_two_ranks(world2, "sleeps_on_rank_1")
    assert found["sleeps_on_rank_1"][0] == "timeout" and "no progress for 4 s" in found["sleeps_on_rank_1"][1]


@pytest.mark.slow
def test_two_ranks_agree_when_one_dies_or_is_slow(world2):
    found = agreed_on_two_ranks(world2, "dawdles_on_rank_1")
    assert found["dead"] == ("error", "rank 1: the process ended with exit code 7 in phase 'check'")
    outcome, message, seconds, steps, is_verified = found["dawdles_on_rank_1"]
    assert (outcome, message, steps, is_verified) == ("ok", "", 3, True) and seconds > 0.1
    assert found["fsdp"] == ("ok", "", True)


@pytest.mark.slow
def test_one_rank_without_memory_is_out_of_memory_on_all(world2):
    found = agreed_on_two_ranks(world2, "runs_out_on_rank_1")
    assert found["runs_out_on_rank_1"][:2] == ("oom", "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB")


def verified_on_two_ranks():
    """Verify given plans: a right one, one whose process dies, one written wrongly, and a task that cannot be sent."""
    found = {}
    task = make_task(model_fn=build_randomly, model=None)
    right = verify_plan(Strategy(["parallel_mode", "zero1"]), task, device=CPU)
    found["right"] = (right.failure, right.notes)
    dead = verify_plan(Strategy(["parallel_mode"]), make_task(trial_tasks.exits_on_rank_1), device=CPU)
    found["dead"] = (dead.failure.kind, dead.failure.message)
    unsendable = make_task(loss_func=lambda batch, output: loss_func(batch, output))
    found["here"] = verify_plan(Strategy(["parallel_mode"]), unsendable, device=CPU).notes
    try:
        verify_plan(Strategy([("checkpoint", "Blok")]), make_task(), device=CPU)
    except ConfigError as error:
        found["mistake"] = type(error).__name__
    return found


@pytest.mark.slow
def test_a_given_plan_is_verified_by_processes_of_their_own_on_several_ranks(world2):
    first, second = world2(verified_on_two_ranks, timeout=200)
    assert first == second
    assert first["right"][0] is None and first["right"][1][0].startswith("dry run: loss")
    assert first["dead"][0] == "error" and "exit code 7" in first["dead"][1]
    assert first["here"][0].startswith("dry run: loss")
    assert first["mistake"] == "MethodConfigError"


def test_on_one_process_a_given_plan_is_verified_on_the_spot():
    task = make_task()
    before, random = copy.deepcopy(task.model.state_dict()), capture_rng()
    assert verify_plan(Strategy(["checkpoint"]), task, device=CPU).notes[0].startswith("dry run: loss")
    assert verify_plan(Strategy([]), make_task(trial_tasks.runs_out), device=CPU).failure.kind == "oom"
    assert all(torch.equal(before[key], value) for key, value in task.model.state_dict().items())
    assert same_state(random, capture_rng())


@pytest.mark.slow
def test_a_compiled_plan_is_checked_as_it_trains_and_the_real_run_finds_it_in_the_cache(tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    from drivetrain.strategy.trial.checking import train_window

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    task, plan = make_task(), Strategy(["compile"])
    with TrialPool(task, device=CPU) as pool:
        eager = pool.run(Strategy([]), steps=1, deadline=soon(600))
        compiled = pool.run(plan, steps=2, deadline=soon(600))
        again = pool.run(plan, steps=2, deadline=soon(600))
    assert eager.outcome == compiled.outcome == again.outcome == "ok", (eager, compiled, again)
    assert eager.yardstick.is_steady is None and compiled.yardstick.is_steady is True
    assert compiled.is_verified and again.is_verified
    assert "compile" in dict(compiled.phases) and "plain" not in dict(again.phases)
    assert again.startup_seconds < compiled.startup_seconds
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        ctx = task.shaped(task.build(), resolve_plan(plan, device=CPU), None)
        train_window(ctx, task.batch(16), task.call)
    assert counters["inductor"]["fxgraph_cache_hit"] > 0 == counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.slow
def test_dropout_and_batch_statistics_are_compared_in_evaluation_mode():
    dropout = make_task(model=None, model_fn=build_randomly)
    plan = [("compile", {"backend": "aot_eager"})]
    norm = make_task(model=trial_tasks.Wrapped(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))))
    before = {name: value.clone() for name, value in norm.model.state_dict().items()}
    for task in (dropout, norm):
        result = attempt(task, plan)
        assert result.outcome == "ok" and result.is_verified and result.yardstick.is_steady is False, result
        assert result.plain_loss == result.yardstick.loss
    assert all(torch.equal(value, before[name]) for name, value in norm.model.state_dict().items())


def pipelined():
    plan = Strategy([("parallel_mode", [("pipe", 2)]), "pipeline_parallel"])
    with TrialPool(make_task(), device=CPU) as pool:
        result = pool.run(plan, steps=2, deadline=soon())
    return result.outcome, result.message, result.is_verified, result.steps


@pytest.mark.slow
def test_a_pipeline_is_compared_and_timed_like_any_plan(world2):
    first, second = world2(pipelined, timeout=200)
    assert first == second == ("ok", "", True, 2)


ORPHAN_SCRIPT = """
import os

import torch

from drivetrain.strategy.trial.running import TrialPool
from tests.strategy.trial_tasks import make_task

if __name__ == "__main__":
    pool = TrialPool(make_task(), device=torch.device("cpu"))
    assert pool.obstacle() is None
    print(pool.pid, flush=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_a_process_ends_with_its_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ORPHAN_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=200, env=environment
    )
    assert done.returncode == 3
    pid, end = int(done.stdout), time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")


GPU_SCRIPT = """
import time

import torch

from drivetrain.strategy.trial.running import TrialPool
from drivetrain.strategy.value import Strategy
from tests.strategy import trial_tasks

if __name__ == "__main__":
    device = torch.device("cuda", 0)
    with TrialPool(trial_tasks.make_task(trial_tasks.hoards), device=device) as pool:
        result = pool.run(Strategy([]), steps=2, deadline=time.monotonic() + 120)
    assert result.outcome == "oom" and "out of memory" in result.message, result
    with TrialPool(trial_tasks.make_task(), device=device) as pool:
        eager = pool.run(Strategy([]), steps=3, deadline=time.monotonic() + 120)
        pid = pool.pid
        plan = Strategy([("amp_native", "bf16"), "compile", "fused_optimizer", "tf32"])
        fast = pool.run(plan, steps=3, deadline=time.monotonic() + 200)
        assert pid == pool.pid is not None
    for result in (eager, fast):
        assert result.outcome == "ok" and result.is_verified and result.steps == 3, result
        assert 0 < result.step_seconds < 5 and 0 < result.peak_bytes <= result.reserved_bytes, result
    assert not torch.cuda.is_initialized()
    print("done")
"""


@pytest.mark.gpu
def test_on_a_gpu_real_exhaustion_is_an_outcome_and_the_caller_never_opens_the_device(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GPU_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "done", done.stderr


@pytest.mark.gpu
def test_on_a_gpu_all_memory_is_given_back():
    """`attempt` has seen the processes go; what they held is free again, whatever others do with the device meanwhile."""
    device, limit = torch.device("cuda", 0), 64 << 20
    for hurts, outcome in ((None, "ok"), (trial_tasks.is_killed, "error")):
        missing = []
        for _ in range(5):  # others may take memory while this runs, but not each time; what leaks here does
            free = torch.cuda.mem_get_info(device)[0]
            held = torch.cuda.memory_reserved(device)
            assert attempt(make_task(hurts), ["checkpoint"], device=device).outcome == outcome
            assert torch.cuda.memory_reserved(device) == held  # nothing was tried in this process
            end = time.monotonic() + 5.0  # the driver takes a moment
            while torch.cuda.mem_get_info(device)[0] < free - limit and time.monotonic() < end:
                time.sleep(0.1)
            missing.append(free - torch.cuda.mem_get_info(device)[0])
            if missing[-1] <= limit:
                break
        assert min(missing) <= limit, missing


@pytest.mark.gpu
def test_on_a_gpu_a_step_finds_its_batch_on_the_device():
    device, batch = torch.device("cuda", 0), {"x": torch.ones(2), "more": (torch.zeros(3),)}

    def at_hand(prepare_input):
        trial = SimpleNamespace(task=SimpleNamespace(prepare_input=prepare_input), device=device)
        return measuring._TimedTrial._at_hand(trial, batch)

    moved, pinned = at_hand(None), at_hand(lambda batch, device: batch)
    assert moved["x"].is_cuda and moved["more"][0].is_cuda
    assert pinned["x"].is_pinned() and pinned["more"][0].is_pinned() and not pinned["x"].is_cuda
