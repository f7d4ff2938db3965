"""The layouts of weights in panels, for all code that packs, counts or names them.

The kernels have the same numbers in ``kPanel`` and in the table of plugins/native/program.cpp; a test compares them.
"""

from __future__ import annotations

from typing import Literal

Layout = Literal[
    "rows", "panel32", "panel32x2", "panel32x4", "panel32x8", "planes32", "blocks8", "blocks16", "sparse32", "nibbles"
]
"""The order of a weight's elements in memory; runtime/bundle/weights.py describes each."""

PANEL = 32
"""Rows N of a weight [N, K] that are interleaved in one panel. N is padded to a multiple of it."""

DEPTHS = {
    "panel32": 1,
    "panel32x2": 2,
    "panel32x4": 4,
    "panel32x8": 8,
    "planes32": 16,
    "blocks8": 10,
    "blocks16": 18,
    "sparse32": 32,
}
"""Layout -> the number of values along K that are adjacent in memory; for sparse32, of a block.

K is padded to a multiple of it.

In blocks8 and blocks16 a value is a byte of a block of scales: two, and then one for each of its 8 or 16 groups.
"""

BLOCKS = frozenset(("blocks8", "blocks16"))
"""The layouts that store scales in blocks."""

BIAS = {"i8": 128, "i4": 8, "u4": 0, "i5": 16, "u5": 0, "i6": 32, "i3": 4, "u3": 0, "i2": 2, "u2": 0}
"""Type -> the number that is added to an integer before it is stored without sign in a byte, or in fewer bits."""
