"""The time of one token of one request: the median of several decode steps of the engine."""

from __future__ import annotations

from statistics import median

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import context_of

from .options import BenchPlan, new_tokens
from .server import Server

_STEPS, _ROUNDS = 24, 3


def token_seconds(bundle: Bundle, target: str, context: int) -> float:
    """Measures the seconds of a decode step of one request after ``context`` tokens, or after as many as fit into the
    model's context.

    Raises the errors of ``open_executor``.
    """
    before = max(1, min(context, context_of(bundle, None, target) - new_tokens(_STEPS)))
    server = Server(bundle, target, BenchPlan((), (1,), (before,), _STEPS))
    try:
        return median(seconds for _ in range(_ROUNDS) for seconds in server.decode(1, before, _STEPS))
    finally:
        server.close()
