import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from drivetrain.core.errors import DistributedError
from drivetrain.runtime import collectives, ranks
from drivetrain.runtime.ranks import get_rank

Point = namedtuple("Point", ["x", "y"])

VALUES = [
    3,
    -2.5,
    True,
    None,
    "text",
    b"bytes",
    2**80,
    Path("a/b"),
    [1, (2, "x"), {"k": None}],
    {"nested": {"list": [1.5, {"deep": (False,)}]}, 3: "int key"},
]
TENSORS = [
    torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.randn(3, dtype=torch.bfloat16),
    torch.randn(2, dtype=torch.complex64),
    torch.empty(0, 4),
    torch.arange(4.0).reshape(2, 2)[:1, 1],  # contiguous, with a stride of 2
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j, 3j]).conj().imag,
    torch.ones(2, requires_grad=True),
]


def test_one_process_sees_only_itself():
    tensor = torch.ones(2, 3)
    assert collectives.broadcast_from_master(tensor) is tensor
    assert collectives.broadcast_from_master("text") == "text"
    assert collectives.all_gather_values({"a": 1}) == [{"a": 1}]
    assert torch.equal(collectives.gather_rows(tensor), tensor)
    assert collectives.agree_any(True) is True and collectives.agree_any(False) is False
    assert collectives.control_group() is None
    collectives.distributed_barrier()


def _broadcast_all(values, tensors):
    """Other ranks pass None: only what rank 0 passes counts."""
    mine = [*values, *tensors] if get_rank() == 0 else [None] * (len(values) + len(tensors))
    return [collectives.broadcast_from_master(value) for value in mine]


def test_values_of_the_master_arrive_as_the_kind_they_were(world2):
    for received in world2(_broadcast_all, VALUES, TENSORS):
        values, tensors = received[: len(VALUES)], received[len(VALUES) :]
        assert values == VALUES
        assert [type(value) for value in values] == [type(value) for value in VALUES]
        for got, sent in zip(tensors, TENSORS, strict=True):
            assert got.dtype == sent.dtype and got.device == sent.device and torch.equal(got, sent)


def test_plain_values_are_sent_as_text_and_only_objects_of_other_classes_are_pickled():
    plain = [value for value in VALUES if not isinstance(value, Path)]
    for value in [*plain, float("inf"), {"$slot": [1]}, {("a", 1): b""}]:
        message = collectives._encoded(value)
        assert message[:1] == b"j" and collectives._decoded(message) == value
    message = collectives._encoded(Point(1, Path("a")))
    assert message[:1] == b"p" and collectives._decoded(message) == Point(1, Path("a"))


def _broadcast_nested():
    rank = get_rank()
    value = {"model": [torch.full((2,), float(rank)), Point(torch.tensor(rank), "name")], "step": rank}
    value["object"] = SimpleNamespace(rows={"weight": torch.full((3,), rank)}, of=value)
    return collectives.broadcast_from_master(value)


def test_tensors_inside_containers_travel_too(world4):
    for value in world4(_broadcast_nested):
        assert value["step"] == 0 and torch.equal(value["model"][0], torch.zeros(2))
        assert (
            isinstance(value["model"][1], Point) and value["model"][1].x.item() == 0 and value["model"][1].y == "name"
        )
        assert value["object"].of is value and torch.equal(value["object"].rows["weight"], torch.zeros(3, dtype=int))


def _send_what_cannot_be_sent():
    """All ranks must fail together: a rank that waits for the others would hang."""
    messages = []
    for value in (lambda: 0, {"lock": threading.Lock()}, torch.eye(2).to_sparse()):
        with pytest.raises(DistributedError) as caught:
            collectives.broadcast_from_master(value)
        messages.append(str(caught.value))
    with pytest.raises(DistributedError, match="rank 1 cannot send a function"):
        collectives.all_gather_values((lambda: 0) if get_rank() == 1 else 0)
    return messages, collectives.all_gather_values(get_rank())


def test_value_that_cannot_travel_fails_on_every_rank_and_the_world_goes_on(world2):
    (messages, after), second = world2(_send_what_cannot_be_sent)
    assert second == (messages, after) and after == [0, 1]
    assert "function" in messages[0] and "dict" in messages[1] and "to_dense()" in messages[2]


class Unwilling:
    def __reduce__(self):
        raise ValueError("not \ud800 today")


@pytest.mark.parametrize("value", [Unwilling(), torch.empty(1, device="meta")])
def test_any_error_of_packing_becomes_a_note_for_all_ranks(value):
    cyclic = [value]
    cyclic.append(cyclic)
    for one in (value, {"inside": value}, cyclic):
        assert collectives._encoded(one, [])[:1] == b"x"


