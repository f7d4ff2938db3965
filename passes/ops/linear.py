"""``ew.linear``: a product with a weight, plus a bias, and a fused activation and residual."""

from __future__ import annotations

import torch

from .epilogue import check_epilogue, finish_linear
from .library import accumulate_dtype, register


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes activation(x @ weight.T + bias) + residual: x [.., K], weight [N, K], bias [N], residual [.., N] ->
    [.., N].

    The activation is one of ``LINEAR_ACTIVATIONS``, or none. With 16-bit floats, only the factors are rounded:
    products, sums, bias and result are float32.
    """
    dtype = accumulate_dtype(x)
    exact = None if bias is None else bias.to(dtype)
    total = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), exact)
    return finish_linear(total, activation, residual).contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, activation: str, residual: torch.Tensor | None) -> torch.Tensor:
    torch._check(x.dtype == weight.dtype, lambda: f"ew.linear: x is {x.dtype}, weight {weight.dtype}")
    torch._check(
        x.shape[-1] == weight.shape[1], lambda: f"ew.linear: x {x.shape} and weight {weight.shape} differ in K"
    )
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=accumulate_dtype(x))
    return check_epilogue("linear", y, activation, residual)


register(linear, fake=_fake)
