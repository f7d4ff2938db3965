"""``ew.route_experts`` and ``ew.combine_experts``: tokens to their experts, sorted, and back.

T tokens choose k of E experts each: T*k *places*, of which place t*k + j is token t's j-th choice. After sorting by
expert, the rows of each expert are neighbours, so that one product computes all of them (MegaBlocks; Gale et al.,
https://arxiv.org/abs/2211.15841).
"""

from __future__ import annotations

import torch

from .library import register

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def route_experts(expert_ids: torch.Tensor, experts: int) -> Routed:
    """Sorts the tokens' choices by expert: expert_ids [T, k] -> order [T*k] of the choices, rows [T*k] (their tokens),
    starts [experts + 1] of the experts.

    Results have the ids' dtype. ``order``: the places sorted by expert, those of one expert ascending. ``rows``: the
    token of each, order // k. Expert e's are order[starts[e] : starts[e + 1]].

    Raises ValueError for an id out of range.
    """
    flat = expert_ids.reshape(-1)
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= experts):
        raise ValueError(f"ew.route_experts: an id of {int(flat.min())} .. {int(flat.max())} is none of {experts}")
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    dtype = expert_ids.dtype
    return order.to(dtype), (order // expert_ids.shape[1]).to(dtype), starts.to(dtype)


def _fake_route_experts(expert_ids: torch.Tensor, experts: int) -> Routed:
    torch._check(expert_ids.dim() == 2, lambda: f"ew.route_experts: ids of rank {expert_ids.dim()}, not 2")
    places = expert_ids.shape[0] * expert_ids.shape[1]
    new = expert_ids.new_empty
    return new((places,)), new((places,)), new((experts + 1,))


def combine_experts(y: torch.Tensor, order: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    """Sums each token's k results, weighted by expert_weights [T, k]: y [T*k, H], in the order ``order`` [T*k] of
    ``route_experts`` -> [T, H].

    Row t is the sum over j, ascending and beginning with 0, of expert_weights[t, j] * y[the row of place t*k + j].
    """
    tokens, choices = expert_weights.shape
    by_place = torch.empty_like(y)
    by_place[order.long()] = y
    by_place = by_place.reshape(tokens, choices, y.shape[1])
    out = torch.zeros_like(by_place[:, 0])
    for j in range(choices):
        out = torch.addcmul(out, by_place[:, j], expert_weights[:, j : j + 1].to(y.dtype))
    return out


def _fake_combine_experts(y: torch.Tensor, order: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    torch._check(
        y.dim() == 2 and order.dim() == 1 and expert_weights.dim() == 2,
        lambda: f"ew.combine_experts: y {y.shape}, order {order.shape}, expert_weights {expert_weights.shape}",
    )
    return y.new_empty((expert_weights.shape[0], y.shape[1]))


register(route_experts, fake=_fake_route_experts)
register(combine_experts, fake=_fake_combine_experts)
