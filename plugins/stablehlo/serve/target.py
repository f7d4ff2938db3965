"""Opens the stablehlo target for serving."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, ServedTarget
from enginewright.runtime.shared.contracts import CacheGroup


def _groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    from .executor import slot_groups, stablehlo_section

    return slot_groups(stablehlo_section(bundle, target), context)


def _context(bundle: Bundle, target: str) -> int:
    from .executor import stablehlo_section

    return stablehlo_section(bundle, target).lengths[-1] - 1


def _make(asked: ExecutorArguments) -> Executor:
    from .executor import StableHloExecutor

    placement = asked.placement
    return StableHloExecutor(
        asked.bundle,
        asked.blocks,
        asked.context,
        threads=placement.threads,
        provider=placement.provider,
        target=asked.target,
        load=placement.load,
    )


_OPENING = Opening(
    _make,
    _groups,
    most_context=_context,
    slots=lambda bundle, target: True,
    takes=("provider", "load"),
)
TARGET = ServedTarget(_OPENING, carries="modules that become machine code")
