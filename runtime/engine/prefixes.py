"""Tiers of cached prefixes: opens them for an executor, and writes and reads the prefix of one prompt."""

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
from ..kv_cache.host_tier import HostCopies, HostTier
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
    """Opens a folder that stores blocks of an executor.

    Args:
        executor: the executor whose blocks are stored.
        cache: its cache manager.
        folder: the folder.
        size: the most bytes of all files, or a size such as "8GiB".
        days: files unused for this many days are deleted.

    Raises RequestError if the executor or its configuration keeps no prefixes on disk. A problem with the folder itself
    is only a warning, and is shown by ``info()``.
    """
    check_path("folder", folder)
    memory = _inner(executor)
    if cache.index is None or not cache.prefixes.tiered or not isinstance(memory, BlockMemory):
        raise RequestError(
            f"prefix_folder: target {executor.describe()['target']!r} keeps no prefixes there, prefix_cache is off, or "
            "ranks are on several machines",
            hint="Leave it out, or open target 'cpu', or 'cuda' of an exact recipe, with the prefix cache on.",
        )
    store = BlockStore(
        Path(folder).absolute(), memory.cache_identity, most_bytes=parse_size(size), most_age=days * 24 * 3600
    )
    return DiskTier(store, memory, cache.kinds.values(), cache.index.block_size)


def open_host_tier(executor: Executor, cache: CacheManager, size: int, disk: DiskTier | None = None) -> HostTier:
    """Reserves main memory for copies of an executor's blocks.

    Args:
        executor, cache: see ``open_tier``.
        size: the bytes.
        disk: the folder to which copies go that leave this memory; None for none.

    Raises:
        RequestError: the executor has its blocks in main memory anyway, or can't copy them.
        CapacityError: the memory is too small for a block, or isn't there.
    """
    memory = _inner(executor)
    if cache.index is None or not cache.prefixes.tiered or not isinstance(memory, HostCopies):
        raise RequestError(
            f"prefix_memory: target {executor.describe()['target']!r} copies no blocks to main memory, prefix_cache is "
            "off, or there are several ranks",
            hint="Leave it out, or open target 'cuda' on one GPU. The cpu target's blocks are in main memory: pass a "
            "larger memory.",
        )
    return HostTier(memory, size, cache.kinds.values(), cache.index.block_size, executor.blocks, disk)


def close_tier(cache: CacheManager) -> None:
    """Ends the use of a cache's tier. If it has a folder, all blocks that can be found are written there first."""
    if (tier := cache.tier) is not None:
        tier.spill()
        cache.tier = None
        cache.save_all(tier)
        tier.close()


def _inner(executor: Executor) -> Executor:
    return executor.inner if isinstance(executor, StaticShapes) else executor


@contextmanager
def opened_tier(executor: Executor, cache: CacheManager, folder: str | os.PathLike[str]) -> Iterator[DiskTier]:
    """Opens a folder as ``open_tier`` does, and closes it at the end of the context."""
    disk = open_tier(executor, cache, folder)
    try:
        yield disk
    finally:
        disk.close()


def save_prefix(cache: CacheManager, request: Request, disk: DiskTier) -> int:
    """Writes the cached blocks of a request's prompt to ``disk``.

    Returns the number of the prompt's first tokens that ``disk`` has then.
    """
    assert cache.index is not None
    size = cache.index.block_size
    match = cache.index.find(request.namespace, request.items, len(request.items))
    nodes = [node for at, node in enumerate(match.nodes) if len(node.items) <= min(match.tokens - at * size, size)]
    for node in reversed(nodes):
        disk.leaving(node, wait=True)
    disk.flush()
    return disk.known(cache.index.root(request.namespace), request.items[: match.tokens], size).tokens


def load_prefix(cache: CacheManager, request: Request, disk: DiskTier) -> int:
    """Reads the blocks of a request's prompt from ``disk`` into the pool.

    Returns the number of the prompt's first tokens that are cached then. Nothing is written to ``disk``. Blocks that
    are evicted to make room go to the engine's own tier, if it has one.
    """
    try:
        if not cache.begin(Candidate(request, tier=disk)):
            return 0
        return request.computed
    finally:
        cache.release(request)
