from __future__ import annotations

import operator

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import PassError
from tests.passes.small_programs import (
    PagedEvaluation,
    Shape,
    captured_programs,
    decoder,
    evaluate,
    program_from,
    random_sequences,
    whole_inputs,
)

ew = torch.ops.ew
# Both references sum over keys in one einsum, in another order: float32 rounding of logits of size 10.
TOLERANCE = 1e-5


def lowered(shape: Shape) -> tuple[Program, Program]:
    captured = decoder(shape)
    paged = captured.copy()
    LowerAttention().run(paged, PassContext())
    return captured, paged


def test_each_attention_becomes_a_write_and_a_read() -> None:
    _, paged = lowered(Shape(windows=(0, 0, 0)))
    assert not paged.nodes_of(ew.attention.default)
    reads = paged.nodes_of(ew.paged_attention.default)
    assert len(reads) == 3
    for layer, read in enumerate(reads):
        k_cache = read.args[1]
        assert k_cache.target is operator.getitem
        assert [a.target for a in k_cache.args[0].args[:2]] == [f"k_cache:{layer}", f"v_cache:{layer}"]
        assert [str(s) for s in paged.shape(k_cache)] == ["P", "32", "2", "8"]


def test_layers_of_one_kind_share_a_group() -> None:
    _, paged = lowered(Shape(windows=(8, 0, 8, 0)))
    assert [(g.name, g.layers, g.window) for g in paged.cache_groups] == [
        ("window8", (0, 2), 8),
        ("full", (1, 3), 0),
    ]
    names = set(paged.inputs)
    assert {"block_table:window8", "slots:window8", "block_table:full", "slots:full"} <= names
    assert not names & {"block_table", "slots"}


def test_groups_that_differ_in_head_size_alone_get_names_of_their_own() -> None:
    def call(_: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        x = inputs["ids"].float()
        a = x[:, None, None].expand(-1, 2, 4).contiguous()
        b = x[:, None, None].expand(-1, 2, 8).contiguous()
        one = ew.attention(a, a, a, inputs["q_start"], 0, 1.0, 0, 0.0, None)
        two = ew.attention(b, b, b, inputs["q_start"], 1, 1.0, 0, 0.0, None)
        return ew.take_rows(torch.cat((one.flatten(1), two.flatten(1)), -1), inputs["rows"])

    program = program_from(call)
    LowerAttention().run(program, PassContext())
    assert [(g.name, g.key_head_size) for g in program.cache_groups] == [("full", 4), ("full-2", 8)]


@pytest.mark.parametrize("name", list(captured_programs()))
def test_numbers_whole_ragged_chunked_and_decoded(name: str) -> None:
    captured, paged = lowered(captured_programs()[name])
    sequences = random_sequences((37, 1, 70), 67)
    expected = evaluate(captured, whole_inputs(sequences))
    whole = PagedEvaluation(paged)
    torch.testing.assert_close(whole.run(dict(zip("abc", sequences, strict=True))), expected, rtol=0, atol=TOLERANCE)

    chunked = PagedEvaluation(paged, seed=1)
    chunked.run({"a": sequences[0][:20], "c": sequences[2][:33]})
    chunked.run({"c": sequences[2][33:69], "a": sequences[0][20:36]})
    last = chunked.run({"a": sequences[0][36:], "b": sequences[1], "c": sequences[2][69:]})
    torch.testing.assert_close(last, expected, rtol=0, atol=TOLERANCE)


def test_refuses_two_attentions_of_one_layer() -> None:
    def call(_: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        x = inputs["ids"].float()[:, None, None].expand(-1, 2, 4).contiguous()
        x = ew.attention(x, x, x, inputs["q_start"], 3, 1.0, 0, 0.0, None)
        x = ew.attention(x, x, x, inputs["q_start"], 3, 1.0, 0, 0.0, None)
        return ew.take_rows(x.flatten(1), inputs["rows"])

    with pytest.raises(PassError, match="layer number 3"):
        LowerAttention().run(program_from(call), PassContext())


def test_refuses_a_program_without_attention() -> None:
    _, paged = lowered(Shape())
    with pytest.raises(PassError, match="requires"):
        LowerAttention().run(paged, PassContext())
