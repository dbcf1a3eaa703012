import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, PContext

from drivetrain.core.errors import ConfigError, DistributedError
from drivetrain.runtime.collectives import all_gather_values, distributed_barrier
from drivetrain.runtime.environment import in_launched_process
from drivetrain.runtime.group import init_distributed
from drivetrain.runtime.launch import WorkerFailed, launch, notebook_launcher
from drivetrain.runtime.ranks import get_num_processes, get_rank
from drivetrain.runtime.workers import _check_sendable, report_failure, watched_workers

forks = pytest.mark.usefixtures("can_fork")
ROOT = Path(__file__).parents[2]


def fail_once_then_gather(offset: int) -> tuple:
    """Rank 1 raises in the first attempt; the second one answers."""
    init_distributed(backend="gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and get_rank() == 1:
        raise ValueError("not this time")
    nested = launch(get_rank, 7)  # inside a launched process: no further processes
    return attempt, nested, all_gather_values(get_rank() + offset)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@forks
def test_group_restarts_after_a_failure_and_returns_results_by_rank(start):
    work = fail_once_then_gather if start == "spawn" else lambda offset: fail_once_then_gather(offset)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    variables = dict(os.environ)
    assert launch(work, 2, args=(10,), max_restarts=1) == [(1, [0], [10, 11]), (1, [1], [10, 11])]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers
    assert dict(os.environ) == variables


@forks
def test_failing_worker_ends_the_group_with_its_rank_and_traceback():
    def work():
        init_distributed(backend="gloo")
        if get_rank() == 1:
            raise ValueError("rank 1 has bad data")
        distributed_barrier()

    with pytest.raises(WorkerFailed) as caught:
        launch(work, 2)
    assert caught.value.rank == 1 and isinstance(caught.value, DistributedError)
    assert "worker rank 1 failed" in str(caught.value) and "ValueError: rank 1 has bad data" in str(caught.value)
    assert 'raise ValueError("rank 1 has bad data")' in caught.value.traceback


@forks
def test_killed_worker_is_named_and_not_the_one_that_lost_it():
    def work():
        init_distributed(backend="gloo")
        if get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed_barrier()

    with pytest.raises(WorkerFailed, match=r"worker rank 1 failed.*SIGKILL") as caught:
        launch(work, 2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.traceback) == (1, -signal.SIGKILL, None)


@forks
@pytest.mark.parametrize(("code", "outcome"), [(0, [None]), (None, [None]), (143, 143)])
def test_exit_of_a_worker_is_success_or_its_code(code, outcome):
    if isinstance(outcome, list):
        assert launch(lambda: sys.exit(code)) == outcome
    else:
        with pytest.raises(WorkerFailed, match="exit code 143") as caught:
            launch(lambda: sys.exit(code))
        assert caught.value.exit_code == outcome


@forks
@pytest.mark.parametrize("leave", [os._exit, sys.exit])
def test_workers_that_leave_before_their_function_returns_have_no_value(leave):
    """The other one is not disturbed; where all leave, too, the launch ends."""

    def work(leaving):
        if int(os.environ["RANK"]) in leaving:
            leave(0)
        time.sleep(0.6)  # the agent and the watcher have seen the other one
        return "done"

    with limited_time(60):
        assert launch(work, 2, args=([1],)) == ["done", None]
        assert launch(work, 2, args=([0, 1],)) == [None, None]


@forks
def test_a_launch_does_without_names_of_torch_that_another_version_may_lack(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for owner in (MultiprocessContext, PContext):
            patch.delattr(owner, "_poll")
        with watched_workers(tmp_path):
            assert not hasattr(MultiprocessContext, "_poll")
    own = MultiprocessContext._poll
    with monkeypatch.context() as patch:
        patch.setattr(MultiprocessContext, "_poll", lambda context: None)
        with watched_workers(tmp_path):
            for context in (
                SimpleNamespace(),
                SimpleNamespace(_pc=SimpleNamespace(processes=[SimpleNamespace(exitcode=0)])),
            ):
                assert MultiprocessContext._poll(context) is None
    assert MultiprocessContext._poll is own


@contextmanager
def limited_time(seconds):
    """Raise in this process instead of waiting for ever."""
    before = signal.signal(signal.SIGALRM, lambda *given: pytest.fail("still waiting"))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@forks
def test_notebook_launcher_runs_closures_and_sets_the_precision():
    word = "closure"

    def work(number):
        return word, number, os.environ["ACCELERATE_MIXED_PRECISION"], os.environ["WORLD_SIZE"]

    assert notebook_launcher(work, (5,), num_processes=2, mixed_precision="bf16") == [("closure", 5, "bf16", "2")] * 2
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_notebook_launcher_calls_one_process_in_place():
    where = []
    notebook_launcher(lambda: where.append((os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"])), num_processes=1)
    assert where == [(os.getpid(), "no")]


def test_launched_process_calls_the_function_in_place(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert in_launched_process()
    assert launch(os.getpid, 4) == [os.getpid()]


def test_closure_cannot_be_launched_once_cuda_has_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(DistributedError, match=r"Put it into a module.*before anything uses CUDA"):
        launch(lambda: 0, 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node=0"),
        ({"nproc_per_node": "all"}, "nproc_per_node='all'"),
        ({"nproc_per_node": 1.5}, "'auto' for one per accelerator"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank=2 does not fit nnodes=2"),
        ({"nnodes": 0}, "nnodes=0"),
        ({"nnodes": "2"}, "nnodes='2'"),
        ({"master_port": 0}, "master_port=0"),
        ({"master_port": "29500"}, "master_port='29500'"),
        ({"master_port": 70000}, "master_port: 70000"),
        ({"max_restarts": -1}, "max_restarts=-1"),
    ],
)
def test_impossible_launch_is_refused_before_a_process_starts(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        launch(os.getpid, **arguments)


def test_on_windows_a_launch_is_rejected_before_a_process_starts(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(DistributedError, match="on Linux and macOS only"):
        launch(os.getpid, 2)


def test_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DistributedError, match=f"could not connect at 127.0.0.1:{port}"):
            launch(os.getpid, master_port=port)


def test_wrong_arguments_of_the_notebook_launcher_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        notebook_launcher(os.getpid, mixed_precision="bf61")
    with pytest.raises(ConfigError, match="use_port"):
        notebook_launcher(os.getpid, use_port="http")
    with pytest.raises(ConfigError, match="cannot be called"):
        launch("train.py", 2)


@forks
@pytest.mark.slow
def test_worker_that_ignores_the_request_to_stop_is_killed(monkeypatch):
    monkeypatch.setattr("drivetrain.runtime.workers.KILL_GRACE", 2.0)

    def work():
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)  # longer than a test may take

    with pytest.raises(WorkerFailed, match="the cause"):
        launch(work, 2)


def fail_with_an_answer_outstanding() -> None:
    """Rank 1 fails while gloo waits for rank 0, which does not come."""
    init_distributed(backend="gloo")
    if get_rank() == 1:
        torch.distributed.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("the cause")
    time.sleep(3600)  # longer than a test may take


@pytest.mark.slow
def test_worker_that_fails_with_an_answer_outstanding_still_ends():
    with pytest.raises(WorkerFailed, match="the cause") as caught:
        launch(fail_with_an_answer_outstanding, 2)
    assert caught.value.rank == 1


NODE = """
import json, sys
from drivetrain.runtime import all_gather_values, get_local_rank, get_rank, init_distributed
from drivetrain.runtime.launch import launch

def work():
    init_distributed(backend="gloo")
    return all_gather_values([get_rank(), get_local_rank()])

if __name__ == "__main__":
    node, port = map(int, sys.argv[1:])
    print(json.dumps(launch(work, 2, nnodes=2, node_rank=node, master_port=port)))
"""


def run_python(*arguments: str, **kwargs) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=env, **pipes, **kwargs)


@pytest.mark.slow
def test_two_nodes_form_one_world(tmp_path):
    from tests.runtime.test_group import free_port

    script = tmp_path / "node.py"
    script.write_text(NODE)
    port = str(free_port())
    nodes = [run_python(str(script), str(node), port) for node in range(2)]
    outputs = [node.communicate(timeout=120) for node in nodes]
    world = [[0, 0], [1, 1], [2, 0], [3, 1]]
    assert [eval_json(output) for output, _ in outputs] == [[world, world]] * 2, outputs


def eval_json(output: str) -> object:
    import json

    return json.loads(output.strip().splitlines()[-1])


TORCHRUN = """
from drivetrain.runtime import all_gather_values, get_num_processes, get_rank, init_distributed
from drivetrain.runtime.launch import launch

def work():
    init_distributed(backend="gloo")
    everyone = all_gather_values(get_rank())
    if get_rank() == 0:
        print("world", get_num_processes(), everyone)

if __name__ == "__main__":
    launch(work, 5)
"""


@pytest.mark.slow
def test_under_torchrun_nothing_further_is_started(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(TORCHRUN)
    program = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    output, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    assert "world 2 [0, 1]" in output


SIGNALS = """
import os, signal, sys, time
from drivetrain.runtime.launch import launch

def work(folder):
    rank, seen = os.environ["RANK"], []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: seen.append(number))
    open(f"{folder}/ready-{rank}", "w").close()
    while signal.SIGTERM not in seen:
        time.sleep(0.02)
        if signal.SIGUSR1 in seen:
            open(f"{folder}/saved-{rank}", "w").close()
    time.sleep(0.5)  # the last save
    open(f"{folder}/done-{rank}", "w").close()
    sys.exit(143)

if __name__ == "__main__":
    launch(work, 2, args=(sys.argv[1],))
"""


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"waited in vain for {files}"
        time.sleep(0.05)


@pytest.mark.slow
def test_signals_to_the_agent_reach_the_workers_which_may_save_before_they_end(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SIGNALS)
    agent = run_python(str(script), str(tmp_path))
    try:
        wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
        agent.send_signal(signal.SIGUSR1)
        wait_for(tmp_path / "saved-0", tmp_path / "saved-1")
        assert agent.poll() is None
        agent.send_signal(signal.SIGTERM)
        _, errors = agent.communicate(timeout=60)
    finally:
        agent.kill()
    assert agent.returncode == 143, errors
    assert (tmp_path / "done-0").exists() and (tmp_path / "done-1").exists()


def _world_size() -> int:
    init_distributed()
    return get_num_processes()


@pytest.mark.gpu
def test_one_process_per_accelerator_is_launched_with_nccl():
    assert launch(_world_size, "auto") == [torch.cuda.device_count()] * torch.cuda.device_count()


FORKED_CUDA = """
from drivetrain.runtime.launch import _num_workers, launch

assert _num_workers("auto") >= 1  # counting devices must leave CUDA untouched
print(launch(lambda: __import__("torch").ones(2, device="cuda").sum().item(), 1))
"""


@pytest.mark.gpu
def test_notebook_function_uses_cuda_in_a_forked_worker():
    program = run_python("-c", FORKED_CUDA)
    output, errors = program.communicate(timeout=120)
    assert output.strip() == "[2.0]", errors


@pytest.mark.parametrize("result", [lambda: 0, {"inside": (number for number in ())}])
def test_result_that_cannot_be_sent_is_named_and_tensors_are_left_alone(result):
    with pytest.raises(DistributedError, match=r"its result, a (function|dict), cannot be sent .*Return plain values"):
        _check_sendable(result)
    weight = torch.ones(2)
    _check_sendable({"weight": weight, "module": torch.nn.Linear(1, 1)})
    assert not weight.is_shared()


def test_a_rank_that_lost_its_peer_says_that_the_cause_is_elsewhere(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    lost, own = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), RuntimeError("wrong shape")
    report_failure(lost, lambda: False)
    report_failure(own, lambda: False)
    assert "The cause is there" in lost.__notes__[0] and not hasattr(own, "__notes__")
