"""Run a function on several processes of this machine, through torch's elastic agent.

The process that calls `launch` becomes the agent: it starts the workers, restarts them if requested, and returns their results or
fails with the traceback of the worker that failed first. In a process that a launcher has already started, the function is just
called, so that a program may launch itself and still be started by torchrun or srun.
"""

import json
import logging
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from drivetrain.core.arguments import check_choice, check_count
from drivetrain.core.containers import with_environment
from drivetrain.core.errors import ConfigError, DistributedError
from drivetrain.core.types import Settings
from drivetrain.runtime.environment import in_launched_process
from drivetrain.runtime.hangs import HANG_STATUS
from drivetrain.runtime.store import STORE_VARIABLE, loopback_variables
from drivetrain.runtime.workers import run_worker, watched_workers

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

DEFAULT_PORT = 29500
SHUTDOWN_VARIABLE, SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 120
"""How long workers may save after a stop was requested, unless torch's variable is set."""

AGENT_LOGGERS = (
    "torch.distributed.elastic",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)
PRECISIONS = ("no", "fp16", "bf16", "fp8")


class WorkerFailed(DistributedError):
    """A worker of a launch failed. `rank`, `exit_code` (negative: signal) and `traceback` describe which and how."""

    def __init__(self, message: str, *, rank: int = 0, exit_code: int = 1, traceback: str | None = None):
        super().__init__(message)
        self.rank, self.exit_code, self.traceback = rank, exit_code, traceback


def launch(
    function: Callable[..., object],
    nproc_per_node: int | Literal["auto"] = 1,
    *,
    args: Sequence[object] = (),
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    max_restarts: int = 0,
) -> list[Any]:
    """Call `function(*args)` in `nproc_per_node` new processes and return their results by local rank.

    `"auto"` is one process per accelerator, at least one. `master_port` None is a free port on one node, 29500 on
    several. A worker that fails ends the group with `WorkerFailed`, or restarts it, at most `max_restarts` times.
    """
    if not callable(function):
        raise ConfigError(f"function: {function!r} cannot be called. Give a function, and its arguments as args=(...).")
    if in_launched_process():
        return [function(*args)]
    if sys.platform == "win32":
        raise DistributedError(
            "processes can be launched on Linux and macOS only. On Windows train with one process, or in WSL, the Linux within Windows."
        )
    num_workers = _num_workers(nproc_per_node)
    if check_count("node_rank", node_rank, at_least=0) >= check_count("nnodes", nnodes):
        raise ConfigError(f"node_rank={node_rank} does not fit nnodes={nnodes}: nodes have numbers from 0 on.")
    if master_port is not None and check_count("master_port", master_port, hint=", or None for a free port") > 65535:
        raise ConfigError(f"master_port: {master_port!r} is not a port from 1 to 65535, or None for a free one.")
    check_count("max_restarts", max_restarts, at_least=0, hint=", which stops at the first failure")
    start_method = _start_method(function, args)

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from drivetrain.runtime.rendezvous import OneMachine, register_one_machine

    run_id = secrets.token_hex(16) if nnodes == 1 else "drivetrain"  # agents of several nodes must have the same
    with tempfile.TemporaryDirectory(prefix="drivetrain-launch-") as folder, ExitStack() as stack:
        stack.enter_context(_restored_process_state())
        pids = Path(folder, "pids")
        pids.mkdir()
        rendezvous: Settings
        if nnodes == 1:
            Path(folder, run_id).mkdir(mode=0o700)
            store = {STORE_VARIABLE: str(Path(folder, run_id))}  # where workers meet
            stack.enter_context(with_environment(**store, **loopback_variables()))
            register_one_machine()
            handler = OneMachine(run_id, master_port or 0)
            stack.callback(handler.shutdown)
            rendezvous = {"rdzv_backend": handler.get_backend(), "rdzv_configs": {"handler": handler}}
        else:  # static: node ranks are as given, not in order of arrival
            rendezvous = {"rdzv_backend": "static", "rdzv_configs": {"rank": node_rank}}
            rendezvous["rdzv_endpoint"] = f"{master_addr}:{master_port or DEFAULT_PORT}"
        config = LaunchConfig(
            min_nodes=nnodes,
            max_nodes=nnodes,
            nproc_per_node=num_workers,
            run_id=run_id,
            max_restarts=max_restarts,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **rendezvous,
        )
        try:
            with watched_workers(pids):
                results = elastic_launch(config, run_worker)(function, tuple(args), pids, num_workers)
        except ChildFailedError as failure:
            raise _worker_failed(failure, node_rank * num_workers) from None
        except (RendezvousError, dist.DistError) as error:
            raise DistributedError(
                f"rendezvous failed at {config.rdzv_endpoint} (nnodes={nnodes}, node_rank={node_rank}): "
                f"{error.__cause__ or error}. Check that node 0 has this address, that the port is free there and open to "
                "the others, and that every node was started; on a single node remove master_port."
            ) from error
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
    return [results[rank] for rank in sorted(results)]


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    *,
    max_restarts: int = 0,
) -> list[Any]:
    """Train from a notebook on several processes. None starts one per accelerator; one process needs no launch.

    `mixed_precision` becomes the default of every Trainer within.
    """
    check_choice("mixed_precision", mixed_precision, PRECISIONS)
    if not str(use_port).isdecimal():
        raise ConfigError(f"use_port: {use_port!r} is not a port number, such as '29500'.")
    port = int(use_port)
    wanted: int | Literal["auto"] = "auto" if num_processes is None else num_processes
    with with_environment(ACCELERATE_MIXED_PRECISION=mixed_precision):
        if num_nodes == 1 and _num_workers(wanted) == 1:
            return [function(*args)]
        return launch(
            function,
            wanted,
            args=args,
            nnodes=num_nodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=None if num_nodes == 1 and port == DEFAULT_PORT else port,
            max_restarts=max_restarts,
        )


