from __future__ import annotations

import operator

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.fusion import fuse_rope_kv_write
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from tests.passes.captured import op_counts
from tests.passes.fusion.fused import fuse, prepared
from tests.passes.small_programs import Shape, decoder

aten, ew = torch.ops.aten, torch.ops.ew


def _paged(shape: Shape) -> Program:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    return program


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(windows=(8, 0, 8), kv_heads=4, head_size=12, tied=False),
        Shape(qk_norm=True, bias=(True, False, True), layer_norm=True),
    ],
)
def test_every_layer(shape: Shape) -> None:
    before = _paged(shape)
    after, record = fuse(before, FuseRopeKvWrite())
    assert record.matched == len(shape.windows) and not record.rejected
    assert not after.nodes_of(ew.rope.default, ew.kv_write.default)
    for fused, attention in zip(
        after.nodes_of(ew.rope_kv_write.default), after.nodes_of(ew.paged_attention.default), strict=True
    ):
        assert [n.target for n in attention.args[:3]] == [operator.getitem] * 3
        assert [n.args for n in attention.args[:3]] == [(fused, i) for i in range(3)]


def _with_ends() -> Program:
    program = _paged(Shape(windows=(0, 8, 2000), head_size=16))
    RoundKvCache().run(program, PassContext(recipe=PassOptions(kv_cache=CacheOptions(dtype="k4v4"))))
    return program


def test_a_second_cache_is_written_in_the_same_op() -> None:
    before = _with_ends()
    after, record = fuse(before, FuseRopeKvWrite(ends=True))
    assert record.matched == 3 and not record.rejected
    assert not after.nodes_of(ew.rope.default, ew.kv_write.default)
    first, window, last = after.nodes_of(ew.paged_attention.default)
    assert [op_counts(after)[f"ew.{op}"] for op in ("rope_kv_write", "rope_kv_write_with_ends")] == [1, 2]
    assert "ends_k_cache" not in window.kwargs
    for fused, attention in zip(after.nodes_of(ew.rope_kv_write_with_ends.default), (first, last), strict=True):
        read = [*attention.args[:3], attention.kwargs["ends_k_cache"], attention.kwargs["ends_v_cache"]]
        assert [n.args for n in read if isinstance(n, torch.fx.Node)] == [(fused, i) for i in range(5)]


def test_a_second_cache_is_written_apart_for_targets_without_the_op() -> None:
    program = _with_ends()
    record = FuseRopeKvWrite().run(program, PassContext())
    assert record.matched == 1  # the window of 8 tokens, which has one cache
    assert [r.reason for r in record.rejected] == ["a rotated query or key is read elsewhere"] * 2


def test_a_second_cache_of_other_values_stays() -> None:
    program = _with_ends()
    write = program.nodes_of(ew.kv_write.default)[1]
    with program.inserting_before(write):
        write.args = (*write.args[:3], program.call(aten.neg.default, write.args[3], where=("x",)), *write.args[4:])
    record = FuseRopeKvWrite(ends=True).run(program, PassContext())
    assert record.matched == 2
    assert [r.reason for r in record.rejected] == ["the second cache has other keys or values"]


@pytest.mark.matrix
def test_a_part_of_the_head() -> None:
    after, record = fuse(prepared("GPTNeoX", "int8", 96), FuseRopeKvWrite())
    assert record.matched == 2 and op_counts(after)["ew.rope_kv_write"] == 2


def _behind(program: Program, node: torch.fx.Node) -> None:
    """Puts something between a node and all that read it."""
    with program.inserting_before(node.next):
        more = program.call(aten.neg.default, node, where=("x",))
    node.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("keys", ["the keys are not rotated right before they are written"]),
        ("queries", ["the queries are not rotated right before attention"]),
        ("tables", ["queries and keys are rotated by different tables"]),
        ("long", ["heads of 8 are longer than 4"]),
        ("elsewhere", ["a rotated query or key is read elsewhere"]),
        (
            "another attention",
            ["the queries are not rotated right before attention", "the cache is read before this attention"],
        ),
        ("neither", []),
    ],
)
def test_what_stays(kind: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = _paged(Shape(windows=(0,)))
    (attention,), (write,) = program.nodes_of(ew.paged_attention.default), program.nodes_of(ew.kv_write.default)
    query, key = attention.args[0], write.args[2]
    if kind in ("keys", "neither"):
        _behind(program, key)
    if kind in ("queries", "neither"):
        _behind(program, query)
    if kind == "tables":
        with program.inserting_before(key):
            key.args = (key.args[0], program.call(aten.mul.Tensor, key.args[1], 2, where=("x",)), False)
    if kind == "long":
        monkeypatch.setattr(fuse_rope_kv_write, "LONGEST_HEAD", 4)
    if kind == "elsewhere":
        with program.inserting_before(attention.next):
            other = program.call(aten.neg.default, query, where=("x",))
    if kind == "another attention":  # of the same keys and values
        with program.inserting_before(attention):
            other = program.call(aten.neg.default, query.args[0], where=("x",))
            other = program.call(attention.target, other, *attention.args[1:], where=("x",))
    if kind in ("elsewhere", "another attention"):
        with program.inserting_before(max(attention, other).next):
            total = program.call(aten.add.Tensor, attention, other, where=("x",))
        attention.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    record = FuseRopeKvWrite().run(program, PassContext())
    assert not record.matched and [r.reason for r in record.rejected] == reasons
    assert len(program.nodes_of(ew.rope.default)) == 2
