"""benchmarks/tile_sweep.py without a GPU: by a timer that isn't one, and a clock that is moved."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

import tile_sweep
from gpu_places import Rehearsal

from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.tiles import GPUS, Tile, TileCase, attention_tiles, read_tiles
from enginewright.runtime.shared.errors import BundleError

SCRIPT = Path(tile_sweep.__file__)
DECODE = TileCase(128, 4, "bf16", "bf16", decode=True)
PREFILL = replace(DECODE, decode=False)
BEST = {DECODE: Tile(1, 16, 32, 2, 4), PREFILL: Tile(16, 64, 64, 8, 2)}


def timer(case: TileCase, tile: Tile) -> float | None:
    """Made-up times: nothing runs with 4 warps, and a tile takes longer the further it is from the best."""
    if tile.warps == 4:
        return None
    best = BEST[case]
    return 10.0 + abs(tile.keys - best.keys) + abs(tile.rows - best.rows) + 5 * (tile != best)


def tiles_of(case: TileCase) -> list[Tile]:
    return list(tile_sweep.candidates(case, GPUS[90]))


@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_candidates_hold_what_the_rule_takes_first(capability, group):
    for case in (replace(DECODE, group=group), replace(PREFILL, group=group)):
        tiles = list(tile_sweep.candidates(case, GPUS[capability]))
        assert len(tiles) == len(set(tiles)) > 10
        assert next(attention_tiles(case, GPUS[capability])) in tiles


def test_the_fastest_tile_of_each_case_comes_into_the_table(tmp_path):
    lines: list[str] = []
    best, left_out = tile_sweep.sweep([DECODE, PREFILL], tiles_of, timer, 1.0, lambda: 0.0, lines.append)
    assert {case: tile for case, (tile, _) in best.items()} == BEST and left_out == [] and len(lines) == 2
    path = tmp_path / "tiles.jsonl"
    tile_sweep.merge(path, best)
    assert read_tiles(path) == BEST
    assert '"microseconds": 10.0' in path.read_text()
    other = Tile(1, 16, 64, 4, 3)
    tile_sweep.merge(path, {DECODE: (other, {})})  # a later sweep, of one case
    assert read_tiles(path) == {DECODE: other, PREFILL: BEST[PREFILL]}
    assert path.read_text().count('"microseconds": 10.0') == 1  # what was known of the other case is kept


@pytest.mark.parametrize("seconds", [0, 1, 30])
def test_a_case_that_was_not_finished_is_left_out(seconds):
    times = iter(range(10**6))
    best, left_out = tile_sweep.sweep([DECODE, PREFILL], tiles_of, timer, seconds, lambda: next(times), lambda _: None)
    assert best == ({} if seconds < 30 else best) and left_out[-1] == PREFILL
    assert [*best, *left_out] == [DECODE, PREFILL]


def test_a_case_that_nothing_runs_is_left_out():
    best, left_out = tile_sweep.sweep([DECODE], tiles_of, lambda case, tile: None, 1.0, lambda: 0.0)
    assert best == {} and left_out == [DECODE]


def test_tiles_that_do_not_fit_or_need_a_stack_are_not_compiled_for(monkeypatch, tmp_path):
    """Compiled for real: 128 x 128 of 4 warps has no registers enough. What is packed can be looked up."""
    tiles = [Tile(32, 128, 128, 4, 2), Tile(32, 128, 64, 8, 3)]
    monkeypatch.setattr(tile_sweep, "candidates", lambda case, gpu: iter(tiles))
    with KernelCompiler(1) as compiler:
        tile_sweep.pack(tmp_path / "tiles", GPUS[80], compiler, [PREFILL])
    assert tile_sweep.packed(tmp_path / "tiles") == {PREFILL: tiles[1:]}
    place = Rehearsal("8.0", interpreted=False, device="meta")
    launcher = place.launcher(tmp_path / "tiles", None)
    timer, _ = tile_sweep.gpu_timer(launcher, place)
    assert timer(PREFILL, tiles[1]) is None
    with pytest.raises(BundleError, match="paged_attention"):
        timer(PREFILL, tiles[0])


def test_the_table_is_made_from_what_was_found_elsewhere(tmp_path):
    times = {tile: timer(DECODE, tile) for tile in tiles_of(DECODE)}
    record = tile_sweep.record_of(DECODE, {tile: took for tile, took in times.items() if took is not None})
    records = tmp_path / "A.jsonl"
    records.write_text('{"part": "facts"}\n' + json.dumps({"part": "tiles", **record}) + "\n")
    table = tmp_path / "tiles.jsonl"
    command = [sys.executable, str(SCRIPT), "--found", str(records), "--output", str(table)]
    assert subprocess.run(command, check=False).returncode == 0
    assert read_tiles(table) == {DECODE: BEST[DECODE]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "torch sees no GPU" in done.stderr
