"""An HTTP/1.1 client for streams of tokens, fast enough that its own time doesn't distort the measurement.

A connection has one exchange at a time, and is reused for the next. The time of each piece of an answer is the time at
which its bytes arrive. httptools parses HTTP, and msgspec decodes each event into a few fields.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserError, HttpResponseParser

from enginewright.runtime.shared.json_document import printable

_MOST_HEAD = 64 << 10
_MOST_ERROR = 64 << 10
_MOST_DOCUMENT = 16 << 20
_MOST_LINE = 4 << 20
_LENGTHS = {"content-length", "transfer-encoding"}
"""Headers that state where a body ends. Without them it ends with the connection."""
_MESSAGE = 200
"""The most characters of a server's error message that are stored."""


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


class _Vector(msgspec.Struct):
    pass


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event).decode
_vectors = msgspec.json.Decoder(_Vectors).decode
encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Answer:
    """The response to one request, parsed as its bytes arrive.

    Attributes:
        leave_after: the number of pieces of text after which the client closes the connection; None to stay.
        keep_text: True to store the pieces of text.
        status: the status of the response.
        error: the kind of error, such as "http 429"; None if there is none.
        message: the server's message of the error.
        first, last: times of the first and the last piece of text, in seconds; None without text.
        gaps: seconds between pieces of text.
        pieces: the number of pieces with text.
        vectors: the number of vectors of a response for embeddings.
        left: True if the client has closed the connection, because of ``leave_after``.
        texts: the pieces of text, if ``keep_text``.
        document: the body of a response that isn't a stream.
        heard: the time of the last byte.
        prompt_tokens, cached_tokens, tokens: the server's counts; None if it doesn't report them.
    """

    leave_after: int | None = None
    keep_text: bool = field(default=False, kw_only=True)
    status: int = field(default=0, init=False)
    error: str | None = field(default=None, init=False)
    message: str = field(default="", init=False)
    first: float | None = field(default=None, init=False)
    last: float | None = field(default=None, init=False)
    gaps: array[float] = field(default_factory=lambda: array("f"), init=False)
    pieces: int = field(default=0, init=False)
    vectors: int = field(default=0, init=False)
    left: bool = field(default=False, init=False)
    prompt_tokens: int | None = field(default=None, init=False)
    cached_tokens: int | None = field(default=None, init=False)
    tokens: int | None = field(default=None, init=False)
    texts: list[str] = field(default_factory=list, init=False)
    document: bytes = field(default=b"", init=False)
    heard: float = field(default_factory=time.monotonic, init=False)
    _buffer: bytes = field(default=b"", init=False)
    _finished: bool = field(default=False, init=False)
    _streams: bool = field(default=True, init=False)
    _found: list[bytes] = field(default_factory=list, init=False)

    @property
    def text(self) -> str:
        """The text of the answer; empty unless texts are kept."""
        return "".join(self.texts)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Takes the status and the headers (names in lower case) of the response."""
        self.status = status
        self._streams = status == 200 and headers.get("content-type", "").lower().startswith("text/event-stream")

    def feed(self, data: bytes, now: float) -> bool:
        """Takes bytes of the body that arrived at the time ``now``. Returns False if no more are wanted."""
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
            self.fail("not JSON", f"{e.__context__ or e}: {data[:80].decode('utf-8', 'replace')}")
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
                if self.keep_text:
                    self.texts.append(text)
                if self.last is None:
                    self.first = now
                else:
                    self.gaps.append(now - self.last)
                self.last = now
                if self.pieces == self.leave_after:
                    self.left = True
                    return

    def end(self) -> None:
        """Ends the answer, because its body is complete. An incomplete stream becomes an error."""
        if not self._streams:
            self.document = b"".join(self._found)
            if self.status != 200:
                self.fail(f"http {self.status}", _said(self.document))
        elif not self._finished:
            self.fail("cut", "the stream ended before its answer did")
        elif self.first is None:
            self.fail("empty", "an answer without text")

    def not_streamed(self) -> None:
        """Sets an error if the response isn't a stream, for a request that asked for one."""
        if self.error is None and not self._streams:
            self.fail("not a stream", _said(self.document))

    def read_vectors(self) -> None:
        """Counts the vectors in a response for embeddings. Sets an error if it has none."""
        if self.error is None and not self.left:
            try:
                answer = _vectors(self.document)
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                self.fail("not embeddings", f"{e}: {self.document[:80].decode('utf-8', 'replace')}")
                return
            self.vectors, self.tokens = len(answer.data), 0
            self.prompt_tokens = None if answer.usage is None else answer.usage.prompt_tokens

    def fail(self, kind: str, message: str) -> None:
        """Sets the error's kind and its message, if it is the first error and the client hasn't left."""
        if self.error is None and not self.left:
            self.error, self.message = kind, printable(message)[:_MESSAGE]


