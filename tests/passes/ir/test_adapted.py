"""Weights with adapters: the sum of what each changes, times its weight; against the formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enginewright.passes.ir.adapted import Adapted, Added, Change, LowRank, Replaced, ReplacedRows
from enginewright.passes.ir.weights import Source, WeightExpr


def source(name: str, *shape: int, seed: int = 0) -> Source:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Source(name, tuple(shape), torch.float32, lambda: value)


def numbers(expr: WeightExpr) -> np.ndarray:
    return expr.evaluate().double().numpy()


def change(*steps: object, weight: float = 1.0, adapter: str = "some/adapter") -> Change:
    return Change(adapter, weight, steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 4), (3, 8)])
def test_products_add_up_with_their_weights(outputs: int, inputs: int) -> None:
    base = source("w", outputs, inputs)
    one = LowRank(source("a", 2, inputs, seed=1), source("b", outputs, 2, seed=2), 0.5)
    two = LowRank(source("c", 3, inputs, seed=3), source("d", outputs, 3, seed=4), 2.0)
    expr = Adapted(base, (change(one, weight=0.25), change(two, weight=-1.0)))
    expected = numbers(base) + 0.125 * numbers(one.b) @ numbers(one.a) - 2.0 * numbers(two.b) @ numbers(two.a)
    before = base.evaluate().clone()
    np.testing.assert_allclose(numbers(expr), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base.evaluate(), before, rtol=0, atol=0)  # never written to
    assert (expr.shape, expr.dtype, expr.parts(1)) == (base.shape, torch.float32, base.parts(1))
    assert expr.describe() == "adapted(w, 0.25 * adapter, -1 * adapter)"


def test_magnitudes_are_the_norms_of_rows_or_of_columns() -> None:
    base, magnitude = source("w", 6, 4), source("m", 6, seed=5)
    step = LowRank(source("a", 2, 4, seed=1), source("b", 6, 2, seed=2), 0.5, magnitude=magnitude)
    value = Adapted(base, (change(step),)).evaluate()
    torch.testing.assert_close(torch.linalg.norm(value, dim=1), magnitude.evaluate().abs())
    half = Adapted(base, (change(step, weight=0.5),)).evaluate()
    torch.testing.assert_close(half, (base.evaluate() + value) / 2)
    turned = LowRank(source("a", 2, 6, seed=1), source("b", 4, 2, seed=2), 0.5, True, 0, source("m", 4, seed=5))
    value = Adapted(base, (change(turned),)).evaluate()
    torch.testing.assert_close(torch.linalg.norm(value, dim=0), turned.magnitude.evaluate().abs())  # type: ignore[union-attr]


def test_experts_have_their_own_rows_of_a_and_columns_of_b() -> None:
    base, a, b = source("w", 3, 5, 4), source("a", 6, 4, seed=1), source("b", 5, 6, seed=2)
    value = numbers(Adapted(base, (change(LowRank(a, b, 2.0, experts=3)),)))
    for expert in range(3):
        product = numbers(b)[:, expert::3] @ numbers(a)[2 * expert : 2 * expert + 2]
        np.testing.assert_allclose(value[expert], numbers(base)[expert] + 2.0 * product, rtol=1e-5, atol=1e-5)


def test_steps_of_one_adapter_follow_each_other() -> None:
    base, other, rows = source("w", 6, 4), source("v", 6, 4, seed=1), source("r", 2, 4, seed=2)
    steps = (Replaced(other), Added(other, -1.0), ReplacedRows(rows, (5, 1)))
    value = Adapted(base, (change(*steps),)).evaluate()
    assert value[[0, 2, 3, 4]].abs().max() == 0 and torch.equal(value[[5, 1]], rows.evaluate())
    assert torch.equal(Adapted(base, (change(*steps, weight=0.0),)).evaluate(), base.evaluate())


def test_equal_are_those_of_the_same_adapters_and_weights() -> None:
    base, step = source("w", 6, 4), Replaced(source("v", 6, 4))
    one = Adapted(base, (change(step),))
    assert one == Adapted(base, (change(step),)) and hash(one) == hash(Adapted(base, (change(step),)))
    assert one != Adapted(base, (change(step, weight=0.5),))
    assert one != Adapted(base, (change(step, adapter="another/adapter"),))
