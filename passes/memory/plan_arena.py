"""Gives every buffer of a lowered program a place in one arena, for every batch at once.

Sizes are affine in T, B and R, so whether one buffer fits beside another can't be compared in bytes. Buffers whose
sizes are multiples of one another for every batch (c * T, say) form a class and are packed in units of that class
(bytes per token); the classes lie one behind the other. Within a class, the largest buffers are placed first, each in
the smallest gap between the buffers that live at the same time ("greedy by size" with best fit: Pisarchyk and Lee,
https://arxiv.org/abs/2001.03288). Every coefficient is a multiple of 64 bytes, so every offset is, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.lowered_program import Affine, Buffer, LoweredProgram

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


@dataclass(frozen=True)
class _Piece:
    """A buffer in its class: ``units`` of the class's unit, alive from step ``first`` to ``last``, both included."""

    name: str
    units: int
    first: int
    last: int


def plan_arena(program: LoweredProgram) -> LoweredProgram:
    """The program with an offset for each buffer that is used, and ``arena_bytes``; buffers never used are dropped.

    Raises:
        PassError: a step reads a buffer that none has written, or a buffer's size is negative.
    """
    lives = lifetimes(program)
    classes: dict[Affine, list[_Piece]] = {}
    for buffer in program.buffers:
        if buffer.name in lives:
            unit, units = _class_of(buffer)
            classes.setdefault(unit, []).append(_Piece(buffer.name, units, *lives[buffer.name]))
    offsets: dict[str, Affine] = {}
    base = Affine()
    for unit in sorted(classes, key=lambda u: u.coefficients()):
        places, total = _pack(classes[unit])
        offsets |= {name: base + unit * at for name, at in places.items()}
        base = base + unit * total
    buffers = tuple(b.model_copy(update={"offset": offsets[b.name]}) for b in program.buffers if b.name in offsets)
    return program.model_copy(update={"buffers": buffers, "arena_bytes": base})


def live_bytes(program: LoweredProgram, tokens: int, requests: int, rows: int) -> int:
    """The most that buffers alive at the same time take in a step of so many T, B and R: no plan for these steps in
    this order takes less. Sizes are rounded up to ALIGNMENT."""
    lives = lifetimes(program)
    changes = [0] * (len(program.steps) + 2)
    for buffer in program.buffers:
        if buffer.name in lives:
            first, last = lives[buffer.name]
            size = -(-buffer.size.evaluate(tokens, requests, rows) // ALIGNMENT) * ALIGNMENT
            changes[first] += size
            changes[last + 1] -= size
    return max(accumulate(changes))


def lifetimes(program: LoweredProgram) -> dict[str, tuple[int, int]]:
    """Buffer -> the steps that first write and last touch it (also through views); a result lives to the end."""
    lives: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(program.steps):
        for operand in step.inputs:
            if operand.kind == "buffer":
                if operand.name not in lives:
                    raise PassError(
                        f"step {index} ({step.op} at {step.where}) reads {operand.name} before it is written"
                    )
                lives[operand.name] = (lives[operand.name][0], index)
        for operand in step.outputs:
            first = lives[operand.name][0] if operand.name in lives else index
            lives[operand.name] = (first, index)
    for name, operand in program.outputs.items():
        if operand.kind == "buffer":
            if operand.name not in lives:
                raise PassError(f"nothing writes the result {name}")
            lives[operand.name] = (lives[operand.name][0], len(program.steps))
    return lives


def _class_of(buffer: Buffer) -> tuple[Affine, int]:
    """The class's unit, and how many of it the buffer takes. A mixed size is a unit of its own."""
    size: Affine = buffer.size
    coefficients = size.coefficients()
    if any(c < 0 for c in coefficients):
        raise PassError(f"buffer {buffer.name} has a size that may be negative: {size}")
    padded = [-(-c // ALIGNMENT) * ALIGNMENT for c in coefficients]
    present = [i for i, c in enumerate(padded) if c]
    if len(present) == 1:
        unit = [0, 0, 0, 0]
        unit[present[0]] = ALIGNMENT
        return Affine(*unit), padded[present[0]] // ALIGNMENT
    return Affine(*padded), 1 if present else 0


def _pack(pieces: Sequence[_Piece]) -> tuple[dict[str, int], int]:
    """Places in units, and how many units the class takes."""
    placed: list[tuple[int, _Piece]] = []
    total = 0
    for piece in sorted(pieces, key=lambda p: (-p.units, p.first, p.name)):
        at = _best_gap(piece, sorted(((o, p) for o, p in placed if _overlap(p, piece)), key=lambda x: x[0]))
        placed.append((at, piece))
        total = max(total, at + piece.units)
    return {piece.name: at for at, piece in placed}, total


def _overlap(a: _Piece, b: _Piece) -> bool:
    return a.first <= b.last and b.first <= a.last


def _best_gap(piece: _Piece, neighbours: Sequence[tuple[int, _Piece]]) -> int:
    """The start of the smallest gap that fits among ``neighbours`` (sorted by place), or the place behind them."""
    best: tuple[int, int] | None = None
    end = 0
    for at, other in neighbours:
        if at - end >= piece.units and (best is None or at - end < best[0]):
            best = (at - end, end)
        end = max(end, at + other.units)
    return end if best is None else best[1]
