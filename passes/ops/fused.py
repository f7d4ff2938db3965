"""Ops that combine two others: fusion passes make them for targets with a kernel for both.

The results are those of the two ops, bit for bit.
"""

from __future__ import annotations

import torch

from .cache import kv_write
from .library import register
from .norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .quantization import Quantized, quantize_activation, quantized_shapes
from .rope import rope


def rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor | None, eps: float, group_size: int) -> Quantized:
    """Computes quantize_activation(rms_norm(x))."""
    return quantize_activation(rms_norm(x, weight, eps), group_size)


def layer_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group_size: int
) -> Quantized:
    """Computes quantize_activation(layer_norm(x))."""
    return quantize_activation(layer_norm(x, weight, bias, eps), group_size)


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes quantize_activation(rms_norm(sum)) and sum, where sum = x + residual."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return (*quantize_activation(normed, group_size), total)


def add_layer_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes quantize_activation(layer_norm(sum)) and sum, where sum = x + residual."""
    normed, total = add_layer_norm(x, residual, weight, bias, eps)
    return (*quantize_activation(normed, group_size), total)


def rope_kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
    dtype: str = "f32",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotates q [T, Nq, D] and k [T, Nkv, D], and writes v and the rotated k to the caches -> (q, caches)."""
    return (
        rope(q, table, interleaved),
        *kv_write(k_cache, v_cache, rope(k, table, interleaved), v, slots, dtype),
    )


def rope_kv_write_with_ends(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ends_k_cache: torch.Tensor,
    ends_v_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    ends_slots: torch.Tensor,
    interleaved: bool,
    dtype: str,
    ends_dtype: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes rope_kv_write, also for the second caches of `k4v4` -> (q, caches, second caches)."""
    written = rope_kv_write(k_cache, v_cache, q, k, v, table, slots, interleaved, dtype)
    return *written, *kv_write(ends_k_cache, ends_v_cache, rope(k, table, interleaved), v, ends_slots, ends_dtype)


def _norm_fake(x: torch.Tensor, group_size: int) -> Quantized:
    return quantized_shapes(x, x.shape[-1], group_size)


def _add_norm_fake(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, ...]:
    return (*_norm_fake(x, group_size), x.new_empty(x.shape))


def _rope_kv_write_fake(
    k_cache: torch.Tensor, v_cache: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch._check(
        table.shape[-1] <= q.shape[-1] == k.shape[-1],
        lambda: f"ew.rope_kv_write: a table {table.shape} for q {q.shape} and k {k.shape}",
    )
    return q.new_empty(q.shape), k_cache.new_empty(k_cache.shape), v_cache.new_empty(v_cache.shape)


def _rope_kv_write_with_ends_fake(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ends_k_cache: torch.Tensor,
    ends_v_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    ends = (cache.new_empty(cache.shape) for cache in (ends_k_cache, ends_v_cache))
    return *_rope_kv_write_fake(k_cache, v_cache, q, k, table), *ends


register(rms_norm_quantize, fake=_norm_fake)
register(layer_norm_quantize, fake=_norm_fake)
register(add_rms_norm_quantize, fake=_add_norm_fake)
register(add_layer_norm_quantize, fake=_add_norm_fake)
register(rope_kv_write, fake=_rope_kv_write_fake)
register(rope_kv_write_with_ends, fake=_rope_kv_write_with_ends_fake)
