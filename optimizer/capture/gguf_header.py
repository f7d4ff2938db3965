"""Says of a GGUF file what its header tells: whether matrices in it are quantized, in blocks that a bundle can keep.

The header is walked without torch or the package `gguf`, which take longer to import than this takes: 0.2 s for a
vocabulary of 262,144 tokens. ``gguf.py`` beside it reads the file itself.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, how many tensors and keys; the keys
with their values; of each tensor its name, how many dimensions, their sizes, the type of its blocks, and its place.
"""

from __future__ import annotations

import mmap
import os
import struct

from enginewright.runtime.bundle.regular_file import open_regular

KEPT_BLOCKS = {
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
    **{20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"},
}
"""Types of blocks that a bundle can keep, by ggml's number of them: those of ``FORMATS`` in gguf_blocks.py."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a key's number, by its type."""
_STRING, _ARRAY = 8, 9


def has_kept_blocks(path: str | os.PathLike[str]) -> bool:
    """Whether a matrix of the file is stored in one of KEPT_BLOCKS.

    False too for what isn't a GGUF file, and for a damaged one: whoever reads all of it says what is wrong.
    """
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data[:4] == _MAGIC and _Header(data).has_kept_blocks()
    except (OSError, ValueError, KeyError, OverflowError, struct.error):
        return False


class _Header:
    """A place in the header, which moves on as values are read. Raises struct.error where the file ends before one."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, len(_MAGIC)
        little = int.from_bytes(data[4:6], "little") != 0  # of a version in the other order the low bytes are zero
        order = "<" if little else ">"
        self._word, self._long = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")

    def has_kept_blocks(self) -> bool:
        if self._read(self._word) not in _VERSIONS:
            return False
        tensors, keys = self._read(self._long), self._read(self._long)
        for _ in range(keys):
            self._skip_strings(1)
            self._skip_value(self._read(self._word))
        for _ in range(tensors):
            self._skip_strings(1)
            dimensions = self._read(self._word)
            self._at += dimensions * self._long.size
            kind = self._read(self._word)
            self._at += self._long.size
            if dimensions > 1 and kind in KEPT_BLOCKS:
                return True
        return False

    def _read(self, number: struct.Struct) -> int:
        (value,) = number.unpack_from(self._data, self._at)
        self._at += number.size
        return int(value)

    def _skip_value(self, kind: int) -> None:
        count = 1
        if kind == _ARRAY:
            kind, count = self._read(self._word), self._read(self._long)
        if kind == _STRING:
            self._skip_strings(count)
        else:
            self._at += count * _SIZES[kind]

    def _skip_strings(self, count: int) -> None:
        data, at, unpack = self._data, self._at, self._long.unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at
