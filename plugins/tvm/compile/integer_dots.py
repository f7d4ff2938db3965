"""Sums of four products of bytes at a time: with VNNI by one instruction, otherwise by two of 16 bits, which are exact
too.

Weights are unsigned bytes, values signed ones. The lanes of a vector are 32-bit words of four bytes each.
"""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from enginewright.plugins.steps.x86_levels import Level

from .kernel import Expr, vector

_MULTIPLY = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}
_LOW_BYTES = 0x00FF00FF


class Dots:
    """Writes sums of products of bytes in the instructions of a level of x86-64."""

    def __init__(self, level: Level) -> None:
        self._vnni = level.vnni
        self.lanes = {"v2": 4, "v3": 8}.get(level.name, 16)
        self.vectors = 2 if self.lanes == 16 else 1

    def _int(self, value: int) -> Expr:
        return vector(T.int32(value), self.lanes)

    def weights(self, words: Expr) -> tuple[Expr, ...]:
        """Returns words of four weights in the form that ``dot`` needs."""
        if self._vnni:
            return (T.Bind(words),)
        low = T.Bind(T.bitwise_and(words, self._int(_LOW_BYTES)))
        return low, T.Bind(T.bitwise_and(words >> self._int(8), self._int(_LOW_BYTES)))

    def values(self, words: Expr) -> tuple[Expr, ...]:
        """Returns words of four values in the form that ``dot`` needs: without VNNI as 16-bit values, bytes 0 and 2,
        then 1 and 3.
        """
        if self._vnni:
            return (words,)
        halves = T.Bind(T.reinterpret(f"int16x{2 * self.lanes}", words))
        eight = vector(T.int16(8), 2 * self.lanes)
        return T.Bind((halves << eight) >> eight), T.Bind(halves >> eight)

    def nibbles(self, words: Expr, half: int) -> Expr:
        """Returns the low (``half`` 0) or the high (1) four bits of each byte, as bytes."""
        return T.bitwise_and(words >> self._int(4 * half) if half else words, self._int(0x0F0F0F0F))

    def ones(self) -> tuple[Expr, ...]:
        """Returns weights of 1 in the form that ``dot`` needs."""
        return self.weights(self._int(0x01010101))

    def dot(self, total: Expr, weights: tuple[Expr, ...], values: tuple[Expr, ...]) -> Expr:
        """Returns ``total`` plus the sum of four products of ``weights`` and ``values``, in each lane."""
        lanes = self.lanes
        if self._vnni:
            kind = f"int8x{4 * lanes}"
            w, x = T.reinterpret(kind, weights[0]), T.reinterpret(kind, values[0])
            return T.call_llvm_pure_intrin(f"int32x{lanes}", "llvm.x86.avx512.vpdpbusd.512", total, w, x)
        for w, x in zip(weights, values, strict=True):
            of_16 = T.reinterpret(f"int16x{2 * lanes}", w)
            total = total + T.call_llvm_pure_intrin(f"int32x{lanes}", _MULTIPLY[lanes], of_16, x)
        return total
