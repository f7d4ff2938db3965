"""How many KV blocks each cache group gets from a memory budget, and what they hold."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ..shared.contracts import CacheGroup
from ..shared.errors import CapacityError, RequestError, shown

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
MOST_BYTES = 1 << 62
_SHARE_OF_FREE = 4
"""The KV cache takes at most 1/4 of the free memory unless told otherwise: the mapped weights need the rest."""


@dataclass(frozen=True)
class PoolPlan:
    """Pool sizes.

    Attributes:
        tokens: that all groups hold of requests: a group with a window may have room for fewer, as it gives back what
            no window sees.
        blocks: of each cache group.
    """

    groups: tuple[CacheGroup, ...]
    tokens: int
    blocks: Mapping[str, int]

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], blocks: Mapping[str, int]) -> PoolPlan:
        """The plan that these pools follow."""
        whole = [g for g in groups if not g.window] or groups
        return cls(tuple(groups), min((g.block_size * blocks[g.name] for g in whole), default=0), blocks)

    @property
    def bytes(self) -> int:
        return sum(g.bytes_per_block * self.blocks[g.name] for g in self.groups)

    def __str__(self) -> str:
        """For people, for example "KV cache: 1.2 GiB, 3072 blocks of 32 tokens = 98304 tokens"."""
        pools = [f"{self.blocks[g.name]} blocks of {g.block_size} tokens" for g in self.groups]
        if len(pools) > 1:
            pools = [f"{p} ({g.name})" for p, g in zip(pools, self.groups, strict=True)]
        return f"KV cache: {format_bytes(self.bytes)}, {' and '.join(pools) or 'no blocks'} = {self.tokens} tokens"


def plan_pools(
    groups: Sequence[CacheGroup],
    budget: int,
    most_tokens: int,
    reserved: int = 0,
    enough: Mapping[str, int] = MappingProxyType({}),
) -> PoolPlan:
    """Pools that fit in ``budget`` bytes, less ``reserved``, of no more than ``most_tokens`` (rounded up to blocks).

    Every group gets the same tokens, but for those of ``enough``: so many are enough for a group, whatever the others
    hold. What is left when the others have ``most_tokens`` goes to these, for prefixes.

    Raises CapacityError if the budget holds no block of each group.
    """
    unit = math.lcm(*(g.block_size for g in groups))
    unit_bytes = sum(g.bytes_per_block * (unit // g.block_size) for g in groups)
    most = range(-(-most_tokens // unit) + 1)

    def size(units: int, more: int = 0) -> int:
        blocks = _blocks(groups, units * unit, enough, more * unit)
        return sum(g.bytes_per_block * blocks[g.name] for g in groups)

    units = bisect_right(most, budget - reserved, key=size) - 1
    if units < 1:
        raise CapacityError(
            f"memory: a KV budget of {format_bytes(budget)} holds no block: "
            f"{unit} tokens need {format_bytes(unit_bytes)}"
            + (f", beside {format_bytes(reserved)} for padding" if reserved else ""),
            hint=f"Pass memory of {unit_bytes + reserved} bytes or more.",
        )
    more = bisect_right(most, budget - reserved, key=partial(size, units)) - 1
    return PoolPlan(tuple(groups), units * unit, _blocks(groups, units * unit, enough, more * unit))


def window_tokens(group: CacheGroup, requests: int, step_tokens: int) -> int:
    """Most tokens that requests hold blocks for in a group with a window, if a step computes so many of theirs."""
    return requests * (group.window + 2 * group.block_size) + step_tokens


def enough_for_windows(groups: Sequence[CacheGroup], requests: int, step_tokens: int) -> dict[str, int]:
    """Cache group with a window -> tokens, if others have none, that are enough for so many requests at a time.

    That is what they hold, with the chunk of one that begins behind another's. And as much again, for prefixes:
    ``BlockPool`` leaves other tenants up to half of the pool. Then nobody ever waits for a block of such a group.
    """
    if all(group.window for group in groups):
        return {}
    return {g.name: 2 * window_tokens(g, requests, 2 * step_tokens) for g in groups if g.window}


def _blocks(groups: Sequence[CacheGroup], tokens: int, enough: Mapping[str, int], more: int = 0) -> dict[str, int]:
    """Of each group: of ``tokens``, or of those that are enough for it and ``more``, if that is fewer."""
    each = {g.name: min(tokens, enough.get(g.name, tokens) + more) for g in groups}
    return {g.name: -(-each[g.name] // g.block_size) for g in groups}


def bytes_for(groups: Sequence[CacheGroup], tokens: int, enough: Mapping[str, int] = MappingProxyType({})) -> int:
    """The smallest budget with which ``plan_pools`` holds ``tokens``."""
    unit = math.lcm(*(g.block_size for g in groups))
    blocks = _blocks(groups, -(-tokens // unit) * unit, enough)
    return sum(g.bytes_per_block * blocks[g.name] for g in groups)


def parse_size(value: int | str, name: str = "memory") -> int:
    """Bytes of 1048576, "512MiB", "1.5 GB" or "2g". Raises RequestError with that name."""
    hint = 'Pass bytes, or a size such as "512MiB" or "2GB".'
    found = math.nan
    if isinstance(value, int) and not isinstance(value, bool):
        plain = int.__int__(value)
        found = plain if 0 <= plain <= MOST_BYTES else math.nan
    elif isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str.__str__(value).strip().lower())
        if match is not None and match[2] in _UNITS:
            found = float(match[1]) * _UNITS[match[2]]
    if not 0 <= found <= MOST_BYTES:
        raise RequestError(f"{name}: {shown(value)} isn't a size", hint=hint)
    return int(found)


def format_bytes(size: int) -> str:
    """For people: "512 B", "1.2 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {units[power]}"


def default_budget() -> int:
    """Bytes for the KV cache where the caller says nothing: a quarter of the memory that is free here."""
    return free_memory() // _SHARE_OF_FREE


def check_free(needed: int, what: str) -> None:
    """Raises CapacityError if the system, or the container, hasn't so many bytes free, swap included.

    The system promises more memory than it has and ends the process that uses it. Other processes may still take what
    is free now.
    """
    if needed > (free := free_memory() + _free_swap()):
        raise CapacityError(
            f"memory: {what} of {format_bytes(needed)} is more than the {format_bytes(free)} that are free",
            hint="Pass less memory, fewer max_requests or a smaller context, or free some.",
        )


def _free_swap(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        found = re.search(r"^SwapFree:\s+(\d+)", meminfo.read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may still be used: what the system has, or the container allows, whichever is less.

    What a container holds of files that nobody has touched lately counts as free: the system drops it when asked.
    """
    try:
        available = int(re.search(r"^MemAvailable:\s+(\d+)", meminfo.read_text(), re.M)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):  # no Linux, or one without this line
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return available
    try:
        held = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.M)
    except OSError:
        held = None
    return max(0, min(available, limit - used + (int(held[1]) if held else 0)))


def return_freed_memory() -> None:
    """Gives it back to the system, where that can be asked for (glibc); else does nothing.

    What opening a bundle parses, the tokenizer's vocabulary above all, takes several times what is left of it, in
    pieces too small for the library to give back by itself. A server would have them resident for good.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
