"""What an ``LLM`` is given, and what it says of itself."""

from __future__ import annotations

import math
import os
import time
from typing import Any, NamedTuple

from ..executors.base import Executor
from ..executors.static_shapes import StaticShapes
from ..kv_cache.pool_plan import PoolPlan
from ..scheduler.limits import SchedulerConfig
from ..scheduler.options import scheduling_of
from ..shared.contracts import ExecutorCaps, ModelInfo
from ..shared.errors import RequestError, shown
from .arguments import check_int, check_path, check_type, checked_name
from .engine import Engine
from .engine_loop import EngineLoop

_NAME = (str, type(None)), "a name, or None"
_FLAG = (bool,), "True or False"
_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "path": ((str, os.PathLike), "the path of a bundle"),
    **dict.fromkeys(("target", "isa", "provider"), _NAME),
    "prefix_folder": ((str, os.PathLike, type(None)), "the path of a folder, or None"),
    "prefix_folder_days": ((int, float), "a number of days"),
    "load": ((str,), '"map" or "read"'),
    "context": ((int, type(None)), "a number of tokens, or None"),
    "memory": ((int, str, type(None)), 'bytes, or a size such as "512MiB"'),
    **dict.fromkeys(("buckets", "prefix_cache"), _FLAG),
    "verify": ((bool, type(None)), "True, False or None"),
}
"""Types of LLM's options, and what an error says they must be."""

MOST_DAYS = 1_000_000

OFFLINE_PROMPT = 2048
"""Most tokens of prompts in a step, where nobody waits for single tokens."""


def check_options(**given: object) -> None:
    """Raises RequestError naming the option whose type is wrong."""
    for name, value in given.items():
        check_type(name, value, *_OPTIONS[name])
        if _OPTIONS[name] is _NAME and value is not None:
            checked_name(name, value)
        if name in ("path", "prefix_folder") and isinstance(value, (str, os.PathLike)):
            check_path(name, value)
    if not 0 <= (days := given.get("prefix_folder_days", 0)) <= MOST_DAYS and days != math.inf:  # type: ignore[operator]
        hint = f"It must be a number from 0 to {MOST_DAYS}, or inf."
        raise RequestError(f"prefix_folder_days: {shown(days)} is out of range", hint=hint)
    if given.get("context") is not None:
        check_int("context", given["context"], 0, 1 << 40)


def scheduler_config(
    max_requests: int, prefill_chunk: int | None, prefix_cache: bool, scheduling: object, speculate: object = None
) -> SchedulerConfig:
    """Makes the scheduler's limits of what ``LLM`` was given; see ``scheduling_of``. Raises RequestError."""
    if speculate is not None and (not isinstance(speculate, (str, os.PathLike)) or speculate == ""):
        hint = 'Pass "auto", "lookup", the path of a draft model\'s bundle, or None.'
        raise RequestError(f"speculate: {shown(speculate)} isn't a way to guess tokens", hint=hint)
    if speculate is not None:
        check_path("speculate", speculate)
    scheduling = scheduling_of(scheduling)
    most = ExecutorCaps().max_tokens
    usual = OFFLINE_PROMPT if scheduling is not None and scheduling.offline else SchedulerConfig().prefill_tokens
    chunk = usual if prefill_chunk is None else prefill_chunk
    max_requests = check_int("max_requests", max_requests, 1, most)
    chunk = check_int("prefill_chunk", chunk, 1, most)
    ahead = None if speculate == "auto" else speculate is not None
    return SchedulerConfig(max_requests, chunk, None, prefix_cache, scheduling, speculate=ahead)


class Pulse(NamedTuple):
    """How an engine is doing.

    Attributes:
        step_seconds: how long the step that runs has taken; 0 for none.
        expected_seconds: how long it should take; 0 where that isn't known yet.
        running, waiting: requests.
        blocks_used: share of the KV cache's blocks that requests hold.
        steps: that were taken.
        preemptions: how often a request had to give its blocks up.
    """

    step_seconds: float
    expected_seconds: float
    running: int
    waiting: int
    blocks_used: float
    steps: int
    preemptions: int


def pulse(loop: EngineLoop) -> Pulse:
    """See ``LLM.pulse``."""
    began, scheduler = loop.step_began, loop.engine.scheduler
    pools = scheduler.pools.values()
    used = max((1 - pool.free_blocks / max(pool.total_blocks, 1) for pool in pools), default=0.0)
    return Pulse(
        0.0 if began is None else time.monotonic() - began,
        scheduler.expected_seconds(),
        len(scheduler.running),
        len(scheduler.waiting),
        used,
        loop.steps,
        scheduler.preemptions,
    )


def describe(model: ModelInfo, executor: Executor, engine: Engine) -> dict[str, Any]:
    """See ``LLM.info``."""
    plan, scheduler = PoolPlan.from_blocks(executor.cache_groups, executor.blocks), engine.scheduler
    return {
        "model": model.name,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "executor": executor.describe(),
        "kv_cache": str(plan),
        "kv_cache_bytes": plan.bytes,
        "kv_cache_tokens": plan.tokens,
        "kv_blocks_free": {name: pool.free_blocks for name, pool in engine.pools.items()},
        "prefix_cache": scheduler.cache.statistics(scheduler.running),
        "preemptions": engine.preemptions,
        "scheduling": scheduler.policy.describe(),
        "speculation": scheduler.drafts.describe(),
        "buckets": executor.statistics() if isinstance(executor, StaticShapes) else [],
    }
