from __future__ import annotations

import numpy as np
import pytest

from enginewright.optimizer.bisect.judge import (
    COARSENESS,
    GAIN,
    ROUNDING,
    SAME_GAIN,
    SAME_INTEGERS,
    Judge,
    coarsest,
    comparable,
    directions,
    lacks,
)
from enginewright.optimizer.bisect.points import Point
from enginewright.optimizer.bisect.values import difference
from enginewright.optimizer.recipes.recipe import load_recipe


def rounded(a: np.ndarray, share: float) -> np.ndarray:
    noise = np.random.default_rng(1).standard_normal(a.shape) * share
    return (a * (1 + noise)).astype(np.float32)


@pytest.fixture
def value() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((60, 64)).astype(np.float32)


def test_exact_values_are_held_to_rounding(value: np.ndarray) -> None:
    judge = Judge(ROUNDING)
    assert judge.parts(value, rounded(value, 1e-6)) is None
    found = judge.parts(value, value * np.float32(1.01))
    assert found is not None and found.gain == pytest.approx(1.01, rel=1e-4)


@pytest.mark.parametrize("share", [0.003, 0.01])
def test_what_rounding_cannot_do_is_found_within_its_tolerance(share: float, value: np.ndarray) -> None:
    judge = Judge(COARSENESS["int8"], chance=True, gain=GAIN)
    fine = rounded(value, share)
    assert judge.parts(value, fine) is None
    assert judge.parts(value, fine * np.float32(1.01)) is not None
    assert Judge(COARSENESS["int8"]).parts(value, fine * np.float32(1.01)) is None  # the tolerance alone lets it pass


def test_a_missing_bias_is_found_within_a_wide_tolerance(value: np.ndarray) -> None:
    bias = np.full(64, 0.3, np.float32)
    judge = Judge(COARSENESS["int4"], chance=True, gain=GAIN)
    without = rounded(value, 0.05) - bias
    assert lacks(value, without, bias) and not lacks(value, rounded(value, 0.05), bias)
    assert judge.parts(value, without, bias) is not None
    assert judge.parts(value, rounded(value, 0.05), bias) is None


@pytest.mark.parametrize(
    "judge", [Judge(ROUNDING), Judge(SAME_INTEGERS, gain=SAME_GAIN), Judge(COARSENESS["int8"], chance=True, gain=GAIN)]
)
@pytest.mark.parametrize("share", [1e-6, 3e-3])
def test_the_smallest_factor_is_seen_and_a_smaller_one_is_not(judge: Judge, share: float, value: np.ndarray) -> None:
    if judge.tolerance == ROUNDING and share > ROUNDING:
        return  # not the same values
    fine = rounded(value, share)
    least = judge.smallest_factor(value, difference(value, fine)) - 1
    assert least < 0.012
    for sign in (1, -1):
        assert judge.parts(value, fine * np.float32(1 + sign * 1.02 * least)) is not None
        assert judge.parts(value, fine * np.float32(1 + sign * 0.5 * least)) is None


def test_numbers_that_are_not_finite_part(value: np.ndarray) -> None:
    broken = value.copy()
    broken[3, 4] = np.nan
    assert Judge(1e9).parts(value, broken) is not None


def test_directions(value: np.ndarray) -> None:
    assert directions(np.eye(6, dtype=np.float32)) == pytest.approx(6)
    assert directions(np.outer(np.arange(1, 5), np.ones(9)).astype(np.float32)) == pytest.approx(1)
    assert directions(np.zeros((3, 3), np.float32)) == 1


def test_the_coarsest_format_of_a_recipe() -> None:
    assert [coarsest(load_recipe(name)) for name in ("f32", "bf16", "int8", "int4", "gguf")] == [
        COARSENESS[storage] for storage in ("f32", "bf16", "int8", "int4", "int8")
    ]


def test_points_of_both_sides_with_values_of_one_shape_can_be_compared(value: np.ndarray) -> None:
    both, narrow, alone, other = (Point(where, "output") for where in ("both", "narrow", "alone", "other"))
    a = {both: value, narrow: value, alone: value}
    b = {other: value, narrow: value[:, 1:], both: value}
    assert comparable(a, b) == [both]
