"""``ew.rope_table`` and ``ew.rope``: rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864).

F is the number of frequencies; 2F <= D dimensions are rotated, the rest pass.
"""

from __future__ import annotations

import torch

from .library import register


def rope_table(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes the factors of ``rope``: positions [T], inv_freq [F] -> [T, 2F]. The first F columns are cos(p*f) *
    scale, the last F are sin(p*f) * scale.
    """
    angles = positions.to(inv_freq.dtype)[:, None] * inv_freq[None, :]  # [T, F]
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def rope(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates each pair of channels (a, b) to (a*cos - b*sin, b*cos + a*sin): x [T, N, D], table [T, 2F] -> [T, N, D].

    The pairs are (i, i+F), or (2i, 2i+1) where ``interleaved``.
    """
    half = table.shape[-1] // 2
    cos = table[:, None, :half].to(x.dtype)  # [T, 1, F]
    sin = table[:, None, half:].to(x.dtype)
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]  # [T, N, F]
    else:
        a, b = rotated[..., :half], rotated[..., half:]
    new_a, new_b = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack((new_a, new_b), dim=-1).flatten(-2) if interleaved else torch.cat((new_a, new_b), dim=-1)
    return torch.cat((pairs, rest), dim=-1)


def _table_fake(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]))


def _rope_fake(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    torch._check(table.shape[-1] <= x.shape[-1], lambda: f"ew.rope: table {table.shape} is wider than x {x.shape}")
    return x.new_empty(x.shape)


register(rope_table, fake=_table_fake)
register(rope, fake=_rope_fake)
