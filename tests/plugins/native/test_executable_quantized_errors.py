"""Steps of bf16, int8 and experts that don't hold together are refused, and the message names the culprit."""

from __future__ import annotations

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.lowered_program import (
    FORMAT_VERSION,
    OLDEST_FORMAT_VERSION,
    Buffer,
    LoweredProgram,
    Operand,
)
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T, sound_program, step_input, view

Array = npt.NDArray[np.generic]
ONES = np.ones((6, 8), np.float32)
BYTES = np.ones((5, 8), np.int8)
NARROW = ONES.astype(ml_dtypes.bfloat16)
HALF = np.ones((5, 2), np.float16)


def quantize(b: LoweredBuilder, group: int = 4, width: int = 8) -> list[Operand]:
    """values, scales and sums of ones."""
    return b.quantized(b.values(np.ones((6, width), np.float32)), group)


def product(
    b: LoweredBuilder,
    weight: Array = BYTES,
    scales: Array = HALF,
    layouts: tuple[str, str] = ("panel32x4", "panel32"),
    groups: tuple[int, int] = (4, 4),
    activations: list[Operand] | None = None,
) -> None:
    operands = [*(activations or quantize(b)), b.weight(weight, layouts[0]), b.weight(scales, layouts[1])]
    b.step("quantized_linear", operands, [b.buffer(T, 5)], weight_group=groups[0], activation_group=groups[1])


def indices(b: LoweredBuilder, *shape: int) -> Operand:
    return b.weight(np.zeros(shape, np.int32))


def experts(b: LoweredBuilder, weight: Array, layout: str, starts: int, bias: Array | None = None) -> None:
    operands = [b.values(ONES), indices(b, starts), b.weight(weight, layout)]
    b.step("grouped_linear", operands + ([b.weight(bias)] if bias is not None else []), [b.buffer(T, 5)])


def narrow(b: LoweredBuilder, width: int = 8, padding: int = 2) -> Operand:
    out = b.buffer(T, width, dtype="bf16", padding=padding)
    b.step("cast_bf16", [b.values(np.ones((6, width), np.float32))], [out])
    return out


def odd_stride(b: LoweredBuilder) -> None:
    narrow(b, 7, padding=1)


def stride_of_no_row(b: LoweredBuilder) -> None:
    values = quantize(b)
    product(b, activations=[view(values[0], (T, 8), (4, 1)), *values[1:]])


def stride_that_changes(b: LoweredBuilder) -> None:
    values = quantize(b)
    product(b, activations=[view(values[0], (T, 8), (T * 4, 1)), *values[1:]])


def padding_without_places(b: LoweredBuilder) -> None:
    out = b.buffer(T, 1, dtype="bf16", padding=2)
    b.step("cast_bf16", [b.values(ONES[:, :1])], [view(out, (T, 1), (2, 0))])


def mixed_formats(b: LoweredBuilder) -> None:
    b.step("linear", [narrow(b), b.weight(ONES, "panel32")], [b.buffer(T, 6)])


def float_by_pairs(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES), b.weight(NARROW, "panel32x2")], [b.buffer(T, 6)])


def bf16_result(b: LoweredBuilder) -> None:
    b.step("linear", [narrow(b), b.weight(NARROW, "panel32x2")], [b.buffer(T, 6, dtype="bf16")])


def bf16_copied(b: LoweredBuilder) -> None:
    b.step("copy", [narrow(b)], [b.buffer(T, 8, dtype="bf16")])


def bf16_added(b: LoweredBuilder) -> None:
    x = narrow(b)
    b.step("elementwise", [x, x], [b.buffer(T, 8)], fn="add")


def bytes_as_rows(b: LoweredBuilder) -> None:
    product(b, layouts=("rows", "panel32"))


def scales_as_rows(b: LoweredBuilder) -> None:
    product(b, layouts=("panel32x4", "rows"))


def scales_in_f32(b: LoweredBuilder) -> None:
    product(b, scales=HALF.astype(np.float32))


def too_few_scales(b: LoweredBuilder) -> None:
    product(b, scales=HALF[:, :1])


def groups_that_differ(b: LoweredBuilder) -> None:
    product(b, groups=(4, 8))


def group_of_six(b: LoweredBuilder) -> None:
    product(b, groups=(6, 6))


def group_below_zero(b: LoweredBuilder) -> None:
    product(b, groups=(-4, -4))


def activations_in_one_group(b: LoweredBuilder) -> None:
    product(b, activations=quantize(b, 0))


