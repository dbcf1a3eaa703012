"""Saving during training: a copy in host memory now, the file in a thread.

Training is held only while the state is copied. The host buffers are made once and used again for every save (pinned
where the tensors live on an accelerator, so that the copy runs at full speed and needs no second copy on the device);
device copies are queued behind the work that made the values and before the next update, and the thread, not the
training, waits for them to arrive.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.writer import Snapshot

logger = logging.getLogger(__name__)


class HostBuffers:
    """Host memory for one snapshot at a time, kept from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def stage(self, snapshot: Snapshot) -> Callable[[], None]:
        """Copy the snapshot's tensors into host buffers; the returned function waits until all of them have arrived.

        After this the values of the snapshot no longer change with the live ones. Copies from a device are in its
        stream, so later work on that stream cannot overtake them.
        """
        used: dict[tuple[str, str], Tensor] = {}
        devices: set[torch.device] = set()
        for part, tensors in snapshot.parts().items():
            for name, live in tensors.items():
                buffer = self._buffer((part, name), live)
                buffer.copy_(live, non_blocking=True)
                tensors[name] = used[part, name] = buffer
                if live.device.type != "cpu":
                    devices.add(live.device)
        self._buffers = used
        events = [torch.accelerator.current_stream(device).record_event() for device in devices]

        def arrived() -> None:
            for event in events:
                event.synchronize()

        return arrived

    def _buffer(self, key: tuple[str, str], live: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is not None and buffer.shape == live.shape and buffer.dtype == live.dtype:
            return buffer
        return torch.empty(live.shape, dtype=live.dtype, pin_memory=live.device.type == "cuda")


class BackgroundJob:
    """One job at a time in a thread; what it raises is kept for the main thread.

    The thread is not a daemon: a program that ends waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], Any], name: str) -> None:
        """Run a job in the background; the one before must have been waited for."""
        assert not self.is_busy
        self._thread = threading.Thread(target=self._run, args=(job, name), name=f"drivetrain {name}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> BaseException | None:
        """Return what a finished job raised, once."""
        error, self._error = self._error, None
        return error

    def _run(self, job: Callable[[], object], name: str) -> None:
        try:
            job()
        except Exception as error:
            # Also logged here: when the program is ending no caller will ask for the error.
            logger.error("%s failed in the background: %s", name, error)
            self._error = error
