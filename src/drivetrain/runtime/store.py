"""The store through which processes find each other, closed to other users as far as one machine allows.

torch's `TCPStore` has no password, and its server listens on every network interface. Anyone who reaches it can read and write
its keys, and so redirect the processes' connections, over which they exchange pickled values. On one machine our launcher
therefore uses a file in a folder that only this user can open (`private_store`). If only an address is given (`env://`, srun),
the server listens on the loopback interface (`loopback_server`). Several machines need a server that the others reach:
docs/runtime.md names its ports.
"""

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from drivetrain.core.errors import DistributedError
from drivetrain.runtime.environment import LaunchedWorld

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STORE_VARIABLE = "DRIVETRAIN_STORE"
"""A private folder for stores. It belongs to the launch whose run id is the folder's name."""

_servers: dict[tuple[str, int], dist.TCPStore] = {}
"""Servers of this process. They stay, so that ranks can leave and join again at the same address."""

_times_joined = 0


def store_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables with which processes meet in a folder."""
    return {STORE_VARIABLE: str(folder), "TORCHELASTIC_RUN_ID": folder.name}


def has_private_store() -> bool:
    """Return whether a launcher on this machine gave this process a private folder for the store.

    A program that is launched inside another one inherits the variable, but has another run id.
    """
    folder = os.environ.get(STORE_VARIABLE)
    return folder is not None and Path(folder).name == os.environ.get("TORCHELASTIC_RUN_ID")


def open_store(world: LaunchedWorld, timeout: timedelta) -> dist.Store:
    """Return the store of this world.

    Each attempt of a restarted group, and each time that a process joins again, has keys of its own: a gloo rank that reads the
    address of a dead one fails or hangs. torch 2.13 reuses its keys under the elastic agent. A server in rank 0 is new in each attempt.
    There the number of the attempt is left out: agents count for themselves, and one that replaces a dead node begins at 0.
    """
    global _times_joined
    _times_joined += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store: dist.Store
    if has_private_store():
        place = Path(os.environ[STORE_VARIABLE], f"{attempt}-{world.world_size}-{_times_joined}")
        store = dist.FileStore(str(place), world.world_size)
    else:
        server = _tcp_store(world, timeout)
        keys = f"{attempt}/{world.world_size}/{_times_joined}" if _agent_serves(world) else str(_times_joined)
        store = dist.PrefixStore(f"drivetrain/{keys}", server)
    store.set_timeout(timeout)
    return store


def _agent_serves(world: LaunchedWorld) -> bool:
    return world.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _tcp_store(world: LaunchedWorld, timeout: timedelta) -> dist.TCPStore:
    assert world.master_addr is not None and world.master_port is not None  # checked by now
    host, port, agent_serves = world.master_addr, world.master_port, _agent_serves(world)
    if agent_serves or world.rank > 0:
        if world.is_one_machine and not agent_serves:
            host = _loopback_address(host)
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    if (host, port) not in _servers:
        if world.is_one_machine:
            _servers[host, port] = loopback_server(port, _loopback_address(host))
        else:
            _servers[host, port] = dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
    return _servers[host, port]


def loopback_server(port: int = 0, host: str = "127.0.0.1") -> dist.TCPStore:
    """Return a store whose server only processes on this machine can reach. Port 0 chooses a free one."""
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise DistributedError(
            f"the processes could not connect at {host}:{port}: {error}. Give another MASTER_PORT (master_port), or remove "
            "it so that the launcher chooses a free one."
        ) from error
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # from here on the store's
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _loopback_address(host: str) -> str:
    return "::1" if host == "::1" else "127.0.0.1"


def keep_to_loopback() -> None:
    """Make gloo and NCCL use the loopback interface, unless the user chose another.

    gloo would listen on the address of the host name, NCCL on that of a network interface. Processes started later inherit the choice.
    """
    os.environ.update(loopback_variables())


def loopback_variables() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on the loopback interface, except those that are already set."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if name is None else {variable: name for variable in wanted if variable not in os.environ}


# ---------------------------------------------------------------------- several machines
# gloo listens on the address of the host name. Debian and Ubuntu give a host name the address 127.0.1.1, containers often none, and then
# ranks on other machines cannot connect. The interface over which this machine reaches the others is taken instead.

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def keep_to_network(world: LaunchedWorld, store: dist.Store) -> None:
    """Make gloo use the interface towards the other machines where it would use a loopback address, unless the user chose another."""
    assert world.master_addr is not None and world.master_port is not None
    own = address_towards(world.master_addr, world.master_port)
    store.set(f"address/{world.rank}", own or "")
    if "GLOO_SOCKET_IFNAME" in os.environ or not host_name_is_loopback():
        return
    if own is None:  # on the machine of rank 0 its name may lead to a loopback address too: any other machine's helps
        others = (store.get(f"address/{rank}").decode() for rank in range(world.world_size))
        other = next((address for address in others if address), None)
        own = None if other is None else address_towards(other, world.master_port)
    if own is not None and (name := interface_with(own)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def host_name_is_loopback() -> bool:
    """Return whether the name of this host has a loopback address, or none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return _is_loopback(str(found[0][4][0]))


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's address on the way to another one, None if there is no way or it is a loopback address. Nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(address)
                own = str(probe.getsockname()[0])
                return None if _is_loopback(own) else own
    return None


def interface_with(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, None where the system does not say."""
    if fcntl is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
