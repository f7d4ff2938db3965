"""A client of HTTP/1.1 that reads streams of tokens and takes little time itself: it must not be what is measured.

A connection has one exchange at a time, and is kept for the next. Of each piece of an answer the time is taken when its
bytes come, and what it says is decoded then, by msgspec and into a few fields.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from enginewright.runtime.shared.json_document import printable

_MOST_HEAD = 64 << 10
_MOST_ERROR = 64 << 10
_MOST_DOCUMENT = 16 << 20
_MOST_LINE = 4 << 20
_MESSAGE = 200
"""Characters of a server's message that are kept."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event).decode
encode = msgspec.json.Encoder().encode


class Answer:
    """The response to one request, parsed as its bytes arrive.

    Attributes:
        error: the kind of error, such as "http 429"; None if there is none. ``message``: the server's words.
        first, last: times of the first and the last text, in seconds; ``gaps``: seconds between pieces of text.
        pieces: number of pieces with text.
        left: the client has closed the connection.
        prompt_tokens, cached_tokens, tokens: the server's counts; None if it doesn't report them.
    """

    __slots__ = (
        *("status", "error", "message", "first", "last", "gaps", "pieces", "left", "prompt_tokens", "cached_tokens"),
        *(
            "tokens",
            "texts",
            "document",
            "heard",
            "_leave_after",
            "_buffer",
            "_finished",
            "_streams",
            "_keep",
            "_found",
        ),
    )

    def __init__(self, leave_after: int | None = None, *, keep_text: bool = False) -> None:
        self.status = 0
        self.error: str | None = None
        self.message = ""
        self.first: float | None = None
        self.last: float | None = None
        self.gaps = array("f")
        self.pieces = 0
        self.left = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.tokens: int | None = None
        self.texts: list[str] = []
        self.document = b""
        self.heard = time.monotonic()
        self._leave_after = leave_after
        self._keep = keep_text
        self._buffer = b""
        self._finished = False
        self._streams = True
        self._found: list[bytes] = []

    @property
    def text(self) -> str:
        """The text of the answer; empty unless texts are kept."""
        return "".join(self.texts)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The response's head is there."""
        self.status = status
        self._streams = status == 200 and headers.get("content-type", "").lower().startswith("text/event-stream")

    def feed(self, data: bytes, now: float) -> bool:
        """Bytes of the body. False: no more is wanted."""
        self.heard = now
        if not self._streams:
            self._found.append(data)
            return sum(map(len, self._found)) <= (_MOST_DOCUMENT if self.status == 200 else _MOST_ERROR)
        lines = (self._buffer + data if self._buffer else data).split(b"\n")
        self._buffer = lines.pop()
        if len(self._buffer) > _MOST_LINE:
            self.fail("not JSON", "a line without an end")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now)
            elif line.startswith(b"error:"):  # llama.cpp's server
                self.fail("error in the stream", line[6:].decode("utf-8", "replace"))
            if self.error is not None or self.left:
                return False
        return True

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            event = _event(data)
        except msgspec.DecodeError as e:
            self.fail("not JSON", f"{e}: {data[:80].decode('utf-8', 'replace')}")
            return
        if event.error is not None:
            self.fail("error in the stream", _said(event.error))
            return
        if event.usage is not None:
            details = event.usage.prompt_tokens_details
            self.prompt_tokens, self.tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            self.cached_tokens = None if details is None else details.cached_tokens
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                self._finished = True
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
            if text:
                self.pieces += 1
                if self._keep:
                    self.texts.append(text)
                if self.last is None:
                    self.first = now
                else:
                    self.gaps.append(now - self.last)
                self.last = now
                if self.pieces == self._leave_after:
                    self.left = True
                    return

    def end(self) -> None:
        """The body has come to its end."""
        if not self._streams:
            self.document = b"".join(self._found)
            if self.status != 200:
                self.fail(f"http {self.status}", _said(self.document))
        elif not self._finished:
            self.fail("cut", "the stream ended before its answer did")
        elif self.first is None:
            self.fail("empty", "an answer without text")

    def not_streamed(self) -> None:
        """A document where a stream was asked for is an error."""
        if self.error is None and not self._streams:
            self.fail("not a stream", _said(self.document))

    def fail(self, kind: str, message: str) -> None:
        """The first error counts."""
        if self.error is None and not self.left:
            self.error, self.message = kind, printable(message)[:_MESSAGE]


def _said(error: object) -> str:
    """The message in an error of OpenAI's shape, or of another."""
    if isinstance(error, bytes):
        try:
            decoded = msgspec.json.decode(error)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return error[:_MESSAGE].decode("utf-8", "replace")
        return _said(decoded)
    if isinstance(error, dict):
        inner = error.get("error", error.get("message", error.get("detail", error)))
        return str(inner) if inner is error else _said(inner)
    return str(error)


