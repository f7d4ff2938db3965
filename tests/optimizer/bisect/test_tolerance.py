from __future__ import annotations

import numpy as np
import pytest

from enginewright.optimizer.bisect.tolerance import (
    GAIN,
    ROUNDING,
    SAME_GAIN,
    SAME_INTEGERS,
    Tolerance,
    coarsest,
    comparable,
    difference,
    directions,
    lacks,
)
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.formats.rounding import ROUNDINGS
from enginewright.passes.ir.value_name import ValueName

INT8, INT4 = ROUNDINGS["int8"].coarseness, ROUNDINGS["int4"].coarseness


def rounded(a: np.ndarray, share: float) -> np.ndarray:
    noise = np.random.default_rng(1).standard_normal(a.shape) * share
    return (a * (1 + noise)).astype(np.float32)


@pytest.fixture
def value() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((60, 64)).astype(np.float32)


def test_exact_values_are_held_to_rounding(value: np.ndarray) -> None:
    tolerance = Tolerance(ROUNDING)
    assert tolerance.exceeded(value, rounded(value, 1e-6)) is None
    excess = tolerance.exceeded(value, value * np.float32(1.01))
    assert excess is not None and excess.gain == pytest.approx(1.01, rel=1e-4)


@pytest.mark.parametrize("share", [0.003, 0.01])
def test_what_rounding_cannot_do_is_found_within_its_tolerance(share: float, value: np.ndarray) -> None:
    tolerance = Tolerance(INT8, chance=True, gain=GAIN)
    fine = rounded(value, share)
    assert tolerance.exceeded(value, fine) is None
    assert tolerance.exceeded(value, fine * np.float32(1.01)) is not None
    assert Tolerance(INT8).exceeded(value, fine * np.float32(1.01)) is None  # the tolerance alone lets it pass


def test_a_missing_bias_is_found_within_a_wide_tolerance(value: np.ndarray) -> None:
    bias = np.full(64, 0.3, np.float32)
    tolerance = Tolerance(INT4, chance=True, gain=GAIN)
    without = rounded(value, 0.05) - bias
    assert lacks(value, without, bias) and not lacks(value, rounded(value, 0.05), bias)
    assert tolerance.exceeded(value, without, bias) is not None
    assert tolerance.exceeded(value, rounded(value, 0.05), bias) is None


@pytest.mark.parametrize(
    "tolerance",
    [
        Tolerance(ROUNDING),
        Tolerance(SAME_INTEGERS, gain=SAME_GAIN),
        Tolerance(INT8, chance=True, gain=GAIN),
    ],
)
@pytest.mark.parametrize("share", [1e-6, 3e-3])
def test_the_smallest_factor_is_seen_and_a_smaller_one_is_not(
    tolerance: Tolerance, share: float, value: np.ndarray
) -> None:
    if tolerance.error == ROUNDING and share > ROUNDING:
        return  # not the same values
    fine = rounded(value, share)
    least = tolerance.smallest_factor(value, difference(value, fine)) - 1
    assert least < 0.012
    for sign in (1, -1):
        assert tolerance.exceeded(value, fine * np.float32(1 + sign * 1.02 * least)) is not None
        assert tolerance.exceeded(value, fine * np.float32(1 + sign * 0.5 * least)) is None


def test_numbers_that_are_not_finite_differ(value: np.ndarray) -> None:
    broken = value.copy()
    broken[3, 4] = np.nan
    assert Tolerance(1e9).exceeded(value, broken) is not None


def test_directions(value: np.ndarray) -> None:
    assert directions(np.eye(6, dtype=np.float32)) == pytest.approx(6)
    assert directions(np.outer(np.arange(1, 5), np.ones(9)).astype(np.float32)) == pytest.approx(1)
    assert directions(np.zeros((3, 3), np.float32)) == 1


def test_the_coarsest_format_of_a_recipe() -> None:
    assert [coarsest(load_recipe(name)) for name in ("f32", "bf16", "int8", "int4", "gguf")] == [
        *(ROUNDING, ROUNDINGS["bf16"].coarseness, INT8, INT4, INT8)
    ]


def test_values_of_both_runs_of_one_shape_can_be_compared(value: np.ndarray) -> None:
    both, narrow, alone, other = (ValueName(where, "output") for where in ("both", "narrow", "alone", "other"))
    a = {both: value, narrow: value, alone: value}
    b = {other: value, narrow: value[:, 1:], both: value}
    assert comparable(a, b) == [both]


@pytest.mark.parametrize(("tokens", "columns"), [(5, 7), (60, 64)])
def test_the_worst_column_counts(tokens: int, columns: int) -> None:
    a = np.random.default_rng(columns).standard_normal((tokens, columns)).astype(np.float32)
    same = difference(a, a.copy())
    assert same.error == 0 and same.gain == pytest.approx(1) and same.scatter == 0
    b = a.copy()
    b[:, 3] *= 1.5
    apart = difference(a, b)
    largest = max(np.linalg.norm(a[:, 3]), np.linalg.norm(a) / np.sqrt(columns))
    assert apart.error == pytest.approx(np.linalg.norm(b[:, 3] - a[:, 3]) / largest, rel=1e-5)
    assert apart.column == 3 and apart.token == np.abs(a[:, 3]).argmax()
    assert (apart.a, apart.b) == (a[apart.token, 3], b[apart.token, 3])
    assert difference(a, 2 * a).gain == pytest.approx(2)


def test_a_small_column_is_not_judged_by_its_rounding() -> None:
    a = np.ones((4, 100), np.float32)
    a[:, 0] = 1e-6
    b = a.copy()
    b[:, 0] += 1e-7  # 10 % of the column, and nothing compared to its neighbours
    assert difference(a, b).error < 1e-6


def test_what_is_not_finite() -> None:
    a = np.ones((2, 3), np.float32)
    a[0, 0] = np.nan
    assert difference(a, a.copy()).error == 0
    b = a.copy()
    b[1, 2] = np.inf
    apart = difference(a, b)
    assert apart.error == np.inf and (apart.token, apart.column) == (1, 2)
    assert difference(np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)).error == np.inf
