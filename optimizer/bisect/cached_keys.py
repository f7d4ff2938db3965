"""Keys are put into a cache of the cpu target, in its format: see docs/inside/lowered-program.md, KV cache."""

from __future__ import annotations

import numpy as np
import torch

from enginewright.plugins.cpu.executable import CpuProgram
from enginewright.plugins.ops.quantized_cache import quantize_heads
from enginewright.plugins.shared.contracts import KV_BLOCK_SIZE, FloatArray, Int32Array

_CODES = {"i8": torch.int8, "fp8": torch.float8_e4m3fn}


def put_keys(executable: CpuProgram, group: str, layer: int, slots: Int32Array, keys: FloatArray) -> None:
    """Writes keys [T, Nkv, D] at slots [T] of a layer, rounded as its cache is where that has fewer bits than 32."""
    blocks, places = np.divmod(slots, KV_BLOCK_SIZE)
    (dtype,) = (g.dtype for g in executable.lowered.cache_groups if g.name == group)
    if dtype == "f32":
        executable.cache_arrays(group, layer)[0][blocks, :, :, places] = keys
        return
    pieces, _ = executable.cache_memory(group, layer)  # [P, Nkv, bytes]: [D/2][K][2], then scales [K]
    heads, size = keys.shape[1:]
    channel = np.arange(size)
    pair = channel // 2 * 2 * KV_BLOCK_SIZE
    alone = (channel == size - 1) & (size % 2 == 1)  # of an odd D the last row is [K]
    at = pair + np.where(alone, places[:, None], places[:, None] * 2 + channel % 2)  # [T, D]
    where = (blocks[:, None, None], np.arange(heads)[:, None], at[:, None])
    x = torch.from_numpy(np.ascontiguousarray(keys))
    if dtype == "bf16":
        pieces.view(np.uint16)[where] = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return
    codes, scales = quantize_heads(x, _CODES[dtype])
    pieces[where] = codes.view(torch.uint8).numpy()
    all_scales = pieces[..., KV_BLOCK_SIZE * size :].view(np.float32)  # [P, Nkv, K]
    all_scales[blocks[:, None], np.arange(heads), places[:, None]] = scales.numpy()
