"""Drives Chromium without a window through the pipe that it takes commands from."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 60  # for anything that is waited for
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}
CTRL = 2


class Browser:
    """One tab; `console` has what the page has logged, errors and violated policies included."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", BROWSER, "--headless",
             "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             f"--user-data-dir={folder}/home", "--window-size=900,900", "about:blank"],
            pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._unread = b""
        self._sent = 0
        self._session: str | None = None
        self.console: list[str] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(SECONDS)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._sent += 1
        number = self._sent
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """Return the next message, and keep what it says of the console."""
        while b"\0" not in self._unread:
            assert select.select([self._in], [], [], SECONDS)[0], "the browser does not answer"
            more = os.read(self._in, 2**20)
            assert more, f"the browser has ended with {self._process.wait(SECONDS)}"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(found["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(found["params"]["args"]))
            case "Log.entryAdded" if found["params"]["entry"]["level"] in ("warning", "error"):
                self.console.append(found["params"]["entry"]["text"])
        return found

    def open(self, address: str, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait(f"location.href == {json.dumps(address)} && document.readyState == 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript, of a promise the one it resolves to."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true; it is looked at as each frame is drawn."""
        until = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"{expression} stays false: {self.console}"
            self.evaluate("new Promise(done => setTimeout(done, 10))")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", "Space": " "}.get(key, "") if not modifiers else ""
        named = {
            "key": " " if key == "Space" else key, "code": key,
            "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers,
        }  # fmt: skip
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def write(self, text: str) -> None:
        """Put a text in where the focus is."""
        self.call("Input.insertText", text=text)
