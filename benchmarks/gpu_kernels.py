"""Kernels that were compiled elsewhere: launched on a GPU, or, where there is none, looked up as a GPU would.

What is launched alone is described here once, as works of a place: the packing machine runs it with a launcher that
notes what must be compiled, a rehearsal with one that looks each kernel up, a GPU with the driver's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from gpu_machine import Figure, Machine, Record
from gpu_places import Place, Rehearsal
from torch import Tensor

from enginewright.passes.ops import REFERENCES
from enginewright.plugins.cuda.serve.kernels import TILES_FILE, SpecCollector
from enginewright.plugins.cuda.serve.ops import Launcher, Work
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, write_kernels
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.specs import AttentionShape, attention_scratch, splits_of
from enginewright.plugins.gpu.step_calls import (
    CACHE_FORMATS_OF,
    FLOATS_OF,
    AttendedBatch,
    AttentionParts,
    AttentionRule,
    LayerCaches,
    Stored,
    attention_calls,
    kv_write_call,
    laid_by_group,
    product_call,
    split_product_calls,
    split_scratch,
    unpack_call,
    work_call,
    work_size,
)
from enginewright.plugins.gpu.tiles import GpuLimits, ProductTile, Tile
from enginewright.runtime.shared.errors import BundleError, EnginewrightError

BLOCK_SIZE = 32
GIB = 1 << 30

_FLOATS = {name: dtype for dtype, name in FLOATS_OF.items()}
_CACHES = {name: dtype for dtype, name in CACHE_FORMATS_OF.items()}


def bound(launcher: Launcher, call: Call) -> Work:
    """Binds a call to a launcher. The function also keeps the call's memory, of which a launcher may hold only
    addresses.
    """
    run = launcher.bind(call)
    return lambda of=call: run()


# ---- attention alone


@dataclass(frozen=True)
class Attention:
    """``new`` tokens of each request behind ``past`` ones; one each and ``decodes``: steps of one token a request."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    dtype: str = "bf16"
    cache: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False

    @property
    def decodes(self) -> bool:
        return set(self.new) == {1}

    @property
    def cache_bytes(self) -> int:
        """Counts the bytes of all keys and values, with their scales."""
        a_head = 2 * self.size if self.cache in ("bf16", "f16") else 4 * self.size if self.cache == "f32" else 4
        a_head += self.size if self.cache in ("int8", "fp8") else 0
        return 2 * self.kv_heads * a_head * sum(-(-(n + p) // BLOCK_SIZE) * BLOCK_SIZE for n, p in self._lengths)

    @property
    def _lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.new, self.past, strict=True))


