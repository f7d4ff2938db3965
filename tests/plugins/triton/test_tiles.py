"""Sizes of tiles: within every GPU's shared memory, whatever the heads."""

from __future__ import annotations

import itertools

import pytest

from enginewright.plugins.shared.errors import TargetError
from enginewright.plugins.triton.tiles import (
    FLOAT_BYTES,
    GPUS,
    attention_tiles,
    gpu_of,
    power_of_2,
    shared_memory_of,
    width_of,
)


def test_powers_of_2():
    assert [power_of_2(n) for n in (1, 2, 3, 4, 80, 128, 129)] == [1, 2, 4, 4, 128, 128, 256]
    assert [width_of(n) for n in (4, 64, 80)] == [16, 64, 128]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
@pytest.mark.parametrize("decode", [True, False])
def test_there_is_a_tile_for_the_usual_heads(gpu, decode):
    for group, size, dtype in itertools.product((1, 3, 4, 8, 71), (64, 80, 128, 256), FLOAT_BYTES):
        if (group, size, dtype) == (71, 256, "f32"):
            continue  # the queries alone are 128 KiB
        tiles = list(attention_tiles(group, width_of(size), dtype, gpu, decode=decode))
        assert tiles and len(set(tiles)) == len(tiles)
        for tile in tiles:
            assert tile.rows == power_of_2(tile.rows) >= max(16, group * tile.queries)
            assert tile.queries == 1 or not decode
            assert shared_memory_of(tile, width_of(size), FLOAT_BYTES[dtype]) <= gpu.shared_memory


def test_a_lower_limit_is_kept():
    small = list(attention_tiles(1, 128, "f16", GPUS[90], decode=False, shared_memory=48 * 1024))
    assert small and max(shared_memory_of(t, 128, 2) for t in small) <= 48 * 1024
    assert small[0] != next(attention_tiles(1, 128, "f16", GPUS[90], decode=False))
    assert list(attention_tiles(1, 2048, "f32", GPUS[86], decode=False)) == []


def test_unknown_gpus_are_refused():
    with pytest.raises(TargetError, match="known are 80, 86, 89, 90, 100, 120"):
        gpu_of(70)
