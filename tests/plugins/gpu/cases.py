"""Attention and cache writes by the Triton kernels and by the references; run where the kernels can run.

That is a GPU, or a process of its own that has TRITON_INTERPRET=1 (see conftest.py): Triton looks at it as it is
imported.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from enginewright.passes.ops.attention import paged_attention
from enginewright.passes.ops.cache import kv_write
from enginewright.passes.ops.quantized_cache import (
    LARGEST_CODE,
    quantize_heads,
    quantized_kv_write,
    quantized_paged_attention,
)
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.specs import AttentionShape, attention_scratch, splits_of
from enginewright.plugins.gpu.step_calls import (
    AttendedBatch,
    AttentionParts,
    AttentionRule,
    LayerCaches,
    attention_calls,
    kv_write_call,
    work_call,
    work_size,
)
from enginewright.plugins.gpu.tiles import GPUS, SPLIT_KEYS, GpuLimits, attention_tiles, gpu_of

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
CACHES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
INTERPRETED = GPUS[80]
"""The GPU whose tiles the interpreter has."""


def attend(
    q: Tensor,
    caches: LayerCaches,
    batch: AttendedBatch,
    rule: AttentionRule,
    parts: AttentionParts,
    out: Tensor | None = None,
) -> Tensor:
    """Launches the kernels of attention, as a step of decodes or of prompts does; returns ``out`` or a new tensor.

    ``parts`` may have bytes as scratch memory, which is allocated if there is none.
    """
    gpu, (tokens, heads, _), (requests, blocks) = _gpu(q), q.shape, batch.table.shape
    _, block_size, kv_heads, value_size = caches.values.shape
    split_keys, workers, decodes = parts.split_keys, parts.workers, tokens == requests
    if split_keys is None:
        split_keys = SPLIT_KEYS if decodes else 0
    needed = attention_scratch(tokens, heads, value_size, blocks, block_size, split_keys) if split_keys else 0
    scratch = torch.empty(4 * needed, dtype=torch.uint8, device=q.device) if parts.scratch is None else parts.scratch
    if workers is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        workers = max(1, 4 * processors // kv_heads)
    split = AttentionParts(scratch[: 4 * needed].view(torch.float32), split_keys, parts.work, workers)
    out = q.new_empty((tokens, heads, value_size)) if out is None else out
    launcher = JitLauncher(gpu.capability, interpreted=not q.is_cuda)
    for call in attention_calls(q, caches, replace(batch, decodes=decodes), rule, split, out, gpu, launcher.tile):
        launcher.bind(call)()
    return out


def decode_work(
    kv_len: Tensor,
    blocks: int,
    block_size: int,
    *,
    window: int = 0,
    split_keys: int = SPLIT_KEYS,
    out: Tensor | None = None,
) -> Tensor:
    """Launches the kernel that lists the parts of a decode step; returns ``out`` or a new tensor."""
    if out is None:
        size = work_size(len(kv_len), splits_of(blocks, block_size, split_keys))
        out = torch.empty(size, dtype=torch.int32, device=kv_len.device)
    JitLauncher().bind(work_call(kv_len, out, window, len(kv_len), split_keys))()
    return out


def write_heads(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, *scales: Tensor) -> None:
    """Launches the kernel that writes keys and values to ``slots`` of caches."""
    JitLauncher().bind(kv_write_call(k, v, slots, LayerCaches(k_cache, v_cache, *scales)))()


def _gpu(x: Tensor) -> GpuLimits:
    """Returns the limits of a tensor's GPU; for an unknown one, those of the next older one that is known."""
    if not x.is_cuda:
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(x.device)
    return gpu_of(max(capability for capability in GPUS if capability <= 10 * major + minor))


