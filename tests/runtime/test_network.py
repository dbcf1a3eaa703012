"""Ranks on several machines find each other also where a host name leads to a loopback address."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
import torch.distributed as dist

from drivetrain.runtime import store
from drivetrain.runtime.environment import launched_world

NODES = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.fixture
def network(monkeypatch):
    """Return a function that joins as a rank; this machine reaches 10.0.0.x from 10.0.0.7, and itself over the loopback interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(store, "host_name_is_loopback", lambda: True)
    monkeypatch.setattr(store, "address_towards", lambda host, port: "10.0.0.7" if host.startswith("10.0.0.") else None)
    monkeypatch.setattr(store, "interface_with", {"10.0.0.7": "eth1"}.get)
    keys = dist.HashStore()

    def join(rank, master):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        store.keep_to_network(launched_world(NODES | {"RANK": str(rank), "MASTER_ADDR": master}), keys)
        return os.environ.pop("GLOO_SOCKET_IFNAME", None)

    join.keys = keys
    return join


def test_gloo_uses_the_interface_towards_rank_0(network, monkeypatch):
    assert network(2, "10.0.0.1") == "eth1"
    monkeypatch.setattr(store, "host_name_is_loopback", lambda: False)
    assert network(2, "10.0.0.1") is None  # gloo's own choice can be reached


def test_on_the_machine_of_rank_0_the_way_to_another_machine_decides(network):
    for rank, address in (("0", ""), ("1", ""), ("2", "10.0.0.9")):
        network.keys.set(f"address/{rank}", address)
    assert network(0, "head") == "eth1"


def test_ranks_that_are_all_here_wait_for_no_other_machine(network):
    network.keys.set("address/0", "")
    network.keys.set("address/2", "")
    assert network(1, "head") is None


def test_an_interface_that_the_user_chose_stays(network, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    store.keep_to_network(launched_world(NODES | {"MASTER_ADDR": "10.0.0.1"}), network.keys)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_loopback_addresses_lead_to_no_other_machine(monkeypatch):
    assert store.address_towards("127.0.0.1", 29500) is None
    assert store.address_towards("no-such-host.invalid", 29500) is None
    names = {"debian": "127.0.1.1", "cluster": "10.0.0.7"}

    def resolve(host, *_, **__):
        if host not in names:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name, expected in (("debian", True), ("cluster", False), ("container", True)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert store.host_name_is_loopback() is expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_the_interface_of_an_address_is_found():
    assert store.interface_with("127.0.0.1") == "lo" and store.interface_with("192.0.2.77") is None


JOIN = """
import json, sys
from pathlib import Path
from drivetrain.checkpoint.folder import prepare_folder
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.runtime import all_gather_values, collectives, init_distributed
import os, socket
collectives.PATIENCE_SECONDS = 1
init_distributed()
found = {"hosts": all_gather_values(socket.gethostname()), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
for name in ("shared", "local"):
    try:
        prepare_folder(Path(sys.argv[1], name), fresh=True).release()
        found[name] = None
    except WriteFailedError as error:
        found[name] = str(error)
print(json.dumps(found))
"""
ENTER = """
hostname $1; echo "127.0.0.1 localhost" > $2/hosts; echo "127.0.1.1 $1" >> $2/hosts
mount --make-rprivate / && mount --bind $2/hosts /etc/hosts && mount --bind $2/disk $3/local && exec "$4" -c "$5" "$3"
"""


@pytest.fixture
def two_hosts(tmp_path):
    """Make two network namespaces with a cable between them, and a folder for each."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("needs root, iproute2 and util-linux")
    names = [f"drivetrain-{os.getpid()}-{side}" for side in "ab"]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for side, name in enumerate(names):
            (tmp_path / name / "disk").mkdir(parents=True)
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if side:
                ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", name)
        for side, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.0.{side + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr!r}")
    (tmp_path / "runs" / "local").mkdir(parents=True)
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.slow
def test_two_hosts_that_name_themselves_by_loopback_train_together_and_notice_a_local_folder(two_hosts, tmp_path):
    running = []
    for rank, name in enumerate(two_hosts):
        env = os.environ | NODES | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "10.99.0.1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        enter = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-ec", ENTER, "sh", f"host{rank}"]
        running.append(
            subprocess.Popen(
                [*enter, str(tmp_path / name), str(tmp_path / "runs"), sys.executable, JOIN],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [one.communicate(timeout=120) for one in running]
    finally:
        for one in running:
            with suppress(ProcessLookupError):
                one.kill()
    assert [one.returncode for one in running] == [0, 0], ended
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    assert first == second and first["hosts"] == ["host0", "host1"] and first["interface"] == "cable"
    assert first["shared"] is None and "rank 1 on host host1" in first["local"]
