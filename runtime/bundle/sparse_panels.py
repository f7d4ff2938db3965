"""Layout sparse32: a weight [N, K] of which at most two of every four values along K are not zero.

It is stored as [ceil(N/32)][ceil(K/32)] blocks of 32 rows n and 32 columns k. A block has positions, then values:

    positions  32 words of 32 bits, one for each n. Bits 4q to 4q+3 are for k = 4q to 4q+3: 2 bits for the position of
               the first stored value, 2 bits for the position of the second
    values     the two stored values of each n and q, in the order of q:
               f32     [8][2][32]: the first value of all n, then the second of all n
               bf16    [8][32][2]
               i8      [8][32][2], each value + 128 in an unsigned byte
               i4      [4][32][2] bytes: value + 8; the low half is for an even q, the high half for the next q

If fewer than two values of a group aren't zero, zeros at the first free positions are stored too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..shared.dtypes import DTYPES
from ..shared.panel_layouts import BIAS, DEPTHS, PANEL

Array = npt.NDArray[Any]

DEPTH = DEPTHS["sparse32"]
"""Columns of a block, which has PANEL rows."""

_PLACE_BYTES = 4 * PANEL
_QUADS = DEPTH // 4


def block_bytes(dtype: str) -> int:
    """Returns the size of a block in bytes: two of every four values are stored, and their positions."""
    return _PLACE_BYTES + PANEL * DEPTH // 2 * DTYPES[dtype].bits // 8


def is_sparse(weight: Array) -> bool:
    """Returns True if K is a multiple of 4 and each group of 4 values along K has at most two that aren't zero."""
    if weight.shape[-1] % 4:
        return False
    return bool(((weight != 0).reshape(*weight.shape[:-1], -1, 4).sum(-1) <= 2).all())


def pack_sparse(weight: Array, dtype: str) -> Array:
    """Packs a weight [N, K] into uint8 [ceil(N/32), ceil(K/32), block]. Raises ValueError if it isn't sparse."""
    if not is_sparse(weight):
        raise ValueError("more than two of four values are not zero, or K isn't a multiple of 4")
    rows, columns = weight.shape
    panels, blocks = -(-rows // PANEL), -(-columns // DEPTH)
    padded = np.zeros((panels * PANEL, blocks * DEPTH), weight.dtype)
    padded[:rows, :columns] = weight
    quads = padded.reshape(-1, 4)
    # The kept two of four, in their order: what is zero comes last, by its place.
    order = np.argsort(quads == 0, axis=1, kind="stable")[:, :2]
    order.sort(axis=1)
    two_of_four = np.take_along_axis(quads, order, axis=1)
    places = (order[:, 0] | order[:, 1] << 2).astype(np.uint32)
    words = (places.reshape(-1, blocks, _QUADS) << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    # [panels, 32, blocks, 8, 2] -> [panels, blocks, 8, 32, 2]
    values = two_of_four.reshape(panels, PANEL, blocks, _QUADS, 2).transpose(0, 2, 3, 1, 4)
    if dtype == "f32":
        values = values.swapaxes(-1, -2)
    elif dtype in BIAS:
        values = values.view(np.uint8) + np.uint8(BIAS[dtype])  # wraps around: -1 + 128 is 127
    if dtype == "i4":
        values = values[:, :, 0::2] | values[:, :, 1::2] << 4
    out = np.empty((panels, blocks, block_bytes(dtype)), np.uint8)
    out[..., :_PLACE_BYTES] = words.reshape(panels, PANEL, blocks).swapaxes(1, 2).copy().view(np.uint8)
    out[..., _PLACE_BYTES:] = np.ascontiguousarray(values).reshape(panels, blocks, -1).view(np.uint8)
    return out


def unpack_sparse(stored: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Reverses ``pack_sparse``: returns the weight [N, K] with its zeros."""
    rows, columns = shape
    panels, blocks = stored.shape[:2]
    words = np.ascontiguousarray(stored[..., :_PLACE_BYTES]).view(np.uint32)  # [panels, blocks, 32]
    places = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15  # [panels, blocks, 32, 8]
    values = np.ascontiguousarray(stored[..., _PLACE_BYTES:]).view(np.uint8 if dtype in BIAS else DTYPES[dtype].numpy)
    if dtype == "i4":
        halves = values.reshape(panels, blocks, _QUADS // 2, 1, PANEL, 2)
        values = np.concatenate((halves & 15, halves >> 4), axis=3)
    if dtype == "f32":
        values = values.reshape(panels, blocks, _QUADS, 2, PANEL).swapaxes(-1, -2)
    if dtype in BIAS:
        values = (values - np.uint8(BIAS[dtype])).view(np.int8)
    values = values.reshape(panels, blocks, _QUADS, PANEL, 2).swapaxes(2, 3)  # [panels, blocks, 32, 8, 2]
    quads = np.zeros((panels, blocks, PANEL, _QUADS, 4), values.dtype)
    for which in range(2):
        at = (places >> (2 * which) & 3).astype(np.int64)[..., None]
        np.put_along_axis(quads, at, values[..., which : which + 1], axis=-1)
    dense = quads.reshape(panels, blocks, PANEL, DEPTH).swapaxes(1, 2).reshape(panels * PANEL, blocks * DEPTH)
    return dense[:rows, :columns]
