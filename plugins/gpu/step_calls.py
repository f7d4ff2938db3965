"""Makes the calls of a step's kernels: constants, grid and arguments for operands, which are torch tensors.

A call is made once for operands of some sizes and launched many times: by Triton (on a GPU, or interpreted), or as code
that was compiled ahead for its ``spec``. If only specifications are needed, tensors may be on the device "meta".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.kv_formats import KV_FORMATS

from .call import Argument, Call, in_order
from .specs import (
    AttentionShape,
    Constant,
    aligned,
    attention_constants,
    combine_constants,
    splits_of,
    tiles_of_step,
    write_constants,
    write_format,
)
from .tiles import (
    PRODUCT_ROWS,
    SPLIT_KEYS,
    CacheFormat,
    FloatType,
    GpuLimits,
    ProductTile,
    Tile,
    part_of_product,
    power_of_2,
    product_tile,
    width_of,
)

TileOf = Callable[[AttentionShape, bool], Tile]
"""The tile of the attention kernel for a layer, and whether it decodes."""

_PIECE = 1024
"""Elements of a row that one program of ``gated_activation`` computes."""


@dataclass(frozen=True)
class Stored:
    """A weight [.., N, K] as a bundle stores it.

    Attributes:
        values: [.., N, K], or with two 4-bit values in a byte.
        format: "float", "int8", "fp8", "int4" or "uint4".
        scales, offsets: [.., N, G]; None if the format has none.
        group: the number of neighbours along K that share a scale; 0 for all of K.
        by_group: True if values are [.., G, N, group], and scales and offsets [.., G, N] (``laid_by_group``).
    """

    values: torch.Tensor
    format: str = "float"
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    group: int = 0
    by_group: bool = False

    @property
    def distance(self) -> int:
        """The number of rows from the first row of one group to that of the next; 0 if it isn't stored by group."""
        return self.values.stride(-3) // self.values.stride(-2) if self.by_group else 0

    def rows(self, first: int, count: int) -> Stored:
        """Returns ``count`` rows of a weight [N, K], from row ``first`` on."""
        dimension = 1 if self.by_group else 0
        arrays = (self.values, self.scales, self.offsets)
        values, scales, offsets = (None if x is None else x.narrow(dimension, first, count) for x in arrays)
        assert values is not None
        return replace(self, values=values, scales=scales, offsets=offsets)

    def read(self, gpu: GpuLimits) -> tuple[torch.Tensor, str]:
        """Returns the values and the format as a kernel reads them. 8-bit floats are passed as bytes if the GPU can't
        convert them.
        """
        if self.format == "fp8" and not gpu.fp8:
            return self.values.view(torch.uint8), "e4m3"
        return self.values, self.format


def laid_by_group(weight: Stored) -> Stored:
    """Returns the weight stored by group, which products read fastest, if its groups are whole and a multiple of 32;
    otherwise unchanged.
    """
    scales, group = weight.scales, weight.group
    if weight.by_group or scales is None or not group or group % 32:
        return weight
    width = group // 2 if weight.format in ("int4", "uint4") else group
    if scales.shape[-1] == 1 or weight.values.shape[-1] != scales.shape[-1] * width:
        return weight
    values = weight.values.unflatten(-1, (-1, width)).transpose(-3, -2).contiguous()
    scales, offsets = (None if x is None else x.transpose(-1, -2).contiguous() for x in (weight.scales, weight.offsets))
    return replace(weight, values=values, scales=scales, offsets=offsets, by_group=True)


def embedding_call(ids: torch.Tensor, table: Stored, size: int, out: torch.Tensor, gpu: GpuLimits) -> Call:
    """Returns the call that looks up ids [T] in the table [V, size] -> out [T, size]."""
    values, form = table.read(gpu)
    constants: dict[str, Constant] = {
        "ROWS": values.shape[-2],
        "SIZE": size,
        "OUT_STRIDE": out.stride(0),
        "FORMAT": form,
        "GROUP": table.group,
        "OFFSETS": table.offsets is not None,
        "WIDTH": power_of_2(size),
    }
    constants["BY_GROUP"] = table.distance
    arguments = {"ids": ids, "table": values, "scales": table.scales, "offsets": table.offsets, "out": out}
    return Call("embedding", arguments, constants, (len(ids), 1, 1))


