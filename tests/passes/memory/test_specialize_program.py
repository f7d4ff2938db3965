"""A program for fixed sizes: numbers in the place of expressions, and memory that live buffers don't share."""

from __future__ import annotations

import itertools

import pytest

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.passes.memory.plan_arena import lifetimes, plan_arena
from enginewright.passes.memory.specialize_program import specialize_program
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.passes.small_programs import Shape, decoder

SIZES = [(1, 1, 1), (8, 8, 8), (40, 9, 8), (512, 65, 64)]


@pytest.fixture(scope="module", params=[(64, 192), (48, 100)])
def lowered(request: pytest.FixtureRequest) -> LoweredProgram:
    hidden, intermediate = request.param
    captured = decoder(Shape(windows=(0, 0), hidden=hidden, intermediate=intermediate))
    LowerAttention().run(captured, PassContext())
    return lower_program(captured).program


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_places_and_strides_are_numbers(lowered: LoweredProgram, sizes: tuple[int, int, int]) -> None:
    planned = plan_arena(lowered)
    fixed = specialize_program(planned, *sizes)
    assert fixed == specialize_program(lowered, *sizes) == LoweredProgram.from_json(fixed.to_json())
    assert fixed.arena_bytes.is_constant
    assert fixed.arena_bytes.constant <= planned.arena_bytes.evaluate(*sizes)
    assert all(b.size.is_constant and b.offset.is_constant for b in fixed.buffers)
    for one, other in zip(fixed.steps, lowered.steps, strict=True):
        assert (one.op, one.attrs, one.where) == (other.op, other.attrs, other.where)
        pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
        for view, original in pairs:
            assert view.shape == original.shape and view.name == original.name
            assert view.offset == original.offset.evaluate(*sizes)
            assert [s.constant for s in view.strides] == [s.evaluate(*sizes) for s in original.strides]
            assert all(s.is_constant for s in view.strides)


@pytest.mark.parametrize("sizes", SIZES)
def test_live_buffers_never_overlap(lowered: LoweredProgram, sizes: tuple[int, int, int]) -> None:
    fixed = specialize_program(lowered, *sizes)
    lives = lifetimes(fixed)
    at = {b.name: (b.offset.constant, b.size.constant) for b in fixed.buffers}
    for offset, size in at.values():
        assert offset % 64 == 0 and 0 <= offset <= offset + size <= fixed.arena_bytes.constant
    for one, other in itertools.combinations(at, 2):
        if lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]:
            (a, a_size), (b, b_size) = at[one], at[other]
            assert a + a_size <= b or b + b_size <= a or 0 in (a_size, b_size)


def test_kinds_of_sizes_share_memory(lowered: LoweredProgram) -> None:
    """Logits [R, V] are written when tokens' buffers are dead: in bytes their places can be the same."""
    any_size = plan_arena(lowered).arena_bytes.evaluate(512, 65, 64)
    assert specialize_program(lowered, 512, 65, 64).arena_bytes.constant < any_size


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_size_below_one(lowered: LoweredProgram, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="each is at least 1"):
        specialize_program(lowered, *sizes)
