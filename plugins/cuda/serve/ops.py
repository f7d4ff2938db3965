"""How the cuda target runs each op: the work of a step whose inputs and outputs are these tensors.

Products with float weights are the libraries' (cuBLASLt through torch); embeddings, norms, rotations, attention and
products with narrower weights are Triton's; what is left is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Step

from ...gpu.call import Call
from ...gpu.specs import AttentionShape, splits_of
from ...gpu.step_calls import (
    LayerCaches,
    Stored,
    attention_calls,
    embedding_call,
    gated_activation_call,
    kv_write_call,
    norm_call,
    product_call,
    rope_call,
    rope_kv_write_call,
    split_product_calls,
)
from ...gpu.tiles import GpuLimits, Tile

Work = Callable[[], object]


class Launcher(Protocol):
    """What runs calls of Triton kernels."""

    def bind(self, call: Call) -> Work:
        """What puts it on the current stream, at any time."""

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """See ``step_calls.TileOf``."""

    def resident(self, call: Call) -> int:
        """Programs of its kernel that a multiprocessor runs at a time."""


@dataclass(frozen=True)
class Choices:
    """How steps run, where there are two ways; see ``plugins.cuda.section.CudaSection``."""

    mixed_decodes: bool = False
    split_products: bool = False


@dataclass(frozen=True)
class Cache:
    """A layer's caches in a step's hands."""

    group: CacheGroup
    of: LayerCaches


class Binder(Protocol):
    """What ops need of the program whose steps are bound."""

    gpu: GpuLimits
    choices: Choices

    def work(self, cache: Cache, table: Tensor, kv_len: Tensor, window: int, works: list[Work]) -> Tensor | None:
        """The list of what a decode step attends to, which all layers of a window share; None where there is none.

        The first that asks for it gets what makes it put into ``works``.
        """

    @property
    def decodes(self) -> bool:
        """Whether each request of the step being bound has one token."""

    @property
    def mixed(self) -> bool:
        """Whether some requests of it have one token, and are decoded beside prompts."""

    def scratch(self) -> Tensor:
        """Float32, for the parts of attention, or of a product."""

    def tile(self, shape: AttentionShape, decode: bool) -> Tile:
        """Chooses the tile of the attention kernel."""

    def launch(self, call: Call) -> Work:
        """The work of one call. It is left out where it has nothing to do."""

    def resident(self, call: Call) -> int:
        """Programs of its kernel that the whole GPU runs at a time."""

    def stored(self, step: Step, first: int, inputs: Sequence[Any], group: str) -> tuple[Stored, list[Any]]:
        """The weight that stands at ``first`` among a step's inputs, and what follows it and its scales."""

    def bias_like(self, bias: Tensor, out: Tensor) -> Tensor:
        """A bias [N] in the type of what it is added to, made once."""


def _embedding(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    table, _ = p.stored(step, 1, x, "group_size")
    return [p.launch(embedding_call(x[0], table, out[0].shape[1], out[0], p.gpu))]


def _linear(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    weight, rest = p.stored(step, 1, x, "weight_group")
    activation = str(step.attrs.get("activation", ""))
    a, result = x[0], out[0]
    if step.attrs.get("has_residual"):
        raise BundleError(f"{step.where}: a linear with a residual isn't the cuda target's", hint="Export again.")
    if weight.format != "float" or activation or weight.values.dtype != result.dtype:
        bias = rest[0] if rest else None
        if not p.choices.split_products:
            return [p.launch(product_call(a, weight, bias, result, p.gpu, activation=activation))]
        calls = split_product_calls(a, weight, bias, result, p.gpu, p.scratch(), activation=activation)
        return [p.launch(call) for call in calls]
    transposed = weight.values.t()
    if rest:
        bias = p.bias_like(rest[0], result)
        return [lambda: torch.addmm(bias, a, transposed, out=result)]
    return [lambda: torch.mm(a, transposed, out=result)]


def _grouped_linear(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    weight, rest = p.stored(step, 2, x, "weight_group")
    activation, bias = str(step.attrs.get("activation", "")), rest[0] if rest else None
    return [p.launch(product_call(x[0], weight, bias, out[0], p.gpu, activation=activation, starts=x[1]))]


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
    k, v = _heads_together(k, works), _heads_together(v, works)
    return [*works, p.launch(kv_write_call(k, v, slots, cache.of))]


def _heads_together(x: Tensor, works: list[Work]) -> Tensor:
    """x [T, N, D] with the heads of a token side by side, as the attention's kernels read it; copied if need be."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    works.append(lambda: dense.copy_(x))
    return dense


def _paged_attention(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    q, cache, table, q_start, kv_len, *rest = x
    a = step.attrs
    sinks = rest.pop(0) if a.get("has_sinks") else None
    slopes = rest.pop(0) if a.get("has_slopes") else None
    works: list[Work] = []
    calls = attention_calls(
        _heads_together(q, works),
        cache.of,
        table,
        q_start,
        kv_len,
        sinks,
        slopes,
        out[0],
        p.scratch(),
        p.gpu,
        p.tile,
        work=p.work(cache, table, kv_len, int(a["window"]), works),
        workers=len(kv_len) * splits_of(table.shape[1], cache.group.block_size),
        scale=float(a["scale"]),
        window=int(a["window"]),
        softcap=float(a["softcap"]),
        decodes=p.decodes,
        mixed=p.mixed,
    )
    for call in calls:
        if call.kernel == "listed_attention":  # as many programs go through the list as run at a time
            most = max(1, p.resident(call) // cache.group.kv_heads)
            call = replace(call, grid=(min(most, call.grid[0]), *call.grid[1:]))
        works.append(p.launch(call))
    return works


def _gated_activation(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [p.launch(gated_activation_call(x[0], out[0], str(step.attrs["kind"])))]


def _take_rows(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [lambda: out[0].copy_(x[0].index_select(0, x[1]))]


def _copy(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    return [lambda: out[0].copy_(x[0].expand(out[0].shape))]


def _reduce(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    fn: Any = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[str(step.attrs["kind"])]
    return [lambda: out[0].copy_(fn(_wide(x[0]), dim=-1, keepdim=True))]


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

    def run() -> None:
        places = torch.empty_like(order, dtype=torch.int64).scatter_(
            0, order.long(), torch.arange(len(order), device=order.device)
        )
        by_place = _wide(y).index_select(0, places).view(*weights.shape, -1)  # [T, k, H]
        out[0].copy_((by_place * weights.unsqueeze(-1)).sum(1))

    return [run]


def _elementwise(p: Binder, step: Step, x: list[Any], out: list[Tensor]) -> list[Work]:
    a, result = step.attrs, out[0]
    fn: Any = _FUNCTIONS.get(str(a["fn"])) or getattr(torch, str(a["fn"]))
    given = [one.expand(result.shape) for one in x]
    number: Any = a.get("scalar")
    first = bool(a.get("scalar_first", False))
    wide = result.is_floating_point() and a["fn"] not in _COMPARE

    def run() -> None:
        values = [_wide(one) if wide else one for one in given]
        if number is not None:
            scalar = torch.full((), number, dtype=values[0].dtype, device=result.device)
            values = [scalar, values[0]] if first else [values[0], scalar]
        result.copy_(fn(*values))

    return [run]


def _wide(x: Tensor) -> Tensor:
    """Converts to float32, in which small ops compute."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "cast"})

_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "cast": lambda x: x,
    "logical_not": lambda x: x == 0,
    "where": lambda condition, x, y: torch.where(condition != 0, x, y),
}
"""Functions that torch calls otherwise."""

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
}
