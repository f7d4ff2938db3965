"""``Pulse``: the load of an engine, which other threads read without waiting for its step.

A gauge is one field of ``Pulse``. Its declaration has a function that measures it, one that merges the values of
several engines, and the name and help text of its metric. All other code uses the fields: an engine's process sends
them, replicas are merged, and ``server.metrics`` shows the fields that have a metric.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from .engine_loop import EngineLoop

Merge = Callable[[Sequence[Any]], Any]


class Metric(msgspec.Struct, frozen=True):
    """The metric of a gauge.

    Attributes:
        name: the metric's name, without the prefix.
        text: the metric's help text.
        counts: True for a counter, whose value only rises.
    """

    name: str
    text: str
    counts: bool = False


def gauge(
    measure: Callable[[EngineLoop], Any], merge: Merge = sum, default: Any = 0, metric: Metric | None = None
) -> Any:
    """Declares a field of ``Pulse``.

    Args:
        measure: returns the value for an engine; called from another thread than the engine's.
        merge: combines the values of several engines.
        default: the value of an engine that hasn't reported yet.
        metric: the metric that shows it; None if it isn't shown.
    """
    return field(default=default, metadata={"measure": measure, "merge": merge, "metric": metric})


def _step(loop: EngineLoop) -> tuple[float, float]:
    began = loop.step_began
    return 0.0 if began is None else time.monotonic() - began, loop.engine.scheduler.expected_seconds()


def _blocks_used(loop: EngineLoop) -> float:
    pools = loop.engine.scheduler.pools.values()
    return max((1 - pool.free_blocks / max(pool.total_blocks, 1) for pool in pools), default=0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _all_counts(values: Sequence[Sequence[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    return tuple(sum((Counter(dict(one)) for one in values), Counter()).items())


@dataclass(frozen=True)
class Pulse:
    """The load of one engine, or of several engines together.

    Attributes:
        step: the seconds that the current step has taken (0 between steps), and the seconds that a step is expected to
            take (0 if unknown). For several engines, the largest values.
        running, waiting: numbers of requests.
        blocks_used: the share of the KV cache's blocks that requests hold, from 0 to 1.
        steps: the number of steps that have begun.
        counters: (name, value) of the counters of ``shared.counters`` that aren't zero.
        helper_errors: (name, number of errors) of each helper that has failed; see ``scheduler.helpers``.
    """

    step: tuple[float, float] = gauge(_step, max, (0.0, 0.0))
    running: int = gauge(
        lambda loop: len(loop.engine.scheduler.running), metric=Metric("num_requests_running", "Running requests.")
    )
    waiting: int = gauge(
        lambda loop: len(loop.engine.scheduler.waiting), metric=Metric("num_requests_waiting", "Waiting requests.")
    )
    blocks_used: float = gauge(
        _blocks_used, _mean, 0.0, Metric("kv_cache_usage_perc", "Used share of the KV cache's blocks, from 0 to 1.")
    )
    steps: int = gauge(lambda loop: loop.steps)
    counters: tuple[tuple[str, int], ...] = gauge(
        lambda loop: tuple(loop.engine.scheduler.counters.values.items()), _all_counts, ()
    )
    helper_errors: tuple[tuple[str, int], ...] = gauge(
        lambda loop: tuple(loop.engine.scheduler.counters.helper_errors.items()),
        _all_counts,
        (),
    )

    def count(self, counter: str) -> int:
        """Returns the value of a counter of ``shared.counters``."""
        return dict(self.counters).get(counter, 0)

    @property
    def step_seconds(self) -> float:
        """The seconds that the current step has taken; 0 between steps."""
        return self.step[0]

    @property
    def expected_seconds(self) -> float:
        """The seconds that a step is expected to take; 0 if unknown."""
        return self.step[1]

    @classmethod
    def measured(cls, loop: EngineLoop) -> Pulse:
        """Returns the present load of an engine."""
        return cls(**{one.name: one.metadata["measure"](loop) for one in fields(cls)})

    @classmethod
    def merged(cls, pulses: Sequence[Pulse]) -> Pulse:
        """Returns the load of several engines as one; the defaults if there are none."""
        if not pulses:
            return cls()
        return cls(**{one.name: one.metadata["merge"]([getattr(p, one.name) for p in pulses]) for one in fields(cls)})


METRICS: dict[str, Metric] = {one.name: metric for one in fields(Pulse) if (metric := one.metadata["metric"])}
"""Field of ``Pulse`` -> its metric, for fields that have a metric."""
