"""Batches equal those of torch's DataLoader in value, dtype and container, whichever way they are fetched."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from drivetrain.core.errors import ParameterError
from drivetrain.data.columns import find_columns
from drivetrain.data.fetch import GatherFetch
from drivetrain.data.loader import SmartDataLoader

Pair = namedtuple("Pair", "x y")

UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]  # of which torch selects no single numbers
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += UNSIGNED
NUMPY_DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint16", "bool", "complex128"]


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            assert_same(one, other)
    else:
        assert ours == theirs


def assert_same_epoch(data, reference=None, **kwargs):
    ours = list(SmartDataLoader(data, loading_bar=False, **kwargs))
    theirs = list(DataLoader(data if reference is None else reference, **kwargs))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert_same(one, other)


class Samples(Dataset):
    """Plain samples, read one by one by torch's DataLoader: the reference for data given as columns."""

    def __init__(self, make, length):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw, rows):
    dtype = draw(st.sampled_from(DTYPES))
    return (
        torch.arange(rows * 7)
        .remainder(5)
        .to(dtype)[:rows]
        .reshape(rows, *[1] * len(shape := draw(shapes)))
        .expand(rows, *shape)
    )


@settings(max_examples=60)
@given(
    data=st.data(), rows=st.integers(1, 13), size=st.integers(1, 5), drop_last=st.booleans(), count=st.integers(1, 3)
)
def test_tensor_datasets_give_what_torch_gives(data, rows, size, drop_last, count):
    columns = [data.draw(tensors(rows)) for _ in range(count)]
    assert_same_epoch(TensorDataset(*columns), batch_size=size, drop_last=drop_last)
    assert_same_epoch(columns[0], batch_size=size, drop_last=drop_last)
    order = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=9))
    assert_same_epoch(TensorDataset(*columns), batch_size=size, sampler=order)
    batches = [order[at : at + 2] for at in range(0, len(order), 2)]
    assert_same_epoch(TensorDataset(*columns), batch_sampler=batches)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(NUMPY_DTYPES),
    shape=shapes,
    rows=st.integers(1, 9),
    writable=st.booleans(),
    fortran=st.booleans(),
)
def test_arrays_give_what_torch_gives(dtype, shape, rows, writable, fortran):
    array = (np.arange(rows * int(np.prod(shape, dtype=int))).reshape(rows, *shape) % 3).astype(dtype)
    array = np.asfortranarray(array) if fortran else array
    array.flags.writeable = writable
    reference = Samples(lambda index: array[index].copy() if shape else array[index], rows)
    assert_same_epoch(array, reference, batch_size=4)
    assert_same_epoch(array, reference, batch_size=4, sampler=range(rows)[::-2])


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_shuffled_unsigned_tokens_are_gathered_also_those_of_a_subset_that_moves(dtype):
    tokens = torch.arange(9).to(dtype)
    assert_same_epoch(tokens, sampler=[4, 0, -1], batch_size=2)
    moved = find_columns(Subset(TensorDataset(tokens), [7, 2])).to(torch.device("cpu"))
    assert torch.equal(moved.tree[0], torch.tensor([7, 2]).to(dtype))


@pytest.mark.parametrize(
    "array", [np.array(["a", "b"]), np.zeros((3, 2), dtype=">f4"), np.zeros((4, 2))[::-1], np.zeros(())]
)
def test_arrays_that_are_no_columns_are_left_to_collation(array):
    assert find_columns(array) is None


def test_dicts_tuples_and_nested_columns_give_what_collated_samples_give():
    x, y, z = torch.randn(7, 2), torch.arange(7), np.arange(7.0)
    assert_same_epoch({"x": x, "z": z}, Samples(lambda i: {"x": x[i], "z": z[i]}, 7), batch_size=3)
    assert_same_epoch((x, y), Samples(lambda i: (x[i], y[i]), 7), batch_size=3)
    assert_same_epoch(Pair(x, y), Samples(lambda i: Pair(x[i], y[i]), 7), batch_size=3)
    nested = {"x": x, "more": {"pair": (y, z)}}
    assert_same_epoch(nested, Samples(lambda i: {"x": x[i], "more": {"pair": (y[i], z[i])}}, 7), batch_size=3)
    ordered = OrderedDict(b=x, a=y)
    assert_same_epoch(ordered, Samples(lambda i: OrderedDict(b=x[i], a=y[i]), 7), batch_size=3)


