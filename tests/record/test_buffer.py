"""Values are copied aside and come back as they were."""

import pytest
import torch

from drivetrain.record.buffer import PLACES, DeviceBuffer


def test_values_of_many_types_share_a_page_and_come_back_exactly():
    values = [
        torch.tensor(0.1),
        torch.tensor(2**53 + 1),
        torch.tensor([True]),
        torch.tensor(1e-300, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(-3, dtype=torch.int8),
        torch.tensor(float("nan")),
        torch.tensor(2.0).to(torch.float8_e5m2),
    ]
    buffer = DeviceBuffer()
    slots = [buffer.put(value) for value in values]
    arrival = buffer.send()
    assert arrival.is_ready()
    read = [slot.read() for slot in slots]
    expected = [
        value.float().item() if value.dtype.itemsize == 1 and value.is_floating_point() else value.item()
        for value in values
    ]
    assert repr(read) == repr(expected)  # types and NaN too
    assert len({id(slot.page) for slot in slots}) == 1


def test_later_changes_in_place_do_not_reach_the_copy():
    buffer, value = DeviceBuffer(), torch.tensor(1.0, requires_grad=True)
    slot = buffer.put(value)
    with torch.no_grad():
        value.fill_(9.0)
    buffer.send()
    assert slot.read() == 1.0 and not slot.page.memory.requires_grad


def test_pages_overflow_and_are_used_again():
    buffer, before = DeviceBuffer(), None
    for turn in range(3):
        slots = [buffer.put(torch.tensor(turn * 10_000 + place)) for place in range(2 * PLACES + 5)]
        arrival = buffer.send()
        arrival.wait()
        assert [slot.read() for slot in slots] == [turn * 10_000 + place for place in range(2 * PLACES + 5)]
        pages = {id(slot.page) for slot in slots}
        assert before in (None, pages)
        before = pages
        arrival.release()


def test_a_page_made_in_inference_mode_can_be_written_outside_of_it():
    buffer = DeviceBuffer()
    with torch.inference_mode():
        first = buffer.put(torch.tensor(1.0))
    second = buffer.put(torch.tensor(2.0))
    with torch.inference_mode():
        third = buffer.put(torch.tensor(3.0) * 1)
    buffer.send()
    assert [slot.read() for slot in (first, second, third)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_in_any_shape_is_a_value(shape):
    buffer = DeviceBuffer()
    slot = buffer.put(torch.full(shape, 4.0))
    buffer.send()
    assert slot.read() == 4.0
