from __future__ import annotations

import itertools
from typing import get_args

import pytest

from enginewright.runtime.bundle import weights as stored
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.lowered_program import (
    Affine,
    Buffer,
    Layout,
    LoweredProgram,
    Operand,
    Step,
    WeightUse,
)
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs, stored_bytes

T, B, R = Affine(t=1), Affine(b=1), Affine(r=1)
GROUP = CacheGroup(name="full", layers=(0,), kv_heads=2, key_head_size=16, value_head_size=24)
WINDOWED = GROUP.model_copy(update={"window": 40})


def operand(kind: str, name: str, *shape: Affine | int, dtype: str = "f32") -> Operand:
    sizes = tuple(Affine.parse(n) for n in shape)
    strides = tuple(Affine(1) for _ in shape)  # of no account but for zeros
    return Operand(kind=kind, name=name, dtype=dtype, shape=sizes, strides=strides)  # type: ignore[arg-type]


def cost(
    step: Step, sizes: StepSizes, *uses: WeightUse, group: CacheGroup = GROUP, buffers: tuple[Buffer, ...] = ()
) -> StepCost:
    program = LoweredProgram(cache_groups=(group,), weights=uses, buffers=buffers, steps=(step,), outputs={})
    (one_cost,) = step_costs(program, sizes)
    return one_cost


def use(dtype: str, layout: str, *shape: int) -> WeightUse:
    return WeightUse(name="w", dtype=dtype, shape=shape, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(40, 24), (64, 30), (3, 33, 31)])
def test_weights_are_counted_as_they_are_stored(shape: tuple[int, ...]) -> None:
    for layout in set(get_args(Layout)) - {"rows"}:
        for dtype in stored._DTYPES_OF[layout]:
            assert stored_bytes(use(dtype, layout, *shape)) == stored.stored_bytes(shape, layout, dtype), layout
    assert stored_bytes(use("f32", "rows", *shape)) == stored.stored_bytes(shape, "rows", "f32")


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 3)])
def test_a_linear(tokens: int, rows: int) -> None:
    x, w = operand("buffer", "x", R, 24), operand("weight", "w", 40, 24)
    step = Step(op="linear", inputs=(x, w), outputs=(operand("buffer", "y", R, 40),))
    step_cost = cost(step, StepSizes((tokens,), (tokens,), rows), use("f32", "panel32", 40, 24))
    assert step_cost == StepCost(
        weights=64 * 24 * 4,
        activations_read=rows * 24 * 4,
        activations_written=rows * 40 * 4,
        products={"f32": rows * 24 * 40},
    )
    assert (step_cost.memory, step_cost.multiply_adds) == (64 * 24 * 4, rows * 24 * 40)


@pytest.mark.parametrize(("dtype", "layout", "bits"), [("i8", "panel32x4", 8), ("u4", "panel32x8", 4)])
def test_a_quantized_linear_multiplies_integers(dtype: str, layout: str, bits: int) -> None:
    x = operand("buffer", "x", T, 64, dtype="i8")
    scales, sums = operand("buffer", "s", T, 2), operand("buffer", "n", T, 2, dtype="i32")
    w, ws = operand("weight", "w", 32, 64, dtype=dtype), operand("weight", "ws", 32, 2, dtype="f16")
    step = Step(op="quantized_linear", inputs=(x, scales, sums, w, ws), outputs=(operand("buffer", "y", T, 32),))
    half = WeightUse(name="ws", dtype="f16", shape=(32, 2), layout="panel32")
    step_cost = cost(step, StepSizes((3,), (9,)), use(dtype, layout, 32, 64), half)
    assert step_cost.weights == 32 * 64 * bits // 8 + 32 * 2 * 2
    assert step_cost.products == {"i8": 3 * 32 * 64}
    assert step_cost.activations_read == 3 * (64 + 2 * 4 + 2 * 4)


