"""The live page: the report of runs that go on, on this machine only.

The server answers two addresses, the page and what has changed since. Both begin with a random word that is printed at the start,
because other users of the machine can connect, too. Nothing of an address names a file. Requests that name another host are
rejected, so that no web site can reach the server through a name of its own (DNS rebinding).
"""

import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.core.locking import is_locked
from drivetrain.experiment.records import is_run, run_folders
from drivetrain.experiment.reports.curves import MetricsCurves
from drivetrain.experiment.reports.data import Blobs, Limits, main_objective, run_as_data
from drivetrain.experiment.reports.gather import gather_run
from drivetrain.experiment.reports.page import as_json, policy, render_page
from drivetrain.experiment.run_folder import LOG, MANIFEST, METRICS, PARAMETERS, REMARKS, STATUS

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine in a request. The port may differ, as at the other end of a tunnel."""
PAUSE = 1.0
"""Seconds within which runs are not looked at again, however many pages ask."""
LOOK_SECONDS = 1.0
"""Seconds to read runs per refresh. The next refresh continues, so a page with hundreds of long runs fills while it is shown."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class Board:
    """The runs in some places, read again where they have changed; each change has a number."""

    def __init__(self, places: Sequence[Path], directions: Mapping[str, str] | None = None):
        self._places, self._directions = places, directions
        self._runs: dict[Path, WatchedRun] = {}
        self._blobs: dict[str, tuple[int, str]] = {}  # with the number of the change that brought it
        self._version, self._looked, self._unread = 0, -PAUSE, 0
        self._lock = threading.Lock()

    def changes(self, since: int = -1) -> dict[str, Any]:
        """Return the runs that changed after a number, the texts they need, and the keys of all runs, in order."""
        with self._lock:
            if self._unread or time.monotonic() - self._looked >= PAUSE:
                self._look()
                self._looked = time.monotonic()
            if since > self._version:  # a page of an earlier server
                since = -1
            known = [run for run in self._runs.values() if run.version >= 0]
            return {
                "version": self._version,
                "order": [run.data["key"] for run in known],
                "runs": [run.data for run in known if run.version > since],
                "blobs": {name: text for name, (version, text) in self._blobs.items() if version > since},
                "objective": main_objective(run.data for run in known),
                "unread": self._unread,
            }

    def _look(self) -> None:
        before = self._runs
        try:
            folders = [
                folder
                for place in self._places
                for folder in ([place] if is_run(place) else sorted(run_folders(place), key=lambda folder: folder.name))
            ]
        except OSError:  # a folder is removed at this moment, or cannot be read
            folders = list(before)
        self._runs = {folder: before.get(folder, WatchedRun()) for folder in dict.fromkeys(folders)}
        version = self._version + (list(before) != list(self._runs))
        num_curves = sum(len(run.data["metrics"]) or 5 for run in self._runs.values())
        limits, end = Limits.share(len(self._runs), num_curves), time.monotonic() + LOOK_SECONDS
        self._unread, has_read = 0, False
        for folder, run in list(self._runs.items()):
            stamp = _stamp(folder)
            if stamp == run.stamp:
                continue
            if has_read and time.monotonic() > end:
                self._unread += 1
                continue
            has_read = True
            try:
                blobs = run.read(folder, self._directions, limits)
            except (OSError, ExperimentError):  # it is being removed
                del self._runs[folder]
                continue
            version = self._version + 1
            run.note(stamp, version)
            for name, text in blobs.items():
                self._blobs.setdefault(name, (version, text))
        needed = {name for run in self._runs.values() for name in run.blobs}
        self._blobs = {name: entry for name, entry in self._blobs.items() if name in needed}
        self._version = version


class WatchedRun:
    """A run as it was when it was read last."""

    def __init__(self) -> None:
        self.stamp: tuple[object, ...] = ()
        self.version = -1
        self.known = MetricsCurves()
        self.blobs: set[str] = set()
        self.data: dict[str, Any] = {"metrics": {}, "results": {}}

    def read(self, folder: Path, directions: Mapping[str, str] | None, limits: Limits) -> dict[str, str]:
        """Read what was added since the last time, and return the large texts that the run needs."""
        blobs = Blobs()
        run = gather_run(folder, directions=directions, known=self.known)
        self.data = run_as_data(run, blobs, limits)
        # Only a run that goes on is read from where it was; a damaged file is read from its beginning.
        self.known = run.recorded if run.record.is_live and not run.notes else MetricsCurves()
        self.blobs = set(blobs.texts)
        return blobs.texts

    def note(self, stamp: tuple[object, ...], version: int) -> None:
        """Remember the files and the change that this is."""
        self.stamp, self.version = stamp, version


def _stamp(folder: Path) -> tuple[object, ...]:
    """Return what changes when a run does: its small files, its metrics, and whether a process runs it."""
    facts: list[tuple[int, ...] | None] = []
    for name in (METRICS, STATUS, MANIFEST, PARAMETERS, REMARKS, LOG):
        try:
            found = os.lstat(folder / name)
        except OSError:
            facts.append(None)
        else:
            facts.append((found.st_size, found.st_mtime_ns, found.st_ino))
    return (*facts, is_locked(folder))


class Server(ThreadingHTTPServer):
    """Serves one board on this machine."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, board: Board, port: int = 0):
        self.board, self.word = board, secrets.token_urlsafe(16)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used: {error}. Remove it to use a free port.") from error

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing where a browser has gone in the middle of an answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.word}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page or with changes, and with an error to anything else."""

    server: Server
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        if not _is_own_host(self.headers.get("Host", "")):
            self._send(403, "text/plain", "This server answers requests to 127.0.0.1 only.")
            return
        path, _, query = self.path.partition("?")
        if hmac.compare_digest(path.encode(), f"/{self.server.word}/".encode()):
            self._send(200, "text/html", render_page(self.server.board.changes(), is_live=True))
        elif hmac.compare_digest(path.encode(), f"/{self.server.word}/data".encode()):
            asked = query.removeprefix("since=")
            since = int(asked) if asked.isascii() and asked.isdecimal() and len(asked) < 16 else -1
            self._send(200, "application/json", as_json(self.server.board.changes(since)))
        else:
            self._send(404, "text/plain", "Page not found. Use the printed address.")

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        headers = HEADERS | {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        if kind == "text/html":
            headers["Content-Security-Policy"] = policy(True) + "; frame-ancestors 'none'"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""

    def version_string(self) -> str:
        """Return the name of the server, without that of Python."""
        return "drivetrain"


def _is_own_host(host: str) -> bool:
    """Return whether a request names this machine.

    >>> _is_own_host("localhost:8080"), _is_own_host("[::1]:1"), _is_own_host("evil.example:8080"), _is_own_host("")
    (True, True, False, False)
    """
    try:
        return urlsplit(f"//{host}").hostname in HOSTS
    except ValueError:
        return False


def serve(
    places: Sequence[Path], *, directions: Mapping[str, str] | None = None, port: int = 0, prints_json: bool = False
) -> None:
    """Serve the page until the process is interrupted, and print its address first."""
    with Server(Board(places, directions), port) as server:
        line = json.dumps({"url": server.url}) if prints_json else f"{server.url}   (Ctrl-C ends it)"
        print(line, flush=True)
        server.serve_forever(poll_interval=0.2)
