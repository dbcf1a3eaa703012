"""A headless Chromium for tests, benchmarks and pictures of the report, driven through its DevTools protocol over a pipe.

with Browser() as browser, browser.open(url) as page:
    page.evaluate("document.title")
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-extensions "
    "--disable-component-update --disable-sync --hide-scrollbars --mute-audio --remote-debugging-pipe"
).split()
# Chromium reads commands from descriptor 3 and writes answers to 4.
WRAPPER = (
    "import fcntl, os, sys; a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
    "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 60.0
"""Seconds for one answer."""


class Browser:
    """One process of Chromium, with a profile of its own."""

    def __init__(self) -> None:
        if CHROMIUM is None:
            raise FileNotFoundError("no Chromium is on the path")
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", WRAPPER, str(commands), str(answers), CHROMIUM]
            + [*OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._waiting = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol and return its answer; events that arrive before it are kept."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self._receive(end)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self.events.append(answer)
        raise TimeoutError(f"{method}: no answer")

    def _receive(self, end: float) -> dict[str, Any]:
        import select

        while b"\0" not in self._waiting:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._from, 2**20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._waiting += part
        message, _, self._waiting = self._waiting.partition(b"\0")
        return dict(json.loads(message))

    @contextlib.contextmanager
    def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1
    ) -> Iterator["Page"]:
        """Open a page in a tab of its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, str(self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]))
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height, scale)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=scheme)
        page.call("Page.navigate", url=url)
        try:
            page.wait_for("document.readyState === 'complete'")
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        """End Chromium and remove its profile."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        for descriptor in (self._to, self._from):
            os.close(descriptor)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol for this tab."""
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression; an exception of the page is raised here."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait_for(self, code: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true and return it."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(code)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {seconds} s: {code}")
            time.sleep(0.03)
        return value

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        """Send a mouse event: moved, pressed or released."""
        button = {"button": "left", "buttons": 1} if kind != "moved" or more.pop("held", False) else {}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind.capitalize()}", x=x, y=y, **button, **more)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Drag from one point to another."""
        self.mouse("moved", x, y)
        self.mouse("pressed", x, y, clickCount=1)
        for share in (0.3, 0.7, 1.0):
            self.mouse("moved", x + share * (to_x - x), y + share * (to_y - y), held=True)
        self.mouse("released", to_x, to_y, clickCount=1)

    def key(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def problems(self) -> list[str]:
        """Return what the page has logged as errors: exceptions, rejected content, failed requests."""
        self.evaluate("0")  # events that are on the way arrive before the answer
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        found = [event["params"]["exceptionDetails"] for event in own if event["method"] == "Runtime.exceptionThrown"]
        entries = [event["params"]["entry"] for event in own if event["method"] == "Log.entryAdded"]
        return [str(entry.get("exception", {}).get("description", entry["text"])) for entry in found] + [
            entry["text"] for entry in entries if entry["level"] == "error"
        ]

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for, without data it holds itself."""
        self.evaluate("0")
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        urls = [event["params"]["request"]["url"] for event in own if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        more: dict[str, object] = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))
