"""How a run is doing: one small file that is replaced every few seconds and at the end."""

import threading
import time
from pathlib import Path
from typing import Any

from drivetrain.experiment.run_folder import STATUS, read_json, write_json
from drivetrain.runtime.run import Run

HEARTBEAT_SECONDS = 10.0


class StatusFile:
    """Keeps `status.json` of a run: running with a heartbeat, then finished, failed or interrupted."""

    def __init__(self, folder: Path, run: Run, restarts: int = 0):
        self._path, self._run = folder / STATUS, run
        earlier = read_json(self._path)
        self._fields: dict[str, Any] = {
            "state": "running",
            "step": earlier.get("step"),
            "started": earlier.get("started", time.time()),
            "heartbeat": time.time(),
            "seconds": 0.0,
            "restarts": max(restarts, int(earlier.get("restarts") or 0)),
            "exit_code": None,
            "error": None,
        }
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="drivetrain-heartbeat", daemon=True)

    def begin(self) -> None:
        """Write the file and keep it fresh."""
        self._write()
        self._thread.start()

    def end(self, state: str, *, exit_code: int, error: str | None = None, **fields: Any) -> None:
        """Write how the run ended."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        self._fields |= {"state": state, "exit_code": exit_code, "error": error, **fields}
        self._write()

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            try:
                self._write()
            except OSError:  # a full disk must not end the run; the next beat tries again
                continue

    def _write(self) -> None:
        with self._lock:
            step = getattr(self._run.recorder, "count", None)
            if isinstance(step, int):
                self._fields["step"] = step
            self._fields |= {"heartbeat": time.time(), "seconds": round(self._run.elapsed, 3)}
            write_json(self._path, self._fields)
