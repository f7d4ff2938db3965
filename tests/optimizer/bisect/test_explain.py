from __future__ import annotations

import numpy as np
import pytest
import torch

from enginewright.optimizer.bisect.explain import how_tensors_differ, value_reasons
from enginewright.optimizer.bisect.runs import Tensor
from enginewright.passes.ir.value_name import ValueName
from enginewright.passes.ops.activation import ACTIVATIONS
from enginewright.runtime.shared.contracts import FloatArray

QUERY, GATE, UP, DOWN = (
    ValueName("l.0.attn", "query"),
    ValueName("l.0.mlp.gate", "output"),
    ValueName("l.0.mlp.up", "output"),
    ValueName("l.0.mlp.down", "input"),
)


def random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class NoTensors:
    """A run that knows of no tensors but a bias."""

    name, leaves, names = "A", frozenset[str](), ()

    def __init__(self, bias: FloatArray | None = None) -> None:
        self.bias = bias

    def run(self, *_: object) -> dict[ValueName, FloatArray]:
        return {}

    def tensors(self, path: str) -> list[Tensor]:
        bias = self.bias
        return [] if bias is None else [Tensor(path, "bias", f"{path}.bias", (), lambda: bias)]


@pytest.mark.parametrize(("rows", "columns"), [(8, 5), (64, 96)])
def test_how_two_tensors_differ(rows: int, columns: int) -> None:
    a = random(rows, columns)
    assert how_tensors_differ(a, a.copy(), chance=False) is None
    assert how_tensors_differ(a, a * np.float32(1.01), chance=False) == "is 1.0100 times what it is in A"
    assert how_tensors_differ(a, a * 0, chance=False) == "is all zeros"
    some = a.copy()
    some[2:4] *= 0.5
    assert how_tensors_differ(a, some, chance=False) == (
        f"differs in 2 of {rows} rows, 2:4; there it is 0.5000 times what it is in A"
    )
    one = a.copy()
    one[1, 3] += 1
    assert f"differs in 1 of {rows} rows, 1:2" in str(how_tensors_differ(a, one, chance=False))
    broken = a.copy()
    broken[0, 0] = np.inf
    assert how_tensors_differ(a, broken, chance=False) == "has values that are not finite"


def test_rounding_is_no_difference_and_a_factor_on_top_is() -> None:
    a = random(64, 64)
    rounded = a * (1 + 0.005 * random(64, 64, seed=1))
    assert how_tensors_differ(a, rounded, chance=True) is None
    reason = how_tensors_differ(a, rounded * np.float32(1.01), chance=True)
    assert reason is not None
    assert float(reason.split()[1]) == pytest.approx(1.01, abs=2e-4)


def turn(x: FloatArray, angles: FloatArray, first: FloatArray, second: FloatArray) -> FloatArray:
    """x [T, N, D]: pairs at ``first`` and ``second`` turned by ``angles``."""
    out = x.copy()
    out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    out[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
    return out


@pytest.mark.parametrize(("heads", "size", "rotary"), [(4, 16, 16), (2, 64, 64), (3, 24, 24), (4, 16, 8), (2, 32, 8)])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("shift", [1, -2])
def test_positions_that_are_off(heads: int, size: int, rotary: int, halves: bool, shift: int) -> None:
    pairs = np.arange(rotary // 2)
    first, second = (pairs, pairs + rotary // 2) if halves else (2 * pairs, 2 * pairs + 1)
    angles = (shift * 1000.0 ** (-pairs / len(pairs))).astype(np.float32)
    a = random(30, heads, size)
    b = turn(a, angles, first, second)
    flat = {QUERY: a.reshape(30, -1)}
    (reason,) = value_reasons(QUERY, NoTensors(), flat, {QUERY: b.reshape(30, -1)}, known=False)
    assert f"off by {shift:+d}" in reason
    # What isn't the same for every token isn't a shift of positions.
    other = turn(a, angles * random(30, 1, 1), first, second)
    assert value_reasons(QUERY, NoTensors(), flat, {QUERY: other.reshape(30, -1)}, known=False) == []


def test_a_bias_that_was_dropped() -> None:
    a, bias = random(20, 8), random(8, seed=1)
    (reason,) = value_reasons(GATE, NoTensors(bias), {GATE: a}, {GATE: a - bias}, known=False)
    assert "less the bias l.0.mlp.gate.bias: it was dropped" in reason
    assert value_reasons(GATE, NoTensors(bias), {GATE: a}, {GATE: a + 3 * bias}, known=False) == []


@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gate_and_up_in_the_wrong_order(kind: str) -> None:
    gate, up = random(20, 8), random(20, 8, seed=1)

    def product(x: FloatArray, y: FloatArray) -> FloatArray:
        result: FloatArray = ACTIVATIONS[kind](torch.from_numpy(x)).numpy() * y
        return result

    values = {GATE: gate, UP: up, DOWN: product(gate, up)}
    (reason,) = value_reasons(DOWN, NoTensors(), values, {DOWN: product(up, gate)}, known=False)
    assert reason.startswith("l.0.mlp.gate and l.0.mlp.up are swapped")
    (reason,) = value_reasons(GATE, NoTensors(), values, {GATE: up}, known=False)
    assert "B's value is A's output of l.0.mlp.up" in reason
    assert value_reasons(DOWN, NoTensors(), values, {DOWN: random(20, 8, seed=2)}, known=False) == []


def test_a_factor() -> None:
    a = random(20, 8)
    assert value_reasons(GATE, NoTensors(), {GATE: a}, {GATE: a * 1.5}, known=False) == [
        "B's value is 1.5000 times A's"
    ]
    assert value_reasons(GATE, NoTensors(), {GATE: a}, {GATE: a * 1.5}, known=True) == []
