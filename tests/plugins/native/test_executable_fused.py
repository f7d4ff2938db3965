"""Fused steps that don't hold together, and a linear over its own residual. Their numbers: tests/passes/fusion."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.lowered_program import Operand
from tests.plugins.native.lowered_builder import LoweredBuilder, T, step_input, view

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 8)).astype(np.float32)
WEIGHT = RNG.standard_normal((8, 8)).astype(np.float32)


def _program() -> tuple[LoweredBuilder, Operand, Operand, Operand]:
    """A builder, x [T, 8] and a residual [T, 8] in wider rows, a weight."""
    b = LoweredBuilder()
    b.group("full", [0], 1, 8, 8)
    x, wide = b.values(X), b.values(np.concatenate((X, X + 1), axis=1))
    return b, x, view(wide, (T, 8), (16, 1)), b.weight(WEIGHT, "panel32")


def test_a_linear_may_write_over_its_residual() -> None:
    b, x, residual, weight = _program()
    step = b.step("linear", [x, weight, residual], [residual], has_residual=True, activation="relu")
    expected = np.maximum(X.astype(np.float64) @ WEIGHT.T.astype(np.float64), 0) + X
    np.testing.assert_allclose(b.run(step, 3)[0], expected, rtol=0, atol=1e-5)  # sums of 8 products near 1


@pytest.mark.parametrize("offset", [1, 4])
def test_a_residual_that_overlaps_the_result_otherwise(offset: int) -> None:
    b, x, residual, weight = _program()
    b.step("linear", [x, weight, view(residual, (T, 8), (16, 1), offset)], [residual], has_residual=True)
    with pytest.raises(RequestError, match=r"linear: operand b\d overlaps operand b\d in the arena"):
        b.build().run(step_input([[0, 1, 2]], groups=["full"]))


def test_attributes_of_a_store() -> None:
    for attrs, message in (
        ({"activation": "softmax", "has_residual": True}, "attribute activation: no activation softmax"),
        ({"has_residual": False, "has_bias": True}, r"operand b\d has rank 2"),
    ):
        b, x, residual, weight = _program()
        b.step("linear", [x, weight, residual], [b.buffer(T, 8)], **attrs)
        with pytest.raises(BundleError, match=message):
            b.build()


def test_rope_kv_write_takes_the_heads_of_its_cache() -> None:
    b, x, _, _ = _program()
    heads = view(x, (T, 1, 8), (8, 8, 1))
    inputs = [heads, view(x, (T, 2, 4), (8, 4, 1)), heads, b.buffer(T, 4), b.input("slots:full"), b.cache("full/0")]
    b.step("rope_kv_write", inputs, [b.buffer(T, 1, 8)], interleaved=False)
    with pytest.raises(BundleError, match="doesn't fit cache group full"):
        b.build()


def test_quantized_results_have_the_groups_that_the_size_gives() -> None:
    b, x, _, _ = _program()
    outputs = [b.buffer(T, 8, dtype="i8"), b.buffer(T, 3), b.buffer(T, 2, dtype="i32")]
    b.step("rms_norm_quantize", [x], outputs, eps=1e-5, has_weight=False, group_size=4)
    with pytest.raises(BundleError, match=r"should be \[T, 2\]"):
        b.build()
