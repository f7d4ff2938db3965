"""Specs of kernels, without Triton: names that say what they are for, grids that suffice, shapes that are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewright.plugins.gpu.specs import (
    TILE_CONSTANTS,
    AttentionShape,
    attention_spec,
    combine_spec,
    splits_of,
    taken_constants,
    tiles_of_step,
    write_spec,
)
from enginewright.plugins.gpu.tiles import GPUS, Tile
from enginewright.runtime.shared.errors import TargetError

SHAPE = AttentionShape(9, 3, 64, 64, 32, "f16", "int8", 0.125)
TILE = Tile(1, 16, 64, 4, 3)


def test_arguments_are_inputs_integers_outputs():
    names = [name for name, _ in attention_spec(SHAPE, 90, TILE, 512).arguments]
    assert names == [
        *("q", "k_cache", "v_cache", "k_scales", "v_scales", "block_table", "q_start", "kv_len", "sinks", "slopes"),
        *("requests", "blocks", "q_stride"),
        *("out", "lse"),
    ]
    assert attention_spec(replace(SHAPE, cache="f16"), 90, TILE, 0).arguments[-1] == ("out", "*fp16")
    written = write_spec(replace(SHAPE, cache="f16"), 90).arguments
    assert [n for n, of in written if of == "i32"] == ["capacity", "k_stride", "v_stride"]
    assert written[-2:] == (("k_cache", "*fp16"), ("v_cache", "*fp16"))
    assert combine_spec(SHAPE, 90).arguments[-1] == ("out", "*fp16")


def test_attention_kernels_take_what_they_share_of_constants_as_one():
    spec = attention_spec(SHAPE, 90, TILE, 512, clamp=True)
    constants = taken_constants(spec.kernel, dict(spec.constants))
    assert set(constants) == {"C", "CLAMP"} and vars(constants["C"]) | {"CLAMP": True} == dict(spec.constants)
    written = dict(write_spec(SHAPE, 90).constants)
    assert taken_constants("kv_write", written) == written


@pytest.mark.parametrize("heads", [9, 71])
def test_a_kernel_is_read_whatever_its_tile_is(heads):
    """Constants that differ between tiles aren't compared; with 16 rows several programs divide 71 heads."""
    shape = replace(SHAPE, heads=heads, kv_heads=1)
    few, many = (dict(attention_spec(shape, 100, Tile(n, 16 * n, 64, 4, 3), 0).constants) for n in (1, 8))
    assert {name for name in few if few[name] != many[name]} <= set(TILE_CONSTANTS)
    assert (few["SHARES"], many["SHARES"]) == ((1, 1) if heads == 9 else (71, 1))


def test_stems_tell_everything_apart_and_nothing_else():
    specs = [attention_spec(SHAPE, c, TILE, s) for c in GPUS for s in (0, 512)]
    specs += [attention_spec(replace(SHAPE, scale=0.1), 90, TILE, 0), write_spec(SHAPE, 90), combine_spec(SHAPE, 90)]
    assert len({s.stem for s in specs}) == len(specs)
    assert combine_spec(SHAPE, 90).stem == combine_spec(replace(SHAPE, window=8), 90).stem
    assert attention_spec(SHAPE, 80, TILE, 0).stem.startswith("paged_attention-sm80-")


def test_strides_are_promised_to_be_aligned_only_where_they_are():
    assert write_spec(SHAPE, 90).aligned == ("k_stride", "v_stride")
    assert write_spec(replace(SHAPE, head_size=72), 90).aligned == ("v_stride",)
    assert attention_spec(replace(SHAPE, head_size=72), 90, TILE, 0).aligned == ()


@given(st.lists(st.integers(0, 70), min_size=1, max_size=12), st.integers(1, 40))
def test_the_grid_has_a_tile_for_every_token(lengths, queries):
    """The kernel counts so: request b's tiles begin at q_start[b] // queries + b."""
    starts = [0, *accumulate(lengths)]
    total = tiles_of_step(starts[-1], len(lengths), queries)
    for b, n in enumerate(lengths):
        begins = starts[b] // queries + b
        ends = starts[b + 1] // queries + b + 1
        assert ends - begins >= -(-n // queries) and ends <= total


def test_splits_cover_the_longest_context():
    assert [splits_of(blocks, 32, 512) for blocks in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]


def test_shapes_that_no_kernel_has_are_refused():
    with pytest.raises(TargetError, match="a multiple of 4"):
        replace(SHAPE, kv_heads=4)
    with pytest.raises(TargetError, match="queries of f16 over a cache of bf16"):
        replace(SHAPE, cache="bf16")
    assert replace(SHAPE, dtype="f32", cache="bf16").cache == "bf16"