def test_columns_with_a_users_collation_are_read_sample_by_sample():
    x, y = torch.randn(5, 2), torch.arange(5)
    collate = lambda samples: sum(int(sample["y"]) for sample in samples)
    assert list(SmartDataLoader({"x": x, "y": y}, batch_size=2, collate_fn=collate)) == [1, 5, 4]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_subset_of_tensors_is_gathered_and_equal(shuffle):
    data = TensorDataset(torch.randn(20, 3), torch.arange(20))
    subset = Subset(Subset(data, list(range(5, 20))), [3, 1, -1, 7, 7])
    assert find_columns(subset) is not None
    loader = SmartDataLoader(subset, shuffle, random_seed=1, batch_size=2)
    order = loader._order
    ours = list(loader)
    assert_same(ours, list(DataLoader(subset, batch_size=2, sampler=list(order))))


def test_a_batch_never_shares_memory_with_the_data():
    data = torch.zeros(6, 2)
    for shuffle in (False, True):
        for batch in SmartDataLoader(data, shuffle, batch_size=4):
            batch.add_(1)
    assert not data.any()


def test_a_dataset_that_overrides_its_items_is_asked():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    data = Doubled(torch.arange(6))
    assert find_columns(data) is None
    assert_same_epoch(data, batch_size=4)


def test_sparse_and_subclassed_tensors_are_left_to_collation():
    assert find_columns(torch.eye(3).to_sparse()) is None
    assert find_columns(torch.nn.Parameter(torch.zeros(3))) is None


class WholeBatches(Dataset):
    def __init__(self):
        self.x, self.calls = torch.randn(10, 2), []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.x[index], index

    def get_batch(self, indices):
        self.calls.append(indices)
        return self.x[indices], np.array(indices)


class ManyItems(WholeBatches):
    get_batch = None

    def __getitems__(self, indices):
        self.calls.append(indices)
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [WholeBatches, ManyItems])
def test_datasets_that_read_many_samples_at_once_do_so(kind):
    data = kind()
    batches = list(SmartDataLoader(data, batch_size=4))
    assert data.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    reference = list(DataLoader(Samples(WholeBatches.__getitem__.__get__(data), 10), batch_size=4))
    assert_same(batches, reference)


def test_without_batching_each_sample_comes_as_torch_converts_it():
    data = WholeBatches()
    assert_same(list(SmartDataLoader(data, batch_size=None)), list(DataLoader(data, batch_size=None)))
    assert_same_epoch(TensorDataset(torch.arange(3)), batch_size=None)


def test_a_dataset_of_keys_works_with_a_sampler_of_keys():
    data = {"a": 1, "b": 2, "c": 3}
    loader = SmartDataLoader(data, sampler=["c", "a"], batch_size=2)
    assert [batch.tolist() for batch in loader] == [[3, 1]]
    assert loader.sample_index is None


def test_lists_are_datasets_of_samples():
    assert_same_epoch([torch.zeros(2), torch.ones(2), torch.ones(2)], batch_size=2)
    assert_same_epoch(["a", "b", "c"], batch_size=2)
    assert_same_epoch([{"x": 1.5, "t": "one"}, {"x": 2.5, "t": "two"}], batch_size=2)


def test_what_is_no_dataset_is_named():
    with pytest.raises(ParameterError, match=r"the same number of rows; got 3, 4.*list"):
        SmartDataLoader((torch.zeros(3), torch.zeros(4)))
    with pytest.raises(ParameterError, match="'x', 'y' is not a dataset of samples"):
        SmartDataLoader({"x": 1, "y": 2})
    with pytest.raises(ParameterError, match="neither __getitem__"):
        SmartDataLoader(3)
    with pytest.raises(ParameterError, match="no __len__"):
        SmartDataLoader(type("Endless", (), {"__getitem__": lambda self, index: index})())


def test_a_dataset_of_whole_batches_needs_items_for_some_arguments():
    class OnlyBatches:
        def __len__(self):
            return 4

        def get_batch(self, indices):
            return torch.tensor(indices)

    assert [batch.tolist() for batch in SmartDataLoader(OnlyBatches(), batch_size=3)] == [[0, 1, 2], [3]]
    for kwargs in ({"rng": "sample"}, {"batch_size": None}, {"collate_fn": list}):
        with pytest.raises(ParameterError, match="Define __getitem__ too"):
            SmartDataLoader(OnlyBatches(), **kwargs)


def test_gradients_flow_through_gathered_tensors():
    x = torch.randn(6, 2, requires_grad=True)
    assert isinstance(SmartDataLoader(x)._fetch, GatherFetch)
    sum(batch.sum() for batch in SmartDataLoader(x, batch_size=4)).backward()
    assert torch.equal(x.grad, torch.ones(6, 2))