def other_depth(b: LoweredBuilder) -> None:
    product(b, weight=np.ones((5, 7), np.int8))


def sums_in_f32(b: LoweredBuilder) -> None:
    values, scales, _ = quantize(b)
    product(b, activations=[values, scales, scales])


def group_without_end(b: LoweredBuilder) -> None:
    quantize(b, 0, (1 << 16) + 4)


def scales_of_another_table(b: LoweredBuilder) -> None:
    operands = [b.input("ids"), b.weight(BYTES, "panel32x4"), b.weight(np.ones((6, 2), np.float16), "panel32")]
    b.step("quantized_embedding", operands, [b.buffer(T, 8)], group_size=4)


def table_of_pairs_in_quads(b: LoweredBuilder) -> None:
    b.step("embedding", [b.input("ids"), b.weight(BYTES, "panel32x4")], [b.buffer(T, 8)])


def experts_without_rank(b: LoweredBuilder) -> None:
    experts(b, np.ones((5, 8), np.float32), "panel32", 6)


def starts_of_other_experts(b: LoweredBuilder) -> None:
    experts(b, np.ones((3, 5, 8), np.float32), "panel32", 3)


def bias_of_one_expert(b: LoweredBuilder) -> None:
    experts(b, np.ones((3, 5, 8), np.float32), "panel32", 4, np.ones(5, np.float32))


def experts_in_plain_linear(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES), b.weight(np.ones((1, 5, 8), np.float32), "panel32")], [b.buffer(T, 5)])


def part_of_the_experts(b: LoweredBuilder) -> None:
    weight = view(b.weight(np.ones((3, 5, 8), np.float32), "panel32"), (2, 5, 8))
    b.step("grouped_linear", [b.values(ONES), indices(b, 3), weight], [b.buffer(T, 5)])


def more_than_there_are(b: LoweredBuilder) -> None:
    b.step("top_k", [b.values(ONES)], [b.buffer(T, 9), b.buffer(T, 9, dtype="i32")], k=9)


def none_at_all(b: LoweredBuilder) -> None:
    b.step("top_k", [b.values(ONES)], [b.buffer(T, 1), b.buffer(T, 1, dtype="i32")], k=0)


def indices_of_other_rows(b: LoweredBuilder) -> None:
    b.step("gather", [b.values(ONES), indices(b, 6, 2)], [b.buffer(6, 2)])


def gathered_over_tokens(b: LoweredBuilder) -> None:
    b.step("gather", [view(b.values(ONES), (8, T), (1, 1)), indices(b, 8, 2)], [b.buffer(8, 2)])


def indices_in_f32(b: LoweredBuilder) -> None:
    x = b.values(ONES)
    b.step("scatter", [x, x], [b.buffer(T, 8)], value=1.0)


def order_of_other_places(b: LoweredBuilder) -> None:
    b.step("combine_experts", [b.values(ONES), indices(b, 6), b.values(ONES[:, :1])], [b.buffer(T, 8)])


def places_of_one_choice(b: LoweredBuilder) -> None:
    ids = b.buffer(T, 2, dtype="i32")
    b.step("copy", [view(b.input("ids"), (T,))], [view(ids, (T,), (2,))])
    outputs = [b.buffer(T, dtype="i32"), b.buffer(T, dtype="i32"), b.buffer(4, dtype="i32")]
    b.step("route_experts", [ids], outputs, experts=3)


def no_experts(b: LoweredBuilder) -> None:
    ids = b.buffer(T, 1, dtype="i32")
    b.step("copy", [b.input("ids")], [view(ids, (T,))])
    outputs = [b.buffer(T, dtype="i32"), b.buffer(T, dtype="i32"), b.buffer(1, dtype="i32")]
    b.step("route_experts", [ids], outputs, experts=0)


def rows_in_f32(b: LoweredBuilder) -> None:
    b.step("take_rows", [b.values(ONES), view(b.values(ONES[:, :1]), (T,))], [b.buffer(T, 8)])


def floats_compared_as_integers(b: LoweredBuilder) -> None:
    b.step("elementwise", [b.values(ONES)], [b.buffer(T, 8, dtype="i32")], fn="lt", scalar=1)


def logic_of_integers(b: LoweredBuilder) -> None:
    b.step("elementwise", [b.input("ids"), b.input("ids")], [b.buffer(T)], fn="logical_and")


