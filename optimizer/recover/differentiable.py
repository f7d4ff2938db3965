"""Weights and ops of a Program with gradients: the expressions of weights, and attention of sequences in one step.

The references of the ``ew`` ops are plain torch functions, which have gradients; the registered ops have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from enginewright.passes.ir.recovered import Recovered
from enginewright.passes.ir.scaled import Rotated, Scaled, rotated
from enginewright.passes.ir.stacked_weights import Stack, SwapAxes
from enginewright.passes.ir.two_of_four import TwoOfFour, best_two, scores_of
from enginewright.passes.ir.weights import Apply, Cast, Concat, Slice, Transpose, WeightExpr, Zeros
from enginewright.passes.ops.attention import attention, of_one_request, request_spans
from enginewright.runtime.shared.errors import PassError

from .straight_through import straight_through

Leaf = Callable[[Recovered], torch.Tensor]
Kind = TypeVar("Kind", bound=WeightExpr)


def recovered_in(expr: Any) -> Iterator[Recovered]:
    """Yields the weights under training within an expression."""
    yield from _in(expr, Recovered)


def _in(expr: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Yields the outermost expressions of the class ``kind`` within an expression."""
    if isinstance(expr, kind):
        yield expr
    elif isinstance(expr, tuple):
        for one in expr:
            yield from _in(one, kind)
    elif isinstance(expr, WeightExpr):
        for one in vars(expr).values():
            yield from _in(one, kind)


def set_unkept_to_zero(exprs: Iterable[WeightExpr], leaf: Leaf) -> None:
    """Sets the elements that sparse formats remove to zero, in the parameters that ``leaf`` returns for ``exprs``.

    By any score, a zero is only kept if too few other values are there. So the same elements stay removed while the
    parameters change, and also in an export. Removed elements get no gradient.
    """
    for sparse in dict.fromkeys(one for expr in exprs for one in _in(expr, TwoOfFour)):
        leaves = [leaf(one) for one in recovered_in(sparse)]
        masks = torch.autograd.grad(weight_value(sparse, leaf).sum(), leaves)
        for parameter, one in zip(leaves, masks, strict=True):
            parameter.data.mul_(one != 0)


def weight_value(expr: WeightExpr, leaf: Leaf) -> torch.Tensor:
    """Returns the value of an expression, with gradients to the parameters that ``leaf`` returns for the weights under
    training.

    Rounding to 16 bits passes gradients straight through, and the value stays float32.

    Raises:
        PassError: the expression has an operation without gradients.
    """

    def value(one: WeightExpr) -> torch.Tensor:
        return weight_value(one, leaf)

    def argument(one: object) -> object:
        if isinstance(one, tuple):
            return [argument(each) for each in one]
        return value(one) if isinstance(one, WeightExpr) else one

    match expr:
        case Recovered():
            return leaf(expr)
        case Concat():
            return torch.cat([value(b) for b in expr.bases], expr.dim)
        case Stack():
            return torch.stack([value(b) for b in expr.bases], expr.dim)
        case Slice():
            return value(expr.base).narrow(expr.dim, expr.start, expr.stop - expr.start)
        case Transpose():
            return value(expr.base).t()
        case SwapAxes():
            return value(expr.base).transpose(expr.first, expr.second)
        case Scaled():
            factors = expr.factors.values
            return value(expr.base) / factors if expr.divide else value(expr.base) * factors
        case Rotated():
            return rotated(value(expr.base), expr)
        case Cast() if expr.to.is_floating_point:
            exact = value(expr.base)
            return exact if expr.to.itemsize >= exact.element_size() else rounded_to(exact, expr.to)
        case Apply():
            result: torch.Tensor = expr.op(*[argument(a) for a in expr.args], **dict(expr.kwargs))
            return result
        case Zeros():
            return torch.zeros(expr.shape)
        case TwoOfFour():
            dense = value(expr.base)
            importance = None if expr.importance is None else expr.importance.values[0]
            return torch.where(best_two(scores_of(dense.detach(), importance)), dense, 0.0)
    if any(recovered_in(expr)):
        raise PassError(f"{expr.describe()}: training has no gradients for weights of this kind")
    constant: torch.Tensor = expr.evaluate()
    return constant


def rounded_to(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``exact`` rounded to a narrower type of floats and converted back, with a straight-through gradient."""
    return straight_through(exact, exact.detach().to(dtype).to(exact.dtype))


def attention_of_sequences(given: Mapping[str, Any]) -> torch.Tensor:
    """Computes ``ew.attention`` with arguments by name, one sequence after the other, or all at once if they are
    equally long.

    If there is only the causal mask, torch's own kernel computes it, otherwise the op's reference.
    """
    q, k, v = given["q"], given["k"], given["v"]  # [T, Nq, D], [T, Nkv, D], [T, Nkv, Dv]
    spans = request_spans(given)
    lengths = [stop - start for start, stop in spans]
    windowed = 0 < given["window"] < max(lengths, default=0)
    biased = any(given.get(name) is not None for name in ("sinks", "slopes", "biases"))
    if windowed or given["softcap"] or biased or not given.get("causal", True):
        return torch.cat([_reference(given, start, stop) for start, stop in spans])
    if len(set(lengths)) == 1:
        return _causal(q, k, v, len(lengths), given["scale"])
    parts = [slice(start, stop) for start, stop in spans]
    return torch.cat([_causal(q[p], k[p], v[p], 1, given["scale"]) for p in parts])


def _reference(given: Mapping[str, Any], start: int, stop: int) -> torch.Tensor:
    result: torch.Tensor = attention(**of_one_request(given, start, stop))
    return result


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: int, scale: float) -> torch.Tensor:
    """Computes attention of ``sequences`` equally long sequences in a row: [B*S, Nq, D] -> [B*S, Nq, Dv]."""
    shared = q.shape[1] // k.shape[1]

    def by_head(x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(0, (sequences, -1)).transpose(1, 2)  # [B, N, S, D]
        return heads

    keys, values = (by_head(x).repeat_interleave(shared, dim=1) for x in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    out: torch.Tensor = attend(by_head(q), keys, values, is_causal=True, scale=scale)
    tokens: torch.Tensor = out.transpose(1, 2).flatten(0, 1).contiguous()
    return tokens
