"""A cache of the fake values of calls. Layers repeat, and each pass infers the same calls again.

A fake value depends only on the op, its constants, and the recorded properties of its argument tensors. So equal calls
share one value. Values are never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node, Target


class Inferences:
    """A cache of the fake values of calls. Copies of a program share one cache."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Any] = {}
        self._described: dict[int, tuple[FakeTensor, object]] = {}  # by identity; the tensor is held, so that it lasts

    def get(
        self,
        target: Target,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        symbols: Collection[sympy.Symbol],
        infer: Callable[[], Any],
    ) -> Any:
        """Returns the fake value of a call: that of an earlier equal call, or the result of ``infer``.

        Args:
            target, args, kwargs: the call's op and arguments.
            symbols: the program's symbols for sizes. A value with any other symbol isn't cached.
            infer: computes the value.
        """
        try:
            key = (target, self._key(args), self._key(tuple(sorted(kwargs.items()))))
            if key in self._found:
                return self._found[key]
        except TypeError:  # an argument that has no hash, or isn't known here
            return infer()
        value = infer()
        if _consists_of(value, symbols):
            self._found[key] = value
        return value

    def _key(self, argument: object) -> object:
        if isinstance(argument, Node):
            return self._key(argument.meta["val"])
        if isinstance(argument, (tuple, list)):
            return (tuple, *(self._key(a) for a in argument))
        if isinstance(argument, FakeTensor):
            return self._description(argument)
        if isinstance(argument, torch.SymInt):
            return torch.SymInt, argument.node.expr
        if isinstance(argument, (torch.Tensor, torch.SymFloat, torch.SymBool)):
            raise TypeError("a value that its description doesn't determine")
        hash(argument)
        return type(argument), argument  # 1, 1.0 and True are equal, and promote types differently

    def _description(self, value: FakeTensor) -> object:
        entry = self._described.get(id(value))
        if entry is None:
            if value.constant is not None or value.layout != torch.strided:
                raise TypeError("a value that its description doesn't determine")
            sizes = (*value.shape, None, *value.stride(), value.storage_offset())
            description = (value.dtype, value.device, value.is_conj(), value.is_neg(), *(self._key(s) for s in sizes))
            entry = self._described[id(value)] = value, description
        return entry[1]


def _consists_of(value: object, symbols: Collection[sympy.Symbol]) -> bool:
    """Returns True if a value is a fake tensor, or a list of them, whose sizes and strides have no symbols except
    these.
    """
    if isinstance(value, (tuple, list)):
        return bool(value) and all(_consists_of(v, symbols) for v in value)
    if not isinstance(value, FakeTensor) or value.constant is not None:
        return False
    sizes = [s.node.expr for s in (*value.shape, *value.stride()) if isinstance(s, torch.SymInt)]
    return all(free in symbols for size in sizes for free in size.free_symbols)
