"""Invalid requests, at random and in parallel, get a 4xx in the protocol's shape or a closed connection, never a 500.

The engine lives, the log has no failure, and other clients' requests have the tokens that they have alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.server.app import make_app
from enginewright.runtime.server.http.front import Front
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.protocols import ollama
from enginewright.runtime.server.protocols.anthropic import CountBody, MessagesBody
from enginewright.runtime.server.protocols.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from enginewright.runtime.server.protocols.ollama import GenerateBody, OllamaChatBody, ShowBody
from enginewright.runtime.server.protocols.pooled_bodies import (
    ClassifyBody,
    EmbeddingsBody,
    OllamaEmbedBody,
    PoolingBody,
    PredictBody,
    RerankBody,
    ScoreBody,
    TeiEmbedBody,
)
from enginewright.runtime.server.protocols.response_items import InputTokensBody, ResponsesBody
from tests.runtime.server.conftest import Server

SAID = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": SAID, "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "Hi", "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [70, 71]}),
    "/api/show": (ShowBody, {"model": "tiny-llama"}),
    "/api/chat": (OllamaChatBody, {"model": "tiny-llama", "messages": SAID, "options": {"num_predict": 2}}),
    "/api/generate": (GenerateBody, {"model": "tiny-llama", "prompt": "Hi", "options": {"num_predict": 2}}),
    "/v1/messages": (MessagesBody, {"messages": SAID, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountBody, {"messages": SAID}),
    "/v1/responses": (ResponsesBody, {"input": "Hi", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (InputTokensBody, {"input": "Hi"}),
    "/v1/embeddings": (EmbeddingsBody, {"input": ["Hi", "you"]}),
    "/embed": (TeiEmbedBody, {"inputs": "Hi"}),
    "/api/embed": (OllamaEmbedBody, {"input": "Hi"}),
    "/rerank": (RerankBody, {"query": "Hi", "documents": ["a", "b"]}),
    "/score": (ScoreBody, {"text_1": "Hi", "text_2": ["a", "b"]}),
    "/classify": (ClassifyBody, {"input": "Hi"}),
    "/pooling": (PoolingBody, {"input": [[5, 6], [7]]}),
    "/predict": (PredictBody, {"inputs": "Hi"}),
}
VALUES = [
    *(None, True, False, 0, -1, -(1 << 63), 1 << 63, 1 << 70, 0.5, -0.5, 1e300, 1e-300, "", "x", "7", "a" * 3000),
    *("\ud800", "\udfff\ud800", "\0", "\u202e", "</s>", "\U0001f600", "http://127.0.0.1/", "../../etc/passwd"),
    *([], [1], ["a"], [None], [[]], [-1], [1 << 40], [1 << 70], {}, {"a": 1}, {"": None}, [{"a": []}], [0.5] * 500),
    *({"type": "text", "text": 1}, [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
]
TEXTS = [b"", b"\0", b"nul", b"[", b'"', b"{}", b"NaN", b'{"a": 1e400}', b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"{} {}"]
BAD_BYTES = [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\0", b"\\ud800", b"\\u12", b'"', b"}", b"\\"]


@pytest.fixture(scope="module")
def server(
    tiny_bundle: Path, pooled_bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a model that writes text, and of one of each further kind."""
    models = {"tiny-llama": tiny_bundle, **pooled_bundles}
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    running = Server(*named, errors=tmp_path_factory.mktemp("server") / "stderr")
    yield running
    assert running.stop() == 0, running.errors.read_text()


