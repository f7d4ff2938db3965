"""Opens targets with TensorRT engines for serving, in each form of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.target import ExecutorArguments, Opening
from enginewright.runtime.shared.contracts import CacheGroup

from .section import TensorRtSection

if TYPE_CHECKING:
    from .base import EngineForm


def _has_slots(bundle: Bundle, target: str) -> bool:
    section = bundle.target(target).section(TensorRtSection)
    return section is not None and section.form == "whole" and section.paged is None


def _form(bundle: Bundle, target: str) -> EngineForm:
    """Returns the form of a target's engines. Raises BundleError if it has none that are ready."""
    from .base import engine_section
    from .blocks import PagedForm, SegmentsForm
    from .slots import SlotForm

    if _has_slots(bundle, target):
        return SlotForm(bundle, target)
    paged = engine_section(bundle, target).paged is not None
    return PagedForm(bundle, target) if paged else SegmentsForm(bundle, target)


def _groups(bundle: Bundle, target: str, context: int) -> tuple[CacheGroup, ...]:
    return _form(bundle, target).cache_groups


def _context(bundle: Bundle, target: str) -> int:
    return _form(bundle, target).context


def _memory(bundle: Bundle, target: str) -> int:
    from .slots import gpu_budget

    return gpu_budget(bundle, target)


def _make(asked: ExecutorArguments) -> Executor:
    from .base import EngineExecutor

    form = _form(asked.bundle, asked.target)
    return EngineExecutor(asked.bundle, asked.target, form, asked.blocks, asked.context, asked.placement.threads)


OPENING = Opening(_make, _groups, _context, memory=_memory, slots=_has_slots, gives_back=True)