class AttentionStep:
    """Random inputs: every block is another one, so that a wrong table shows; what no table has is left out of caches.

    Args:
        of: sizes.
        device: where; on "meta" nothing takes memory.
    """

    def __init__(self, of: Attention, device: torch.device) -> None:
        self.of = of
        lengths = [n + p for n, p in zip(of.new, of.past, strict=True)]
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        order = torch.randperm(sum(counts), device="cpu").int()
        table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        for b, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            table[b, :count] = order[end - count : end]
        self.table = table.to(device)
        self.q_start = torch.tensor([0, *accumulate(of.new)], dtype=torch.int32).to(device)
        self.kv_len = torch.tensor(lengths, dtype=torch.int32).to(device)
        pair = [_cache(of, sum(counts), device) for _ in range(2)]
        self.caches = LayerCaches(pair[0][0], pair[1][0], pair[0][1], pair[1][1])
        # A view of wider rows, as one linear for q, k and v leaves it.
        wide = (of.heads + 2 * of.kv_heads) * of.size
        rows = torch.randn(sum(of.new), wide, device=device, dtype=_FLOATS[cast(Any, of.dtype)])
        self.q = rows[:, : of.heads * of.size].unflatten(1, (of.heads, of.size))
        self.out = torch.full((sum(of.new), of.heads, of.size), float("nan"), dtype=self.q.dtype, device=device)
        self.sinks = torch.randn(of.heads, device=device) if of.sinks else None
        self.slopes = 0.3 * torch.rand(of.heads, device=device) if of.slopes else None

    def works(self, launcher: Launcher, place: Place, *, tile: Tile | None = None, listed: bool = True) -> list[Work]:
        """The launches that fill ``out``. ``listed``: decode steps use a list of work items, as a program's do."""
        of, works = self.of, list[Work]()
        requests, blocks = self.table.shape
        splits = splits_of(blocks, BLOCK_SIZE) if of.decodes else 1
        tokens = len(self.q)
        scratch = attention_scratch(tokens, of.heads, of.size, blocks, BLOCK_SIZE) if of.decodes else 0
        listing = None
        if splits > 1 and listed:
            listing = torch.empty(work_size(requests, splits), dtype=torch.int32, device=place.device)
            works.append(bound(launcher, work_call(self.kv_len, listing, of.window, 256)))
        calls = attention_calls(
            self.q,
            self.caches,
            AttendedBatch(self.table, self.q_start, self.kv_len, of.decodes),
            AttentionRule(of.size**-0.5, of.window, of.softcap, self.sinks, self.slopes),
            AttentionParts(torch.empty(max(1, scratch), device=place.device), work=listing, workers=requests * splits),
            self.out,
            place.gpu,
            launcher.tile if tile is None else lambda shape, decode: tile,
        )
        for call in calls:
            if call.kernel == "listed_attention":  # as a program of the target does it
                most = max(1, place.processors * launcher.resident(call) // of.kv_heads)
                call = replace(call, grid=(min(most, call.grid[0]), *call.grid[1:]))
            works.append(bound(launcher, call))
        return works

    def reference(self) -> Tensor:
        """The expected content of ``out``."""
        c, of = self.caches, self.of
        rest = (self.table, self.q_start, self.kv_len, of.size**-0.5, of.window, of.softcap, self.sinks, self.slopes)
        if c.key_scales is None or c.value_scales is None:
            return REFERENCES["paged_attention"](self.q, c.keys, c.values, *rest)
        return REFERENCES["quantized_paged_attention"](self.q, c.keys, c.values, c.key_scales, c.value_scales, *rest)

    def shape(self) -> AttentionShape:
        """Gives the shape as kernels see it."""
        of = self.of
        form = (of.size**-0.5, of.window, of.softcap, of.sinks, of.slopes)
        kinds = cast(Any, (of.dtype, of.cache))
        return AttentionShape(of.heads, of.kv_heads, of.size, of.size, BLOCK_SIZE, *kinds, *form)


def _cache(of: Attention, blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    shape = (blocks, BLOCK_SIZE, of.kv_heads, of.size)
    dtype = _CACHES[cast(Any, of.cache)]
    if of.cache in ("bf16", "f16", "f32"):
        return torch.randn(shape, device=device, dtype=dtype), None
    scales = 0.01 + 0.01 * torch.rand(shape[:3], device=device)
    if of.cache == "int8":
        return torch.randint(-127, 128, shape, device=device, dtype=dtype), scales
    return (40 * torch.randn(shape, device=device, dtype=torch.bfloat16)).to(dtype), scales


# ---- cases: a kernel's result beside the reference's

Check = tuple[list[Work], Callable[[], float], float]
"""Works, then the largest difference from the reference, and the largest that is right."""

LONG = {"new": (1, 1, 1), "past": (0, 1000, 2100)}
PROMPTS = {"new": (5, 1, 300), "past": (0, 700, 130)}
TOLERANCE = {"f32": 3e-5, "f16": 4e-3, "bf16": 3e-2}
"""The reference sums in float32. Results of up to 4, and weights, are rounded to 8 or 11 bits; those of float32 not."""

ATTENTION = {
    "decode bf16": Attention(**LONG),
    "prompts bf16": Attention(**PROMPTS),
    "decode bf16 window": Attention(**LONG, window=900),
    "decode bf16 int8 cache": Attention(**LONG, cache="int8"),
    "decode bf16 fp8 cache": Attention(**LONG, cache="fp8"),
    "prompts bf16 fp8 cache": Attention(**PROMPTS, cache="fp8"),
    "decode bf16 heads of 64": Attention(**LONG, size=64),
    "prompts bf16 sinks, slopes, softcap": Attention(**PROMPTS, window=200, softcap=30.0, sinks=True, slopes=True),
    "decode f16": Attention(**LONG, dtype="f16", cache="f16"),
    "decode f32": Attention(**LONG, dtype="f32", cache="f32"),
}
PRODUCTS = {
    "products bf16 int4": ("int4", 64, (1, 64, 700)),
    "products bf16 uint4": ("uint4", 64, (1, 64, 700)),
    "products bf16 int8": ("int8", 32, (1, 64, 700)),
    "products bf16 fp8": ("fp8", 0, (1, 64)),
}


def cases() -> Mapping[str, Callable[[Launcher, Place], Check]]:
    """Gives the cases by name, bf16 first."""

    def attention(of: Attention) -> Callable[[Launcher, Place], Check]:
        def case(launcher: Launcher, place: Place) -> Check:
            step = AttentionStep(of, place.device)
            works = step.works(launcher, place)
            return works, lambda: _largest(step.out, step.reference()), TOLERANCE[of.dtype]

        return case

    def products(form: str, group: int, rows: tuple[int, ...]) -> Callable[[Launcher, Place], Check]:
        return lambda launcher, place: _products(form, group, rows, launcher, place)

    by_name = {name: attention(of) for name, of in ATTENTION.items()}
    by_name |= {name: products(*of) for name, of in PRODUCTS.items()}
    by_name |= {f"cache writes bf16 {kind}": _writes_of(kind) for kind in ("bf16", "int8", "fp8")}
    return dict(sorted(by_name.items(), key=lambda item: " bf16" not in item[0]))


def _products(form: str, group: int, rows: tuple[int, ...], launcher: Launcher, place: Place) -> Check:
    """Multiplies [M, 1088] with a weight [760, 1088] in groups of so many, for each M, in one piece and in parts."""
    columns, depth = 760, 1088  # tiles are cut off on each side
    weight, floats = _stored(form, columns, depth, group, place.device)
    scratch = torch.empty(split_scratch(depth, columns, form, group, "bf16"), device=place.device)
    works, checks = list[Work](), list[Callable[[], float]]()
    for m in rows:
        x = torch.randn(m, depth, device=place.device, dtype=torch.bfloat16)
        out, split = (torch.full((m, columns), float("nan"), device=place.device, dtype=x.dtype) for _ in range(2))
        calls = [product_call(x, weight, None, out, place.gpu)]
        calls += split_product_calls(x, weight, None, split, place.gpu, scratch)
        works += [bound(launcher, call) for call in calls]

        def check(x: Tensor = x, found: Sequence[Tensor] = (out, split)) -> float:
            want = x.float() @ floats().t()
            return max(_largest(one, want) for one in found) / float(want.abs().max())

        checks.append(check)
    return works, lambda: max(check() for check in checks), 2.0**-7  # of a result's rounding, and of a factor's


def _stored(form: str, rows: int, size: int, group: int, device: torch.device) -> tuple[Stored, Callable[[], Tensor]]:
    """A random weight as a program has it, and what gives the floats that it stands for."""
    scales = (torch.rand(rows, size // (group or size), device=device) * 0.02 + 0.001).half()
    offsets = (scales.float() * -7.3).half() if form == "uint4" else None
    if form == "fp8":
        values = torch.randn(rows, size, device=device).to(torch.float8_e4m3fn)
        return laid_by_group(Stored(values, form, scales, None, group)), lambda: REFERENCES["dequantize"](
            values, scales, group
        )
    bits = 8 if form == "int8" else 4
    most = 1 << (bits - 1)
    least = 0 if form == "uint4" else -most
    values = torch.randint(least, least + 2 * most, (rows, size), device=device, dtype=torch.int8)
    codes = values
    if bits == 4:
        half = (values & 15).view(torch.uint8)
        codes = half[:, 0::2] | (half[:, 1::2] << 4)
    weight = laid_by_group(Stored(codes, form, scales, offsets, group))
    return weight, lambda: REFERENCES["dequantize"](values, scales, group, offsets)


def _writes_of(kind: str) -> Callable[[Launcher, Place], Check]:
    def case(launcher: Launcher, place: Place) -> Check:
        """Keys and values of 40 tokens into scattered slots."""
        of, tokens = Attention((40,), (0,), cache=kind), 40
        k, v = (torch.randn(tokens, 8, 128, device=place.device, dtype=torch.bfloat16) for _ in range(2))
        slots = torch.randperm(4 * BLOCK_SIZE, device="cpu")[:tokens].int().to(place.device)
        (keys, key_scales), (values, value_scales) = (_cache(of, 4, place.device) for _ in range(2))
        caches = LayerCaches(keys, values, key_scales, value_scales)
        before = [x.clone() for x in (keys, values, key_scales, value_scales) if x is not None]
        works = [bound(launcher, kv_write_call(k, v, slots, caches))]

        def check() -> float:
            op = REFERENCES["kv_write"] if key_scales is None else REFERENCES["quantized_kv_write"]
            want = op(*before, k, v, slots)
            got = [x for x in (keys, values, key_scales, value_scales) if x is not None]
            # A product that falls between two codes may be rounded to the other one; floats and scales are exact.
            return max(_largest(g, w) for g, w in zip(got, want, strict=True))

        return works, check, {"bf16": 0.0, "int8": 1.0, "fp8": 32.0}[kind]

    return case


def _largest(got: Tensor, want: Tensor) -> float:
    """NaN where there is one: it is never within a tolerance."""
    return float((got.float() - want.float()).abs().max())


# ---- times

Run = Callable[[], object]

OUT_OF_L2 = 256 << 20
"""Bytes that are gone through before any is read again: an H200 has 60 MB of L2."""


def microseconds(place: Place, runs: Sequence[Run], budget: float = 0.15) -> float:
    """The median time of one of the runs, by the GPU: all are captured into one graph, so that the host takes no part.
    Runs that can't be captured are timed as they are launched."""
    for run in runs:
        run()
    torch.cuda.synchronize()

    def every() -> None:
        for run in runs:
            run()

    replay: Run = place.capture(every).replay
    replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    replay()
    torch.cuda.synchronize()
    repeats = max(5, min(200, int(budget / (time.perf_counter() - begin))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) * 1e3 for first, last in events) / len(runs)


NARROW = {"qkv": (6144, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
"""Weights [N, K] of a Llama of 8B."""
NARROW_FORMATS = {"bf16": 0, "int8": 32, "uint4": 64, "int4": 64, "fp8": 0}
"""Formats, and the group that recipes of the name have (of int4 without offsets, one like theirs)."""
NARROW_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 2048)


def narrow_figures() -> Iterator[tuple[Record, tuple[str, str, int]]]:
    """Products of so many rows with a weight of each format."""
    for form in NARROW_FORMATS:
        for weight in NARROW:
            for rows in NARROW_ROWS:
                yield {"weight": weight, "format": form, "rows": rows}, (weight, form, rows)


def narrow_works(
    launcher: Launcher, place: Place, weight: Stored, rows: int, columns: int, depth: int
) -> dict[str, Run]:
    """Ways to multiply random rows with a weight: by our kernel, with K in parts where that is done, or by torch."""
    x = torch.randn(rows, depth, device=place.device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=place.device, dtype=torch.bfloat16)
    if weight.format == "float":
        transposed = weight.values.t()
        return {"torch": lambda: torch.mm(x, transposed, out=out)}
    ways = {"ours": [product_call(x, weight, None, out, place.gpu)]}
    scratch = torch.empty(split_scratch(depth, columns, weight.format, weight.group, "bf16"), device=place.device)
    split = split_product_calls(x, weight, None, out, place.gpu, scratch)
    if len(split) > 1:
        ways["ours, split"] = split
    works = {name: _run_of(launcher, calls) for name, calls in ways.items()}
    if rows >= 64:
        whole = torch.empty(columns, depth, device=place.device, dtype=torch.bfloat16)
        unpack = _run_of(launcher, [unpack_call(weight, whole, place.gpu)])
        transposed = whole.t()

        def unpacked() -> None:
            unpack()
            torch.mm(x, transposed, out=out)

        works |= {"unpacked": unpacked, "unpacking alone": unpack}
    return works


def _run_of(launcher: Launcher, calls: Sequence[Call]) -> Run:
    works = [bound(launcher, call) for call in calls]

    def run() -> None:
        for work in works:
            work()

    return run


def narrow_described(launcher: Launcher, place: Place) -> None:
    """All of it that is compiled."""
    for _, (name, form, rows) in narrow_figures():
        columns, depth = NARROW[name]
        narrow_works(launcher, place, _narrow(form, columns, depth, place.device), rows, columns, depth)


def narrow(machine: Machine) -> Iterator[Figure]:
    """Times of products with narrow weights, several of them in turn so that L2 holds none."""
    place = machine.place("meta")
    launcher = machine.launcher("products", place)
    cache: dict[tuple[str, str], list[Stored]] = {}

    def measure(name: str, form: str, rows: int) -> Record:
        columns, depth = NARROW[name]
        weights = _weights_in_turn(cache, name, form, machine, place)
        of = weights[0]
        record: Record = {"bytes": of.values.nbytes + (0 if of.scales is None else of.scales.nbytes)}
        record |= {"flop": 2 * rows * columns * depth, "us": {}}
        runs = [narrow_works(launcher, place, weight, rows, columns, depth) for weight in weights]
        for way in runs[0]:
            if machine.gpu:
                record["us"][way] = round(microseconds(place, [of[way] for of in runs], 0.06), 2)
        return record

    for names, of in narrow_figures():
        yield {"figure": "product", **names}, lambda of=of: measure(*of)


_FEW = 16
TILED_ROWS = (1, _FEW, 32, 64, 128, 256)


def product_tiles(rows: int) -> Iterator[ProductTile]:
    """Tiles that products of so many rows may have."""
    if rows <= _FEW:
        shapes = ((32, 4), (32, 2), (64, 4), (64, 2), (128, 4), (128, 2))
        for (columns, warps), stages, programs in itertools.product(shapes, (2, 3, 4), (512, 1024)):
            yield ProductTile(_FEW, columns, 128, warps, stages, programs=programs)
        return
    shapes = ((64, 4), (128, 4), (128, 8))
    if rows > 64:
        for (columns, warps), depth, stages in itertools.product(((64, 8), *shapes), (64, 128), (2, 3)):
            for high, swap in itertools.product((64, 128), (False, True)):
                if depth * stages * (2 * high + columns) < 99 << 10:
                    yield ProductTile(high, columns, depth, warps, stages, swap, 256, rounded=True)
        return
    for (columns, warps), depth, programs in itertools.product(shapes, (64, 128), (256, 512)):
        for swap, rounded in itertools.product((False, True), (False, True)):
            yield ProductTile(rows, columns, depth, warps, 3, swap, programs, rounded)


def tiled_figures() -> Iterator[tuple[Record, tuple[str, str, int]]]:
    """Products of few rows, of which all tiles are timed."""
    for form in ("int8", "uint4", "fp8"):
        for weight in NARROW:
            for rows in TILED_ROWS:
                yield {"weight": weight, "format": form, "rows": rows}, (weight, form, rows)


def tiled_calls(weight: Stored, rows: int, columns: int, depth: int, place: Place) -> dict[ProductTile, list[Call]]:
    """The calls that multiply random rows with a weight, by tile; tiles that make the same calls are listed once."""
    x = torch.randn(rows, depth, device=place.device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=place.device, dtype=torch.bfloat16)
    scratch = torch.empty(64 * rows * columns, device=place.device)
    by_calls: dict[object, tuple[ProductTile, list[Call]]] = {}
    for tile in product_tiles(rows):
        calls = split_product_calls(x, weight, None, out, place.gpu, scratch, tile=tile)
        by_calls.setdefault(tuple((call.spec(place.gpu.capability), call.grid) for call in calls), (tile, calls))
    return dict(by_calls.values())


def tiled_described(launcher: Launcher, place: Place) -> None:
    """All of it that is compiled."""
    for _, (name, form, rows) in tiled_figures():
        columns, depth = NARROW[name]
        weight = _narrow(form, columns, depth, place.device)
        for calls in tiled_calls(weight, rows, columns, depth, place).values():
            _run_of(launcher, calls)


def tiled(machine: Machine) -> Iterator[Figure]:
    """Times of all tiles of products of few rows, fastest first."""
    place = machine.place("meta")
    launcher = machine.launcher("product-tiles", place)
    cache: dict[tuple[str, str], list[Stored]] = {}

    def measure(name: str, form: str, rows: int) -> Record:
        columns, depth = NARROW[name]
        weights = _weights_in_turn(cache, name, form, machine, place)
        times, refused = dict[ProductTile, float](), dict[ProductTile, str]()
        by_weight = [tiled_calls(weight, rows, columns, depth, place) for weight in weights]
        apart, want = dict[ProductTile, float](), None
        for tile, calls in by_weight[0].items():
            try:
                runs = [_run_of(launcher, of[tile]) for of in by_weight]
                if machine.gpu:
                    runs[0]()
                    out = calls[-1].arguments["out"]
                    assert isinstance(out, Tensor)
                    want = out.clone() if want is None else want
                    apart[tile] = _largest(out, want) / float(want.abs().max())
                    times[tile] = microseconds(place, runs, 0.03)
            except BundleError:
                raise
            except EnginewrightError as e:
                refused[tile] = e.message
        ordered = sorted(times, key=times.__getitem__)
        return {
            "times": [{**asdict(tile), "us": round(times[tile], 2), "apart": apart[tile]} for tile in ordered],
            "refused": [{**asdict(tile), "why": why} for tile, why in refused.items()],
        }

    for names, of in tiled_figures():
        yield {"figure": "product tiles", **names}, lambda of=of: measure(*of)


def _weights_in_turn(
    kept: dict[tuple[str, str], list[Stored]], name: str, form: str, machine: Machine, place: Place
) -> list[Stored]:
    """Makes as many weights as L2 doesn't hold, or takes those of the figure before from ``kept``."""
    columns, depth = NARROW[name]
    if (name, form) not in kept:
        kept.clear()
        first = _narrow(form, columns, depth, place.device)
        copies = -(-OUT_OF_L2 // first.values.nbytes) if machine.gpu else 1
        kept[name, form] = [first, *(_narrow(form, columns, depth, place.device) for _ in range(copies - 1))]
    return kept[name, form]


def _narrow(form: str, columns: int, depth: int, device: torch.device) -> Stored:
    if form == "bf16":
        return Stored(0.02 * torch.randn(columns, depth, device=device, dtype=torch.bfloat16))
    return _stored(form, columns, depth, NARROW_FORMATS[form], device)[0]


# ---- compiling what is carried


def note(
    folder: Path, gpu: GpuLimits, compiler: KernelCompiler, described: Callable[[Launcher, Place], object]
) -> list[CompiledKernel]:
    """Compiles what ``described`` launches, and writes kernels and tiles to the folder."""
    collector = SpecCollector(gpu.capability, compiler.compile, compiler.start)
    name = f"{gpu.capability // 10}.{gpu.capability % 10}"
    described(collector, Rehearsal(name, interpreted=False, device="meta"))
    kernels = [compiler.compile(spec) for spec in collector.found]
    write_kernels(folder, kernels)
    (folder / TILES_FILE.format(gpu.capability)).write_text(collector.tiles_json())
    return kernels


# ---- roofs


def roofs(machine: Machine) -> Iterator[Figure]:
    """Measures the GPU's peaks: bytes a second, products a second, launches, copies from and to the host."""
    place = machine.place()
    size = (1 << 30) if machine.gpu else (1 << 16)
    n = 8192 if machine.gpu else 64

    def copy() -> Record:
        a, b = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
        return {"GB/s": 2 * size / _seconds(machine, lambda: b.copy_(a)) / 1e9}

    def read() -> Record:
        words = torch.zeros(size, dtype=torch.uint8, device=machine.device).view(torch.int64)
        return {"GB/s": size / _seconds(machine, lambda: words.max()) / 1e9}

    def products(dtype: torch.dtype) -> Record:
        x, y, out = (torch.randn(n, n, device=machine.device).to(dtype) for _ in range(3))
        return {"TFLOP/s": 2 * n**3 / _seconds(machine, lambda: torch.mm(x, y, out=out)) / 1e12}

    small = torch.zeros(1, device=machine.device)

    def launches() -> Record:
        return {"us": _seconds(machine, lambda: small.add_(1)) * 1e6}

    def graph_launches() -> Record:
        def hundred() -> None:
            for _ in range(100):
                small.add_(1)

        replay = place.capture(hundred).replay if machine.gpu else hundred
        return {"us a kernel": _seconds(machine, replay) * 1e4}

    def copies(way: str, megabytes: float, pinned: bool) -> Record:
        count = int(megabytes * 1e6)
        host = torch.empty(count, dtype=torch.uint8, pin_memory=pinned and machine.gpu)
        there = torch.empty(count, dtype=torch.uint8, device=machine.device)
        to, source = (there, host) if way == "to" else (host, there)
        return {"us": _seconds(machine, lambda: to.copy_(source, non_blocking=True)) * 1e6}

    yield {"figure": "copy"}, copy
    yield {"figure": "read"}, read
    for dtype in (torch.bfloat16, torch.float16):
        yield {"figure": f"products {dtype}"}, lambda dtype=dtype: products(dtype)
    yield {"figure": "launch"}, launches
    yield {"figure": "launch in a graph"}, graph_launches
    for pinned in (True, False):
        for megabytes in (0.01, 1, 64):
            for way in ("to", "from"):
                label = {"figure": f"copy {way} the GPU", "pinned": pinned, "MB": megabytes}
                yield label, lambda w=way, m=megabytes, p=pinned: copies(w, m, p)


def _seconds(machine: Machine, run: Callable[[], object], repeats: int = 20) -> float:
    """The median time of repeated runs, some before them not counted."""
    for _ in range(3):
        run()
    if not machine.gpu:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events) / 1e3