class Connection(asyncio.Protocol):
    """A connection; ``on_idle`` is called with it when it can take another exchange."""

    def __init__(self, on_idle: Callable[[Connection], None]) -> None:
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._buffer = b""
        self._left = 0
        self._state = "idle"
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Sends a request, and returns when its answer has ended, in whichever way. Cancelled, it closes."""
        assert self._transport is not None
        self._answer, self._state, self._buffer = answer, "head", b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Goes, as a client does that doesn't wait."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # nothing was asked
            return
        now = time.monotonic()
        if self._state != "head":
            self._body(data, now)
            return
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            if len(self._buffer) > _MOST_HEAD:
                self._end("not HTTP", "a head without an end")
            return
        try:
            status, headers = _parsed(head)
        except ValueError:
            self._end("not HTTP", head[:80].decode("utf-8", "replace"))
            return
        self._buffer = b""
        if 100 <= status < 200:
            if rest:
                self.data_received(rest)
            return
        answer.heard = now
        answer.begin(status, headers)
        self._keep = headers.get("connection", "").lower() != "close"
        length = headers.get("content-length", "")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._state, self._left = "size", 0
        elif length.isdigit():
            self._state, self._left = "length", int(length)
            if not self._left:
                self._end()
                return
        else:
            self._state, self._keep = "until closed", False
        if rest:
            self._body(rest, now)

    def _body(self, data: bytes, now: float) -> None:
        answer = self._answer
        assert answer is not None
        if self._state == "length":
            self._left -= len(data)
            if not answer.feed(data, now) or self._left < 0:
                self._end("not HTTP" if self._left < 0 else None, "more than its length", close=True)
            elif not self._left:
                self._end()
            return
        if self._state == "until closed":
            if not answer.feed(data, now):
                self._end(close=True)
            return
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        whole: list[bytes] = []
        while True:
            if self._state == "size":
                line = data.find(b"\r\n", at)
                if line < 0:
                    break
                try:
                    self._left = int(data[at:line].partition(b";")[0], 16)
                except ValueError:
                    self._end("not HTTP", "a chunk without its size", close=True)
                    return
                at = line + 2
                self._state = "chunk" if self._left else "trailer"
            elif self._state == "chunk":
                if len(data) - at < self._left + 2:
                    break
                whole.append(data[at : at + self._left])
                at += self._left + 2
                self._state = "size"
            else:
                line = data.find(b"\r\n", at)
                if line < 0:
                    break
                if line == at:
                    if not whole or answer.feed(b"".join(whole), now):
                        self._end()
                    else:
                        self._end(close=True)
                    return
                at = line + 2
        self._buffer = data[at:]
        if whole and not answer.feed(whole[0] if len(whole) == 1 else b"".join(whole), now):
            self._end(close=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is not None:
            if self._state == "until closed" and exc is None:
                self._end()
            elif self._state == "head" and not self._buffer:
                self._end("closed", "the connection was closed before an answer")
            else:
                self._end("cut", "the connection was closed within an answer")

    def _end(self, kind: str | None = None, message: str = "", *, close: bool = False) -> None:
        answer, done = self._answer, self._done
        assert answer is not None and done is not None
        self._answer = self._done = None
        if kind is not None:
            answer.fail(kind, message)
        elif not answer.left:
            answer.end()
        if close or kind is not None or not self._keep or answer.left:
            self.close()
        else:
            self._state = "idle"
            self._on_idle(self)
        if not done.done():
            done.set_result(None)

    _keep = True


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises ValueError."""
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


class Client:
    """Asks one server. Raises nothing for what a server does: an answer says what was wrong.

    Args:
        url: of the server, with or without /v1.
        api_key: sent as a bearer.
        timeout: seconds without a byte of the server, after which a request has failed.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120.0) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        host = f"[{self._host}]" if ":" in self._host else self._host
        lines = [f"Host: {host}:{self._port}", "User-Agent: enginewright-loadtest", "Content-Type: application/json"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "".join(f"{line}\r\n" for line in lines)
        self._timeout = timeout
        self._idle: list[Connection] = []
        self._asking: dict[Answer, Connection] = {}

    async def ask(self, method: str, path: str, body: bytes, answer: Answer) -> None:
        """Sends one request, on a connection that is there or a new one, and returns when its answer has ended."""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        request = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode() + body
        while True:
            connection = self._known()
            new = connection is None
            if connection is None:
                try:
                    connection = await self._connected()
                except ConnectionRefusedError:
                    answer.fail("refused", "nothing listens there")
                    return
                except TimeoutError:
                    answer.fail("timeout", "no connection was made")
                    return
                except OSError as e:
                    answer.fail("no connection", e.strerror or str(e))
                    return
            answer.heard = time.monotonic()
            self._asking[answer] = connection
            try:
                await connection.exchange(request, answer)
            finally:
                del self._asking[answer]
            if new or answer.error != "closed":
                return
            answer.error, answer.message = None, ""  # the server had closed it while it was idle: try another

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        making = loop.create_connection(lambda: Connection(self._idle.append), self._host, self._port, ssl=self._tls)
        return (await asyncio.wait_for(making, self._timeout))[1]

    def _known(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def watch(self) -> None:
        """Ends requests that have heard nothing for too long; runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 4))
            limit = time.monotonic() - self._timeout
            for answer, connection in list(self._asking.items()):
                if answer.heard < limit:
                    answer.fail("timeout", f"no word for {self._timeout:g} s")
                    connection.close()

    def close(self) -> None:
        """Closes all connections."""
        for connection in [*self._idle, *self._asking.values()]:
            connection.close()
