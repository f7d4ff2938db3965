"""Quantized weights against their definition; what is read, kept and counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.quantized import QuantizationCounts, quantized
from enginewright.passes.ir.weights import Concat, Source
from enginewright.plugins.errors import PassError, SourceError


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
    values_of, scales_of = quantized(source(weight), group)
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


def test_a_weight_is_read_once_and_nothing_is_kept() -> None:
    reads: list[str] = []
    values_of, scales_of = quantized(source(torch.randn(4, 64), reads=reads), 32)
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
    values_of, scales_of = quantized(source(weight), 2)
    values, scales = values_of.evaluate(), scales_of.evaluate()
    assert values_of.counts == scales_of.counts == QuantizationCounts(values=12, saturated=2, vanished=2)
    assert values.tolist()[0][:2] == [127, -127]
    assert values[1, 0] == 0
    assert scales[1, 0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(bad: float) -> None:
    weight = torch.ones(3, 32)
    weight[1, 7] = bad
    for expr in quantized(Concat((source(torch.ones(2, 32), "a"), source(weight, "b"))), 32):
        with pytest.raises(SourceError, match="weight a, b: it has NaN or infinite values"):
            expr.evaluate()


def test_a_scale_that_float16_lacks_is_an_error() -> None:
    largest = 65504.0 * 127
    assert quantized(source(torch.full((2, 4), largest)), 0)[1].evaluate().isfinite().all()
    with pytest.raises(PassError, match=r"weight w: its largest magnitude is 8\.4e\+06, too large for float16 scales"):
        quantized(source(torch.full((2, 4), 8.4e6)), 0)[0].evaluate()


def test_provenance_text_and_equality() -> None:
    a, b = source(torch.ones(2, 8), "a"), source(torch.ones(3, 8), "b")
    values, scales = quantized(Concat((a, b)), 4)
    assert values.parts(0) == scales.parts(0) == (Part("a", 0, 2), Part("b", 0, 3))
    assert values.parts(1) == Concat((a, b)).parts(1)
    assert values.describe() == "int8(concat(a, b, 0), 4)"
    assert scales.describe() == "scales(concat(a, b, 0), 4)"
    assert (values, scales) == quantized(Concat((a, b)), 4)
    assert values != quantized(Concat((a, b)), 0)[0]
    with pytest.raises(PassError, match=r"float32 \(8,\) can't be quantized"):
        quantized(source(torch.ones(8)), 4)
    with pytest.raises(PassError, match=r"int64 \(2, 8\) can't be quantized"):
        quantized(source(torch.ones(2, 8, dtype=torch.int64)), 4)
