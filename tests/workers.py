"""Long-lived gloo processes that tests call into.

Starting a process and importing torch costs seconds, a call over a pipe about a millisecond; so each world is started
once and serves every test of a session. A call that fails or hangs takes its world down with it, since nobody knows
what its ranks still wait for, and the next call starts a fresh one.
"""

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

START_SECONDS = 240.0
CALL_SECONDS = 240.0  # seconds on a quiet machine; others may be busy with it too


class World:
    """A world of `size` ranks: `world(function, *args)` returns the list of what each rank returned.

    The function must stand at the top level of a module, so that a rank can import it. `timeout` is in seconds.
    """

    straggler_seconds = 5.0  # that the others have after one rank has failed

    def __init__(self, size: int):
        self.size = size
        self._processes: list = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        atexit.register(self.close)

    def __call__(self, function, *args, timeout: float = CALL_SECONDS, **kwargs) -> list:
        if any(not process.is_alive() for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        name = f"{function.__module__}.{function.__qualname__}"
        return self._collect(name, timeout)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-world-")
        context = multiprocessing.get_context("spawn")
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when a child imports torch
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                place = (rank, self.size, self._folder.name)
                process = context.Process(target=_serve, args=(theirs, *place), name=f"rank {rank} of {self.size}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        self._collect("starting the world", START_SECONDS)

    def _collect(self, name: str, timeout: float) -> list:
        """Wait for the answer of every rank; one failure leaves the others only a moment."""
        answers: dict[int, tuple[str, object]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size and (remaining := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(list(waiting), remaining):
                rank = waiting[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(5)
                    answers[rank] = ("died", f"the process ended with exit code {self._processes[rank].exitcode}\n")
                if self.is_failure(answers[rank]):
                    deadline = min(deadline, time.monotonic() + self.straggler_seconds)
        failed = {rank: answer for rank, answer in sorted(answers.items()) if answer[0] != "returned"}
        stuck = [rank for rank in range(self.size) if rank not in answers]
        if not failed and not stuck:
            return [answers[rank][1] for rank in range(self.size)]
        report = [f"rank {rank} of {self.size} {kind}:\n{text}" for rank, (kind, text) in failed.items()]
        report += [f"rank {rank} of {self.size} was stuck:\n{self._stack_of(rank)}" for rank in stuck]
        self.close(grace=0)
        only_assertions = failed and all(kind == "failed an assertion" for kind, _ in failed.values())
        summary = f"{name}: failed on ranks {list(failed)}, stuck on ranks {stuck}"
        raise (AssertionError if only_assertions else RuntimeError)("\n\n".join([summary, *report]))

    def is_failure(self, answer: tuple[str, object]) -> bool:
        """Return whether the other ranks have only a moment left after an answer."""
        return answer[0] != "returned"

    def _stack_of(self, rank: int) -> str:
        assert self._folder is not None
        os.kill(self._processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.2)
        file = Path(self._folder.name, f"stack-{rank}")
        return file.read_text() if file.exists() else "(no stack)"

    def close(self, grace: float = 2.0) -> None:
        """End the ranks; the next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    """Be one rank: join the world, then answer calls until the pipe closes."""
    os.setsid()  # an interrupt at the keyboard is for pytest, which then closes the pipe
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in place.items()}
    from drivetrain.runtime.store import store_variables

    os.environ |= store_variables(Path(folder))
    stack = Path(folder, f"stack-{rank}").open("w")  # noqa: SIM115 (faulthandler writes to it as long as we live)
    faulthandler.register(signal.SIGUSR2, file=stack)
    call = pickle.dumps((_join, (), {}))
    try:
        while True:
            pipe.send_bytes(_answer(call))
            call = pipe.recv_bytes()
    except (EOFError, BrokenPipeError):  # the session is over, or this world was given up
        os._exit(0)


def _answer(call: bytes) -> bytes:
    from torch.distributed import is_initialized

    try:
        function, args, kwargs = pickle.loads(call)
        _clean()
        answer = pickle.dumps(("returned", function(*args, **kwargs)))
    except AssertionError:
        return pickle.dumps(("failed an assertion", traceback.format_exc()))
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc()))
    return answer if is_initialized() else pickle.dumps(("left", "the process group was destroyed and not made again"))


def _join() -> None:
    import torch

    from drivetrain.runtime.group import init_distributed

    torch.set_num_threads(1)
    init_distributed(backend="gloo", timeout=600)


def _clean() -> None:
    """Start every call from the same generators, and from nothing an earlier one left."""
    import numpy as np
    import torch

    from drivetrain.runtime.ranks import clear_data_ranks
    from drivetrain.runtime.run import set_current_run

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    clear_data_ranks()
    set_current_run(None)