def norm_call(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    *,
    layer: bool,
) -> Call:
    """Returns the call of a norm of x [.., C] + ``residual``: layer norm if ``layer``, otherwise RMS norm.

    The norm is written to ``out``, the sum to ``total``; None writes no sum.
    """
    size = x.shape[-1]
    constants: dict[str, Constant] = {"SIZE": size, "INNER": _inner(x)}
    for name, tensor in (("X", x), ("RESIDUAL", residual), ("OUT", out), ("TOTAL", total)):
        constants |= strides_of(name, tensor)
    constants |= {"EPS": eps, "LAYER": layer, "RESIDUAL": residual is not None}
    constants |= {"WEIGHT": weight is not None, "BIAS": bias is not None, "WIDTH": power_of_2(size)}
    arguments = {"x": x, "residual": residual, "weight": weight, "bias": bias, "out": out, "total": total}
    return Call("norm", arguments, constants, (math.prod(x.shape[:-1]), 1, 1), warps=8 if size > 4096 else 4)


def rope_call(x: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, interleaved: bool) -> Call:
    """Returns the call that rotates x [T, N, D] by the table [T, 2F] -> out."""
    tokens, heads, size = x.shape
    constants: dict[str, Constant] = {"HEADS": heads, "SIZE": size, **strides_of("X", x), **strides_of("OUT", out)}
    constants |= {"FREQUENCIES": table.shape[1] // 2, "INTERLEAVED": interleaved}
    constants |= {"HEAD_ROOM": power_of_2(heads), "WIDTH": power_of_2(size)}
    return Call("rope", {"x": x, "table": table, "out": out}, constants, (tokens, 1, 1))


@dataclass(frozen=True)
class LayerCaches:
    """A layer's caches of keys [P, K, Nkv, D] and values [P, K, Nkv, Dv], with scales [P, K, Nkv] if they have
    8 bits or 4, which are two to a byte. Scales have 16 bits if the integers are rotated.

    With ``values_in_keys``, ``values`` is a view of the first Dv channels of ``keys``, and the scales are the same.
    ``ends``: the second cache, of the ends of requests.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    values_in_keys: bool = False
    ends: LayerCaches | None = None

    @property
    def format(self) -> CacheFormat:
        """The format, by the name that kernels use."""
        if self.key_scales is not None and self.key_scales.dtype == torch.float16:
            return "k8v8" if self.keys.dtype == torch.int8 else "k4v4"
        return CACHE_FORMATS_OF[self.keys.dtype]

    def named(self, gpu: GpuLimits | None, suffix: str = "") -> dict[str, Argument]:
        """Returns the caches as a kernel's arguments, with ``suffix`` added to their names.

        ``gpu`` is the GPU that reads them; None for kernels that write, which get 8-bit floats as bytes.
        """
        caches = [self.keys, self.values]
        if self.format == "fp8" and not (gpu is not None and gpu.fp8):
            caches = [cache.view(torch.uint8) for cache in caches]
        names = ("k_cache", "v_cache", "k_scales", "v_scales")
        return dict(zip((name + suffix for name in names), (*caches, self.key_scales, self.value_scales), strict=True))


FLOATS_OF: Mapping[torch.dtype, FloatType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
CACHE_FORMATS_OF: Mapping[torch.dtype, CacheFormat] = {
    getattr(torch, DTYPES[dtype].torch): of.name for dtype, of in KV_FORMATS.items() if of.few_bits is None
}


def rope_kv_write_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    caches: LayerCaches,
    *,
    interleaved: bool,
) -> Call:
    """Returns the call that rotates q [T, Nq, D] -> out, and writes rotated k [T, Nkv, D], and v [T, Nkv, Dv], to
    ``slots``.
    """
    tokens, heads, size = q.shape
    _, cached, value_size = v.shape
    constants: dict[str, Constant] = {"HEADS": heads, "KV_HEADS": cached, "SIZE": size, "VALUE_SIZE": value_size}
    for name, tensor in (("Q", q), ("K", k), ("V", v), ("OUT", out)):
        constants |= strides_of(name, tensor)
    constants |= {"FREQUENCIES": table.shape[1] // 2, "INTERLEAVED": interleaved}
    constants |= {"FORMAT": write_format(caches.format), "HEAD_ROOM": power_of_2(heads)}
    constants |= {"KV_ROOM": power_of_2(cached), "WIDTH": power_of_2(size), "VALUE_WIDTH": power_of_2(value_size)}
    capacity = caches.keys.shape[0] * caches.keys.shape[1]
    arguments: dict[str, Argument] = {"q": q, "k": k, "v": v, "table": table, "slots": slots, "capacity": capacity}
    arguments |= {"out": out, **caches.named(None)}
    return Call("rope_kv_write", arguments, constants, (tokens, 3, 1))


def kv_write_call(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, caches: LayerCaches) -> Call:
    """Returns the call that writes k [T, Nkv, D] and v [T, Nkv, Dv] to ``slots`` [T] of the caches. Heads must be
    contiguous.

    v isn't read if values are the first channels of keys.
    """
    written = caches.named(None)
    if caches.values_in_keys:
        written |= {"v_cache": None, "v_scales": None}
    operands: dict[str, Argument] = {"k": k, "slots": slots, **written}
    operands |= {f"{name}_before": value for name, value in written.items()}
    operands |= {"capacity": caches.keys.shape[0] * caches.keys.shape[1], "k_stride": k.stride(0)}
    if not caches.values_in_keys:
        operands |= {"v": v, "v_stride": v.stride(0)}
    constants = write_constants(k.shape[1], k.shape[2], 0 if caches.values_in_keys else v.shape[2], caches.format)
    return Call("kv_write", in_order("kv_write", operands), constants, (len(k), 1, 1))


def work_size(requests: int, splits: int) -> int:
    """Returns the number of integers in the longest list that ``work_call`` writes."""
    return 1 + 2 * requests * splits


def work_call(
    kv_len: torch.Tensor,
    work: torch.Tensor,
    window: int,
    most_requests: int,
    split_keys: int = SPLIT_KEYS,
    q_start: torch.Tensor | None = None,
) -> Call:
    """Returns the call that lists the splits of attention in a decode step: kv_len [B] -> work int32 (see
    ``work_size``).

    With ``q_start`` [B + 1], only requests with exactly one token are listed.
    """
    requests = len(kv_len)
    constants: dict[str, Constant] = {"WINDOW": window, "SPLIT_KEYS": split_keys, "REQUESTS": power_of_2(most_requests)}
    arguments: dict[str, Argument] = {"kv_len": kv_len, "requests": requests, "work": work}
    if q_start is not None:
        arguments, constants = {**arguments, "q_start": q_start}, {**constants, "MIXED": True}
    return Call("decode_work", arguments, constants, (requests, 1, 1))


@dataclass(frozen=True)
class AttendedBatch:
    """The requests of a step, and the blocks of their keys.

    Attributes:
        table: the blocks of each request, [B, M].
        q_start: the first token of each request, then the number of tokens, [B + 1].
        kv_len: the number of keys of each request, [B].
        decodes: True if each request has one token.
        mixed: True if ``AttentionParts.work`` lists the requests with one token, and the others are prompts.
        ends_table: the blocks of ``LayerCaches.ends``, laid out as ``table``.
    """

    table: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor
    decodes: bool = False
    mixed: bool = False
    ends_table: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionRule:
    """The rules for scores, as in ``ew.paged_attention``; sinks and slopes are [Nq].

    ``exact``: True if a token's bits must not depend on the step. Then all steps have one tile, and splits of
    SPLIT_KEYS.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    exact: bool = False


@dataclass(frozen=True)
class AttentionParts:
    """The division of contexts into splits that are computed in parallel.

    Attributes:
        scratch: memory for the splits' results in steps with one token per request; ``attention_scratch`` has its size.
        split_keys: the keys of a split, a multiple of 64; 0 doesn't split; None takes the default.
        work: the list of ``work_call`` for the layer's window; None launches a program for each split in the table.
        workers: the number of programs per key/value head that process ``work``; None for as many as the GPU runs at a
            time.
    """

    scratch: torch.Tensor | None = None
    split_keys: int | None = None
    work: torch.Tensor | None = None
    workers: int | None = None


def attention_calls(
    q: torch.Tensor,
    caches: LayerCaches,
    batch: AttendedBatch,
    rule: AttentionRule,
    parts_of: AttentionParts,
    out: torch.Tensor,
    gpu: GpuLimits,
    tiles: TileOf,
) -> list[Call]:
    """Returns the calls that compute attention of q [T, Nq, D] over the caches -> out [T, Nq, Dv].

    ``tiles`` chooses the tile.
    """
    table, q_start, kv_len, decodes, mixed = batch.table, batch.q_start, batch.kv_len, batch.decodes, batch.mixed
    sinks, slopes, window = rule.sinks, rule.slopes, rule.window
    scratch, split_keys, work = parts_of.scratch, parts_of.split_keys, parts_of.work
    tokens, heads, _ = q.shape
    shape = AttentionShape.from_shapes(
        q.shape,
        caches.keys.shape,
        out.shape,
        dtype=FLOATS_OF[q.dtype],
        cache=caches.format,
        scale=rule.scale,
        window=window,
        softcap=rule.softcap,
        sinks=sinks is not None,
        slopes=slopes is not None,
        exact=rule.exact,
        values_in_keys=caches.values_in_keys,
    )
    block_size, value_size = shape.block_size, shape.value_size
    requests, blocks = table.shape
    if split_keys is None:
        split_keys = SPLIT_KEYS if decodes or mixed else 0
    splits = splits_of(blocks, block_size, split_keys) if split_keys else 1
    split_keys = split_keys if splits > 1 or mixed else 0
    operands: dict[str, Argument] = {
        "q": q,
        **caches.named(gpu),
        "block_table": table,
        "sinks": sinks,
        "slopes": slopes,
    }
    operands |= {
        "q_start": q_start,
        "kv_len": kv_len,
        "requests": requests,
        "blocks": table.stride(0),
        "q_stride": q.stride(0),
    }
    if caches.ends is not None:
        assert batch.ends_table is not None and batch.ends_table.stride(0) == table.stride(0)
        operands |= {**caches.ends.named(gpu, "_ends"), "ends_table": batch.ends_table}
    calls: list[Call] = []

    def tiled(tile: Tile, keys: int, parts: torch.Tensor, lse: torch.Tensor | None) -> Call:
        arguments = in_order("paged_attention", operands | {"out": parts, "lse": lse})
        constants = attention_constants(shape, gpu, tile, keys) | ({"SKIP_SINGLES": True} if mixed else {})
        grid = shape.grid(tiles_of_step(tokens, requests, tile.queries), splits if keys else 1, tile.rows)
        return Call("paged_attention", arguments, constants, grid, tile.warps, tile.stages)

    if not split_keys or mixed:
        calls.append(tiled(tiles(shape, decodes and not mixed and not rule.exact), 0, out, None))
    if not split_keys:
        return calls
    assert scratch is not None, "parts need memory"
    tile, members = tiles(shape, not rule.exact), requests if mixed else tokens
    count = members * heads * splits
    parts = scratch.narrow(0, 0, count * value_size).view(members, heads, splits, value_size)
    lse = scratch.narrow(0, aligned(count * value_size), 2 * count if rule.exact else count)
    listed: dict[str, Constant] = {}
    combined: dict[str, Argument] = {"parts": parts, "lse": lse, "splits": splits, "out": out}
    if work is None:
        assert not rule.exact, "parts without a list aren't merged in order"
        calls.append(tiled(tile, split_keys, parts, lse))
    else:
        where: dict[str, Argument] = {"kv_len": kv_len, "q_start": q_start if mixed else None}
        how: dict[str, Constant] = {"MIXED": True} if mixed else {}
        arguments = in_order("listed_attention", operands | combined | where | {"out": parts, "work": work})
        constants = attention_constants(shape, gpu, tile, split_keys) | how
        grid = shape.grid(min(parts_of.workers or 1, requests * splits), 1, tile.rows)
        calls.append(Call("listed_attention", arguments, constants, grid, tile.warps, tile.stages))
        listed = {"Q_HEADS": heads, "WINDOW": window, "SPLIT_KEYS": split_keys, **how}
        combined |= where
    if rule.exact:
        merging: dict[str, Constant] = {"VALUE_SIZE": value_size, "VALUE_WIDTH": width_of(value_size), **listed}
        merging |= {"SINKS": sinks is not None, "MIXED": mixed}
        merged = in_order("merge_parts", combined | {"sinks": sinks})
        return [*calls, Call("merge_parts", merged, merging, (members * heads, 1, 1))]
    all_constants = {**combine_constants(value_size), **listed}
    calls.append(Call("combine_splits", in_order("combine_splits", combined), all_constants, (members * heads, 1, 1)))
    return calls


def gated_activation_call(x: torch.Tensor, out: torch.Tensor, kind: str, up: torch.Tensor | None = None) -> Call:
    """Returns the call that computes x [.., 2I] -> out [.., I].

    With ``up``, x and ``up`` [.., I] are views of the two halves of the same rows.
    """
    size = out.shape[-1]
    width = min(power_of_2(size), _PIECE)
    constants: dict[str, Constant] = {"SIZE": size, "INNER": _inner(x), **strides_of("X", x), **strides_of("OUT", out)}
    constants |= {"KIND": kind, "WIDTH": width}
    between = size if up is None else int(up.storage_offset() - x.storage_offset())
    if between != size:
        constants["UP"] = between
    return Call("gated_activation", {"x": x, "out": out}, constants, (math.prod(x.shape[:-1]), -(-size // width), 1))


def activation_call(x: torch.Tensor, out: torch.Tensor, kind: str) -> Call:
    """Returns the call that computes kind(x) -> out. Both have the same shape, with 1 to 4 dimensions, and any
    strides.
    """
    constants: dict[str, Constant] = {"KIND": kind}
    lacking = [1] * (4 - out.dim())
    constants |= {f"SIZE_{i}": size for i, size in enumerate((*lacking, *out.shape[1:]), 1)}
    for name, tensor in (("X", x), ("OUT", out)):
        first, *rest = tensor.stride()
        constants |= {f"{name}_{i}": stride for i, stride in enumerate((first, *lacking, *rest))}
    constants["WIDTH"] = _PIECE
    count = math.prod(out.shape)
    return Call("activation", {"x": x, "out": out, "count": count}, constants, (-(-count // _PIECE), 1, 1))


def reduce_call(x: torch.Tensor, out: torch.Tensor, kind: str) -> Call:
    """Returns the call that computes x [.., C] -> out [.., 1]: each row's "sum", "mean" or "logsumexp"."""
    x, out = (of if of.dim() <= 3 else of.view(-1, *of.shape[-2:]) for of in (x, out))
    size = x.shape[-1]
    constants: dict[str, Constant] = {"SIZE": size, "INNER": _inner(x), **strides_of("X", x), **strides_of("OUT", out)}
    constants |= {"KIND": kind, "WIDTH": min(power_of_2(size), 4 * _PIECE)}
    return Call("reduce", {"x": x, "out": out}, constants, (math.prod(x.shape[:-1]), 1, 1))


def combine_experts_calls(
    y: torch.Tensor, order: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> list[Call]:
    """Returns the calls that add the results of each token's experts -> out [T, H], in the router's order.

    Row i of y [T * k, H] is the result of choice ``order[i]``. ``places`` int32 [T * k] is memory for the row of each
    choice. ``weights`` [T, k] has the weight of each choice.
    """
    size, k = out.shape[1], weights.shape[1]
    width, count = min(power_of_2(size), _PIECE), len(order)
    arguments: dict[str, Argument] = {"order": order, "places": places, "count": count}
    inverted = Call("invert_order", arguments, {"WIDTH": _PIECE}, (-(-count // _PIECE), 1, 1))
    constants: dict[str, Constant] = {"K": k, "SIZE": size, "Y_STRIDE": y.stride(0)}
    constants |= {"WEIGHTS_STRIDE": weights.stride(0), "OUT_STRIDE": out.stride(0), "WIDTH": width}
    combined: dict[str, Argument] = {"y": y, "places": places, "weights": weights, "out": out}
    return [inverted, Call("combine_experts", combined, constants, (len(out), -(-size // width), 1))]


def product_call(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gpu: GpuLimits,
    *,
    activation: str = "",
    starts: torch.Tensor | None = None,
    tile: ProductTile | None = None,
) -> Call:
    """Returns the call of activation(x [M, K] @ weight [N, K]^T + bias [N]) -> out [M, N].

    With ``starts`` [E + 1], rows are sorted by expert, and the weight is [E, N, K], the bias [E, N].
    """
    rows, depth = x.shape
    columns = out.shape[1]
    experts = 1 if starts is None else weight.values.shape[0]
    tile = product_tile(rows // experts, weight.format, FLOATS_OF[x.dtype]) if tile is None else tile
    turn = min(tile.depth, max(16, power_of_2(depth)))
    step = turn
    if weight.group and weight.group % step and weight.group % 16 == 0:
        step = math.gcd(weight.group, step)
    values, form = weight.read(gpu)
    constants: dict[str, Constant] = {"N": columns, "K": depth, "X_STRIDE": x.stride(0), "OUT_STRIDE": out.stride(0)}
    constants |= {"FORMAT": form, "GROUP": weight.group, "OFFSETS": weight.offsets is not None}
    constants |= {"BIAS": bias is not None, "GROUPED": starts is not None, "ACTIVATION": activation}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": step}
    constants |= {"STEPS": turn // step, "SWAP": tile.swap}
    constants |= {"ROUNDED": tile.rounded, "BY_GROUP": weight.distance}
    constants |= {"STAGES": tile.stages} if weight.by_group else {}
    constants |= {"CHAIN": tile.chain} if tile.chain and starts is None else {}
    arguments: dict[str, Argument] = {"x": x, "weight": values, "scales": weight.scales, "offsets": weight.offsets}
    arguments |= {"bias": bias, "starts": starts, "rows": rows, "experts": experts, "out": out}
    tiles = -(-rows // tile.rows) if starts is None else rows // tile.rows + experts
    return Call("product", arguments, constants, (tiles, -(-columns // tile.columns), 1), tile.warps, tile.stages)


def unpack_call(weight: Stored, out: torch.Tensor, gpu: GpuLimits) -> Call:
    """Returns the call that dequantizes a weight [N, K] -> out [N, K], rounded to out's type."""
    values, form = weight.read(gpu)
    rows, depth = out.shape
    width = min(power_of_2(depth), 256)
    constants: dict[str, Constant] = {"N": rows, "K": depth, "FORMAT": form, "GROUP": weight.group}
    constants |= {"OFFSETS": weight.offsets is not None, "ROWS": 16, "WIDTH": width}
    constants["BY_GROUP"] = weight.distance
    arguments = {"weight": values, "scales": weight.scales, "offsets": weight.offsets, "out": out}
    return Call("unpack", arguments, constants, (-(-rows // 16), -(-depth // width), 1))


def split_scratch(
    depth: int, columns: int, form: str, group: int, dtype: FloatType, tile: ProductTile | None = None
) -> int:
    """Returns the most floats of scratch memory that ``split_product_calls`` needs.

    Args:
        depth, columns: K and N.
        form: the format of the weight.
        group: the group size.
        dtype: the type of x.
        tile: the tile; None chooses it.
    """
    needed = 0
    for rows in PRODUCT_ROWS:
        if part := part_of_product(rows, depth, columns, form, group, dtype, tile):
            needed = max(needed, -(-depth // part) * rows * columns)
    return needed


def split_product_calls(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gpu: GpuLimits,
    scratch: torch.Tensor,
    *,
    activation: str = "",
    tile: ProductTile | None = None,
) -> list[Call]:
    """Returns the calls of a product. K is divided into parts if few rows would leave multiprocessors idle.

    The parts are added in order. As their number depends on the number of rows, so do the last bits of a result, unless
    ``tile`` has a chain. ``scratch`` is float32, with ``split_scratch`` elements. Other arguments are those of
    ``product_call``.
    """
    (rows, depth), columns = x.shape, out.shape[1]
    part = part_of_product(rows, depth, columns, weight.format, weight.group, FLOATS_OF[x.dtype], tile)
    if not part:
        return [product_call(x, weight, bias, out, gpu, activation=activation, tile=tile)]
    parts = -(-depth // part)
    sums = scratch.narrow(0, 0, parts * rows * columns).view(parts * rows, columns)
    whole = product_call(x, weight, None, out, gpu, tile=tile)
    step, steps = whole.constants["DEPTH"], whole.constants["STEPS"]
    assert isinstance(step, int) and isinstance(steps, int) and part % (step * steps) == 0
    first = replace(
        whole,
        arguments={**whole.arguments, "out": sums},
        constants={**whole.constants, "OUT_STRIDE": columns, "PART": part},
        grid=(whole.grid[0], whole.grid[1], parts),
    )
    width = min(power_of_2(columns), _PIECE)
    constants: dict[str, Constant] = {"N": columns, "OUT_STRIDE": out.stride(0), "BIAS": bias is not None}
    constants |= {"ACTIVATION": activation, "WIDTH": width}
    arguments: dict[str, Argument] = {"sums": sums, "bias": bias, "rows": rows, "parts": parts, "out": out}
    return [first, Call("sum_parts", arguments, constants, (rows, -(-columns // width), 1))]


def _inner(x: torch.Tensor) -> int:
    """Returns the size of the last dimension but one; 1 if there are only two."""
    return x.shape[-2] if x.dim() > 2 else 1


def strides_of(name: str, x: torch.Tensor | None) -> dict[str, Constant]:
    """Returns the constants for the strides of the dimensions before the last, outer and inner. With two dimensions the
    inner is 0.

    ``name`` is the operand's name, with which the constants' names begin.
    """
    if x is None:
        return {f"{name}_OUTER": 0, f"{name}_STRIDE": 0}
    return {f"{name}_OUTER": x.stride(0), f"{name}_STRIDE": x.stride(1) if x.dim() > 2 else 0}
