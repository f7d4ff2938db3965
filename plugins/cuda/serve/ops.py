"""The ops of the cuda target. An op's handler returns the functions that run a step on its input and output tensors.

Products with float weights use libraries (cuBLASLt through torch). Embeddings, norms, rotations, attention, recurrences
and products with quantized weights use Triton kernels; other ops use torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.dtypes import stored_bytes
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Affine, Operand, Step
from enginewright.runtime.shared.step_schema import Q_START

from ...gpu.call import Call
from ...gpu.recurrence_calls import StoredStates, convolution_call, delta_rule_call, scan_call
from ...gpu.specs import AttentionShape, splits_of
from ...gpu.step_calls import (
    FLOATS_OF,
    AttendedBatch,
    AttentionParts,
    AttentionRule,
    LayerCaches,
    Stored,
    activation_call,
    attention_calls,
    combine_experts_calls,
    embedding_call,
    gated_activation_call,
    kv_write_call,
    norm_call,
    product_call,
    reduce_call,
    rope_call,
    rope_kv_write_call,
    split_product_calls,
    unpack_call,
)
from ...gpu.tiles import FORMS, UNPACKED_ROWS, GpuLimits, ProductTile, Tile, exact_tile
from .exchange import Exchange

Work = Callable[[], object]


class Launcher(Protocol):
    """A launcher of Triton kernels."""

    def bind(self, call: Call) -> Work:
        """Returns a function that launches the call on the current stream, any number of times."""

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """Returns the tile for an attention layer. ``decode``: True for decode steps."""

    def resident(self, call: Call) -> int:
        """Returns the number of programs of the call's kernel that a multiprocessor runs at a time."""


@dataclass(frozen=True)
class Cache:
    """A layer's caches of keys and values, which are an input of a step."""

    group: CacheGroup
    of: LayerCaches


@dataclass(frozen=True)
class States:
    """A recurrent layer's states, float32 [P, F], which are an input of a step."""

    group: CacheGroup
    of: Tensor


Room = Literal["sent", "received", "queries", "keys", "values", "results", "unpacked", "kept", "places"]
"""The kinds of temporary memory of ops: messages that a rank sends and receives, attention's operands in the layout
that kernels need, dequantized weights, inputs of steps by row that run several times, and rows of experts' results.
"""


