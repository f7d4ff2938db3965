"""Runs the attention kernels on torch tensors: on a CUDA device, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch

from .call import Call
from .jit_launcher import JitLauncher
from .specs import AttentionShape, attention_scratch, splits_of
from .step_calls import (
    CACHE_FORMATS_OF,
    FLOATS_OF,
    AttendedBatch,
    AttentionParts,
    AttentionRule,
    LayerCaches,
    attention_calls,
    kv_write_call,
    work_call,
    work_size,
)
from .tiles import GPUS, SPLIT_KEYS, GpuLimits, Tile, gpu_of

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
    """Runs ``ew.kv_write``, or ``ew.quantized_kv_write`` if there are scales [P, K, Nkv], in place.

    k [T, Nkv, D] and v [T, Nkv, Dv] may be views of wider rows; the caches [P, K, Nkv, D] and [P, K, Nkv, Dv] are
    contiguous. Tokens with a slot outside the cache (padding: -1) are skipped; the reference op raises an error for
    them. Raises ValueError for tensors that don't match.
    """
    caches = _checked(LayerCaches(k_cache, v_cache, k_scales, v_scales))
    for new, to in ((k, k_cache), (v, v_cache)):
        if len(new) != len(k) or new.shape[1:] != to.shape[2:] or not new[0].is_contiguous():
            raise ValueError(f"kv_write: {tuple(new.shape)} doesn't go into a cache of {tuple(to.shape)}")
    if len(k):
        _run(kv_write_call(k, v, slots, caches))


def paged_attention(
    q: torch.Tensor,
    caches: LayerCaches,
    batch: AttendedBatch,
    rule: AttentionRule,
    parts: AttentionParts = AttentionParts(),
    *,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Runs ``ew.paged_attention``, or ``ew.quantized_paged_attention`` if there are scales [P, K, Nkv]; returns [T, Nq,
    Dv].

    q [T, Nq, D] may be a view of wider rows; the other tensors are contiguous. A float cache has the type of q, or any
    type if q is float32; sums are float32. A batch with one token per request is decoded, by default in splits of 512
    keys.

    Args:
        q: the queries.
        caches: keys and values.
        batch: the requests; ``decodes`` is computed here.
        rule: the scale, window and other rules of scores.
        parts: the division of contexts into splits. ``work`` must be the result of ``decode_work`` for these contexts,
            window and ``split_keys``; then request b has token b, or a kv_len of 0 (whose result is 0). ``workers``
            defaults to 4 per multiprocessor. ``scratch`` is contiguous, of any type, with at least ``scratch_bytes``
            bytes.
        out: the result [T, Nq, Dv], contiguous and of q's type; None allocates it. With ``out`` and ``scratch`` nothing
            is allocated, as a CUDA graph's capture needs it.
        tile: the tile; None takes the best known.

    Raises:
        ValueError: tensors don't match.
        TargetError: AttentionShape rejects the layer.
    """
    split_keys, work, workers = parts.split_keys, parts.work, parts.workers
    k_cache, v_cache = caches.keys, caches.values
    if q.dtype not in FLOATS_OF:
        raise ValueError(f"paged_attention: q is {q.dtype}, and not one of float16, bfloat16, float32")
    gpu = _gpu_of(q)
    tokens, heads, head_size = q.shape
    block_size, value_size = v_cache.shape[1], v_cache.shape[3]
    if k_cache.shape[1:] != (*v_cache.shape[1:3], head_size) or not q[0].is_contiguous():
        raise ValueError(f"paged_attention: q {tuple(q.shape)} doesn't fit a cache of {tuple(k_cache.shape)}")
    _checked(caches)
    requests, blocks = batch.table.shape
    decodes = tokens == requests
    if split_keys is None:
        split_keys = SPLIT_KEYS if decodes else 0
    if out is None:
        out = torch.empty((tokens, heads, value_size), dtype=q.dtype, device=q.device)
    elif out.shape != (tokens, heads, value_size) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"paged_attention: out is {out.dtype} {tuple(out.shape)}, or isn't contiguous")
    if tokens == 0:
        return out
    needed = 4 * attention_scratch(tokens, heads, value_size, blocks, block_size, split_keys) if split_keys else 0
    memory = _memory(parts.scratch, needed, q.device)
    if work is not None and needed:
        _check_work(work, requests if decodes else 0, splits_of(blocks, block_size, split_keys))
        workers = workers or _workers(v_cache)
    launcher = JitLauncher(gpu.capability, interpreted=not q.is_cuda)
    for call in attention_calls(
        q,
        caches,
        replace(batch, decodes=decodes),
        rule,
        AttentionParts(memory, split_keys, work, workers),
        out,
        gpu,
        launcher.tile if tile is None else lambda shape, decode: tile,
    ):
        launcher.bind(call)()
    return out


