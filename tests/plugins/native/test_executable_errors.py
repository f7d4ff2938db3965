"""Programs and steps that don't hold together are refused, and the message names the culprit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, RequestError
from enginewright.runtime.shared.lowered_program import Affine, Buffer, Operand
from tests.plugins.native.lowered_builder import (
    B,
    LoweredBuilder,
    R,
    T,
    aligned,
    sound_program,
    step_input,
    view,
)

ONES = np.ones((6, 8), np.float32)


def test_the_sound_program_runs() -> None:
    program = sound_program().build()
    assert program.run(step_input([[5, 0, 2]], groups=["full"], return_logits=True)).logits is not None


def unknown_op(b: LoweredBuilder) -> None:
    b.step("convolution", [b.values(ONES)], [b.buffer(T, 8)], "layers.7.conv")


def too_few_operands(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES)], [b.buffer(T, 8)])


def shapes_that_do_not_match(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES), b.weight(np.ones((5, 7), np.float32), "panel32")], [b.buffer(T, 5)])


def rows_of_tokens_and_samples(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES), b.weight(np.ones((5, 8), np.float32), "panel32")], [b.buffer(R, 5)])


def wrong_layout(b: LoweredBuilder) -> None:
    b.step("linear", [b.values(ONES), b.weight(np.ones((5, 8), np.float32))], [b.buffer(T, 5)])


def panels_as_vector(b: LoweredBuilder) -> None:
    weight = view(b.weight(np.ones((1, 8), np.float32), "panel32"), (1, 8), (0, 1))
    b.step("elementwise", [b.values(ONES), weight], [b.buffer(T, 8)], fn="add")


def part_of_panels(b: LoweredBuilder) -> None:
    weight = view(b.weight(np.ones((64, 8), np.float32), "panel32"), (32, 8))
    b.step("linear", [b.values(ONES), weight], [b.buffer(T, 32)])


def no_unit_stride(b: LoweredBuilder) -> None:
    x = view(b.values(ONES), (T, 4), (8, 2))
    b.step("rms_norm", [x], [b.buffer(T, 4)], eps=0.1, has_weight=False)


def wrong_dtype(b: LoweredBuilder) -> None:
    b.step("rms_norm", [view(b.input("ids"), (T, 1))], [b.buffer(T, 1)], eps=0.1, has_weight=False)


def missing_attribute(b: LoweredBuilder) -> None:
    b.step("rms_norm", [b.values(ONES)], [b.buffer(T, 8)], has_weight=False)


def unknown_attribute(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [b.buffer(T, 8)], flavour=1)


def attribute_of_wrong_type(b: LoweredBuilder) -> None:
    b.step("rms_norm", [b.values(ONES)], [b.buffer(T, 8)], eps="small", has_weight=False)


def unknown_function(b: LoweredBuilder) -> None:
    b.step("elementwise", [b.values(ONES)], [b.buffer(T, 8)], fn="cosh")


def integers_divided(b: LoweredBuilder) -> None:
    b.step("elementwise", [b.input("ids"), b.input("ids")], [b.buffer(T, dtype="i32")], fn="div")


def unknown_kind(b: LoweredBuilder) -> None:
    b.step("gated_activation", [b.values(ONES)], [b.buffer(T, 4)], kind="swish")


def gate_and_up_of_other_sizes(b: LoweredBuilder) -> None:
    x = b.values(ONES)
    halves = [view(x, (T, 4), (8, 1)), view(x, (T, 3), (8, 1), 4)]
    b.step("gated_activation", halves, [b.buffer(T, 4)], kind="silu")


def gate_of_both_halves(b: LoweredBuilder) -> None:
    x = b.values(ONES)
    b.step("gated_activation", [x, view(x, (T, 4), (8, 1), 4)], [b.buffer(T, 4)], kind="silu")


def rope_table_too_wide(b: LoweredBuilder) -> None:
    b.step("rope", [view(b.values(ONES), (T, 2, 4)), b.values(ONES)], [b.buffer(T, 2, 4)], interleaved=False)


def rope_table_scaled_by_infinity(b: LoweredBuilder) -> None:
    freqs = b.weight(np.ones(4, np.float32))
    b.step("rope_table", [b.input("positions"), freqs], [b.buffer(T, 8)], scale=float("inf"))


def rope_table_scaled_beyond_floats(b: LoweredBuilder) -> None:
    freqs = b.weight(np.ones(4, np.float32))
    b.step("rope_table", [b.input("positions"), freqs], [b.buffer(T, 8)], scale=1e300)


def slots_of_no_group(b: LoweredBuilder) -> None:
    x = view(b.values(ONES), (T, 2, 4))
    b.step("kv_write", [x, x, b.input("slots:sliding"), b.cache("full/0")], [])


def no_such_layer(b: LoweredBuilder) -> None:
    x = view(b.values(ONES), (T, 2, 4))
    b.step("kv_write", [x, x, b.input("slots:full"), b.cache("full/1")], [])


def heads_that_do_not_fit(b: LoweredBuilder) -> None:
    x = view(b.values(ONES), (T, 1, 8))
    b.step("kv_write", [x, x, b.input("slots:full"), b.cache("full/0")], [])


def write_with_ends(b: LoweredBuilder, cache: str, ends: str, **attrs: int) -> None:
    for name, dtype in (("few", "k4v4"), ("few-ends", "k8v8")):
        b.group(name, [0], 2, 4, 4)
        b.groups[-1] = b.groups[-1].model_copy(update={"dtype": dtype})
    x = view(b.values(ONES), (T, 2, 4))
    inputs = [x, x, x, b.buffer(T, 4), b.input(f"slots:{cache}"), b.cache(f"{cache}/0"), b.cache(f"{ends}/0")]
    inputs.append(b.input(f"slots:{ends}"))
    b.step("rope_kv_write", inputs, [b.buffer(T, 2, 4)], interleaved=False, has_ends=True, **attrs)


def ends_of_floats(b: LoweredBuilder) -> None:
    write_with_ends(b, "few", "full")


def ends_of_a_cache_of_floats(b: LoweredBuilder) -> None:
    write_with_ends(b, "full", "few-ends")


def ends_that_ranks_divide(b: LoweredBuilder) -> None:
    write_with_ends(b, "few", "few-ends", ranks=2, rank=0)


def attend(b: LoweredBuilder, heads: int, **attrs: int) -> None:
    x = view(b.weight(np.ones((6, 4 * heads), np.float32)), (T, heads, 4))
    tables = [b.input(name) for name in ("block_table:full", "q_start", "kv_len")]
    out = b.buffer(T, heads, 4)
    b.step("paged_attention", [x, b.cache("full/0"), *tables], [out], scale=1.0, window=0, softcap=0.0, **attrs)


def heads_that_do_not_divide(b: LoweredBuilder) -> None:
    attend(b, 3)


def heads_behind_the_last_kv_head(b: LoweredBuilder) -> None:
    attend(b, 4, group=2, first_head=1)


def first_head_of_the_next_group(b: LoweredBuilder) -> None:
    attend(b, 2, group=2, first_head=2)


def groups_without_heads(b: LoweredBuilder) -> None:
    attend(b, 2, group=0)


def write_to_weight(b: LoweredBuilder) -> None:
    b.step("copy", [b.weight(ONES)], [b.weight(ONES)])


def rank_five(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(np.ones((6, 1, 1, 1, 8), np.float32))], [b.buffer(T, 1, 1, 1, 8)])


def part_of_input(b: LoweredBuilder) -> None:
    b.step("copy", [view(b.input("kv_len"), (T,))], [b.buffer(T, dtype="i32")])


def rows_from_elsewhere(b: LoweredBuilder) -> None:
    b.step("take_rows", [b.values(ONES), b.input("ids")], [b.buffer(R, 8)])


def block_table_as_data(b: LoweredBuilder) -> None:
    table = view(b.input("block_table:full"), (B, 1 << 20))  # the shape is not the table's, which steps choose
    b.step("copy", [table], [b.buffer(B, 1 << 20, dtype="i32")])


def result_without_places(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [view(b.buffer(T, 8), (T, 8), (0, 1))])


def table_with_gaps(b: LoweredBuilder) -> None:
    table = view(b.weight(np.ones((6, 8), np.float32)), (6, 8), (0, 1))
    b.step("embedding", [b.input("ids"), table], [b.buffer(T, 8)])


def reduced_over_tokens(b: LoweredBuilder) -> None:
    x = view(b.values(np.ones((6, 1), np.float32)), (1, T))
    b.step("reduce", [x], [b.buffer(1, 1)], kind="sum")


def reduced_over_nothing(b: LoweredBuilder) -> None:
    b.step("reduce", [view(b.values(ONES), (T, 0), (8, 1))], [b.buffer(T, 1)], kind="max")


def size_beyond_64_bits(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [view(b.buffer(T, 8), (T, 1 << 70))])


BAD_PROGRAMS: list[tuple[Callable[[LoweredBuilder], None], str]] = [
    (unknown_op, r"step 5 convolution \(layers.7.conv\): the cpu target has no such op"),
    (too_few_operands, "step 5 linear: it has 1 inputs and 1 outputs, and takes 2 to 4 and 1"),
    (shapes_that_do_not_match, r"step 5 linear: operands b\d \[T, 8\], w2 \[5, 7\] don't give"),
    (rows_of_tokens_and_samples, r"step 5 linear: operands .* don't give b\d \[R, 5\]"),
    (wrong_layout, "step 5 linear: operand w2 must be an f32 weight of layout panel32"),
    (panels_as_vector, "step 5 elementwise: operand w1 must have layout rows"),
    (part_of_panels, "operand w1: a weight of layout panel32 can only be used whole"),
    (no_unit_stride, r"operand b\d has no unit inner stride"),
    (wrong_dtype, "operand ids: it is not the whole step input"),
    (missing_attribute, "step 5 rms_norm: attribute eps is missing"),
    (unknown_attribute, "step 5 copy: it has no attribute flavour"),
    (attribute_of_wrong_type, "attribute eps is not a number"),
    (unknown_function, "attribute fn: no function cosh"),
    (integers_divided, "function div has no i32 form"),
    (unknown_kind, "attribute kind: no activation swish"),
    (gate_and_up_of_other_sizes, "differ in shape"),
    (gate_of_both_halves, r"operand b\d \[T, 8\] doesn't give"),
    (rope_table_too_wide, "doesn't rotate"),
    (rope_table_scaled_by_infinity, "rope_table: attribute scale is not finite"),
    (rope_table_scaled_beyond_floats, "rope_table: attribute scale is not finite"),
    (slots_of_no_group, "there is no input slots:sliding"),
    (no_such_layer, "there is no cache full/1"),
    (heads_that_do_not_fit, "doesn't fit cache group full"),
    (ends_of_floats, "cache group full of ends doesn't fit cache group few"),
    (ends_of_a_cache_of_floats, "cache group few-ends of ends doesn't fit cache group full"),
    (ends_that_ranks_divide, "attribute ranks: a second cache isn't divided among ranks"),
    (heads_that_do_not_divide, r"operand w\d \[T, 3, 4\] doesn't fit cache group full"),
    (heads_behind_the_last_kv_head, "from head 1 in groups of 2 meets more than the 2 kv heads of cache group full"),
    (first_head_of_the_next_group, r"attribute first_head = 2 is not in \[0, 1\]"),
    (groups_without_heads, "attribute group = 0 is not in "),
    (write_to_weight, "an output must be a buffer"),
    (rank_five, "its rank is not in 1 .. 4"),
    (part_of_input, "it is not the whole step input, of shape"),
    (rows_from_elsewhere, "operand ids must be the step input rows"),
    (block_table_as_data, "operand block_table:full is a block table, which only attention reads"),
    (result_without_places, r"operand b\d: an output has a place for every element, so no stride of 0"),
    (table_with_gaps, "operand w1 must be a whole weight"),
    (reduced_over_tokens, r"operand b\d \[1, T\] is not reduced over a constant size"),
    (reduced_over_nothing, r"operand b\d \[T, 0\] is not reduced over a constant size"),
    (size_beyond_64_bits, "a coefficient isn't an integer of 64 bits"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_PROGRAMS, ids=lambda p: getattr(p, "__name__", ""))
def test_bad_step(spoil: Callable[[LoweredBuilder], None], message: str) -> None:
    b = sound_program()
    spoil(b)
    with pytest.raises(BundleError, match=message):
        b.build()


def test_misaligned_weight() -> None:
    b = sound_program()
    b.weights["w0"] = aligned(b.weights["w0"], offset=4)
    with pytest.raises(BundleError, match="weight w0: its memory is not aligned to 64 bytes"):
        b.build()


def test_weight_of_wrong_size() -> None:
    b = sound_program()
    b.weights["w0"] = aligned(b.weights["w0"][:-1])
    with pytest.raises(BundleError, match=r"weight w0: it has 160 bytes, where .* take 48 elements"):
        b.build()


def test_weight_with_holes() -> None:
    b = sound_program()
    b.weights["w0"] = aligned(np.ones((6, 16), np.float32))[:, ::2]
    with pytest.raises(BundleError, match="weight w0: its memory is not contiguous"):
        b.build()


def test_missing_weight() -> None:
    b = sound_program()
    del b.weights["w0"]
    with pytest.raises(BundleError, match="weight w0 is missing"):
        b.build()


def test_unplanned_buffer() -> None:
    b = sound_program()
    b.buffers[0] = Buffer(name="b0", size=4)
    with pytest.raises(BundleError, match="buffer b0 has no offset"):
        b.build()


def test_cache_of_a_kind_we_lack() -> None:
    b = sound_program()
    b.groups[0] = b.groups[0].model_copy(update={"dtype": "int3"})
    with pytest.raises(BundleError, match="cache group full: dtype int3 is not one of f32, bf16, i8, fp8"):
        b.build()
    b.groups[0] = b.groups[0].model_copy(update={"dtype": "f32", "block_size": 16})
    with pytest.raises(BundleError, match="cache group full: blocks of 16 slots"):
        b.build()


def test_sizes_that_no_machine_has() -> None:
    b = sound_program()
    b.groups[0] = b.groups[0].model_copy(update={"kv_heads": 1 << 70})
    with pytest.raises(BundleError, match="cache group full: 1180591620717411303424 is not in"):
        b.build()
    b = sound_program()
    b.uses[0] = b.uses[0].model_copy(update={"shape": (1 << 70, 8)})
    with pytest.raises(BundleError, match="weight w0: 1180591620717411303424 is not in"):
        b.build()


def test_caches_whose_bytes_overflow_64_bits() -> None:
    b = sound_program()
    b.group("wide", [0], 1 << 20, 1 << 20, 1 << 20)
    with pytest.raises(CapacityError, match="no memory for the KV caches"):
        b.build(blocks={"full": 1, "wide": 1 << 17})  # 2^64 bytes


@pytest.mark.parametrize("blocks", [{"full": 0}, {"full": 1 << 40}, {}, {"full": 2, "other": 2}])
def test_bad_number_of_blocks(blocks: dict[str, int]) -> None:
    with pytest.raises(EnginewrightError, match="blocks"):
        sound_program().build(blocks=blocks)


def test_bad_threads_and_isa() -> None:
    for threads in (-1, 1025, 1 << 40):
        with pytest.raises(EnginewrightError, match=f"threads = {threads} is not in"):
            sound_program().build(threads=threads)
    with pytest.raises(EnginewrightError, match="isa sse9 is not available"):
        sound_program().build(isa="sse9")


def operand_outside_of_its_buffer(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [view(b.buffer(T, 7), (T, 8), (8, 1))])


def operand_outside_for_many_tokens(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [view(b.buffer(16), (T, 8), (8, 1))])


def slice_that_sticks_out(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [view(b.buffer(T, 16), (T, 8), (16, 1), offset=9)])


def buffer_outside_of_the_arena(b: LoweredBuilder) -> None:
    out = b.buffer(T, 8)
    b.buffers[-1] = Buffer(name=out.name, size=Affine(t=32), offset=b.arena)
    b.step("copy", [b.values(ONES)], [out])
    b.arena = b.arena - Affine(t=64)


def negative_stride(b: LoweredBuilder) -> None:
    b.step("copy", [b.values(ONES)], [view(b.buffer(T, 8), (T, 8), (-8, 1), offset=Affine(-8, t=8))])


def buffers_that_share_memory(b: LoweredBuilder) -> None:
    out = b.buffer(T, 8)
    x = b.values(ONES)
    first = next(buffer for buffer in b.buffers if buffer.name == x.name)
    b.buffers = [Buffer(name=o.name, size=o.size, offset=first.offset) if o.name == out.name else o for o in b.buffers]
    b.step("copy", [view(x, (8, T), (1, 8))], [view(out, (8, T))])


BAD_PLACES: list[tuple[Callable[[LoweredBuilder], None], str]] = [
    (operand_outside_of_its_buffer, r"step 5 copy: operand b\d ends at element 24 of a buffer of 21"),
    (operand_outside_for_many_tokens, "ends at element 24 of a buffer of 16"),
    (slice_that_sticks_out, "ends at element 49 of a buffer of 48"),
    (buffer_outside_of_the_arena, "which is outside of the arena"),
    (negative_stride, "has a stride that is negative"),
    (buffers_that_share_memory, r"operand b\d overlaps operand b\d in the arena"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_PLACES, ids=lambda p: getattr(p, "__name__", ""))
def test_bad_place(spoil: Callable[[LoweredBuilder], None], message: str) -> None:
    b = sound_program()
    spoil(b)
    with pytest.raises(RequestError, match=message):
        b.build().run(step_input([[0, 1, 2]], groups=["full"]))


def test_in_place_is_allowed_where_the_kernel_can() -> None:
    b = sound_program()
    x = b.values(ONES)
    out = b.buffer(T, 8)
    first = next(buffer for buffer in b.buffers if buffer.name == x.name)
    b.buffers[-1] = Buffer(name=out.name, size=first.size, offset=first.offset)
    step = b.step("elementwise", [x], [out], fn="add", scalar=1.0)
    np.testing.assert_array_equal(b.run(step, 3)[0], np.full((3, 8), 2, np.float32))


def test_programs_without_logits() -> None:
    b = sound_program()
    program = b.program().model_copy(update={"outputs": {}})
    with pytest.raises(BundleError, match="the program has no output"):
        CpuProgram(program, b.weights, blocks={"full": 1})
    wrong: Operand = b.buffer(T, 8)
    program = b.program().model_copy(update={"outputs": {"logits": wrong}, "arena_bytes": b.arena})
    with pytest.raises(BundleError, match=r"output logits: it is not an f32 buffer of shape \[R, V\]"):
        CpuProgram(program, b.weights, blocks={"full": 1})
