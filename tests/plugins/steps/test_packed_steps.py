"""The padding of a packed step, and the division of one that is too large."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.plugins.steps.packed_steps import StepShape, bucketed, padded, parts, rounded
from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.step_arrays import part_of

GROUP = CacheGroup("full", (0,), 1, 2, 2, block_size=4)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step() -> StepInput:
    """Requests of 1, 3 and 2 tokens, behind 4, 0 and 6 others."""
    return StepInput(
        ids=ints(9, 1, 2, 3, 7, 8),
        positions=ints(4, 0, 1, 2, 6, 7),
        q_start=ints(0, 1, 4, 6),
        kv_len=ints(5, 3, 8),
        block_table={"full": np.array([[2, 3], [5, -1], [0, 1]], np.int32)},
        slots={"full": ints(12, 20, 21, 22, 6, 7)},
        rows=ints(5, 0, 3),
    )


def test_padding() -> None:
    shape = StepShape(profile=0, tokens=8, requests=4, rows=4, blocks=3, decodes=False)
    arrays = {name: array.tolist() for name, array in padded(step(), step().rows, [GROUP], shape).items()}
    assert arrays == {
        "ids": [9, 1, 2, 3, 7, 8, 0, 0],
        "positions": [4, 0, 1, 2, 6, 7, 0, 0],
        "q_start": [0, 1, 4, 6, 6],
        "kv_len": [5, 3, 8, 0],
        "rows": [5, 0, 3, 0],
        "slots:full": [12, 20, 21, 22, 6, 7, -1, -1],
        "block_table:full": [[2, 3, -1], [5, -1, -1], [0, 1, -1], [-1, -1, -1]],
    }


def test_a_part_of_a_step() -> None:
    part, order = part_of(step(), [0, 2])
    assert part.ids.tolist() == [9, 7, 8]
    assert part.q_start.tolist() == [0, 1, 3]
    assert part.kv_len.tolist() == [5, 8]
    assert part.block_tables["full"].tolist() == [[2, 3], [0, 1]]
    assert part.slots["full"].tolist() == [12, 6, 7]
    assert part.rows.tolist() == [2, 0]
    assert order.tolist() == [0, 1]
    whole, order = part_of(step(), [0, 1, 2])
    assert whole.ids.tolist() == step().ids.tolist()
    assert order.tolist() == [0, 1, 2]


class Program:
    def most(self, *, decodes: bool) -> tuple[int, int]:
        return (4, 4) if decodes else (10, 2)


def test_parts() -> None:
    counts = ints(1, 3, 1, 8, 1, 1, 2, 0, 1, 10, 1)
    parts_of_step = parts(counts, Program())  # type: ignore[arg-type]
    assert parts_of_step == [[0, 2, 4, 5], [8, 10], [1], [3, 6], [9]]
    with pytest.raises(RequestError, match="11 tokens of a request, and engines hold 10"):
        parts(ints(1, 11), Program())  # type: ignore[arg-type]


def test_sizes_are_few() -> None:
    assert [rounded(n, (1, 4, 12)) for n in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]
    assert rounded(1, (4, 8, 16)) == 4
    sizes = {bucketed(n, (1, 128, 512)) for n in range(1, 513)}
    assert sorted(sizes) == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    assert all(n <= bucketed(n, (1, 128, 8192)) < 1.25 * n + 1 for n in range(61, 8193))
    assert [bucketed(n, (20, 30, 70)) for n in (1, 33, 65, 70)] == [20, 48, 70, 70]
