"""Times attention's tiles on the GPU at hand, and writes the fastest to the table that kernels are made by.

    python benchmarks/tile_sweep.py [--output FILE.jsonl] [--minutes 8] [--dtype bf16] [--head-size 128] [--group 4]
    python benchmarks/tile_sweep.py --found A.jsonl

Writes plugins/gpu/tiles_smNN.jsonl unless --output says otherwise, with what was there before for other cases.
--found takes what gpu_truth.py's stage A wrote, and needs no GPU: its ``pack`` compiled the candidates. Else this
machine compiles them, and needs a CUDA build of torch, and Triton; from a checkout that isn't installed, with
PYTHONPATH=src. Tiles whose code doesn't fit or needs a stack are left out. The others are launched by the driver, as
CUDA graphs over caches that L2 doesn't hold, as a program launches them: decode steps by the list of what there is to
do. Stops after --minutes and says what was left out.

Of the table for 9.0 an H100 timed the candidates by gpu_truth.py. tests/benchmarks/test_tile_sweep.py runs this with a
timer that isn't one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginewright.plugins.gpu.compile_ahead import CompiledKernel, write_kernels
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.specs import KernelSpec
from enginewright.plugins.gpu.tiles import (
    FEWEST_ROWS,
    GPUS,
    GpuLimits,
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
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, TargetError
from enginewright.runtime.shared.threads import available_threads

KV_HEADS = 8
DECODE, PREFILL = (16, 8192), (1, 8192)
"""Requests, and tokens of each: a cache of 16 x 8192 tokens has 0.3 GB even in 8 bits."""

CASES = (
    TileCase(128, 4, "bf16", "bf16", decode=True),
    TileCase(128, 4, "bf16", "bf16", decode=False),
    TileCase(64, 4, "bf16", "bf16", decode=True),
    TileCase(64, 4, "bf16", "bf16", decode=False),
    TileCase(128, 4, "bf16", "fp8", decode=True),
    TileCase(128, 4, "bf16", "int8", decode=True),
)
"""The cases for a lent GPU, the most important ones first."""

CANDIDATES_FILE = "candidates.json"
"""Beside the kernels: which tiles of which case were compiled."""

Timer = Callable[[TileCase, Tile], float | None]
"""Microseconds that a tile takes in a case; None where it can't run."""

Measured = dict[TileCase, tuple[Tile, dict[str, Any]]]


def candidates(case: TileCase, gpu: GpuLimits) -> Iterator[Tile]:
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


def fits(gpu: GpuLimits, kernel: CompiledKernel) -> bool:
    """Returns True if a kernel fits the GPU and needs no stack."""
    return kernel.shared_memory <= gpu.shared_memory and not kernel.stack


def compile_candidates(case: TileCase, gpu: GpuLimits, compiler: KernelCompiler, folder: Path) -> list[Tile]:
    """Writes the kernels of all tiles that fit; the tiles."""
    compiled, tiles = [], list(candidates(case, gpu))
    specs = [_specs_of(case, tile, gpu) for tile in tiles]
    for spec in itertools.chain.from_iterable(specs):
        compiler.start(spec)
    for tile, needed in zip(tiles, specs, strict=True):
        try:
            kernels = [compiler.compile(spec) for spec in needed]
        except TargetError:  # a tile at which a pass of Triton's fails
            continue
        if all(fits(gpu, kernel) for kernel in kernels):
            write_kernels(folder, kernels)
            compiled.append(tile)
    return compiled


def _specs_of(case: TileCase, tile: Tile, gpu: GpuLimits) -> list[KernelSpec]:
    """The kernels that a step with this tile launches."""
    import torch
    from gpu_kernels import AttentionStep
    from gpu_places import Rehearsal

    from enginewright.plugins.cuda.serve.kernels import SpecCollector

    collector = SpecCollector(gpu.capability)
    place = Rehearsal(f"{gpu.capability // 10}.{gpu.capability % 10}", interpreted=False, device="meta")
    AttentionStep(_attention_of(case), torch.device("meta")).works(collector, place, tile=tile)
    return list(collector.found)


def _attention_of(case: TileCase) -> Any:
    from gpu_kernels import Attention

    requests, length = DECODE if case.decode else PREFILL
    new, past = (1, length - 1) if case.decode else (length, 0)
    sizes = {"heads": case.group * KV_HEADS, "kv_heads": KV_HEADS, "size": case.head_size}
    return Attention((new,) * requests, (past,) * requests, dtype=case.dtype, cache=case.cache, **sizes)


def pack(folder: Path, gpu: GpuLimits, compiler: KernelCompiler, cases: Sequence[TileCase] = CASES) -> None:
    """Writes the candidates of some cases, and ``CANDIDATES_FILE``."""
    from enginewright.plugins.cuda.serve.kernels import TILES_FILE

    folder.mkdir(parents=True)
    listed = [
        {"case": asdict(case), "tiles": [asdict(tile) for tile in compile_candidates(case, gpu, compiler, folder)]}
        for case in cases
    ]
    (folder / CANDIDATES_FILE).write_text(json.dumps(listed) + "\n")
    (folder / TILES_FILE.format(gpu.capability)).write_text("[]\n")  # each launch says its own


