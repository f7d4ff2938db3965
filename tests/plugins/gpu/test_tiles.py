"""Sizes of tiles: within every GPU's shared memory, whatever the heads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from enginewright.plugins.gpu import tiles as tiles_module
from enginewright.plugins.gpu.tiles import (
    GPUS,
    SPLIT_KEYS,
    Tile,
    TileCase,
    attention_tiles,
    code_for,
    gpu_of,
    least_shared_memory,
    measured_tiles,
    power_of_2,
    read_tiles,
    shares_of,
    width_of,
    write_tiles,
)
from enginewright.runtime.shared.errors import TargetError


def test_powers_of_2():
    assert [power_of_2(n) for n in (1, 2, 3, 4, 80, 128, 129)] == [1, 2, 4, 4, 128, 128, 256]
    assert [width_of(n) for n in (4, 64, 80)] == [16, 64, 128]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
@pytest.mark.parametrize("decode", [True, False])
def test_there_are_tiles_for_the_usual_heads(gpu, decode):
    for group, size, cache in itertools.product((1, 3, 4, 8, 71), (64, 80, 128, 256), ("bf16", "f32", "int8", "fp8")):
        case = TileCase(size, group, "f32" if cache == "f32" else "bf16", cache, decode)
        tiles = list(attention_tiles(case, gpu))
        assert tiles and len(set(tiles)) == len(tiles)
        for tile in tiles:
            assert tile.rows == power_of_2(tile.rows) >= max(16, group * tile.queries)
            assert tile.queries == 1 or not decode
            assert tile.keys == power_of_2(tile.keys) <= SPLIT_KEYS and tile.keys >= 16
            assert least_shared_memory(tile, case, gpu) <= gpu.shared_memory


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
@pytest.mark.parametrize("decode", [True, False])
def test_a_program_has_some_heads_over_a_latent_vector(gpu, decode):
    """A tile of all 128 heads of DeepSeek-V3 has more results than registers."""
    for group, size in itertools.product((1, 20, 40, 128), (24, 288, 576)):
        case = TileCase(size, group, "bf16", "bf16", decode, values_in_keys=True)
        tiles = list(attention_tiles(case, gpu))
        assert tiles and len(set(tiles)) == len(tiles)
        for tile in tiles:
            heads = group // shares_of(group, tile.rows)
            assert group % heads == 0 and tile.rows >= heads * tile.queries >= 1
        assert tiles[-1].rows == 16
    assert [shares_of(group, 16) for group in (1, 16, 20, 40, 128, 17)] == [1, 1, 2, 4, 8, 17]


def test_code_runs_where_it_is_not_bound_to_another_gpu():
    assert [code_for(on, (80, 86, 90, 100, 120)) for on in (75, 80, 86, 89, 90, 100, 103, 120, 121)] == [
        *(None, 80, 86, 86, 90, 100, 86, 120, 86)
    ]
    assert code_for(103, (90, 100)) is None and code_for(90, (80,)) == 80
    families = (100, 120)  # then 10.3 and 12.1 run machine code; 11.0 is of no family
    assert [code_for(on, (80, 100, 120), families) for on in (100, 103, 110, 120, 121)] == [100, 100, 80, 120, 120]
    assert [gpu.architecture for gpu in GPUS.values()] == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120f"]
    assert [gpu.portable_memory // 1024 for gpu in GPUS.values()] == [99, 99, 99, 227, 227, 99]


def test_tiles_that_cannot_fit_are_left_out():
    case = TileCase(128, 1, "f16", "f16", decode=False)
    small = list(attention_tiles(case, GPUS[90], 48 * 1024))
    assert small and max(least_shared_memory(t, case, GPUS[90]) for t in small) <= 48 * 1024
    assert small[0] != next(attention_tiles(case, GPUS[90]))
    tile = Tile(32, 128, 128, 8, 3)
    assert least_shared_memory(tile, case, GPUS[90]) == 2 * 128 * (128 + 128) * 2
    assert least_shared_memory(tile, case, GPUS[100]) == 128 * (128 + 128) * 2


CASE, TILE = TileCase(128, 4, "bf16", "fp8", decode=True), Tile(1, 16, 64, 4, 4)


def test_a_measured_tile_comes_first(tmp_path, monkeypatch):
    other = replace(CASE, decode=False)
    monkeypatch.setattr(tiles_module, "measured_tiles", lambda capability: {})
    rule = list(attention_tiles(CASE, GPUS[90]))
    measured = rule[3]
    path = tmp_path / "tiles_sm90.jsonl"
    write_tiles(path, {CASE: (measured, {"microseconds": 12.5}), other: (Tile(8, 32, 32, 4, 2), {})})
    assert read_tiles(path) == {CASE: measured, other: Tile(8, 32, 32, 4, 2)}
    assert len(path.read_text().splitlines()) == 2 and '"microseconds": 12.5' in path.read_text()
    monkeypatch.setattr(tiles_module, "measured_tiles", lambda capability: read_tiles(path) if capability == 90 else {})
    assert list(attention_tiles(CASE, GPUS[90])) == [measured, *(tile for tile in rule if tile != measured)]
    assert next(attention_tiles(other, GPUS[90])) == Tile(8, 32, 32, 4, 2)
    assert next(attention_tiles(CASE, GPUS[89])) != measured


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"head_size": 64', '{"head_size": 64, "group": 1}'])
def test_a_table_that_is_damaged_is_refused_by_line(tmp_path, line):
    path = tmp_path / "tiles.jsonl"
    write_tiles(path, {CASE: (TILE, {})})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TargetError, match=r"tiles.jsonl:2: isn't a tile"):
        read_tiles(path)


@pytest.mark.parametrize("capability", list(GPUS))
def test_committed_tables_can_be_read(capability):
    for case, tile in measured_tiles(capability).items():
        assert (tile.rows >= case.group * tile.queries and tile.queries == 1) or not case.decode


def test_unknown_gpus_are_refused():
    with pytest.raises(TargetError, match="known are 80, 86, 89, 90, 100, 120"):
        gpu_of(70)
