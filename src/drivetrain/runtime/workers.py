"""What runs around one worker of a launch, and in the parent.

torch's elastic agent starts the workers, waits for them and ends the others if one fails. Five things are added. A worker that
leaves with status 0 before its function returns (`os._exit(0)`) has ended well, without a value; the agent would wait for that value
for ever. A worker that only lost its peer waits a moment before it fails, so that the agent sees the cause first. Workers that hang
in a collective and cannot end are killed after a short grace period. SIGUSR1 sent to the agent reaches the workers. A worker whose
agent was killed ends as after SIGTERM.
"""

import faulthandler
import io
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import DistributedError
from drivetrain.runtime.device import usable_cpus
from drivetrain.runtime.environment import end_with_parent
from drivetrain.runtime.group import destroy_group

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult

LOST_PEER_DELAY = 1.5
"""Seconds a worker waits after losing a peer; the agent looks for dead workers ten times a second."""

KILL_GRACE = 10.0
"""Seconds a failing worker, and after it the others of its group, have to end by themselves."""


def run_worker(function: Callable[..., object], args: tuple[object, ...], pids: Path, num_workers: int) -> object:
    """Call the function in a worker process, and leave the process group afterwards."""
    signal_from_parent = getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", None)
    if signal_from_parent is not None:
        signal_from_parent(signal.SIGTERM)  # torch's spawn chose SIGINT, as if a user had stopped the run
    end_with_parent(signal.SIGTERM)
    announced = pids / str(os.getpid())
    announced.touch()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cpus() // num_workers))
    try:
        result = function(*args)
        _check_sendable(result)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _schedule_exit()
            raise
        result = None  # a clean exit is success; without a value the agent would wait forever
    except KeyboardInterrupt:
        _schedule_exit()
        raise SystemExit(128 + signal.SIGINT) from None  # torch would let it pass as a clean exit without a value
    except Exception as error:
        _schedule_exit()
        if is_lost_peer(error):
            time.sleep(LOST_PEER_DELAY)
        raise
    destroy_group()
    announced.unlink(missing_ok=True)  # what is still here and no longer runs has failed
    return result


class _Probe(pickle.Pickler):
    """Pickles everything but tensors, which would move to shared memory."""

    def persistent_id(self, value: object) -> str | None:
        return "tensor" if isinstance(value, torch.Tensor) else None


def _check_sendable(result: object) -> None:
    """Raise here, with a traceback, if a result cannot be sent to the parent: there only an exit code would arrive."""
    try:
        _Probe(io.BytesIO()).dump(result)
    except Exception as error:
        what = f"the function has ended, but its result, a {type(result).__name__}, cannot be sent to the launching process"
        raise DistributedError(f"{what} ({error}). Return plain values or tensors.") from error


def report_failure(error: BaseException, is_asked_to_end: Callable[[], bool]) -> None:
    """Under torch's launcher, make the rank that failed first report last.

    Its traceback goes into the file that the launcher prints at the end. A rank that only lost its peer gets a note, waits for the
    launcher to end it, and then ends silently.
    """
    if not isinstance(error, Exception):
        return
    if is_consequence := is_lost_peer(error):
        error.add_note(
            "Another rank has ended, or cannot be reached. The cause is there: see what it printed, or its exit status."
        )
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    if not is_consequence:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        return
    deadline = time.monotonic() + LOST_PEER_DELAY
    while time.monotonic() < deadline:
        if is_asked_to_end():
            raise SystemExit(128 + signal.SIGTERM)
        time.sleep(0.05)


def _schedule_exit() -> None:
    """See to it that a failing process ends: at exit gloo would still wait for answers of ranks that wait for us.

    The timer of faulthandler runs without the interpreter, so it also works while that is shutting down.
    """
    faulthandler.dump_traceback_later(KILL_GRACE, exit=True)


def is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an error only reports that another process is gone."""
    while error is not None:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def watched_workers(pids: Path) -> Iterator[None]:
    """Watch the workers that announce themselves in `pids` while the agent runs."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    collect_results = getattr(MultiprocessContext, "_poll", None)  # torch's own: another version may not have it

    def poll(context: MultiprocessContext) -> "RunProcsResult | None":
        assert collect_results is not None
        results = collect_results(context)
        workers = getattr(getattr(context, "_pc", None), "processes", ()) if results is None else ()
        returned, coming = getattr(context, "_return_values", {}), getattr(context, "_ret_vals", {})
        for rank, worker in enumerate(workers):
            # A worker that returns waits for the others. One that has ended before them sends nothing any more.
            if worker.exitcode == 0 and rank not in returned and rank in coming and coming[rank].empty():
                returned[rank] = None
                (pids / str(worker.pid)).unlink(missing_ok=True)
        return results

    done = threading.Event()
    watcher = threading.Thread(target=_kill_survivors, args=(pids, done), name="drivetrain-worker-watch", daemon=True)
    watcher.start()
    try:
        with (
            _forwarded_signal(pids),
            with_attributes(MultiprocessContext, **{"_poll": poll} if collect_results else {}),
        ):
            yield
    finally:
        done.set()
        watcher.join()


def _kill_survivors(pids: Path, done: threading.Event) -> None:
    """Once a worker has died, kill after a grace those of its group that still run; a restarted group is a new one."""
    deadlines: dict[int, float] = {}
    ended: set[int] = set()
    while not done.wait(0.2):
        running = []
        for pid in _announced(pids):
            if _runs(pid):
                running.append(pid)
            elif pid not in ended:
                ended.add(pid)  # until the next look the agent learns whether it left with status 0
            else:
                (pids / str(pid)).unlink(missing_ok=True)
                for other in _announced(pids):
                    deadlines.setdefault(other, time.monotonic() + KILL_GRACE)
        for pid in running:
            if time.monotonic() > deadlines.get(pid, float("inf")):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _announced(pids: Path) -> list[int]:
    """Return the workers that have begun and not come to a good end."""
    return [int(entry.name) for entry in pids.iterdir()]


def _runs(pid: int) -> bool:
    """Return whether a child still runs, without collecting its exit code: that is the agent's part."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip()[:1] not in ("", "Z")
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # the agent has collected it
        return False


@contextmanager
def _forwarded_signal(pids: Path) -> Iterator[None]:
    """Pass SIGUSR1 on to the workers, where it means "save now"; its default would end the agent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        for pid in _announced(pids):
            if _runs(pid):
                os.kill(pid, number)

    before = signal.signal(signal.SIGUSR1, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
