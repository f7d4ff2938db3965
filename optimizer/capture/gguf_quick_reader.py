"""Lets transformers read the tokenizer of a GGUF file without a view of each token."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np


class _Reader(gguf.GGUFReader):
    """A reader that makes no views of an array's elements: seconds for a vocabulary, and hundreds of megabytes.

    Texts of an array are counted only, so are empty, and the tokenizer's numbers are left out: transformers' conversion
    of tokenizers reads them by itself. Other numbers are tuples of one.
    """

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        """Builds none: a tokenizer is made of keys."""
        self.tensors = []

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data):,} bytes, and should have {end:,} or more")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        item = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        end = orig_offs + 12
        scalar = self.gguf_scalar_to_np.get(item)
        values: list[Any]
        if scalar is not None:
            values = list(zip(self._get(end, scalar, count).tolist(), strict=True))
            end += count * np.dtype(scalar).itemsize
        elif item == gguf.GGUFValueType.STRING:
            layout = "<Q" if self.endianess == gguf.GGUFEndian.LITTLE else ">Q"
            for _ in range(count):
                (length,) = struct.unpack_from(layout, self.data.data, end)
                end += 8 + length
            values = [b""] * count
        else:
            raise ValueError(f"an array of {item.name}")
        return end - orig_offs, values, list(range(len(values))), [gguf.GGUFValueType.ARRAY, item]

    def _push_field(self, field: gguf.ReaderField, skip_sum: bool = False) -> int:
        numbers = field.types[:1] == [gguf.GGUFValueType.ARRAY] and field.types[-1] != gguf.GGUFValueType.STRING
        if numbers and field.name.startswith("tokenizer."):
            field = field._replace(data=[])
        size: int = super()._push_field(field, skip_sum)
        return size


_GGUFReader = gguf.GGUFReader


@contextmanager
def quick_reader() -> Iterator[None]:
    """Within it transformers reads configurations by ``_Reader``: the package's takes ten seconds for 262k tokens."""
    gguf.GGUFReader = _Reader  # type: ignore[misc]
    try:
        yield
    finally:
        gguf.GGUFReader = _GGUFReader  # type: ignore[misc]