class Binder(Protocol):
    """The data and memory of a program that the handlers of ops use to make the functions that run its steps."""

    gpu: GpuLimits
    exact: bool
    """True if a token's bits must not depend on the step that computes it."""

    def work(self, cache: Cache, table: Tensor, kv_len: Tensor, window: int, works: list[Work]) -> Tensor | None:
        """Returns the list of attention's splits, which all layers with the same window share; None if the step has no
        list.

        For the first layer, the launch that writes the list is appended to ``works``.
        """

    @property
    def tokens(self) -> int:
        """The number of the step's tokens, with padding."""

    @property
    def decodes(self) -> bool:
        """True if each request of the step has one token."""

    @property
    def mixed(self) -> bool:
        """True if only some requests of the step have one token; these are decoded."""

    def scratch(self) -> Tensor:
        """Returns float32 scratch memory for the results of attention's splits, or for the parts of a product."""

    def room(self, name: Room, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory of the kind ``name`` at a fixed address, which one op uses at a time."""

    @property
    def exchange(self) -> Exchange:
        """The collectives between ranks. Raises BundleError if there is only one rank."""

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """Returns the tile of the attention kernel for a layer. ``decode``: True for decode steps."""

    def launch(self, call: Call) -> Work:
        """Returns a function that launches the call; a function that does nothing if the grid is empty."""

    def resident(self, call: Call) -> int:
        """Returns the number of programs of the call's kernel that the whole GPU runs at a time."""

    def stored(self, step: Step, inputs: Sequence[Any]) -> tuple[Stored, list[Any]]:
        """Returns the weight of an op in ``STORED``, and the inputs after the weight, its scales and offsets."""

    def bias_like(self, bias: Tensor, out: Tensor) -> Tensor:
        """Returns a bias [N] in the type of ``out``; the conversion is cached."""


STORED: Mapping[str, tuple[int, str]] = {
    "embedding": (1, "group_size"),
    "linear": (1, "weight_group"),
    "grouped_linear": (2, "weight_group"),
}
"""Ops that read weights as they are stored -> (index of the input that is the weight, attribute with the group
size).
"""


def _embedding(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    table, _ = p.stored(step, x)
    return [p.launch(embedding_call(x[0], table, out[0].shape[1], out[0], p.gpu))]


def _linear(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    weight, rest = p.stored(step, x)
    activation = str(step.attrs.get("activation", ""))
    a, result = x[0], out[0]
    if step.attrs.get("has_residual"):
        raise BundleError(f"{step.where}: a linear with a residual isn't the cuda target's", hint="Export again.")
    if p.exact or weight.format != "float" or activation or weight.values.dtype != result.dtype:
        bias = rest[0] if rest else None
        if not p.exact and _unpacks(step, len(a)):
            return _unpacked_product(p, a, weight, bias, result)
        tile = _tile_of(p, a, weight)
        calls = split_product_calls(a, weight, bias, result, p.gpu, p.scratch(), activation=activation, tile=tile)
        return [p.launch(call) for call in calls]
    transposed = weight.values.t()
    if rest:
        bias = p.bias_like(rest[0], result)
        return [lambda: torch.addmm(bias, a, transposed, out=result)]
    return [lambda: torch.mm(a, transposed, out=result)]


def _tile_of(p: Binder, x: Tensor, weight: Stored) -> ProductTile | None:
    """Returns the tile of an exact product; None for a product that isn't exact, whose tile is the fastest for x's
    rows.
    """
    return exact_tile(x.shape[1], weight.format, weight.group, FLOATS_OF[x.dtype]) if p.exact else None


def _unpacks(step: Step, rows: int) -> bool:
    """Returns True if a product with this number of rows first dequantizes its weight."""
    x, weight = step.inputs[:2]
    same = x.dtype == step.outputs[0].dtype != "f32"  # a library multiplies equal types
    return same and rows >= UNPACKED_ROWS and weight.dtype in FORMS and not step.attrs.get("activation")


def unpacked_bytes(step: Step, tokens: int) -> dict[Room, int]:
    """Returns the bytes of ``Binder.room`` for the dequantized weight of a ``linear``, in a step of ``tokens``
    tokens.
    """
    if not _unpacks(step, tokens):
        return {}
    columns, depth = step.outputs[0].shape[1].constant, step.inputs[0].shape[1].constant
    return {"unpacked": _columns_at_once(columns, depth) * depth * 2}


def _columns_at_once(columns: int, depth: int) -> int:
    """Returns the number of output columns whose weights are dequantized at a time.

    The columns are divided into nearly equal parts of a multiple of 256; ``depth`` is K.
    """
    parts = -(-columns * depth * 2 // _MOST_UNPACKED)
    return min(columns, -(-columns // (parts * 256)) * 256)


def _unpacked_product(p: Binder, x: Tensor, weight: Stored, bias: Tensor | None, out: Tensor) -> list[Work]:
    """Returns the work of a product by the library, for which some rows of the weight at a time are dequantized."""
    depth, works = x.shape[1], list[Work]()
    step = _columns_at_once(out.shape[1], depth)
    added = None if bias is None else p.bias_like(bias, out)
    for first in range(0, out.shape[1], step):
        count = min(step, out.shape[1] - first)
        floats = p.room("unpacked", (count, depth), out.dtype)
        works.append(p.launch(unpack_call(weight.rows(first, count), floats, p.gpu)))
        if added is None:
            works.append(partial(torch.mm, x, floats.t(), out=out.narrow(1, first, count)))
        else:
            piece = out.narrow(1, first, count)
            works.append(partial(torch.addmm, added.narrow(0, first, count), x, floats.t(), out=piece))
    return works


_MOST_UNPACKED = 128 << 20
"""The most bytes of floats of a weight that are dequantized at a time. With fewer columns few multiprocessors would be
busy.
"""


def _grouped_linear(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    weight, rest = p.stored(step, x)
    activation, bias = str(step.attrs.get("activation", "")), rest[0] if rest else None
    how: dict[str, Any] = {"activation": activation, "starts": x[1], "tile": _tile_of(p, x[0], weight)}
    return [p.launch(product_call(x[0], weight, bias, out[0], p.gpu, **how))]


def _norm(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    layer, rest = "layer" in step.op, list(x[1:])
    residual = rest.pop(0) if step.op.startswith("add_") else None
    weight = rest.pop(0) if step.attrs.get("has_weight") else None
    bias = rest.pop(0) if step.attrs.get("has_bias") else None
    total = out[1] if residual is not None else None
    return [p.launch(norm_call(x[0], residual, weight, bias, out[0], total, float(step.attrs["eps"]), layer=layer))]


def _rope_table(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    positions, frequencies, table = x[0], x[1], out[0]
    half, scale = frequencies.shape[0], float(step.attrs["scale"])
    cos, sin = table.narrow(1, 0, half), table.narrow(1, half, half)

    def run() -> None:
        angles = positions.unsqueeze(1).float() * frequencies
        torch.cos(angles, out=cos)
        torch.sin(angles, out=sin)
        if scale != 1.0:
            table.mul_(scale)

    return [run]


def _rope(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [p.launch(rope_call(x[0], x[1], out[0], interleaved=bool(step.attrs["interleaved"])))]


def _rope_kv_write(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    q, k, v, table, slots, cache = x
    turned = bool(step.attrs["interleaved"])
    return [p.launch(rope_kv_write_call(q, k, v, table, slots, out[0], cache.of, interleaved=turned))]


def _kv_write(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    k, v, slots, cache = x
    works: list[Work] = []
    k = _heads_together(p, "keys", k, works)
    if not cache.group.values_in_keys:
        v = _heads_together(p, "values", v, works)
    return [*works, p.launch(kv_write_call(k, v, slots, cache.of))]


def _heads_together(p: Binder, room: Room, x: Tensor, works: list[Work]) -> Tensor:
    """Returns x [T, N, D] with contiguous heads, as the attention kernels need it.

    If its heads aren't contiguous, it is copied to ``room``, and the copy is appended to ``works``.
    """
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    dense = p.room(room, x.shape, x.dtype)
    works.append(partial(dense.copy_, x))
    return dense


def written_bytes(step: Step, cached: CacheGroup, tokens: int) -> dict[Room, int]:
    """Returns the bytes of each ``Binder.room`` for a ``kv_write``, in a step of ``tokens`` tokens."""
    operands: dict[Room, Operand] = {"keys": step.inputs[0]}
    operands |= {} if cached.values_in_keys else {"values": step.inputs[1]}
    return {room: _dense_bytes(of, tokens) for room, of in operands.items() if not _has_heads_together(of)}


def _has_heads_together(operand: Operand) -> bool:
    """Returns True if the heads of an operand [T, N, D] are contiguous within each token."""
    return operand.strides[1:] == (operand.shape[2], Affine(1))


def _dense_bytes(operand: Operand, tokens: int) -> int:
    return tokens * operand.shape[1].constant * stored_bytes(operand.dtype, operand.shape[2].constant)


def attended_heads(step: Step, cached: CacheGroup) -> tuple[int, int]:
    """Returns the index of the first of the rank's query heads among those that the kernels get, and the number of
    these.

    Kernels need equally many query heads for each key/value head. A rank whose share is uneven also passes the missing
    heads, as zeros, and drops their results.
    """
    heads, have = step.outputs[0].shape[1].constant, cached.planes[0].heads
    group, first = int(step.attrs.get("group", heads // have)), int(step.attrs.get("first_head", 0))
    counts = Counter((first + head) // group for head in range(heads))
    even = len(counts) == have and len(set(counts.values())) == 1
    return (0, heads) if even else (first, have * group)


def heads_bytes(step: Step, cached: CacheGroup, sizes: tuple[int, int, int]) -> dict[Room, int]:
    """Returns the bytes of each ``Binder.room`` for a ``paged_attention``, in a step with ``sizes`` (T, B, R)."""
    q, out = step.inputs[0], step.outputs[0]
    heads = attended_heads(step, cached)[1]
    tokens = out.shape[0].evaluate(*sizes)
    rooms: dict[Room, int] = {}
    if heads != out.shape[1]:
        rooms["queries"] = tokens * heads * stored_bytes(q.dtype, q.shape[2].constant)
    elif not _has_heads_together(q):
        rooms["queries"] = _dense_bytes(q, tokens)
    if heads != out.shape[1] or not _is_dense(out):
        rooms["results"] = tokens * heads * stored_bytes(out.dtype, out.shape[2].constant)
    return rooms


def _is_dense(operand: Operand) -> bool:
    _, heads, size = operand.shape
    return operand.strides == (heads * size.constant, size, Affine(1))


def _paged_attention(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    q, cache, table, q_start, kv_len, *rest = x
    a = step.attrs
    sinks = rest.pop(0) if a.get("has_sinks") else None
    slopes = rest.pop(0) if a.get("has_slopes") else None
    ends, ends_table = rest if a.get("has_ends") else (None, None)
    (tokens, have, size), result = q.shape, out[0]
    first, heads = attended_heads(step, cache.group)
    works: list[Work] = []
    if heads != have:
        whole = p.room("queries", (tokens, heads, size), q.dtype)
        works += [whole.zero_, partial(whole.narrow(1, first, have).copy_, q)]
        q, sinks, slopes = whole, _among(sinks, first, heads), _among(slopes, first, heads)
    if heads != have or not result.is_contiguous():
        result = p.room("results", (tokens, heads, result.shape[2]), result.dtype)
    calls = attention_calls(
        _heads_together(p, "queries", q, works),
        replace(cache.of, ends=ends.of) if ends else cache.of,
        AttendedBatch(table, q_start, kv_len, p.decodes, p.mixed, ends_table),
        AttentionRule(float(a["scale"]), int(a["window"]), float(a["softcap"]), sinks, slopes, p.exact),
        AttentionParts(
            p.scratch(),
            work=p.work(cache, table, kv_len, int(a["window"]), works),
            workers=len(kv_len) * splits_of(table.shape[1], cache.group.block_size),
        ),
        result,
        p.gpu,
        p.tile,
    )
    for call in calls:
        if call.kernel == "listed_attention":  # as many programs go through the list as run at a time
            most = max(1, p.resident(call) // call.grid[1])
            call = replace(call, grid=(min(most, call.grid[0]), *call.grid[1:]))
        works.append(p.launch(call))
    if result is not out[0]:
        works.append(lambda: out[0].copy_(result.narrow(1, first, have)))
    return works


def _among(vector: Tensor | None, first: int, heads: int) -> Tensor | None:
    """Pads the values [n] of some heads with zeros to ``heads`` heads, of which they begin at ``first``; None for
    None.
    """
    if vector is None:
        return None
    return torch.nn.functional.pad(vector, (first, heads - first - len(vector)))


def _stored_convolution(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    values, weight, *rest = x
    bias = rest.pop(0) if step.attrs.get("has_bias") else None
    activation = str(step.attrs["activation"])
    return [p.launch(convolution_call(values, weight, bias, _stored_states(step, rest), out[0], activation))]


def _stored_scan(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    values, dt, a, b, c, *rest = x
    return [p.launch(scan_call(values, dt, a, b, c, _stored_states(step, rest), out[0]))]


def _stored_delta_rule(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    scale, normalize = float(step.attrs["scale"]), bool(step.attrs["normalize"])
    stored = _stored_states(step, x[5:])
    return [p.launch(delta_rule_call(x[:5], stored, out[0], scale, normalize=normalize))]


def _stored_states(step: Step, rest: Sequence[Any]) -> StoredStates:
    """Returns a recurrence's states, from the inputs ``rest`` of its step: the cache, the ports of attention, and the
    slots.
    """
    cache, table, q_start, kv_len, slots = rest
    return StoredStates(cache.of, table, q_start, kv_len, slots, int(step.attrs["first"]))


def _gated_activation(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [p.launch(gated_activation_call(x[0], out[0], str(step.attrs["kind"]), *x[1:]))]


def _take_rows(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [lambda: out[0].copy_(x[0].index_select(0, x[1]))]


def _copy(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    works: list[Work] = [lambda: out[0].copy_(x[0].expand(out[0].shape))]
    if step.inputs[0].name == Q_START:  # its last number is that of the step's rows, and padding tokens have rows too
        works.append(partial(out[0][-1:].fill_, p.tokens))
    return works


def _reduce(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    kind = str(step.attrs["kind"])
    if kind != "max":
        return [p.launch(reduce_call(x[0], out[0], kind))]
    return [lambda: out[0].copy_(x[0].amax(dim=-1, keepdim=True))]


def _top_k(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    k = int(step.attrs["k"])

    def run() -> None:  # stable: of equal values the first
        values, places = x[0].sort(dim=-1, descending=True, stable=True)
        out[0].copy_(values.narrow(-1, 0, k))
        out[1].copy_(places.narrow(-1, 0, k))

    return [run]


def _gather(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [lambda: out[0].copy_(x[0].gather(-1, x[1].long()))]


def _scatter(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    value = float(step.attrs["value"])
    return [lambda: out[0].copy_(x[0].scatter(-1, x[1].long(), value))]


def _route_experts(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    order, rows, starts = out
    choices = x[0].shape[1]

    def run() -> None:
        chosen, places = x[0].reshape(-1).sort(stable=True)
        order.copy_(places)
        rows.copy_(places // choices)
        borders = torch.arange(len(starts), device=starts.device, dtype=chosen.dtype)
        starts.copy_(torch.searchsorted(chosen, borders))

    return [run]


def _combine_experts(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    y, order, weights = x

    places = p.room("places", order.shape, torch.int32)
    return [p.launch(call) for call in combine_experts_calls(y, order, places, weights, out[0])]


@dataclass(frozen=True)
class _Message:
    """The layout of matrices in one message.

    Attributes:
        places: for each matrix [M, C], its first byte, M and C.
        size: the bytes of the message.
    """

    places: tuple[tuple[int, int, int], ...]
    size: int

    @classmethod
    def of(cls, rows: Sequence[int], columns: Sequence[int], widths: Sequence[int]) -> _Message:
        """Lays out matrices with these rows, columns and bytes per element; each begins at a multiple of 16 bytes."""
        places, at = [], 0
        for m, c, width in zip(rows, columns, widths, strict=True):
            places.append((at, m, c))
            at += -(-m * c * width // 16) * 16
        return cls(tuple(places), at)

    def pieces(self, memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns views of the matrices in ``memory``, with the types of the tensors ``like``."""
        return [
            memory.narrow(0, at, m * c * one.element_size()).view(one.dtype).view(m, c)
            for (at, m, c), one in zip(self.places, like, strict=True)
        ]


def _cuts(step: Step) -> list[list[int]]:
    """Returns for each matrix of an exchange the first column of each rank, and at the end the number of columns."""
    return [[int(cut) for cut in cuts.split(",")] for cuts in str(step.attrs["cuts"]).split(";")]


def _messages(cuts: Sequence[Sequence[int]], rows: Sequence[int], widths: Sequence[int]) -> list[_Message]:
    """Returns the layout of each rank's message. All are sent with the size of the longest, as NCCL's collectives need
    it.
    """
    ranks = range(len(cuts[0]) - 1)
    return [_Message.of(rows, [c[r + 1] - c[r] for c in cuts], widths) for r in ranks]


def exchanged_bytes(step: Step, sizes: tuple[int, int, int]) -> dict[Room, int]:
    """Returns the bytes of each ``Binder.room`` for an op in ``EXCHANGED``, in a step with ``sizes`` (T, B, R)."""
    operands = step.inputs[:1] if step.op == "gather_experts" else step.outputs if step.op == "all_gather" else ()
    operands = operands or (step.inputs if step.op == "send" else step.outputs)
    rows = [o.shape[0].evaluate(*sizes) for o in operands]
    widths = [stored_bytes(o.dtype, 1) for o in operands]
    if step.op in ("send", "gather_experts"):
        return {"sent": _Message.of(rows, [o.shape[1].constant for o in operands], widths).size}
    messages = _messages(_cuts(step), rows, widths)
    longest = max(message.size for message in messages)
    received: dict[Room, int] = {"received": len(messages) * longest}
    return received if step.op == "receive" else {"sent": longest, **received}


def _gathered(p: Binder, step: Step, out: Sequence[Tensor]) -> tuple[Tensor, list[Work]]:
    """Returns memory [ranks, n] for the messages of several ranks, and the work that copies their parts to the
    matrices ``out``.
    """
    cuts = _cuts(step)
    messages = _messages(cuts, [len(one) for one in out], [one.element_size() for one in out])
    longest = max(message.size for message in messages)
    received = p.room("received", (len(messages), longest), torch.uint8)
    pieces = [message.pieces(memory, out) for message, memory in zip(messages, received, strict=True)]
    this_rank = p.exchange.place if step.op == "all_gather" else -1
    works: list[Work] = []
    for i, whole in enumerate(out):
        widths = {hi - lo for lo, hi in zip(cuts[i], cuts[i][1:], strict=False)}
        if len(widths) == 1 and len(out) == 1 and longest == messages[0].size:  # one copy for all
            together = received.view(whole.dtype)[:, : len(whole) * widths.pop()].unflatten(1, (len(whole), -1))
            to = whole.unflatten(1, (len(messages), -1))
            works.append(partial(to.copy_, together.transpose(0, 1)))
            continue
        for rank, of_rank in enumerate(pieces):
            if rank != this_rank:
                to = whole.narrow(1, cuts[i][rank], cuts[i][rank + 1] - cuts[i][rank])
                works.append(partial(to.copy_, of_rank[i]))
    return received, works


def _packed(p: Binder, x: Sequence[Tensor], size: int = 0) -> tuple[Tensor, list[Work]]:
    """Returns a message for the matrices ``x``, of at least ``size`` bytes, and the work that copies them into it."""
    message = _Message.of([len(one) for one in x], [one.shape[1] for one in x], [one.element_size() for one in x])
    sent = p.room("sent", (size or message.size,), torch.uint8)
    return sent, [partial(to.copy_, one) for to, one in zip(message.pieces(sent, x), x, strict=True)]


def _all_gather(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    received, unpack = _gathered(p, step, out)
    sent, pack = _packed(p, x, received.shape[1])
    to, exchange = int(step.attrs["to"]), p.exchange
    if to < 0:
        return [*pack, lambda: exchange.all_gather(received, sent), *unpack]
    return [*pack, lambda: exchange.gather(to, received, sent), *(unpack if exchange.place == to else ())]


def _gather_experts(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    """Returns the work that gathers rows, each of which one rank has computed. Only the GPU knows which rank.

    Each rank sets other rows to zero, and all add up their rows as integers, so that the sum has the exact bits of each
    row.
    """
    y, starts = x
    exchange, (cuts,) = p.exchange, _cuts(step)
    lo, hi = cuts[exchange.place], cuts[exchange.place + 1]
    message = _Message.of([len(y)], [y.shape[1]], [y.element_size()])
    memory = p.room("sent", (message.size,), torch.uint8)
    (rows,), numbers = message.pieces(memory, [y]), memory.view(torch.int32)
    places = torch.arange(len(y), device=y.device)

    def run() -> None:
        inside = (places >= starts[lo]) & (places < starts[hi])
        rows.copy_(torch.where(inside.unsqueeze(1), y, 0))
        exchange.add(numbers)
        out[0].copy_(rows)

    return [run]


def _send(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    sent, pack = _packed(p, x)
    exchange, ranks = p.exchange, _ranks_of(step)
    return [*pack, lambda: exchange.send(sent, ranks)]


def _receive(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    received, unpack = _gathered(p, step, out)
    messages = _messages(_cuts(step), [len(one) for one in out], [one.element_size() for one in out])
    theirs = [memory[: message.size] for memory, message in zip(received, messages, strict=True)]
    exchange, ranks = p.exchange, _ranks_of(step)
    return [lambda: exchange.receive(theirs, ranks), *unpack]


def _ranks_of(step: Step) -> range:
    first = int(step.attrs["first"])
    return range(first, first + int(step.attrs["ranks"]))


def _elementwise(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    a, result = step.attrs, out[0]
    name, operands = str(a["fn"]), [one.expand(result.shape) for one in x]
    if name in _ACTIVATIONS:
        return [p.launch(activation_call(operands[0], result, name))]
    fn: Any = _FUNCTIONS.get(name) or getattr(torch, name)
    number: Any = a.get("scalar")
    first = bool(a.get("scalar_first", False))
    wide = result.is_floating_point() and name not in _COMPARE

    def run() -> None:
        values = [_wide(one) if wide else one for one in operands]
        if number is not None:
            scalar = torch.full((), number, dtype=values[0].dtype, device=result.device)
            values = [scalar, values[0]] if first else [values[0], scalar]
        result.copy_(fn(*values))

    return [run]


def _wide(x: Tensor) -> Tensor:
    """Returns 16-bit floats as float32, in which small ops compute."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "cast"})

_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_tanh", "sigmoid"})
"""Functions that our own kernel computes. On a CPU, torch rounds them differently for the last elements of a tensor."""

_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "pow": lambda x, y: torch.pow(x.double(), y.double()),  # in float32 its last elements are rounded otherwise, too
    "cast": lambda x: x,
    "logical_not": lambda x: x == 0,
    "where": lambda condition, x, y: torch.where(condition != 0, x, y),
}
"""Elementwise functions that differ from torch's function of the same name."""

HANDLERS: Mapping[str, Callable[[Binder, Step, list[Any], list[Tensor]], list[Work]]] = {
    "embedding": _embedding,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _norm,
    "add_layer_norm": _norm,
    "rope_table": _rope_table,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "stored_convolution": _stored_convolution,
    "stored_scan": _stored_scan,
    "stored_delta_rule": _stored_delta_rule,
    "gated_activation": _gated_activation,
    "take_rows": _take_rows,
    "copy": _copy,
    "reduce": _reduce,
    "top_k": _top_k,
    "gather": _gather,
    "scatter": _scatter,
    "route_experts": _route_experts,
    "combine_experts": _combine_experts,
    "elementwise": _elementwise,
    "all_gather": _all_gather,
    "gather_experts": _gather_experts,
    "send": _send,
    "receive": _receive,
}

EXCHANGED = frozenset({"all_gather", "gather_experts", "send", "receive"})
"""Ops in which ranks exchange data."""
