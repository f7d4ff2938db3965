"""``ew.kv_write``: writes a step's keys and values into the paged cache.

The canonical cache is [P, K, Nkv, D] for keys and [P, K, Nkv, Dv] for values: P blocks of K slots. A target may use
another layout, and stores fewer bits if ``dtype`` has fewer: the canonical cache then has the decoded values.
"""

from __future__ import annotations

import torch

from .library import register
from .quantized_cache import FEW_BITS, STORED, dequantize_heads, round_to_few_bits, stored_heads


def rounded_heads(x: torch.Tensor, dtype: str, side: int) -> torch.Tensor:
    """Returns x [T, Nkv, D] rounded as a cache of ``dtype``, a ``CacheDtype``, stores it.

    ``side``: 0 for keys, 1 for values. Raises ValueError for another dtype.
    """
    if dtype == "f32":
        return x
    if dtype in FEW_BITS:
        return round_to_few_bits(x, FEW_BITS[dtype][side]).to(x.dtype)
    if dtype not in STORED:
        raise ValueError(f"ew.kv_write: unknown dtype {dtype!r}; there are {', '.join((*STORED, *FEW_BITS))}")
    elements, scales = stored_heads(x, dtype)
    return (elements if scales is None else dequantize_heads(elements, scales)).to(x.dtype)


def kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    dtype: str = "f32",
    values_in_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes keys and values to the caches: k [T, Nkv, D], v [T, Nkv, Dv], slots [T] (block * K + offset in the block)
    -> the two caches after the write.

    ``dtype``: the cache's storage type, see ``rounded_heads``. ``values_in_keys``: v is the first Dv channels of k, and
    the cache has those of the rounded keys. Functional: the given caches aren't changed. Raises
    IndexError for a slot outside the cache, ValueError for an unknown dtype.
    """
    keys = rounded_heads(k, dtype, 0)
    values = keys[..., : v.shape[-1]] if values_in_keys else rounded_heads(v, dtype, 1)
    return _write(k_cache, keys, slots), _write(v_cache, values, slots)


def _write(cache: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    flat = cache.contiguous().flatten(0, 1)  # [P*K, Nkv, D]
    return flat.index_copy(0, slots.long(), new.to(cache.dtype)).view(cache.shape)


def _fake(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return k_cache.new_empty(k_cache.shape), v_cache.new_empty(v_cache.shape)


register(kv_write, fake=_fake)
