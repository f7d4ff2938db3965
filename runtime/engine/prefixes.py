"""Prefixes in folders: opened for an executor, written and read for one prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..executors.base import Executor
from ..executors.static_shapes import StaticShapes
from ..kv_cache.block_store import BlockStore
from ..kv_cache.cache_manager import CacheManager
from ..kv_cache.candidate import Candidate
from ..kv_cache.disk_tier import BlockMemory, DiskTier
from ..requests.request import Request
from ..shared.errors import RequestError
from ..shared.memory import parse_size
from ..tasks.arguments import check_path

DEFAULT_SIZE = "8GiB"
DEFAULT_DAYS = 30.0


def open_tier(
    executor: Executor,
    cache: CacheManager,
    folder: str | os.PathLike[str],
    size: int | str = DEFAULT_SIZE,
    days: float = DEFAULT_DAYS,
) -> DiskTier:
    """A folder for the blocks of an executor.

    Raises RequestError if its target, or its configuration, keeps no prefixes; what is wrong with the folder itself is
    a warning, and in ``info()``.
    """
    check_path("folder", folder)
    memory = executor.inner if isinstance(executor, StaticShapes) else executor
    if cache.index is None or not cache.prefixes.on_disk or not isinstance(memory, BlockMemory):
        raise RequestError(
            f"prefix_folder: target {executor.describe()['target']!r} keeps no prefixes there, prefix_cache is off, or "
            "ranks are on several machines",
            hint="Leave it out, or open the bundle's target 'cpu' with the prefix cache on.",
        )
    store = BlockStore(
        Path(folder).absolute(), memory.cache_identity, most_bytes=parse_size(size), most_age=days * 24 * 3600
    )
    return DiskTier(store, memory, list(cache.groups), cache.index.block_size)


@contextmanager
def opened_tier(executor: Executor, cache: CacheManager, folder: str | os.PathLike[str]) -> Iterator[DiskTier]:
    """``open_tier``, closed at the end."""
    disk = open_tier(executor, cache, folder)
    try:
        yield disk
    finally:
        disk.store.close()


def save_prefix(cache: CacheManager, request: Request, disk: DiskTier) -> int:
    """Writes the blocks of a request's prompt that the pool has; returns how many tokens they are."""
    assert cache.index is not None
    size = cache.index.block_size
    match = cache.index.find(request.namespace, request.items, len(request.items))
    whole = [node for node in match.nodes[: match.tokens // size] if len(node.items) == size]
    for node in reversed(whole):
        disk.leaving(node, wait=True)
    disk.store.flush()
    return size * sum(disk.holds(node) for node in whole)


def load_prefix(cache: CacheManager, request: Request, disk: DiskTier) -> int:
    """Reads the blocks of a request's prompt into the pool; returns how many of its tokens are there then.

    ``disk`` is read alone: what is evicted to make room for them is written to the engine's own tier, if it has one.
    """
    try:
        if not cache.begin(Candidate(request, disk=disk)):
            return 0
        return request.computed
    finally:
        cache.release(request)
