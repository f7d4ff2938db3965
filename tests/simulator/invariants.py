"""Invariants of blocks between two steps, and of a step before it is submitted."""

from __future__ import annotations

from collections import Counter

import numpy as np

from enginewright.runtime.kv_cache.block_pool import BlockPool, DividedPool
from enginewright.runtime.kv_cache.cache_manager import CacheManager
from enginewright.runtime.kv_cache.prefix_index import NO_BLOCK, Node
from enginewright.runtime.scheduler.continuous import ContinuousScheduler

from .executor import Submitted, check


def step(pending: Submitted, scheduler: ContinuousScheduler) -> None:
    """Tables have blocks that are held, and one holder has each block that is written."""
    step = pending.step
    for name, pool in scheduler.pools.items():
        table, group = step.block_tables[name], scheduler.groups[name]
        total, holders = pool.total_blocks, pool.holders
        held = {block for block in table.ravel().tolist() if 0 <= block < total}
        check(all(map(holders, held)), f"a table of {name} has a block that nobody holds")
        written = {block for block in (step.slots[name] // group.block_size).tolist() if 0 <= block < total}
        several = [block for block in written if holders(block) != 1]  # a pin doesn't own
        check(
            all(holders(block) == 1 + pool.pins(block) for block in several),
            f"a block of {name} is written that several hold",
        )
        if group.window and scheduler.caps.shared_blocks and scheduler.caps.owners == 1:
            computed = step.kv_len - pending.counts
            if scheduler.caps.chains:  # what a step in flight computes gives blocks back when it is over
                computed = np.array([chunk.request.computed for chunk in scheduler.chunks])
            seen = np.maximum(computed - group.window + 1, 0) // group.block_size
            before = table[np.arange(table.shape[1]) < seen[:, None]]
            check((before == NO_BLOCK).all(), f"a block of {name} before the window is still held")


def pending_copies(cache: CacheManager) -> None:
    """Copies that the next step makes: both blocks are held until then."""
    for name, pairs in cache.copies.items():
        pool = cache.pools[name]
        for source, to in pairs:
            check(pool.holders(to) > 0, f"a pending copy to block {to} of {name}, which nobody holds")
            check(pool.holders(source) > 0, f"a pending copy from block {source} of {name}, which nobody holds")


def blocks(scheduler: ContinuousScheduler) -> None:
    """Each block is held as often as tables and pending copies have it, and none is lost."""
    cache = scheduler.cache
    nodes = _nodes(cache)
    for i, (name, pool) in enumerate(scheduler.pools.items()):
        requests = [*scheduler.running, *(r for r in scheduler.queues.leaving if r not in scheduler.running)]
        held = Counter(b for r in requests for b in r.tables.get(name, ()) if b != NO_BLOCK)
        places = getattr(cache.prefixes, "places", {}).values()
        held.update(blocks[i] for place in places for blocks in place.snapshots.values() if blocks[i] != NO_BLOCK)
        holders = list(map(pool.holders, range(pool.total_blocks)))
        for block, count in enumerate(holders):
            if count != held[block]:
                check(count == held[block] + pool.pins(block), f"block {block} of {name}: {count} holders")
        cached, free = _kept_and_free(pool)
        used = [block for block, count in enumerate(holders) if count]
        check(sorted([*cached, *free, *used]) == list(range(pool.total_blocks)), f"a block of {name} is lost")
        if cache.index is not None:
            check(set(cached) <= set(nodes[i]), f"a block of {name} is kept, and nothing finds it")
            check(not set(free) & set(nodes[i]), f"a free block of {name} is found")
    check(all(not r.tables and not r.computed for r in scheduler.waiting), "a request that waits holds blocks")


def _nodes(cache: CacheManager) -> list[dict[int, Node]]:
    """Gives the node of each block that can be found, of each group."""
    by_block: list[dict[int, Node]] = [{} for _ in cache.groups]
    if cache.index is None:
        return by_block
    nodes = list(cache.index._roots.values())
    users = Counter(id(place.node) for place in getattr(cache.prefixes, "places", {}).values())
    for node in nodes:
        check(not node.detached, "what is detached is found")
        check(node.users == users[id(node)], "users of a node")
        nodes += node.children
        for i, block in [pair for blocks in (node.blocks, *node.states.values()) for pair in enumerate(blocks)]:
            if block != NO_BLOCK:
                check(block not in by_block[i], "one block stands for two prefixes")
                by_block[i][block] = node
    check(by_block == cache.index._node_of, "the index by blocks")
    return by_block


def _kept_and_free(pool: BlockPool) -> tuple[list[int], list[int]]:
    parts = pool.parts if isinstance(pool, DividedPool) else [pool]
    cached = [b * len(parts) + o for o, part in enumerate(parts) for of in part._kept.values() for b in of]
    free = [b * len(parts) + o for o, part in enumerate(parts) for b in part._free]
    return cached, free


def all_free(scheduler: ContinuousScheduler) -> None:
    """Nothing is left of requests, when all have ended."""
    blocks(scheduler)
    nothing_held(scheduler.cache)
    check(not scheduler.queues.in_flight and not scheduler.queues.leaving, "requests are in flight after their end")


def nothing_held(cache: CacheManager) -> None:
    """No block is held, and no request has a place in the index."""
    check(all(pool.free_blocks == pool.total_blocks for pool in cache.pools.values()), "blocks are held after the end")
    check(not getattr(cache.prefixes, "places", {}), "a request has a place in the index after its end")
