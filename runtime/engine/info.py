"""Checks the options of an ``LLM``, and describes a loaded one."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..executors.base import Executor
from ..executors.static_shapes import StaticShapes
from ..executors.target import Offload
from ..kv_cache.block_pool import DividedPool
from ..kv_cache.block_store import own_folder
from ..kv_cache.kinds.table import token_bytes
from ..kv_cache.pool_plan import PoolPlan
from ..ranks.partition import MOST_RANKS, Partition
from ..requests.names import checked_name
from ..scheduler.limits import SchedulerConfig
from ..scheduler.options import scheduling_of
from ..shared.contracts import ExecutorCaps, ModelInfo
from ..shared.errors import OffloadError, RequestError, shown
from ..shared.memory import parse_size
from ..tasks.arguments import check_int, check_path, check_type
from ..tasks.context import kind_of
from .engine import Engine

_NAME = (str, type(None)), "a name, or None"
_FLAG = (bool,), "True or False"
_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "path": ((str, os.PathLike), "the path of a bundle or model, or a model's id on the Hub"),
    "recipe": ((str, os.PathLike, type(None)), "a recipe's name or file, or None"),
    **dict.fromkeys(("target", "isa", "provider"), _NAME),
    "prefix_folder": ((str, os.PathLike, type(None)), "the path of a folder, or None"),
    "prefix_folder_days": ((int, float), "a number of days"),
    "offload_folder": ((str, os.PathLike, type(None)), "the path of a folder, or None"),
    "load": ((str,), '"map" or "read"'),
    "context": ((int, type(None)), "a number of tokens, or None"),
    "memory": ((int, str, type(None)), 'bytes, or a size such as "512MiB"'),
    "ranks": ((int, type(None)), "a number of ranks, or None"),
    "partition": ((str, type(None)), 'a partition such as "tensor=2", or None'),
    "rank_timeout": ((int, float), "a number of seconds"),
    "ray": ((str, type(None)), "the address of a Ray cluster, or None"),
    **dict.fromkeys(("buckets", "prefix_cache"), _FLAG),
    "verify": ((bool, type(None)), "True, False or None"),
}
"""Option of LLM -> its types, and their description in errors."""

MOST_DAYS = 1_000_000
MOST_RANK_SECONDS = 1e9

RUNS_SECONDS = 8e-3
"""The value of ``SchedulerConfig.runs_seconds``. A reader of a stream doesn't notice such a short delay.

