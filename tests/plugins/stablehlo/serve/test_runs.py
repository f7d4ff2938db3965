"""Runs over slots are cut to the existing modules: every token runs once, every row is where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.plugins.stablehlo.section import ModuleSection
from enginewright.plugins.stablehlo.serve.runs import Plan
from enginewright.plugins.steps.slots import SlotRun

PLACES = 64
MODULES = [
    *(ModuleSection(requests=n, tokens=1, places=PLACES, rows=n) for n in (1, 2, 4)),
    *(ModuleSection(requests=1, tokens=n, places=PLACES, rows=1) for n in (8, 16, 32)),
    ModuleSection(requests=1, tokens=16, places=PLACES, rows=16),
    ModuleSection(requests=1, tokens=1, places=128, rows=1),
]


def decode(first: int, places: list[int], slots: int) -> list[tuple[str, int, list[int], list[int], list[int]]]:
    ids = np.asarray(places)[:, None] + 100
    rows_of_places = np.arange(len(places))
    run = SlotRun(first, ids, np.asarray(places)[:, None], rows_of_places, rows_of_places)
    parts = list(Plan(MODULES, PLACES, slots).parts(run))
    for part in parts:
        for number, order in enumerate(part.order.tolist()):
            row = int(part.wanted[number])
            assert part.ids[row, 0] == places[order] + 100 and part.index[row] == places[order]
            assert part.first + row == first + order
        resting = np.setdiff1d(np.arange(part.module.requests), part.wanted[: len(part.order)])
        assert (part.index[resting] == PLACES - 1).all()
    return [(p.module.name, p.first, p.index.tolist(), p.wanted.tolist(), p.order.tolist()) for p in parts]


def test_decodes() -> None:
    assert decode(3, [5], 4) == [("decode-1x64", 3, [5], [0], [0])]
    assert decode(1, [5, 6, 7], 4) == [("decode-4x64", 0, [63, 5, 6, 7], [1, 2, 3, 0], [0, 1, 2])]
    assert decode(0, [5, 6, 7, 8, 9], 8) == [
        ("decode-4x64", 0, [5, 6, 7, 8], [0, 1, 2, 3], [0, 1, 2, 3]),
        ("decode-1x64", 4, [9], [0], [4]),
    ]


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_decodes_of_any_number_stay_within_the_slots(slots: int, count: int) -> None:
    if count > slots:
        return
    for first in range(slots - count + 1):
        for _, start, index, _, _ in decode(first, list(range(7, 7 + count)), slots):
            assert start >= 0 and start + len(index) <= slots


def prompt(length: int, place: int, wanted: list[int]) -> list[tuple[str, int, int]]:
    ids = np.arange(length)[None] + 100
    run = SlotRun(2, ids, place + np.arange(length)[None], np.asarray(wanted, np.int64), np.arange(len(wanted)))
    parts = list(Plan(MODULES, PLACES, 4).parts(run))
    tokens = np.concatenate([part.ids[0] for part in parts])
    np.testing.assert_array_equal(tokens[:length], ids[0])
    assert not tokens[length:].any()
    lengths: dict[int, int] = {}
    at = place
    for part in parts:
        assert part.first == 2 and part.index.tolist() == [at] and at + part.module.tokens <= PLACES
        at += part.module.tokens
        for number, order in enumerate(part.order.tolist()):
            lengths[order] = int(part.ids[0, part.wanted[number]]) - 100
    assert [lengths[order] for order in range(len(wanted))] == wanted
    return [(part.module.name, int(part.index[0]), len(part.order)) for part in parts]


def test_prompts_are_cut_into_the_sizes_that_compute_least() -> None:
    assert prompt(32, 0, [31]) == [("prompt-32x64", 0, 1)]
    assert prompt(5, 0, [4]) == [("prompt-8x64", 0, 1)]
    assert prompt(17, 0, [16]) == [("prompt-32x64", 0, 1)]  # a run of its own for one token costs more
    assert prompt(33, 0, [32]) == [("prompt-32x64", 0, 0), ("decode-1x64", 32, 1)]
    assert prompt(40, 0, [39]) == [("prompt-32x64", 0, 0), ("prompt-8x64", 32, 1)]


def test_the_end_of_a_slot_is_not_passed() -> None:
    assert prompt(7, 57, [6]) == [("decode-1x64", 57 + i, int(i == 6)) for i in range(7)]
    assert prompt(8, 56, [7]) == [("prompt-8x64", 56, 1)]


def test_tokens_that_are_all_scored() -> None:
    assert prompt(16, 0, list(range(16))) == [("score-16x64", 0, 16)]
    assert prompt(20, 0, [3, 4, 18, 19]) == [("score-16x64", 0, 2), ("score-16x64", 16, 2)]
    assert prompt(24, 40, list(range(24)))[0] == ("score-16x64", 40, 16)


def test_rows_of_a_padded_run_keep_their_order() -> None:
    ids = np.arange(16).reshape(2, 8)
    places = np.tile(np.arange(8), (2, 1))
    run = SlotRun(0, ids, places, np.asarray([7, 12]), np.asarray([0, 1]))
    parts = list(Plan(MODULES, PLACES, 4).parts(run))
    assert [(p.first, p.order.tolist(), int(p.wanted[0])) for p in parts] == [(0, [0], 7), (1, [1], 4)]
