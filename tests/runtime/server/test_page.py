"""The page, driven in Chromium through its own protocol: what a person does, and what there is to see then."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.server.conftest import Server
from tests.waiting import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


class Browser:
    """A tab of Chromium, through the DevTools protocol: JSON that ends with a zero, over two pipes.

    Attributes:
        problems: what went to the console, or was refused by the page's policy.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        for fd in (theirs_in, theirs_out):
            os.set_inheritable(fd, True)
        # The protocol is spoken over 3 and 4, which may be the numbers of our pipes: they are moved out of the way.
        script = 'exec 10<&"$1" 11>&"$2" && exec 3<&10 4>&11 && shift 2 && exec "$@"'
        command = ["bash", "-c", script, "bash", str(theirs_in), str(theirs_out), CHROMIUM, *QUIET]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out):
            os.close(fd)
        self._rest, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command gives."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found)
                return found["result"]  # type: ignore[no-any-return]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        params = found.get("params", {})
        if found.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif found.get("method") == "Log.entryAdded":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif found.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(params["args"]))
        return found

    def run(self, script: str) -> Any:
        """What an expression gives."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, width: int = 1280, height: int = 800, scheme: str = "light", scale: float = 1) -> None:
        """Opens a page anew, as one that was never there."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && Boolean(document.querySelector('#model'))")

    def until(self, holds: str) -> None:
        """Waits until an expression is true."""
        wait_until(lambda: self.run(holds), lambda: (holds, self.problems, self.run("document.body.innerText")))

    def click(self, selector: str) -> None:
        """Presses the mouse on an element, where it can be seen."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.until(f"Boolean({element}?.getClientRects().length) && !{element}.disabled")
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def say(self, text: str) -> None:
        """Sends a message by the keyboard."""
        self.run("document.querySelector('#say').focus()")
        self.type(text)
        self.press("Enter")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._to)
        os.close(self._from)
