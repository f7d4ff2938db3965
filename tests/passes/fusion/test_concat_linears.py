from __future__ import annotations

import torch

from enginewright.passes.fusion.concat_linears import join_names, stack_linears, why_not_stackable
from tests.passes.small_programs import Linear, Shape, decoder, evaluate, program_from, random_sequences, whole_inputs

ew = torch.ops.ew


def test_names_of_stacked_weights() -> None:
    assert join_names(["a.q.weight", "a.k.weight"]) == "a.q+k.weight"
    assert join_names(["a.b.q", "a.b.k"]) == "a.b.q+k"
    assert join_names(["x.w", "y.z.w"]) == "x+y.z.w"


def test_stacked_results_lie_side_by_side() -> None:
    inner = torch.nn.Module()
    inner.a, inner.b = Linear(5, 3), Linear(7, 3, bias=True)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1, 0.2, -0.3])
        return ew.take_rows(torch.cat((m.a(x), m.b(x)), -1), i["rows"])

    program = program_from(call, inner)
    for lengths in ((3,), (4, 6)):
        inputs = whole_inputs(random_sequences(lengths, 50))
        stacked = program.copy()
        linears = stacked.nodes_of(ew.linear.default)
        assert why_not_stackable(stacked, linears) is None
        (cat,) = (n for n in stacked.graph.nodes if n.target is torch.ops.aten.cat.default)
        with stacked.inserting_before(cat):
            new = stack_linears(stacked, linears)
        stacked.replace(cat, new)
        stacked.remove_dead_code()
        # A wider product may be blocked in another way by BLAS.
        torch.testing.assert_close(evaluate(stacked, inputs), evaluate(program, inputs), rtol=0, atol=1e-5)
        assert stacked.weight_of(new.args[2]).describe() == "concat(zeros(5), b.bias, 0)"


def test_linears_of_different_values_are_not_stackable() -> None:
    program = decoder(Shape(windows=(0,)))
    linears = program.nodes_of(ew.linear.default)
    assert why_not_stackable(program, [linears[0], linears[-1]]) == "the linears have different inputs"