def packed(folder: Path) -> dict[TileCase, list[Tile]]:
    """Reads the candidates that ``pack`` wrote."""
    entries = json.loads((folder / CANDIDATES_FILE).read_text())
    return {TileCase(**one["case"]): [Tile(**tile) for tile in one["tiles"]] for one in entries}


def times_of(case: TileCase, tiles: Iterable[Tile], timer: Timer, goes_on: Callable[[], bool]) -> dict[Tile, float]:
    """Times each tile, until ``goes_on`` returns False."""
    times = {}
    for tile in tiles:
        took = timer(case, tile) if goes_on() else None
        if took is not None:
            times[tile] = took
    return times


def best(times: Mapping[Tile, float]) -> tuple[Tile, dict[str, Any]]:
    """The fastest, and what the table says of it."""
    tile = min(times, key=times.__getitem__)
    slowest = round(max(times.values()), 2)
    return tile, {"microseconds": round(times[tile], 2), "slowest": slowest, "of": len(times)}


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
    bests: Measured = {}
    left_out = []
    for case in cases:
        times = times_of(case, tiles_of(case), timer, lambda: clock() < until) if clock() < until else {}
        if not times or clock() >= until:
            left_out.append(case)
            continue
        bests[case] = tile, more = best(times)
        told(f"{case}: {tile} takes {more['microseconds']} us, the slowest of {len(times)} {more['slowest']} us")
    return bests, left_out


def merge(path: Path, measured: Measured) -> None:
    """Writes ``measured`` to the table, and leaves what it has of other cases."""
    before: Measured = {}
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        before = {
            case: (tile, json.loads(line)) for line, (case, tile) in zip(lines, read_tiles(path).items(), strict=True)
        }
    write_tiles(path, {**before, **measured})


def record_of(case: TileCase, times: Mapping[Tile, float]) -> dict[str, Any]:
    """A case's times as a line of JSON has them."""
    return {"case": asdict(case), "times": [{**asdict(tile), "us": round(took, 2)} for tile, took in times.items()]}


def found_in(lines: Iterable[str]) -> Measured:
    """The fastest tiles of what ``record_of`` wrote, among other lines."""
    bests: Measured = {}
    for record in map(json.loads, filter(str.strip, lines)):
        if record.get("times"):
            times = {Tile(**{k: v for k, v in one.items() if k != "us"}): one["us"] for one in record["times"]}
            bests[TileCase(**record["case"])] = best(times)
    return bests


def gpu_timer(launcher: Any, place: Any) -> tuple[Timer, dict[Tile, float | str]]:
    """Times a step's attention on the GPU. What comes beside it, of the last case: how far a tile's result is from
    that of the first, which says whether it computes the same; or why the driver refused it."""
    from gpu_kernels import AttentionStep, microseconds

    steps: dict[TileCase, tuple[Any, Any]] = {}
    apart: dict[Tile, float | str] = {}

    def timed(case: TileCase, tile: Tile) -> float | None:
        if case not in steps:
            steps.clear()  # of the case before
            apart.clear()
            steps[case] = AttentionStep(_attention_of(case), place.device), None
        step, want = steps[case]
        try:
            works = step.works(launcher, place, tile=tile)

            def run() -> None:
                for work in works:
                    work()

            if place.device.type != "cuda":
                return None
            took = microseconds(place, [run])
        except BundleError:
            raise
        except EnginewrightError as e:  # the others may run
            apart[tile] = e.message
            return None
        if want is None:
            steps[case] = step, step.out.clone()
        else:
            apart[tile] = float((step.out.float() - want.float()).abs().max())
        return took

    return timed, apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--found", type=Path, help="lines of gpu_truth.py's stage A: nothing is measured")
    parser.add_argument("--gpu", type=int, default=90, help="with --found: the capability that was measured")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--dtype", action="append", choices=["bf16", "f16", "f32"])
    parser.add_argument("--cache", action="append", choices=["bf16", "f16", "f32", "fp8", "int8"])
    parser.add_argument("--head-size", type=int, action="append")
    parser.add_argument("--group", type=int, action="append")
    parser.add_argument("--workers", type=int, default=available_threads())
    options = parser.parse_args()
    if options.found:
        merge(options.output or tiles_file(options.gpu), found_in(options.found.read_text().splitlines()))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("tile_sweep: torch sees no GPU, or was built without CUDA")
    from gpu_places import section_of

    from enginewright.plugins.cuda.serve import executor as cuda_blocks

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
    section = section_of(f"{gpu.capability // 10}.{gpu.capability % 10}")
    place: Any = cuda_blocks.place_of(section)
    place.entered().__enter__()  # until the process ends
    with tempfile.TemporaryDirectory() as name, KernelCompiler(options.workers) as compiler:
        folder = Path(name, "kernels")
        pack(folder, gpu, compiler, ())
        timer, _ = gpu_timer(place.launcher(folder, section), place)
        bests, left_out = sweep(cases, lambda c: compile_candidates(c, gpu, compiler, folder), timer, until)
    merge(options.output or tiles_file(gpu.capability), bests)
    for case in left_out:
        print(f"left out: {case}")


if __name__ == "__main__":
    main()
