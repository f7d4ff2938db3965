"""``ew.embedding``: rows of the token (or position) table."""

from __future__ import annotations

import torch

from .library import register


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids [T], table [V, H] -> [T, H]. Raises IndexError for an id outside the table."""
    return torch.nn.functional.embedding(ids.long(), table).contiguous()


def _fake(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


register("embedding(Tensor ids, Tensor table) -> Tensor", reference=embedding, fake=_fake)
