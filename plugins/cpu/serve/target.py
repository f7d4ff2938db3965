"""Opens the cpu target for serving."""

from __future__ import annotations

from dataclasses import replace

from enginewright.runtime.bundle.reader import DECODE, Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, Placement, ServedTarget, program_groups
from enginewright.runtime.kv_cache.pool_plan import Offloadable
from enginewright.runtime.ranks.rank_programs import rank_programs, whole_groups
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import MissingDependencyError, RequestError


def _make(asked: ExecutorArguments) -> Executor:
    from .executor import CpuExecutor

    placement = asked.placement
    if asked.entry != DECODE and (placement.ray is not None or placement.partition.ranks > 1):
        raise RequestError(f"entry: ranks open {DECODE!r} alone, not {asked.entry!r}", hint="Leave the partition out.")
    if placement.ray is not None:
        return _on_machines(asked, placement.ray)
    if placement.partition.ranks > 1:
        from .ranked import RankedExecutor

        return RankedExecutor(asked.bundle, asked.blocks, placement, target=asked.target)
    return CpuExecutor(asked.bundle, asked.blocks, placement, entry=asked.entry)


def _on_machines(asked: ExecutorArguments, address: str) -> Executor:
    try:
        from .ray_ranks import RayPlaces
        from .remote import RemoteExecutor, check_partition
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in ("ray", "torch"):
            raise
        raise MissingDependencyError(
            f"ray: ranks on several machines need {package}, which is not installed",
            hint="Install it on all of them with: pip install 'enginewright[ranks]'",
        ) from e
    placement = asked.placement
    check_partition(placement.partition)
    places = RayPlaces(address, placement.partition.ranks, placement.threads)
    placement = replace(placement, threads=places.threads)
    return RemoteExecutor(asked.bundle, asked.blocks, placement, places, target=asked.target)


def _groups(bundle: Bundle, target: str, context: int, placement: Placement = Placement()) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of all ranks together. Several ranks may hold the same heads, which are counted on
    each.
    """
    if placement.partition.ranks == 1:
        return program_groups(bundle, target, context)
    return whole_groups(rank_programs(bundle, target, placement.partition), placement.partition)


def _offloadable(bundle: Bundle, target: str, tokens: int, requests: int) -> dict[str, Offloadable]:
    """Returns the cache groups whose blocks can be offloaded, each with the minimum number of blocks in memory.

    The minimum is the number of blocks that one row reads, or the number that a step writes, if that is larger.
    ``tokens`` and ``requests`` are the largest sizes of a step.
    """
    program = bundle.program(target)
    groups = {group.name: group for group in program.cache_groups}
    offloadable = dict[str, Offloadable]()
    for step in program.steps:
        if "best_blocks" not in step.attrs:
            continue
        group = groups[step.inputs[1].name.rpartition("/")[0]]
        first, last, best, below = (
            int(step.attrs[name]) for name in ("first_blocks", "last_blocks", "best_blocks", "all_below")
        )
        row = max(first + last + best * group.planes[0].heads, -(-below // group.block_size)) + 1
        written = tokens // group.block_size + 2 * requests
        before = offloadable.get(group.name, Offloadable(0, 0))
        offloadable[group.name] = Offloadable(before.layers + 1, max(before.least, row, written))
    return offloadable


TARGET = ServedTarget(
    Opening(
        _make,
        gives_back=True,
        groups_of=_groups,
        takes=("isa", "load", "partition", "ray", "offload"),
        offloadable=_offloadable,
        entries=True,
        exact=lambda bundle, target: True,
    ),
    carries=None,
)
