"""Opens the cuda target for serving."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, Placement, ServedTarget
from enginewright.runtime.ranks.rank_programs import rank_programs, whole_groups
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import RequestError

from ..section import CudaSection


def _make(asked: ExecutorArguments) -> Executor:
    how = asked.placement.partition
    if how.ranks > 1:
        from .ranked import RankedCudaExecutor

        patience = asked.placement.rank_timeout
        return RankedCudaExecutor(
            asked.bundle, asked.blocks, asked.context, how, target=asked.target, patience=patience
        )
    from .executor import CudaExecutor, ExactCudaExecutor

    executor = ExactCudaExecutor if _exact(asked.bundle, asked.target) else CudaExecutor
    return executor(asked.bundle, asked.blocks, asked.context, target=asked.target)


def _memory(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    from .executor import cuda_budget

    return cuda_budget(bundle, target, context, placement.partition)


def _exact(bundle: Bundle, target: str) -> bool:
    return bundle.section(target, CudaSection, "kernels").exact


def _groups(bundle: Bundle, target: str, context: int, placement: Placement) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of all ranks together. Raises RequestError for a partition that this target doesn't
    support.
    """
    how = placement.partition
    if how.owners > 1:
        raise RequestError(
            f"partition: {how}: target {target!r} doesn't divide keys among ranks",
            hint=f"Use tensor={how.ranks}, which divides them by heads, or pipeline={how.ranks}.",
        )
    return whole_groups(rank_programs(bundle, target, how), how)


TARGET = ServedTarget(
    Opening(_make, memory_of=_memory, groups_of=_groups, gives_back=True, takes=("partition",), exact=_exact),
    carries="compiled kernels",
)