def slopes_of_other_heads(b: LoweredBuilder) -> None:
    x = view(b.values(ONES), (T, 2, 4))
    tables = [b.input(name) for name in ("block_table:full", "q_start", "kv_len")]
    b.step(
        "paged_attention",
        [x, b.cache("full/0"), *tables, b.weight(np.ones(3, np.float32))],
        [b.buffer(T, 2, 4)],
        scale=1.0,
        window=0,
        softcap=0.0,
        has_slopes=True,
    )


BAD_PROGRAMS: list[tuple[Callable[[LoweredBuilder], None], str]] = [
    (odd_stride, r"cast_bf16: the row stride of operand b\d \[T, 7\] is 7, not a multiple of 2"),
    (stride_of_no_row, r"quantized_linear: the row stride of operand b\d \[T, 8\] is 4, not a multiple of 4 with room"),
    (stride_that_changes, r"the row stride of operand b\d \[T, 8\] is 4\*T"),
    (padding_without_places, r"cast_bf16: operand b\d has no unit inner stride"),
    (mixed_formats, r"linear: operand w\d must be a bf16 weight of layout panel32x2"),
    (float_by_pairs, r"linear: operand w\d must be an f32 weight of layout panel32"),
    (bf16_result, r"linear: operand b\d has the wrong dtype"),
    (bf16_copied, r"copy: operand b\d is neither f32 nor i32"),
    (bf16_added, r"elementwise: operand b\d has the wrong dtype"),
    (bytes_as_rows, r"operand w\d must be an i8 weight of layout panel32x4"),
    (scales_as_rows, r"operand w\d must be an f16 weight of layout panel32"),
    (scales_in_f32, r"operand w\d must be an f16 weight of layout panel32"),
    (too_few_scales, r"operand w\d \[5, 1\] has not the scales of w\d \[5, 8\]"),
    (groups_that_differ, "attributes weight_group and activation_group differ"),
    (group_of_six, "attribute weight_group is not a multiple of 4"),
    (group_below_zero, r"attribute weight_group = -4 is not in \[0, 1048576\]"),
    (activations_in_one_group, r"operand b\d \[T, 1\] should be \[T, 2\]"),
    (other_depth, r"operands b\d \[T, 8\], w\d \[5, 7\] differ in K"),
    (sums_in_f32, r"operand b\d has the wrong dtype"),
    (group_without_end, "a group of more than 2\\^16 values"),
    (scales_of_another_table, r"operand w\d \[6, 2\] has not the scales of w\d \[5, 8\]"),
    (table_of_pairs_in_quads, r"operand w\d must be an f32 or bf16 weight of rank 2"),
    (experts_without_rank, r"operand w\d must be an f32 weight of layout panel32 and rank 3"),
    (starts_of_other_experts, r"operand w\d \[3\] should be \[4\]"),
    (bias_of_one_expert, r"operand w\d has rank 1"),
    (experts_in_plain_linear, r"operand w\d must be an f32 weight of layout panel32"),
    (part_of_the_experts, "a weight of layout panel32 can only be used whole"),
    (more_than_there_are, r"attribute k is more than operand b\d \[T, 8\] has"),
    (none_at_all, r"attribute k = 0 is not in \[1, 1024\]"),
    (indices_of_other_rows, r"operands b\d \[T, 8\] and w\d \[6, 2\] differ in their rows"),
    (gathered_over_tokens, r"size 1 of operand b\d \[8, T\] is not a constant"),
    (indices_in_f32, r"operand b\d has the wrong dtype"),
    (order_of_other_places, r"operand w\d \[6\] should be \[T\]"),
    (places_of_one_choice, r"operand b\d \[T\] should be \[2\*T\]"),
    (no_experts, r"attribute experts = 0 is not in"),
    (rows_in_f32, r"take_rows: operand b\d has the wrong dtype"),
    (floats_compared_as_integers, r"operand b\d has the wrong dtype"),
    (logic_of_integers, "function logical_and has no i32 form"),
    (slopes_of_other_heads, r"operand w\d \[3\] should be \[2\]"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_PROGRAMS, ids=lambda p: getattr(p, "__name__", ""))
def test_bad_step(spoil: Callable[[LoweredBuilder], None], message: str) -> None:
    b = sound_program()
    spoil(b)
    with pytest.raises(BundleError, match=message):
        b.build()


@pytest.mark.parametrize(
    ("array", "layout", "message"),
    [
        (ONES, "panel32x2", "layout panel32x2 takes no f32"),
        (ONES.astype(np.int8), "panel32", "layout panel32 takes no i8"),
        (NARROW, "panel32x4", "layout panel32x4 takes no bf16"),
        (ONES[0], "panel32", "layout panel32 takes rank 2 or 3"),
    ],
)
def test_bad_layout(array: Array, layout: str, message: str) -> None:
    b = sound_program()
    b.weight(array)
    b.uses[-1] = b.uses[-1].model_copy(update={"layout": layout})
    with pytest.raises(BundleError, match=message):
        b.build()


@pytest.mark.parametrize("shape", [(5, 8), (3, 33, 5)])
def test_packed_weight_of_wrong_size(shape: tuple[int, ...]) -> None:
    b = sound_program()
    b.weight(np.ones(shape, np.int8), "panel32x4")
    name = b.uses[-1].name
    b.weights[name] = b.weights[name][..., :-1, :].copy()
    with pytest.raises(BundleError, match=f"weight {name}: it has .* elements of 1"):
        b.build()


def padding_outside_of_its_buffer(b: LoweredBuilder) -> None:
    narrow(b, 7)
    end = b.buffers[-2]
    b.buffers[-2] = Buffer(name=end.name, size=end.size - 2, offset=end.offset)  # the last row has 7, not 8, places


def weights_as_values_without_padding(b: LoweredBuilder) -> None:
    values = view(b.weight(np.ones((1, 6), np.int8)), (1, 6), (8, 1))
    operands = [values, b.weight(np.ones((1, 1), np.float32)), b.weight(np.ones((1, 1), np.int32))]
    operands += [b.weight(BYTES[:, :6], "panel32x4"), b.weight(HALF[:, :1], "panel32")]
    b.step("quantized_linear", operands, [b.buffer(1, 5)], weight_group=0, activation_group=0)


def misplaced_floats(b: LoweredBuilder) -> None:
    out = b.buffer(T, 8)
    b.buffers[-1] = Buffer(name=out.name, size=b.buffers[-1].size, offset=b.buffers[-1].offset + 2)
    b.step("copy", [b.values(ONES)], [out])


def results_over_indices(b: LoweredBuilder) -> None:
    places = b.buffer(T, 8, dtype="i32")
    b.step("top_k", [b.values(ONES)], [b.buffer(T, 8), places], k=8)
    b.step("gather", [places, places], [places])


def rows_out_of_range(b: LoweredBuilder) -> None:
    b.step("take_rows", [view(b.values(ONES), (2, 8)), b.weight(np.array([0, 2], np.int32))], [b.buffer(2, 8)])


BAD_PLACES: list[tuple[Callable[[LoweredBuilder], None], str]] = [
    (padding_outside_of_its_buffer, r"cast_bf16: operand b\d ends at element 24 of a buffer of 23"),
    (weights_as_values_without_padding, r"quantized_linear: operand w\d ends at element 8 of a weight of 6"),
    (misplaced_floats, "which is outside of the arena"),
    (results_over_indices, r"gather: operand b\d overlaps operand b\d in the arena"),
    (rows_out_of_range, r"take_rows: rows\[1\] = 2 is not in \[0, 2\)"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_PLACES, ids=lambda p: getattr(p, "__name__", ""))
def test_bad_place(spoil: Callable[[LoweredBuilder], None], message: str) -> None:
    b = sound_program()
    spoil(b)
    with pytest.raises(RequestError, match=message):
        b.build().run(step_input([[0, 1, 2]], groups=["full"]))


@pytest.mark.parametrize(
    ("version", "message"),
    [(OLDEST_FORMAT_VERSION - 1, "4 is unsupported"), (FORMAT_VERSION + 1, "is 8, and .* reads up to 7")],
)
def test_programs_of_other_versions_are_not_read(version: int, message: str) -> None:
    fields = json.loads(sound_program().program().to_json())
    with pytest.raises(BundleError, match=f"format_version {message}"):
        LoweredProgram.from_json(json.dumps(fields | {"format_version": version}))


def test_rows_that_a_step_computes_need_not_be_samples() -> None:
    b = sound_program()
    step = b.step("take_rows", [b.values(ONES), b.weight(np.array([1, 1], np.int32))], [b.buffer(2, 8)])
    np.testing.assert_array_equal(b.run(step, 3)[0], ONES[:2])
    b.step("take_rows", [b.values(ONES), b.input("rows")], [b.buffer(R, 8)])
    b.build().run(step_input([[0, 1, 2]], groups=["full"]))
