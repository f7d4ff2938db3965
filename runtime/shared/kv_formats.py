"""The formats in which a KV cache stores keys and values.

``KV_FORMATS`` has the facts about each format. The code that rounds and reads it is passes/ops/quantized_cache.py in
torch, and plugins/cpu/kernels/kv_format.h in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CacheDtype = Literal["f32", "bf16", "f16", "i8", "fp8"]
"""The type of a cache's elements, by the names of ``dtypes.DTYPES``."""

CacheName = Literal["f32", "bf16", "f16", "int8", "fp8"]
"""The type of a cache's elements, by the names of recipes, options and GPU kernels."""


@dataclass(frozen=True)
class KvFormat:
    """A format of a KV cache.

    Attributes:
        name: its name in recipes.
        largest_code: the code of a head's largest magnitude. Each token, key/value head and side (keys, values) then
            has a 32-bit scale. None for floats without scales.
        asked_for: True if recipes may name it. GPUs store the other formats if a recipe names none.
    """

    name: CacheName
    largest_code: float | None = None
    asked_for: bool = True


KV_FORMATS: Mapping[CacheDtype, KvFormat] = {
    "f32": KvFormat("f32"),
    "bf16": KvFormat("bf16"),
    "f16": KvFormat("f16", asked_for=False),
    "i8": KvFormat("int8", largest_code=127.0),
    "fp8": KvFormat("fp8", largest_code=448.0),
}

SCALED_CACHES = tuple(dtype for dtype, of in KV_FORMATS.items() if of.largest_code is not None)

CACHES: Mapping[str, CacheDtype] = {of.name: dtype for dtype, of in KV_FORMATS.items() if of.asked_for}
"""The formats that recipes may name."""
