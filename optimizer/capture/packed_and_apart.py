"""Tests if an op without a rule treats tokens independently: its result for two packed sequences must be the results
for each.

The arguments are random, in float64; constants and sizes are those of the op's call. The results of an op that uses
other tokens, or their number, differ for the first or the second sequence.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.ir.program import Program, named_symbol

_T = named_symbol("T")

_LENGTHS = ((3, 4), (5, 2))  # of the two sequences; each is tried with both
_OTHER_SIZE = 6  # of requests, rows and blocks: like no number of tokens

# Sums in another order, in float64, of numbers of about 1; what another token does is about 1 too.
_TOLERANCE = 1e-9


def same_packed_and_apart(program: Program, node: Node) -> bool:
    """Returns True if ``node``'s op gives the same results for two packed sequences as for each alone.

    Every argument and result has the token axis T at most once. False also if the op can't be run on random arguments.
    """
    generator = torch.Generator().manual_seed(0)
    return all(_same(program, node, first, second, generator) for first, second in _LENGTHS)


def _same(program: Program, node: Node, first: int, second: int, generator: torch.Generator) -> bool:
    together = {a: _random(program, a, first + second, generator) for a in node.all_input_nodes}
    parts = []
    for start, length in ((0, first), (first, second)):
        part = {a: _part(program, a, together[a], start, length) for a in node.all_input_nodes}
        parts.append(_run(node, part))
    whole = _run(node, together)
    if whole is None or any(p is None or len(p) != len(whole) for p in parts):
        return False
    axes = [_axis(program, v) for v in _values(node)]
    for i, (axis, result) in enumerate(zip(axes, whole, strict=True)):
        if axis is None:
            continue
        apart = torch.cat([p[i] for p in parts if p is not None], dim=axis)
        if apart.shape != result.shape or not torch.allclose(
            _wide(apart), _wide(result), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
        ):
            return False
    return True


def _run(node: Node, values: dict[Node, Any]) -> list[torch.Tensor] | None:
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    try:
        with torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return list(result) if isinstance(result, list | tuple) else [result]


def _random(program: Program, node: Node, tokens: int, generator: torch.Generator) -> Any:
    """Returns a value for an argument: floats in float64, integers small enough to be indices."""
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        return [_random_tensor(program, v, tokens, generator) for v in value]
    if isinstance(value, torch.Tensor):
        return _random_tensor(program, value, tokens, generator)
    return _size(program, value, tokens)


def _random_tensor(program: Program, value: torch.Tensor, tokens: int, generator: torch.Generator) -> torch.Tensor:
    shape = [_size(program, s, tokens) for s in value.shape]
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if value.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    if value.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=generator, dtype=value.dtype)


def _part(program: Program, node: Node, value: Any, start: int, length: int) -> Any:
    """Returns the part of an argument that belongs to one of the two sequences."""
    if isinstance(value, list):
        return [_narrow(program, v, t, start, length) for v, t in zip(node.meta["val"], value, strict=True)]
    if isinstance(value, torch.Tensor):
        return _narrow(program, node.meta["val"], value, start, length)
    return _size(program, node.meta["val"], length)


def _narrow(program: Program, like: torch.Tensor, value: torch.Tensor, start: int, length: int) -> torch.Tensor:
    axis = _axis(program, like)
    return value if axis is None else value.narrow(axis, start, length)


def _axis(program: Program, value: torch.Tensor) -> int | None:
    return next((i for i, s in enumerate(value.shape) if _T in program.expression(s).free_symbols), None)


def _size(program: Program, value: Any, tokens: int) -> Any:
    if not isinstance(value, torch.SymInt):
        return value
    expression = program.expression(value)
    known = {s: sympy.Integer(_OTHER_SIZE) for s in expression.free_symbols} | {_T: sympy.Integer(tokens)}
    return int(expression.xreplace(known))


def _values(node: Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128) if value.is_complex() else value.to(torch.float64)