def _memory(scratch: torch.Tensor | None, needed: int, device: torch.device) -> torch.Tensor:
    """Returns ``needed`` bytes of ``scratch``, or of new memory if it is None, as float32. Raises ValueError if
    ``scratch`` is too small.
    """
    if scratch is None or not needed:
        scratch = torch.empty(needed, dtype=torch.uint8, device=device)
    elif not scratch.is_contiguous() or scratch.nbytes < needed or scratch.data_ptr() % 16:
        raise ValueError(
            f"paged_attention: scratch has {scratch.nbytes} bytes of {needed}, isn't contiguous, or its address isn't "
            "a multiple of 16"
        )
    return scratch.view(-1).view(torch.uint8)[:needed].view(torch.float32)


def _check_work(work: torch.Tensor, requests: int, splits: int) -> None:
    """Raises ValueError if ``work`` can't be the list of a decode step. ``requests`` is 0 if the step isn't a decode
    step.
    """
    if not requests or work.dtype != torch.int32 or work.numel() < work_size(requests, splits):
        raise ValueError(f"paged_attention: work {work.dtype} {tuple(work.shape)} isn't of a step of {requests} tokens")


def decode_work(
    kv_len: torch.Tensor,
    blocks: int,
    block_size: int,
    *,
    window: int = 0,
    split_keys: int = SPLIT_KEYS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lists the splits of attention in a decode step, as int32: the number of splits, then (request, split) of each.

    The list is computed on the device, so that one CUDA graph works for all contexts. All layers with the same window
    share it.

    Args:
        kv_len: the context of each request, [B].
        blocks: the most blocks of a request in the table.
        block_size: the tokens of a block.
        window: the layers' window; 0 for none.
        split_keys: the keys of a split.
        out: int32, of at least ``work_size`` integers; None allocates it.
    """
    (requests,) = kv_len.shape
    size = work_size(requests, splits_of(blocks, block_size, split_keys))
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=kv_len.device)
    elif out.dtype != torch.int32 or not out.is_contiguous() or out.numel() < size:
        raise ValueError(f"decode_work: out is {out.dtype} {tuple(out.shape)}, not int32 [{size}]")
    _run(work_call(kv_len, out, window, requests, split_keys))
    return out


def _workers(v_cache: torch.Tensor) -> int:
    """Returns the number of programs per key/value head that gives four programs per multiprocessor in total."""
    if v_cache.device.type != "cuda":
        return 3
    return max(1, 4 * torch.cuda.get_device_properties(v_cache.device).multi_processor_count // v_cache.shape[2])


def scratch_bytes(shape: AttentionShape, tokens: int, blocks: int, split_keys: int = SPLIT_KEYS) -> int:
    """Returns the bytes of scratch memory for ``tokens`` tokens and tables of ``blocks`` blocks; 0 if contexts have one
    split.
    """
    return 4 * attention_scratch(tokens, shape.heads, shape.value_size, blocks, shape.block_size, split_keys)


def _run(call: Call) -> None:
    JitLauncher().bind(call)()


def _gpu_of(x: torch.Tensor) -> GpuLimits:
    """Returns the limits of the GPU of tensor ``x``; for an unknown compute capability, those of the next lower known
    one.
    """
    if x.device.type != "cuda":
        return _INTERPRETED
    major, minor = torch.cuda.get_device_capability(x.device)
    capability = 10 * major + minor
    return gpu_of(max((c for c in GPUS if c <= capability), default=capability))


def _checked(caches: LayerCaches) -> LayerCaches:
    """Returns the caches. Raises ValueError if no kernel supports them."""
    keys, values = caches.keys, caches.values
    stored = (keys,) if caches.values_in_keys else (keys, values)
    if keys.dtype != values.dtype or not all(of.is_contiguous() for of in stored):
        raise ValueError("caches of keys and values are of one type, and contiguous")
    if keys.dtype not in CACHE_FORMATS_OF:
        raise ValueError(f"caches can't be of {keys.dtype}")
    for scales in (caches.key_scales, caches.value_scales):
        if (scales is not None) != (caches.format not in FLOATS_OF.values()):
            raise ValueError(f"a cache of {keys.dtype} with{'out' if scales is None else ''} scales")
        if scales is not None and (scales.shape != keys.shape[:3] or scales.dtype != torch.float32):
            raise ValueError(f"scales are float32 {tuple(keys.shape[:3])}, not {scales.dtype} {tuple(scales.shape)}")
    return caches