def _values_of_all():
    rank = get_rank()
    return collectives.all_gather_values({"rank": rank, "text": "x" * rank})


def test_every_rank_gets_the_values_of_all(world4):
    expected = [{"rank": rank, "text": "x" * rank} for rank in range(4)]
    assert world4(_values_of_all) == [expected] * 4


def _gather(counts, dtype):
    rank = get_rank()
    rows = torch.arange(counts[rank] * 3).reshape(counts[rank], 3) + 100 * rank
    return collectives.gather_rows(rows.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_rows_of_all_ranks_are_joined_in_order(world4, dtype):
    counts = [2, 0, 3, 1]
    parts = [torch.arange(count * 3).reshape(count, 3) + 100 * rank for rank, count in enumerate(counts)]
    expected = torch.cat(parts).to(dtype)
    for rows in world4(_gather, counts, dtype):
        assert rows.dtype == dtype and torch.equal(rows, expected)


def _gather_with_gradient(counts):
    rank = get_rank()
    rows = torch.arange(1.0, counts[rank] * 2 + 1).reshape(counts[rank], 2).requires_grad_()
    everyone = collectives.gather_rows(rows)
    weight = torch.arange(1.0, sum(counts) + 1).unsqueeze(1)
    ((rank + 1) * weight * everyone.pow(2)).sum().backward()
    with torch.no_grad():
        assert not collectives.gather_rows(rows).requires_grad
    return rows.detach(), rows.grad


def test_gathered_rows_give_back_the_gradients_of_the_losses_of_all_ranks(world4):
    counts = [2, 0, 3, 1]
    first = 0
    for rank, (rows, grad) in enumerate(world4(_gather_with_gradient, counts)):
        weight = torch.arange(first + 1.0, first + counts[rank] + 1).unsqueeze(1)
        assert torch.equal(grad, (1 + 2 + 3 + 4) * weight * 2 * rows)
        first += counts[rank]


def _gather_odd_ones():
    rank = get_rank()
    scalars = collectives.gather_rows(torch.tensor(float(rank)))
    unknown_width = collectives.gather_rows(torch.empty(0) if rank == 0 else torch.ones(1, 2, dtype=torch.int32))
    nothing = collectives.gather_rows(torch.empty(0))
    sparse = collectives.gather_rows(torch.eye(2).to_sparse() if rank else torch.eye(2))
    assert torch.equal(sparse, torch.cat([torch.eye(2)] * 2))
    with pytest.raises(DistributedError, match=r"rank 0: \[1, 1\] torch.float32, rank 1: \[1, 2\]"):
        collectives.gather_rows(torch.ones(1, rank + 1))
    with pytest.raises(DistributedError, match=r"torch\.int64"):
        collectives.gather_rows(torch.ones(1, dtype=torch.int64 if rank else torch.float32))
    return scalars, unknown_width, nothing


def test_scalars_and_empty_ranks_are_gathered_and_unlike_rows_refused(world2):
    for scalars, unknown_width, nothing in world2(_gather_odd_ones):
        assert torch.equal(scalars, torch.tensor([0.0, 1.0]))
        assert torch.equal(unknown_width, torch.ones(1, 2, dtype=torch.int32))
        assert nothing.shape == (0,)


def _gather_over_data_ranks():
    rank = get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ranks.set_data_ranks(rank // 2, 2, groups[rank % 2])
    return collectives.gather_rows(torch.tensor([rank // 2] * (1 + rank // 2)))


def test_ranks_that_share_samples_are_gathered_once(world4):
    assert [rows.tolist() for rows in world4(_gather_over_data_ranks)] == [[0, 1, 1]] * 4


def _agree(voters):
    later = collectives.start_agree_any(get_rank() in voters)
    at_once = collectives.agree_any(get_rank() in voters)
    return at_once, later()


@pytest.mark.parametrize("voters", [(), (0,), (3,), (0, 1, 2, 3)])
def test_one_vote_is_enough_and_all_ranks_hear_of_it(world4, voters):
    assert world4(_agree, voters) == [(bool(voters), bool(voters))] * 4


def _control_is_default():
    return collectives.control_group() is dist.group.WORLD


def test_gloo_world_is_its_own_control_group(world2):
    assert world2(_control_is_default) == [True, True]


def _talk_on_another_default_device():
    with torch.device("meta"):
        collectives.distributed_barrier()
        return (
            collectives.agree_any(get_rank() == 1),
            collectives.broadcast_from_master("x"),
            collectives.all_gather_values(1),
        )


def test_control_messages_are_on_the_host_whatever_the_default_device(world2):
    assert world2(_talk_on_another_default_device) == [(True, "x", [1, 1])] * 2
