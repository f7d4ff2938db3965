"""Plans the number of KV blocks of each cache group within a memory budget, and the tokens that they hold."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import msgspec

from ..shared.contracts import CacheGroup
from ..shared.errors import CapacityError, RequestError
from ..shared.memory import format_bytes
from .block_pool import SPLIT_TOKENS
from .kinds.base import numbers_found_as
from .kinds.table import cache_block_bytes, kind_of


class PoolPlan(msgspec.Struct, frozen=True):
    """Pool sizes.

    Attributes:
        groups: the cache groups.
        tokens: the tokens of requests that all groups hold. A group with a window may have room for fewer, as it
            releases blocks before the window.
        blocks: the number of blocks of each cache group.
    """

    groups: tuple[CacheGroup, ...]
    tokens: int
    blocks: Mapping[str, int]

    @classmethod
    def from_blocks(cls, groups: Sequence[CacheGroup], blocks: Mapping[str, int]) -> PoolPlan:
        """Returns the plan of pools with these numbers of blocks."""
        whole = [g for g in groups if not kind_of(g).may_lose] or groups
        return cls(tuple(groups), min((g.block_size * blocks[g.name] for g in whole), default=0), blocks)

    @property
    def bytes(self) -> int:
        return sum(cache_block_bytes(g) * self.blocks[g.name] for g in self.groups)

    def __str__(self) -> str:
        """Formats the plan as in "KV cache: 1.2 GiB, 3072 blocks of 32 tokens = 98304 tokens"."""
        if not self.groups:
            return "no KV cache"
        pools = [
            f"{self.blocks[g.name]} {'states' if kind_of(g).fixed else f'blocks of {g.block_size} tokens'}"
            for g in self.groups
        ]
        if len(pools) > 1:
            pools = [f"{p} ({g.name})" for p, g in zip(pools, self.groups, strict=True)]
        return f"KV cache: {format_bytes(self.bytes)}, {' and '.join(pools)} = {self.tokens} tokens"


def plan_pools(
    groups: Sequence[CacheGroup],
    budget: int,
    most_tokens: int,
    reserved: int = 0,
    enough: Mapping[str, int] = MappingProxyType({}),
    owners: int = 1,
) -> PoolPlan:
    """Plans the largest pools of at most ``most_tokens`` tokens that fit into ``budget`` bytes.

    Args:
        groups: the cache groups.
        budget: bytes for all pools.
        most_tokens: the most tokens that the pools hold, rounded up to blocks.
        reserved: bytes of the budget for padding.
        enough: cache group -> tokens that are enough for it, however many the other groups hold. When the others have
            ``most_tokens``, these groups get the rest of the memory, for prefixes.
        owners: the number of ranks that own blocks; each gets the same number of whole splits.

    Raises CapacityError if the budget holds no block of each group, or no split of each owner.
    """
    unit = math.lcm(pool_unit(groups), SPLIT_TOKENS * owners if owners > 1 else 1)
    whole = unit if owners > 1 else 1
    unit_bytes = bytes_for(groups, unit, enough)
    most = range(-(-most_tokens // unit) + 1)

    def size(units: int, more: int = 0) -> int:
        blocks = _blocks(groups, units * unit, enough, more * unit, whole)
        return sum(cache_block_bytes(g) * blocks[g.name] for g in groups)

    units = bisect_right(most, budget - reserved, key=size) - 1
    if units < 1:
        raise CapacityError(
            f"memory: a KV budget of {format_bytes(budget)} holds no block: "
            f"{unit} tokens need {format_bytes(unit_bytes)}"
            + (f", beside {format_bytes(reserved)} for padding" if reserved else ""),
            hint=f"Pass memory of {unit_bytes + reserved} bytes or more{_or_less(groups)}.",
        )
    more = bisect_right(most, budget - reserved, key=partial(size, units)) - 1
    return PoolPlan(tuple(groups), units * unit, _blocks(groups, units * unit, enough, more * unit, whole))


MOST_SLOTS = 2**31 - 1
"""The most tokens in all blocks of a pool: their slots are 32-bit integers."""

MOST_OFFLOADED = 4
"""The most blocks of a pool for each block in memory, if the others are on a disk."""


class Offloadable(msgspec.Struct, frozen=True):
    """The part of a cache group whose blocks may be moved to a disk.

    Attributes:
        layers: the number of its layers that read only blocks of their choice. Blocks of other layers stay in memory.
        least: the least number of blocks in memory.
    """

    layers: int
    least: int


def plan_offload(
    groups: Sequence[CacheGroup],
    budget: int,
    size: int,
    most_tokens: int,
    some: Mapping[str, Offloadable],
    enough: Mapping[str, int] = MappingProxyType({}),
) -> tuple[PoolPlan, dict[str, int]]:
    """Plans pools in which the groups of ``some`` have only a part of their blocks in memory, and all of them on a
    disk.

    Args:
        groups: the cache groups.
        budget: bytes of memory for all pools.
        size: bytes of the disk.
        most_tokens: the most tokens that the pools hold.
        some: cache group -> its part that may be moved to the disk.
        enough: cache group -> tokens that are enough for it, however many the other groups hold.

    Returns:
        The pools, and cache group of ``some`` -> the number of its blocks in memory.

    Raises:
        CapacityError: ``budget`` or ``size`` is too small for any pool.
    """
    unit = pool_unit(groups)

    def moved(group: CacheGroup) -> int:
        """Returns the bytes of a block that may be moved to the disk."""
        return kind_of(group).movable_bytes(group, some[group.name].layers) if group.name in some else 0

    def needs(units: int) -> tuple[int, int, dict[str, int], Mapping[str, int]]:
        """Returns the needs of pools of ``units`` units, with the fewest blocks in memory.

        They are the bytes of memory, the bytes of disk, group of ``some`` -> blocks in memory, and group -> all blocks.
        """
        blocks = _blocks(groups, units * unit, enough)
        slots = {
            g.name: max(min(some[g.name].least, -(-most_tokens // g.block_size)), -(-blocks[g.name] // MOST_OFFLOADED))
            for g in groups
            if g.name in some
        }
        unmoved = sum(blocks[g.name] * (cache_block_bytes(g) - moved(g)) for g in groups)
        memory = unmoved + sum(slots.get(g.name, 0) * moved(g) for g in groups)
        return memory, sum(blocks[g.name] * moved(g) for g in groups), slots, blocks

    most = range(1, -(-most_tokens // unit) + 1)
    units = bisect_right(most, 0, key=lambda n: needs(n)[0] > budget or needs(n)[1] > size)
    if units < 1:
        memory, disk, _, _ = needs(1)
        short = f"memory: {format_bytes(budget)}" if memory > budget else f"offload_size: {format_bytes(size)}"
        raise CapacityError(
            f"{short} is less than one token looks at, or a step writes",
            hint=f"Pass memory of {memory} bytes or more, and offload_size of {disk} or more.",
        )
    memory, _, slots, blocks = needs(units)
    more = (budget - memory) // sum(map(moved, groups))
    slots = {name: min(blocks[name], count + more) for name, count in slots.items()}
    return PoolPlan(tuple(groups), units * unit, blocks), slots


def enough_for_windows(
    groups: Sequence[CacheGroup],
    requests: int,
    step_tokens: int,
    owners: int = 1,
    states_memory: int | None = None,
) -> dict[str, int]:
    """Returns cache group -> tokens with which ``requests`` requests never wait for a block of the group.

    Groups with full attention have no such number and are left out: see ``CacheKind.enough_tokens``.

    Args:
        groups: the cache groups.
        requests: the most requests that run at a time.
        step_tokens: the most tokens of a step.
        owners: the number of ranks that own blocks.
        states_memory: bytes for snapshots of recurrent states, besides the states of running requests; None for the
            bytes of one snapshot for each request.

    Raises RequestError if a cache can't have as many blocks as the requests have states of recurrent layers.
    """
    split = SPLIT_TOKENS * owners if owners > 1 else 0
    enough = {g.name: kind_of(g).enough_tokens(g, requests, step_tokens, split) for g in groups}
    states = [groups[i] for i in numbers_found_as("copies", map(kind_of, groups))]
    snapshot_bytes = sum(map(cache_block_bytes, states))
    snapshots = requests if states_memory is None or not states else states_memory // snapshot_bytes
    for g in states:
        count, most = enough[g.name] // g.block_size, MOST_SLOTS // g.block_size
        if count > most:
            raise RequestError(
                f"max_requests: {requests:,} requests have {count:,} states of recurrent layers, and a cache can have "
                f"{most:,}",
                hint=f"Pass max_requests of {most * requests // count:,} or less.",
            )
        enough[g.name] = min(count + snapshots, most) * g.block_size
    growing = [g for g in groups if not kind_of(g).fixed]
    if all(enough[g.name] for g in growing):  # tokens that all groups hold say how many blocks each of these has
        enough |= dict.fromkeys((g.name for g in growing), 0)
    return {name: tokens for name, tokens in enough.items() if tokens}


def most_requests(groups: Sequence[CacheGroup]) -> int:
    """Returns the most requests for whose recurrent states the caches can have blocks; MOST_SLOTS without such
    states.
    """
    states = (groups[i] for i in numbers_found_as("copies", map(kind_of, groups)))
    return min((MOST_SLOTS // group.block_size for group in states), default=MOST_SLOTS)


def _or_less(groups: Sequence[CacheGroup]) -> str:
    """Returns the end of a hint: the options that reduce the memory of fixed pools, if there are such pools."""
    return ", or fewer max_requests or less states_memory" if any(kind_of(g).fixed for g in groups) else ""


def pool_unit(groups: Sequence[CacheGroup]) -> int:
    """Returns the tokens by which pools grow: whole blocks of every group that needs more blocks for more tokens."""
    return math.lcm(*(g.block_size for g in groups if not kind_of(g).fixed))


def _blocks(
    groups: Sequence[CacheGroup], tokens: int, enough: Mapping[str, int], more: int = 0, whole: int = 1
) -> dict[str, int]:
    """Returns the number of blocks of each group for ``tokens``, or for ``enough`` plus ``more`` tokens if these are
    fewer, rounded up to a multiple of ``whole`` tokens.
    """
    each = {
        g.name: enough.get(g.name, g.block_size)
        if kind_of(g).fixed
        else min(tokens, -(-(enough.get(g.name, tokens) + more) // whole) * whole)
        for g in groups
    }
    return {g.name: -(-each[g.name] // g.block_size) for g in groups}


def bytes_for(groups: Sequence[CacheGroup], tokens: int, enough: Mapping[str, int] = MappingProxyType({})) -> int:
    """Returns the smallest budget in bytes with which ``plan_pools`` holds ``tokens``.

    ``enough`` is as for ``plan_pools``.
    """
    unit = pool_unit(groups)
    blocks = _blocks(groups, -(-tokens // unit) * unit, enough)
    return sum(cache_block_bytes(g) * blocks[g.name] for g in groups)
