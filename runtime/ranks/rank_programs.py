"""Divides one lowered program into one for each rank; the results are the same, bit for bit.

A partition states the number of ranks of each kind (``kinds/table.py``). At most one kind divides the steps into
stages, and at most one divides the layers of each stage among ranks; ``cut.py`` has an example of that.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

from ..bundle.reader import Bundle
from ..shared.arena import ALIGNMENT, plan_arena, plan_region
from ..shared.contracts import CacheGroup
from ..shared.dtypes import stored_bytes
from ..shared.errors import RequestError
from ..shared.hidden_taps import add_taps
from ..shared.lowered_program import Affine, Buffer, LoweredProgram, Operand
from .cut import LayerCut
from .kinds.base import LayerKind, Place, StepKind
from .kinds.table import layer_kinds, step_kinds
from .kinds.views import union, with_operands, with_own_buffers
from .partition import Partition
from .rank_maker import programs_of

_cut: weakref.WeakKeyDictionary[Bundle, dict[tuple[str, Partition], tuple[LoweredProgram, ...]]]
_cut = weakref.WeakKeyDictionary()


def rank_programs(bundle: Bundle, target: str, how: Partition) -> tuple[LoweredProgram, ...]:
    """Returns the program of each rank of a bundle's target; the result is cached.

    Raises BundleError, or RequestError for a partition that the model can't have.
    """
    programs = _cut.setdefault(bundle, {})
    if (target, how) not in programs:
        programs[target, how] = partition(bundle.program(target), how)
    return programs[target, how]


def whole_groups(programs: Sequence[LoweredProgram], how: Partition) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of all ranks together, as if they were one rank.

    A head that several ranks store counts once for each of them. Where ranks own whole blocks, the groups are those of
    one rank.
    """
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


def partition(program: LoweredProgram, how: Partition) -> tuple[LoweredProgram, ...]:
    """Divides a lowered program of any target into one for each rank, and plans its memory.

    Only rank 0 has whole logits. Block tables and slots are the same on every rank. The cache groups of a rank's
    program have only the heads and layers that the rank stores.

    Args:
        program: the program of the whole model.
        how: the number of ranks of each kind. For one rank the program is returned unchanged.

    Raises RequestError if there are more ranks than query heads, or more stages than places to cut the model; if heads
    can't be divided so; or if two kinds in ``how`` can't be combined, such as ``ring`` and any other.
    """
    if how.ranks == 1:
        return (program,)
    layers, steps = _kinds_of(how)
    stages = steps.stages(with_own_buffers(program), how.stages)
    programs: list[LoweredProgram] = []
    for index in reversed(range(how.stages)):
        place = Place(index, how.stages, how.ranks // how.stages)
        programs += programs_of(LayerCut(stages[index], place, layers, steps))
    for link in range(how.stages - 1):
        programs = list(plan_region(programs, how.stages + 1 + link))
    planned = (plan_arena(_narrowed(steps.finish(one, programs))) for one in programs)
    return tuple(map(add_taps, planned))


def _kinds_of(how: Partition) -> tuple[LayerKind, StepKind]:
    """Returns the kind that divides layers and the kind that divides steps. Raises RequestError if kinds can't be
    combined.
    """
    for kind, count in how.kinds.items():
        kind.check(str(how), how.ranks, count)
    layers = [kind for kind in how.kinds if isinstance(kind, LayerKind)]
    steps = [kind for kind in how.kinds if isinstance(kind, StepKind)]
    for several in (layers, steps):
        if len(several) > 1:
            raise RequestError(
                f"partition: {how}: {several[0].name} doesn't go together with {several[1].name}",
                hint="Leave one of the two out.",
            )
    return (layers or layer_kinds())[0], (steps or step_kinds())[0]


def _narrowed(program: LoweredProgram) -> LoweredProgram:
    """Removes from a rank's own buffers the columns that the rank never touches."""
    views: dict[str, list[Operand]] = {}
    for operand in (o for step in program.steps for o in (*step.inputs, *step.outputs)):
        if operand.kind == "buffer":
            views.setdefault(operand.name, []).append(operand)
    whole = {b.name for b in program.buffers if b.region} | {o.name for o in program.outputs.values()}
    places = {
        name: columns
        for name, of in views.items()
        if name not in whole and (columns := _columns_in_use(of)) is not None
    }

    def moved(operand: Operand) -> Operand:
        columns = places.get(operand.name) if operand.kind == "buffer" else None
        if columns is None:
            return operand
        offset = next(
            at + operand.offset.constant - lo for (lo, hi), at in columns if lo <= operand.offset.constant < hi
        )
        strides = (Affine(_width_of(columns)), *operand.strides[1:])
        return operand.model_copy(update={"offset": Affine(offset), "strides": strides})

    def size(buffer: Buffer) -> Buffer:
        if buffer.name not in places:
            return buffer
        view = views[buffer.name][0]
        row = stored_bytes(view.dtype, _width_of(places[buffer.name]))
        return buffer.model_copy(update={"size": view.shape[0] * row})

    steps = tuple(with_operands(step, map(moved, step.inputs), map(moved, step.outputs)) for step in program.steps)
    return program.model_copy(update={"steps": steps, "buffers": tuple(map(size, program.buffers))})


_Places = tuple[tuple[tuple[int, int], int], ...]
"""A buffer's columns that stay when the others are removed: (ranges of columns, new first column of each range)."""


def _width_of(places: _Places) -> int:
    return sum(hi - lo for (lo, hi), _ in places)


def _columns_in_use(views: Sequence[Operand]) -> _Places | None:
    """Returns the ranges of columns of a buffer that its views touch, each with its new first column.

    Returns None if they touch all columns, aren't columns of the same rows, or if a range isn't aligned.
    """
    like = views[0]
    if len({(v.dtype, v.shape[:1], v.strides[:1]) for v in views}) > 1 or like.rank < 2:
        return None
    ranges = []
    for view in views:
        inner = list(zip(view.shape[1:], view.strides[1:], strict=True))
        numbers = [view.offset, *view.strides, *view.shape[1:]]
        if not all(n.is_constant for n in numbers) or view.strides[-1].constant != 1:
            return None
        past = view.offset.constant + 1 + sum((n.constant - 1) * stride.constant for n, stride in inner)
        if view.offset.constant < 0 or past > like.strides[0].constant:
            return None
        ranges.append((view.offset.constant, past))
    merged = union(ranges)
    widths = [hi - lo for lo, hi in merged]
    if sum(widths) >= like.strides[0].constant or any(stored_bytes(like.dtype, n) % ALIGNMENT for n in widths):
        return None
    return tuple(zip(merged, itertools.accumulate(widths, initial=0), strict=False))
