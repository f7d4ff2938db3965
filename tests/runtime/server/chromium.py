"""Chromium, driven through its own protocol, for tests of the page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
    *("--host-resolver-rules=MAP page.test 127.0.0.1", "--disable-features=HttpsUpgrades"),
)
PLAIN_HOST = "page.test"
"""This machine under a name that browsers don't trust over plain http, as a server elsewhere: it has no clipboard."""
PLACE_AT_REST = """(async (find) => {
  let last = [NaN, NaN];
  for (let same = 0; same < 2; ) {
    await new Promise(requestAnimationFrame);
    const { x, y, width, height } = find().getBoundingClientRect(), place = [x + width / 2, y + height / 2];
    same = place[0] === last[0] && place[1] === last[1] ? same + 1 : 0;
    last = place;
  }
  return last;
})(() => %s)"""
"""The middle of an element that three frames have shown at the same place: the page formats messages that come into
view, which moves what is below them."""


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
        self._targets: dict[str, str] = {}  # session -> target
        self.problems: list[str] = []
        self._answer: dict[str, Any] = {}
        self.new_tab()

    def new_tab(self) -> str:
        """Opens a tab, which commands go to from now on, and returns its name for ``use``."""
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._targets[self._session] = target
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")
        return self._session

    @property
    def tab(self) -> str:
        """The tab that commands go to."""
        return self._session

    def use(self, tab: str) -> None:
        """Sends commands to another tab, which comes to the front."""
        self._session = tab
        self.send("Page.bringToFront")

    def close_tab(self) -> None:
        """Closes the tab as a person does, and uses the one that was opened first."""
        closed, target = self._session, self._targets.pop(self._session)
        self._session = ""
        self.send("Target.closeTarget", targetId=target)
        assert closed not in self._targets
        self.use(next(iter(self._targets)))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        number = self._post(method, params)
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                return message["result"]  # type: ignore[no-any-return]

    def _post(self, method: str, params: dict[str, Any], session: str | None = None) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session := self._session if session is None else session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._number

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Page.javascriptDialogOpening":  # a page that doesn't want to be left
            self._post("Page.handleJavaScriptDialog", {"accept": True}, message["sessionId"])
        elif message.get("method") == "Log.entryAdded":
            entry = f"{params['entry']['text']} {params['entry'].get('url', '')}"
            if not entry.endswith("/favicon.ico") and "Opener-Policy" not in entry:  # which plain http doesn't have
                self.problems.append(entry)
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(params["args"]))
        elif message.get("method") == "Fetch.requestPaused":
            answer = {"requestId": params["requestId"], **self._answer}
            self._post("Fetch.fulfillRequest", answer, message["sessionId"])
        return message

    @contextmanager
    def answering(self, pattern: str, kind: str, body: str, status: int = 200) -> Iterator[None]:
        """Answers requests to these addresses in the server's place, until it is left."""
        headers = [{"name": "content-type", "value": kind}]
        self._answer = {"responseCode": status, "responseHeaders": headers}
        self._answer["body"] = base64.b64encode(body.encode()).decode()
        self.send("Fetch.enable", patterns=[{"urlPattern": pattern}])
        try:
            yield
        finally:
            self.send("Fetch.disable")

    def run(self, script: str) -> Any:
        """Evaluates an expression and returns its value."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _leave(self) -> None:
        """Leaves the page, which may ask whether to, before anything else is opened."""
        self.send("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")

    def forget(self, url: str) -> None:
        """Empties what the browser keeps of a site, as if it had never been there."""
        self._leave()
        self.send("Storage.clearDataForOrigin", origin=url.rstrip("/"), storageTypes="all")
        self.open(url + "version", at="true")
        self.run("sessionStorage.clear()")

    def open(
        self,
        url: str,
        width: int = 1280,
        height: int = 800,
        scheme: str = "light",
        scale: float = 1,
        at: str = "true",
    ) -> None:
        """Opens a page, and waits until an expression is true of it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._leave()
        self.send("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href !== 'about:blank' && Boolean({at})")

    def until(self, holds: str) -> None:
        """Waits until an expression is true."""
        shown = "document.body.innerText"
        wait_until(lambda: self.run(f"Boolean({holds})"), lambda: (holds, self.problems, self.run(shown)))

    def click(self, selector: str) -> None:
        """Presses the mouse on an element, where it can be seen."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.until(f"Boolean({element}?.getClientRects().length) && !{element}.disabled")
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.run(PLACE_AT_REST % element)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = {"Backspace": 8, "Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def say(self, text: str) -> None:
        """Sends a message by the keyboard."""
        self.run("document.querySelector('#say').focus()")
        self.type(text)
        self.press("Enter")

    def fill(self, selector: str, value: str) -> None:
        """Gives a field a value, as if it had been typed or chosen."""
        field = f"document.querySelector({json.dumps(selector)})"
        events = "for (const type of ['input', 'change']) field.dispatchEvent(new Event(type, { bubbles: true }));"
        self.run(f"{{ const field = {field}; field.value = {json.dumps(value)}; {events} }}")

    def choose_files(self, selector: str, *files: Path) -> None:
        """Chooses files in a field for files."""
        answer = self.send("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.send("DOM.setFileInputFiles", files=list(map(str, files)), objectId=answer["result"]["objectId"])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._to)
        os.close(self._from)


HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"
NAME = "<b>bold</b><script>alert(3)</script>"
READY = "document.querySelector('#model')?.value && document.querySelector('#state').dataset.state === 'ready'"
BUSY = "document.body.classList.contains('busy')"
TEXTS = "import('/assets/chat.js').then((page) => page.current.turns.map((turn) => turn.content))"
"""The messages as they were written; the page shows their Markdown."""
LAST = "(document.querySelector('#turns article:last-child .body')?.textContent ?? '')"


def parameters(browser: Browser, **fields: str) -> None:
    """Fills in the dialog of parameters."""
    browser.click("#set")
    for name, value in fields.items():
        browser.run(f"document.querySelector('#settings [name={name}]').focus()")
        browser.type(value)
    browser.click("#settings .main")
    browser.until("!document.querySelector('#settings').open")


def answered(browser: Browser, turns: int) -> list[str]:
    """Returns the texts of the messages, once an answer has ended and there are so many."""
    browser.until(f"!{BUSY} && document.querySelectorAll('#turns article').length === {turns}")
    return browser.run(TEXTS)  # type: ignore[no-any-return]


def show_chat(browser: Browser, turns: list[dict[str, Any]]) -> None:
    """Shows a chat of these messages, which is in the history."""
    browser.run(
        "Promise.all(['chat', 'conversation'].map((name) => import(`/assets/${name}.js`)))"
        f".then(([page, {{ Conversation }}]) => {{ page.show(Conversation.fresh({json.dumps(turns)}));"
        " page.current.changed(0); return page.current.flush(); })"
    )


def stream(
    *deltas: dict[str, Any], finish: str = "stop", usage: tuple[int, int] | None = None, end: bool = True
) -> str:
    """Returns a streamed answer. ``usage``: tokens of the prompt and the answer; ``end``: whether it is complete."""
    events: list[dict[str, Any]] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    if end:
        events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    if usage is not None:
        tokens = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        events.append({"choices": [], "usage": tokens})
    return "".join(f"data: {json.dumps(one)}\n\n" for one in events) + ("data: [DONE]\n\n" if end else "")


def refused(message: str, code: str, status: int = 400) -> tuple[int, str]:
    """Returns the status and the body of an error, as the server writes it."""
    return status, json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}})
