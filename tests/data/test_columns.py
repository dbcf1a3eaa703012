"""Tensor data that lives on the device: when it does, when it refuses, and that the order stays."""

import logging

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from drivetrain.core.errors import ParameterError
from drivetrain.data.columns import find_columns, make_resident, resident_columns
from drivetrain.data.loader import SmartDataLoader

META = torch.device("meta")  # stands in for an accelerator: tensors go there, values are not needed


@pytest.fixture
def free(monkeypatch):
    def set_free(size):
        monkeypatch.setattr("drivetrain.data.columns.device_memory", lambda device: (size, size))

    return set_free


def test_small_data_moves_large_data_stays(free, caplog):
    caplog.set_level(logging.INFO)
    columns = find_columns(TensorDataset(torch.zeros(100, 10), torch.zeros(100)))
    assert columns.num_bytes == 4400
    free(44_000)
    placed = resident_columns(columns, META, "auto")
    assert placed.device == META and "4.3 KiB of tensor data moved to meta" in caplog.text
    free(43_999)
    assert resident_columns(columns, META, "auto") is None
    assert resident_columns(columns, META, False) is None
    assert resident_columns(columns, torch.device("cpu"), "auto") is None
    assert resident_columns(None, META, "auto") is None
    free(2**40)
    huge = find_columns(torch.zeros(1).expand(2**28 + 1))
    assert resident_columns(huge, META, "auto") is None, "more than 1 GiB"


def test_only_the_rows_of_a_subset_move(free):
    free(10**6)
    columns = find_columns(Subset(TensorDataset(torch.zeros(100, 10)), [1, 2, 3]))
    placed = resident_columns(columns, META, "auto")
    assert columns.num_bytes == 120 and [leaf.shape for leaf in placed.leaves] == [(3, 10)]


def test_insisting_refuses_with_both_sizes(free):
    free(4000)
    loader = SmartDataLoader(torch.zeros(100, 10))
    with pytest.raises(ParameterError, match=r"3.9 KiB, but 'meta' has 3.9 KiB free, of which 2.0 KiB may be used"):
        make_resident(loader, META, max_fraction=0.5)

    class Items(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return index

    with pytest.raises(ParameterError, match="per-sample Python code"):
        make_resident(SmartDataLoader(Items()), "cpu")


def test_a_resident_loader_gathers_on_the_device_in_the_same_order(free):
    free(10**6)
    loader = SmartDataLoader(TensorDataset(torch.zeros(7, 2), torch.zeros(7)), True, 1, batch_size=4).to(META)
    batches = list(loader)
    assert [[(part.device, tuple(part.shape)) for part in batch] for batch in batches] == [
        [(META, (4, 2)), (META, (4,))],
        [(META, (3, 2)), (META, (3,))],
    ]
    assert loader.sample_index.device == META
    assert loader.to("cpu").move_output and next(iter(loader))[0].device.type == "cpu"


def test_data_can_be_stored_in_another_dtype():
    data = TensorDataset(torch.randn(6, 2), torch.arange(6))
    loader = SmartDataLoader(data, True, 1, batch_size=4)
    expected = [(x.bfloat16(), y) for x, y in loader]
    loader.set_epoch(0)
    make_resident(loader, "cpu", dtype=torch.bfloat16)
    for (x, y), (wanted_x, wanted_y) in zip(loader, expected):
        assert torch.equal(x, wanted_x) and torch.equal(y, wanted_y)
