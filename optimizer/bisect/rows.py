"""Values as rows of tokens: [T, N] float32, from whatever shape has T somewhere in it, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginewright.plugins.shared.contracts import FloatArray


def token_axis(shape: Sequence[object], tokens: object) -> int | None:
    """The axis of ``shape`` that has a place for each token; None if there is none, or it is unclear which."""
    found = [i for i, size in enumerate(shape) if size == tokens]
    return found[0] if len(found) == 1 else None


def batch_axis(shape: Sequence[int], tokens: int) -> int | None:
    """The axis of tokens in a value of a module that runs one sequence: [1, T, ..], [1, N, T, D], or [T, ..]."""
    places = (1, 2, 0) if len(shape) > 2 and shape[0] == 1 else (0,)
    return next((axis for axis in places if axis < len(shape) and shape[axis] == tokens), None)


def to_rows(value: torch.Tensor, axis: int) -> FloatArray:
    """[.., T, ..] -> [T, N], a copy."""
    moved = value.detach().movedim(axis, 0)
    rows: FloatArray = moved.reshape(moved.shape[0], -1).to(torch.float32, copy=True).numpy()
    return rows


def from_rows(rows: FloatArray, like: torch.Tensor, axis: int) -> torch.Tensor:
    """The reverse: [T, N] in the shape and type of ``like``, with its tokens along ``axis``."""
    moved = like.movedim(axis, 0)
    value = torch.from_numpy(rows).reshape(moved.shape).to(like.dtype)
    return value.movedim(0, axis).contiguous()
