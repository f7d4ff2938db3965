"""Opens targets of TensorRT's engines, whichever form their engines have."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening
from enginewright.runtime.shared.contracts import CacheGroup

from .section import TensorRtSection


def _has_slots(bundle: Bundle, target: str) -> bool:
    section = bundle.target(target).section(TensorRtSection)
    return section is not None and section.form == "whole" and section.paged is None


def _groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    from .blocks import packed_groups
    from .slots import slot_groups_of

    return slot_groups_of(bundle, target) if _has_slots(bundle, target) else packed_groups(bundle, target)


def _context(bundle: Bundle, target: str) -> int:
    from .blocks import packed_context
    from .slots import slot_capacity_of

    return slot_capacity_of(bundle, target) - 1 if _has_slots(bundle, target) else packed_context(bundle, target)


def _memory(bundle: Bundle, target: str) -> int:
    from .slots import gpu_budget

    return gpu_budget(bundle, target)


def _make(asked: ExecutorArguments) -> Executor:
    from .blocks import PackedExecutor
    from .slots import TensorRtExecutor

    bundle, target, threads = asked.bundle, asked.target, asked.placement.threads
    if _has_slots(bundle, target):
        return TensorRtExecutor(bundle, asked.blocks, target=target, threads=threads)
    return PackedExecutor(bundle, asked.blocks, asked.context, target=target, threads=threads)


OPENING = Opening(_make, _groups, _context, memory=_memory, slots=_has_slots, gives_back=True)
