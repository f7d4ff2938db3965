"""Paged attention on a GPU: the Triton kernels' speed beside PyTorch's, as shares of what the GPU can do.

    python benchmarks/gpu_attention.py [--output FILE.json] [--minutes 4] [--cache bf16 --cache fp8]

Needs a CUDA build of torch, and Triton; from a checkout that isn't installed, with PYTHONPATH=src. Compared with
scaled_dot_product_attention on a dense cache of the same bytes, and with FlashInfer where that is installed. What a
share is of is measured in the same run: bytes by a copy, products by a matmul of bfloat16. Stops measuring after
--minutes and says what was left out.

Not run yet: no GPU was at hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from enginewright.plugins.ops.quantized_cache import quantize_heads
from enginewright.plugins.triton import launch

HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 32, 8, 128, 32
DECODE = [(batch, length) for length in (1024, 8192, 32768) for batch in (1, 8, 64, 256)]
PREFILL = [2048, 8192]
Run = Callable[[], object]


def microseconds(run: Run, budget: float = 0.15) -> float:
    """The median of repeated runs, timed by the GPU; some before them don't count."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(5, min(200, int(budget / (time.perf_counter() - begin))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) * 1e3 for first, last in events)


def limits() -> dict[str, float]:
    """What this GPU does: bytes a second of a copy (read and written), multiply-adds of bfloat16 counted twice."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = microseconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    multiplied = microseconds(lambda: a @ a)
    return {"bytes_per_second": 2 * source.numel() / copied * 1e6, "flop_per_second": 2 * 8192**3 / multiplied * 1e6}


def make_cache(tokens: int, kind: str, kv_heads: int = KV_HEADS, size: int = SIZE) -> tuple[torch.Tensor, ...]:
    """Keys, values and, of 8 bits, their scales, for ``tokens`` tokens: [P, K, Nkv, D], [P, K, Nkv]."""
    blocks = tokens // BLOCK_SIZE
    sample = torch.randn(BLOCK_SIZE, kv_heads, size, device="cuda")
    floats = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    if kind in floats:
        cache = sample.to(floats[kind]).expand(blocks, -1, -1, -1).contiguous()
        return cache, cache.clone()
    codes, scales = quantize_heads(sample, {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[kind])
    shape = (blocks, BLOCK_SIZE, kv_heads)
    cache = codes.view(torch.uint8).expand(*shape, size).contiguous().view(codes.dtype)
    spread = scales.expand(shape).contiguous()
    return cache, cache.view(torch.uint8).clone().view(codes.dtype), spread, spread.clone()


def decode_runs(batch: int, length: int, kind: str) -> dict[str, Run]:
    """What decodes a token of each of ``batch`` requests with ``length`` tokens behind them."""
    k, v, *scales = make_cache(batch * length, kind)
    table = torch.randperm(len(k), device="cuda").int().view(batch, -1)
    q = torch.randn(batch, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    q_start = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    kv_len = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    scale = SIZE**-0.5
    given = dict(zip(("k_scales", "v_scales"), scales, strict=False))
    ours = partial(launch.paged_attention, q, k, v, table, q_start, kv_len, scale, **given)
    runs: dict[str, Run] = {"ours": ours}
    work = launch.decode_work(kv_len, table.shape[1], BLOCK_SIZE)
    runs["ours, listed"] = partial(ours, work=work)
    if kind == "bf16":
        dense_k, dense_v = (x.view(batch, length, KV_HEADS, SIZE).transpose(1, 2) for x in (k, v))
        runs["torch sdpa"] = lambda: scaled_dot_product_attention(q[:, :, None], dense_k, dense_v, enable_gqa=True)
        if importlib.util.find_spec("flashinfer"):
            runs["flashinfer"] = flashinfer_decode(q, k, v, table)
    return runs


def flashinfer_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Run:
    import flashinfer

    batch, blocks = table.shape
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    bounds = torch.arange(0, batch * blocks + 1, blocks, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), BLOCK_SIZE, dtype=torch.int32, device="cuda")
    wrapper.plan(bounds, table.flatten(), last, HEADS, KV_HEADS, SIZE, BLOCK_SIZE, q_data_type=q.dtype)
    return lambda: wrapper.run(q, (k, v))


def prefill_runs(length: int, kind: str) -> dict[str, Run]:
    """What attends with a whole prompt."""
    k, v, *scales = make_cache(length, kind)
    table = torch.arange(len(k), device="cuda", dtype=torch.int32)[None]
    q = torch.randn(length, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    q_start = torch.tensor([0, length], device="cuda", dtype=torch.int32)
    scale = SIZE**-0.5
    runs: dict[str, Run] = {
        "ours": lambda: launch.paged_attention(
            q, k, v, table, q_start, q_start[1:], scale, k_scales=scales[0] if scales else None,
            v_scales=scales[1] if scales else None,
        )
    }  # fmt: skip
    if kind == "bf16":
        dense_k, dense_v = (x.view(1, length, KV_HEADS, SIZE).transpose(1, 2) for x in (k, v))
        dense_q = q[None].transpose(1, 2)

        def flash() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=True, enable_gqa=True)

        runs["torch sdpa"] = flash
    return runs


def agree(runs: dict[str, Run]) -> float:
    """The largest difference between ours and another's results."""
    results = {name: run().flatten().float() for name, run in runs.items()}  # type: ignore[attr-defined]
    return max((float((x - results["ours"]).abs().max()) for x in results.values()), default=0.0)


