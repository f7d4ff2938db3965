"""The operations that a linear may apply before it stores its result, and its name with them."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.fusion.linear_epilogue import why_no_epilogue, with_epilogue
from enginewright.passes.ir.program import Program
from tests.passes.small_programs import Linear, evaluate, program_from, whole_inputs

ew = torch.ops.ew


def program(kind: str, width: int, bias: bool = True) -> Program:
    inner = torch.nn.Module()
    torch.manual_seed(1)
    inner.a = Linear(width, 8, bias=bias)

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"].float()[:, None] * torch.tensor([0.1 * j - 0.3 for j in range(8)])
        z = i["positions"].float()[:, None] * torch.tensor([0.2 * j - 0.5 for j in range(width)])
        y = ew.linear(x, m.a.weight, m.a.bias, residual=z) if kind == "residual" else m.a(x)
        return ew.take_rows(
            {"plain": lambda: y + z, "residual": lambda: y, "twice": lambda: y * (y + z)}[kind](), i["rows"]
        )

    return program_from(call, inner)


@pytest.mark.parametrize(("width", "bias"), [(8, True), (12, False)])
@pytest.mark.parametrize("activation", ["", "relu"])
def test_a_linear_with_a_residual_is_the_same_sum(width: int, bias: bool, activation: str) -> None:
    changed = program("plain", width, bias)
    inputs = whole_inputs([[3, 5, 7], [2]], rows=range(4))
    (linear,) = changed.nodes_of(ew.linear.default)
    assert why_no_epilogue(changed, linear) is None
    (add,) = changed.nodes_of(torch.ops.aten.add.Tensor)
    other = next(n for n in add.all_input_nodes if n is not linear)
    plain = evaluate(changed, inputs)
    with changed.inserting_before(add):
        changes = {"activation": activation, "residual": other}
        fused = with_epilogue(changed, linear, linear.meta["where"], **changes)
    # An argument that says nothing isn't written down, so that equal calls look alike.
    assert set(fused.kwargs) == ({"residual", "activation"} if activation else {"residual"})
    assert bound_arguments(fused)["bias"] is bound_arguments(linear)["bias"]
    add.replace_all_uses_with(fused)
    got = evaluate(changed, inputs)
    if not activation:
        assert torch.equal(got, plain)  # the same sums in the same order
    else:
        assert (got - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "reason"), [("twice", "the linear's result is used elsewhere"), ("residual", "adds a residual already")]
)
def test_what_can_not_be_stored_otherwise(kind: str, reason: str) -> None:
    changed = program(kind, 8)
    (linear,) = changed.nodes_of(ew.linear.default)
    assert reason in (why_no_epilogue(changed, linear) or "")
