"""Views of buffers for the division of programs: parts along a dimension, the columns that a view touches, ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ...shared.lowered_program import Affine, LoweredProgram, Operand, Step

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranges (first, end) of indices, each with an exclusive end."""


class Slice(msgspec.Struct, frozen=True):
    """The part of an operand for the indices lo to hi - 1 of a step's axis.

    Attributes:
        dim: the dimension of the operand that is cut.
        scale: the number of its elements for each index.
    """

    dim: int
    scale: int = 1


def pairs(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))


def with_operands(step: Step, inputs: Iterable[Operand], outputs: Iterable[Operand]) -> Step:
    return step.model_copy(update={"inputs": tuple(inputs), "outputs": tuple(outputs)})


def part_of(operand: Operand, dim: int, lo: int, hi: int) -> Operand:
    """Returns the view of elements ``lo`` to ``hi`` - 1 of dimension ``dim``."""
    shape = (*operand.shape[:dim], Affine(hi - lo), *operand.shape[dim + 1 :])
    return operand.model_copy(update={"shape": shape, "offset": operand.offset + operand.strides[dim] * lo})


def flattened(operand: Operand) -> Operand:
    """Returns an operand [M, ...] with dense rows as [M, C]."""
    shape, strides = (operand.shape[0], Affine(width_of(operand))), (operand.strides[0], Affine(1))
    return operand.model_copy(update={"shape": shape, "strides": strides})


def width_of(operand: Operand) -> int:
    """Returns the number of elements in a row of an operand: the product of all sizes but the first."""
    return math.prod(size.constant for size in operand.shape[1:])


def is_dense(operand: Operand) -> bool:
    """Returns True if a row's elements are contiguous and in order."""
    dense_stride = 1
    for size, stride in zip(reversed(operand.shape[1:]), reversed(operand.strides[1:]), strict=True):
        if size != 1 and stride != dense_stride:
            return False
        dense_stride *= size.constant
    return True


def columns_of_index(operand: Operand, cut: Slice) -> int:
    """Returns the number of elements of each row of ``operand`` that belong to one index of a step's axis.

    ``cut``: the dimension of the operand that the axis divides.
    """
    return cut.scale * math.prod(size.constant for size in operand.shape[cut.dim + 1 :])


def columns_of(operand: Operand) -> Ranges:
    """Returns the ranges of columns that a view [M, ...] touches.

    They are exact for dimension 1; gaps within later dimensions are filled.
    """
    offset = operand.offset.constant
    if operand.rank == 1:
        return ((offset, offset + 1),)
    inner = 1 + sum(
        (size.constant - 1) * stride.constant
        for size, stride in zip(operand.shape[2:], operand.strides[2:], strict=True)
    )
    count, step = operand.shape[1].constant, operand.strides[1].constant
    if step <= inner:
        return ((offset, offset + (count - 1) * step + inner),) if count > 0 else ()
    return tuple((offset + i * step, offset + i * step + inner) for i in range(count))


def touched(operand: Operand, cut: Slice, count: int, columns: Ranges) -> list[tuple[int, int]]:
    """Returns the ranges of a step's indices whose part of ``operand`` has at least one of ``columns``.

    Args:
        operand: an operand of the step.
        cut: the part of the operand that belongs to an index.
        count: the number of indices.
        columns: columns of the buffer's rows.
    """
    if not columns:
        return []
    part = columns_of(part_of(operand, cut.dim, 0, cut.scale))
    width, step = part[-1][1] - part[0][0], operand.strides[cut.dim].constant * cut.scale
    ranges = []
    for lo, hi in columns:
        # Index i has the columns from offset + i * step on, `width` of them.
        first = -(-(lo - operand.offset.constant - width + 1) // step) if step else 0
        end = -(-(hi - operand.offset.constant) // step) if step else count
        if max(first, 0) < min(end, count):
            ranges.append((max(first, 0), min(end, count)))
    return ranges


def is_by_row(step: Step) -> bool:
    """Returns True if a step's inputs, weights excepted, and its outputs have the same number of rows."""
    rows = step.outputs[0].shape[0]
    return all(o.shape[:1] == (rows,) or o.kind == "weight" for o in (*step.inputs, *step.outputs))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(hi, merged[-1][1])
        elif lo < hi:
            merged.append((lo, hi))
    return tuple(merged)


def overlap(a: Ranges, b: Ranges) -> bool:
    return any(x < w and z < y for x, y in a for z, w in b)


def exceeds(wanted: Ranges, own: Ranges) -> bool:
    """Returns True if ``wanted`` has an index that isn't in ``own``."""
    return union([*wanted, *own]) != own


def views_of(program: LoweredProgram) -> Iterator[Operand]:
    for step in program.steps:
        yield from (o for o in (*step.inputs, *step.outputs) if o.kind == "buffer")
    yield from (o for o in program.outputs.values() if o.kind == "buffer")


def row_sizes(program: LoweredProgram) -> dict[str, int | None]:
    """Returns buffer -> number of elements in a row; None for a buffer whose views don't all have rows of one
    stride.
    """
    sizes: dict[str, int | None] = {}
    strides: dict[str, tuple[Affine, Affine]] = {}
    for operand in views_of(program):
        name = operand.name
        if sizes.get(name, 0) is None:
            continue
        constant = all(a.is_constant for a in (*operand.shape[1:], *operand.strides, operand.offset))
        if (
            operand.rank < 2
            or not constant
            or strides.setdefault(name, (operand.shape[0], operand.strides[0]))
            != (
                operand.shape[0],
                operand.strides[0],
            )
        ):
            sizes[name] = None
            continue
        columns = columns_of(operand)
        end = columns[-1][1] if columns else 0
        sizes[name] = None if end > operand.strides[0].constant else max(end, sizes.get(name) or 0)
    return sizes


def with_own_buffers(program: LoweredProgram) -> LoweredProgram:
    """Returns the program with a new buffer for each step that overwrites a whole buffer of an earlier step.

    Then one step alone writes each such buffer, and ranks may share it; steps that worked in place no longer do.
    """
    rows = row_sizes(program)
    sizes = {b.name: b for b in program.buffers}
    current: dict[str, str] = {}
    written: set[str] = set()
    steps: list[Step] = []

    def read(operand: Operand) -> Operand:
        name = current.get(operand.name, operand.name)
        return (
            operand if operand.kind != "buffer" or name == operand.name else operand.model_copy(update={"name": name})
        )

    for index, step in enumerate(program.steps):
        inputs = tuple(map(read, step.inputs))
        for operand in step.outputs:
            size = rows.get(operand.name)
            again = operand.kind == "buffer" and operand.name in written and size is not None
            if again and columns_of(operand) == ((0, size),):
                name = f"{operand.name}.{index}"
                current[operand.name] = name
                sizes[name] = sizes[operand.name].model_copy(update={"name": name})
        written.update(o.name for o in step.outputs)
        steps.append(with_operands(step, inputs, map(read, step.outputs)))
    outputs = {name: read(o) for name, o in program.outputs.items()}
    return program.model_copy(update={"steps": tuple(steps), "outputs": outputs, "buffers": tuple(sizes.values())})
