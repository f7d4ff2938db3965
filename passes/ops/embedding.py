"""Ops that take rows: ``ew.embedding`` of a table, ``ew.take_rows`` of the tokens whose logits are wanted."""

from __future__ import annotations

import torch

from .library import accumulate_dtype, register


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Looks up rows of a table, and converts 16-bit floats to float32: ids [T], table [V, H] -> [T, H].

    Raises IndexError for an id outside the table.
    """
    return torch.nn.functional.embedding(ids.long(), table).to(accumulate_dtype(table)).contiguous()


def _fake_embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.new_empty((*ids.shape, table.shape[1]), dtype=accumulate_dtype(table))


register(embedding, fake=_fake_embedding)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Selects x[rows]: x [T, ..], rows [R] -> [R, ..].

    Raises IndexError for a row outside x.
    """
    return x.index_select(0, rows.long()).contiguous()


def _fake_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


register(take_rows, fake=_fake_rows)
