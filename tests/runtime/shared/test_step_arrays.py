"""Tests of cutting, padding and packing steps: a part has the arrays that its requests have in the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from enginewright.runtime.shared.step_arrays import (
    filled,
    packed_words,
    part_of,
    unpacked_words,
    with_padding,
)
from enginewright.runtime.shared.step_schema import PORTS, Port

GROUPS = (CacheGroup("full", (0,), 1, 2, 2, block_size=4), CacheGroup("window", (1,), 1, 2, 2, window=4, block_size=2))
SEGMENTS = Port("segments_of_adapters", (3,), check="segments", provider=lambda chunks: np.zeros(3, np.int32))
VECTORS = Port("vectors", ("T", 2), dtype="f32", provider=lambda chunks: np.zeros((0, 2), np.float32))


@pytest.fixture(autouse=True)
def more_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for port in (SEGMENTS, VECTORS):
        monkeypatch.setitem(PORTS, port.name, port)


def step_of(counts: Sequence[int], lengths: Sequence[int], rows: Sequence[int], first: int = 0) -> StepInput:
    tokens = sum(counts)
    tables = {}
    for group in GROUPS:
        width = -(-max(lengths) // group.block_size)
        tables[group.name] = first + np.arange(len(counts) * width, dtype=np.int32).reshape(-1, width)
    vectors = np.arange(2 * tokens, dtype=np.float32).reshape(-1, 2) / 3
    return StepInput.packed(
        ids=np.arange(100, 100 + tokens, dtype=np.int32),
        counts=counts,
        kv_len=lengths,
        tables=tables,
        groups=GROUPS,
        rows=rows,
        more={SEGMENTS.name: np.array([0, tokens // 2, tokens], np.int32), VECTORS.name: vectors},
    )


def test_a_packed_step() -> None:
    step = step_of([1, 3], [6, 3], [0, 3])
    assert step.positions.tolist() == [5, 0, 1, 2]
    assert step.q_start.tolist() == [0, 1, 4] and step.counts.tolist() == [1, 3]
    assert step.slots["full"].tolist() == [5, 8, 9, 10] and step.slots["window"].tolist() == [5, 6, 7, 8]
    assert step.requests_at(step.rows).tolist() == [0, 1]
    assert {array.dtype for name, array in step.arrays.items() if name != "vectors"} == {np.dtype(np.int32)}


@pytest.mark.parametrize("members", [[0], [1], [0, 2], [1, 2], [0, 1, 2]])
def test_a_part(members: list[int]) -> None:
    counts, lengths = [2, 1, 3], [5, 9, 3]
    step = step_of(counts, lengths, [5, 0, 2])
    part, order = part_of(step, members)
    tokens = [t for b in members for t in range(step.q_start[b], step.q_start[b + 1])]
    assert part.ids.tolist() == [100 + t for t in tokens]
    assert part.counts.tolist() == [counts[b] for b in members]
    assert part.kv_len.tolist() == [lengths[b] for b in members]
    assert [tokens[row] for row in part.rows] == [row for row in step.rows if row in tokens]
    assert [step.rows[i] for i in order] == [tokens[row] for row in part.rows]
    before = [t for t in tokens if t < 3]  # those of the first segment
    assert part.arrays[SEGMENTS.name].tolist() == [0, len(before), len(tokens)]
    assert part.arrays[VECTORS.name].tolist() == step.arrays[VECTORS.name][tokens].tolist()
    assert part.block_tables["window"].tolist() == step.block_tables["window"][members].tolist()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_padding_after_a_step(rows: int) -> None:
    step, padding = step_of([1, 3], [6, 3], [2, 0]), step_of([4, 0], [4, 0], [], first=50)
    del padding.arrays[SEGMENTS.name], padding.arrays[VECTORS.name]
    step_read = StepInput(with_padding(step, padding.arrays, rows))
    assert step_read.q_start.tolist() == [0, 1, 4, 8, 8] and step_read.kv_len.tolist() == [6, 3, 4, 0]
    assert step_read.ids.tolist() == [100, 101, 102, 103, 100, 101, 102, 103]
    assert step_read.rows.tolist() == [2, 0, *[2] * (rows - 2)]
    assert step_read.block_tables["full"].tolist() == [[0, 1], [2, 3], [50, -1], [51, -1]]
    assert step_read.arrays[SEGMENTS.name].tolist() == [0, 2, 4]
    assert step_read.arrays[VECTORS.name].shape == (8, 2) and not step_read.arrays[VECTORS.name][4:].any()


def test_filled() -> None:
    assert filled(PORTS["q_start"], np.array([0, 3], np.int32), (4,)).tolist() == [0, 3, 3, 3]
    assert filled(PORTS["slots"], np.array([9], np.int32), (3,)).tolist() == [9, -1, -1]
    table = filled(PORTS["block_table"], np.array([[1, 2]], np.int32), (2, 3))
    assert table.tolist() == [[1, 2, -1], [-1, -1, -1]]


def test_words() -> None:
    step = step_of([2, 1], [4, 7], [1])
    names = tuple(step.arrays)
    arrays, words = unpacked_words(np.concatenate([*packed_words(step, names), np.zeros(3, np.int32)]), names)
    assert words == sum(array.size + array.ndim + 1 for array in step.arrays.values())
    for name, array in step.arrays.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
