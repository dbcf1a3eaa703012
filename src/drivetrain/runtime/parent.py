"""Ending with the process that started this one, however that ended."""

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import wait

POLL_SECONDS = 1.0


def end_with_parent(signal_number: int | None = None, grace: float = 30.0) -> None:
    """End this process when its parent has died: by a signal first, which may save, and `grace` seconds later at once.

    Without a signal it ends at once. A process that `multiprocessing` did not start has no parent to watch.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # Forked siblings may hold the other end of the sentinel, so it can stay silent. A fork server is no parent of ours.
    polls = os.getppid() == parent.pid

    def watch() -> None:
        while not wait([parent.sentinel], POLL_SECONDS) and not (polls and os.getppid() != parent.pid):
            pass
        if signal_number is not None:
            os.kill(os.getpid(), signal_number)
            time.sleep(grace)
        os._exit(1 if signal_number is None else 128 + signal_number)

    threading.Thread(target=watch, name="drivetrain-parent-watch", daemon=True).start()
