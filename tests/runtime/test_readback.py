"""Scalars on their way to the host."""

import pytest
import torch

from drivetrain.runtime.device import AsyncReadback


def test_on_a_cpu_a_value_is_known_at_once():
    readback = AsyncReadback()
    readback.push(torch.tensor(0.25), tag="a")
    readback.push(0.5, tag="b")
    assert readback.poll() == [("a", 0.25), ("b", 0.5)]
    assert readback.poll() == []
    assert readback.drain() == []


def test_a_value_with_a_graph_is_read_without_a_warning():
    readback = AsyncReadback()
    readback.push(torch.ones((), requires_grad=True) * 3)
    assert readback.poll() == [(None, 3.0)]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on an accelerator without events."""

    is_cpu = False


def elsewhere(value):
    return torch.tensor(value).as_subclass(Elsewhere)


def test_a_number_of_the_host_comes_after_what_was_pushed_before_it():
    readback = AsyncReadback(max_lag=4)
    for step in range(3):
        readback.push(elsewhere(float(step)), ("loss", step))
        readback.push(0.5, ("lr", step))
    arrived = readback.poll()
    assert arrived == [(("loss", 0), 0.0), (("lr", 0), 0.5)]  # what the lag made wait
    assert readback.drain() == [
        ((name, step), value) for step in (1, 2) for name, value in (("loss", step), ("lr", 0.5))
    ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_values_arrive_in_order_at_most_two_pushes_late_and_nothing_synchronises():
    readback = AsyncReadback()
    values = [torch.full((), float(index), device="cuda") for index in range(50)]
    busy = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    arrived = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index, value in enumerate(values):
            busy = busy @ busy * 1e-4
            readback.push(value + 0 * busy[0, 0].nan_to_num(0.0, 0.0, 0.0), tag=index)
            arrived += readback.poll()
            assert index - len(arrived) < 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrived += readback.drain()
    assert arrived == [(index, float(index)) for index in range(50)]


@pytest.mark.gpu
def test_pinned_places_are_used_again_also_when_the_type_changes():
    readback = AsyncReadback()
    for index in range(20):
        dtype = torch.float32 if index % 2 else torch.bfloat16
        readback.push(torch.full((), float(index), device="cuda", dtype=dtype), tag=index)
    assert [value for _, value in readback.drain()] == [float(index) for index in range(20)]
    assert all(len(places) <= 3 for places in readback._free.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_value_of_a_device_that_is_not_the_current_one_is_waited_for():
    readback, busy = AsyncReadback(), torch.randn(4096, 4096, device="cuda:1")
    for index in range(20):
        busy = busy @ busy * 1e-4
        readback.push(torch.full((), float(index), device="cuda:1") + 0 * busy[0, 0].nan_to_num(0.0, 0.0, 0.0), index)
    assert readback.drain() == [(index, float(index)) for index in range(20)]
