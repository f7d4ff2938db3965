"""``ew.embedding``: rows of the token (or position) table."""

from __future__ import annotations

import torch

from .library import accumulate_dtype, register


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids [T], table [V, H] -> [T, H]; of 16-bit floats as float32. Raises IndexError for an id outside the table."""
    return torch.nn.functional.embedding(ids.long(), table).to(accumulate_dtype(table)).contiguous()


def _fake(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.new_empty((*ids.shape, table.shape[1]), dtype=accumulate_dtype(table))


register("embedding(Tensor ids, Tensor table) -> Tensor", reference=embedding, fake=_fake)