@dataclass(frozen=True)
class Case:
    """``new`` tokens of each request behind ``past`` ones; the rest as ``ew.paged_attention`` has it."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    heads: int = 9
    kv_heads: int = 3
    size: int = 64
    value_size: int = 0  # 0: as the keys'
    dtype: str = "f32"
    cache: str = ""  # as dtype
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    split_keys: int | None = None
    block_size: int = 32
    values_in_keys: bool = False


@dataclass
class Step:
    """The arguments of both, on one device; what no token wrote is NaN."""

    q: Tensor
    caches: tuple[Tensor, ...]
    table: Tensor
    q_start: Tensor
    kv_len: Tensor
    rest: tuple[object, ...]
    values_in_keys: bool = False

    @property
    def layer(self) -> LayerCaches:
        """The caches as kernels take them."""
        return LayerCaches(*self.caches, values_in_keys=self.values_in_keys)

    def reference(self) -> Tensor:
        op = paged_attention if len(self.caches) == 2 else quantized_paged_attention
        return op(self.q, *self.caches, self.table, self.q_start, self.kv_len, *self.rest)

    def triton(self, split_keys: int | None) -> Tensor:
        return self.attend(AttentionParts(split_keys=split_keys))

    def attend(self, parts: AttentionParts, kv_len: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        batch = AttendedBatch(self.table, self.q_start, self.kv_len if kv_len is None else kv_len)
        rule = AttentionRule(*self.rest)  # type: ignore[arg-type]
        return attend(self.q, self.layer, batch, rule, parts, out)


def step_of(case: Case, device: str = "cpu") -> Step:
    random = torch.Generator().manual_seed(sum(case.new) + sum(case.past) + case.heads)
    lengths = [n + p for n, p in zip(case.new, case.past, strict=True)]
    blocks = [-(-n // case.block_size) for n in lengths]
    pool = torch.randperm(sum(blocks) + 2, generator=random).int()
    table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    for b, n in enumerate(blocks):
        table[b, :n] = pool[sum(blocks[:b]) : sum(blocks[:b]) + n]
    written = torch.zeros(len(pool) * case.block_size, dtype=torch.bool)
    for b, n in enumerate(lengths):
        index = torch.arange(n)
        written[table[b, index // case.block_size] * case.block_size + index % case.block_size] = True
    caches, scales = [], []
    for size in (case.size, case.value_size or case.size):
        x = torch.randn(len(written), case.kv_heads, size, generator=random)
        x[~written] = float("nan")
        dtype = CACHES[case.cache or case.dtype]
        if dtype in LARGEST_CODE:
            x, s = quantize_heads(x, dtype)
            scales.append(s.view(len(pool), case.block_size, case.kv_heads).to(device))
        caches.append(x.to(dtype).view(len(pool), case.block_size, case.kv_heads, size).to(device))
    if case.values_in_keys:
        caches[1] = caches[0][..., : caches[1].shape[3]]
        scales[1:] = scales[:1]
    q_start = torch.tensor([0, *itertools.accumulate(case.new)], dtype=torch.int32)
    sinks = torch.randn(case.heads, generator=random).to(device) if case.sinks else None
    slopes = 0.3 * torch.rand(case.heads, generator=random).to(device) if case.slopes else None
    # A view of wider rows, as one linear for q, k and v leaves it.
    wide = torch.randn(sum(case.new), case.heads * case.size + 32, generator=random).to(DTYPES[case.dtype]).to(device)
    return Step(
        wide[:, : case.heads * case.size].unflatten(1, (case.heads, case.size)),
        (*caches, *scales),
        table.to(device),
        q_start.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        (case.size**-0.5, case.window, case.softcap, sinks, slopes),
        case.values_in_keys,
    )


def difference(case: Case, device: str = "cpu") -> float:
    """The largest between kernel and reference."""
    torch.set_num_threads(1)
    step = step_of(case, device)
    got, want = step.triton(case.split_keys), step.reference()
    assert got.dtype == want.dtype and got.shape == want.shape
    return (got.float() - want.float()).abs().max().item()


def preallocated(case: Case) -> bool:
    """Returns True if a result in memory that is given is bit for bit the same, and nothing behind it was written."""
    step = step_of(case)
    want = step.triton(case.split_keys)
    tokens, heads, size = step.q.shape
    blocks, split_keys = step.table.shape[1], case.split_keys or SPLIT_KEYS
    bytes_needed = 4 * attention_scratch(tokens, heads, size, blocks, case.block_size, split_keys)
    out = torch.full_like(want, float("nan"))
    guarded = torch.full((bytes_needed + 64,), 0xA5, dtype=torch.uint8)
    got = step.attend(AttentionParts(guarded[:bytes_needed], case.split_keys), out=out)
    inside = bool((guarded[bytes_needed:] == 0xA5).all()) and got.data_ptr() == out.data_ptr()
    return inside and torch.equal(out, want)


def listed(case: Case, workers: int | None, device: str = "cpu") -> tuple[bool, list[int], Tensor]:
    """Returns True if a step with a work list gives the same bits, unwritten memory being NaN; the list; its result."""
    step = step_of(case, device)
    want = step.triton(case.split_keys)
    blocks = step.table.shape[1]
    split_keys = case.split_keys or 512
    sizes = {"window": case.window, "split_keys": split_keys}
    work = decode_work(step.kv_len, blocks, case.block_size, **sizes)
    scratch = torch.full((1 << 23,), 0xFF, dtype=torch.uint8, device=device)  # NaN
    got = step.attend(AttentionParts(scratch, split_keys, work, workers))
    return torch.equal(got, want), work[: 1 + 2 * int(work[0])].tolist(), got


def listed_padding() -> list[int]:
    """The work list of four requests of which one is padding, whose result is seen to be 0 and to touch no other's."""
    step = step_of(Case(new=(1, 1, 1, 1), past=(40, 150, 0, 10), split_keys=64))
    want = step.triton(64)
    kv_len = step.kv_len.clone()
    kv_len[2] = 0
    work = decode_work(kv_len, step.table.shape[1], 32, split_keys=64)
    got = step.attend(AttentionParts(split_keys=64, work=work), kv_len)
    want[2] = 0
    assert torch.equal(got, want)
    return work[: 1 + 2 * int(work[0])].tolist()


