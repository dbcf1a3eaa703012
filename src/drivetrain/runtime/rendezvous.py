"""The rendezvous of a single elastic agent.

torch's own handlers open a store that listens on every interface, and the default one unpickles what it finds there. A single
agent needs no store that others can reach: its own keys stay in its memory. Its workers meet in a private folder (`store.py`).
Code in them that calls `torch.distributed.init_process_group` itself finds a store on the loopback interface at `MASTER_ADDR` and
`MASTER_PORT`; neither the agent nor Drivetrain reads it.
"""

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from drivetrain.runtime.store import loopback_server

BACKEND = "drivetrain-one-machine"


class OneMachine(RendezvousHandler):
    """The rendezvous of one agent. No other agent can join."""

    def __init__(self, run_id: str, port: int):
        self._run_id = run_id
        self._keys = dist.HashStore()
        self._for_workers: dist.TCPStore | None = loopback_server(port)
        self._port = self._for_workers.port
        self._rounds = 0

    def get_backend(self) -> str:
        """Return the name under which torch finds this handler."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: the store at `MASTER_PORT` already exists."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once: no other agent takes part."""
        self._rounds += 1
        address = RendezvousStoreInfo("127.0.0.1", self._port)
        return RendezvousInfo(dist.PrefixStore(str(self._rounds), self._keys), 0, 1, address)

    def is_closed(self) -> bool:
        """Return False: only this agent could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent would join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can wait."""
        return 0

    def get_run_id(self) -> str:
        """Return the run id, which workers find in TORCHELASTIC_RUN_ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the workers' store now: a process that is forked later and collects this object would crash in it."""
        self._for_workers = None
        return True


def register_one_machine() -> None:
    """Register the handler that a launch passes in its `rdzv_configs`."""
    rendezvous_handler_registry.register(BACKEND, _given)


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    handler = parameters.get("handler")
    assert isinstance(handler, RendezvousHandler)
    return handler
