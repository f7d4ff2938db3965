"""``ew.kv_write``: puts a step's keys and values into the paged cache.

The canonical cache is [P, K, Nkv, D] for keys and [P, K, Nkv, Dv] for values: P blocks of K slots. A target lays it
out as it likes.
"""

from __future__ import annotations

import torch

from .library import register


def kv_write(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [T, Nkv, D], v [T, Nkv, Dv], slots [T] (block * K + place in the block) -> the two caches after the write.

    Functional: the caches given are left as they are. Raises IndexError for a slot outside the cache.
    """
    return _write(k_cache, k, slots), _write(v_cache, v, slots)


def _write(cache: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    flat = cache.contiguous().flatten(0, 1)  # [P*K, Nkv, D]
    return flat.index_copy(0, slots.long(), new.to(cache.dtype)).view(cache.shape)


def _fake(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return k_cache.new_empty(k_cache.shape), v_cache.new_empty(v_cache.shape)


register(
    "kv_write(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slots) -> (Tensor, Tensor)",
    reference=kv_write,
    fake=_fake,
)
