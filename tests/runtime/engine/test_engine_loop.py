"""The thread that runs the engine: events, aborts, errors, closing."""

from __future__ import annotations

import _thread
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.engine_loop import EngineLoop
from enginewright.runtime.kv_cache.candidate import Candidate
from enginewright.runtime.requests.outputs import StreamPiece
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError
from tests.waiting import HANG, wait_until


class Gate:
    """Lets steps of an executor pass one by one."""

    def __init__(self, executor: Any) -> None:
        self.passes = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        run = executor.run

        def gated(step: Any) -> Any:
            self.arrived.release()
            self.passes.acquire()
            return run(step)

        executor.run = gated


class Events:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[StreamPiece | EnginewrightError] = []
        self.end: Future[None] = Future()

    def __call__(self, event: StreamPiece | EnginewrightError) -> None:
        self.heard.append(event)
        if isinstance(event, EnginewrightError) or event.finish_reason is not None:
            self.end.set_result(None)


@pytest.fixture
def executor(toy: Callable[..., Any]) -> Any:
    return toy()


@pytest.fixture
def loop(executor: Any) -> Iterator[EngineLoop]:
    engine_loop = EngineLoop(Engine(executor, SchedulerConfig()))
    yield engine_loop
    engine_loop.close()
    executor.close()


def test_a_request_is_heard_to_its_end(loop: EngineLoop) -> None:
    for _ in range(3):  # the thread is idle between
        events = Events()
        loop.submit(events, Generation([1, 2], SamplingParams(max_tokens=3)))
        events.end.result(HANG)
        assert [p.finish_reason for p in events.heard if isinstance(p, StreamPiece)] == [None, None, "length"]


def test_requests_of_one_call_begin_in_the_same_step(loop: EngineLoop) -> None:
    one, other = (Generation([1, 2], SamplingParams(max_tokens=3)) for _ in range(2))
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop.submit(lambda piece: ends.put(loop.steps), one, other)
    steps = [ends.get(timeout=HANG) for _ in range(6)]
    assert steps[::2] == steps[1::2]  # each token of one comes in the step that brings the other's


def test_an_aborted_request_is_not_heard_again(loop: EngineLoop, executor: Any) -> None:
    gate, events, request = Gate(executor), Events(), Generation([1], SamplingParams(max_tokens=50))
    loop.submit(events, request)
    gate.passes.release(2)
    wait_until(lambda: len(events.heard) == 2)
    loop.abort(request)
    gate.passes.release(100)
    wait_until(lambda: loop.engine.pools["g0"].free_blocks == 64)
    assert len(events.heard) == 2 and request.finish_reason == "abort"
    loop.abort(request)  # once more does nothing


def test_others_go_on_when_one_is_aborted(loop: EngineLoop, executor: Any) -> None:
    gate, events, dropped = Gate(executor), Events(), Generation([1], SamplingParams(max_tokens=50))
    loop.submit(Events(), dropped)
    loop.submit(events, Generation([2], SamplingParams(max_tokens=5)))
    gate.arrived.acquire()
    loop.abort(dropped)  # while a step with it runs
    gate.passes.release(100)
    events.end.result(HANG)
    assert len(events.heard) == 5


def test_an_error_of_the_executor_reaches_everybody_and_the_loop_lives_on(loop: EngineLoop, executor: Any) -> None:
    executor.fail = ValueError("bad step")
    listeners = [Events(), Events()]
    for events in listeners:
        loop.submit(events, Generation([1], SamplingParams(max_tokens=5)))
    for events in listeners:
        events.end.result(HANG)
        (error,) = events.heard
        assert isinstance(error, EnginewrightError) and "bad step" in str(error)
        assert isinstance(error.__cause__, ValueError)
    executor.fail = None
    wait_until(lambda: not loop.engine.has_work())
    events = Events()
    loop.submit(events, Generation([1], SamplingParams(max_tokens=2)))
    events.end.result(HANG)
    assert len(events.heard) == 2
    wait_until(lambda: loop.engine.pools["g0"].free_blocks == 64)


def test_too_little_memory_for_a_step_ends_its_requests_alone(executor: Any) -> None:
    loop, gate = EngineLoop(Engine(executor, SchedulerConfig(max_requests=1))), Gate(executor)
    large, small = Generation([1], SamplingParams(max_tokens=5)), Generation([2], SamplingParams(max_tokens=2))
    first, second = Events(), Events()
    loop.submit(first, large)
    gate.arrived.acquire()
    loop.submit(second, small)  # waits, as one runs at a time
    executor.fail = CapacityError("no memory for a step of this size", hint="Pass less memory.")
    gate.passes.release()
    first.end.result(HANG)
    gate.arrived.acquire()
    executor.fail = None
    gate.passes.release(100)
    second.end.result(HANG)
    assert isinstance(large.error, CapacityError) and large.error.hint == "Pass less memory."
    assert "the engine failed at a step: no memory for a step of this size" in str(large.error)
    assert [piece.finish_reason for piece in second.heard if isinstance(piece, StreamPiece)] == [None, "length"]
    wait_until(lambda: loop.engine.pools["g0"].free_blocks == 64)
    loop.close()
    executor.close()


