"""Plans memory: assigns every buffer of a lowered program an offset in one arena, for all batches at once.

Sizes are affine in T, B and R, so gaps and buffers can't be compared in bytes. Buffers whose sizes are multiples of one
another for every batch (c * T, say) form a class and are packed in units of that class (bytes per token); the classes
follow one another in the arena. Within a class, the largest buffers are placed first, each in the smallest gap between
buffers that are live at the same time ("greedy by size" with best fit: Pisarchyk and Lee,
https://arxiv.org/abs/2001.03288). Every coefficient is a multiple of 64 bytes, and so is every offset, for any batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.lowered_program import Affine, Buffer, LoweredProgram, Step

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


class _Piece(msgspec.Struct, frozen=True):
    """A buffer in its class: its size in units of the class, and the first and last step in which it is live
    (inclusive).
    """

    name: str
    units: int
    first: int
    last: int


MEETINGS = frozenset({"all_gather", "gather_experts"})
"""Ops in which a rank waits for all others, unless ``to`` names the one that waits."""


def plan_arena(program: LoweredProgram) -> LoweredProgram:
    """Returns the program with an offset for each used buffer, and ``arena_bytes``; unused buffers are dropped.

    Shared buffers keep the offsets of ``plan_region``.

    Raises:
        PassError: a step reads a buffer before any step writes it, or a buffer's size is negative.
    """
    lives = lifetimes(program)
    unshared = [b for b in program.buffers if b.name in lives and not b.region]
    offsets, total = _placed(unshared, lives)
    used = (b for b in program.buffers if b.name in lives)
    buffers = tuple(b if b.region else b.model_copy(update={"offset": offsets[b.name]}) for b in used)
    return program.model_copy(update={"buffers": buffers, "arena_bytes": total})


def plan_region(programs: Sequence[LoweredProgram], region: int) -> tuple[LoweredProgram, ...]:
    """Gives each buffer of a shared region an offset, which is the same in the programs of all ranks.

    A buffer is live from the collective before its first use on any rank to the collective after its last use, because
    one rank may be ahead of another between two collectives.

    Args:
        programs: the program of each rank.
        region: the number of the region (``Buffer.region``).

    Raises PassError as ``plan_arena`` does.
    """
    buffers: dict[str, Buffer] = {}
    lives: dict[str, tuple[int, int]] = {}
    for program in programs:
        met = list(accumulate((_all_meet(step) for step in program.steps), initial=0))  # before each step
        uses = lifetimes(program)
        for buffer in program.buffers:
            if buffer.region == region and buffer.name in uses:
                first, last = (met[at] for at in uses[buffer.name])
                others = lives.get(buffer.name, (first, last))
                lives[buffer.name] = min(first, others[0]), max(last, others[1])
                buffers[buffer.name] = buffer
    offsets, total = _placed(list(buffers.values()), lives)

    def with_offsets(program: LoweredProgram) -> LoweredProgram:
        placed = tuple(
            b.model_copy(update={"offset": offsets[b.name]}) if b.name in offsets else b for b in program.buffers
        )
        return program.model_copy(update={"buffers": placed, "regions": (*program.regions, (region, total))})

    return tuple(map(with_offsets, programs))


def _all_meet(step: Step) -> bool:
    return step.op in MEETINGS and step.attrs.get("to", -1) == -1


def _placed(buffers: Sequence[Buffer], lives: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Affine], Affine]:
    """Packs buffers into one memory. Returns (buffer name -> offset, bytes of the whole memory).

    Args:
        buffers: the buffers, with their sizes.
        lives: buffer name -> first and last step in which it is live, inclusive.
    """
    classes: dict[Affine, list[_Piece]] = {}
    for buffer in buffers:
        unit, units = _class_of(buffer)
        classes.setdefault(unit, []).append(_Piece(buffer.name, units, *lives[buffer.name]))
    offsets: dict[str, Affine] = {}
    base = Affine()
    for unit in sorted(classes, key=lambda u: u.coefficients()):
        places, total = _pack(classes[unit])
        offsets |= {name: base + unit * at for name, at in places.items()}
        base = base + unit * total
    return offsets, base


def live_bytes(program: LoweredProgram, tokens: int, requests: int, rows: int) -> int:
    """Returns the largest number of bytes of buffers that are live at the same time in a step of these sizes.

    No memory plan for these steps, in this order, needs less. Sizes are rounded up to ALIGNMENT.
    """
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
    """Returns buffer name -> (first, last) step that uses it, also through views.

    The first one writes it. Outputs of the program are live to its end.
    """
    lives: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(program.steps):
        for operand in step.inputs:
            if operand.kind == "buffer":
                if step.op == "receive":  # another rank has written it
                    lives.setdefault(operand.name, (index, index))
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
    """Returns (unit, units): the unit of the buffer's class, and the buffer's size in that unit.

    The unit of a size in one symbol is 64 bytes times that symbol. A size in several symbols is its own unit.
    """
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
    """Returns (buffer name -> offset, size of the class), all in units of the class."""
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
    """Returns the offset of the smallest gap that holds ``piece``; without one, the end of the last neighbour.

    Args:
        piece: the buffer to place.
        neighbours: (offset, buffer) of the placed buffers that are live at the same time, sorted by offset.
    """
    best: tuple[int, int] | None = None
    end = 0
    for at, other in neighbours:
        if at - end >= piece.units and (best is None or at - end < best[0]):
            best = (at - end, end)
        end = max(end, at + other.units)
    return end if best is None else best[1]