@pytest.mark.parametrize(("layout", "tokens"), [("rows", 1), ("panel32", 5)])
def test_an_embedding_reads_a_row_a_token(layout: str, tokens: int) -> None:
    inputs = (operand("input", "ids", T, dtype="i32"), operand("weight", "w", 1000, 24))
    step = Step(op="embedding", inputs=inputs, outputs=(operand("buffer", "y", T, 24),))
    step_cost = cost(step, StepSizes((tokens,), (tokens,)), use("f32", layout, 1000, 24))
    assert (step_cost.weights, step_cost.products) == (tokens * 24 * 4, {})


@pytest.mark.parametrize(("tokens", "experts_read"), [(1, 2), (2, 8 * (1 - 0.75**2)), (500, 8)])
def test_experts_that_nobody_chooses_are_not_read(tokens: int, experts_read: float) -> None:
    x, starts = operand("buffer", "x", Affine(t=2), 24), operand("buffer", "starts", 9, dtype="i32")
    inputs = (x, starts, operand("weight", "w", 8, 64, 24))
    step = Step(op="grouped_linear", inputs=inputs, outputs=(operand("buffer", "y", Affine(t=2), 64),))
    step_cost = cost(step, StepSizes((tokens,), (tokens,)), use("f32", "panel32", 8, 64, 24))
    assert step_cost.weights == pytest.approx(experts_read * 64 * 24 * 4, abs=1)
    assert step_cost.products == {"f32": 2 * tokens * 64 * 24}


@pytest.mark.parametrize(("tokens", "own"), [(1, 2), (3, 5), (500, 1)])
def test_some_of_the_experts_have_their_share(tokens: int, own: int) -> None:
    """A token chooses 2 of 8 experts."""
    x, starts = operand("buffer", "x", Affine(t=2), 24), operand("buffer", "starts", own + 1, dtype="i32")
    inputs = (x, starts, operand("weight", "w", own, 64, 24))
    step = Step(op="grouped_linear", inputs=inputs, outputs=(operand("buffer", "y", Affine(t=2), 64),))
    of_all = (Buffer(name="starts", size=Affine(9 * 4)),)
    step_cost = cost(step, StepSizes((tokens,), (tokens,)), use("f32", "panel32", own, 64, 24), buffers=of_all)
    assert step_cost.weights == pytest.approx(own * (1 - 0.75**tokens) * 64 * 24 * 4, abs=1)
    assert step_cost.products == {"f32": round(2 * tokens * 64 * 24 * own / 8)}


def attention(sizes: StepSizes, group: CacheGroup, **attrs: int) -> StepCost:
    inputs = (
        operand("buffer", "q", T, 4, 16),
        operand("cache", "full/0"),
        operand("input", "block_table:full", B, 0, dtype="i32"),
    )
    step = Step(op="paged_attention", inputs=inputs, outputs=(operand("buffer", "o", T, 4, 24),), attrs=attrs)
    return cost(step, sizes, group=group)


