"""A helper that raises costs its result: the fallback comes, the error is counted, the first of a kind is logged."""

from __future__ import annotations

import logging
import queue
from logging.handlers import QueueHandler

import pytest

from enginewright.runtime.shared.counters import Counters
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.helpers import guarded


class Oracle:
    """A helper whose every method raises ``fails``, if it is set."""

    name = "delphi"

    def __init__(self) -> None:
        self.fails: Exception | None = None

    def ask(self, number: int, *, twice: bool = False) -> int:
        if self.fails is not None:
            raise self.fails
        return number * (2 if twice else 1)

    @property
    def mood(self) -> str:
        if self.fails is not None:
            raise self.fails
        return "good"


FALLBACKS = {"ask": lambda number, *, twice=False: -number, "mood": "unknown"}


def test_the_fallback_comes_and_the_error_is_counted() -> None:
    oracle, counters = Oracle(), Counters()
    wrapped = guarded("oracle", oracle, FALLBACKS, counters)
    assert isinstance(wrapped, Oracle)
    assert (wrapped.ask(3, twice=True), wrapped.mood, wrapped.name, counters.helper_errors) == (6, "good", "delphi", {})
    oracle.fails = ZeroDivisionError("no")
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger, handler = logging.getLogger("enginewright.engine"), QueueHandler(records)
    logger.addHandler(handler)
    try:
        assert [wrapped.ask(n) for n in (3, 4)] == [-3, -4] and wrapped.mood == "unknown"
        wrapped.fails = KeyError("other")  # set on the helper
        assert wrapped.ask(5, twice=True) == -5 and isinstance(oracle.fails, KeyError)
    finally:
        logger.removeHandler(handler)
    assert counters.helper_errors == {"oracle": 4}
    assert [records.get_nowait().getMessage().split(",")[0] for _ in range(records.qsize())] == [
        "oracle: ask failed",
        "oracle: mood failed",
        "oracle: ask failed",
    ], "the first of each method and type"


def test_what_is_set_later_is_wrapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, counters = Oracle(), Counters()
    wrapped = guarded("oracle", oracle, FALLBACKS, counters)

    def fails(number: int) -> int:
        raise ValueError(number)

    monkeypatch.setattr(wrapped, "ask", fails)
    assert wrapped.ask(7) == -7 and counters.helper_errors == {"oracle": 1}


def test_a_refusal_and_what_ends_the_process_go_to_the_caller() -> None:
    oracle, counters = Oracle(), Counters()
    wrapped = guarded("oracle", oracle, FALLBACKS, counters, frozenset({"ask"}))
    for error in (RequestError("no"), KeyboardInterrupt()):
        oracle.fails = error  # type: ignore[assignment]
        with pytest.raises(type(error)):
            wrapped.ask(1)
    oracle.fails = OSError()
    assert wrapped.ask(1) == -1 and counters.helper_errors == {"oracle": 1}
    assert counters.call("other", "it", lambda: 1, 2) == 1 and counters.call("other", "it", lambda: 1 // 0, 2) == 2
    assert counters.helper_errors == {"oracle": 1, "other": 1}
