"""Heads that add nothing, or what others can compensate for, go without a trace, alone and by groups."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pruning import PruneOverride, Pruning
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import Part
from enginewright.passes.sparsity.fit_removed import ERROR
from enginewright.passes.sparsity.prune_heads import GROUPS_KEPT, PruneHeads
from enginewright.runtime.shared.errors import PassError, RecipeError
from tests.passes.sparsity.pruned import Change, assert_lossless, changed, normal, prune

D = 16


def zero_heads(*heads: int, axis: int = 1) -> Change:
    def change(value: torch.Tensor) -> None:
        for head in heads:
            value.narrow(axis, head * D, D).zero_()

    return change


def sizes(program: Program) -> list[tuple[int, int]]:
    """Query and key/value heads of each attention."""
    nodes = program.nodes_of(torch.ops.ew.attention.default)
    return [tuple(int(program.value(bound_arguments(n)[x]).shape[1]) for x in "qk") for n in nodes]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("family", "name", "dead", "share", "left"),
    [
        ("Llama", "o_proj.weight", (1, 2), 0.5, (2, 2)),  # one of each of two groups
        ("Llama", "o_proj.weight", (2, 3), 0.5, (2, 1)),  # a group with its keys and values
        ("Qwen3", "o_proj.weight", (0, 3), 0.5, (2, 2)),  # behind norms of queries and keys
        ("Phi3", "o_proj.weight", (0, 1), 0.5, (2, 1)),  # one linear for all three
        ("GPTNeoX", "dense.weight", (1,), 0.25, (3, 3)),  # rows of each head's q, k and v together; biases
    ],
)
def test_heads_that_add_nothing_go_without_a_trace(
    family: str, name: str, dead: tuple[int, ...], share: float, left: tuple[int, int]
) -> None:
    program = changed(family, {name: zero_heads(*dead)})
    assert_lossless(program, PruneHeads(), Pruning(heads=share), 2e-5)
    assert sizes(program) == [left, left]


def test_heads_of_a_transposed_linear_of_six_heads() -> None:
    program = changed("GPT2", {"attn.c_proj.weight": zero_heads(0, 4, axis=0)}, n_embd=96, n_head=6)
    assert_lossless(program, PruneHeads(), Pruning(heads=1 / 3), 2e-5)
    assert sizes(program) == [(4, 4), (4, 4)]


def test_a_head_that_is_another_over_again_is_made_up_for() -> None:
    def same(value: torch.Tensor) -> None:
        value[D : 2 * D] = value[:D]

    program = changed("Llama", {"q_proj.weight": same}, num_key_value_heads=1)
    # Solved with a damping of 1e-7 of the mean moment, which is what is lost.
    record = assert_lossless(program, PruneHeads(), Pruning(heads=0.25), 1e-4)
    assert sizes(program) == [(3, 1), (3, 1)]
    assert max(f.value for f in record.metrics if f.name == ERROR) < 1e-7


def test_what_is_left_says_which_rows_it_is() -> None:
    program = changed("Llama", {"o_proj.weight": zero_heads(2, 3)})
    record = prune(program, PruneHeads(), Pruning(heads=0.5))
    assert [f.value for f in record.metrics if f.name == GROUPS_KEPT] == [1, 1]
    prefix = "model.layers.1.self_attn"
    for name, rows in (("q_proj", 2 * D), ("k_proj", D), ("v_proj", D)):
        assert program.weights[f"{prefix}.{name}.weight"].parts(0) == (Part(f"{prefix}.{name}.weight", 0, rows),)
    output = program.weights[f"{prefix}.o_proj.weight"]
    assert output.parts(0) == (Part(f"{prefix}.o_proj.weight", 0, 64),)
    assert output.parts(1) == (Part(f"{prefix}.o_proj.weight", 0, 2 * D, 1),)


@pytest.mark.parametrize(("share", "groups", "kept"), [(0.3, 1, 2), (0.2, 1, 4), (0.75, 1, 1), (0.75, 32, 2)])
def test_as_many_as_can_be_left(share: float, groups: int, kept: int) -> None:
    program = normal("Llama")  # 4 heads, two of which share keys and values: 1, 2 or 4 can be left
    if kept == 4:
        with pytest.raises(PassError, match=r"no head of this model can go: .* of 1, 2, 4"):
            prune(program, PruneHeads(), Pruning(heads=share, multiple=groups))
        return
    prune(program, PruneHeads(), Pruning(heads=share, multiple=groups))
    assert [q for q, _ in sizes(program)] == [kept, kept]


def test_overrides_and_what_must_not_be_pruned() -> None:
    program = normal("Llama")
    prune(program, PruneHeads(), Pruning(overrides=(PruneOverride(layers="model.layers.1.self_attn", heads=0.5),)))
    assert [q for q, _ in sizes(program)] == [4, 2]
    with pytest.raises(RecipeError, match=r"'\*\.mlp\.\*' matches nothing"):
        prune(program, PruneHeads(), Pruning(overrides=(PruneOverride(layers="*.mlp.*", heads=0.5),)))
    with pytest.raises(PassError, match=r"leaves model\.layers\.0\.self_attn none of its 4 heads"):
        prune(program, PruneHeads(), Pruning(heads=0.95))
