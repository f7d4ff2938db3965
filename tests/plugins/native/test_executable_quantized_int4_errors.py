"""Steps of 4-bit weights that don't hold together are refused, and the message names the culprit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.panel_layouts import Layout
from tests.plugins.native.lowered_builder import LoweredBuilder, T, sound_program, view

Array = npt.NDArray[np.generic]
ONES = np.ones((6, 16), np.float32)
FOURS = np.ones((5, 16), np.int8)
HALF = np.ones((5, 2), np.float16)


def quantize(b: LoweredBuilder, group: int = 8, width: int = 16) -> list[Operand]:
    """values, scales and sums of ones."""
    return b.quantized(b.values(np.ones((6, width), np.float32)), group)


def product(
    b: LoweredBuilder,
    weight: Array = FOURS,
    scales: tuple[Array, ...] = (HALF,),
    dtype: Dtype = "i4",
    layout: Layout = "panel32x8",
    groups: tuple[int, int] = (8, 8),
    width: int = 16,
    **attributes: bool,
) -> None:
    operands = [*quantize(b, groups[1], width), b.weight(weight, layout, dtype)]
    operands += [b.weight(s, "panel32") for s in scales]
    step = {"weight_group": groups[0], "activation_group": groups[1], **attributes}
    b.step("quantized_linear", operands, [b.buffer(T, 5)], **step)


def offsets_not_announced(b: LoweredBuilder) -> None:
    product(b, scales=(HALF, HALF), dtype="u4")


def no_offsets(b: LoweredBuilder) -> None:
    product(b, dtype="u4", has_offsets=True)


def offsets_of_i4(b: LoweredBuilder) -> None:
    product(b, scales=(HALF, HALF), has_offsets=True)


def offsets_of_i8(b: LoweredBuilder) -> None:
    product(b, scales=(HALF, HALF), dtype="i8", layout="panel32x4", has_offsets=True)


def offsets_in_f32(b: LoweredBuilder) -> None:
    product(b, scales=(HALF, HALF.astype(np.float32)), dtype="u4", has_offsets=True)


def too_few_offsets(b: LoweredBuilder) -> None:
    product(b, scales=(HALF, HALF[:, :1]), dtype="u4", has_offsets=True)


def too_few_scales(b: LoweredBuilder) -> None:
    product(b, scales=(HALF[:, :1],))


def no_groups(b: LoweredBuilder) -> None:
    product(b, scales=(HALF[:, :1],), groups=(0, 0))


def groups_of_four(b: LoweredBuilder) -> None:
    product(b, scales=(np.ones((5, 4), np.float16),), groups=(4, 4))


def group_that_does_not_divide(b: LoweredBuilder) -> None:
    product(b, weight=np.ones((5, 20), np.int8), scales=(np.ones((5, 3), np.float16),), width=20)


def weights_alone_in_groups(b: LoweredBuilder) -> None:
    product(b, groups=(8, 0))


def activations_alone_in_groups(b: LoweredBuilder) -> None:
    product(b, scales=(HALF[:, :1],), groups=(0, 8))


def other_depth(b: LoweredBuilder) -> None:
    product(b, weight=FOURS[:, :8].copy())


def wrong_flag(b: LoweredBuilder) -> None:
    product(b, has_offsets=8)


def in_a_linear_of_floats(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES), b.weight(FOURS, "panel32x8", "i4")], [b.buffer(T, 5)])


def in_an_embedding_of_floats(b: LoweredBuilder) -> None:
    b.step("embedding", [b.input("ids"), b.weight(FOURS, "panel32x8", "i4")], [b.buffer(T, 16)])


def experts_without_rank(b: LoweredBuilder) -> None:
    starts = b.weight(np.zeros(6, np.int32))
    operands = [*quantize(b), starts, b.weight(FOURS, "panel32x8", "i4"), b.weight(HALF, "panel32")]
    b.step("quantized_grouped_linear", operands, [b.buffer(T, 5)], weight_group=8, activation_group=8)


def part_of_a_weight(b: LoweredBuilder) -> None:
    weight = view(b.weight(FOURS, "panel32x8", "i4"), (3, 16))
    operands = [*quantize(b), weight, b.weight(HALF[:3], "panel32")]
    b.step("quantized_linear", operands, [b.buffer(T, 3)], weight_group=8, activation_group=8)


def activations_of_four_bits(b: LoweredBuilder) -> None:
    values = quantize(b)[0]
    b.step("copy", [values.model_copy(update={"dtype": "i4"})], [b.buffer(T, 16)])


def embedding(b: LoweredBuilder, *scales: Array, dtype: Dtype = "i4", group: int = 8, offsets: bool) -> None:
    operands = [b.input("ids"), b.weight(FOURS, "panel32x8", dtype), *(b.weight(s, "panel32") for s in scales)]
    b.step("quantized_embedding", operands, [b.buffer(T, 16)], group_size=group, has_offsets=offsets)


def table_without_offsets(b: LoweredBuilder) -> None:
    embedding(b, HALF, dtype="u4", offsets=True)


def table_with_too_many(b: LoweredBuilder) -> None:
    embedding(b, HALF, HALF, offsets=False)


def table_with_wrong_offsets(b: LoweredBuilder) -> None:
    embedding(b, HALF, HALF[:4], dtype="u4", offsets=True)


def table_in_one_group(b: LoweredBuilder) -> None:
    embedding(b, HALF[:, :1], group=0, offsets=False)


def of_six_bits(b: LoweredBuilder, scales: Operand, group: int) -> None:
    b.step(
        "quantized_linear", [*quantize(b), b.weight(FOURS, "planes32", "i6"), scales], [b.buffer(T, 5)],
        weight_group=group, activation_group=8,
    )  # fmt: skip


def groups_of_eight(b: LoweredBuilder) -> None:
    of_six_bits(b, b.weight(HALF, "panel32"), 8)


def too_few_for_a_block(b: LoweredBuilder) -> None:
    weight, scales = b.weight(FOURS, "panel32x8", "i4"), b.weight(np.ones((5, 10), np.int8), "blocks8")
    b.step("quantized_linear", [*quantize(b), weight, scales], [b.buffer(T, 5)], weight_group=8, activation_group=8)


BAD_PROGRAMS: list[tuple[Callable[[LoweredBuilder], None], str]] = [
    (offsets_not_announced, r"operand w\d is u4, and attribute has_offsets is false: u2, u3, u4 and u5 have offsets"),
    (no_offsets, "it has 5 inputs and 1 outputs, and takes 6 to 7 and 1"),
    (offsets_of_i4, r"operand w\d is i4, and attribute has_offsets is true: weights with offsets are u2"),
    (offsets_of_i8, r"operand w\d is i8, and attribute has_offsets is true: weights with offsets are u2"),
    (offsets_in_f32, r"operand w\d must be an f16 weight of layout panel32"),
    (too_few_offsets, r"operand w\d \[5, 1\] has not the scales of w\d \[5, 16\]"),
    (too_few_scales, r"operand w\d \[5, 1\] has not the scales of w\d \[5, 16\]"),
    (no_groups, "groups of 0, where weights of 4 bits take a multiple of 8 that divides K = 16"),
    (groups_of_four, "groups of 4, where weights of 4 bits take a multiple of 8 that divides K = 16"),
    (group_that_does_not_divide, "groups of 8, where weights of 4 bits take a multiple of 8 that divides K = 20"),
    (weights_alone_in_groups, "attributes weight_group and activation_group differ, which only 8 bits may"),
    (activations_alone_in_groups, "attributes weight_group and activation_group differ, which only 8 bits may"),
    (other_depth, r"operands b\d \[T, 16\], w\d \[5, 8\] differ in K"),
    (wrong_flag, "attribute has_offsets is not a boolean"),
    (in_a_linear_of_floats, r"linear: operand w\d must be an f32 weight of layout panel32"),
    (in_an_embedding_of_floats, r"embedding: operand w\d must be an f32 or bf16 weight"),
    (experts_without_rank, r"operand w\d must be an i4 weight of layout panel32x8 and rank 3"),
    (part_of_a_weight, "a weight of layout panel32x8 can only be used whole"),
    (activations_of_four_bits, r"operand b\d: only a weight can be i4"),
    (table_without_offsets, "it has 3 inputs and 1 outputs, and takes 4 and 1"),
    (table_with_too_many, "it has 4 inputs and 1 outputs, and takes 3 and 1"),
    (table_with_wrong_offsets, r"operand w\d \[4, 2\] has not the scales of w\d \[5, 16\]"),
    (groups_of_eight, "groups of 8, where weights of 6 bits take a multiple of 16 that divides K = 16"),
    (too_few_for_a_block, r"operand w\d has blocks of 8 groups, of 2"),
    (table_in_one_group, "groups of 0, where weights of 4 bits take a multiple of 8 that divides K = 16"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_PROGRAMS, ids=lambda p: getattr(p, "__name__", ""))
def test_bad_step(spoil: Callable[[LoweredBuilder], None], message: str) -> None:
    b = sound_program()
    spoil(b)
    with pytest.raises(BundleError, match=message):
        b.build()


@pytest.mark.parametrize(
    ("dtype", "layout", "message"),
    [
        ("i4", "rows", "layout rows takes no i4"),
        ("u4", "panel32x4", "layout panel32x4 takes no u4"),
        ("i8", "panel32x8", "layout panel32x8 takes no i8"),
        ("f16", "panel32x8", "layout panel32x8 takes no f16"),
        ("i6", "panel32x8", "layout panel32x8 takes no i6"),
        ("i8", "planes32", "layout planes32 takes no i8"),
        ("f16", "blocks8", "layout blocks8 takes no f16"),
    ],
)
def test_bad_layout(dtype: str, layout: str, message: str) -> None:
    b = sound_program()
    b.weight(FOURS)
    b.uses[-1] = b.uses[-1].model_copy(update={"dtype": dtype, "layout": layout})
    with pytest.raises(BundleError, match=message):
        b.build()


@pytest.mark.parametrize("shape", [(5, 8), (33, 20), (3, 33, 16)])
def test_packed_weight_of_wrong_size(shape: tuple[int, ...]) -> None:
    b = sound_program()
    b.weight(np.ones(shape, np.int8), "panel32x8", "i4")
    b.build()
    name = b.uses[-1].name
    b.weights[name] = b.weights[name][..., :-1, :].copy()
    with pytest.raises(BundleError, match=f"weight {name}: it has .* elements of 4 bits"):
        b.build()
