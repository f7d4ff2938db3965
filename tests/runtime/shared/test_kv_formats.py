"""A KV cache's formats: every name once, and the bytes that follow from an entry."""

from __future__ import annotations

from typing import get_args

import pytest

from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.kv_formats import (
    CACHES,
    KV_FORMATS,
    ROTATED_CACHES,
    SCALED_CACHES,
    CacheDtype,
    CacheName,
    head_multiples,
)


def test_every_name_is_of_one_format() -> None:
    assert set(KV_FORMATS) == set(get_args(CacheDtype))
    assert {of.name for of in KV_FORMATS.values()} == set(get_args(CacheName))
    assert all(KV_FORMATS[dtype].name == name for name, dtype in CACHES.items())


@pytest.mark.parametrize("dtype", [d for d in KV_FORMATS if d not in (*SCALED_CACHES, *ROTATED_CACHES)])
def test_a_cache_without_scales_is_stored_as_its_target_computes(dtype: CacheDtype) -> None:
    group = CacheGroup("full", (0, 3), 2, 24, 16, dtype=dtype)
    assert [cache_block_bytes(group.stored_as(to)) for to in ("f32", "f16")] == [2 * 32 * 2 * 40 * n for n in (4, 2)]


@pytest.mark.parametrize("dtype", SCALED_CACHES)
def test_a_cache_with_scales_keeps_its_format(dtype: CacheDtype) -> None:
    group = CacheGroup("full", (0, 3), 2, 24, 16, dtype=dtype)
    assert group.stored_as("bf16") is group
    assert sum(plane.token_bytes for plane in group.planes) == 2 * (24 + 4 + 16 + 4)


@pytest.mark.parametrize(
    ("dtype", "multiples", "key", "value"),
    [
        ("k8v8", (2, 1), 64 + 2, 16 + 2),
        ("k8v4", (2, 2), 64 + 2, 8 + 2),
        ("k6v4", (8, 2), 48 + 2, 8 + 2),
        ("k5v4", (16, 2), 40 + 2, 8 + 2),
        ("k4v4", (4, 2), 32 + 2, 8 + 2),
    ],
)
def test_few_bits_fill_bytes_and_have_16_bit_scales(
    dtype: CacheDtype, multiples: tuple[int, int], key: int, value: int
) -> None:
    group = CacheGroup("full", (0, 3), 2, 64, 16, dtype=dtype)
    assert head_multiples(dtype) == multiples
    assert group.stored_as("bf16") is group
    assert [plane.head_bytes for plane in group.planes] == [key, value]
    assert cache_block_bytes(group) == 2 * 32 * 2 * (key + value)
