"""Clients of a server that are honest, well-behaved or hostile, for ``serve_endurance.py``. All talk to loopback alone.

Honest clients ask for short answers one after the other, and compare each with what it must be. Well-behaved ones ask
for one token each, in bodies of a given size. Hostile ones each do one thing that costs a server much and a client
little (``KINDS``). Well-behaved and hostile clients share a number of requests a second.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

MB = 1 << 20
HOLD_SECONDS = 20.0
"""The longest time for which a hostile client holds one connection."""
ANSWER_TOKENS = 16


@dataclass
class Server:
    """A server on loopback, with the keys that it takes."""

    port: int
    honest_key: str
    hostile_keys: Sequence[str]


@dataclass
class Tally:
    """The requests of clients and their outcome.

    Attributes:
        requests: requests by the kind of client.
        statuses: answers by the kind of client and the status; 0: the connection ended without one.
        wrong: wrong answers, each with its reason.
        sent: bytes.
        seconds: latencies of honest clients' requests.
    """

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sent: int = 0
    seconds: list[float] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def note(self, kind: str, sent: int, reply: bytes | None) -> None:
        """Counts a request: its bytes, and the head of its answer."""
        status = int(reply[9:12]) if reply is not None and reply.startswith(b"HTTP/1.1 ") else 0
        with self.lock:
            self.requests[kind] += 1
            self.sent += sent
            self.statuses[f"{kind} {status}"] += 1
            if status >= 500 and (status != 503 or b"retry-after:" not in (reply or b"").lower()):
                self.wrong.append(f"{kind}: {(reply or b'')[:200]!r}")


class Rate:
    """Lets so many requests a second begin, of all clients together."""

    def __init__(self, per_second: float) -> None:
        self._interval, self._next, self._lock = 1 / per_second, time.monotonic(), threading.Lock()

    def wait(self) -> None:
        """Returns when the next one may begin."""
        with self._lock:
            at = self._next = max(self._next + self._interval, time.monotonic())
        time.sleep(max(0.0, at - time.monotonic()))


# Requests


def chat(number: int, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """A short request whose answer depends on nothing else."""
    text = f"Write one sentence about the number {number % 8}."
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def padded(body: dict[str, Any], size: int) -> bytes:
    """The body with so much whitespace that it has a size, if it is shorter."""
    data = json.dumps(body).encode()
    return data + b" " * (size - len(data))


def ask(server: Server, data: bytes, key: str = "") -> tuple[int, bytes]:
    """A whole answer to a client: its status and its body. ``key``: by default the honest clients'."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key or server.honest_key}"}
        connection.request("POST", "/v1/completions", data, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def text_of(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


def honest(server: Server, clients: int, seconds: float, expected: dict[int, str]) -> Tally:
    """Has honest clients ask for some seconds, one request after the other each."""
    tally, end = Tally(), time.monotonic() + seconds

    def one(client: int) -> None:
        for number in itertools.count(client):
            if time.monotonic() > end:
                return
            began = time.monotonic()
            try:
                status, body = ask(server, json.dumps(chat(number)).encode())
            except (OSError, http.client.HTTPException) as e:
                status, body = 0, repr(e).encode()
            with tally.lock:
                tally.requests["honest"] += 1
                tally.seconds.append(time.monotonic() - began)
                if status != 200 or text_of(body) != expected[number % 8]:
                    tally.wrong.append(f"honest: {status} {body[:200]!r}")

    with ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(one, client) for client in range(clients)]:
            future.result()
    return tally


def well_behaved(server: Server, clients: int, seconds: float, rate: float, size: int) -> Tally:
    """Has well-behaved clients, with hostile ones' keys, ask for some seconds in bodies of ``size`` bytes."""
    tally, end, gate = Tally(), time.monotonic() + seconds, Rate(rate)

    def one(client: int) -> None:
        for number in itertools.count(client):
            gate.wait()
            if time.monotonic() > end:
                return
            data = padded(chat(number, 1), size)
            try:
                status, body = ask(server, data, server.hostile_keys[client % len(server.hostile_keys)])
                tally.note("well-behaved", len(data), b"HTTP/1.1 %d" % status)
                if status != 200:
                    tally.wrong.append(f"well-behaved: {status} {body[:200]!r}")
            except (OSError, http.client.HTTPException) as e:
                tally.wrong.append(f"well-behaved: {e!r}")

    with ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(one, client) for client in range(clients)]:
            future.result()
    return tally


# Hostile clients: each takes a connection and the moment at which it must end, and returns the head of its answer


