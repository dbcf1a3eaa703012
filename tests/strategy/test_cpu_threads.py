"""The number of threads as a part of a plan: set when it is applied, put back when that fails, refused where it means nothing."""

import pytest
import torch

from drivetrain.context.context import Context
from drivetrain.core.errors import DrivetrainWarning, MethodConfigError, UnsupportedMethodError
from drivetrain.runtime.device import usable_cpus
from drivetrain.strategy.method import Method
from drivetrain.strategy.methods import kernels
from drivetrain.strategy.registry import _methods, find_method, register_method
from drivetrain.strategy.resolve import resolve_plan
from drivetrain.strategy.value import Strategy
from tests.strategy.tasks import make_model


@pytest.fixture(autouse=True)
def threads():
    """The number of threads before, which is there again afterwards."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_a_plan_sets_the_threads_of_the_process(threads):
    context = Context(model=make_model())
    Strategy([("cpu_threads", threads + 1)]).apply(context)
    assert torch.get_num_threads() == threads + 1
    Strategy(["cpu_threads"]).apply(Context(model=make_model()))
    assert torch.get_num_threads() == kernels.cpu_share()


class Fails(Method):
    """Fails after everything else."""

    name, group = "fails_at_last", "own"
    stage = list(type(Method.stage))[-1]

    def apply(self, ctx, config):
        assert torch.get_num_threads() == ctx.plan.config("cpu_threads").threads
        torch.set_float32_matmul_precision("high")  # as tf32 does
        raise RuntimeError("no")


def test_a_plan_that_fails_puts_threads_and_precision_back(threads):
    register_method(Fails())
    precision = torch.get_float32_matmul_precision()
    assert precision != "high"
    try:
        model = make_model()
        with pytest.raises(RuntimeError, match="no"):
            Strategy([("cpu_threads", threads + 1), "fails_at_last"]).apply(Context(model=model))
    finally:
        del _methods["fails_at_last"]
    assert torch.get_num_threads() == threads and torch.get_float32_matmul_precision() == precision


def test_the_number_survives_json_and_an_unknown_key_is_refused():
    plan = Strategy([("cpu_threads", {"threads": 3})])
    again = Strategy.from_json(plan.to_json())
    assert again == plan and again[0].config.threads == 3
    assert plan != Strategy([("cpu_threads", 4)])
    with pytest.raises(MethodConfigError, match="nearest|Nearest|threads"):
        Strategy([("cpu_threads", {"thread": 3})])
    for wrong in (0, -1, 1.5, True, "many"):
        with pytest.raises(MethodConfigError, match="whole number"):
            Strategy([("cpu_threads", wrong)])


def test_threads_mean_nothing_on_an_accelerator():
    method, device = find_method("cpu_threads"), torch.device("cuda")
    assert "cuda" in method.requires(None, device, 1) and method.local_candidates(device, 1) == ()
    plan = Strategy([("cpu_threads", 2)])
    with pytest.warns(DrivetrainWarning, match="cpu_threads"):
        resolved = resolve_plan(plan, device=torch.device("meta"), world=1)
    assert resolved.steps == () and resolved.dropped[0][0] == "cpu_threads"
    with pytest.raises(UnsupportedMethodError, match="cpu_threads"):
        resolve_plan(plan, device=torch.device("meta"), world=1, strict=True)


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"),
    [(8, 1, [1, 4, 8]), (8, 2, [1, 2, 4]), (2, 1, [1, 2]), (3, 1, [1, 3]), (1, 4, [1])],
)
def test_candidates_are_one_thread_half_and_all_of_a_processs_share(monkeypatch, cpus, ranks, expected):
    monkeypatch.setattr(kernels, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(kernels, "get_num_processes", lambda: ranks)
    monkeypatch.setattr(kernels, "launched_world", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    found = find_method("cpu_threads").local_candidates(torch.device("cpu"), ranks)
    assert [config.threads for config in found] == expected


def test_alone_a_process_may_use_all_its_cpus():
    assert kernels.cpu_share() == usable_cpus()


def test_a_process_that_tried_threads_can_try_the_next_plan():
    assert find_method("cpu_threads").leaves_no_trace
