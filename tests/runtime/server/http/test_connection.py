"""A connection's limits, with a transport that keeps what is written and a clock that a test moves."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from enginewright.runtime.server.http.connection import HEAD_BYTES, MOST_HEADERS, PIPELINED, URL_BYTES, Connection
from enginewright.runtime.server.http.intake import Intake
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.http.tenants import Tenant

HOST = b"Host: localhost\r\n"
POST = b"POST /x HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Transport:
    """Records the connection's writes, and if it was closed."""

    def __init__(self) -> None:
        self.sent = b""
        self.unread = 0  # bytes that the client hasn't taken
        self.closed = self.aborted = self.half_closed = self.paused = self.reset = False
        self.high = self.low = -1

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        self.high, self.low = high, low

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        assert not self.half_closed
        self.sent += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True
        if self.reset:
            raise OSError(107, "Transport endpoint is not connected")

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    @property
    def statuses(self) -> list[int]:
        return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+)", self.sent)]

    @property
    def over(self) -> bool:
        """Returns True if nothing more is read, as far as the client can tell."""
        return self.closed or self.aborted or (self.half_closed and self.paused)


class Timer:
    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.cancelled = when, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Takes the place of a loop's timers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._timers, self.now = loop, list[Timer](), 0.0
        self.create_task = loop.create_task

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self.now + seconds, call))
        return self._timers[-1]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [one for one in self._timers if not one.cancelled and one.when <= end]:
            first = min(due, key=lambda one: one.when)
            self._timers.remove(first)
            self.now = first.when
            first.call()
        self.now = end


class Client:
    """A connection, and what is at its other end."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock, self.transport = Clock(self.loop), Transport()
        self.intake = Intake(ServerOptions(models={"m": "m"}, **options))
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=9999
        )
        config.load()
        state: Any = {"server_state": ServerState(), "app_state": {}, "_loop": self.clock}
        self.connection = self.call(lambda: Connection(self.intake, config=config, **state))
        self.call(lambda: self.connection.connection_made(self.transport))  # type: ignore[arg-type]

    def call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = work()
            for _ in range(20):  # turns of the loop, in which the application does what it can
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(run())

    def send(self, *reads: bytes) -> Transport:
        for data in reads:
            if not self.transport.paused and not self.transport.is_closing():
                self.call(lambda data=data: self.connection.data_received(data))
        return self.transport

    def close(self) -> None:
        if self.connection.parser is not None:
            self.call(lambda: self.connection.connection_lost(None))
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.call(lambda: None)
        self.loop.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(app: Any, **options: Any) -> Client:
        clients.append(Client(app, **options))
        return clients[-1]

    yield make
    for one in clients:
        one.close()


Send = Callable[[dict[str, Any]], Awaitable[None]]


async def respond(send: Send, status: int = 200, body: bytes = b"ok") -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Send) -> None:
    """Reads the whole body, and gives it back."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await respond(send, body=body)


async def refuse(scope: Any, receive: Any, send: Send) -> None:
    """Answers without reading the body, as the gate does to a stranger."""
    await respond(send, 401)


async def hang(scope: Any, receive: Any, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces)


def test_requests_are_answered_one_after_the_other(connect: Callable[..., Client]) -> None:
    client = connect(echo)
    client.send(POST + b"Content-Length: 3\r\n\r\nabc" + CHUNKED + chunks(b"x" * 100) + b"0\r\n\r\n")
    assert client.transport.statuses == [200, 200] and client.transport.sent.endswith(b"x" * 100)
    assert not client.transport.over and client.connection.idle and client.transport.low == 0
    assert client.intake.connections == 1
    client.call(lambda: client.connection.connection_lost(None))
    assert client.intake.connections == 0


