"""Specs of the kernels that only the cuda target launches, for a Llama of 8 billion weights and for hybrids' layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from enginewright.plugins.gpu import recurrence_calls as recurrences
from enginewright.plugins.gpu import step_calls as calls
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.choose_tiles import choose_tile
from enginewright.plugins.gpu.recurrence_calls import StoredStates
from enginewright.plugins.gpu.sampling_calls import Drawing, SamplingMemory, sampling_calls
from enginewright.plugins.gpu.specs import AttentionShape, KernelSpec, attention_scratch
from enginewright.plugins.gpu.step_calls import LayerCaches, Stored
from enginewright.plugins.gpu.tiles import GpuLimits, Tile, exact_tile, gpu_of
from enginewright.runtime.shared.contracts import SAMPLING_LISTS, SAMPLING_OPTIONS

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, VOCAB, EXPERTS = 4096, 14336, 32, 8, 128, 128256, 8
ROWS = 32


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> torch.Tensor:
    return _new(*shape, dtype=torch.int32)


def _floats(*shape: int) -> torch.Tensor:
    return _new(*shape, dtype=torch.float32)


def _stored(form: str, *lead: int, size: int) -> Stored:
    """A weight [.., size] as a program has it, in the groups of the recipes: of 32, of 64, or all of fp8's."""
    if form == "float":
        return Stored(_new(*lead, size))
    group = {"int8": 32, "int4": 64, "uint4": 64, "fp8": 0}[form]
    scales = _new(*lead, size // (group or size), dtype=torch.float16)
    stored = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(form, torch.uint8)
    values = _new(*lead, size // 2 if form in ("int4", "uint4") else size, dtype=stored)
    return calls.laid_by_group(Stored(values, form, scales, scales if form == "uint4" else None, group))


def _embedding(form: str, gpu: GpuLimits) -> Call:
    return calls.embedding_call(_integers(ROWS), _stored(form, VOCAB, size=HIDDEN), HIDDEN, _new(ROWS, HIDDEN), gpu)


def _norm(layer: bool, gpu: GpuLimits) -> Call:
    x, bias = _new(ROWS, HIDDEN), _floats(HIDDEN) if layer else None
    added = None if layer else x
    return calls.norm_call(x, added, _floats(HIDDEN), bias, x, added, 1e-5, layer=layer)


def _rope(gpu: GpuLimits) -> Call:
    x = _new(ROWS, HEADS, SIZE)
    return calls.rope_call(x, _floats(ROWS, SIZE), x, interleaved=False)


def _rope_kv_write(cache: torch.dtype, gpu: GpuLimits) -> Call:
    blocks = _new(64, 32, KV_HEADS, SIZE, dtype=cache)
    scales = _floats(64, 32, KV_HEADS) if cache.itemsize == 1 else None
    q, k = _new(ROWS, HEADS, SIZE), _new(ROWS, KV_HEADS, SIZE)
    caches = LayerCaches(blocks, blocks, scales, scales)
    return calls.rope_kv_write_call(q, k, k, _floats(ROWS, SIZE), _integers(ROWS), q, caches, interleaved=False)


def _listed(cache: torch.dtype, gpu: GpuLimits) -> Call:
    """Attention by a work list, of requests with room for 64 blocks each."""

    def tile(shape: AttentionShape, decode: bool) -> Tile:
        return choose_tile(shape, gpu.capability, decode=decode)

    q, table, lengths = _new(ROWS, HEADS, SIZE), _integers(ROWS, 64), _integers(ROWS)
    pool = _new(64, 32, KV_HEADS, SIZE, dtype=cache)
    scales = _floats(64, 32, KV_HEADS) if cache.itemsize == 1 else None
    scratch = _floats(attention_scratch(ROWS, HEADS, SIZE, 64, 32))
    listed, _combined = calls.attention_calls(
        q,
        LayerCaches(pool, pool, scales, scales),
        calls.AttendedBatch(table, lengths, lengths, decodes=True),
        calls.AttentionRule(SIZE**-0.5),
        calls.AttentionParts(scratch, work=_integers(1)),
        q,
        gpu,
        tile,
    )
    return listed


def _exact(which: int, gpu: GpuLimits) -> Call:
    """A kernel of a mixed step's exact attention: of its prompts, of its decodes, and what merges their parts."""

    def tile(shape: AttentionShape, decode: bool) -> Tile:
        assert not decode
        return choose_tile(shape, gpu.capability, decode=False)

    q, table, lengths = _new(ROWS, HEADS, SIZE), _integers(ROWS, 64), _integers(ROWS)
    pool = _new(64, 32, KV_HEADS, SIZE)
    return calls.attention_calls(
        q,
        LayerCaches(pool, pool),
        calls.AttendedBatch(table, lengths, lengths, mixed=True),
        calls.AttentionRule(SIZE**-0.5, exact=True),
        calls.AttentionParts(_floats(attention_scratch(ROWS, HEADS, SIZE, 64, 32)), work=_integers(1)),
        q,
        gpu,
        tile,
    )[which]


def _exact_product(form: str, rows: int, gpu: GpuLimits) -> Call:
    weight, x, out = _stored(form, HIDDEN, size=INNER), _new(rows, INNER), _new(rows, HIDDEN)
    tile = exact_tile(INNER, form, weight.group, "bf16")
    scratch = _floats(calls.split_scratch(INNER, HIDDEN, form, weight.group, "bf16", tile))
    return calls.split_product_calls(x, weight, None, out, gpu, scratch, tile=tile)[0]


def _row_sums(gpu: GpuLimits) -> Call:
    return calls.reduce_call(_floats(ROWS, 128), _floats(ROWS, 1), "sum")


def _combined_experts(which: int, gpu: GpuLimits) -> Call:
    y, integers = _new(2 * ROWS, HIDDEN), _integers(2 * ROWS)
    return calls.combine_experts_calls(y, integers, integers, _floats(ROWS, 2), _new(ROWS, HIDDEN))[which]


def _work(gpu: GpuLimits) -> Call:
    return calls.work_call(_integers(ROWS), _integers(1), 4096, 256)


def _activation(gpu: GpuLimits) -> Call:
    return calls.gated_activation_call(_new(ROWS, 2 * INNER), _new(ROWS, INNER), "silu")


def _sigmoid(gpu: GpuLimits) -> Call:
    return calls.activation_call(_new(ROWS, HEADS), _new(ROWS, HEADS), "sigmoid")


def _product(form: str, rows: int, gpu: GpuLimits) -> Call:
    weight = _stored(form, HIDDEN, size=INNER)
    return calls.product_call(_new(rows, INNER), weight, None, _new(rows, HIDDEN), gpu)


def _unpack(form: str, gpu: GpuLimits) -> Call:
    return calls.unpack_call(_stored(form, HIDDEN, size=INNER), _new(HIDDEN, INNER), gpu)


def _experts(form: str, rows: int, gpu: GpuLimits) -> Call:
    weight, starts = _stored(form, EXPERTS, HIDDEN, size=INNER), _integers(EXPERTS + 1)
    return calls.product_call(_new(rows, INNER), weight, None, _new(rows, HIDDEN), gpu, starts=starts)


def _states(size: int) -> StoredStates:
    table, tokens = _integers(ROWS, 64), _integers(ROWS)
    return StoredStates(_floats(64, size), table, _integers(ROWS + 1), tokens, tokens, 0)


def _convolution(gpu: GpuLimits) -> Call:
    """Makes the call of a layer of Qwen3.5-9B."""
    x = _new(ROWS, 8192)
    return recurrences.convolution_call(x, _floats(8192, 4), None, _states(3 * 8192), x, "silu")


def _scan(heads: int, channels: int, groups: int, size: int, gpu: GpuLimits) -> Call:
    x, b = _new(ROWS, heads, channels), _new(ROWS, groups, size)
    rates = _floats(heads, size) if channels == 1 else _floats(heads)
    states = _states(heads * channels * size)
    return recurrences.scan_call(x, _floats(ROWS, heads), rates, b, b, states, x)


def _delta_rule(of_rows: bool, gpu: GpuLimits) -> Call:
    """Makes the call of a layer of Qwen3.5-9B, or of Kimi Linear ``of_rows``."""
    heads, size = 32, 128
    q, v = _new(ROWS, heads if of_rows else 16, size), _new(ROWS, heads, size)
    decay = _floats(ROWS, heads, size) if of_rows else _floats(ROWS, heads)
    states = _states(heads * size * size)
    return recurrences.delta_rule_call((q, q, v, decay, _floats(ROWS, heads)), states, v, size**-0.5, normalize=True)


def _sampling(kernel: str, cuts: bool, gpu: GpuLimits) -> Call:
    """The last of its calls, by weight where there are several; with ``cuts`` all of what a row may ask for."""
    options = {name: _floats(ROWS) for name in SAMPLING_OPTIONS} | {"top_k": _integers(ROWS)}
    options |= {name: _integers(ROWS + 1) for name in SAMPLING_LISTS} | {"lists": _integers(256)}
    options |= {name: _new(ROWS, dtype=torch.int64) for name in ("seed", "counter")}
    drawing = Drawing(True, True, True, True, True) if cuts else Drawing(random=True)
    if kernel in ("edit", "spread", "nearest"):
        drawing = replace(drawing, edits=True, typical=True)
    memory = SamplingMemory(ROWS, VOCAB, lambda shape, of: _new(*shape, dtype=getattr(torch, of)))
    every = sampling_calls(_new(ROWS, VOCAB), options, memory, drawing)
    return [call for call in every if call.kernel == kernel][-1]


_CALLS: dict[str, Callable[[GpuLimits], Call]] = {
    "embedding bf16": partial(_embedding, "float"),
    "embedding int4": partial(_embedding, "int4"),
    "norm": partial(_norm, False),
    "layer norm": partial(_norm, True),
    "rope": _rope,
    "rope, write bf16": partial(_rope_kv_write, torch.bfloat16),
    "rope, write int8": partial(_rope_kv_write, torch.int8),
    "rope, write fp8": partial(_rope_kv_write, torch.float8_e4m3fn),
    "decode 128, listed": partial(_listed, torch.bfloat16),
    "decode 128 fp8, listed": partial(_listed, torch.float8_e4m3fn),
    "work list": _work,
    **{f"exact {of}": partial(_exact, i) for i, of in enumerate(("prefill 128", "decode 128, listed", "merge"))},
    **{f"exact {form}, 1 row": partial(_exact_product, form, 1) for form in ("int8", "uint4", "fp8")},
    **{f"exact {form}, 128 rows": partial(_exact_product, form, 128) for form in ("float", "int8", "uint4", "fp8")},
    "row sums": _row_sums,
    **{of: partial(_combined_experts, i) for i, of in enumerate(("invert order", "combine experts"))},
    "gated silu": _activation,
    "sigmoid": _sigmoid,
    **{f"product {form}, 16 rows": partial(_product, form, 16) for form in ("int8", "int4", "uint4", "fp8")},
    **{f"product {form}, 32 rows": partial(_product, form, 32) for form in ("int8", "int4", "uint4", "fp8")},
    **{f"product {form}, 64 rows": partial(_product, form, 64) for form in ("int8", "int4", "uint4", "fp8")},
    **{f"unpack {form}": partial(_unpack, form) for form in ("int8", "int4", "uint4", "fp8")},
    "experts bf16, 16 rows": partial(_experts, "float", 16),
    "experts int8, 512 rows": partial(_experts, "int8", 512),
    "experts int8, 4,096 rows": partial(_experts, "int8", 4096),
    "experts uint4, 4,096 rows": partial(_experts, "uint4", 4096),
    "convolution, 4 taps": _convolution,
    "scan, Mamba": partial(_scan, 8192, 1, 1, 16),
    "scan, Mamba-2": partial(_scan, 128, 64, 8, 128),
    "delta rule 128": partial(_delta_rule, False),
    "KDA 128": partial(_delta_rule, True),
    **{f"{name}": partial(_sampling, name, True) for name in ("widen", "penalize", "largest", "choose_largest")},
    **{f"{name}, cuts": partial(_sampling, name, True) for name in ("sums", "narrow", "cut", "draw")},
    "draw": partial(_sampling, "draw", False),
    **{name: partial(_sampling, name, True) for name in ("edit", "spread", "nearest")},
}

NAMES = tuple(_CALLS)
PRODUCTS = tuple(name for name in NAMES if name.startswith(("product", "experts", "unpack")))


def spec_of(name: str, capability: int) -> KernelSpec:
    return _CALLS[name](gpu_of(capability)).spec(capability)


def every(capabilities: tuple[int, ...]) -> Iterator[tuple[str, int, KernelSpec]]:
    """(name, capability, spec) of all."""
    for name in NAMES:
        for capability in capabilities:
            yield name, capability, spec_of(name, capability)
