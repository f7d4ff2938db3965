"""Paged attention on a GPU: our kernels' speed beside PyTorch's, as shares of what the GPU can do.

    python benchmarks/gpu_attention.py [--output FILE.json] [--minutes 4] [--cache bf16 --cache fp8]

Needs a CUDA build of torch, and Triton, which compiles the kernels first; from a checkout that isn't installed, with
PYTHONPATH=src. gpu_truth.py measures the same with kernels that it carries. Compared with scaled_dot_product_attention
and FlexAttention on a dense copy of the same cache. Runs are CUDA graphs, over several caches where L2 would hold one.
What a share is of is measured in the same run: bytes by a copy, products by a matmul of bfloat16.

"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_kernels import (
    GIB,
    OUT_OF_L2,
    Attention,
    AttentionStep,
    Run,
    microseconds,
    note,
)
from gpu_machine import NotMeasuredError
from gpu_places import Place, section_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from enginewright.plugins.cuda.serve import executor as cuda_blocks
from enginewright.plugins.cuda.serve.ops import Launcher
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.runtime.shared.threads import available_threads

DECODE = [(batch, length) for length in (1024, 8192, 32768) for batch in (1, 8, 64, 256)]
PREFILL = [2048, 8192]
CACHES = ("bf16", "fp8", "int8")


def limits(place: Place) -> dict[str, float]:
    """Measures this GPU's peaks: bytes a second of a copy (read and written), operations of bfloat16 products."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copied = microseconds(place, [lambda: target.copy_(source)])
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=place.device)
    out = torch.empty_like(a)
    multiplied = microseconds(place, [lambda: torch.mm(a, a, out=out)])
    return {"bytes_per_second": 2 * source.numel() / copied * 1e6, "flop_per_second": 2 * 8192**3 / multiplied * 1e6}


def described(launcher: Launcher, place: Place, caches: Sequence[str] = CACHES) -> None:
    """Everything of ours that is launched here."""
    for kind in caches:
        for of in (_decode(1, 1024, kind), _prefill(64, kind)):
            step = AttentionStep(of, place.device)
            step.works(launcher, place)
            step.works(launcher, place, listed=False)


def figures(caches: Sequence[str]) -> Iterator[tuple[dict[str, Any], Attention]]:
    """Yields the attentions to measure, small ones first."""
    attentions = [(("decode", batch, n, kind), _decode(batch, n, kind)) for batch, n in DECODE for kind in caches]
    attentions += [(("prefill", 1, n, kind), _prefill(n, kind)) for n in PREFILL for kind in caches]
    for names, of in sorted(attentions, key=lambda item: item[1].cache_bytes):
        yield dict(zip(("phase", "batch", "length", "cache"), names, strict=True)), of


def measure(of: Attention, launcher: Launcher, place: Place, free: int) -> dict[str, Any]:
    """Microseconds of each way, and what is counted; NotMeasuredError where there isn't ``free`` memory enough."""
    copies = max(1, min(16, -(-OUT_OF_L2 // of.cache_bytes))) if of.decodes else 1
    needed = copies * of.cache_bytes * (2 if of.cache == "bf16" else 1) + 2 * GIB
    if needed > free:
        raise NotMeasuredError(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free")
    steps = [AttentionStep(of, place.device) for _ in range(copies)]
    ways: dict[str, list[Run]] = {}
    for name, listed in (("ours", True), *((("ours, not listed", False),) if of.decodes else ())):
        ways[name] = [_all(step.works(launcher, place, listed=listed)) for step in steps]
    if of.cache == "bf16":
        for name, beside in (_decode_beside if of.decodes else _prefill_beside)().items():
            ways[name] = [beside(step) for step in steps]
    pairs = sum(n * p + n * (n + 1) // 2 for n, p in zip(of.new, of.past, strict=True))
    row: dict[str, Any] = {"bytes": of.cache_bytes, "flop": 4 * pairs * of.heads * of.size, "microseconds": {}}
    if place.device.type != "cuda":
        return row
    for name, runs in ways.items():
        try:
            row["microseconds"][name] = round(microseconds(place, runs), 2)
            if name.startswith("torch"):
                result: Any = runs[0]()
                row.setdefault("largest_difference", {})[name] = _difference(result, steps[0])
        except Exception as e:  # what others refuse mustn't cost our figure
            if name == "ours":
                raise
            row["microseconds"][name] = f"{type(e).__name__}: {e}"[:300]
    return row


def _decode(batch: int, length: int, kind: str) -> Attention:
    return Attention((1,) * batch, (length - 1,) * batch, cache=kind)


def _prefill(length: int, kind: str) -> Attention:
    return Attention((length,), (0,), cache=kind)


def _all(works: Sequence[Run]) -> Run:
    def run() -> None:
        for work in works:
            work()

    return run


def _difference(found: torch.Tensor, step: AttentionStep) -> float:
    ours = step.out.float()
    return float((found.reshape(ours.shape).float() - ours).abs().max())


def _dense(step: AttentionStep) -> tuple[torch.Tensor, ...]:
    """Keys and values [B, Nkv, S, D], in the order of the table."""
    batch = len(step.table)
    caches = (step.caches.keys, step.caches.values)
    heads, size = step.of.kv_heads, step.of.size
    rows = step.table.long().flatten()
    return tuple(c[rows].view(batch, -1, heads, size).transpose(1, 2) for c in caches)


def _decode_beside() -> dict[str, Callable[[AttentionStep], Run]]:
    def sdpa(step: AttentionStep) -> Run:
        k, v = _dense(step)
        return lambda: scaled_dot_product_attention(step.q[:, :, None], k, v, enable_gqa=True)

    return {"torch sdpa": sdpa}


def _prefill_beside() -> dict[str, Callable[[AttentionStep], Run]]:
    def queries(step: AttentionStep) -> torch.Tensor:
        return step.q[None].transpose(1, 2)

    def flash(step: AttentionStep) -> Run:
        (k, v), q = _dense(step), queries(step)

        def run() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                result = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return result.transpose(1, 2)

        return run

    def flex(step: AttentionStep) -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        (k, v), q = _dense(step), queries(step)
        length = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(q.device))
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return {"torch sdpa": flash, "torch flex": flex}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--cache", action="append", choices=CACHES)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_attention: torch sees no GPU, or was built without CUDA")
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    section = section_of(f"{major}.{minor}")
    place: Any = cuda_blocks.place_of(section)
    place.entered().__enter__()  # until the process ends
    rows, left_out = [], []
    with tempfile.TemporaryDirectory() as folder, KernelCompiler(available_threads()) as compiler:
        note(Path(folder), place.gpu, compiler, described)
        launcher = place.launcher(Path(folder), section)
        until = time.monotonic() + 60 * options.minutes
        most = limits(place)
        for names, of in figures(options.cache or CACHES):
            try:
                if time.monotonic() > until:
                    raise NotMeasuredError("no time left")
                row = names | measure(of, launcher, place, torch.cuda.mem_get_info()[0])
            except NotMeasuredError as e:
                left_out.append({**names, "why": str(e)})
                continue
            key, what = ("bytes", "bytes_per_second") if of.decodes else ("flop", "flop_per_second")
            timed = {name: t for name, t in row["microseconds"].items() if not isinstance(t, str)}
            row["share_of_limit"] = {name: round(row[key] / t * 1e6 / most[what], 3) for name, t in timed.items()}
            print(names, row["microseconds"], flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    document = {
        "command": " ".join(["python", *sys.argv]),
        "commit": revision or None,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
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
