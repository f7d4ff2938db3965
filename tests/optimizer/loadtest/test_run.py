"""Whole load tests, against a server that misbehaves and against ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.loadtest.options import Goals, LoadOptions, RequestClass, parse_lengths
from enginewright.optimizer.loadtest.own_server import served
from enginewright.optimizer.loadtest.result import LoadResult, result_of
from enginewright.optimizer.loadtest.run import LoadRun
from enginewright.optimizer.loadtest.workload import Workload
from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.optimizer.loadtest.conftest import CUT, HEAD, STALL, FakeServer, chunk, document, piece, stream


def load(url: str, **given: Any) -> LoadResult:
    options = LoadOptions(url, **given)
    options.check()
    workload = Workload(options)
    return result_of(asyncio.run(LoadRun(options, workload).run()), options, workload)


def one_class(**given: Any) -> tuple[RequestClass]:
    lengths = {n: parse_lengths(value, n) for n, value in given.items() if n in ("prompt", "answer", "turns")}
    return (RequestClass(**(given | lengths)),)


def test_all_clients_of_a_closed_loop_ask_until_all_is_asked(fake: FakeServer) -> None:
    result = load(fake.url, clients=3, requests=20, classes=one_class(answer="4", body={"ignore_eos": True}))
    of = result.figures
    assert (of.finished, of.left, of.failed, of.unfinished) == (20, 0, 0, 0)
    assert (of.tokens, of.prompt_tokens, of.cached_tokens) == (80, 100, 40)
    assert result.counted and result.model == "fake"
    assert of.ttft is not None and of.ttft.count == 20
    assert of.tpot is not None and of.gap is not None and of.gap.count == 60
    assert fake.connections <= 4
    sent = fake.bodies[1]
    assert sent["stream"] and sent["max_tokens"] == 4 and sent["ignore_eos"] and sent["temperature"] == 0
    assert sent["stream_options"] == {"include_usage": True} and sent["model"] == "fake"
    assert len(sent["messages"][0]["content"].split()) == 128


@pytest.mark.matrix
def test_the_same_seed_sends_the_same_bodies(fake: FakeServer) -> None:
    load(fake.url, clients=1, requests=5, seed=3, classes=one_class(prompt="5-60"))
    first = fake.bodies[:]
    fake.bodies.clear()
    load(fake.url, rate=1000.0, requests=5, seed=3, classes=one_class(prompt="5-60"))
    assert sorted(map(str, fake.bodies)) == sorted(map(str, first))


def test_errors_are_counted_by_kind(fake: FakeServer) -> None:
    scripts = {
        1: document(500, {"error": {"message": "boom"}}),
        2: document(429, {"error": {"message": "later"}}),
        3: [HEAD, piece("a"), CUT],
        4: [HEAD, chunk(b"data: <html>\n\n"), b"0\r\n\r\n"],
        5: document(500, {"error": {"message": "boom"}}),
    }
    fake.behave = lambda number, body: scripts.get(number, stream(3))
    result = load(fake.url, clients=1, requests=9, classes=one_class(goals=Goals(ttft=60.0)))
    counts = {kind: count for kind, (count, _) in result.figures.errors.items()}
    assert counts == {"http 500": 2, "http 429": 1, "cut": 1, "not JSON": 1}
    assert result.figures.errors["http 500"][1] == "boom"
    assert (result.figures.finished, result.figures.failed) == (4, 5)
    assert result.figures.goodput is not None
    assert (result.figures.goodput.asked, result.figures.goodput.met) == (9, 4)


def test_a_stall_ends_as_a_timeout_and_the_others_go_on(fake: FakeServer) -> None:
    fake.behave = lambda number, body: [HEAD, piece("a"), STALL] if number == 2 else stream(3)
    result = load(fake.url, clients=2, requests=6, timeout=3.0)
    assert Counter(one.error for one in result.records)["timeout"] >= 1
    assert fake.gone.acquire(timeout=600)


@pytest.mark.matrix
def test_in_an_open_loop_requests_come_while_none_is_answered(fake: FakeServer) -> None:
    """The server answers none before it has all: in a closed loop of fewer clients this would never end."""
    everything = threading.Event()

    def behave(number: int, body: dict[str, Any]) -> list[object]:
        if number == 30:
            everything.set()
        return stream(2) if number == 0 else [HEAD, *([] if number < 30 else [piece("a")]), STALL]

    fake.behave = behave
    result = load(fake.url, rate=200.0, requests=30, timeout=2.0)
    assert everything.is_set()
    assert len(result.records) == 30


def test_times_count_from_when_a_request_was_due(fake: FakeServer) -> None:
    """The server holds up its first answer, and meanwhile reads nothing: what was due then was due then."""
    held = 0.3

    def behave(number: int, body: dict[str, Any]) -> list[object]:
        if number == 1:
            time.sleep(held)  # the whole server sleeps
        return stream(2)

    fake.behave = behave
    result = load(fake.url, rate=100.0, arrivals="constant", requests=10)
    due = [one.due for one in result.records]
    assert due == pytest.approx([i / 100 for i in range(10)], abs=1e-9)
    for one in result.records:
        assert one.ttft is not None and one.first is not None
        assert one.ttft == one.first - one.due
        assert one.ttft >= held - 0.09 - 0.01  # it came within 90 ms of the first; timers are coarse
    assert result.late is not None and result.late.count == 10


def test_turns_of_a_conversation_repeat_what_was_said(fake: FakeServer) -> None:
    result = load(
        fake.url, clients=1, requests=2, shared_prefix=4, classes=one_class(turns="3", prompt="6", answer="2")
    )
    assert result.figures.finished == 6
    first, second, third = (body["messages"] for body in fake.bodies[1:4])
    assert [one["role"] for one in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third[:4] == second and second[:2] == first
    assert second[2]["content"] == "word word "
    assert len(first[0]["content"].split()) == 4


def test_completions_have_a_text(fake: FakeServer) -> None:
    turns = one_class(turns="2", prompt="6", answer="2")
    load(fake.url, api="completions", clients=1, requests=1, shared_prefix=4, classes=turns)
    assert fake.heads[-1].startswith("POST /v1/completions ")
    assert [len(body["prompt"].split()) for body in fake.bodies[1:]] == [10, 18]


def test_a_conversation_ends_with_an_error(fake: FakeServer) -> None:
    fake.behave = lambda number, body: document(500, {}) if number == 2 else stream(2)
    result = load(fake.url, clients=1, requests=1, classes=one_class(turns="3"))
    assert [one.error for one in result.records] == [None, "http 500"]


def test_clients_that_leave_are_no_errors(fake: FakeServer) -> None:
    fake.behave = lambda number, body: stream(2) if number == 0 else [*stream(64)[:-3], STALL]
    classes = one_class(leave=1.0, goals=Goals(ttft=60.0))
    result = load(fake.url, clients=2, requests=6, classes=classes)
    assert (result.figures.left, result.figures.failed, result.figures.finished) == (6, 0, 0)
    assert result.figures.goodput is not None and result.figures.goodput.asked == 0
    for _ in range(6):
        assert fake.gone.acquire(timeout=600)


def test_a_server_without_usage_has_its_pieces_counted(fake: FakeServer) -> None:
    def behave(number: int, body: dict[str, Any]) -> list[object]:
        return document(400, {"error": "unknown"}) if "stream_options" in body else stream(3, usage=False)

    fake.behave = behave
    result = load(fake.url, clients=1, requests=2)
    assert not result.counted and result.figures.tokens == 6 and result.figures.prompt_tokens is None
    assert any("pieces of text" in note for note in result.notes())
    assert result.to_json()["tokens_counted_by"] == "pieces"


def test_a_server_that_can_t_be_asked_is_an_error(fake: FakeServer) -> None:
    fake.behave = lambda number, body: document(401, {"error": {"message": "no such key"}})
    with pytest.raises(EnginewrightError, match="http 401: no such key"):
        load(fake.url)
    fake.behave = lambda number, body: document(200, {"choices": []})
    with pytest.raises(EnginewrightError, match="not a stream"):
        load(fake.url)


def test_ctrl_c_ends_it_with_what_was_measured(fake: FakeServer) -> None:
    def behave(number: int, body: dict[str, Any]) -> list[object]:
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)
            return [HEAD, piece("a"), STALL]
        return stream(2)

    fake.behave = behave
    result = load(fake.url, clients=1, requests=100)
    assert result.interrupted
    assert (result.figures.finished, result.figures.unfinished, result.figures.failed) == (4, 1, 0)


def test_progress_says_how_far_it_is(fake: FakeServer) -> None:
    seen: list[ProgressEvent] = []
    started = threading.Event()

    def show(event: ProgressEvent) -> None:
        seen.append(event)
        started.set()

    def behave(number: int, body: dict[str, Any]) -> list[object]:
        return [HEAD, piece("a"), STALL] if number == 3 and not started.is_set() else stream(2)

    fake.behave = behave
    options = LoadOptions(fake.url, clients=1, requests=4, timeout=1.0)
    asyncio.run(LoadRun(options, Workload(options), show).run())
    assert seen and seen[-1].total == 4 and "running" in seen[-1].detail


@pytest.fixture(scope="module")
def ours(tiny_bundle: Path) -> Any:
    with served(tiny_bundle) as url:
        yield url


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_our_server_bears_a_load(ours: str, api: Any) -> None:
    classes = one_class(prompt="5-20", answer="2-8", turns="1-2", leave=0.2, body={"ignore_eos": True})
    result = load(ours, api=api, rate=100.0, requests=12, shared_prefix=8, classes=classes)
    assert result.figures.errors == {} and result.counted
    assert result.figures.finished + result.figures.left == len(result.records) >= 12
    firsts = {one.conversation: one for one in result.records if one.whole and one.turn == 0}
    for conversation in Workload(LoadOptions(ours, rate=100.0, requests=12, shared_prefix=8, classes=classes)):
        if conversation.index in firsts:
            assert firsts[conversation.index].tokens == conversation.turns[0].answer


def test_our_server_s_refusals_are_told_by_kind(ours: str) -> None:
    classes = (
        replace(one_class(answer="4", prompt="5")[0], name="good"),
        RequestClass("bad", body={"temperature": -1}),
    )
    result = load(ours, clients=2, requests=12, classes=classes)
    fine, bad = result.classes
    assert fine.failed == 0 and fine.finished > 0
    assert bad.finished == 0 and set(bad.errors) == {"http 400"}
    assert "temperature" in bad.errors["http 400"][1]
    assert json.loads(json.dumps(result.to_json()))["classes"]["bad"]["failed"] == bad.failed


@pytest.mark.matrix
def test_a_bundle_that_can_t_be_served_says_why(tmp_path: Path) -> None:
    (folder := tmp_path / "empty.bundle").mkdir()
    with pytest.raises(EnginewrightError, match="can't be served"), served(folder):
        pass
