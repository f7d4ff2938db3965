"""The programs of a bundle's ranks, and the KV cache that they have together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ..bundle.reader import Bundle
from ..shared.contracts import CacheGroup
from ..shared.lowered_program import LoweredProgram
from .partition import Partition, partition

_cut: weakref.WeakKeyDictionary[Bundle, dict[tuple[str, Partition], tuple[LoweredProgram, ...]]]
_cut = weakref.WeakKeyDictionary()


def rank_programs(bundle: Bundle, target: str, how: Partition) -> tuple[LoweredProgram, ...]:
    """The program of each rank. Raises BundleError, and RequestError for a partition that the model can't have."""
    programs = _cut.setdefault(bundle, {})
    if (target, how) not in programs:
        programs[target, how] = partition(bundle.program(target), how)
    return programs[target, how]


def whole_groups(programs: Sequence[LoweredProgram], how: Partition) -> tuple[CacheGroup, ...]:
    """The cache groups of all ranks together, as one rank would have them: heads that several ranks keep count as
    often. Where ranks own blocks, each block is one rank's."""
    if how.owners > 1:
        return programs[0].cache_groups
    groups_by_name: dict[str, list[CacheGroup]] = {}
    for program in programs:
        for group in program.cache_groups:
            groups_by_name.setdefault(group.name, []).append(group)
    groups = []
    for parts in groups_by_name.values():
        layers = tuple(sorted({layer for group in parts for layer in group.layers}))
        heads = sum(group.planes[0].heads * len(group.layers) for group in parts)
        groups.append(parts[0].with_heads(heads // len(layers)).model_copy(update={"layers": layers}))
    return tuple(groups)
