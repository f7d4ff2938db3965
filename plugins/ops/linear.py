"""``ew.linear``: a product with a weight, plus a bias."""

from __future__ import annotations

import torch

from .library import accumulate_dtype, register


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [.., K], weight [N, K], bias [N] -> [.., N]: x @ weight.T + bias.

    Of 16-bit floats the factors are rounded and nothing else: products, sums, bias and result are float32.
    """
    dtype = accumulate_dtype(x)
    exact = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), exact).contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    torch._check(x.dtype == weight.dtype, lambda: f"ew.linear: x is {x.dtype}, weight {weight.dtype}")
    torch._check(
        x.shape[-1] == weight.shape[1], lambda: f"ew.linear: x {x.shape} and weight {weight.shape} differ in K"
    )
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=accumulate_dtype(x))


register("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", reference=linear, fake=_fake)
