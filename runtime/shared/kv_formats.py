"""The formats in which a KV cache stores keys and values.

``KV_FORMATS`` says all of a format but what rounds and reads it: in torch that is passes/ops/quantized_cache.py, in C++
plugins/cpu/kernels/kv_format.h.
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
    """One format.

    Attributes:
        name: in recipes.
        largest_code: what the largest magnitude of a head becomes; each token, key/value head and side (keys, values)
            then has a 32-bit scale. None: values are floats, without scales.
        asked_for: whether recipes may name it; the other is what GPUs store where a recipe names none.
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
