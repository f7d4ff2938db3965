"""A client's connection: HTTP/1.1 by httptools, with limits on what a client may send, hold open or leave unread.

uvicorn's protocol reads requests and runs the application. This subclass limits what arrives before the application
sees a request (headers, pipelined requests, pieces of a body). It also closes the connection of a client that doesn't
read, or whose request body isn't needed any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .errors import openai_error
from .intake import Intake

MOST_HEADERS = 128
HEAD_BYTES = 64 << 10
"""The most bytes of a request's line and headers."""
URL_BYTES = 16 << 10
PIPELINED = 8
"""The most requests of a connection that may wait while an earlier one is answered."""
WASTE_BYTES = 32 << 10
"""The most overhead of a body's pieces, in bytes, in addition to the size of the body."""
PIECE_BYTES = 32
"""The overhead that is counted for each piece of a body. A piece is a chunk, or the bytes of it in one read."""
READ_RATE = 256
"""The fewest bytes per second at which a client must read its answer, on average over ``stall_seconds``."""
LINGER_SECONDS = 1.0
"""The seconds for which a closed connection with an unread body stays half open, so that its client can read the
error.
"""


class Connection(HttpToolsProtocol):
    """A connection to a client; see the module.

    Args:
        intake: the connections and bodies of all clients.
        **given: arguments of uvicorn's protocol.

    Attributes:
        idle: True if none of its requests is being answered.
    """

    def __init__(self, intake: Intake, **given: Any) -> None:
        super().__init__(**given)
        self._intake = intake
        self._problem: tuple[int, str] | None = None
        self._refused = False
        self._in_head = True
        self._head_bytes = self._headers = 0
        self._messages = self._body = self._waste = 0
        self._waiting: asyncio.TimerHandle | None = None
        self._between = False  # two requests
        self._stall: asyncio.TimerHandle | None = None
        self._unread = 0

    @property
    def idle(self) -> bool:
        """True if none of its requests is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    # From the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request, unless there are too many connections."""
        super().connection_made(cast(asyncio.Transport, _Closing(transport, self)))
        # Writing waits for the client, so that its progress is seen. Over TLS, an empty buffer reaches a limit of 0.
        transport.set_write_buffer_limits(high=1, low=0)
        if not self._intake.connect(self):
            self._refuse(503, "the server has too many connections", retry_after=1)
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection from the intake."""
        self._cancel(self._waiting)
        self._cancel(self._stall)
        self._intake.disconnect(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes, within limits."""
        if self._refused or self.transport.is_closing():
            return
        if self._between:
            self._wait()
        before, head, messages = self._body, self._in_head, self._messages
        super().data_received(data)
        if self._refused or self.parser is None or self._messages != messages:
            return
        if self._in_head:
            self._head_bytes += len(data) + PIECE_BYTES
            if self._head_bytes > HEAD_BYTES:
                self._refuse(431, f"the request's headers have more than {HEAD_BYTES} bytes")
        elif not head:
            self._waste += len(data) - (self._body - before)
            if self._waste > WASTE_BYTES + self._body:
                self._refuse(400, _WASTE)

    def pause_writing(self) -> None:
        """Starts to check that the client reads, because the buffer is full."""
        super().pause_writing()
        if self._stall is None:
            self._watch_reading()

    def resume_writing(self) -> None:
        """Stops the checks that ``pause_writing`` started, because the client has read enough of the buffer."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # From the parser: what is raised here ends the connection

    def on_message_begin(self) -> None:
        """Resets the state of the parser for a new request."""
        super().on_message_begin()
        self._in_head = True
        self._headers = self._body = self._waste = 0
        self.scope["state"]["connection"] = self

    def on_url(self, url: bytes) -> None:
        """Takes a part of the request's target."""
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._stop(414, f"the request's target has more than {URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header. A trailer is read and dropped."""
        self._headers += 1
        if self._headers > MOST_HEADERS:
            self._stop(431, f"the request has more than {MOST_HEADERS} headers")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Runs the application for the request, now or after the earlier requests of the connection."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._stop(400, f"the request has {hosts} Host headers")
        if len(self.pipeline) >= PIPELINED:
            self._stop(400, f"more than {PIPELINED} requests wait for the answers of earlier ones")
        self._in_head = False
        self._cancel(self._waiting)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Passes on a piece of the body. Stops the request if its pieces are so small that they are mostly overhead."""
        self._body += len(body)
        self._waste += PIECE_BYTES
        if self._waste > WASTE_BYTES + self._body:
            self._stop(400, _WASTE)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request; the next one's headers may follow."""
        self._in_head = True
        self._messages += 1
        self._head_bytes = 0
        super().on_message_complete()

    # From the application

    def on_response_complete(self) -> None:
        """Closes the connection if nobody has read the request's body, or waits for the next request."""
        if not self.pipeline and self.cycle.more_body:
            self.transport.close()
        super().on_response_complete()
        if self.idle and not self.transport.is_closing():
            self._wait(between=True)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that isn't valid HTTP, or that a limit refused."""
        self._refuse(*(self._problem or (400, "the request can't be read as HTTP")))

    def drop(self) -> None:
        """Ends the connection at once, and discards unread answers in the system's buffers."""
        link = self.transport.get_extra_info("socket")
        if link is not None:
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _stop(self, status: int, message: str) -> None:
        """Stops the parser by raising ValueError, and remembers the response to send."""
        self._problem = status, message
        raise ValueError(message)

    def _refuse(self, status: int, message: str, retry_after: int = 0) -> None:
        """Reads nothing more, and closes the connection after the answers of earlier requests. It sends an error first,
        unless a client could take that for another request's answer."""
        self._refused = True
        cycle = self.cycle
        if self.pipeline or (self._in_head and not self.idle):
            cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if self.idle or not cycle.response_started:
            kind = "server_error" if status == 503 else "invalid_request_error"
            body = json.dumps(openai_error(message, kind)).encode()
            headers = [b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)]
            headers += [b"retry-after: %d" % retry_after] if retry_after else []
            self.transport.write(STATUS_LINE[status] + b"\r\n".join(headers) + b"\r\n\r\n" + body)
        if not self.idle:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    # Time

    def _wait(self, between: bool = False) -> None:
        """Starts the timer after which the connection is closed, unless the client sends a request's headers before.

        ``between``: True after a request, when the client has the time of an idle connection to begin another one.
        """
        self._cancel(self._waiting)
        self._between = between
        seconds = self._intake.options.idle_seconds if between else self._intake.options.header_seconds
        self._waiting = self.loop.call_later(seconds, self.transport.close)

    def _watch_reading(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._intake.options.stall_seconds, self._look_at_reading)

    def _look_at_reading(self) -> None:
        """Drops the connection if the client has read too little since the last check.

        Writing is paused meanwhile, so the bytes that left the buffer were read.
        """
        read = self._unread - self.transport.get_write_buffer_size()
        if read < max(1, READ_RATE * self._intake.options.stall_seconds):
            self.drop()
        else:
            self._watch_reading()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


_WASTE = "the body comes in pieces that are too small"


class _Closing:
    """A transport that lets the client read the answer before it closes with an unread body.

    The system resets a connection that is closed with unread data, and the last bytes sent may be lost. So ``close``
    first closes only the writing side and stops reading; a moment later the connection ends.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self._lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._lingers:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        cycle = self._connection.cycle
        if cycle is None or not cycle.more_body or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._lingers = True
        self._transport.pause_reading()
        self._connection.loop.call_later(LINGER_SECONDS, self._transport.abort)
        with contextlib.suppress(OSError):  # the client has left already
            self._transport.write_eof()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._transport.resume_reading()