def test_aborting_what_never_reached_the_engine_harms_nobody(loop: EngineLoop, executor: Any) -> None:
    gate, events, lost = Gate(executor), Events(), Generation([1], SamplingParams())
    loop.submit(events, Generation([2], SamplingParams(max_tokens=5)))
    gate.arrived.acquire()
    loop._listeners[lost] = Events()  # as a Ctrl-C in the middle of submit leaves it
    loop.abort(lost)
    gate.passes.release(100)
    events.end.result(HANG)
    assert [p.finish_reason for p in events.heard if isinstance(p, StreamPiece)][-1] == "length"


@pytest.mark.parametrize("begins", [False, True])
def test_a_ctrl_c_at_the_start_of_a_run_does_not_block_the_next(
    begins: bool, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = _thread.start_new_thread

    def interrupted(*args: Any) -> None:
        if begins:
            start(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", interrupted)
        lost = Generation([1], SamplingParams(max_tokens=2))
        with pytest.raises(KeyboardInterrupt):
            loop.submit(Events(), lost)
    loop.abort(lost)
    events = Events()
    loop.submit(events, Generation([1], SamplingParams(max_tokens=2)))
    events.end.result(HANG)
    assert len(events.heard) == 2
    wait_until(lambda: loop.engine.pools["g0"].free_blocks == 64)


def test_a_signal_handler_may_wait_for_a_request(loop: EngineLoop) -> None:
    """It interrupts the main thread anywhere: here while a request is handed over."""
    inner, outer, seen = Events(), Events(), [0]

    class Inbox(deque[Callable[[], None]]):
        def append(self, action: Callable[[], None]) -> None:
            super().append(action)
            seen[0] += 1
            if seen[0] == 1:
                signal.raise_signal(signal.SIGUSR1)

    def handle(*_: object) -> None:
        loop.submit(inner, Generation([3], SamplingParams(max_tokens=2)))
        inner.end.result(HANG)

    loop._inbox = Inbox()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        loop.submit(outer, Generation([1], SamplingParams(max_tokens=2)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    outer.end.result(HANG)
    assert (len(inner.heard), len(outer.heard)) == (2, 2)


def test_a_call_between_steps_is_made_though_a_step_failed(loop: EngineLoop, executor: Any) -> None:
    gate, events = Gate(executor), Events()
    loop.submit(events, Generation([1], SamplingParams(max_tokens=5)))
    gate.arrived.acquire()
    called = threading.Thread(target=lambda: result.set_result(loop.call(lambda: 7)))
    result: Future[int] = Future()
    called.start()
    wait_until(lambda: bool(loop._inbox))
    executor.fail = ValueError("bad step")
    gate.passes.release()
    assert result.result(HANG) == 7


@pytest.mark.parametrize("place", ["begin", "grow", "input", "accept", "text", "listener"])
def test_what_fails_for_one_request_ends_it_alone(
    place: str, loop: EngineLoop, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that was not foreseen: the others' tokens are those that they have alone."""
    others = [[7, 8, 9], [4, 5]]
    alone = []
    for prompt in others:
        events, one = Events(), Generation(prompt, SamplingParams(max_tokens=9))
        loop.submit(events, one)
        events.end.result(HANG)
        alone.append(one.tokens)
    bad = Generation([1, 2, 3], SamplingParams(max_tokens=9, temperature=1))
    cache = loop.engine.scheduler.cache

    def fails_for(method: Any) -> Any:
        def run(request: Request | Candidate, *args: Any, **options: Any) -> Any:
            one = request.request if isinstance(request, Candidate) else request
            if one is bad and bad.output_length >= (place == "grow"):
                raise KeyError("unforeseen")
            return method(request, *args, **options)

        return run

    if place in ("begin", "grow"):
        monkeypatch.setattr(cache, place, fails_for(getattr(cache, place)))
    elif place == "input":
        bad.seed = 2**64  # no number of 64 bits
    elif place == "accept":
        monkeypatch.setattr(bad, "accept", fails_for(lambda *_: None).__get__(bad))
    elif place == "text":

        class Text:
            stopped_by = None

            def push(self, token: int) -> bool:
                raise KeyError("unforeseen")

            finish = push

        bad._text = Text()  # type: ignore[assignment]
    listeners = [Events() for _ in others]
    generations = [Generation(prompt, SamplingParams(max_tokens=9)) for prompt in others]
    gate, notices = Gate(executor), Events()

    def refuses(event: StreamPiece | EnginewrightError) -> None:
        raise KeyError("unforeseen")

    loop.submit(listeners[0], generations[0])
    loop.submit(refuses if place == "listener" else notices, bad)
    loop.submit(listeners[1], generations[1])
    gate.passes.release(100)
    for events in listeners:
        events.end.result(HANG)
    assert [one.tokens for one in generations] == alone
    if place == "listener":
        wait_until(lambda: bad.finish_reason == "abort")
    else:
        notices.end.result(HANG)
        assert bad.finish_reason == "error" and bad.error is not None and "it failed in the engine" in str(bad.error)
        assert bad.error.__cause__ is not None
    wait_until(lambda: not loop.engine.has_work())
    assert loop.engine.pools["g0"].free_blocks == 64


def test_a_thread_that_the_system_refuses(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    refusal, request = Events(), Generation([1], SamplingParams(max_tokens=2))
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refused)
        with pytest.raises(CapacityError, match="the engine's thread can't be started: can't start new thread"):
            loop.submit(refusal, request)
        loop.abort(request)  # which needs no thread
    events = Events()
    loop.submit(events, Generation([1], SamplingParams(max_tokens=2)))
    events.end.result(HANG)
    assert len(events.heard) == 2 and refusal.heard == []


def test_the_thread_ends_with_the_work(loop: EngineLoop) -> None:
    events = Events()
    loop.submit(events, Generation([1], SamplingParams(max_tokens=2)))
    events.end.result(HANG)
    wait_until(lambda: not loop._running)
    assert loop._stepping.acquire(timeout=HANG), "the thread has left"
    loop._stepping.release()


def test_a_request_soon_after_another_finds_the_thread(loop: EngineLoop) -> None:
    """The thread waits for it, and closing ends the wait."""
    loop.idle_seconds = HANG
    threads = set()
    for _ in range(3):
        events = Events()

        def heard(event: Any, events: Events = events) -> None:
            threads.add(threading.get_ident())
            events(event)

        loop.submit(heard, Generation([1], SamplingParams(max_tokens=2)))
        events.end.result(HANG)
    assert len(threads) == 1
    assert loop.close() and not loop._running


def test_a_stream_may_be_collected_anywhere(loop: EngineLoop, executor: Any) -> None:
    """Also by a thread that is in the middle of telling the others: the garbage collector runs wherever it likes."""
    dropped, events = Generation([1], SamplingParams(max_tokens=50)), Events()
    gate = Gate(executor)

    def collects(event: StreamPiece | EnginewrightError) -> None:
        loop.abort(dropped)
        events(event)

    loop.submit(Events(), dropped)
    loop.submit(collects, Generation([2], SamplingParams(max_tokens=2)))
    gate.passes.release(100)
    events.end.result(HANG)
    assert len(events.heard) == 2 and dropped.finish_reason == "abort"


def test_closing_from_within_a_step_waits_for_nothing(loop: EngineLoop) -> None:
    closed: Future[bool] = Future()

    def closes(event: StreamPiece | EnginewrightError) -> None:
        if not isinstance(event, EnginewrightError):
            closed.set_result(loop.close())

    loop.submit(closes, Generation([1], SamplingParams(max_tokens=50)))
    assert closed.result(HANG) is False
    wait_until(lambda: not loop.engine.has_work())
    assert loop.close() is True


def test_what_never_fits_is_refused_at_once(loop: EngineLoop) -> None:
    events = Events()
    with pytest.raises(CapacityError, match="memory: "):
        loop.submit(events, Generation([1], SamplingParams(max_tokens=1000)))
    assert events.heard == []


def test_closing_ends_what_runs_and_refuses_what_comes(loop: EngineLoop, executor: Any) -> None:
    gate, events = Gate(executor), Events()
    loop.submit(events, Generation([1], SamplingParams(max_tokens=100)))
    gate.passes.release(1)
    wait_until(lambda: len(events.heard) == 1)
    closing = threading.Thread(target=loop.close)
    closing.start()
    wait_until(lambda: len(events.heard) == 2)
    gate.passes.release(1)
    closing.join(HANG)
    assert not closing.is_alive()
    assert isinstance(events.heard[1], EnginewrightError)
    assert loop.engine.pools["g0"].free_blocks == 64
    with pytest.raises(EnginewrightError, match="closed"):
        loop.submit(Events(), Generation([1], SamplingParams()))
    loop.close()
