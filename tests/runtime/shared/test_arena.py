from __future__ import annotations

import itertools
import random

import pytest

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.arena import lifetimes, live_bytes, plan_arena
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step
from tests.passes.captured import captured
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
    small = decoder(Shape(windows=(0,) * layers, hidden=64, intermediate=192))
    LowerAttention().run(small, PassContext())
    planned = plan_arena(lower_program(small).program)
    check(planned)
    batch = (512, 4, 4)
    assert planned.arena_bytes.evaluate(*batch) <= 1.3 * live_bytes(planned, *batch)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_alive_at_once_is_a_lower_bound(seed: int, mixed: bool) -> None:
    planned = plan_arena(random_program(seed, mixed))
    lives = lifetimes(planned)
    for batch in BATCHES:
        sizes = {b.name: -(-b.size.evaluate(*batch) // 64) * 64 for b in planned.buffers}
        most = max(
            sum(size for name, size in sizes.items() if lives[name][0] <= i <= lives[name][1])
            for i in range(len(planned.steps) + 1)
        )
        assert live_bytes(planned, *batch) == most
        assert most <= planned.arena_bytes.evaluate(*batch)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("batch", [(128, 1, 1), (512, 4, 4)])
def test_no_order_of_steps_needs_much_less(family: str, batch: tuple[int, int, int]) -> None:
    """Why steps stay in the program's order: the operands of the largest step must be alive whatever comes when. The
    rest of the peak is the residual and the table of rotations, which later steps read in any order."""
    program = captured(family)
    PassManager(default_pipeline(), PassContext()).run(program)
    planned = plan_arena(lower_program(program).program)
    sizes = {b.name: b.size.evaluate(*batch) for b in planned.buffers}
    operands = [{o.name for o in (*s.inputs, *s.outputs) if o.kind == "buffer"} for s in planned.steps]
    of_one_step = max(sum(sizes[name] for name in names) for names in operands)
    assert 0.8 * live_bytes(planned, *batch) < of_one_step < live_bytes(planned, *batch)
    assert planned.arena_bytes.evaluate(*batch) < 1.05 * live_bytes(planned, *batch)
