"""Runs the Triton kernels on torch tensors: on a CUDA device, or on the CPU in Triton's interpreter.

The interpreter runs where the environment has TRITON_INTERPRET=1 before Triton is imported. For bfloat16 three of its
functions are replaced; see ``interpret_bfloat16``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from .attention_kernels import (
    combine_splits_kernel,
    decode_work_kernel,
    listed_attention_kernel,
    paged_attention_kernel,
)
from .cache_kernels import kv_write_kernel
from .choose_tiles import choose_tile
from .specs import (
    AttentionShape,
    attention_constants,
    combine_constants,
    splits_of,
    tiles_of_step,
    write_constants,
)
from .tiles import (
    GPUS,
    SPLIT_KEYS,
    CacheFormat,
    FloatType,
    Gpu,
    Tile,
    attention_tiles,
    gpu_of,
    power_of_2,
)

_FLOATS: dict[torch.dtype, FloatType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_CACHES: dict[torch.dtype, CacheFormat] = {**_FLOATS, torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_INTERPRETED = GPUS[80]  # tiles as this GPU has them; any would do


def kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """``ew.kv_write``, or ``ew.quantized_kv_write`` where there are scales [P, K, Nkv], in place.

    k [T, Nkv, D] and v [T, Nkv, Dv] may be views of wider rows, caches [P, K, Nkv, D] and [P, K, Nkv, Dv] are
    contiguous. Where the reference raises for a slot outside the cache, such tokens (padding: -1) are left out. Raises
    ValueError for tensors that don't fit together.
    """
    cache = _cache_format(k_cache, v_cache, k_scales, v_scales)
    tokens, kv_heads, head_size = k.shape
    for new, to in ((k, k_cache), (v, v_cache)):
        if new.shape[0] != tokens or new.shape[1:] != to.shape[2:] or not new[0].is_contiguous():
            raise ValueError(f"kv_write: {tuple(new.shape)} doesn't go into a cache of {tuple(to.shape)}")
    if tokens == 0:
        return
    caches = (_as_stored(k_cache, None), _as_stored(v_cache, None), k_scales, v_scales)
    kv_write_kernel[(tokens,)](
        k,
        v,
        slots,
        *caches,
        k_cache.shape[0] * k_cache.shape[1],
        k.stride(0),
        v.stride(0),
        *caches,
        **write_constants(kv_heads, head_size, v.shape[2], cache),
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    *,
    split_keys: int | None = None,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
    tile: Tile | None = None,
    work: torch.Tensor | None = None,
    workers: int | None = None,
) -> torch.Tensor:
    """``ew.paged_attention``, or ``ew.quantized_paged_attention`` where there are scales [P, K, Nkv]: [T, Nq, Dv].

    q [T, Nq, D] may be a view of wider rows; the rest is contiguous. A float cache has the type of q, or any if q is
    float32; sums are float32. ``split_keys`` is 0, or how many keys a program attends to before their parts are
    combined, a multiple of 64; None splits steps of one token a request into parts of 512.

    ``out`` [T, Nq, Dv] (contiguous, of q's type) takes the result, and ``scratch`` (contiguous, of any type, with
    ``scratch_bytes`` bytes or more) the parts; with both, nothing is allocated, as in a CUDA graph's capture. ``tile``:
    None for the best known.

    ``work``: what ``decode_work`` gave for these contexts, this window and these ``split_keys``, where request b has
    token b or a kv_len of 0 (whose result is 0). ``workers`` programs a key/value head go through it; None: 4 a
    multiprocessor in all. Else the grid has a program for each part that a table has room for.

    Raises ValueError for tensors that don't fit together, TargetError for what AttentionShape refuses.
    """
    if q.dtype not in _FLOATS:
        raise ValueError(f"paged_attention: q is {q.dtype}, and not one of float16, bfloat16, float32")
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        interpret_bfloat16()
    gpu = _gpu_of(q)
    tokens, heads, head_size = q.shape
    _, block_size, kv_heads, value_size = v_cache.shape
    if k_cache.shape[1:] != (block_size, kv_heads, head_size) or not q[0].is_contiguous():
        raise ValueError(f"paged_attention: q {tuple(q.shape)} doesn't fit a cache of {tuple(k_cache.shape)}")
    shape = AttentionShape(
        heads,
        kv_heads,
        head_size,
        value_size,
        block_size,
        _FLOATS[q.dtype],
        _cache_format(k_cache, v_cache, k_scales, v_scales),
        scale,
        window,
        softcap,
        sinks is not None,
        slopes is not None,
    )
    requests, blocks = block_table.shape
    decode = tokens == requests
    if split_keys is None:
        split_keys = SPLIT_KEYS if decode else 0
    splits = splits_of(blocks, block_size, split_keys) if split_keys else 1
    if splits == 1:
        split_keys = 0
    tile = tile or tile_of(shape, gpu.capability, decode=decode, interpreted=q.device.type != "cuda")
    if out is None:
        out = torch.empty((tokens, heads, value_size), dtype=q.dtype, device=q.device)
    elif out.shape != (tokens, heads, value_size) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"paged_attention: out is {out.dtype} {tuple(out.shape)}, or isn't contiguous")
    if tokens == 0:
        return out
    parts, lse = out, None
    if split_keys:
        needed = scratch_bytes(shape, tokens, blocks, split_keys)
        if scratch is None:
            scratch = torch.empty(needed, dtype=torch.uint8, device=q.device)
        parts, lse = _parts_in(scratch, (tokens, heads, splits, value_size), needed)
    caches = (_as_stored(k_cache, gpu), _as_stored(v_cache, gpu), k_scales, v_scales)
    constants = attention_constants(shape, gpu, tile, split_keys)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    listed: dict[str, object] = {}
    if work is not None and split_keys:
        if tokens != requests or work.dtype != torch.int32 or work.numel() < work_size(requests, splits):
            raise ValueError(
                f"paged_attention: work {work.dtype} {tuple(work.shape)} isn't of a step of {requests} tokens"
            )
        workers = min(workers or _workers(q, kv_heads), requests * splits)
        listed_attention_kernel[(workers, kv_heads)](
            q,
            *caches,
            block_table,
            kv_len,
            work,
            sinks,
            slopes,
            blocks,
            q.stride(0),
            splits,
            parts,
            lse,
            **constants,
            **options,
        )
        listed = {"kv_len": kv_len, "Q_HEADS": heads, "WINDOW": window, "SPLIT_KEYS": split_keys}
    else:
        paged_attention_kernel[(tiles_of_step(tokens, requests, tile.queries), kv_heads, splits)](
            q,
            *caches,
            block_table,
            q_start,
            kv_len,
            sinks,
            slopes,
            requests,
            blocks,
            q.stride(0),
            parts,
            lse,
            **constants,
            **options,
        )
    if split_keys:
        combine_splits_kernel[(tokens * heads,)](parts, lse, splits, out, **combine_constants(value_size), **listed)
    return out


def work_size(requests: int, splits: int) -> int:
    """Integers of the longest list that ``decode_work`` makes."""
    return 1 + 2 * requests * splits


def decode_work(
    kv_len: torch.Tensor,
    blocks: int,
    block_size: int,
    *,
    window: int = 0,
    split_keys: int = SPLIT_KEYS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What there is to attend to in a step of one token a request: int32, how many parts, then (request, part) of each.

    Made on the device, so that one CUDA graph does for all contexts: ``blocks`` is the room of a request in the table.
    All layers of one window share it. ``out``: int32, of ``work_size`` integers or more.
    """
    (requests,) = kv_len.shape
    size = work_size(requests, splits_of(blocks, block_size, split_keys))
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=kv_len.device)
    elif out.dtype != torch.int32 or not out.is_contiguous() or out.numel() < size:
        raise ValueError(f"decode_work: out is {out.dtype} {tuple(out.shape)}, not int32 [{size}]")
    decode_work_kernel[(requests,)](
        kv_len, requests, out, WINDOW=window, SPLIT_KEYS=split_keys, REQUESTS=power_of_2(requests)
    )
    return out