def test_a_refused_request_s_body_is_not_read(connect: Callable[..., Client]) -> None:
    client = connect(refuse)
    transport = client.send(CHUNKED + chunks(b"x"))
    assert transport.statuses == [401] and transport.over
    sent = transport.sent
    client.connection.data_received(chunks(b"y") * 1000 + b"0\r\n\r\n" + CHUNKED)  # what one more read brought
    assert transport.sent == sent and client.connection._body == 1
    client.clock.advance(1.0)  # the client could read why
    assert transport.aborted
    gone = connect(refuse)
    gone.transport.reset = True  # its client has left meanwhile
    assert gone.send(CHUNKED + chunks(b"x")).statuses == [401]
    gone.clock.advance(1.0)
    assert gone.transport.aborted
    whole = connect(refuse).send(POST + b"Content-Length: 3\r\n\r\nabc")
    assert whole.statuses == [401] and not whole.over  # it was read already: nothing is to be saved


@pytest.mark.parametrize(
    "body",
    [
        chunks(*[b"x"] * 50_000),  # tiny chunks
        b"1;" + b"e" * 200_000,  # an extension of a chunk without end
        chunks(b"x") + b"0\r\n" + b"a: b\r\n" * 200,  # trailers
        chunks(b"x") + b"0\r\na: " + b"b" * 200_000,  # a trailer without end
    ],
)
def test_a_body_that_is_mostly_something_else_is_refused(connect: Callable[..., Client], body: bytes) -> None:
    client = connect(echo)
    reads = [body[i : i + 65536] for i in range(0, len(body), 65536)]
    transport = client.send(CHUNKED, *reads)
    assert transport.statuses in ([400], [431]) and transport.over
    assert client.connection._waste < 3 * 65536  # no more than two reads of it


def test_a_body_of_many_small_reads_is_refused_and_of_larger_ones_is_not(connect: Callable[..., Client]) -> None:
    head = POST + b"Content-Length: 100000\r\n\r\n"
    client = connect(echo)
    assert client.send(head, *[b"x"] * 2000).statuses == [400] and client.transport.over
    assert connect(echo).send(head, *[b"x" * 50] * 2000).statuses == [200]
    assert connect(echo).send(CHUNKED, *[chunks(b"x" * 50)] * 2000, b"0\r\n\r\n").statuses == [200]


