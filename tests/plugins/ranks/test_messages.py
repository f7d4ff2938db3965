"""Steps as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.plugins.ranks.messages import packed_step, unpacked_step
from enginewright.runtime.shared.contracts import StepInput


def some(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("changed", [False, True])
def test_a_step_comes_back_as_it_was(changed: bool) -> None:
    tables = {"full": some(3, 4, 5, -1).reshape(2, 2), "window": some(7, 8).reshape(2, 1)}
    step = StepInput(
        ids=some(1, 2, 3),
        positions=some(0, 1, 9),
        q_start=some(0, 2, 3),
        kv_len=some(2, 10),
        rows=some(1, 2) if changed else some(),
        block_tables=tables,
        slots={"full": some(96, 97, 128), "window": some(1, 2, 3)},
        clears={"window": some(6)} if changed else {},
        copies={"full": some(1, 2, 3, 4).reshape(2, 2)} if changed else {},
    )
    found = unpacked_step(["window", "full"], packed_step(["window", "full"], step))
    for name in ("ids", "positions", "q_start", "kv_len", "rows"):
        np.testing.assert_array_equal(getattr(found, name), getattr(step, name))
    for name in ("block_tables", "slots", "clears", "copies"):
        assert sorted(getattr(found, name)) == sorted(getattr(step, name))
        for group, array in getattr(step, name).items():
            np.testing.assert_array_equal(getattr(found, name)[group], array)