def body_of(rng: random.Random) -> tuple[str, bytes]:
    """A path, and what is sent to it as a body."""
    path = rng.choice([*PATHS])
    kind, valid = PATHS[path]
    body = dict(valid)
    names = kind.__struct_fields__  # type: ignore[attr-defined]
    for name in rng.sample(names, rng.randint(0, min(3, len(names)))):
        body[name] = rng.choice(VALUES)
    if rng.random() < 0.1:
        body[rng.choice(["odd", "", "\ud800", "__proto__", "max_tokens "])] = rng.choice(VALUES)
    if rng.random() < 0.2:
        message = {key: rng.choice(VALUES) for key in rng.sample(["role", "content", "name", "tool_calls"], 2)}
        body["messages"] = rng.choice([[message], [*SAID, message], [rng.choice(VALUES)], SAID * 50])
    data = json.dumps(body).encode()
    how = rng.random()
    if how < 0.1:
        data = data[: rng.randrange(len(data))]
    elif how < 0.25:
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice(BAD_BYTES) + data[at + rng.randint(0, 2) :]
    elif how < 0.3:
        data = rng.choice(TEXTS)
    elif how < 0.35:
        deep = rng.choice([100, 5000, 200_000])
        data = b'{"messages": ' + b'[{"a":' * deep + b"1" + b"}]" * deep + b"}"
    elif how < 0.4:
        data = data[:-1] + b", " + data[1:]  # each name twice
    elif how < 0.45:
        data = b'{"prompt": "' + b"a" * rng.choice([40_000, 300_000]) + b'", "stream": true}'
    elif how < 0.5:
        data = rng.randbytes(rng.randint(1, 300))
    return path, data


