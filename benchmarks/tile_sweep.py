"""Times attention's tiles on the GPU at hand, and writes the fastest to the table that kernels are made by.

    python benchmarks/tile_sweep.py [--output FILE.jsonl] [--minutes 8] [--dtype bf16] [--head-size 128] [--group 4]

Writes plugins/triton/tiles_smNN.jsonl unless --output says otherwise, with what was there before for other cases.
Needs a CUDA build of torch, and Triton; from a checkout that isn't installed, with PYTHONPATH=src. Tiles whose code
doesn't fit or needs a stack are left out, by compiling all of a case side by side; the others run as CUDA graphs, over
caches that L2 doesn't hold. Stops after --minutes and says what was left out.

Not run yet: no GPU was at hand. tests/benchmarks/test_tile_sweep.py runs it with a timer that isn't one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from enginewright.plugins.triton.compile_ahead import CompiledKernel, compile_kernel
from enginewright.plugins.triton.specs import AttentionShape, attention_spec
from enginewright.plugins.triton.tiles import (
    FEWEST_ROWS,
    GPUS,
    SPLIT_KEYS,
    Gpu,
    Tile,
    TileCase,
    decode_rows,
    gpu_of,
    least_shared_memory,
    power_of_2,
    read_tiles,
    tiles_file,
    write_tiles,
)

KV_HEADS, BLOCK_SIZE = 8, 32
DECODE, PREFILL = (16, 8192), (1, 8192)
"""Requests, and tokens of each: a cache of 16 x 8192 tokens has 0.3 GB even in 8 bits."""

Timer = Callable[[TileCase, Tile], float | None]
"""Microseconds that a tile takes in a case; None where it can't run."""

Measured = dict[TileCase, tuple[Tile, dict[str, Any]]]


def shape_of(case: TileCase) -> AttentionShape:
    sizes = (case.group * KV_HEADS, KV_HEADS, case.head_size, case.head_size, BLOCK_SIZE)
    return AttentionShape(*sizes, case.dtype, case.cache, case.head_size**-0.5)


def candidates(case: TileCase, gpu: Gpu) -> Iterator[Tile]:
    """All that may be worth timing: more than the rule has."""
    group = power_of_2(case.group)
    if case.decode:
        rows, warps, stages = [decode_rows(case.group)], (2, 4, 8), (2, 3, 4)
    else:
        rows, warps, stages = [r for r in (32, 64, 128) if r >= max(group, FEWEST_ROWS)], (4, 8), (2, 3)
    for r, keys, w, s in itertools.product(rows, (32, 64, 128), warps, stages):
        tile = Tile(1 if case.decode else r // case.group, r, keys, w, s)
        if least_shared_memory(tile, case, gpu) <= gpu.shared_memory:
            yield tile


def that_fit(gpu: Gpu, compiled: Iterable[CompiledKernel]) -> list[Tile]:
    """The tiles of kernels that fit the GPU and need no stack."""
    return [k.spec.tile for k in compiled if k.shared_memory <= gpu.shared_memory and not k.stack]


def compile_all(case: TileCase, gpu: Gpu, pool: ProcessPoolExecutor) -> list[Tile]:
    split_keys = SPLIT_KEYS if case.decode else 0
    specs = [attention_spec(shape_of(case), gpu.capability, tile, split_keys) for tile in candidates(case, gpu)]
    return that_fit(gpu, pool.map(compile_kernel, specs))


def sweep(
    cases: Iterable[TileCase],
    tiles_of: Callable[[TileCase], Iterable[Tile]],
    timer: Timer,
    until: float,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[str], object] = print,
) -> tuple[Measured, list[TileCase]]:
    """The fastest tile of each case, with how long it takes, and the cases that there was no time for.

    A case that has been begun when ``clock`` passes ``until`` is left out: its best tile may be among those not timed.
    """
    found: Measured = {}
    left_out = []
    for case in cases:
        times: dict[Tile, float] = {}
        done = False
        if clock() < until:
            for tile in tiles_of(case):
                took = timer(case, tile) if clock() < until else None
                if took is not None:
                    times[tile] = took
            done = clock() < until
        if not done or not times:
            left_out.append(case)
            continue
        best = min(times, key=times.__getitem__)
        others = sorted(times.values())
        found[case] = (best, {"microseconds": round(times[best], 2), "slowest": round(others[-1], 2), "of": len(times)})
        told(f"{case}: {best} takes {times[best]:.1f} us, the slowest of {len(times)} {others[-1]:.1f} us")
    return found, left_out


