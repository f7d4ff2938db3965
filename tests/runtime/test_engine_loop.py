"""The thread that runs the engine: events, aborts, errors, closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from enginewright.plugins.shared.errors import CapacityError, EnginewrightError
from enginewright.runtime.engine import Engine
from enginewright.runtime.engine_loop import EngineLoop
from enginewright.runtime.requests.outputs import StreamPiece
from enginewright.runtime.requests.request import Request
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig


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


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def executor(toy: Callable[..., Any]) -> Any:
    return toy()


@pytest.fixture
def loop(executor: Any) -> Iterator[EngineLoop]:
    made = EngineLoop(Engine(executor, SchedulerConfig()))
    yield made
    made.close()
    executor.close()


def test_a_request_is_heard_to_its_end(loop: EngineLoop) -> None:
    for _ in range(3):  # the thread is idle between
        events = Events()
        loop.submit(Request([1, 2], SamplingParams(max_tokens=3)), events)
        events.end.result(10)
        assert [p.finish_reason for p in events.heard if isinstance(p, StreamPiece)] == [None, None, "length"]


def test_an_aborted_request_is_not_heard_again(loop: EngineLoop, executor: Any) -> None:
    gate, events, request = Gate(executor), Events(), Request([1], SamplingParams(max_tokens=50))
    loop.submit(request, events)
    gate.passes.release(2)
    wait(lambda: len(events.heard) == 2)
    loop.abort(request)
    gate.passes.release(100)
    wait(lambda: loop.engine.pools["g0"].free_blocks == 64)
    assert len(events.heard) == 2 and request.finish_reason == "abort"
    loop.abort(request)  # once more does nothing


def test_others_go_on_when_one_is_aborted(loop: EngineLoop, executor: Any) -> None:
    gate, kept, dropped = Gate(executor), Events(), Request([1], SamplingParams(max_tokens=50))
    loop.submit(dropped, Events())
    loop.submit(Request([2], SamplingParams(max_tokens=5)), kept)
    gate.arrived.acquire()
    loop.abort(dropped)  # while a step with it runs
    gate.passes.release(100)
    kept.end.result(10)
    assert len(kept.heard) == 5


def test_an_error_of_the_executor_reaches_everybody_and_the_loop_lives_on(loop: EngineLoop, executor: Any) -> None:
    executor.fail = ValueError("bad step")
    listeners = [Events(), Events()]
    for events in listeners:
        loop.submit(Request([1], SamplingParams(max_tokens=5)), events)
    for events in listeners:
        events.end.result(10)
        (error,) = events.heard
        assert isinstance(error, EnginewrightError) and "bad step" in str(error)
        assert isinstance(error.__cause__, ValueError)
    executor.fail = None
    wait(lambda: not loop.engine.has_work())
    events = Events()
    loop.submit(Request([1], SamplingParams(max_tokens=2)), events)
    events.end.result(10)
    assert len(events.heard) == 2
    wait(lambda: loop.engine.pools["g0"].free_blocks == 64)


def test_too_little_memory_for_a_step_is_a_capacity_error(loop: EngineLoop, executor: Any) -> None:
    executor.fail = CapacityError("no memory for a step of this size")
    events = Events()
    loop.submit(Request([1], SamplingParams(max_tokens=5)), events)
    events.end.result(10)
    (error,) = events.heard
    assert isinstance(error, CapacityError) and "the engine failed" in str(error)


def test_aborting_what_never_reached_the_engine_harms_nobody(loop: EngineLoop, executor: Any) -> None:
    gate, kept, lost = Gate(executor), Events(), Request([1], SamplingParams())
    loop.submit(Request([2], SamplingParams(max_tokens=5)), kept)
    gate.arrived.acquire()
    loop._listeners[lost] = Events()  # as a Ctrl-C in the middle of submit leaves it
    loop.abort(lost)
    gate.passes.release(100)
    kept.end.result(10)
    assert [p.finish_reason for p in kept.heard if isinstance(p, StreamPiece)][-1] == "length"


@pytest.mark.parametrize("begins", [False, True])
def test_a_ctrl_c_at_the_start_of_a_run_does_not_block_the_next(
    begins: bool, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if begins:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        lost = Request([1], SamplingParams(max_tokens=2))
        with pytest.raises(KeyboardInterrupt):
            loop.submit(lost, Events())
    loop.abort(lost)
    events = Events()
    loop.submit(Request([1], SamplingParams(max_tokens=2)), events)
    events.end.result(10)
    assert len(events.heard) == 2
    wait(lambda: loop.engine.pools["g0"].free_blocks == 64)


def test_a_thread_that_the_system_refuses(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    refusal, request = Events(), Request([1], SamplingParams(max_tokens=2))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(CapacityError, match="the engine's thread can't be started: can't start new thread"):
            loop.submit(request, refusal)
        loop.abort(request)  # which needs no thread
    events = Events()
    loop.submit(Request([1], SamplingParams(max_tokens=2)), events)
    events.end.result(10)
    assert len(events.heard) == 2 and refusal.heard == []


def test_the_thread_ends_with_the_work(loop: EngineLoop) -> None:
    events = Events()
    loop.submit(Request([1], SamplingParams(max_tokens=2)), events)
    events.end.result(10)
    wait(lambda: not any(t.name == "enginewright-engine" for t in threading.enumerate()))


def test_a_stream_may_be_collected_anywhere(loop: EngineLoop, executor: Any) -> None:
    """Also by a thread that is in the middle of telling the others: the garbage collector runs wherever it likes."""
    dropped, events = Request([1], SamplingParams(max_tokens=50)), Events()
    gate = Gate(executor)

    def collects(event: StreamPiece | EnginewrightError) -> None:
        loop.abort(dropped)
        events(event)

    loop.submit(dropped, Events())
    loop.submit(Request([2], SamplingParams(max_tokens=2)), collects)
    gate.passes.release(100)
    events.end.result(10)
    assert len(events.heard) == 2 and dropped.finish_reason == "abort"


def test_closing_from_within_a_step_waits_for_nothing(loop: EngineLoop) -> None:
    closed: Future[bool] = Future()

    def closes(event: StreamPiece | EnginewrightError) -> None:
        if not isinstance(event, EnginewrightError):
            closed.set_result(loop.close())

    loop.submit(Request([1], SamplingParams(max_tokens=50)), closes)
    assert closed.result(10) is False
    wait(lambda: not loop.engine.has_work())
    assert loop.close() is True


def test_what_never_fits_is_refused_at_once(loop: EngineLoop) -> None:
    events = Events()
    with pytest.raises(CapacityError, match="memory: "):
        loop.submit(Request([1], SamplingParams(max_tokens=1000)), events)
    assert events.heard == []


def test_closing_ends_what_runs_and_refuses_what_comes(loop: EngineLoop, executor: Any) -> None:
    gate, events = Gate(executor), Events()
    loop.submit(Request([1], SamplingParams(max_tokens=100)), events)
    gate.passes.release(1)
    wait(lambda: len(events.heard) == 1)
    closing = threading.Thread(target=loop.close)
    closing.start()
    wait(lambda: len(events.heard) == 2)
    gate.passes.release(1)
    closing.join(10)
    assert not closing.is_alive()
    assert isinstance(events.heard[1], EnginewrightError)
    assert loop.engine.pools["g0"].free_blocks == 64
    with pytest.raises(EnginewrightError, match="closed"):
        loop.submit(Request([1], SamplingParams()), Events())
    loop.close()