@pytest.mark.parametrize(
    ("reads", "status"),
    [
        ([b"GET /" + b"x" * 2 * URL_BYTES + b" HTTP/1.1\r\n"], 414),
        ([b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 2 * MOST_HEADERS], 431),
        ([b"GET / HTTP/1.1\r\n" + HOST + b"a: ", *[b"b" * 10_000] * 20], 431),
        ([b"GET / HTTP/1.1\r\n" + HOST + b"a: ", *[b"b"] * 5000], 431),  # a byte a read
        ([b"\r\n" * 100] * 1000, 431),  # lines before a request
        ([b"GET / HTTP/1.1\r\n\r\n"], 400),
        ([b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n"], 400),
        ([b"\0\1\2\r\n\r\n"], 400),
        ([POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"], 400),
        ([POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], 400),
        ([POST + b"Transfer-Encoding: gzip\r\n\r\nabc"], 400),
        ([CHUNKED + b"zz\r\n"], 400),
        ([POST + b" folded: x\r\n\r\n"], 400),
    ],
)
def test_heads_that_are_refused(connect: Callable[..., Client], reads: list[bytes], status: int) -> None:
    transport = connect(echo).send(*reads)
    assert transport.statuses == [status] and transport.over
    error = json.loads(transport.sent.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] is None and b"connection: close" in transport.sent
    assert len(transport.sent) < HEAD_BYTES


def test_pipelined_requests_are_bounded(connect: Callable[..., Client]) -> None:
    release = asyncio.Event()

    async def later(scope: Any, receive: Any, send: Send) -> None:
        await release.wait()
        await respond(send)

    client = connect(later)
    client.send((b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") * 1000)
    assert len(client.connection.pipeline) <= PIPELINED
    client.call(release.set)
    client.call(lambda: None)
    assert client.transport.statuses == [200] * (PIPELINED + 1) and client.transport.over


def test_what_is_wrong_after_a_request_does_not_answer_it(connect: Callable[..., Client]) -> None:
    release = asyncio.Event()

    async def later(scope: Any, receive: Any, send: Send) -> None:
        await release.wait()
        await respond(send)

    client = connect(later)
    client.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\nnonsense\r\n\r\n")
    assert client.transport.sent == b""
    client.call(release.set)
    assert client.transport.statuses == [200] and client.transport.over


def test_an_answer_that_nobody_reads_ends_its_connection(connect: Callable[..., Client]) -> None:
    client = connect(hang, stall_seconds=60.0)
    client.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    transport, connection = client.transport, client.connection
    transport.unread = 1_000_000
    client.call(connection.pause_writing)
    for _ in range(10):  # it reads, if slowly
        transport.unread -= 60 * 256
        client.clock.advance(60)
        assert not transport.aborted
    transport.unread -= 100  # and now hardly anything
    client.clock.advance(60)
    assert transport.aborted


def test_a_client_that_has_read_all_is_not_watched(connect: Callable[..., Client]) -> None:
    client = connect(hang, stall_seconds=60.0)
    client.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    client.transport.unread = 1000
    client.call(client.connection.pause_writing)
    client.clock.advance(59)
    client.transport.unread = 0
    client.call(client.connection.resume_writing)
    client.clock.advance(1000)
    assert not client.transport.over


def test_a_connection_without_a_request_is_closed(connect: Callable[..., Client]) -> None:
    silent = connect(echo, header_seconds=20.0)
    silent.clock.advance(19)
    silent.send(b"GET / HT")
    assert not silent.transport.over
    silent.clock.advance(1)
    assert silent.transport.closed
    after = connect(echo, header_seconds=20.0)
    after.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    after.clock.advance(70)  # load balancers close after 60
    assert after.transport.statuses == [200] and not after.transport.over
    after.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    after.clock.advance(75)
    assert after.transport.statuses == [200, 200] and after.transport.closed
    slow = connect(echo, header_seconds=20.0)
    slow.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    slow.clock.advance(70)
    slow.send(b"GET / HT")  # from here on it is as a new connection
    slow.clock.advance(19)
    slow.send(b"TP")
    assert not slow.transport.over
    slow.clock.advance(1)
    assert slow.transport.closed
    busy = connect(hang, header_seconds=20.0)
    busy.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    busy.clock.advance(1000)
    assert not busy.transport.over


def test_one_connection_too_many_is_told(connect: Callable[..., Client]) -> None:
    client = connect(hang, max_connections=1)
    client.send(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    client.intake.enter(client.connection, Tenant(""))
    late = Connection(
        client.intake,
        config=client.connection.config,
        server_state=ServerState(),
        app_state={},
        _loop=client.clock,
    )
    transport = Transport()
    client.call(lambda: late.connection_made(transport))  # type: ignore[arg-type]
    assert transport.statuses == [503] and b"retry-after: 1\r\n" in transport.sent and transport.over


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, "-keyout", "key.pem"]
    subprocess.run([*command, "-out", "cert.pem"], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_requests_are_answered_over_tls(certificate: tuple[Path, Path], size: int) -> None:
    """asyncio's own transports: over TLS they say at other moments that writing must wait."""
    ours, theirs = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(cafile=certificate[0]),
    )
    ours.load_cert_chain(*certificate)
    body = bytes(i % 251 for i in range(size))
    request = POST + b"Content-Length: %d\r\n\r\n" % size + body

    async def run() -> None:
        config = uvicorn.Config(echo, ws="none", lifespan="off", log_config=None, access_log=False)
        config.load()
        intake = Intake(ServerOptions(models={"m": "m"}))
        state: Any = {"server_state": ServerState(), "app_state": {}}
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(intake, config=config, **state), "127.0.0.1", 0, ssl=ours)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=theirs, server_hostname="localhost")
        for _ in range(2):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ") and await reader.readexactly(size) == body
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(run())
