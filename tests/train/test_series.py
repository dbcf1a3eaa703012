"""Values of a metric come back as they were recorded."""

import math

import numpy as np
import torch

from drivetrain.train.history_file import DTYPES, Series


def filled(values, epoch=1):
    series = Series()
    for step, value in enumerate(values):
        series.append(value, epoch, step)
    return series


def test_values_come_back_with_their_types():
    values = [0.1, 3, True, False, -0.0, math.inf, None, "text", 2**60, 2**53, [1, 2]]
    found = filled(values).values()
    assert found == values and [type(value) for value in found] == [type(value) for value in values]
    assert math.copysign(1, found[4]) == -1 and math.isnan(filled([math.nan, 1]).values()[0])


def test_numbers_of_numpy_become_python_numbers():
    found = filled([np.float32(0.25), np.int64(7), np.float64(0.1), np.bool_(True)]).values()
    assert found == [0.25, 7, 0.1, True]
    assert [type(value) for value in found] == [float, int, float, bool]


def test_numbers_in_tensors_come_back_as_tensors_of_their_dtype_without_an_object_for_each():
    values = [torch.tensor(value, dtype=dtype) for value in (0, 1) for dtype in DTYPES] + [torch.tensor(2**60)]
    series = filled(values)
    assert list(series.objects) == [len(values) - 1]
    for found, value in zip(series.values(), values, strict=True):
        assert found.dtype == value.dtype and found.ndim == 0 and torch.equal(found, value)
    alike = filled([torch.tensor(0.1 * step) for step in range(5)])
    assert torch.equal(torch.stack(alike.values()), torch.tensor([0.1 * step for step in range(5)]))


def test_a_tensor_that_changes_later_leaves_the_recorded_value_alone():
    number, matrix = torch.tensor(1.0), torch.ones(2, 2)
    series = filled([number, matrix])
    number += 1
    matrix += 1
    assert series.value(0) == 1.0 and torch.equal(series.value(1), torch.ones(2, 2))


def test_moments_know_where_epochs_begin():
    series = Series()
    for step, epoch in enumerate([1, 1, 2, 2, 2, 4]):
        series.append(float(step), epoch, step)
    assert series.moments() == [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4), (4, 5)]
    assert [series.epochs_from(at) for at in (0, 1, 2, 4)] == [
        [(0, 1), (2, 2), (5, 4)], [(0, 1), (1, 2), (4, 4)], [(0, 2), (3, 4)], [(0, 2), (1, 4)],
    ]  # fmt: skip


def test_a_number_takes_sixteen_bytes():
    series = filled(map(float, range(1000)))
    assert series.numbers.itemsize + series.steps.itemsize == 16 and series.kinds is None and not series.objects
    assert len(series.epochs) == 1
