"""The formats in which a KV cache stores keys and values.

``KV_FORMATS`` has the facts about each format. The code that rounds and reads it is passes/ops/quantized_cache.py in
torch, and plugins/cpu/kernels/kv_format.h and few_bits.h in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

CacheDtype = Literal["f32", "bf16", "f16", "i8", "fp8", "k8v8", "k8v4", "k6v4", "k5v4", "k4v4"]
"""The type of a cache's elements, by the names of ``dtypes.DTYPES``, or of a format with few bits."""

CacheName = Literal["f32", "bf16", "f16", "int8", "fp8", "k8v8", "k8v4", "k6v4", "k5v4", "k4v4"]
"""The type of a cache's elements, by the names of recipes, options and GPU kernels."""


class KvFormat(msgspec.Struct, frozen=True):
    """A format of a KV cache.

    Attributes:
        name: its name in recipes.
        largest_code: the integer for the largest magnitude of a head, if the format has 32-bit scales: one for each
            token, key/value head and side (keys, values). None for floats without scales.
        asked_for: True if recipes may name it. GPUs store the other formats if a recipe names none.
        few_bits: the bits of an element of keys and of values, if these are rotated integers. Each token, key/value
            head and side then has a 16-bit scale.
        ends: the format of a second cache for the ends of each request; None without one. It holds the first ``END``
            tokens, and for a query the tokens of its own run of ``END`` absolute positions and of the run before.
    """

    name: CacheName
    largest_code: float | None = None
    asked_for: bool = True
    few_bits: tuple[int, int] | None = None
    ends: CacheDtype | None = None


END = 128
"""Tokens of an end: see ``KvFormat.ends``. Kernels read this number of keys at a time (kStep in operands.h)."""

KV_FORMATS: Mapping[CacheDtype, KvFormat] = {
    "f32": KvFormat("f32"),
    "bf16": KvFormat("bf16"),
    "f16": KvFormat("f16", asked_for=False),
    "i8": KvFormat("int8", largest_code=127.0),
    "fp8": KvFormat("fp8", largest_code=448.0),
    "k8v8": KvFormat("k8v8", few_bits=(8, 8)),
    "k8v4": KvFormat("k8v4", few_bits=(8, 4)),
    "k6v4": KvFormat("k6v4", few_bits=(6, 4)),
    "k5v4": KvFormat("k5v4", few_bits=(5, 4)),
    "k4v4": KvFormat("k4v4", few_bits=(4, 4), ends="k8v8"),
}

SCALED_CACHES = tuple(dtype for dtype, of in KV_FORMATS.items() if of.largest_code is not None)
"""The formats with elements of 8 bits."""

ROTATED_CACHES = tuple(dtype for dtype, of in KV_FORMATS.items() if of.few_bits is not None)

CACHES: Mapping[str, CacheDtype] = {of.name: dtype for dtype, of in KV_FORMATS.items() if of.asked_for}
"""The formats that recipes may name."""


def head_multiples(dtype: CacheDtype) -> tuple[int, int]:
    """Returns the numbers that must divide the head sizes of keys and of values in a cache of ``dtype``.

    Several elements share a byte, and a byte belongs to one token. Keys are stored in pairs of elements.
    """
    few_bits = KV_FORMATS[dtype].few_bits
    if few_bits is None:
        return 1, 1
    keys, values = ({4: 2, 5: 8, 6: 4, 8: 1}[bits] for bits in few_bits)
    return 2 * keys, values


LONGEST_HEAD = 1024
"""The largest head size of keys and values in a cache with few bits."""


def heads_fit(dtype: CacheDtype, key_size: int, value_size: int) -> bool:
    """Returns True if a cache of ``dtype`` can have heads of these sizes."""
    if dtype not in ROTATED_CACHES:
        return True
    pairs = zip((key_size, value_size), head_multiples(dtype), strict=True)
    return all(size % of == 0 and size <= LONGEST_HEAD for size, of in pairs)
