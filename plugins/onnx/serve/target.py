"""Opens the onnx target for serving."""

from __future__ import annotations

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening, Placement, ServedTarget
from enginewright.runtime.shared.contracts import CacheGroup

from ...steps.linear_io import LinearIo


def _groups(bundle: Bundle, target: str, context: int, placement: Placement = Placement()) -> tuple[CacheGroup, ...]:
    from .executor import slot_capacity, slot_groups, variant_io

    io = variant_io(bundle, target, placement.provider or "cpu", placement.variant)
    return slot_groups(io, slot_capacity(context))


def _make(asked: ExecutorArguments) -> Executor:
    from .executor import OnnxExecutor, slot_capacity

    return OnnxExecutor(
        asked.bundle,
        asked.blocks,
        slot_capacity(asked.context),
        threads=asked.placement.threads,
        provider=asked.placement.provider or "cpu",
        target=asked.target,
        variant=asked.placement.variant,
    )


def _memory(bundle: Bundle, target: str, placement: Placement, context: int) -> int:
    from .executor import device_budget

    return device_budget(bundle, target, placement.provider or "cpu", placement.variant)


def _variants(bundle: Bundle, target: str) -> tuple[str | None, ...]:
    io = bundle.target(target).section(LinearIo)
    return io.variants if io is not None and len(io.variants) > 1 else (None,)


_OPENING = Opening(
    _make,
    _groups,
    groups_of=_groups,
    memory_of=_memory,
    slots=lambda bundle, target: True,
    takes=("provider", "variant"),
    variants=_variants,
)
TARGET = ServedTarget(_OPENING, carries=None)
