from __future__ import annotations

import itertools
import random

import pytest

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.base import PassContext
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.passes.memory.plan_arena import lifetimes, plan_arena
from enginewright.plugins.errors import PassError
from enginewright.plugins.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step
from tests.passes.small_programs import Shape, decoder

BATCHES = [(1, 1, 1), (1, 1, 0), (7, 3, 2), (64, 64, 64), (513, 2, 1), (8192, 5, 0)]


def operand(name: str, dtype: str = "f32") -> Operand:
    return Operand(kind="buffer", name=name, dtype=dtype, shape=(Affine(1),), strides=(Affine(1),))


def step(reads: list[str], writes: list[str]) -> Step:
    return Step(op="copy", inputs=tuple(map(operand, reads)), outputs=tuple(map(operand, writes)))


def program(sizes: dict[str, Affine], steps: list[Step], result: str) -> LoweredProgram:
    return LoweredProgram(
        cache_groups=(),
        weights=(),
        buffers=tuple(Buffer(name=n, size=s) for n, s in sizes.items()),
        steps=tuple(steps),
        outputs={"logits": operand(result)},
    )


def random_program(seed: int, mixed: bool) -> LoweredProgram:
    """Each step writes a buffer and reads some of the last ones."""
    rng = random.Random(seed)
    kinds = [lambda c: Affine(0, t=c), lambda c: Affine(0, r=c), lambda c: Affine(0, b=c), lambda c: Affine(c)]
    if mixed:
        kinds += [lambda c: Affine(c, t=4), lambda c: Affine(4, b=4 * c), lambda c: Affine(0, t=c, r=c)]
    sizes, steps = {}, []
    for i in range(rng.randint(3, 40)):
        sizes[f"b{i}"] = rng.choice(kinds)(4 * rng.randint(1, 500))
        reads = [f"b{j}" for j in rng.sample(range(i), min(i, rng.randint(0, 3)))]
        steps.append(step(reads, [f"b{i}"]))
    return program(sizes, steps, f"b{rng.randrange(len(sizes))}")


def check(planned: LoweredProgram) -> None:
    lives = lifetimes(planned)
    assert {b.name for b in planned.buffers} == set(lives)
    for batch in BATCHES:
        total = planned.arena_bytes.evaluate(*batch)
        at = {b.name: (b.offset.evaluate(*batch), b.size.evaluate(*batch)) for b in planned.buffers}
        for offset, size in at.values():
            assert offset % 64 == 0 and offset >= 0 and offset + size <= total
        for one, other in itertools.combinations(at, 2):
            if lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]:
                (a, a_size), (b, b_size) = at[one], at[other]
                assert a + a_size <= b or b + b_size <= a or 0 in (a_size, b_size), (one, other, batch)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_live_buffers_never_overlap(seed: int, mixed: bool) -> None:
    check(plan_arena(random_program(seed, mixed)))


def test_dead_buffers_give_their_place_to_later_ones() -> None:
    sizes = {n: Affine(0, t=640) for n in "abcd"}
    planned = plan_arena(program(sizes, [step([], ["a"]), *(step([x], [y]) for x, y in ("ab", "bc", "cd"))], "d"))
    check(planned)
    assert planned.arena_bytes == Affine(0, t=1280)


def test_a_result_keeps_its_place_to_the_end() -> None:
    sizes = {n: Affine(0, r=64) for n in "abc"}
    planned = plan_arena(program(sizes, [step([], ["a"]), step([], ["b"]), step(["b"], ["c"])], "a"))
    check(planned)
    assert planned.arena_bytes == Affine(0, r=192)


def test_a_buffer_written_in_parts_lives_from_the_first() -> None:
    sizes = {"whole": Affine(0, t=128), "x": Affine(0, t=64), "y": Affine(0, t=64)}
    steps = [step([], ["x"]), step(["x"], ["whole"]), step([], ["y"]), step(["y"], ["whole"])]
    check(plan_arena(program(sizes, steps, "whole")))


def test_coefficients_are_rounded_up_and_unused_buffers_dropped() -> None:
    planned = plan_arena(program({"a": Affine(0, t=4), "idle": Affine(0, t=999)}, [step([], ["a"])], "a"))
    assert planned.arena_bytes == Affine(0, t=64)
    assert [b.name for b in planned.buffers] == ["a"]


def test_reading_what_was_not_written_is_an_error() -> None:
    with pytest.raises(PassError, match="before it is written"):
        plan_arena(program({"a": Affine(4), "b": Affine(4)}, [step(["a"], ["b"])], "b"))
    with pytest.raises(PassError, match="nothing writes"):
        plan_arena(program({"a": Affine(4), "b": Affine(4)}, [step([], ["b"])], "a"))


@pytest.mark.parametrize("layers", [2, 6])
def test_a_decoder_needs_little_more_than_what_is_alive_at_once(layers: int) -> None:
    captured = decoder(Shape(windows=(0,) * layers, hidden=64, intermediate=192))
    LowerAttention().run(captured, PassContext())
    planned = plan_arena(lower_program(captured).program)
    check(planned)
    lives = lifetimes(planned)
    batch = (512, 4, 4)
    most = max(
        sum(b.size.evaluate(*batch) for b in planned.buffers if lives[b.name][0] <= i <= lives[b.name][1])
        for i in range(len(planned.steps))
    )
    assert planned.arena_bytes.evaluate(*batch) <= 1.3 * most
