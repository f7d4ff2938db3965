"""RoundKvCache: structure, and numbers against a cache that is rounded by hand."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.kv_formats import KV_FORMATS, CacheDtype
from tests.passes.small_programs import BLOCK, PagedEvaluation, Shape, decoder, random_sequences

ew = torch.ops.ew
DTYPES: tuple[CacheDtype, ...] = ("bf16", "i8", "fp8", "k6v4")


def paged(shape: Shape, dtype: CacheDtype) -> Program:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    RoundKvCache().run(program, PassContext(recipe=PassOptions(kv_cache=CacheOptions(dtype=KV_FORMATS[dtype].name))))
    return program


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_write_and_every_group_has_the_format(dtype: CacheDtype) -> None:
    program = paged(Shape(windows=(8, 0, 8)), dtype)
    writes = program.nodes_of(ew.kv_write.default)
    assert [bound_arguments(w)["dtype"] for w in writes] == [dtype] * 3
    assert [g.dtype for g in program.cache_groups] == [dtype] * 2
    fused = program.copy()
    FuseRopeKvWrite().run(fused, PassContext())
    assert [bound_arguments(w)["dtype"] for w in fused.nodes_of(ew.rope_kv_write.default)] == [dtype] * 3
    for lowered in (lower_program(program).program, lower_program(fused).program):
        assert [g.dtype for g in lowered.cache_groups] == [dtype] * 2


@pytest.mark.parametrize(("dtype", "rounded"), [("bf16", "bf16"), ("i8", "f32"), ("f32", "f32")])
def test_attention_without_a_cache_rounds_to_bf16_alone(dtype: CacheDtype, rounded: str) -> None:
    program = decoder(Shape())
    RoundKvCache().run(program, PassContext(recipe=PassOptions(kv_cache=CacheOptions(dtype=KV_FORMATS[dtype].name))))
    assert {bound_arguments(node)["dtype"] for node in program.nodes_of(ew.attention.default)} == {rounded}


def test_a_cache_of_floats_is_left_alone() -> None:
    program = decoder(Shape())
    LowerAttention().run(program, PassContext())
    assert not RoundKvCache().wanted(PassContext())
    assert RoundKvCache().run(program, PassContext()).matched == 0
    assert {g.dtype for g in program.cache_groups} == {"f32"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("windows", [(0, 0), (8, 0)])
def test_a_chunk_reads_its_own_keys_rounded(dtype: CacheDtype, windows: tuple[int, ...]) -> None:
    program, exact = paged(Shape(windows=windows), dtype), paged(Shape(windows=windows), "f32")
    (sequence,) = random_sequences((70,), 67)
    whole = PagedEvaluation(program).run({"a": sequence})
    chunked = PagedEvaluation(program, seed=1)
    chunked.run({"a": sequence[:20]})
    chunked.run({"a": sequence[20:69]})
    # The rounded values are the same; torch sums over keys in another order. A code of 8 bits may fall the other way
    # where its value is a tie but for that.
    torch.testing.assert_close(chunked.run({"a": sequence[69:]})[-1], whole[-1], rtol=0, atol=1e-4)
    difference = (whole - PagedEvaluation(exact).run({"a": sequence})).abs().max()
    assert 1e-4 < difference < 1, "it is rounded, and it is the same model"


def test_ends_have_a_second_cache_except_in_short_windows() -> None:
    program = paged(Shape(windows=(8, 0, 2000)), "k4v4")
    groups = {g.name: (g.dtype, g.layers, g.window, g.first) for g in program.cache_groups}
    assert groups == {
        "window8": ("k8v8", (0,), 8, 0),
        "full": ("k4v4", (1,), 0, 0),
        "window2000": ("k4v4", (2,), 2000, 0),
        "full-ends": ("k8v8", (1,), 256, 128),
        "window2000-ends": ("k8v8", (2,), 256, 128),
    }
    lowered = lower_program(program).program
    read = [[o.name for o in s.inputs if o.kind == "cache"] for s in lowered.steps if s.op == "paged_attention"]
    assert read == [["window8/0"], ["full/1", "full-ends/1"], ["window2000/2", "window2000-ends/2"]]
    written = [s.inputs[3].name for s in lowered.steps if s.op == "kv_write"]
    assert sorted(written) == sorted(name for names in read for name in names)


def logits(dtype: CacheDtype, sequence: list[int], chunks: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The logits of all tokens, which come in ``chunks``."""
    evaluation, done, rows = PagedEvaluation(paged(Shape(), dtype), -(-len(sequence) // BLOCK), seed), 0, []
    for count in chunks:
        rows.append(evaluation.run({"a": sequence[done : done + count]}, range(count)))
        done += count
    return torch.cat(rows)


def test_positions_alone_decide_which_cache_is_read() -> None:
    (sequence,) = random_sequences((560,), 67)
    whole = logits("k4v4", sequence, (560,))
    for chunks in ((513, 47), (130, 254, 176)):
        torch.testing.assert_close(logits("k4v4", sequence, chunks, seed=1), whole, rtol=0, atol=1e-4)
    away = (whole - logits("k8v8", sequence, (560,))).abs().amax(-1)
    assert away[:384].max() < 1e-5, "the first run, the one before and a query's own have 8 bits"
    assert away[384:].max() > 1e-3, "the run between has 4"
