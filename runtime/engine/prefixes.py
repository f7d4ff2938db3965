"""Folders of cached prefixes: opens them for an executor, and writes and reads the prefix of one prompt."""

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
    memory = executor.inner if isinstance(executor, StaticShapes) else executor
    if cache.index is None or not cache.prefixes.on_disk or not isinstance(memory, BlockMemory):
        raise RequestError(
            f"prefix_folder: target {executor.describe()['target']!r} keeps no prefixes there, prefix_cache is off, or "
            "ranks are on several machines",
            hint="Leave it out, or open target 'cpu', or 'cuda' of an exact recipe, with the prefix cache on.",
        )
    store = BlockStore(
        Path(folder).absolute(), memory.cache_identity, most_bytes=parse_size(size), most_age=days * 24 * 3600
    )
    return DiskTier(store, memory, cache.kinds.values(), cache.index.block_size)


@contextmanager
def opened_tier(executor: Executor, cache: CacheManager, folder: str | os.PathLike[str]) -> Iterator[DiskTier]:
    """Opens a folder as ``open_tier`` does, and closes it at the end of the context."""
    disk = open_tier(executor, cache, folder)
    try:
        yield disk
    finally:
        disk.store.close()


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
    disk.store.flush()
    return disk.known(cache.index.root(request.namespace), request.items[: match.tokens], size).tokens


def load_prefix(cache: CacheManager, request: Request, disk: DiskTier) -> int:
    """Reads the blocks of a request's prompt from ``disk`` into the pool.

    Returns the number of the prompt's first tokens that are cached then. Nothing is written to ``disk``. Blocks that
    are evicted to make room go to the engine's own folder, if it has one.
    """
    try:
        if not cache.begin(Candidate(request, disk=disk)):
            return 0
        return request.computed
    finally:
        cache.release(request)
