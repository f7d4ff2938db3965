"""``ew.pool``: one row for each request, of the rows of its tokens."""

from __future__ import annotations

from itertools import pairwise

import torch

from enginewright.runtime.shared.op_schema import OPS

from .library import accumulate_dtype, register

KINDS = OPS["pool"].values("kind")
"""The kinds of pooling. cls: the first token's row. weighted: the mean with the weight i + 1 for token i."""


def pool(hidden: torch.Tensor, q_start: torch.Tensor, kind: str) -> torch.Tensor:
    """Pools each request's tokens to one row: hidden [T, H], q_start [B+1] -> [B, H]. ``kind`` is mean, cls (the first
    token), last, max or weighted (a weighted mean).

    A request without tokens gets zeros. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"pool: kind is {kind!r}, and there are {', '.join(KINDS)}")
    starts, rows = q_start.tolist(), hidden.to(accumulate_dtype(hidden))
    results = [_of_one(rows[start:stop], kind) for start, stop in pairwise(starts)]
    return torch.stack(results).to(hidden.dtype) if results else hidden.new_zeros((0, hidden.shape[1]))


def _of_one(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """rows [S, H] of one request -> [H]."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1])
    if kind == "cls":
        return rows[0]
    if kind == "last":
        return rows[-1]
    if kind == "max":
        return rows.amax(0)
    if kind == "mean":
        return rows.sum(0) / len(rows)
    weights = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)
    return (rows * weights[:, None]).sum(0) / weights.sum()


def _fake(hidden: torch.Tensor, q_start: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty((q_start.shape[0] - 1, hidden.shape[1]))


register(pool, fake=_fake)