Steps that take at least half of it run once each.
"""
OFFLINE_PROMPT = 2048
"""The most prompt tokens of a step with the policy "offline", where nobody waits for single tokens."""


def check_options(**given: object) -> None:
    """Raises RequestError naming an option whose type is wrong or whose value is out of range."""
    for name, value in given.items():
        check_type(name, value, *_OPTIONS[name])
        if _OPTIONS[name] is _NAME and value is not None:
            checked_name(name, value)
        if name in ("path", "prefix_folder", "offload_folder") and isinstance(value, (str, os.PathLike)):
            check_path(name, value)
    if not 0 <= (days := given.get("prefix_folder_days", 0)) <= MOST_DAYS and days != math.inf:  # type: ignore[operator]
        hint = f"It must be a number from 0 to {MOST_DAYS}, or inf."
        raise RequestError(f"prefix_folder_days: {shown(days)} is out of range", hint=hint)
    if not 0 < given.get("rank_timeout", 1) <= MOST_RANK_SECONDS:  # type: ignore[operator]
        hint = f"It must be more than 0 seconds, and at most {MOST_RANK_SECONDS:g}."
        raise RequestError(f"rank_timeout: {shown(given['rank_timeout'])} is out of range", hint=hint)
    if given.get("context") is not None:
        check_int("context", given["context"], 0, 1 << 40)


def partition_of(ranks: int | None, partition: str | None) -> Partition:
    """Returns the partition for these arguments of ``LLM``; one rank if both are None. Raises RequestError."""
    check_options(ranks=ranks, partition=partition)
    count = None if ranks is None else check_int("ranks", ranks, 1, MOST_RANKS)
    if partition is None:
        return Partition.parse(str(count or 1))
    parsed = Partition.parse(partition)
    if count not in (None, parsed.ranks):
        hint = "Leave one of the two out."
        raise RequestError(f"ranks: {ranks} isn't the {parsed.ranks} of partition {partition}", hint=hint)
    return parsed


def check_ray(ray: str | None, cut: Partition, prefix_folder: object) -> None:
    """Raises RequestError if the argument ``ray`` of ``LLM`` is used with one rank (``cut``), or with a prefix
    folder.
    """
    check_options(ray=ray)
    if ray is not None and cut.ranks == 1:
        hint = "Pass ranks=N or partition=... as well, or leave ray out."
        raise RequestError("ray: it is where ranks are, and there is one, which is this process", hint=hint)
    if ray is not None and prefix_folder is not None:
        hint = "Leave one of the two out: prefixes stay in memory."
        raise RequestError("prefix_folder: ranks on several machines keep no prefixes on a disk", hint=hint)


def offload_of(folder: str | os.PathLike[str] | None, size: int | str, prefix_folder: object) -> Offload | None:
    """Returns ``Placement.offload`` for these arguments of ``LLM``; None without a folder. Raises RequestError,
    OffloadError.
    """
    check_options(offload_folder=folder)
    bytes_ = parse_size(size, "offload_size")
    if folder is None:
        return None
    if prefix_folder is not None:
        raise RequestError("offload_folder: it doesn't go with prefix_folder yet", hint="Leave one of the two out.")
    path = Path(folder)
    try:
        own_folder(path)
    except OSError as e:
        raise OffloadError(f"offload_folder: {path}: {e.strerror or e}") from e
    return Offload(str(path.absolute()), bytes_)


def scheduler_config(
    max_requests: int,
    prefill_chunk: int | None,
    prefix_cache: bool,
    scheduling: object,
    speculate: object = None,
    states_memory: int | str | None = None,
) -> SchedulerConfig:
    """Returns the scheduler's limits for these arguments of ``LLM``. Raises RequestError."""
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
    states = None if states_memory is None else parse_size(states_memory, "states_memory")
    return SchedulerConfig(max_requests, chunk, None, prefix_cache, scheduling, ahead, states, RUNS_SECONDS)


def of_whole_texts(config: SchedulerConfig, speculate: object) -> SchedulerConfig:
    """Returns the limits without speculation, for a model that computes texts whole.

    Raises RequestError if ``speculate`` asks for speculation.
    """
    if speculate not in ("auto", None):
        raise RequestError(
            f"speculate: {shown(speculate)}, and the model draws no tokens to propose", hint="Leave it out."
        )
    return replace(config, speculate=False)


def describe(model: ModelInfo, executor: Executor, engine: Engine) -> dict[str, Any]:
    """Returns facts about model, executor and scheduler, which are the result of ``LLM.info``."""
    plan, scheduler = PoolPlan.from_blocks(executor.cache_groups, executor.blocks), engine.scheduler
    divided = {name: pool.parts for name, pool in engine.pools.items() if isinstance(pool, DividedPool)}
    held = {name: [part.total_blocks - part.free_blocks for part in parts] for name, parts in divided.items()}
    inner = executor.inner if isinstance(executor, StaticShapes) else executor
    loads: dict[str, Any] = getattr(inner, "expert_loads", dict)()
    offloaded: dict[str, Any] = getattr(inner, "offload_counts", dict)()
    return {
        "model": model.name,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "kind": kind_of(model),
        **({} if model.pooling is None else {"pooling": model.pooling.model_dump(mode="json")}),
        "executor": executor.describe(),
        "kv_cache": str(plan),
        "kv_cache_bytes": offloaded.get("memory_bytes", plan.bytes),
        "kv_cache_tokens": plan.tokens,
        "kv_cache_token_bytes": token_bytes(plan.groups),
        "kv_blocks_free": {name: pool.free_blocks for name, pool in engine.pools.items()},
        **({"kv_blocks_of_ranks": held} if held else {}),
        **({"kv_offload": offloaded} if offloaded else {}),
        **({"experts": loads} if loads else {}),
        "prefix_cache": scheduler.cache.statistics(scheduler.running),
        "preemptions": engine.preemptions,
        "helper_errors": dict(scheduler.counters.helper_errors),
        "scheduling": scheduler.policy.describe(),
        "speculation": scheduler.drafts.describe(),
        "buckets": executor.statistics() if isinstance(executor, StaticShapes) else [],
    }
