from __future__ import annotations

import numpy as np
import pytest

from enginewright.optimizer.bisect.values import difference


@pytest.mark.parametrize(("tokens", "columns"), [(5, 7), (60, 64)])
def test_the_worst_column_counts(tokens: int, columns: int) -> None:
    a = np.random.default_rng(columns).standard_normal((tokens, columns)).astype(np.float32)
    same = difference(a, a.copy())
    assert same.error == 0 and same.gain == pytest.approx(1) and same.scatter == 0
    b = a.copy()
    b[:, 3] *= 1.5
    found = difference(a, b)
    largest = max(np.linalg.norm(a[:, 3]), np.linalg.norm(a) / np.sqrt(columns))
    assert found.error == pytest.approx(np.linalg.norm(b[:, 3] - a[:, 3]) / largest, rel=1e-5)
    assert found.column == 3 and found.token == np.abs(a[:, 3]).argmax()
    assert (found.a, found.b) == (a[found.token, 3], b[found.token, 3])
    assert difference(a, 2 * a).gain == pytest.approx(2)


def test_a_small_column_is_not_judged_by_its_rounding() -> None:
    a = np.ones((4, 100), np.float32)
    a[:, 0] = 1e-6
    b = a.copy()
    b[:, 0] += 1e-7  # 10 % of the column, and nothing beside its neighbours
    assert difference(a, b).error < 1e-6


def test_what_is_not_finite() -> None:
    a = np.ones((2, 3), np.float32)
    a[0, 0] = np.nan
    assert difference(a, a.copy()).error == 0
    b = a.copy()
    b[1, 2] = np.inf
    found = difference(a, b)
    assert found.error == np.inf and (found.token, found.column) == (1, 2)
    assert difference(np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)).error == np.inf
