"""A server that runs, and what talks to it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_tiny_model
from tests.runtime.server.chromium import NAME, PLAIN_HOST, READY, Browser

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools] {% for t in tools %}{{ t.function | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endif %}{% for m in messages %}"
    "[{% if m.role == 'tool' %}{{ m.name }}{% else %}{{ m.role }}{% endif %}] {{ m.content }}"
    "{% for c in m.tool_calls %}"
    """{{ '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
    """{{ '}\\n</tool_call>' }}{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"""
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
THINKING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
OPENED_TEMPLATE = THINKING_TEMPLATE.replace(
    "{% endif %}{% endif %}", "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
"""One that begins the reasoning itself."""
START = "from enginewright.__main__ import main; main()"


def alive(pid: int) -> bool:
    """Returns True if a process runs, and False for one that has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@dataclass
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """A stream's, without [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def text(self) -> str:
        """The text of the answer, streamed or whole."""
        if self.headers["content-type"].startswith("text/event-stream"):
            choices = [choice for event in self.events for choice in event["choices"]]
            return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)
        choice = self.json["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]  # type: ignore[no-any-return]


class Server:
    """A server in a process of its own."""

    def __init__(self, *arguments: str | Path, errors: Path) -> None:
        program = [sys.executable, "-c", START, "serve", *map(str, arguments), "--port", "0", "--json"]
        self.errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                break
        self.about = json.loads("".join(lines) or "{}")
        assert "url" in self.about, f"it ended with {self.process.wait()}: {self.about} {errors.read_text()}"
        self.url = self.about["url"]
        self.port = int(self.url.rpartition(":")[2])

    def connect(self, buffer: int = 0) -> socket.socket:
        """A connection. ``buffer``: bytes that the system takes for a client that doesn't read; 0: its default."""
        link = socket.socket()
        if buffer:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        link.connect(("127.0.0.1", self.port))
        return link

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """A response. ``body``: bytes, or what is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a body that is refused is not read
            connection.request(method, path, data, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        connection.close()
        return reply

    def chat(self, text: str | list[dict[str, Any]], **body: Any) -> Reply:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        return self.ask("POST", "/v1/chat/completions", {"messages": messages, **body})

    def complete(self, prompt: Any, **body: Any) -> Reply:
        return self.ask("POST", "/v1/completions", {"prompt": prompt, **body})

    def props(self, name: str | None = None) -> dict[str, Any]:
        models = self.ask("GET", "/props").json["models"]
        return models[name or next(iter(models))]  # type: ignore[no-any-return]

    def wait(self, holds: Callable[[], bool]) -> None:
        """Until it holds: no test hangs on how fast a machine is."""
        while not holds():
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stop(self) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of a module that leave it as it is."""
    running = Server(tiny_bundle, errors=tmp_path_factory.mktemp("server") / "stderr")
    yield running
    assert running.stop() == 0, running.errors.read_text()


@pytest.fixture(scope="session")
def turns_bundle(tiny_folder: Path, shared_folder: Path) -> Path:
    """The tiny model with a template that writes the token that ends a turn."""
    return with_template("tiny-turns", TEMPLATE, tiny_folder, shared_folder)


@pytest.fixture(scope="session")
def tools_bundle(tiny_folder: Path, shared_folder: Path) -> Path:
    """The tiny model with a template that has tools, and calls as Hermes has them."""
    return with_template("tiny-tools", TOOLS_TEMPLATE, tiny_folder, shared_folder)


@pytest.fixture(scope="session")
def thinking_bundle(tiny_folder: Path, shared_folder: Path) -> Path:
    """The tiny model with a template that has reasoning, and a switch for it."""
    return with_template("tiny-thinking", THINKING_TEMPLATE, tiny_folder, shared_folder)


def with_template(name: str, template: str, tiny_folder: Path, shared_folder: Path, marks: Sequence[str] = ()) -> Path:
    """The tiny model's bundle with another template; ``marks`` are tokens that its tokenizer has besides."""
    from enginewright.optimizer.export import export

    bundle = shared_folder / f"{name}.bundle"
    with (shared_folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not bundle.exists():
            folder = shared_folder / name
            shutil.copytree(tiny_folder, folder)
            if marks:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(folder)
                tokenizer.add_tokens(list(marks), special_tokens=True)
                tokenizer.save_pretrained(folder)
                make_tiny_model("Llama", vocab_size=len(tokenizer)).save_pretrained(folder)
            (folder / "chat_template.jinja").write_text(template)
            export(folder, bundle, recipe="f32", targets=("cpu",))
    return bundle


@pytest.fixture(scope="module")
def reasoner(tiny_folder: Path, shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose reasoning begins and ends with tokens of their own."""
    bundle = with_template("tiny-marks", OPENED_TEMPLATE, tiny_folder, shared_folder, ("<think>", "</think>"))
    served = Server(bundle, errors=tmp_path_factory.mktemp("reasoner") / "stderr")
    yield served
    assert served.stop() == 0, served.errors.read_text()


@pytest.fixture(scope="module")
def agents(tools_bundle: Path, thinking_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two models: one calls tools, the other reasons."""
    models = ("--model", f"tools={tools_bundle}", "--model", f"thinking={thinking_bundle}")
    running = Server(*models, errors=tmp_path_factory.mktemp("agents") / "stderr")
    yield running
    assert running.stop() == 0, running.errors.read_text()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*arguments: str | Path) -> Server:
        servers.append(Server(*arguments, errors=tmp_path / f"stderr{len(servers)}"))
        return servers[-1]

    yield make
    for one in servers:
        one.stop()


@pytest.fixture(scope="module")
def served(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models, one of a name that is markup."""
    models = [part for name in ("tiny", NAME) for part in ("--model", f"{name}={tiny_bundle}")]
    running = Server(*models, "--allowed-host", PLAIN_HOST, errors=tmp_path_factory.mktemp("server") / "stderr")
    yield running
    assert running.stop() == 0, running.errors.read_text()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page_url(served: Server) -> str:
    """The page's address, as of a server elsewhere: over plain http, a browser doesn't trust it."""
    return f"http://{PLAIN_HOST}:{served.port}/"


@pytest.fixture
def browser(chromium: Browser, page_url: str) -> Iterator[Browser]:
    """A tab that has the page open, as one that was never there. Nothing may go to its console."""
    chromium.forget(page_url)
    chromium.problems.clear()
    chromium.open(page_url, at=READY)
    yield chromium
    assert chromium.problems == []