def _said(error: object) -> str:
    """Returns the message in a server's error document, or in a decoded part of one, in OpenAI's form or another."""
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
    """A connection to the server, whose responses httptools parses.

    Args:
        on_idle: called with the connection when it can take another exchange.
    """

    def __init__(self, on_idle: Callable[[Connection], None]) -> None:
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._begin_response()
        self.closed = False

    def _begin_response(self) -> None:
        self._state: Literal["head", "body", "whole"] = "head"
        self._head_bytes, self._keep = 0, False
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Sends a request, and returns when the answer has ended or failed. Closes if it is cancelled."""
        assert self._transport is not None
        self._answer = answer
        self._begin_response()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection without waiting for an answer."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # no request waits for an answer
            return
        answer.heard = now = time.monotonic()
        if self._state == "head":
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as e:
            self._end("not HTTP", f"{e.__context__ or e}: {data[:80].decode('utf-8', 'replace')}")
            return
        pieces, self._pieces = self._pieces, []
        if pieces and not answer.feed(pieces[0] if len(pieces) == 1 else b"".join(pieces), now):
            self._end(close=True)
        elif self._state == "whole":
            self._end()
        elif self._state == "head" and self._head_bytes > _MOST_HEAD:
            self._end("not HTTP", "a head without an end")

    # ---- called by the parser

    def on_message_begin(self) -> None:
        if self._state == "whole":
            raise ValueError("more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        if (status := self._parser.get_status_code()) >= 200:  # others precede the response
            self._state = "body"
            self._keep = self._parser.should_keep_alive()
            self._answer.begin(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._state == "body":
            self._state = "whole"
        else:
            self._headers = {}

    # ---- the end

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is None:
            return
        if self._state == "head" and not self._head_bytes:
            self._end("closed", "the connection was closed before an answer")
        elif self._state == "body" and exc is None and not self._headers.keys() & _LENGTHS:
            self._end()
        else:
            self._end("cut", "the connection was closed within an answer")

    def _end(self, kind: str | None = None, message: str = "", *, close: bool = False) -> None:
        """Ends the exchange.

        Args:
            kind, message: the error of the answer; None if it ended as the server meant it.
            close: True if the connection can't be used again.
        """
        answer, done = self._answer, self._done
        assert answer is not None and done is not None
        self._answer = self._done = None
        if kind is not None:
            answer.fail(kind, message)
        elif not answer.left:
            answer.end()
        if close or kind is not None or answer.left or not self._keep:
            self.close()
        else:
            self._on_idle(self)
        if not done.done():
            done.set_result(None)


class Client:
    """Sends requests to one server. Errors of the server aren't raised: they are in the ``Answer``.

    Args:
        url: the server's address, with or without /v1.
        api_key: the key, which is sent as a bearer token.
        timeout: seconds without a byte from the server after which a request has failed.
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
        """Sends one request, on an idle connection or a new one, and returns when its answer has ended."""
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
        """Ends requests that get no byte for longer than the timeout; runs until it is cancelled."""
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