def _workers(q: torch.Tensor, kv_heads: int) -> int:
    """Programs for each key/value head, so that every multiprocessor has four of them in all."""
    if q.device.type != "cuda":
        return 3
    return max(1, 4 * torch.cuda.get_device_properties(q.device).multi_processor_count // kv_heads)


def scratch_bytes(shape: AttentionShape, tokens: int, blocks: int, split_keys: int = SPLIT_KEYS) -> int:
    """Bytes of the parts of ``tokens`` tokens, and of their logarithms, over tables of ``blocks`` blocks.

    0 where one part holds all keys of a table.
    """
    splits = splits_of(blocks, shape.block_size, split_keys)
    if splits == 1:
        return 0
    rows = tokens * shape.heads * splits
    return _lse_begins(rows * shape.value_size) + 4 * rows


def _lse_begins(values: int) -> int:
    """The byte behind float32 ``values`` where their logarithms begin: Triton compiles for addresses of 16 bytes."""
    return -(-4 * values // 16) * 16


def _parts_in(
    scratch: torch.Tensor, shape: tuple[int, int, int, int], needed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """parts [T, Nq, splits, Dv] and lse [T, Nq, splits] within ``scratch``."""
    if not scratch.is_contiguous() or scratch.nbytes < needed or scratch.data_ptr() % 16:
        raise ValueError(
            f"paged_attention: scratch has {scratch.nbytes} bytes of {needed}, isn't contiguous, or its address isn't "
            "a multiple of 16"
        )
    memory = scratch.view(-1).view(torch.uint8)
    rows, values = shape[:3], math.prod(shape)
    parts, lse = memory[: 4 * values], memory[_lse_begins(values) : needed]
    return parts.view(torch.float32).view(shape), lse.view(torch.float32).view(rows)


@cache
def tile_of(shape: AttentionShape, capability: int, *, decode: bool, interpreted: bool) -> Tile:
    """See ``choose_tile``; the interpreter takes any."""
    if interpreted:
        return next(attention_tiles(shape.tile_case(decode=decode), gpu_of(capability)))
    return choose_tile(shape, capability, decode=decode)


@cache
def interpret_bfloat16() -> None:
    """Makes the interpreter's bfloat16 right, which is bits in arrays of uint16 there.

    It multiplies those bits as integers, takes an integer for bits that it converts, and where rounding to bfloat16
    carries into the exponent it may lose a factor of 2.
    """
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(x: Any) -> Any:
        if x.dtype.scalar != bfloat16:
            return x
        return interpreter.TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def convert_float(x: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of, to) == (float32, bfloat16):
            return x.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(x, of, to, rounding)

    def create_si_to_fp(self: Any, x: Any, to: Any) -> Any:
        if to.scalar == bfloat16:
            return self.cast_impl(self.cast_impl(x, float32), to)
        return self.cast_impl(x, to)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_si_to_fp = create_si_to_fp
    interpreter._convert_float = convert_float


def _gpu_of(x: torch.Tensor) -> Gpu:
    """The GPU that ``x`` is on; the next older one that is known where its own capability isn't."""
    if x.device.type != "cuda":
        return _INTERPRETED
    major, minor = torch.cuda.get_device_capability(x.device)
    capability = 10 * major + minor
    return gpu_of(max((c for c in GPUS if c <= capability), default=capability))


def _cache_format(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None
) -> CacheFormat:
    if k_cache.dtype != v_cache.dtype or not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise ValueError("caches of keys and values are of one type, and contiguous")
    if k_cache.dtype not in _CACHES:
        raise ValueError(f"there is no cache of {k_cache.dtype}")
    cache = _CACHES[k_cache.dtype]
    for scales in (k_scales, v_scales):
        if (scales is not None) != (cache in ("int8", "fp8")):
            raise ValueError(f"a cache of {k_cache.dtype} with{'out' if scales is None else ''} scales")
        if scales is not None and (scales.shape != k_cache.shape[:3] or scales.dtype != torch.float32):
            raise ValueError(f"scales are float32 {tuple(k_cache.shape[:3])}, not {scales.dtype} {tuple(scales.shape)}")
    return cache


def _as_stored(cache: torch.Tensor, gpu: Gpu | None) -> torch.Tensor:
    """The cache as the kernel's pointer has it: 8-bit floats are bytes where a kernel converts them by their bits.

    ``gpu`` is what reads it; None where it is written.
    """
    if cache.dtype == torch.float8_e4m3fn and not (gpu is not None and gpu.fp8):
        return cache.view(torch.uint8)
    return cache