def measure(kinds: list[str], until: float) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    work = [("prefill", 1, n, kind) for n in PREFILL for kind in kinds]
    work += [("decode", batch, n, kind) for batch, n in DECODE for kind in kinds]
    for phase, batch, length, kind in work:
        what = f"{phase} {batch} x {length}, {kind} cache"
        per_token = 2 * KV_HEADS * (SIZE * (2 if kind == "bf16" else 1) + (0 if kind == "bf16" else 4))
        cached = batch * length * per_token
        if time.monotonic() > until or 3 * cached > torch.cuda.mem_get_info()[0]:
            left_out.append(what)
            continue
        runs = decode_runs(batch, length, kind) if phase == "decode" else prefill_runs(length, kind)
        pairs = batch * length if phase == "decode" else length * (length + 1) // 2
        row: dict[str, Any] = {"phase": phase, "batch": batch, "length": length, "cache": kind, "bytes": cached}
        row["flop"] = 4 * pairs * HEADS * SIZE
        if phase == "decode" and len(runs) > 1:
            # The dense caches' blocks are in another order than the table's, and every block is the same.
            row["largest_difference"] = agree(runs)
        row["microseconds"] = {name: round(microseconds(run), 2) for name, run in runs.items()}
        print(what, row["microseconds"], flush=True)
        rows.append(row)
        del runs
        torch.cuda.empty_cache()
    return rows, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--cache", action="append", choices=["bf16", "fp8", "int8"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_attention: torch sees no GPU, or was built without CUDA")
    torch.manual_seed(0)
    until = time.monotonic() + 60 * options.minutes
    most = limits()
    rows, left_out = measure(options.cache or ["bf16", "fp8", "int8"], until)
    for row in rows:
        seconds = {name: t * 1e-6 for name, t in row["microseconds"].items()}
        key, of = ("bytes", "bytes_per_second") if row["phase"] == "decode" else ("flop", "flop_per_second")
        row["share_of_limit"] = {name: round(row[key] / t / most[of], 3) for name, t in seconds.items()}
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    document = {
        "command": " ".join(["python", *sys.argv]),
        "commit": revision or None,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "block_size": BLOCK_SIZE},
        "limits": most,
        "rows": rows,
        "left_out": left_out,
    }
    text = json.dumps(document, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
