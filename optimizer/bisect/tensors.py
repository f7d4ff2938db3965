"""The tensors of calls, of either kind of program, as the modules of the model have them: float32, and row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from enginewright.plugins.shared.contracts import FloatArray

from .sides import Role, Tensor
from .taps import Call, Piece


@dataclass(frozen=True)
class Stored:
    """A weight of a call before it is cut: its name, role, the parts that its rows are of, and how it is read.

    ``parts``: source tensor, first and last row, and how many rows of the weight these make, in order; 0: they are
    mixed into those of the part before.
    """

    role: Role
    name: str
    parts: tuple[tuple[str, int, int, int], ...]
    read: Callable[[], FloatArray]


def cut(call: Call, stored: Sequence[Stored]) -> list[Tensor]:
    """Each weight of a call, a product's by the linears that it is made of."""
    pieces = call.pieces if len(call.pieces) > 1 else (None,)
    path = call.pieces[0].path if call.pieces else call.owner or next(iter(call.where), "")
    return [_cut(weight, piece, path) for weight in stored for piece in pieces]


def _cut(weight: Stored, piece: Piece | None, path: str) -> Tensor:
    if piece is None:
        whole = tuple(f"{name}[{first}:{last}]" for name, first, last, _ in weight.parts)
        return Tensor(path, weight.role, weight.name, whole, weight.read)
    start, stop = piece.start, piece.stop

    def read() -> FloatArray:
        return weight.read()[start:stop]

    sources: list[str] = []
    at, kept = 0, False
    for name, first, last, size in weight.parts:
        low, high = max(start - at, 0), min(stop - at, size)
        kept = low < high if size else kept
        if kept:
            own = (first + low, first + high) if size == last - first else (first, last)
            sources.append(f"{name}[{own[0]}:{own[1]}]")
        at += size
    return Tensor(piece.path, weight.role, f"{weight.name}[{start}:{stop}]", tuple(sources), read)


def dequantized(values: FloatArray, scales: FloatArray, offsets: FloatArray | None, group: int) -> FloatArray:
    """value * scale + offset: [.., K] with [.., groups]; ``group`` 0 is all of K."""
    size = values.shape[-1]
    width = group or size

    def spread(factors: FloatArray) -> FloatArray:
        return np.repeat(factors.astype(np.float32), width, axis=-1)[..., :size]

    result: FloatArray = values.astype(np.float32) * spread(scales)
    return result if offsets is None else result + spread(offsets)
