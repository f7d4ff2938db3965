"""Quantized weights against their definition; what is read, kept and counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

from enginewright.passes.formats.round_to_4_bits import round_symmetric, round_with_offsets
from enginewright.passes.ir.chosen_rows import Chosen
from enginewright.passes.ir.prequantized import CodeFormat, Codes, Prequantized, decode
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.quantized import QuantizationCounts, formats_of_rows, quantized, round_matrix, round_rows
from enginewright.passes.ir.stacked_weights import Stack
from enginewright.passes.ir.weights import Cast, Concat, Slice, Source, Transpose, WeightExpr
from enginewright.runtime.shared.errors import PassError, SourceError

INT4, SHIFTED = CodeFormat(4, 32), CodeFormat(4, 32, offsets=True)


def evaluated(expr: WeightExpr, code_format: CodeFormat) -> Codes:
    values, scales, offsets = quantized(expr, code_format)
    return Codes(values.evaluate(), scales.evaluate(), None if offsets is None else offsets.evaluate())


def tensors(codes: Codes) -> list[torch.Tensor]:
    return [t for t in (codes.values, codes.scales, codes.offsets) if t is not None]


def same(got: Codes, want: Codes, expert: int | None = None) -> None:
    for a, b in zip(tensors(got), tensors(want), strict=True):
        one = a if expert is None else a[expert]
        assert one.dtype == b.dtype
        assert torch.equal(one, b)


def source(value: torch.Tensor, name: str = "w", reads: list[str] | None = None) -> Source:
    def read() -> torch.Tensor:
        if reads is not None:
            reads.append(name)
        return value

    return Source(name, tuple(value.shape), value.dtype, read)


@pytest.mark.parametrize(("shape", "group"), [((5, 64), 32), ((33, 72), 32), ((4, 50), 0), ((3, 7, 96), 64)])
def test_values_and_scales_are_their_definition(
    shape: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginewright.passes.ir.quantized._CHUNK_ELEMENTS", 200)
    torch.manual_seed(1)
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[-1])
    values_of, scales_of, offsets = quantized(source(weight), CodeFormat(8, group))
    assert offsets is None
    values, scales = values_of.evaluate(), scales_of.evaluate()
    assert (tuple(values.shape), values.dtype) == (values_of.shape, values_of.dtype)
    assert (tuple(scales.shape), scales.dtype) == (scales_of.shape, scales_of.dtype)
    width = group or shape[-1]
    for row, v, s in zip(*(a.flatten(0, -2).numpy() for a in (weight, values, scales)), strict=True):
        for g, start in enumerate(range(0, shape[-1], width)):
            part = row[start : start + width]
            assert s[g] == np.float16(np.abs(part).max() / np.float32(127))
            want = np.clip(np.rint(part / np.float32(s[g])), -127, 127)
            np.testing.assert_array_equal(v[start : start + width], want)
    assert values_of.counts == QuantizationCounts(weight.numel(), 0, 0)


@pytest.mark.parametrize(("shape", "group"), [((5, 64), 32), ((33, 72), 32), ((4, 50), 0), ((3, 7, 96), 64)])
def test_floats_of_8_bits_are_their_definition(
    shape: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginewright.passes.ir.quantized._CHUNK_ELEMENTS", 200)
    torch.manual_seed(1)
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[-1])
    code_format = CodeFormat(8, group, kind="fp8")
    values_of, scales_of, offsets = quantized(source(weight), code_format)
    assert offsets is None
    values, scales = values_of.evaluate(), scales_of.evaluate()
    assert (tuple(values.shape), values.dtype) == (values_of.shape, values_of.dtype) == (shape, torch.float8_e4m3fn)
    assert (tuple(scales.shape), scales.dtype) == (scales_of.shape, scales_of.dtype)
    width = group or shape[-1]
    # The 8-bit floats of another implementation, which rounds to the nearest, ties to even.
    floats = values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    for row, v, s in zip(*(a.reshape(-1, a.shape[-1]) for a in (weight.numpy(), floats, scales.numpy())), strict=True):
        for g, start in enumerate(range(0, shape[-1], width)):
            part = row[start : start + width]
            assert s[g] == np.float16(np.abs(part).max() / np.float32(448))
            want = np.clip(part / np.float32(s[g]), -448, 448).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(v[start : start + width], want)
    assert values_of.counts == QuantizationCounts(weight.numel(), 0, 0)
    stood_for = decode(Codes(values, scales), code_format)
    # 3 bits behind the first: half a step is 1/16 of a value, or 2^-10 of a scale below the smallest normal one.
    bound = weight.abs() / 16 + scales.float().repeat_interleave(width, -1)[..., : shape[-1]] * 2.0**-10
    assert ((stood_for - weight).abs() <= bound * 1.001).all()


def test_floats_of_8_bits_that_saturate_or_vanish() -> None:
    # In the subnormal float16 scales a rounding may be a quarter of the scale: 1.4 steps of 2^-24 become 1. Up to 464
    # the nearest is 448 all the same.
    step = 2.0**-24
    weight = torch.tensor([[448 * 1.4, -448 * 1.4, 464.0, -465.0], [1e-9 / step, 0.0, 0.0, 0.0], [0.0] * 4]) * step
    values_of, scales_of, _ = quantized(source(weight), CodeFormat(8, 0, kind="fp8"))
    values = values_of.evaluate().float()
    assert values[0].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert not values[1:].any()
    assert scales_of.evaluate()[1:].tolist() == [[0.0], [0.0]]
    assert values_of.counts == QuantizationCounts(values=12, saturated=3, vanished=1)


def test_a_weight_is_read_once_and_nothing_is_kept() -> None:
    reads: list[str] = []
    values_of, scales_of, _ = quantized(source(torch.randn(4, 64), reads=reads), CodeFormat(8, 32))
    assert values_of.counts is None
    values_of.evaluate()
    first = scales_of.evaluate()
    assert reads == ["w"]
    assert torch.equal(scales_of.evaluate(), first), "the scales alone"
    assert reads == ["w", "w"], "they were handed over, not kept"


def test_what_saturates_and_what_vanishes_is_counted() -> None:
    # In the subnormal float16 scales a rounding may be a quarter of the scale: 1.4 steps of 2^-24 become 1.
    step = 2.0**-24
    weight = torch.tensor([[127 * 1.4 * step, -127 * 1.4 * step, 1.0 * step, 0.0], [1e-9, 0.0, 0.5, 0.25], [0.0] * 4])
    values_of, scales_of, _ = quantized(source(weight), CodeFormat(8, 2))
    values, scales = values_of.evaluate(), scales_of.evaluate()
    assert values_of.counts == scales_of.counts == QuantizationCounts(values=12, saturated=2, vanished=2)
    assert values.tolist()[0][:2] == [127, -127]
    assert values[1, 0] == 0
    assert scales[1, 0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(bad: float) -> None:
    weight = torch.ones(3, 32)
    weight[1, 7] = bad
    both = Concat((source(torch.ones(2, 32), "a"), source(weight, "b")))
    floats = quantized(both, CodeFormat(8, 32, kind="fp8"))
    for expr in (*quantized(both, CodeFormat(8, 32)), *floats, *quantized(both, INT4), *quantized(both, SHIFTED)):
        if expr is None:
            continue
        with pytest.raises(SourceError, match="weight a, b: it has NaN or infinite values"):
            expr.evaluate()


def test_a_scale_that_float16_lacks_is_an_error() -> None:
    largest = 65504.0 * 127
    assert quantized(source(torch.full((2, 4), largest)), CodeFormat(8, 0))[1].evaluate().isfinite().all()
    with pytest.raises(PassError, match=r"weight w: its largest magnitude is 8\.4e\+06, too large for float16 scales"):
        quantized(source(torch.full((2, 4), 8.4e6)), CodeFormat(8, 0))[0].evaluate()
    for code_format in (INT4, SHIFTED):
        with pytest.raises(PassError, match=r"weight w: its largest magnitude is 1e\+06, too large for float16 scales"):
            quantized(source(torch.linspace(-1e6, 1e6, 64).view(2, 32)), code_format)[0].evaluate()


def test_provenance_text_and_equality() -> None:
    a, b = source(torch.ones(2, 32), "a"), source(torch.ones(3, 32), "b")
    values, scales, _ = quantized(Concat((a, b)), CodeFormat(8, 4))
    assert values.parts(0) == scales.parts(0) == (Part("a", 0, 2), Part("b", 0, 3))
    assert values.parts(1) == Concat((a, b)).parts(1)
    assert values.describe() == "int8(concat(a, b, 0), 4)"
    assert scales.describe() == "scales(concat(a, b, 0), 4)"
    assert (values, scales, None) == quantized(Concat((a, b)), CodeFormat(8, 4))
    assert values != quantized(Concat((a, b)), CodeFormat(8, 0))[0]
    shifted = quantized(a, SHIFTED)
    assert [e.describe() for e in shifted if e is not None] == ["int4(a, 32)", "scales(a, 32)", "offsets(a, 32)"]
    assert shifted[0] != quantized(a, INT4)[0]
    floats = quantized(a, CodeFormat(8, 32, kind="fp8"))
    assert floats[0].describe() == "fp8(a, 32)"
    assert floats[0] != quantized(a, CodeFormat(8, 32))[0]
    assert floats[0].parts(0) == a.parts(0)


@pytest.mark.parametrize(
    ("shape", "dtype", "code_format", "message"),
    [
        ((8,), torch.float32, CodeFormat(8, 4), r"float32 \(8,\) can't be quantized"),
        ((2, 8), torch.int64, CodeFormat(8, 4), r"int64 \(2, 8\) can't be quantized"),
        ((2, 64), torch.float32, CodeFormat(8, 32, offsets=True), r"\(2, 64\) can't be quantized to CodeFormat"),
        ((2, 512), torch.float32, CodeFormat(4, 256), r"\(2, 512\) can't be quantized to CodeFormat"),
        ((2, 192), torch.float32, CodeFormat(4, 128), r"\(2, 192\) can't be quantized to CodeFormat"),
        ((2, 20), torch.float32, CodeFormat(4, 20), r"\(2, 20\) can't be quantized to CodeFormat"),
        ((2, 64), torch.float32, CodeFormat(4, 0), r"\(2, 64\) can't be quantized to CodeFormat"),
        ((2, 40), torch.float32, CodeFormat(4, 32), r"\(2, 40\) can't be quantized to CodeFormat"),
        ((2, 192), torch.float32, CodeFormat(4, 32, scale_block=8), r"\(2, 192\) can't be quantized to CodeFormat"),
        ((2, 64), torch.float32, CodeFormat(7, 32), r"\(2, 64\) can't be quantized to CodeFormat"),
    ],
)
def test_what_can_not_be_quantized(
    shape: tuple[int, ...], dtype: torch.dtype, code_format: CodeFormat, message: str
) -> None:
    with pytest.raises(PassError, match=message):
        quantized(source(torch.ones(shape, dtype=dtype)), code_format)


@pytest.mark.parametrize(
    ("shape", "group"), [((9, 64), 32), ((33, 192), 64), ((5, 256), 128), ((7, 200), 200), ((2, 3, 40), 40)]
)
def test_4_bits_are_their_definition(shape: tuple[int, ...], group: int) -> None:
    """scale = m / -8, m being the group's number of the largest magnitude, and the nearest of -8 .. 7."""
    weight = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    codes = evaluated(source(torch.from_numpy(weight)), CodeFormat(4, group))
    assert codes.scales.shape == (*shape[:-1], shape[-1] // group)
    rows = (weight, codes.values.numpy(), codes.scales.numpy())
    for row, values, scales in zip(*(a.reshape(-1, a.shape[-1]) for a in rows), strict=True):
        for g, start in enumerate(range(0, shape[-1], group)):
            part = row[start : start + group]
            assert scales[g] == np.float16(part[np.abs(part).argmax()] / np.float32(-8))
            want = np.clip(np.rint(part / np.float32(scales[g])), -8, 7)
            np.testing.assert_array_equal(values[start : start + group], want)


@pytest.mark.parametrize(
    ("shape", "group"), [((5, 64), 32), ((33, 192), 64), ((4, 7, 96), 32), ((6, 256), 128), ((9, 72), 72)]
)
@pytest.mark.parametrize("offsets", [False, True])
def test_4_bits(shape: tuple[int, ...], group: int, offsets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.passes.ir.quantized._CHUNK_ELEMENTS", 300)
    torch.manual_seed(1)
    weight = torch.randn(shape)
    code_format = CodeFormat(4, group, offsets)
    codes = evaluated(source(weight), code_format)
    assert (codes.values.dtype, codes.scales.dtype) == (torch.int8, torch.float16)
    assert (codes.offsets is not None) == offsets
    assert (int(codes.values.min()), int(codes.values.max())) == ((0, 15) if offsets else (-8, 7))
    whole = round_with_offsets if offsets else round_symmetric
    alone = whole(weight.unflatten(-1, (-1, group)))
    assert torch.equal(codes.values, alone[0].flatten(-2))
    assert torch.equal(codes.scales, alone[1]), "the same as all at once"
    error = decode(codes, code_format) - weight
    # 4 bits over about 4 deviations of a group: a step is 0.27 deviations, its error 0.08; clipping adds a little.
    # The largest of more numbers is farther out: 5.2 deviations in groups of 128.
    assert error.norm() / weight.norm() < (0.11 if group <= 64 else 0.13)
    values, _, _ = quantized(source(weight), code_format)
    values.evaluate()
    assert values.counts == QuantizationCounts(weight.numel())


@pytest.mark.parametrize(
    ("code_format", "least", "most"),
    [
        (CodeFormat(5, 32), -16, 15),
        (CodeFormat(5, 64, offsets=True), 0, 31),
        (CodeFormat(6, 16), -32, 31),
        (CodeFormat(3, 32), -4, 3),
        (CodeFormat(3, 16, offsets=True, scale_block=16), 0, 7),
        (CodeFormat(2, 16), -2, 1),
        (CodeFormat(2, 64, offsets=True), 0, 3),
        (CodeFormat(4, 32, offsets=True, scale_block=8), 0, 15),
        (CodeFormat(5, 32, scale_block=8), -16, 15),
        (CodeFormat(6, 16, scale_block=16), -32, 31),
        (CodeFormat(8, 32, scale_block=8), -127, 127),
        (CodeFormat(4, 32, kind="iq4"), -127, 113),
        (CodeFormat(4, 32, kind="fp4", scale_block=8), -12, 12),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(9, 512), (3, 5, 256)])
def test_5_and_6_bits_and_blocks_of_scales(
    code_format: CodeFormat, least: int, most: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(2)
    weight = torch.randn(shape)
    codes = evaluated(source(weight), code_format)
    block, groups = code_format.scale_block, shape[-1] // code_format.group_size
    assert codes.scales.dtype == (torch.int8 if block else torch.float16)
    assert codes.scales.shape == (*shape[:-1], groups // block * (2 + block) if block else groups)
    assert (codes.offsets is not None) == code_format.offsets
    assert (int(codes.values.min()), int(codes.values.max())) == (least, most)
    # A step is the range of a group, some 4 deviations in those of 32, over the values; its error 0.29 of it. Bytes
    # of scales are off by 0.4 % of a block's largest at most.
    error = (decode(codes, code_format) - weight).norm() / weight.norm()
    steps = 16 if code_format.kind != "int" else most - least + 1  # 4 bits, whatever they stand for
    assert error < 1.8 / steps + 0.004 * bool(block)


def test_groups_of_4_bits_that_vanish_are_counted() -> None:
    weight = torch.zeros(3, 32)
    weight[1], weight[2] = 1e-9, torch.linspace(0.5, 0.5 + 1e-7, 32)
    for code_format, expected in ((INT4, 1), (SHIFTED, 1)):
        values = quantized(source(weight), code_format)[0]
        values.evaluate()
        assert values.counts == QuantizationCounts(96, vanished=expected), code_format
    codes = evaluated(source(weight), SHIFTED)
    assert decode(codes, SHIFTED)[2].tolist() == [0.5] * 32


@dataclass(frozen=True)
class Known(Prequantized):
    """Integers that no rounding of what they stand for would give."""

    rows: int
    format: CodeFormat
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, 64)

    @property
    def code_format(self) -> CodeFormat:
        return self.format

    def codes(self) -> Codes:
        torch.manual_seed(self.seed)
        least = -(1 << self.format.bits - 1) if not self.format.offsets else 0
        values = torch.randint(least, least + (1 << self.format.bits), self.shape).to(torch.int8)
        values[:, 0] = least  # -128 too
        factors = (self.rows, 64 // self.format.group_size)
        return Codes(values, torch.rand(factors).half(), torch.randn(factors).half() if self.format.offsets else None)

    def parts(self, axis: int = 0) -> tuple[Part, ...]:
        return (Part(f"known.{self.seed}", 0, self.shape[axis], axis),)

    def describe(self) -> str:
        return f"known.{self.seed}"


FORMATS = [
    *(CodeFormat(8, 32), CodeFormat(4, 32), CodeFormat(4, 64), CodeFormat(4, 32, offsets=True)),
    *(CodeFormat(3, 32), CodeFormat(2, 16, offsets=True)),
]


@pytest.mark.parametrize("code_format", FORMATS)
def test_integers_that_are_known_are_taken_as_they_are(code_format: CodeFormat) -> None:
    a, b = Known(3, code_format, 1), Known(5, code_format, 2)
    same(evaluated(a, code_format), a.codes())
    joined = [torch.cat(kind) for kind in zip(tensors(a.codes()), tensors(b.codes()), strict=True)]
    whole = Concat((a, Cast(b, torch.float32)))
    same(evaluated(whole, code_format), Codes(*joined))
    same(evaluated(Slice(whole, 0, 2, 6), code_format), Codes(*(t[2:6] for t in joined)))
    same(evaluated(Chosen(whole, 0, (0, 4, 7)), code_format), Codes(*(t[[0, 4, 7]] for t in joined)))
    assert formats_of_rows(Chosen(whole, 1, tuple(range(32)))) == {None}
    experts = Concat((Stack((a, Known(3, code_format, 3))), Stack((b, Known(5, code_format, 4)))), 1)
    same(evaluated(Slice(experts, 1, 1, 7), code_format), Codes(*(t[1:7] for t in joined)), expert=0)
    values, _, _ = quantized(whole, code_format)
    values.evaluate()
    assert values.counts == QuantizationCounts(8 * 64, kept=8 * 64)
    assert torch.equal(a.evaluate(), decode(a.codes(), code_format))


@pytest.mark.parametrize("code_format", FORMATS)
def test_what_is_not_known_in_that_format_is_rounded(code_format: CodeFormat) -> None:
    known, other = Known(3, code_format), source(torch.randn(4, 64), "w")
    both = evaluated(Concat((known, other)), code_format)
    same(Codes(*(t[:3] for t in tensors(both))), known.codes())
    same(Codes(*(t[3:] for t in tensors(both))), evaluated(other, code_format))
    values, _, _ = quantized(Concat((known, other)), code_format)
    values.evaluate()
    assert values.counts is not None
    assert (values.counts.values, values.counts.kept) == (7 * 64, 3 * 64)
    another = next(f for f in FORMATS if f != code_format)
    for expr in (known, Slice(known, 1, 0, 64), Cast(known, torch.bfloat16)):
        changed = evaluated(expr, another if expr is known else code_format)
        same(changed, evaluated(source(expr.evaluate()), another if expr is known else code_format))


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("offsets", [False, True])
def test_integers_of_fewer_bits_are_the_same_in_4(bits: int, offsets: bool) -> None:
    known = Known(40, CodeFormat(bits, 32, offsets))
    wide = known.format.in_4_bits
    assert (wide.bits, wide.offsets) == (4, offsets)
    same(evaluated(Slice(known, 0, 8, 40), wide), Codes(*(t[8:] for t in tensors(known.codes()))))
    assert evaluated(known, CodeFormat(4, 64, offsets)).scales.shape == (40, 1), "other groups are rounded anew"
    for other in (CodeFormat(3, 32, scale_block=8), CodeFormat(5, 32)):
        assert other.in_4_bits == other


def test_the_formats_of_rows() -> None:
    a, b, plain = Known(3, INT4), Known(3, SHIFTED), source(torch.ones(3, 64))
    assert formats_of_rows(Slice(Concat((a, b, plain)), 0, 0, 1)) == {INT4, SHIFTED, None}
    assert formats_of_rows(Stack((a, a))) == {INT4}
    assert formats_of_rows(Concat((a, a), 1)) == formats_of_rows(Transpose(a)) == {None}, "not rows of it"
    assert formats_of_rows(Stack((a, a), 2)) == formats_of_rows(Slice(a, 1, 0, 32)) == {None}


def test_known_scales_must_be_finite() -> None:
    class Broken(Known):
        def codes(self) -> Codes:
            codes = super().codes()
            codes.scales[1, 0] = math.inf
            return codes

    with pytest.raises(SourceError, match=r"weight known\.0: it has NaN or infinite values"):
        quantized(Broken(3, INT4), INT4)[0].evaluate()


@pytest.mark.parametrize(
    "code_format",
    [
        CodeFormat(4, 32),
        CodeFormat(4, 64, offsets=True),
        CodeFormat(4, 32, offsets=True, scale_block=8),
        CodeFormat(8, 32),
        CodeFormat(8, 0, kind="fp8"),
        CodeFormat(4, 32, kind="iq4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_with_any_number_of_threads(
    code_format: CodeFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    weight = (torch.randn(67, 1024) + 0.3).to(dtype)
    weight[5, :64], weight[40, 3] = 1e-9, 60000.0
    whole = round_rows(weight.float(), code_format)
    for threads, chunk in ((1, 1 << 15), (2, 1 << 15), (5, 3000), (3, 1)):
        monkeypatch.setattr("enginewright.passes.ir.quantized.available_threads", lambda count=threads: count)
        monkeypatch.setattr("enginewright.passes.ir.quantized._CHUNK_ELEMENTS", chunk)
        got = round_matrix(weight, code_format)
        assert (got.saturated, got.vanished) == (whole.saturated, whole.vanished)
        for a, b in zip(got[:3], whole[:3], strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a.float(), b.float()), (threads, chunk)
