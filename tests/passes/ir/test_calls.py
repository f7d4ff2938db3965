"""The calls of programs, and the linears of fused products."""

from __future__ import annotations

import pytest

from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_qkv import FuseQkv
from enginewright.passes.ir.calls import LINEARS, calls_of, pieces_of
from tests.passes.small_programs import Shape, decoder


@pytest.mark.parametrize(
    ("where", "name", "parts", "expected"),
    [
        (["a.q"], "a.q.weight", [("x", 3), ("y", 4)], [("a.q", 0, 7)]),
        (["a.k", "a.q"], "a.q+k.weight", [("a.q.weight", 3), ("a.k.weight", 4)], [("a.q", 0, 3), ("a.k", 3, 7)]),
        (["a.q", "a.k"], "a.q+k.weight", [("blk.0.q", 3), ("blk.0.k", 4)], [("a.q", 0, 3), ("a.k", 3, 7)]),
        (["a.act", "a.fc"], "a.fc.weight_transposed", [("blk.0.up", 5)], [("a.fc", 0, 5)]),
        (["a", "a.fc"], "a.fc.weight", [("a.fc.weight", 5)], [("a.fc", 0, 5)]),
        (["a.g", "a.u"], "a.g+u.weight", [("g", 1), ("g", 2), ("u", 3)], [("a.g", 0, 3), ("a.u", 3, 6)]),  # pruned
        (["a.q", "b.k"], "strange", [("x", 3), ("y", 4)], []),
    ],
)
def test_the_linear_of_each_row_of_a_weight(
    where: list[str], name: str, parts: list[tuple[str, int]], expected: list[tuple[str, int, int]]
) -> None:
    assert [(p.path, p.start, p.stop) for p in pieces_of(where, name, parts)] == expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 8)])
def test_a_fused_product_has_a_piece_for_each_linear(heads: int, kv_heads: int) -> None:
    program = decoder(Shape(hidden=64, heads=heads, kv_heads=kv_heads))
    before = [piece for call in calls_of(program) if call.op in LINEARS for piece in call.pieces]
    assert FuseQkv().run(program, PassContext()).matched
    fused = [call.pieces for call in calls_of(program) if call.op in LINEARS]
    assert sorted(p.path for p in before) == sorted(p.path for pieces in fused for p in pieces)
    assert max(map(len, fused)) == 3
    for pieces in fused:
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