def _num_workers(nproc_per_node: int | str) -> int:
    if nproc_per_node == "auto":
        with with_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):  # counting must not start CUDA, or forking is over
            return max(1, torch.accelerator.device_count())
    return check_count("nproc_per_node", nproc_per_node, hint=", or 'auto' for one per accelerator")


def _start_method(function: Callable[..., object], args: Sequence[object]) -> Literal["spawn", "fork"]:
    """Choose spawn where a new interpreter can find the function; else fork (notebooks, closures), where it is safe."""
    reason = _why_not_spawn(function, args)
    if reason is None:
        return "spawn"
    way_out = f"{reason}. Put it into a module and import it from there, then launch it again."
    if not hasattr(os, "fork"):
        raise DistributedError(f"{way_out} (This system cannot fork, which would need no import.)")
    if torch.cuda.is_initialized():
        raise DistributedError(
            f"{way_out} Or restart the notebook and launch before anything uses CUDA: a process that has initialized "
            "CUDA cannot be forked."
        )
    return "fork"


def _why_not_spawn(function: Callable[..., object], args: Sequence[object]) -> str | None:
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) == "__main__" and (main_file is None or not Path(main_file).exists()):
        return f"a new process cannot import {name!r}, because it was defined in a notebook or at a prompt"
    try:
        ForkingPickler.dumps((function, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"{name!r} and its arguments cannot be sent to a new process ({error})"
    return None


def _worker_failed(failure: "ChildFailedError", first_rank: int) -> WorkerFailed:
    """Turn the agent's report into one error about the worker that failed first."""
    rank, first = failure.get_first_failure()
    exit_code, traceback = first.exitcode, None
    if Path(first.error_file).is_file():
        # Several workers may have left a traceback by the time the agent looked; the oldest is the cause.
        folder = Path(first.error_file).parents[1]
        oldest = min(folder.glob("*/error.json"), key=lambda file: file.stat().st_mtime_ns)
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a worker that was killed while it wrote
            traceback = json.loads(oldest.read_text(encoding="utf-8"))["message"]["extraInfo"]["py_callstack"].rstrip()
            rank = first_rank + int(oldest.parent.name)
    if traceback is not None:
        how = f"with:\n\n{traceback}"
    elif exit_code < 0:
        how = f"by signal {first.signal_name()}. It left no traceback; check the system log for the reason."
    elif exit_code == HANG_STATUS:
        how = f"with exit code {exit_code}: no progress for hang_timeout. It printed where all ranks were."
    else:
        how = f"with exit code {exit_code}."
    text = f"worker rank {rank} failed, so its group was stopped. It ended {how}"
    return WorkerFailed(text, rank=rank, exit_code=exit_code, traceback=traceback)


@contextmanager
def _restored_process_state() -> Iterator[None]:
    """Undo what the agent leaves in this process, and quiet its log, which repeats the traceback of our error."""
    loggers = [logging.getLogger(name) for name in AGENT_LOGGERS]
    levels = [logger.level for logger in loggers]
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    agent_variables = {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        SHUTDOWN_VARIABLE: os.environ.get(SHUTDOWN_VARIABLE, str(SHUTDOWN_SECONDS)),
    }
    with with_environment(**agent_variables, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)
