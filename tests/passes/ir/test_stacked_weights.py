"""Stacks of weights and exchanged axes: values, provenance, and reading only what is asked for."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.stacked_weights import Stack, SwapAxes, pieces
from enginewright.passes.ir.weights import Cast, Concat, Slice, Source
from enginewright.runtime.shared.errors import PassError


def source(name, shape, reads=None):
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + hash(name) % 97

    def read():
        if reads is not None:
            reads.append(name)
        return value

    return Source(name, tuple(shape), torch.float32, read)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(2, 3), (5, 4)])
def test_stack(dim, shape):
    bases = tuple(source(f"expert.{i}", shape) for i in range(3))
    stack = Stack(bases, dim)
    want = torch.stack([b.evaluate() for b in bases], dim)
    assert stack.shape == tuple(want.shape) and stack.dtype == want.dtype
    assert torch.equal(stack.evaluate(), want)
    assert stack.parts(dim) == tuple(Part(f"expert.{i}", 0, shape[0]) for i in range(3))
    other = 2 if dim != 2 else 1
    assert stack.parts(other) == tuple(Part(f"expert.{i}", 0, shape[1], 1) for i in range(3))
    assert stack.describe() == f"stack(expert.0, expert.1, expert.2, {dim})"


def test_what_differs_cannot_be_stacked():
    with pytest.raises(PassError, match=r"can't stack torch.float32 \(2, 4\) with torch.float32 \(2, 3\)"):
        Stack((source("a", (2, 3)), source("b", (2, 4))))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (0, 2)])
def test_swap_axes(first, second):
    base = source("experts", (4, 3, 5))
    swapped = SwapAxes(base, first, second)
    assert swapped.shape == tuple(base.evaluate().transpose(first, second).shape)
    assert torch.equal(swapped.evaluate(), base.evaluate().transpose(first, second))
    assert swapped.parts(second) == base.parts(first)
    assert swapped.parts(first) == base.parts(second)
    with pytest.raises(PassError, match="axes 2 and 1"):
        SwapAxes(base, 2, 1)


def expressions(reads):
    gates, ups = (Stack(tuple(source(f"{n}.{i}", (3, 4), reads) for i in range(6))) for n in ("gate", "up"))
    both = Concat((gates, ups), 1)
    whole = source("whole", (6, 4, 3), reads)
    return [
        (both, True),
        (Cast(SwapAxes(both, 1, 2), torch.float64), True),
        (Slice(both, 1, 2, 5), True),
        (SwapAxes(both, 0, 1), False),
        (Concat((both, both), 0), False),
        (Slice(both, 0, 1, 3), False),
        (whole, False),
        (Stack(tuple(source(f"bias.{i}", (4,), reads) for i in range(3))), False),
    ]


@pytest.mark.parametrize("which", range(8))
def test_pieces_are_the_whole_and_read_one_member_each(which):
    reads = []
    expr, stacked = expressions(reads)[which]
    want, parts = expr.evaluate(), pieces(expr)
    assert len(parts) == (6 if stacked else 1)
    for i, piece in enumerate(parts):
        reads.clear()
        assert torch.equal(piece.evaluate(), want[i : i + 1] if stacked else want)
        if stacked:
            assert set(reads) == {f"gate.{i}", f"up.{i}"}
            assert piece.shape == (1, *expr.shape[1:])
    assert torch.equal(torch.cat([p.evaluate() for p in parts]), want)
