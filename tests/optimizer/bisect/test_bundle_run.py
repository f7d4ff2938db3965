"""Keys that are put into a cache are what attention reads there: those given, rounded to the cache's format."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from enginewright.optimizer.bisect.bundle_run import put_keys
from enginewright.passes.ops.cache import rounded_heads
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE
from enginewright.runtime.shared.kv_formats import CacheDtype
from tests.plugins.native.lowered_builder import LoweredBuilder, T, view

HEADS, VALUE = 2, 4


def program(dtype: CacheDtype, size: int) -> CpuProgram:
    b = LoweredBuilder()
    b.group("full", [0], HEADS, size, VALUE)
    b.groups[0] = b.groups[0].model_copy(update={"dtype": dtype})
    keys = view(b.values(np.ones((3, HEADS * size), np.float32)), (T, HEADS, size))
    values = view(b.values(np.ones((3, HEADS * VALUE), np.float32)), (T, HEADS, VALUE))
    cache = b.cache("full/0").model_copy(update={"dtype": dtype})
    b.step("kv_write", [keys, values, b.input("slots:full"), cache], [])
    return b.build(blocks={"full": 3})


CASES: list[tuple[CacheDtype, int]] = [
    *product(("f32", "bf16", "i8", "fp8"), (5, 8, 64)),  # type: ignore[list-item]
    *product(("k8v8", "k8v4", "k6v4", "k5v4", "k4v4"), (16, 48, 64)),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_what_is_put_is_what_is_read(dtype: CacheDtype, size: int) -> None:
    rng, executable = np.random.default_rng(size), program(dtype, size)
    keys = rng.standard_normal((4, HEADS, size)).astype(np.float32)
    slots = np.array([31, 32, 70, 71], np.int32)
    put_keys(executable, "full", 0, slots, keys)
    cached, values = executable.cache_arrays("full", 0)
    blocks, places = np.divmod(slots, KV_BLOCK_SIZE)
    expected = rounded_heads(torch.from_numpy(keys), dtype, 0).numpy()
    np.testing.assert_array_equal(cached[blocks, :, :, places], expected)
    assert np.count_nonzero(cached) == np.count_nonzero(expected)  # nothing else was written
    assert not values.any()
