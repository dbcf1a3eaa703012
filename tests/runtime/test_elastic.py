"""Nodes that die, as torchrun agents of one machine that meet in a store on the loopback interface."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drivetrain.runtime.store import loopback_server
from tests.checkpoint.training import assert_same_state
from tests.train import elastic_program

QUICK = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


def start_node(folder: Path, port: int, nodes: str, dying: Path | None = None) -> subprocess.Popen:
    """Start the agent of a node with one rank; a dying one writes the process id of its rank into a file, and waits."""
    command = (
        f"{sys.executable} -m torch.distributed.run --nnodes {nodes} --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d "
        f"--rdzv-endpoint 127.0.0.1:{port} --rdzv-id nodes --rdzv-conf {QUICK} -m tests.train.elastic_program {folder} 1 node 0"
    )
    # Otherwise agents open a store on all interfaces, and torch 2.13 does not give its address to a node that joins later.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own_store} | ({} if dying is None else {"DYING_NODE": str(dying)})
    with (folder / f"output-{time.monotonic_ns()}").open("w") as output:
        return subprocess.Popen(command.split(), env=environment, stdout=output, stderr=output)


def end_of(folder: Path, ranks: int) -> list[dict]:
    """Return what the program ends with on so many ranks when nothing goes wrong."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.train.elastic_program", str(folder), str(ranks), "node", "0"]
    assert subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 0
    return elastic_program.ends_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1:2", "2:2"])
def test_a_node_that_dies_is_done_without_or_replaced_and_the_run_ends_as_if_nothing_had_happened(tmp_path, nodes):
    store, folder, dying = loopback_server(), tmp_path / "run", tmp_path / "dying"
    folder.mkdir()
    agents = [start_node(folder, store.port, nodes), start_node(folder, store.port, nodes, dying)]
    try:
        deadline = time.monotonic() + 120
        while not (dying.exists() and dying.read_text()):
            assert time.monotonic() < deadline and agents[0].poll() is None
            time.sleep(0.1)
        for pid in (agents[1].pid, int(dying.read_text())):
            os.kill(pid, signal.SIGKILL)
        if nodes == "2:2":
            agents.append(start_node(folder, store.port, nodes))
        for agent in (agents[0], *agents[2:]):
            assert agent.wait(timeout=200) == 0, "\n".join(file.read_text() for file in sorted(folder.glob("output-*")))
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    ends = elastic_program.ends_of(folder)
    assert len(ends) == int(nodes[0])
    for end, whole in zip(ends, end_of(tmp_path / "whole", len(ends)), strict=True):
        if nodes == "2:2":
            assert_same_state(end, whole)
        else:
            assert_close(end, whole)


def assert_close(found: object, expected: object) -> None:
    """Compare all numbers but the random state, which another number of ranks does not share."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"random"}:
            assert_close(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    else:
        assert found == expected
