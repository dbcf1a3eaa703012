"""Parts of batches, and targets in both forms."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from drivetrain.context.batch import (
    batch_get,
    batch_set,
    check_for_index_targets,
    ensure_targets_one_hot,
    infer_target_type,
)
from drivetrain.core.errors import ConfigError

Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: int
    y: int


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((1, 2), 1),
        ([1, 2], 1),
        ([1, 2], -1),
        ({"x": 1, "y": 2}, "y"),
        (Pair(1, 2), "y"),
        (Pair(1, 2), 1),
        (Item(1, 2), "y"),
    ],
)
def test_a_part_is_read_and_set_where_it_is(batch, key):
    assert batch_get(batch, key) == 2
    changed = batch_set(batch, key, 7)
    assert batch_get(changed, key) == 7
    assert type(changed) is type(batch)
    assert batch_get(changed, "x" if isinstance(key, str) else 0) == 1


def test_mappings_lists_and_objects_are_set_in_place_and_tuples_are_rebuilt():
    for batch, key in (([1, 2], 0), ({"x": 1}, "x"), (SimpleNamespace(x=1), "x")):
        assert batch_set(batch, key, 9) is batch
    pair = Pair(1, 2)
    assert batch_set(pair, "x", 9) == Pair(9, 2) and pair == Pair(1, 2)


def test_several_keys_give_and_take_several_values():
    assert batch_get((1, 2, 3), [2, 0]) == [3, 1]
    assert batch_set((1, 2, 3), (2, 0), (30, 10)) == (10, 2, 30)
    with pytest.raises(ValueError, match="2 in all; got 3 values"):
        batch_set((1, 2, 3), [0, 1], [1, 2, 3])


def test_functions_read_and_a_pair_of_functions_also_sets():
    assert batch_get({"a": {"b": 3}}, lambda batch: batch["a"]["b"]) == 3
    getter, setter = (lambda batch: batch[0]), (lambda batch, value: (value, *batch[1:]))
    assert batch_get((1, 2), (getter, setter)) == 1
    assert batch_set((1, 2), (getter, setter), 5) == (5, 2)
    with pytest.raises(RuntimeError, match=r"pair \(getter, setter\)"):
        batch_set((1, 2), getter, 5)
    with pytest.raises(ValueError, match="getter, setter"):
        batch_get((1, 2), (getter, setter, getter))


def test_an_absent_key_names_what_is_there():
    with pytest.raises(KeyError, match="Did you mean 'image'"):
        batch_get({"image": 1, "label": 2}, "imgae")
    with pytest.raises(IndexError, match="of 2 parts"):
        batch_get((1, 2), 5)


@pytest.mark.parametrize(("batch", "key"), [((1, 2), 5), ((1, 2), "x"), (Pair(1, 2), "z"), (3, 0), ("text", 0)])
def test_an_unsettable_key_names_itself_and_the_type_of_the_batch(batch, key):
    with pytest.raises(RuntimeError, match=type(batch).__name__) as caught:
        batch_set(batch, key, 9)
    assert repr(key) in str(caught.value)


def test_target_type_follows_the_shapes():
    logits = torch.zeros(4, 3, 5, 5)
    assert infer_target_type(logits, torch.zeros(4, 3, 5, 5)) == "one_hot"
    assert infer_target_type(logits, torch.zeros(4, 5, 5)) == "indices"
    with pytest.raises(RuntimeError, match="do not fit outputs of shape"):
        infer_target_type(logits, torch.zeros(4))
    assert check_for_index_targets(torch.tensor([1])) and not check_for_index_targets(torch.tensor([1.0]))


@pytest.mark.parametrize("shape", [(6,), (6, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_hot_equals_torch_and_trains_like_indices(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, shape, generator=generator)
    logits = torch.randn(shape[0], 4, *shape[1:], generator=generator).to(dtype)
    dense = ensure_targets_one_hot(logits, targets)
    assert torch.equal(dense, F.one_hot(targets, 4).movedim(-1, 1).to(dense.dtype))
    torch.testing.assert_close(
        F.cross_entropy(logits.double(), dense.double()), F.cross_entropy(logits.double(), targets)
    )


def test_ignored_rows_are_all_zero_and_dense_targets_stay_as_they_are():
    logits = torch.zeros(3, 2)
    assert ensure_targets_one_hot(logits, torch.tensor([1, -100, 0])).tolist() == [[0, 1], [0, 0], [1, 0]]
    soft = torch.tensor([[0.3, 0.7]] * 3)
    assert ensure_targets_one_hot(logits, soft) is soft
    assert ensure_targets_one_hot(logits, soft > 0.5).dtype is torch.float32
    assert ensure_targets_one_hot(logits, torch.tensor([0, 1, 2]), num_classes=5).shape == (3, 5)


def test_a_class_out_of_range_is_found_in_anomaly_mode():
    with torch.autograd.set_detect_anomaly(True, check_nan=False), pytest.raises(ConfigError, match="class 7"):
        ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([0, 7]))
