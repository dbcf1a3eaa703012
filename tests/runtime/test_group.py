import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain.core.errors import ConfigError, DistributedError
from drivetrain.runtime import group, ranks
from drivetrain.runtime.collectives import all_gather_values, broadcast_from_master, control_group
from drivetrain.runtime.group import destroy_group, init_distributed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def alone(monkeypatch):
    """The environment of a world of one process."""
    world = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    yield monkeypatch
    destroy_group()


def test_without_a_launcher_the_error_gives_the_command():
    with pytest.raises(DistributedError, match=r"RANK and WORLD_SIZE are not set.*torchrun --nproc-per-node"):
        init_distributed()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"MASTER_ADDR": None}, "has no MASTER_ADDR:"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "has no MASTER_ADDR and no MASTER_PORT"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"RANK": "1"}, "RANK=1 does not fit WORLD_SIZE=1"),
        ({"RANK": None}, "no RANK"),
        ({"WORLD_SIZE": None}, "no WORLD_SIZE"),
    ],
)
def test_world_that_does_not_match_its_environment_is_refused_at_once(alone, change, expected):
    for name, value in change.items():
        alone.delenv(name) if value is None else alone.setenv(name, value)
    with pytest.raises(DistributedError, match=expected):
        init_distributed()
    assert not ranks.is_distributed()


def test_unusable_backend_is_refused_before_anybody_waits(alone):
    with pytest.raises(DistributedError, match="'ucx' cannot be used"):
        init_distributed("ucx")
    if not torch.cuda.is_available():
        with pytest.raises(DistributedError, match="'nccl' cannot be used: it needs a CUDA device"):
            init_distributed("nccl")


@pytest.mark.parametrize("timeout", [0, -1, "60", True])
def test_timeout_is_seconds_or_a_timedelta(alone, timeout):
    with pytest.raises(ConfigError, match="timeout"):
        init_distributed(timeout=timeout)


def test_world_of_one_joins_once_and_leaves_nothing_behind(alone):
    init_distributed(backend="gloo", timeout=timedelta(seconds=30))
    init_distributed()
    init_distributed(backend="gloo")
    assert ranks.is_distributed() and dist.get_backend() == "gloo" and broadcast_from_master("text") == "text"
    with pytest.raises(DistributedError, match=r"already uses .*gloo.* but 'nccl' was requested"):
        init_distributed(backend="nccl")
    ranks.set_data_ranks(0, 1, dist.group.WORLD)
    destroy_group()
    destroy_group()
    assert not ranks.is_distributed() and control_group() is None and ranks.data_group() is None


def test_slurm_task_joins_without_a_master_address(monkeypatch):
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    init_distributed(backend="gloo")
    try:
        assert (ranks.get_num_processes(), ranks.get_local_rank()) == (1, 0)
    finally:
        destroy_group()


@pytest.mark.parametrize("name", ["no-such-host.invalid", "localhost"])
def test_gloo_uses_the_loopback_on_one_machine_whatever_its_host_name(alone, name):
    alone.setenv("GLOO_SOCKET_IFNAME", "")
    alone.delenv("GLOO_SOCKET_IFNAME")
    alone.setattr(socket, "gethostname", lambda: name)
    init_distributed(backend="gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert all_gather_values(1) == [1]


def _leave_and_join_again():
    old = control_group()
    destroy_group()
    outside = ranks.is_distributed(), ranks.get_rank()
    init_distributed(backend="gloo", timeout=600)
    assert control_group() is dist.group.WORLD and control_group() is not old
    return outside, all_gather_values(ranks.get_rank())


def test_ranks_can_leave_the_group_and_join_again(world2):
    assert world2(_leave_and_join_again) == [((False, 0), [0, 1])] * 2


@pytest.mark.gpu
def test_cuda_world_has_nccl_for_the_device_and_gloo_for_control(alone):
    init_distributed()
    assert "cuda:nccl" in dist.get_backend_config() and dist.get_backend(control_group()) == "gloo"
    here, there = broadcast_from_master(torch.ones(2)), broadcast_from_master({"x": torch.ones(2, device="cuda")})["x"]
    assert here.device.type == "cpu" and there.device == torch.device("cuda", 0)
    from drivetrain.runtime.collectives import agree_any, distributed_barrier, gather_rows

    distributed_barrier()
    assert agree_any(True) and gather_rows(there).device == there.device and gather_rows(here).device == here.device
    init_distributed("nccl")


@pytest.mark.gpu
def test_plain_nccl_world_still_carries_cpu_tensors(alone):
    init_distributed("nccl")
    from drivetrain.runtime.collectives import gather_rows

    ranks.set_data_ranks(0, 1, dist.new_group([0]))
    assert broadcast_from_master(torch.ones(2)).device.type == gather_rows(torch.ones(2)).device.type == "cpu"


def test_default_backend_follows_the_device():
    assert group._backend_for(torch.device("cpu")) == "gloo"
    assert group._backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