def alone_and_together(case: Case, device: str = "cpu") -> bool:
    """Returns True if each request's result is bit for bit the same in the batch and by itself."""
    torch.set_num_threads(1)
    step = step_of(case, device)
    together = step.triton(case.split_keys)
    for b, (begin, end) in enumerate(itertools.pairwise(step.q_start.tolist())):
        blocks = -(-int(step.kv_len[b]) // case.block_size)
        alone = Step(
            step.q[begin:end],
            step.caches,
            step.table[b : b + 1, :blocks].contiguous(),
            torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            step.kv_len[b : b + 1],
            step.rest,
            step.values_in_keys,
        )
        if not torch.equal(alone.triton(case.split_keys), together[begin:end]):
            return False
    return True


def write(dtype: str, cache: str, tokens: int, heads: int, size: int, device: str = "cpu") -> list[Tensor]:
    """The caches (and scales) that the kernel writes, after those that the reference writes; float32, on the CPU."""
    torch.manual_seed(tokens)
    rows = torch.randn(tokens, heads * (2 * size - 8)).to(DTYPES[dtype]).to(device)
    k = rows[:, : heads * size].unflatten(1, (heads, size))
    v = rows[:, heads * size :].unflatten(1, (heads, size - 8))
    blocks, block_size = -(-tokens // 16) + 1, 16
    slots = torch.randperm(blocks * block_size)[:tokens].int().to(device)
    stored = CACHES[cache]
    shapes = (blocks, block_size, heads, size), (blocks, block_size, heads, size - 8)
    caches = [torch.zeros(shape, device=device).to(stored) for shape in shapes]
    scales = [torch.full(shapes[0][:3], -1.0, device=device) for _ in shapes] if stored in LARGEST_CODE else []
    op = quantized_kv_write if scales else kv_write
    want = op(*caches, *scales, k, v, slots)
    write_heads(*caches, k, v, slots, *scales)
    return [x.float().cpu() for x in (*want, *caches, *scales)]


def write_keys(dtype: str, cache: str, tokens: int, size: int, value_size: int) -> list[Tensor]:
    """Returns the keys (and scales) that the reference writes to a cache with values in keys, then the kernel's."""
    torch.manual_seed(tokens)
    k = torch.randn(tokens, 1, size).to(DTYPES[dtype])
    blocks, block_size, stored = -(-tokens // 16) + 1, 16, CACHES[cache]
    slots = torch.randperm(blocks * block_size)[:tokens].int()
    keys = torch.zeros(blocks, block_size, 1, size).to(stored)
    scales = torch.full(keys.shape[:3], -1.0) if stored in LARGEST_CODE else None
    values = keys[..., :value_size]
    if scales is None:
        want = [kv_write(keys, values, k, k[..., :value_size], slots, values_in_keys=True)[0]]
    else:
        written = quantized_kv_write(keys, values, scales, scales, k, k[..., :value_size], slots)
        want = [written[0], written[2]]
    JitLauncher().bind(kv_write_call(k, k, slots, LayerCaches(keys, values, scales, scales, values_in_keys=True)))()
    return [x.float() for x in (*want, keys, *([] if scales is None else [scales]))]


def codes(values: list[list[float]], cache: str) -> tuple[list[list[float]], list[float]]:
    """Codes and scales that the kernel makes of heads of ``values``, one head a token."""
    k = torch.tensor(values)[:, None, :]
    caches = [torch.zeros(1, len(values), 1, k.shape[2]).to(CACHES[cache]) for _ in range(2)]
    scales = [torch.zeros(1, len(values), 1) for _ in range(2)]
    write_heads(*caches, k, k, torch.arange(len(values), dtype=torch.int32), *scales)
    return caches[0].float()[0, :, 0].tolist(), scales[0].flatten().tolist()


def left_out(capacity_blocks: int) -> bool:
    """Returns True if tokens with slots outside the cache are left out, and the others aren't."""
    caches = [torch.zeros(capacity_blocks + 1, 16, 1, 16) for _ in range(2)]
    inside = [c[:capacity_blocks] for c in caches]  # what lies behind must not be written either
    k = torch.ones(4, 1, 16)
    last = capacity_blocks * 16 - 1
    write_heads(*inside, k, k, torch.tensor([-1, 0, last, last + 1], dtype=torch.int32))
    return all(c.flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist() == [0, last] for c in caches)


def difference_as_on(case: Case, capability: int) -> float:
    """The difference to the reference of the kernel that this GPU would have: its tile, and its way to read fp8."""
    with patch(f"{__name__}.INTERPRETED", GPUS[capability]):
        return difference(case)


def of_small_values(case: Case, factor: float) -> float:
    """The difference to the reference, over ``factor``, by which all values' scales are multiplied."""
    step = step_of(case)
    step.caches[3].mul_(factor)
    return (step.triton(case.split_keys).float() - step.reference().float()).abs().max().item() / factor


def clamped(case: Case, seed: int) -> tuple[bool, bool]:
    """Two flags: a kernel that clamps gives the same bits; and it ends on random integers, within its memory.

    What it reads must be the caches': beyond them are NaN. Tokens that no request has are left as they were.
    """
    step = step_of(case)
    k, v = step.caches
    pad = torch.full((4096, *k.shape[1:]), float("nan"), dtype=k.dtype)
    keys, values = (torch.cat([pad, x.nan_to_num(), pad])[4096 : 4096 + len(x)] for x in (k, v))
    caches = LayerCaches(keys, values)
    splits = case.split_keys or 0
    tile = next(attention_tiles(_shape(case).tile_case(decode=splits > 0), GPUS[80]))
    tokens, heads, _ = step.q.shape

    def run(table: Tensor, q_start: Tensor, kv_len: Tensor, clamp: bool) -> Tensor:
        out = torch.zeros((tokens, heads, values.shape[3]), dtype=step.q.dtype)
        needed = (
            attention_scratch(tokens, heads, values.shape[3], table.shape[1], case.block_size, splits) if splits else 0
        )
        calls = attention_calls(
            step.q,
            caches,
            AttendedBatch(table, q_start, kv_len, decodes=splits > 0),
            AttentionRule(*step.rest),  # type: ignore[arg-type]
            AttentionParts(torch.zeros(needed), splits),
            out,
            GPUS[80],
            lambda *of: tile,
        )
        for call in calls:
            if clamp and call.kernel == "paged_attention":
                sizes = {"pool": len(keys), "total": tokens}
                call = replace(call, arguments=call.arguments | sizes, constants={**call.constants, "CLAMP": True})
            JitLauncher().bind(call)()
        return out

    plain, same = (run(step.table, step.q_start, step.kv_len, clamp) for clamp in (False, True))
    random = torch.Generator().manual_seed(seed)

    def made_up(of: Tensor) -> Tensor:
        return torch.randint(-(2**31), 2**31, of.shape, generator=random).to(torch.int32)

    result = run(made_up(step.table), made_up(step.q_start), made_up(step.kv_len), clamp=True)
    result += run(made_up(step.table), step.q_start, made_up(step.kv_len), clamp=True)
    return torch.equal(plain, same), bool(result.isfinite().all())


def _shape(case: Case) -> AttentionShape:
    sizes = case.heads, case.kv_heads, case.size, case.value_size or case.size, case.block_size
    return AttentionShape(*sizes, case.dtype, case.cache or case.dtype, 1.0)  # type: ignore[arg-type]


def one_key_more(case: Case) -> float:
    """The difference to the reference of a kernel whose window is one key wider."""
    step = step_of(case)
    want = step.reference()
    step.rest = (step.rest[0], case.window + 1, *step.rest[2:])
    return (step.triton(case.split_keys) - want).abs().max().item()


def behind_the_window(case: Case) -> float:
    """The difference to the reference after what lies before every window has become NaN, in blocks that are gone."""
    step = step_of(case)
    want = step.reference()
    for b, past in enumerate(case.past):
        for position in range(max(0, past - case.window + 1)):
            block = int(step.table[b, position // case.block_size])
            for cache in step.caches[:2]:
                cache[block, position % case.block_size] = float("nan")
        step.table[b, : max(0, past - case.window + 1) // case.block_size] = 10**6
    return (step.triton(case.split_keys) - want).abs().max().item()