@pytest.mark.parametrize("group", [GROUP, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("sizes", [StepSizes((1, 1), (33, 7)), StepSizes((70, 0, 3), (100, 50, 3))])
def test_attention_against_a_count_of_every_key(sizes: StepSizes, group: CacheGroup) -> None:
    pairs, values, keys, table = 0, 0, 0, 0
    for length, context in zip(sizes.lengths, sizes.contexts, strict=True):
        seen = set()
        for position in range(context - length, context):
            of_one = range(max(0, position - group.window + 1) if group.window else 0, position + 1)
            pairs += len(of_one)
            seen |= set(of_one)
        values += len(seen)
        keys += 32 * len({key // 32 for key in seen})
        table += -(-context // 32)
    step_cost = attention(sizes, group)
    assert step_cost.kv_read == 2 * 4 * (keys * 16 + values * 24)
    assert step_cost.products == {"f32": pairs * 4 * (16 + 24)}
    assert step_cost.activations_read == 4 * (sum(sizes.lengths) * 4 * 16 + table)


def test_attention_that_chooses_reads_summaries_and_what_it_chose() -> None:
    group = GROUP.model_copy(update={"summaries": True})
    choice = {"first_blocks": 1, "last_blocks": 2, "best_blocks": 3, "all_below": 100}
    step_cost = attention(StepSizes((1, 2), (1000, 50)), group, **choice)
    seen = 6 * 32 + 999 % 32 + 1  # and the second request is too short to choose
    bounds = 1000 // 32 * 2 * 2 * 16
    assert step_cost.kv_read == 2 * (4 * ((7 * 32 + 64) * 16 + (seen + 50) * 24) + bounds + 0)
    assert step_cost.products == {"f32": (seen + 49 + 50) * 4 * (16 + 24)}


@pytest.mark.parametrize(("dtype", "key", "value"), [("bf16", 32, 48), ("i8", 20, 28), ("fp8", 20, 28)])
def test_caches_of_fewer_bits_and_their_scales(dtype: str, key: int, value: int) -> None:
    group = GROUP.model_copy(update={"dtype": dtype})
    step_cost = attention(StepSizes((1, 1), (33, 7)), group)
    assert step_cost.kv_read == 2 * ((64 + 32) * key + (33 + 7) * value)
    assert step_cost.products == {"bf16": (33 + 7) * 4 * (16 + 24)}
    assert cache_block_bytes(group) == 32 * 2 * (key + value)


@pytest.mark.parametrize(("lengths", "tokens"), [((1, 1, 1), 3), ((9,), 9)])
def test_keys_and_values_are_written_once(lengths: tuple[int, ...], tokens: int) -> None:
    inputs = (operand("buffer", "k", T, 2, 16), operand("buffer", "v", T, 2, 24))
    inputs += (operand("input", "slots:full", T, dtype="i32"), operand("cache", "full/0"))
    step_cost = cost(Step(op="kv_write", inputs=inputs, outputs=()), StepSizes(lengths, (20,) * len(lengths)))
    assert step_cost.kv_written == tokens * 2 * (16 + 24) * 4
    assert (step_cost.kv_read, step_cost.products, step_cost.activations_read) == (
        0,
        {},
        step_cost.kv_written + tokens * 4,
    )


@pytest.mark.parametrize(("tokens", "rows"), [(8, 2), (300, 1)])
def test_what_selects_rows_reads_no_other(tokens: int, rows: int) -> None:
    inputs = (operand("buffer", "x", T, 24), operand("input", "rows", R, dtype="i32"))
    step_cost = cost(
        Step(op="take_rows", inputs=inputs, outputs=(operand("buffer", "y", R, 24),)),
        StepSizes((tokens,), (tokens,), rows),
    )
    assert step_cost.activations_read == rows * 24 * 4 + rows * 4


def test_a_number_that_is_broadcast_is_read_once() -> None:
    constant = operand("weight", "w", T, 24).model_copy(update={"strides": (Affine(0), Affine(0))})
    step = Step(op="elementwise", inputs=(operand("buffer", "x", T, 24), constant), outputs=())
    assert cost(step, StepSizes((5,), (5,)), use("f32", "rows", 1)).weights == 4


def test_costs_add_up() -> None:
    a = StepCost(1, 2, 3, 4, 5, {"f32": 6})
    b = StepCost(10, 20, 30, 40, 50, {"f32": 60, "i8": 70})
    assert a + b == StepCost(11, 22, 33, 44, 55, {"f32": 66, "i8": 70})
    assert (a + b).total == 165
    assert (a + b).multiply_adds == 136


@pytest.mark.parametrize(("lengths", "contexts"), [((3,), (2,)), ((1, 1), (4,)), ((-1,), (4,))])
def test_sizes_that_cannot_be(lengths: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="can't have contexts"):
        StepSizes(lengths, contexts)


def test_every_step_of_a_program_has_a_cost(tiny_bundle: object) -> None:
    from enginewright.runtime.bundle.reader import Bundle

    program = Bundle.open(str(tiny_bundle)).program("cpu")
    small, large = (step_costs(program, StepSizes((n,), (n,))) for n in (1, 64))
    assert len(small) == len(program.steps)
    assert all(one.total > 0 for one in small)
    assert all(a.total <= b.total for a, b in itertools.zip_longest(small, large))
