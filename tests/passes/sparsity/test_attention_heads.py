"""Attentions whose heads can go: which they are, what is left of the program, and what is in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.verify_program import verify_program
from enginewright.passes.ir.chosen_rows import Chosen
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from enginewright.passes.sparsity.attention_heads import Heads, attention_heads
from tests.passes.sparsity.pruned import logits, normal

aten, ew = torch.ops.aten, torch.ops.ew

# The same products in other groups: rounding of float32.
TOLERANCE = 2e-5
WIDE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def silence(program: Program, heads: Heads, gone: list[int]) -> None:
    """Sets the columns behind some query heads to zero, so that they add nothing."""
    weight = heads.site.output.args[1]
    expr = program.weight_of(weight)
    assert expr is not None and isinstance(weight, torch.fx.Node)
    value = expr.evaluate().clone()
    value[:, heads.columns(gone)] = 0
    program.change_weight(weight, Source(str(weight.target), expr.shape, expr.dtype, lambda: value))


@pytest.mark.parametrize(
    ("family", "overrides", "queries", "groups"),
    [
        ("Llama", {}, (0, 3), (0, 1)),  # one of each group
        ("Llama", WIDE, (0, 1, 4, 5), (0, 2)),  # a group goes with its keys and values
        ("Phi3", {}, (2, 3), (1,)),  # one linear for all three
        ("GPT2", {}, (1, 2, 3), (1, 2, 3)),  # biases; as many keys as queries
    ],
)
def test_what_is_left_computes_the_same(
    family: str, overrides: dict[str, Any], queries: tuple[int, ...], groups: tuple[int, ...]
) -> None:
    program = normal(family, **overrides)
    heads, rejected = attention_heads(program)
    assert len(heads) == 2 and not rejected
    one = heads[1]
    size = one.value_size
    assert (one.queries, one.groups, size) == (6, 3, 16) if overrides else (one.queries, size) == (4, 16)
    assert one.columns([1, 0]) == [*range(size, 2 * size), *range(size)]
    silence(program, one, [h for h in range(one.queries) if h not in queries])
    before = logits(program)
    output = program.weight_of(one.site.output.args[1])
    assert output is not None
    one.keep(program, queries, groups, Chosen(output, 1, tuple(one.columns(queries))))
    program.remove_dead_code()
    verify_program(program)
    for now, expected in zip(logits(program), before, strict=True):
        torch.testing.assert_close(now, expected, rtol=TOLERANCE, atol=TOLERANCE)
    whole, left = program.nodes_of(ew.attention.default)
    shapes = [[int(program.value(bound_arguments(n)[x]).shape[1]) for x in "qkv"] for n in (whole, left)]
    assert shapes == [[heads[0].queries, *[heads[0].groups] * 2], [len(queries), len(groups), len(groups)]]
    again, _ = attention_heads(program)  # it can be pruned further
    assert [(h.queries, h.groups) for h in again] == [(heads[0].queries, heads[0].groups), (len(queries), len(groups))]


@pytest.mark.matrix
def test_numbers_of_each_head_go_with_them() -> None:
    program = normal("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=16)
    one = attention_heads(program)[0][0]
    sinks = bound_arguments(one.site.attention)["sinks"]
    before = program.weight_of(sinks)
    assert before is not None
    values = before.evaluate()
    output = program.weight_of(one.site.output.args[1])
    assert output is not None
    one.keep(program, (3, 0), (1, 0), Chosen(output, 1, tuple(one.columns((3, 0)))))
    after = program.weight_of(sinks)
    assert after is not None and torch.equal(after.evaluate(), values[[3, 0]])


def test_what_is_in_the_way() -> None:
    program = normal("Llama")
    heads, _ = attention_heads(program)
    (rotation,) = heads[0].site.q.post
    key, other = heads[1].site.k.linear, heads[1].site.v.linear
    with program.inserting_before(heads[0].site.attention):
        seen = program.call(aten.neg.default, heads[0].site.q.pre, where=("x",))
    with program.inserting_before(heads[1].site.attention):
        product = program.call(aten.mul.Tensor, key, other, where=("x",))
    assert set(heads[0].site.q.pre.users) == {rotation, seen}
    left, rejected = attention_heads(program)
    assert not left and [r.where for r in rejected] == [h.path for h in heads]
    assert [r.reason for r in rejected] == [
        f"what {heads[0].site.q.linear.name} gives is read by others than the attention",
        f"{key.name} is also read by {product.name}",
    ]


def test_a_program_without_attention_has_none() -> None:
    program = normal("Llama")
    for node in program.nodes_of(ew.attention.default):
        program.replace(node, node.args[0])  # type: ignore[arg-type]
    assert attention_heads(program) == ([], [])
