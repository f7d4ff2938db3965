"""The cuts of a program: the parts between attentions, and the values passed from one part to the next."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from enginewright.plugins.tensorrt_rtx.compile.segments import SegmentCut, cut
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.conftest import make_tiny_model
from tests.passes.small_programs import Shape, decoder
from tests.plugins.graphs.linear_session import lowered

aten, ew = torch.ops.aten, torch.ops.ew


def paged(shape: Shape) -> Program:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    return program


def ops(segment: SegmentCut) -> list[str]:
    return [str(node.target).removesuffix(".default") for node in segment.nodes]


@pytest.mark.parametrize("windows", [(0,), (0, 16, 0)])
def test_every_call_runs_once_and_after_what_it_reads(windows: tuple[int, ...]) -> None:
    program = paged(Shape(windows=windows, qk_norm=True))
    pieces = cut(program)
    assert len(pieces) == len(windows) + 1
    assert [[a.layer for a in piece.attentions] for piece in pieces] == [*([i] for i in range(len(windows))), []]
    assert [a.window for piece in pieces for a in piece.attentions] == list(windows)
    there = {program.inputs[name] for name in ("ids", "positions", "rows")}
    for piece in pieces:
        assert set(piece.inputs) <= there
        inside = {n for n in program.graph.nodes if n.op == "get_attr"} | set(piece.inputs)
        for node in piece.nodes:
            assert {n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)} <= inside
            inside.add(node)
        there |= set(piece.outputs)
        for a in piece.attentions:
            assert {a.q, a.k, a.v} <= there
            there.add(a.node)
    assert program.logits in pieces[-1].outputs
    calls = [node for piece in pieces for node in piece.nodes]
    assert len(calls) == len(set(calls))


def test_what_is_made_for_wanted_rows_runs_at_the_end_and_tables_at_the_start() -> None:
    first, middle, last = cut(lowered(make_tiny_model("Llama")))
    assert {"ew.embedding", "ew.rope_table"} <= set(ops(first))
    assert not {"ew.rope_table", "ew.take_rows"} & set(ops(middle))
    assert ops(last).count("ew.take_rows") == 2
    tables = {node for node in middle.inputs if node.target is ew.rope_table.default}
    assert len(tables) == 1 and tables < set(first.outputs)


def test_a_feed_forward_layer_beside_its_attention_runs_behind_it() -> None:
    first, middle, last = cut(lowered(make_tiny_model("GPTNeoX")))
    assert [sum(op == "ew.linear" for op in ops(piece)) for piece in (first, middle, last)] == [1, 4, 4]
    # All that goes past the attention is what both halves of the layer read.
    assert [str(n.target) for n in first.outputs if n not in (first.attentions[0].q, first.attentions[0].k)].count(
        "ew.embedding.default"
    ) == 1


def test_what_is_made_of_weights_alone_is_made_where_it_is_read() -> None:
    program = paged(Shape(windows=(0, 0, 0), tied=True))
    (embedding,) = program.nodes_of(ew.embedding.default)
    table = next(node for node in embedding.all_input_nodes if node.op == "get_attr")
    with program.inserting_before(embedding):
        doubled = program.call(aten.mul.Tensor, table, 2.0, where=("embed",))
    table.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    pieces = cut(program)
    assert [doubled in piece.nodes for piece in pieces] == [True, False, False, True]
    assert not any(doubled in (*piece.inputs, *piece.outputs) for piece in pieces)


def test_what_attention_is_fused_with_is_refused() -> None:
    program = lowered(make_tiny_model("Llama"))
    FuseRopeKvWrite().run(program, PassContext())
    with pytest.raises(UnsupportedModelError, match="attends to a cache"):
        cut(program)


@pytest.mark.parametrize("name", ["kv_len", "slots:full"])
def test_what_only_attention_may_read_is_refused_by_name(name: str) -> None:
    program = paged(Shape())
    logits = program.logits
    with program.inserting_before(program.output):
        total = program.call(aten.sum.default, program.inputs[name], where=("lm_head",))
        moved = program.call(aten.add.Tensor, logits, total, where=("lm_head",))
    program.output.args = ((moved,),)
    with pytest.raises(UnsupportedModelError, match=rf"aten.sum.default at lm_head .* reads {name}"):
        cut(program)