@dataclass
class Attack:
    """A connection of a hostile client.

    Attributes:
        link: the socket.
        key: of its tenant.
        end: the moment at which it must be over.
        sent: bytes so far.
    """

    link: socket.socket
    key: str
    end: float
    sent: int = 0

    def send(self, data: bytes, step: int = 0, pause: float = 0.0) -> None:
        """Sends data, whole or in steps of so many bytes with a pause after each, until the moment of the end."""
        for begin in range(0, len(data), step or len(data)):
            if time.monotonic() > self.end:
                return
            piece = data[begin : begin + (step or len(data))]
            self.link.sendall(piece)
            self.sent += len(piece)
            if pause:
                time.sleep(pause)

    def head(self, length: int | None, path: str = "/v1/completions", key: str | None = None) -> bytes:
        """A request's head; without a length the body comes in chunks."""
        how = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key or self.key}\r\n{how}\r\n\r\n"
        ).encode()

    def body(self, data: bytes, path: str = "/v1/completions", key: str | None = None) -> None:
        self.send(self.head(len(data), path, key) + data)

    def reply(self) -> bytes | None:
        """The beginning of the answer; None where none comes in time."""
        self.link.settimeout(max(0.1, self.end - time.monotonic()))
        try:
            return self.link.recv(4096) or None
        except OSError:
            return None

    def hold(self) -> None:
        """Keeps the connection without reading, as long as it may."""
        while time.monotonic() < self.end:
            time.sleep(0.2)


def slow_reader(attack: Attack) -> bytes | None:
    """Asks for a long answer, and reads nothing of it."""
    body = {"prompt": "a", "n": 4, "max_tokens": 200, "temperature": 1, "ignore_eos": True, "logprobs": 20}
    attack.body(json.dumps(body | {"stream": random.random() < 0.5}).encode())
    attack.hold()
    return attack.reply()


def slow_writer(attack: Attack) -> bytes | None:
    """Sends a byte at a time, head and body."""
    data = json.dumps(chat(1)).encode()
    attack.send(attack.head(len(data)) + data, 1, 0.05)
    return attack.reply()


def tiny_chunks(attack: Attack) -> bytes | None:
    """Sends a body in chunks of one byte."""
    attack.send(attack.head(None))
    attack.send(b"1\r\nx\r\n" * 200_000)
    return attack.reply()


def stranger(attack: Attack) -> bytes | None:
    """Sends a large body with a key that nobody has."""
    attack.send(attack.head(None, key="nobody-has-this"))
    attack.send(b"1\r\nx\r\n" * 100_000)
    return attack.reply()


def token_list(attack: Attack) -> bytes | None:
    """Names very many token ids."""
    attack.body(_token_list())
    return attack.reply()


def deep(attack: Attack) -> bytes | None:
    """Sends JSON of a hundred thousand levels."""
    attack.body(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    return attack.reply()


def slow_schema(attack: Attack) -> bytes | None:
    """Asks for a form that takes long to compile, another one each time."""
    schema = {"type": "integer", "multipleOf": 999_983 - 2 * random.randrange(10_000)}
    attack.body(json.dumps(chat(1) | {"structured_outputs": {"json": schema}}).encode())
    return attack.reply()


def unfinished(attack: Attack) -> bytes | None:
    """Sends most of a large body, and no more."""
    attack.send(attack.head(15 * MB))
    attack.send(b" " * (14 * MB))
    attack.hold()
    return attack.reply()


def leaver(attack: Attack) -> bytes | None:
    """Begins a stream, and leaves."""
    attack.body(json.dumps(chat(1, 500) | {"stream": True}).encode())
    return attack.reply()


def long_head(attack: Attack) -> bytes | None:
    """Sends thousands of headers, or thousands of requests ahead."""
    one = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    attack.send(one * 4000 if random.random() < 0.5 else one[:-2] + b"a: b\r\n" * 20_000)
    return attack.reply()


def long_text(attack: Attack) -> bytes | None:
    """Has a long text tokenized."""
    attack.body(_long_text(), "/tokenize")
    return attack.reply()


KINDS: tuple[Callable[[Attack], bytes | None], ...] = (
    slow_reader,
    slow_writer,
    tiny_chunks,
    stranger,
    token_list,
    deep,
    slow_schema,
    unfinished,
    leaver,
    long_head,
    long_text,
)


@cache  # the clients' own work must not delay the honest ones, which share their core
def _long_text() -> bytes:
    return json.dumps({"prompt": "word " * 600_000}).encode()


@cache
def _token_list() -> bytes:
    return json.dumps(chat(1) | {"allowed_token_ids": [5] * 1_000_000}).encode()


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # so that what isn't read waits in the server
        link.settimeout(HOLD_SECONDS)
        link.connect(("127.0.0.1", port))
        yield link


def hostile(server: Server, clients: int, seconds: float, rate: float, kinds: Sequence[str] = ()) -> Tally:
    """Has hostile clients of some kinds, or of all, at work for some seconds, at a rate of requests of all of them
    together."""
    tally, end, gate = Tally(), time.monotonic() + seconds, Rate(rate)
    chosen = [kind for kind in KINDS if not kinds or kind.__name__ in kinds]

    def one(client: int) -> None:
        key = server.hostile_keys[client % len(server.hostile_keys)]
        for number in itertools.count(client):
            gate.wait()
            if (now := time.monotonic()) > end:
                return
            kind, reply = chosen[number % len(chosen)], None
            try:
                with _connected(server.port) as link:
                    attack = Attack(link, key, min(end, now + HOLD_SECONDS))
                    try:
                        reply = kind(attack)
                    except OSError:  # it was cut off
                        reply = attack.reply()
                    tally.note(kind.__name__, attack.sent, reply)
            except OSError:
                tally.note(kind.__name__, 0, None)

    with ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(one, client) for client in range(clients)]:
            future.result()
    return tally
