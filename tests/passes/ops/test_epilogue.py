from __future__ import annotations

import pytest
import torch

from enginewright.passes.ops.epilogue import LINEAR_ACTIVATIONS, finish_linear

ew = torch.ops.ew


def _quantized(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return (*ew.quantize_activation(torch.randn(m, k), 8), weight, torch.rand(n, k // 8).half() / 100)


@pytest.mark.parametrize("kind", ["", *LINEAR_ACTIVATIONS])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 8), (7, 3, 16)])
def test_each_linear_is_the_ops_one_after_the_other(kind: str, m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    x, bias, residual, starts = torch.randn(m, k), torch.randn(n), torch.randn(m, n), torch.tensor([0, m // 2, m])
    quantized, groups = _quantized(m, n, k), (8, 8, 8)
    weight = torch.randn(n, k)
    plain = ew.linear(x, weight, bias)
    expected = LINEAR_ACTIVATIONS[kind](plain) if kind else plain
    assert torch.equal(ew.linear(x, weight, bias, kind), expected)
    assert torch.equal(ew.linear(x, weight, bias, kind, residual), expected + residual)
    plain = ew.quantized_linear(*quantized, None, bias, *groups)
    assert torch.equal(
        ew.quantized_linear(*quantized, None, bias, *groups, kind, residual), finish_linear(plain, kind, residual)
    )
    experts = torch.stack((weight, weight + 1))
    plain = ew.grouped_linear(x, starts, experts, None)
    assert torch.equal(ew.grouped_linear(x, starts, experts, None, kind), finish_linear(plain, kind))
    values, scales, sums, w, ws = quantized
    of_experts = (values, scales, sums, starts, torch.stack((w, -w)), torch.stack((ws, ws)), None, None, *groups)
    plain = ew.quantized_grouped_linear(*of_experts)
    assert torch.equal(ew.quantized_grouped_linear(*of_experts, kind), finish_linear(plain, kind))


def test_what_activations_mean() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0])
    assert torch.equal(finish_linear(x, "relu2"), torch.tensor([0.0, 0.0, 0.0, 0.25, 9.0]))
    assert torch.equal(finish_linear(x, "tanh"), x.tanh())
    assert torch.equal(finish_linear(x, "gelu_tanh"), torch.nn.functional.gelu(x, approximate="tanh"))
    assert torch.equal(finish_linear(x), x)


@pytest.mark.parametrize(
    ("activation", "residual"),
    [("softmax", None), ("", torch.zeros(2, 4)), ("", torch.zeros(3)), ("", torch.zeros(2, 3, dtype=torch.float64))],
)
def test_fakes_refuse(activation: str, residual: torch.Tensor | None) -> None:
    with torch.device("meta"), pytest.raises((ValueError, RuntimeError), match=r"ew\.linear"):
        x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
        ew.linear(x, weight, None, activation, None if residual is None else residual.to("meta"))
