"""The worlds of `tests/workers.py` themselves: a test helper that hides failures would hide them everywhere."""

import os
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from drivetrain.runtime.group import destroy_group
from drivetrain.runtime.ranks import get_rank


def _identify(*args, **kwargs):
    return os.getpid(), get_rank(), dist.get_world_size(), args, kwargs, torch.get_num_threads()


def test_world_serves_many_calls_with_the_same_processes(world2):
    first = world2(_identify, 1, key="value")
    assert [answer[1:] for answer in first] == [(rank, 2, (1,), {"key": "value"}, 1) for rank in range(2)]
    assert world2(_identify, 1, key="value") == first
    assert os.getpid() not in {answer[0] for answer in first}


def _draw():
    return random.random(), np.random.rand(), torch.rand(2).tolist()


def test_every_call_starts_from_the_same_generators(world2):
    assert world2(_draw) == world2(_draw)


def _fail_on(rank, kind):
    if get_rank() == rank:
        raise kind("told to fail")
    dist.barrier()


def _hang_on(rank):
    if get_rank() == rank:
        time.sleep(60)


def _leave():
    destroy_group()


def _die_on(rank):
    if get_rank() == rank:
        os._exit(3)


@pytest.mark.slow
def test_failure_names_the_rank_and_the_next_call_finds_a_fresh_world(world2):
    with pytest.raises(RuntimeError, match=r"failed on ranks \[1\]") as caught:
        world2(_fail_on, 1, ValueError)
    assert "ValueError: told to fail" in str(caught.value) and "in _fail_on" in str(caught.value)
    assert [answer[1] for answer in world2(_identify)] == [0, 1]


@pytest.mark.slow
def test_ranks_that_hang_or_die_are_named(world2):
    with pytest.raises(RuntimeError, match=r"stuck on ranks \[0\]") as caught:
        world2(_hang_on, 0, timeout=0.5)
    assert "in _hang_on" in str(caught.value)
    with pytest.raises(RuntimeError, match="exit code 3"):
        world2(_die_on, 1)
    assert [answer[1] for answer in world2(_identify)] == [0, 1]


@pytest.mark.slow
def test_assertions_of_all_ranks_are_assertions_here_and_lost_groups_are_noticed(world2):
    with pytest.raises(AssertionError, match="told to fail"):
        world2(_fail_on, 0, AssertionError)
    with pytest.raises(RuntimeError, match="process group was destroyed"):
        world2(_leave)
    assert [answer[1] for answer in world2(_identify)] == [0, 1]
