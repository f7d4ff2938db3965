"""A server that answers as a test wants it to, also in ways that no server should."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STALL, CUT = object(), object()
"""Parts of a script: nothing more comes; the connection breaks."""

Script = list[object]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def document(status: int, value: Any, *more: bytes) -> Script:
    """A response that isn't streamed."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = [b"HTTP/1.1 %d X" % status, b"content-type: application/json", b"content-length: %d" % len(body), *more]
    return [b"\r\n".join(lines) + b"\r\n\r\n" + body]


def piece(text: str, finish: str | None = None) -> bytes:
    return chunk(event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}))


def stream(tokens: int, prompt: int = 5, usage: bool = True) -> Script:
    """A good answer."""
    parts: list[object] = [HEAD, *(piece("word ") for _ in range(tokens)), piece("", "length")]
    details = {"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}}
    if usage:
        parts.append(chunk(event({"choices": [], "usage": details})))
    return [*parts, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]


@dataclass
class FakeServer:
    """``behave`` gives the script for a body and its number; the first is that of the probe, number 0."""

    behave: Callable[[int, dict[str, Any]], Script] = lambda number, body: stream(body["max_tokens"])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    gone: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    url: str = ""

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                data = await reader.readexactly(int(length[0].partition(":")[2])) if length else b""
                if head.startswith("GET"):
                    script = document(200, {"data": [{"id": "fake"}]})
                else:
                    self.bodies.append(json.loads(data))
                    script = self.behave(len(self.bodies) - 1, self.bodies[-1])
                for part in script:
                    if part is STALL:
                        await reader.read(1)
                        return
                    if part is CUT:
                        writer.transport.abort()
                        return
                    assert isinstance(part, bytes)
                    writer.write(part)
                    await writer.drain()
                if b"connection: close" in b"".join(p for p in script[:1] if isinstance(p, bytes)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.gone.release()

    def run(self, ready: threading.Event, stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._client, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await stop.wait()
            server.close()

        loop.run_until_complete(serve())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server, ready, stop, loop = FakeServer(), threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=server.run, args=(ready, stop, loop))
    thread.start()
    ready.wait()
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join()