def request_of(rng: random.Random, port: int) -> tuple[bytes, bool]:
    """A request as bytes, and whether it is one that can be read to its end."""
    path, data = body_of(rng)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    how = rng.random()
    if how < 0.7:
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, True
    if how < 0.8:
        size = rng.randint(1, 64)
        pieces = [data[at : at + size] for at in range(0, min(len(data), 4000), size)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n", True
    odd = [
        f"{head}Content-Length: {max(0, len(data) - rng.randint(1, 20))}\r\n\r\n".encode() + data,
        f"{head}Content-Length: {1 << 40}\r\n\r\n".encode(),
        f"{head}Content-Length: -5\r\n\r\n".encode() + data,
        f"{head}Content-Length: 3\r\nContent-Length: 4\r\n\r\n".encode() + data,
        f"{head}Content-Length: {len(data)}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + data,
        f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode() + data,
        f"{head}Transfer-Encoding: gzip\r\n\r\n".encode() + data,
        f"POST {path} HTTP/9.9\r\n\r\n".encode(),
        b"POST " + rng.randbytes(30) + b" HTTP/1.1\r\n\r\n",
        f"{head}{'x' * 70_000}: y\r\n\r\n".encode(),
        head.encode() + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
        head.replace("Host:", "Host: evil.example\r\nHost:").encode() + b"\r\n",
        head.encode() + b"X-Odd: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
        rng.randbytes(200) + b"\r\n\r\n",
    ]
    return rng.choice(odd), False


def answers(server: Server, data: bytes, whole: bool) -> list[tuple[int, bytes]]:
    """Status and body of what a connection gets until it is closed. Behind what isn't whole it is ended at once."""
    received = b""
    with server.connect() as link:
        link.settimeout(300)
        try:
            link.sendall(data)
            if not whole:
                with contextlib.suppress(OSError):  # it may be closed already
                    link.shutdown(socket.SHUT_WR)
            while piece := link.recv(65536):
                received += piece
        except ConnectionError:
            pass
    return [(int(part[:3]), body_in(part)) for part in received.split(b"HTTP/1.1 ")[1:]]


def body_in(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while size := int((line := rest.partition(b"\r\n"))[0] or b"0", 16):
        body, rest = body + line[2][:size], line[2][size + 2 :]
    return body


def check(data: bytes, whole: bool, found: list[tuple[int, bytes]]) -> None:
    assert found or not whole, data[:300]
    for status, body in found:
        assert status == 200 or 400 <= status < 500, (status, data[:1000], body)
        if status != 200:
            error = json.loads(body)["error"]
            message = error if isinstance(error, str) else error["message"]
            assert message, (data[:300], body)
            keys = ({"message", "type"}, {"message", "type", "param", "code"})  # Anthropic's, and OpenAI's
            assert isinstance(error, str) or {*error} in keys, body


def fuzz(server: Server, count: int, seed: int, threads: int) -> Counter[int]:
    """Sends ``count`` odd requests, while others ask properly; how often each status came."""
    expected = [server.complete("A ship", seed=i, max_tokens=40, ignore_eos=True).json["choices"] for i in range(3)]
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def ask_properly() -> int:
        sent = 0
        while not stop.is_set() or not sent:
            i = sent % 3
            reply = server.complete("A ship", seed=i, max_tokens=40, ignore_eos=True)
            assert reply.status == 200 and reply.json["choices"] == expected[i]
            sent += 1
        return sent

    def send(i: int) -> None:
        data, whole = request_of(random.Random(f"{seed} {i}"), server.port)
        replies = answers(server, data, whole)
        check(data, whole, replies)
        statuses.update(status for status, _ in replies)

    with ThreadPoolExecutor(threads + 1) as pool:
        proper = pool.submit(ask_properly)
        try:
            for _ in pool.map(send, range(count)):
                pass
        finally:
            stop.set()
        assert proper.result() > 0
    return statuses


def check_well(server: Server) -> None:
    """Nothing is left of what was sent: no request, no block; no engine died, and nothing failed."""
    for name in server.ask("GET", "/props").json["models"]:
        server.wait(lambda of=name: server.props(of)["requests"] == 0 and server.props(of)["kv_cache_used"] == 0)
        assert server.props(name)["deaths"] == 0
    assert "Traceback" not in server.errors.read_text() and "ERROR" not in server.errors.read_text()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_numbers_that_fit_nowhere(server: Server, path: str) -> None:
    """Also those that JSON has, and the records that go to the engine haven't."""
    kind, valid = PATHS[path]
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]
        for value in (1 << 70, -(1 << 70), [1 << 70], {"5": 1 << 70}, {str(1 << 70): 1}):
            reply = server.ask("POST", path, valid | {name: value})
            free = ("seed", "temperature", "repetition_penalty", "top_n_sigma", "dry_base")
            free += ("json_schema", "guided_json")
            if reply.status != 200 or name not in free:
                assert reply.status == 400, (name, value, reply.body)
                assert reply.json["error"]["type"] == "invalid_request_error"


def test_odd_requests_at_random(server: Server) -> None:
    statuses = fuzz(server, 300, seed=1, threads=4)
    assert statuses[200] and statuses[400]
    check_well(server)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_odd_requests_at_random_for_long(make_server: Callable[..., Server], tiny_bundle: Path, seed: int) -> None:
    server = make_server(tiny_bundle)
    fuzz(server, 10_000, seed=seed, threads=8)
    check_well(server)


def test_connections_that_break_off(server: Server) -> None:
    """They break off in the middle of a head, of a body, or of an answer; by a reset, or by an end."""
    rng = random.Random(3)
    for i in range(60):
        body = json.dumps({"prompt": "a", "max_tokens": 100, "stream": i % 2 == 0, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        link = server.connect()
        link.sendall(data[: rng.choice([0, 10, len(head), len(head) + 5, len(data)])])
        if rng.random() < 0.5:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    assert server.complete("a", max_tokens=1).status == 200
    check_well(server)


def test_what_nobody_foresaw_is_an_error_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(models: object) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(ollama, "tags", fail)
    app = make_app(Front(ServerOptions(models={"a": "a.bundle"}), {}))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/api/tags", "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "root_path": "", "scheme": "http"}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"]) == {"error": "the server failed; its log says why"}


def test_what_is_not_http_is_a_line_of_the_log(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--log-json")
    ((status, body),) = answers(server, b"GET\r\n\r\n", whole=True)
    assert status == 400 and json.loads(body)["error"]["type"] == "invalid_request_error"
    server.stop()
    lines = [json.loads(line) for line in server.errors.read_text().splitlines()]
    assert any("Invalid HTTP" in line.get("message", "") for line in lines)
