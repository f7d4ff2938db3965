"""Reads an engine's figures for the page's live view: counts, states and times, never prompts or tenants.

Steps record nothing for it. A request for the view reads the requests, pools and scheduler, on a thread other than the
engine's. Steps run meanwhile, so figures may be a step apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ...engine.llm import LLM
from ...kv_cache.block_pool import BlockPool
from ...requests.request import Request
from ...requests.request_class import RequestClass
from ...scheduler.continuous import ContinuousScheduler
from ...tasks.base import Prepared

MOST_ROWS = 128
"""The most requests that are listed one by one. The counts include all requests."""
RECENT = 256
"""The number of ended requests of a class, the last ones, whose times are used."""
_SLICE = 4096
"""Blocks that are read at a time, in less than a millisecond, so that the engine's thread isn't held up."""

Times = tuple[float, float, float | None]
"""Three times of a request in seconds: waiting, until the first token, and the mean per further token (None
without).
"""


class Live:
    """Collects an engine's figures. ``left`` is called for each task that ends, ``now`` for each update of the view."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ended: dict[RequestClass, deque[Times]] = {}
        self._counts: dict[RequestClass, int] = {}
        self._written = self._read = 0  # tokens of requests that are over
        self._most = [0, 0]

    def left(self, prepared: Prepared[Any]) -> None:
        """Records the tokens and times of a task that has ended or was aborted."""
        for request in prepared.requests:
            self._written += request.output_length
            self._read += _read(request)
            if request.finish_reason in ("stop", "length") and request.token_times is not None:
                first, last = request.token_times
                further = request.output_length - 1
                started = request.queued if request.started is None else request.started
                of = request.request_class
                times = (
                    started - request.queued,
                    first - request.queued,
                    (last - first) / further if further > 0 else None,
                )
                self._ended.setdefault(of, deque(maxlen=RECENT)).append(times)
                self._counts[of] = self._counts.get(of, 0) + 1

    def now(self, prepared: Iterable[Prepared[Any]]) -> dict[str, Any]:
        """Returns the present figures, ready for JSON. ``prepared``: the tasks that haven't ended."""
        engine = self._llm.engine
        scheduler = engine.scheduler
        pulse = self._llm.pulse()
        requests = [request for one in prepared for request in one.requests]
        written = self._written + sum(one.output_length for one in requests)
        read = self._read + sum(map(_read, requests))
        self._most = [max(self._most[0], written), max(self._most[1], read)]  # one may be leaving just now
        requests = [request for request in requests if not request.finished]
        running, paused = set(scheduler.running), scheduler.policy.paused
        speculation: dict[str, Any] | None = scheduler.drafts.describe()
        groups = scheduler.groups
        return {
            "time": time.monotonic(),
            "steps": pulse.steps,
            "step_seconds": pulse.step_seconds,
            "expected_seconds": pulse.expected_seconds,
            "running": pulse.running,
            "waiting": pulse.waiting,
            "preemptions": pulse.count("num_preemptions"),
            "tokens": self._most[0],
            "prompt_tokens": self._most[1],
            "batch": _batch(scheduler) if running else None,
            "requests": [_row(one, one in running, one in paused) for one in requests[:MOST_ROWS]],
            "blocks": {name: _blocks(pool, groups[name].block_size) for name, pool in engine.pools.items()},
            "prefix_cache": asdict(scheduler.cache.use),
            "speculation": speculation and {name: speculation[name] for name in ("drafted", "accepted", "sources")},
            "classes": self._classes(requests, running),
        }

    def _classes(self, requests: Iterable[Request], running: set[Any]) -> list[dict[str, Any]]:
        """Returns the figures of each class that has or had requests."""
        now: dict[RequestClass, list[int]] = {of: [0, 0] for of in list(self._ended)}
        for one in requests:
            now.setdefault(one.request_class, [0, 0])[one not in running] += 1
        rows = []
        for of, (runs, waits) in sorted(now.items(), key=lambda item: (item[0].priority, item[0].name)):
            times = list(self._ended.get(of, ()))
            row: dict[str, Any] = {"name": of.name, "priority": of.priority, "running": runs, "waiting": waits}
            row |= {"ended": self._counts.get(of, 0), "ttft_target": of.ttft, "tpot_target": of.tpot}
            for name, values in zip(("queued", "ttft", "tpot"), zip(*times, strict=True), strict=False):
                row[name] = _middle_and_late([one for one in values if one is not None])
            rows.append(row)
        return rows


def _read(request: Request) -> int:
    """Returns the number of a request's prompt tokens that were computed rather than found in the prefix cache."""
    read = request.prompt_length if request.output_length else min(request.computed, request.prompt_length)
    return max(read - (request.cached_tokens or 0), 0)


def _row(request: Request, runs: bool, pauses: bool) -> dict[str, Any]:
    state = "writes" if request.computed >= request.prompt_length - 1 else "reads"
    return {
        "id": request.request_id,
        "class": request.request_class.name,
        "state": "waits" if not runs else "pauses" if pauses else state,
        "prompt": request.prompt_length,
        "cached": request.cached_tokens or 0,
        "read": min(request.computed, request.prompt_length),
        "written": request.output_length,
        "drafted": request.drafted,
        "accepted": request.accepted,
        "blocks": sum(len(table) for table in list(request.tables.values())),
        "seconds": time.monotonic() - request.queued,
    }


def _batch(scheduler: ContinuousScheduler) -> dict[str, int]:
    """Returns counts of the last step: requests that decode, drafted tokens, and prompt tokens."""
    chunks = scheduler.chunks
    drafted = sum(len(one.draft) for one in chunks)
    decodes = sum(one.samples and one.count - len(one.draft) == 1 for one in chunks)
    return {"decodes": decodes, "drafted": drafted, "prompt": sum(one.count for one in chunks) - decodes - drafted}


def _blocks(pool: BlockPool, size: int) -> dict[str, Any]:
    """Returns the states of a pool's blocks in order, run-length encoded as [state, count].

    ``size``: tokens of a block.
    """
    states = bytearray()
    for first in range(0, pool.total_blocks, _SLICE):
        states += pool.states(first, first + _SLICE)
        time.sleep(0)
    runs = [[state, sum(1 for _ in of)] for state, of in groupby(states)]
    return {"block_size": size, "total": pool.total_blocks, "evictions": pool.evictions, "runs": runs}


def _middle_and_late(values: list[float]) -> list[float] | None:
    """Returns the median and the 95th percentile; None without values."""
    if not values:
        return None
    values.sort()
    return [values[len(values) // 2], values[min(len(values) * 19 // 20, len(values) - 1)]]
