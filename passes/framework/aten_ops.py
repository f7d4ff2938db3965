"""Groups of ATen ops with the same effect, and the meaning of their arguments, for passes and emitters.

Arguments are passed by name, as ``bound_arguments`` returns them, with defaults filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.fx.node import Node

from .match import bound_arguments
from .views import RESHAPES

aten = torch.ops.aten

T = TypeVar("T")

_OF_ONE_NAME = (
    *("unsqueeze", "expand", "cat", "zeros_like", "ones_like", "full_like"),
    *("neg", "abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos", "erf"),
    *("floor", "round", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "maximum", "minimum", "topk"),
)

SPELLINGS: Mapping[str, tuple[OpOverload, ...]] = {
    **{name: (getattr(aten, name).default,) for name in _OF_ONE_NAME},
    **{
        name: (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
        for name in ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne")
    },
    "rsub": (aten.rsub.Scalar,),
    "div_mode": (aten.div.Tensor_mode,),
    "pow": (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar),
    "clamp": (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default),
    "clamp_tensors": (aten.clamp.Tensor,),
    "where": (aten.where.self,),
    "masked_fill": (aten.masked_fill.Scalar,),
    "logical_not": (aten.logical_not.default, aten.bitwise_not.default),
    "logical_and": (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor),
    "logical_or": (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor),
    "mean": (aten.mean.dim,),
    "sum": (aten.sum.dim_IntList,),
    "amax": (aten.amax.default,),
    "max": (aten.max.dim,),
    "gather": (aten.gather.default,),
    "scatter": (aten.scatter.value,),
    "softmax": (aten.softmax.int, aten._softmax.default),
    "full": (aten.full.default, aten.scalar_tensor.default),
    "reshape": (*RESHAPES, aten.flatten.using_ints, aten.unflatten.int),
    "same": (
        *(aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default),
        aten.lift_fresh_copy.default,
    ),
    "convert": (aten._to_copy.default, aten.to.dtype),
    "permute": (aten.permute.default, aten.transpose.int, aten.t.default),
    "squeeze": (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    "slice": (aten.slice.Tensor,),
    "select": (aten.select.int,),
    "split": (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default),
    "unbind": (aten.unbind.int,),
}
"""Maps the name of an operation to the functional ATen ops for it that a program may still have when it is lowered.

``clamp`` has numbers as bounds, ``clamp_tensors`` tensors. ``max`` returns the indices of the maxima too, ``amax``
doesn't.
"""


def ops_of(*names: str) -> tuple[OpOverload, ...]:
    """Returns the ops that ``SPELLINGS`` lists under these names."""
    return tuple(op for name in names for op in SPELLINGS[name])


def of_each(handlers: Mapping[str, T]) -> dict[OpOverload, T]:
    """Returns op -> handler, from a mapping of names in ``SPELLINGS`` to handlers. All ops of a name get its
    handler.
    """
    return {op: handler for name, handler in handlers.items() for op in SPELLINGS[name]}


def dims_of(a: Mapping[str, Any], rank: int) -> list[int]:
    """Returns the dimensions that a call's argument ``dim`` names, as ascending numbers from 0; all of them if ``dim``
    is None.

    ``a`` has the call's arguments by name. ``rank`` is the number of dimensions of the tensor that they refer to.
    """
    dim = a.get("dim")
    if dim is None:
        return list(range(rank))
    return sorted({d % rank for d in ([dim] if isinstance(dim, int) else dim)})


def dimension_order(a: Mapping[str, Any], rank: int) -> list[int]:
    """Returns, for each dimension of the result of a permute, transpose or t, the dimension of the argument that it is.

    ``a`` has the call's arguments by name. ``rank`` is the number of dimensions.
    """
    if "dims" in a:
        return [d % rank for d in a["dims"]]
    order = list(range(rank))
    if rank:
        first, second = (a["dim0"] % rank, a["dim1"] % rank) if "dim0" in a else (0, rank - 1)
        order[first], order[second] = order[second], order[first]
    return order


def activation_kind(node: Node) -> str:
    """Returns the activation's name in ``ew.linear`` and ``ew.gated_activation`` for a call of an ATen op."""
    assert isinstance(node.target, OpOverload)
    kind = node.target.overloadpacket.__name__
    return "gelu_tanh" if bound_arguments(node).get("approximate") == "tanh" else kind


def is_log_of_one_more_exp(a: Mapping[str, Any]) -> bool:
    """Returns True if a softplus with the arguments ``a`` equals log(1 + exp(x)) for all float32 x.

    A softplus is x itself above its threshold, so the threshold must be at least ``_EXP_IS_ALL``.
    """
    return bool(a["beta"] == 1 and a["threshold"] >= _EXP_IS_ALL)


_EXP_IS_ALL = 17
"""From this x on, log(1 + exp(x)) is x in float32: exp(-x) is less than half a unit in the last place of 1."""
