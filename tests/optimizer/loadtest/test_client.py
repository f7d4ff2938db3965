from __future__ import annotations

import asyncio
import socket

import pytest

from enginewright.optimizer.loadtest.client import Answer, Client
from tests.optimizer.loadtest.conftest import (
    CUT,
    HEAD,
    STALL,
    FakeServer,
    Script,
    chunk,
    document,
    event,
    piece,
    stream,
)


def ask(url: str, *answers: Answer, timeout: float = 60.0) -> None:
    """One after the other."""

    async def run() -> None:
        client = Client(url, "secret", timeout)
        watch = asyncio.create_task(client.watch())
        for answer in answers:
            await client.ask("POST", "/v1/chat/completions", b'{"max_tokens": 3}', answer)
            answer.not_streamed()
        watch.cancel()
        client.close()

    asyncio.run(run())


def bytewise(script: Script) -> Script:
    """The script with one byte at a time."""
    return [bytes([byte]) for part in script if isinstance(part, bytes) for byte in part]


@pytest.mark.parametrize("cut", [list, bytewise, lambda script: [b"".join(script)]], ids=["parts", "bytes", "at once"])
def test_a_stream_is_read_however_it_is_cut(fake: FakeServer, cut: object) -> None:
    fake.behave = lambda number, body: cut(stream(3))  # type: ignore[operator]
    first, second = Answer(keep_text=True), Answer()
    ask(fake.url, first, second)
    assert first.error is None and first.text == "word word word "
    assert (first.pieces, first.tokens, first.prompt_tokens, first.cached_tokens) == (3, 3, 5, 2)
    assert first.first is not None and first.last is not None
    assert len(first.gaps) == 2 and sum(first.gaps) == pytest.approx(first.last - first.first, abs=1e-4)
    assert second.error is None and second.text == ""
    assert fake.connections == 1
    assert "Authorization: Bearer secret" in fake.heads[0]


def test_a_path_before_v1_is_kept(fake: FakeServer) -> None:
    ask(fake.url + "/models/a/v1/", Answer())
    assert fake.heads[0].startswith("POST /models/a/v1/chat/completions ")


OPEN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
LONG = {"error": {"message": "x" * 1000, "type": "server_error"}}


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (document(500, {"error": {"message": "boom"}}), "http 500", "boom"),
        (document(429, {"error": {"message": "later"}}), "http 429", "later"),
        (document(422, {"detail": [{"msg": "bad"}]}), "http 422", "bad"),
        (document(502, b"<html>bad gateway</html>"), "http 502", "bad gateway"),
        (document(503, b""), "http 503", ""),
        (document(302, b"", b"location: http://example.org/"), "http 302", ""),
        (document(500, LONG), "http 500", "x" * 200),
        (document(200, {"choices": []}), "not a stream", ""),
        ([HEAD, chunk(b"data: <html>\n\n"), b"0\r\n\r\n"], "not JSON", "<html>"),
        ([HEAD, chunk(b"data: [1, 2]\n\n"), b"0\r\n\r\n"], "not JSON", "[1, 2]"),
        ([HEAD, chunk(b"data: \xff\xfe\n\n"), b"0\r\n\r\n"], "not JSON", ""),
        ([HEAD, piece("a"), chunk(event({"error": {"message": "lost"}})), b"0\r\n\r\n"], "error in the stream", "lost"),
        ([HEAD, piece("a"), chunk(b'error: {"message": "lost"}\n\n'), STALL], "error in the stream", "lost"),
        ([HEAD, piece("a"), b"0\r\n\r\n"], "cut", "before its answer"),
        ([HEAD, piece("a"), CUT], "cut", "closed"),
        ([OPEN, event({"choices": [{"text": "a"}]})], "cut", "before its answer"),
        ([HEAD, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"], "empty", ""),
        ([CUT], "closed", ""),
        ([b"HTTP/1.1 200 OK\r\nx", CUT], "cut", ""),
        ([b"SSH-2.0-OpenSSH_9\r\n\r\n", STALL], "not HTTP", "SSH"),
        ([b"x" * 70_000, STALL], "not HTTP", "HTTP/"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000, STALL], "not HTTP", "head"),
        ([b"".join([*document(200, {}), b"HTTP/1.1 200 OK\r\n\r\n"])], "not HTTP", "response"),
        ([HEAD, b"zz\r\n", STALL], "not HTTP", "chunk"),
    ],
)
def test_what_is_wrong_with_an_answer_has_a_kind(fake: FakeServer, script: Script, kind: str, said: str) -> None:
    fake.behave = lambda number, body: script
    answer = Answer()
    ask(fake.url, answer)
    assert answer.error == kind
    assert said in answer.message and len(answer.message) <= 200


def test_a_message_can_t_command_a_terminal(fake: FakeServer) -> None:
    fake.behave = lambda number, body: document(500, {"error": "\x1b[2J\x1b]0;title\x07"})
    answer = Answer()
    ask(fake.url, answer)
    assert answer.error == "http 500" and "\x1b" not in answer.message


def test_a_stream_until_the_connection_closes_is_whole_if_it_says_so(fake: FakeServer) -> None:
    end = event({"choices": [{"text": "b", "finish_reason": "stop"}]})
    fake.behave = lambda number, body: [OPEN, b": comment\r\n\r\n", event({"choices": [{"text": "a"}]}), end]
    first, second = Answer(keep_text=True), Answer(keep_text=True)
    ask(fake.url, first, second)
    assert [one.text for one in (first, second)] == ["ab", "ab"]
    assert fake.connections == 2


def test_an_interim_response_is_passed_over(fake: FakeServer) -> None:
    fake.behave = lambda number, body: [b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD, *stream(2)[1:]]
    answer = Answer()
    ask(fake.url, answer)
    assert answer.error is None and answer.pieces == 2


def test_a_stall_is_a_timeout_and_the_connection_goes(fake: FakeServer) -> None:
    fake.behave = lambda number, body: [HEAD, piece("a"), STALL]
    answer = Answer()
    ask(fake.url, answer, timeout=0.2)
    assert answer.error == "timeout"
    assert fake.gone.acquire(timeout=600)


def test_a_client_that_leaves_closes_its_connection(fake: FakeServer) -> None:
    fake.behave = lambda number, body: [HEAD, *(piece("a") for _ in range(5)), STALL]
    answer = Answer(leave_after=2)
    ask(fake.url, answer)
    assert answer.left and answer.error is None and answer.pieces == 2
    assert fake.gone.acquire(timeout=600)


def test_a_connection_that_was_closed_while_idle_is_made_anew(fake: FakeServer) -> None:
    fake.behave = lambda number, body: [CUT] if number == 1 else stream(2)
    answers = [Answer(), Answer()]
    ask(fake.url, *answers)
    assert [one.error for one in answers] == [None, None]
    assert len(fake.bodies) == 3 and fake.connections == 2


def test_where_nothing_listens_it_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        answer = Answer()
        ask(f"http://127.0.0.1:{free.getsockname()[1]}", answer)
    assert answer.error == "refused"


def test_a_server_without_tls_is_no_connection(fake: FakeServer) -> None:
    fake.behave = lambda number, body: stream(2)
    answer = Answer()
    ask(fake.url.replace("http", "https"), answer, timeout=0.5)
    assert answer.error in ("no connection", "timeout")
