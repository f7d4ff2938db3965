"""The kernels of recurrent layers mean what the references mean, at two sizes or more of each, in any chunks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from enginewright.passes.ops.recurrence import NORM_EPSILON
from enginewright.plugins.gpu import recurrence_calls
from tests.plugins.gpu import recurrence_cases as cases

EXACT = 1e-6
"""The share of the largest value: sums of 64 products and 21 tokens at most in float32, in another order. Measured:
2.4e-7 at most."""


@pytest.mark.parametrize("case", cases.CASES)
def test_a_kernel_is_its_reference(case: str, interpreter: ProcessPoolExecutor) -> None:
    result, state = interpreter.submit(cases.differences, case, "f32").result()
    assert result <= EXACT and state <= EXACT


@pytest.mark.parametrize("case", ["convolution of 200 channels, 3 taps", "Mamba, 150 channels", "KDA of 64 x 20"])
def test_operands_of_16_bits(case: str, interpreter: ProcessPoolExecutor) -> None:
    """The reference gets the same rounded operands, so that only the result is rounded once more."""
    result, state = interpreter.submit(cases.differences, case, "bf16").result()
    assert 0 < result <= 2.0**-8 and state <= EXACT


@pytest.mark.parametrize("case", cases.CASES)
def test_bits_do_not_depend_on_chunks_and_batch(case: str, interpreter: ProcessPoolExecutor) -> None:
    whole, *others = interpreter.submit(cases.in_chunks, case, (1, 7, 64)).result()
    assert all(other == whole for other in others)


def test_the_reference_normalizes_with_the_same_number() -> None:
    assert recurrence_calls.NORM_EPSILON == NORM_EPSILON
