"""The process that tries plans: it takes a task over a private pipe, then one order after another, and answers in lines of JSON.

It ends when its pipe closes or its parent is gone, whatever it is doing then. After a failure it only waits to be ended: leaving would
show the other ranks a lost connection in place of the cause.
"""

import json
import os
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from drivetrain.runtime.environment import end_with_parent
from drivetrain.runtime.group import init_distributed
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.runtime.seeds import set_seed
from drivetrain.runtime.workers import is_lost_peer
from drivetrain.strategy.registry import find_method, method_names, register_method
from drivetrain.strategy.snapshot import ProcessSettings
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.measuring import Order, failure_of, measure, tidy
from drivetrain.strategy.trial.memory import MemoryMeter

LEFT_BYTES = {"cuda": 128 << 20}
"""How much a trial may leave in use for the process to be used again; matrix libraries keep workspaces of some ten MiB."""
LEFT_ON_HOST = 512 << 20
"""The same for resident memory: the compiler's own code is 200 MiB."""


@dataclass(frozen=True, kw_only=True)
class ChildSettings:
    """Where a trial's process runs."""

    device: str
    settings: ProcessSettings
    environment: Mapping[str, str]
    """Rank, world and meeting place."""
    joins_group: bool
    timeout: float
    """Seconds a collective may take before it fails by itself."""


def serve(pipe: Connection, place: ChildSettings, task: TrainingTask | None = None) -> None:
    """Be a trial's process; a forked one has its task already."""
    os.setsid()  # a group of its own: its parent can end it with everything it started, and the keyboard does not reach it
    end_with_parent()

    def run() -> None:
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            _Service(pipe, place, task).run()

    if task is None:
        run()
    else:  # OpenMP keeps a pool for each thread that uses it; the one of the forked thread has lost its workers, and would hang
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    os._exit(0)  # an orderly end would wait for ranks that are no longer there


def _lock_bars_by_thread() -> None:
    """Give tqdm, which the compiler calls, a lock of this process alone.

    Its own is a named semaphore, which a process that is ended at once cannot take back: the parent would warn of a leak at its exit.
    """
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


class _Service:
    def __init__(self, pipe: Connection, place: ChildSettings, task: TrainingTask | None):
        self.pipe, self.place, self.task = pipe, place, task
        self.device = torch.device(place.device)

    def tell(self, event: str, **values: object) -> None:
        self.pipe.send_bytes(json.dumps({"event": event, **values}).encode())

    def run(self) -> None:
        warnings.simplefilter("ignore")  # the caller hears them when a plan is applied
        self.tell("ready")
        try:
            task = self.pipe.recv()
            task = task if self.task is None else self.task
        except EOFError:
            raise
        except Exception as error:  # whatever importing somebody's modules raises
            self.tell("unsendable", message=f"{type(error).__name__}: {error}")
            self._wait_for_end()
            return
        try:
            self._settle()
        except Exception as error:  # a device or a group that cannot be had
            self._tell_failure(error)
            self._wait_for_end()
        self.tell("received")
        while True:
            if not self._serve_order(self.pipe.recv(), task):
                self._wait_for_end()

    def _settle(self) -> None:
        """Take the parent's settings, the device and the place among the ranks."""
        import torch._dynamo  # every optimizer loads it: here it counts neither as a plan's memory nor as its time

        os.environ |= dict(self.place.environment)
        _lock_bars_by_thread()
        self.place.settings.restore()
        if self.device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(self.device.index or 0)
        if self.place.joins_group:
            init_distributed("gloo" if self.device.type == "cpu" else None, timeout=self.place.timeout)

    def _serve_order(self, order: Order, task: TrainingTask) -> bool:
        """Try one plan; return whether the process can be used again."""
        for method in order.methods:
            if method.name not in method_names():
                register_method(method)
        set_seed(0)  # a model that is made again is then the same on every rank and in every trial
        meter = MemoryMeter(self.device)
        try:
            measure(order, task, self.device, self.tell, may_reset=True)
        except Exception as error:  # whatever goes wrong in the user's model or a kernel is the outcome of the trial
            self._tell_failure(error)
            return False
        self._clean()
        left = meter.growth()
        is_clean = left <= LEFT_BYTES.get(self.device.type, LEFT_ON_HOST)
        methods = [find_method(name) for name in order.plan.opt_names()]
        is_clean = is_clean and all(method.leaves_no_trace for method in methods)
        self.tell("done", is_clean=is_clean, left=left)
        return is_clean

    def _clean(self) -> None:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self.place.settings.restore()
        clear_data_ranks()
        tidy(self.device)

    def _tell_failure(self, error: BaseException) -> None:
        kind, message = failure_of(error)
        is_echo = kind == "error" and is_lost_peer(error)
        self.tell("failed", kind=kind, message=message, error_class=type(error).__name__, is_echo=is_echo)

    def _wait_for_end(self) -> None:
        while True:
            self.pipe.recv_bytes()
