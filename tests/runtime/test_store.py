"""Nothing of a run on one machine can be reached from another machine, or be told anything by another user."""

import base64
import ipaddress
import os
import pickle
import socket
import stat
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from drivetrain.core.errors import DistributedError
from drivetrain.runtime import store
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.group import destroy_group, init_distributed
from drivetrain.runtime.launch import launch
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.store import STORE_VARIABLE, has_private_store, loopback_server, loopback_variables
from tests.runtime.test_group import free_port

reads_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="listening sockets are read from /proc")
LISTENING = "0A"


def exposed_sockets(pid: int) -> list[str]:
    """Return the addresses other than loopback on which a process listens."""
    addresses = [(getattr(host, "ipv4_mapped", None) or host, port) for host, port in listening_sockets(pid)]
    return [f"{host}:{port}" for host, port in addresses if not host.is_loopback]


def listening_sockets(pid: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Return the addresses on which a process listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed since
            continue
    found = []
    for table in ("tcp", "tcp6"):
        file = Path(f"/proc/{pid}/net/{table}")
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                found.append((read_address(address), int(port, 16)))
    return found


def read_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read the kernel's form: words of four bytes, each in the machine's order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


@reads_proc
def test_the_check_of_listening_sockets_sees_an_open_one():
    before = exposed_sockets(os.getpid())
    with socket.create_server(("0.0.0.0", 0)) as exposed, socket.create_server(("127.0.0.1", 0)):
        assert exposed_sockets(os.getpid()) == [*before, f"0.0.0.0:{exposed.getsockname()[1]}"]


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def poison(marker: str) -> None:
    """Do what another user of the machine can do: write to all keys of every store on which the agent listens."""
    attack = base64.b64encode(pickle.dumps(Malicious(marker)))  # as torch's own rendezvous keeps its state
    run_ids = ("drivetrain", os.environ["TORCHELASTIC_RUN_ID"])
    ports = {port for _, port in listening_sockets(os.getppid())}
    assert int(os.environ["MASTER_PORT"]) in ports
    for port in ports:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        for key in {*store.list_keys(), *(f"torch.rendezvous.{run_id}" for run_id in run_ids)}:
            store.set(key, attack)


def poison_and_fail_once(marker: str) -> tuple:
    """In the first attempt write into the store and fail, so that the agent meets again; then return what can be reached."""
    init_distributed(backend="gloo")
    poison(marker)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        all_gather_values(None)
        if get_rank() == 1:
            raise ValueError("meet again")
    folder = Path(os.environ[STORE_VARIABLE])
    exposed = exposed_sockets(os.getpid()) + exposed_sockets(os.getppid())
    return all_gather_values(get_rank()), exposed, stat.S_IMODE(folder.stat().st_mode), folder.name


@reads_proc
@pytest.mark.usefixtures("can_fork")
def test_no_socket_of_a_launch_is_exposed_and_what_others_write_into_its_store_is_never_unpickled(tmp_path):
    marker = tmp_path / "was-here"
    results = launch(
        lambda: poison_and_fail_once(str(marker)), 2, max_restarts=1
    )  # forked: a new interpreter takes seconds
    assert [result[:3] for result in results] == [([0, 1], [], 0o700)] * 2
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(str(marker))))
    assert marker.exists()  # the pickle was a working one
    (run_id,) = {result[3] for result in results}
    assert len(run_id) == 32 and not Path(run_id).exists()


def _exposed_here() -> list[str]:
    assert has_private_store()
    return exposed_sockets(os.getpid())


@reads_proc
def test_ranks_that_meet_in_a_folder_expose_nothing(world2):
    assert world2(_exposed_here) == [[], []]


@reads_proc
@pytest.mark.parametrize("launcher", ["torchrun", "hostname", "slurm"])
def test_rank_zero_of_a_world_on_one_machine_serves_on_the_loopback_only(monkeypatch, launcher):
    world = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if launcher == "slurm":
        world = {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "MASTER_PORT": free_port()}
    elif launcher == "hostname":
        world |= {"MASTER_ADDR": "a-name-that-leads-nowhere.invalid", "LOCAL_WORLD_SIZE": 1}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    before = exposed_sockets(os.getpid())
    init_distributed(backend="gloo")
    try:
        assert all_gather_values(7) == [7]
        assert exposed_sockets(os.getpid()) == before
    finally:
        destroy_group()


def test_folder_of_an_outer_launch_is_not_used_by_a_launch_within(monkeypatch, tmp_path):
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "outer"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    assert has_private_store()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "inner")
    assert not has_private_store()


def test_interface_chosen_by_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0"), (2, "eth7")])
    assert loopback_variables() == {"NCCL_SOCKET_IFNAME": "lo0"}


def test_taken_port_of_a_loopback_server_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DistributedError, match=f"could not connect at 127.0.0.1:{port}"):
            loopback_server(port)


def test_a_rank_of_a_replaced_node_meets_the_others_whose_agent_counted_a_restart(monkeypatch):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    stores = []
    for rank, restarts in (("0", "1"), ("1", "0")):
        monkeypatch.setattr(store, "_times_joined", 0)
        for name, value in {**address, "RANK": rank, "TORCHELASTIC_RESTART_COUNT": restarts}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        stores.append(store.open_store(launched_world(), timedelta(seconds=2)))
    stores[0].set("address of rank 0", "here")
    assert stores[1].get("address of rank 0") == b"here"
