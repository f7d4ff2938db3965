"""The formats in which a KV cache stores keys and values.

``KV_FORMATS`` has the facts about each format. The code that rounds and reads it is passes/ops/quantized_cache.py in
torch, and plugins/cpu/kernels/kv_format.h and few_bits.h in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CacheDtype = Literal["f32", "bf16", "f16", "i8", "fp8", "k8v8", "k8v4", "k6v4", "k5v4", "k4v4"]
"""The type of a cache's elements, by the names of ``dtypes.DTYPES``, or of a format with few bits."""

CacheName = Literal["f32", "bf16", "f16", "int8", "fp8", "k8v8", "k8v4", "k6v4", "k5v4", "k4v4"]
"""The type of a cache's elements, by the names of recipes, options and GPU kernels."""


@dataclass(frozen=True)
class KvFormat:
    """A format of a KV cache.

    Attributes:
        name: its name in recipes.
        largest_code: the code of a head's largest magnitude. Each token, key/value head and side (keys, values) then
            has a 32-bit scale. None for floats without scales.
        asked_for: True if recipes may name it. GPUs store the other formats if a recipe names none.
        few_bits: the bits of an element of keys and of values, if these are rotated integers. Each token, key/value
            head and side then has a 16-bit scale.
        ends: the format in which a second cache has the ends of each request: its first ``END`` tokens, and of a query
            those of its own run of ``END`` absolute positions and of the run before. None for no second cache.
    """

    name: CacheName
    largest_code: float | None = None
    asked_for: bool = True
    few_bits: tuple[int, int] | None = None
    ends: CacheDtype | None = None


END = 128
"""The tokens of an end: see ``KvFormat.ends``. Kernels read keys in runs of as many (kStep in operands.h)."""

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
    """Returns the numbers of which head sizes of keys and of values have to be multiples in a cache of ``dtype``.

    Bits of several elements share a byte, which belongs to one token. Keys are stored in pairs of elements.
    """
    few_bits = KV_FORMATS[dtype].few_bits
    if few_bits is None:
        return 1, 1
    keys, values = ({4: 2, 5: 8, 6: 4, 8: 1}[bits] for bits in few_bits)
    return 2 * keys, values


LONGEST_HEAD = 1024
"""The largest head size of keys and values in a cache with few bits."""
