"""``ew.take_rows``: keeps the tokens whose logits are wanted."""

from __future__ import annotations

import torch

from .library import register


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [T, ..], rows [R] -> [R, ..]: x[rows]. Raises IndexError for a row outside x."""
    return x.index_select(0, rows.long()).contiguous()


def _fake(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


register("take_rows(Tensor x, Tensor rows) -> Tensor", reference=take_rows, fake=_fake)
