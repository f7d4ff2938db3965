"""``ew.moe``: a layer of experts, of which each token uses a few; and ``ew.grouped_linear``, one of its parts.

Shazeer et al., https://arxiv.org/abs/1701.06538. E experts, k of them for each of T tokens; H hidden, I intermediate.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .activation import ACTIVATIONS
from .embedding import take_rows
from .epilogue import check_epilogue, finish_linear
from .library import accumulate_dtype, register
from .routing import combine_experts, route_experts

EXPERT_KINDS = (*ACTIVATIONS, "relu2")
"""The activations that ``moe`` takes; relu2 is the square of relu."""


def expert_activation(
    gate_up: torch.Tensor, kind: str, gated: bool, alpha: float, limit: float, offset: float
) -> torch.Tensor:
    """Computes what is between an expert's two products: [.., 2I] -> [.., I] if ``gated``, else [.., I] -> [.., I].

    If gated, the halves are gate and up, and the result is act(gate) * (up + offset). If ``limit`` isn't 0, gate is
    clamped to at most ``limit``, and up to -limit .. limit. An ``alpha`` other than 1 is only for silu: act is then
    gate * sigmoid(alpha * gate). Raises ValueError for an unknown kind.
    """
    if kind not in EXPERT_KINDS or (alpha != 1.0 and kind != "silu"):
        raise ValueError(f"ew.moe: kind {kind!r} with alpha {alpha}; there are {EXPERT_KINDS}, alpha is silu's alone")
    gate, up = gate_up.chunk(2, dim=-1) if gated else (gate_up, None)
    if limit:
        gate = gate.clamp(max=limit)
    if alpha != 1.0:
        active = gate * torch.sigmoid(gate * alpha)
    else:
        active = torch.relu(gate).square() if kind == "relu2" else ACTIVATIONS[kind](gate)
    if up is None:
        return active
    if limit:
        up = up.clamp(-limit, limit)
    return active * (up + offset if offset else up)


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    kind: str,
    gated: bool = True,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Computes a mixture of experts: x [T, H], expert_ids [T, k], expert_weights [T, k] -> [T, H].

    The sum over a token's choices j, ascending, of expert_weights[t, j] * (down(activation(gate_up(x)))) by the expert
    expert_ids[t, j]; the activation is ``expert_activation``.

    Args:
        gate_up: [E, 2I, H] (gates, then ups), or [E, I, H] if not ``gated``; its bias [E, 2I] or [E, I].
        down: [E, H, I], its bias [E, H].
    """
    order, rows, starts = route_experts(expert_ids, gate_up.shape[0])
    y = grouped_linear(take_rows(x, rows), starts, gate_up, gate_up_bias)
    y = expert_activation(y, kind, gated, alpha, limit, offset)
    return combine_experts(grouped_linear(y, starts, down, down_bias), order, expert_weights).to(x.dtype)


def _fake_moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gated: bool,
) -> torch.Tensor:
    experts, hidden, width = down.shape
    torch._check(
        x.dim() == 2
        and x.shape[1] == hidden
        and tuple(gate_up.shape) == (experts, 2 * width if gated else width, hidden),
        lambda: f"ew.moe: x {x.shape}, gate_up {gate_up.shape}, down {down.shape}, gated {gated} don't fit together",
    )
    torch._check(
        expert_ids.dim() == expert_weights.dim() == 2 and expert_ids.shape[1] == expert_weights.shape[1],
        lambda: f"ew.moe: expert_ids {expert_ids.shape} and expert_weights {expert_weights.shape}",
    )
    return torch.empty_like(x)


def grouped_linear(
    x: torch.Tensor, starts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = ""
) -> torch.Tensor:
    """Multiplies each row by its expert's weight, and adds the bias: x [M, K], starts [E + 1], weight [E, N, K], bias
    [E, N] -> [M, N].

    Row m belongs to the expert e with starts[e] <= m < starts[e + 1]; starts[0] is 0 and starts[E] is M. ``activation``
    is applied to the sums: one of ``LINEAR_ACTIVATIONS``, or "".
    """
    out = x.new_empty((x.shape[0], weight.shape[1]), dtype=accumulate_dtype(x))
    for e, (first, last) in enumerate(pairwise(starts.tolist())):
        if first < last:
            rows, matrix = x[first:last].to(out.dtype), weight[e].to(out.dtype)
            out[first:last] = torch.nn.functional.linear(rows, matrix, None if bias is None else bias[e].to(out.dtype))
    return finish_linear(out, activation)


def _fake_grouped_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    torch._check(
        x.dim() == 2 and x.shape[1] == weight.shape[2],
        lambda: f"ew.grouped_linear: x {x.shape} and weight {weight.shape} differ in K",
    )
    y = x.new_empty((x.shape[0], weight.shape[1]), dtype=accumulate_dtype(x))
    return check_epilogue("grouped_linear", y, activation)


register(moe, fake=_fake_moe)
register(grouped_linear, fake=_fake_grouped_linear)
