"""Evaluates programs faster than ``Program.evaluate``: quantized matrix products are computed in floats.

The references of quantized ops add the products of one group of integers after the other, as kernels do. Except for
rounding, their result is the matrix product of the dequantized values. This module computes that product at once in
floats, and caches the dequantized weight if there is room. It computes attention separately for each request of a step,
not over all pairs of tokens. All other ops are computed as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node, Target

from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Concat, WeightExpr
from enginewright.runtime.shared.weight_formats import SCALED

from ..formats.rounding import TORCH_DTYPES
from ..ops.attention import of_one_request, request_spans
from ..ops.epilogue import finish_linear
from ..ops.experts import grouped_linear
from ..ops.quantization import groups_of, scales_as_floats
from .match import bound_arguments

ew = torch.ops.ew

QUANTIZED_WEIGHTS: dict[Target, tuple[str, str, str]] = {
    ew.quantized_linear.default: ("weight", "weight_scales", "weight_offsets"),
    ew.quantized_grouped_linear.default: ("weight", "weight_scales", "weight_offsets"),
    ew.quantized_embedding.default: ("table", "scales", "offsets"),
}
"""For each op on a quantized weight, the arguments that hold the weight's integers, scales and offsets. Offsets are
optional.
"""

_UNDERSTOOD = frozenset(
    {"values", "scales", "sums", "starts", "weight", "weight_scales", "weight_offsets", "bias", "ids", "table"}
    | {"offsets", "weight_bits", "weight_group", "activation_group", "bits", "group_size", "activation", "residual"}
)
"""The arguments of those ops that this module supports. A call with another argument is computed by the op's reference.
"""

_ENCODED = frozenset(TORCH_DTYPES[name] for name in (*SCALED, "f16"))
"""The torch types of the integers or 8-bit floats, scales and offsets of quantized weights."""

_PIECE = 1 << 24
"""The number of floats of a weight that are dequantized at a time if there is no room for the whole weight: 64 MiB. The
C library returns an allocation of that size to the system when it is freed.
"""

_ATTENTIONS: tuple[Target, ...] = (ew.attention.default, ew.paged_attention.default)


class WeightCache:
    """A cache of evaluated weights of at most ``limit`` bytes.

    The keys are expressions. Equal expressions have equal values, so the programs of one model can share a cache. When
    the cache is full, the values that were cached first stay, because the next evaluation reads them first. Values that
    the running program doesn't use are dropped.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self._values: dict[tuple[WeightExpr, ...], torch.Tensor] = {}
        self._bytes = 0

    def get(self, key: tuple[WeightExpr, ...], make: Callable[[], torch.Tensor], program: Program) -> torch.Tensor:
        """Returns the cached value of ``key``, or the result of ``make``.

        That result is then cached if there is room after dropping the values that ``program`` doesn't use.
        """
        cached = self._values.get(key)
        if cached is not None:
            return cached
        value = make()
        size = value.numel() * value.element_size()
        if self._make_room(size, program):
            self._values[key] = value
            self._bytes += size
        return value

    def would_keep(self, key: tuple[WeightExpr, ...], size: int, program: Program) -> bool:
        """Returns True if the value of ``key``, of ``size`` bytes, is cached, or would be cached after it was computed.
        It may drop values that ``program`` doesn't use to make room.

        A value of more than half the limit isn't cached: computing it takes about twice its bytes.
        """
        return key in self._values or (size <= self.limit // 2 and self._make_room(size, program))

    def _make_room(self, size: int, program: Program) -> bool:
        if self._bytes + size > self.limit:
            self.forget_all_but(program)
        return self._bytes + size <= self.limit

    def find(self, expr: WeightExpr) -> torch.Tensor | None:
        """Returns the cached value of ``expr``, or None if it isn't cached."""
        return self._values.get((expr,))

    def offer(self, expr: WeightExpr, value: torch.Tensor) -> None:
        """Caches the value of ``expr``, which the caller has evaluated, if there is room."""
        size = value.numel() * value.element_size()
        if (expr,) not in self._values and self._bytes + size <= self.limit:
            self._values[expr,] = value
            self._bytes += size

    def clear(self) -> None:
        """Drops all values."""
        self._values.clear()
        self._bytes = 0

    def forget_all_but(self, program: Program) -> None:
        """Drops values that aren't weights of ``program``. Parts of a weight that ``program`` concatenates stay too, if
        the whole weight isn't cached.
        """
        used = {program.weights[name] for name in program.weights}
        used |= {b for e in used if isinstance(e, Concat) and (e,) not in self._values for b in e.bases}
        self._values = {k: v for k, v in self._values.items() if used.issuperset(k)}
        self._bytes = sum(v.numel() * v.element_size() for v in self._values.values())


class FastEvaluation:
    """Evaluates a program faster than ``Program.evaluate`` does. Its methods can also be passed to that method::

        fast = FastEvaluation(program, WeightCache(1 << 30))
        logits = program.evaluate(inputs, compute=fast.compute, read=fast.read)[0]

    The program may change between runs. ``read`` returns the integers and scales of quantized weights without values,
    as tensors on the device "meta". ``compute`` uses the dequantized weight instead.
    """

    def __init__(self, program: Program, cache: WeightCache | None = None) -> None:
        self.program = program
        self.cache = WeightCache() if cache is None else cache

    def evaluate(
        self, inputs: Mapping[str, torch.Tensor], observe: Callable[[Node, Any], None] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Returns the results of ``Program.evaluate`` for these inputs, computed faster.

        ``observe`` is called with every node and its value.
        """
        return self.program.evaluate(inputs, observe, self.compute, self.read)

    def read(self, name: str) -> torch.Tensor:
        """Returns the weight ``name``. Tensors of a quantized weight are returned on "meta", without values."""
        expr = self.program.weights[name]
        if expr.dtype in _ENCODED:
            return torch.empty(expr.shape, dtype=expr.dtype, device="meta")
        return self._value(name)

    def compute(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a call.

        Args:
            node: the call.
            args, kwargs: the values of its arguments. Tensors on "meta", which ``read`` returns, are replaced by the
                weights.
        """
        assert callable(node.target)
        names = bound_arguments(node)
        if node.target in QUANTIZED_WEIGHTS and names.keys() <= _UNDERSTOOD:
            return self._quantized(node, names, names | dict(zip(names, args, strict=False)) | dict(kwargs))
        if node.target is ew.dequantize.default:
            parts = [names[n] for n in ("values", "scales", "offsets") if names.get(n) is not None]
            exprs = tuple(self.program.weights[str(part.target)] for part in parts)
            return self._decoded(exprs, names["group_size"])
        real = [self._real(a, v) for a, v in zip(node.args, args, strict=True)]
        named = {key: self._real(node.kwargs[key], value) for key, value in kwargs.items()}
        if node.target in _ATTENTIONS:
            return _attend(node.target, names | dict(zip(names, real, strict=False)) | named)
        return node.target(*real, **named)

    def _quantized(self, node: Node, names: Mapping[str, Any], given: Mapping[str, Any]) -> torch.Tensor:
        """Returns the result of an op on a quantized weight, computed with the dequantized weight.

        ``names`` maps the names of the arguments to their nodes, ``given`` to their values.
        """
        parts = [names[n] for n in QUANTIZED_WEIGHTS[node.target] if names.get(n) is not None]
        group = given["group_size"] if node.target is ew.quantized_embedding.default else given["weight_group"]
        exprs = tuple(self.program.weights[str(n.target)] for n in parts)
        fits = self.cache.would_keep(exprs, 4 * math.prod(exprs[0].shape), self.program)
        if node.target is ew.quantized_embedding.default:
            ids = given["ids"].long()
            if fits:
                return self._decoded(exprs, group)[ids]
            read, rows = ids.unique(return_inverse=True)
            return decoded(*(e.evaluate()[read] for e in exprs), group=group)[rows]
        x = decoded(given["values"], given["scales"], group=given["activation_group"])  # [.., K]
        if node.target is ew.quantized_linear.default and not fits:
            product = _linear_in_pieces(x, [e.evaluate() for e in exprs], group, given["bias"])
            return finish_linear(product, given["activation"], given.get("residual"))
        return finished_product(node.target, x, self._decoded(exprs, group), given)

    def _decoded(self, exprs: tuple[WeightExpr, ...], group: int) -> torch.Tensor:
        """Returns a dequantized weight, from the cache if possible.

        ``exprs`` are the weight's values, scales and perhaps offsets; ``group`` is the group size, 0 for whole rows.
        """
        return self.cache.get(exprs, lambda: decoded(*(e.evaluate() for e in exprs), group=group), self.program)

    def _real(self, argument: object, value: Any) -> Any:
        """Returns an argument's value; a tensor that ``read`` returned without values is evaluated."""
        if isinstance(argument, Node):
            return self._value(str(argument.target)) if argument.op == "get_attr" and value.is_meta else value
        if isinstance(argument, (list, tuple)):
            return [self._real(a, v) for a, v in zip(argument, value, strict=True)]
        return value

    def _value(self, name: str) -> torch.Tensor:
        expr = self.program.weights[name]
        return self.cache.get((expr,), lambda: self._evaluated(expr), self.program)

    def _evaluated(self, expr: WeightExpr) -> torch.Tensor:
        """Evaluates a weight; a concatenation uses cached values of its parts."""
        if not isinstance(expr, Concat):
            return expr.evaluate()
        cached = [self.cache.find(base) for base in expr.bases]
        return torch.cat([b.evaluate() if k is None else k for b, k in zip(expr.bases, cached, strict=True)], expr.dim)


def decoded(
    values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None, *, group: int
) -> torch.Tensor:
    """Returns integers or 8-bit floats [.., K] dequantized to float32.

    Scales and offsets are stored per group of ``group`` values along K, or in blocks of groups. A ``group`` of 0 is the
    whole row.
    """
    size = values.shape[-1]
    groups, width = groups_of(size, group), group or size
    whole = torch.nn.functional.pad(values.float(), (0, groups * width - size)) if groups * width > size else values
    by = scales_as_floats(scales, groups)[..., None]
    result: torch.Tensor = whole.float().unflatten(-1, (groups, width)).mul_(by)
    if offsets is not None:
        result += scales_as_floats(offsets, groups)[..., None]
    return result.flatten(-2)[..., :size]


def finished_product(target: Target, x: torch.Tensor, weight: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Returns the result of a product with a quantized weight, from dequantized activations and weights.

    ``given`` has the values of the op's other arguments, by name.
    """
    if target is ew.quantized_grouped_linear.default:
        product = grouped_linear(x, given["starts"], weight, given["bias"])
    else:
        product = torch.nn.functional.linear(x, weight, given["bias"])
    return finish_linear(product, given["activation"], given.get("residual"))


def _linear_in_pieces(
    x: torch.Tensor, parts: Sequence[torch.Tensor], group: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns x times a quantized weight [N, K], with at most ``_PIECE`` dequantized values in memory at a time.

    ``parts`` are the weight's values, scales and perhaps offsets.
    """
    rows = max(1, _PIECE // parts[0].shape[-1])
    pieces = zip(*(part.split(rows) for part in parts), strict=True)
    product = torch.cat([torch.nn.functional.linear(x, decoded(*piece, group=group)) for piece in pieces], -1)
    return product if bias is None else product.add_(bias)


def _attend(target: Any, given: Mapping[str, Any]) -> torch.Tensor:
    """Computes the attention op ``target`` separately for each request of the step.

    ``given`` has the values of the op's arguments by name.
    """
    results = []
    for i, (start, stop) in enumerate(request_spans(given)):
        arguments = of_one_request(given, start, stop)
        if target is not ew.attention.default:
            blocks = -(-int(given["kv_len"][i]) // given["k_cache"].shape[1])
            tables = [name for name in ("block_table", "ends_table") if given[name] is not None]
            arguments |= {name: given[name][i : i + 1, :blocks] for name in tables}
            arguments["kv_len"] = given["kv_len"][i : i + 1]
        results.append(target(**arguments))
    return torch.cat(results)