def merge(path: Path, measured: Measured) -> None:
    """Writes ``measured`` to the table, and leaves what it has of other cases."""
    before: Measured = {}
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        before = {
            case: (tile, json.loads(line)) for line, (case, tile) in zip(lines, read_tiles(path).items(), strict=True)
        }
    write_tiles(path, {**before, **measured})


def gpu_timer() -> Timer:
    """Runs a step's attention in a CUDA graph, with memory that was there before."""
    import torch
    import triton
    from gpu_attention import make_cache, microseconds

    from enginewright.plugins.triton import launch

    inputs: dict[TileCase, Callable[..., object]] = {}

    def prepare(case: TileCase) -> Callable[..., object]:
        requests, length = DECODE if case.decode else PREFILL
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
        k, v, *scales = make_cache(requests * length, case.cache, KV_HEADS, case.head_size)
        table = torch.randperm(len(k), device="cuda").int().view(requests, -1)
        tokens = requests if case.decode else length
        q = torch.randn(tokens, case.group * KV_HEADS, case.head_size, dtype=dtype, device="cuda")
        q_start = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * (tokens // requests)
        kv_len = torch.full((requests,), length, device="cuda", dtype=torch.int32)
        split_keys = SPLIT_KEYS if case.decode else 0
        needed = launch.scratch_bytes(shape_of(case), tokens, table.shape[1]) if case.decode else 0
        memory = {"out": torch.empty_like(q), "scratch": torch.empty(needed, dtype=torch.uint8, device="cuda")}
        scale = case.head_size**-0.5
        given = (q, k, v, table, q_start, kv_len, scale)
        more = dict(zip(("k_scales", "v_scales"), scales, strict=False))
        return partial(launch.paged_attention, *given, **more, **memory, split_keys=split_keys)

    def timed(case: TileCase, tile: Tile) -> float | None:
        if case not in inputs:
            inputs.clear()  # of the case before
            inputs[case] = prepare(case)
        run = partial(inputs[case], tile=tile)
        try:
            run()
        except triton.runtime.errors.OutOfResources:
            return None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return microseconds(graph.replay)

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--dtype", action="append", choices=["bf16", "f16", "f32"])
    parser.add_argument("--cache", action="append", choices=["bf16", "f16", "f32", "fp8", "int8"])
    parser.add_argument("--head-size", type=int, action="append")
    parser.add_argument("--group", type=int, action="append")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("tile_sweep: torch sees no GPU, or was built without CUDA")
    until = time.monotonic() + 60 * options.minutes
    major, minor = torch.cuda.get_device_capability()
    gpu = gpu_of(max((c for c in GPUS if c <= 10 * major + minor), default=10 * major + minor))
    cases = [
        TileCase(size, group, dtype, cache, decode)
        for dtype in options.dtype or ["bf16"]
        for cache in options.cache or [dtype, "fp8", "int8"]
        for size in options.head_size or [128, 64]
        for group in options.group or [4, 8, 1]
        for decode in (True, False)
    ]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        found, left_out = sweep(cases, lambda case: compile_all(case, gpu, pool), gpu_timer(), until)
    merge(options.output or tiles_file(gpu.capability), found)
    for case in left_out:
        print(f"left out: {case}")


if __name__ == "__main__":
    main()
