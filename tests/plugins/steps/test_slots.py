"""Which requests of a step run together, and what a run holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from enginewright.plugins.steps.slots import MOST_HOLES, SlotRun, mask, plan_runs, slots_of
from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from enginewright.runtime.shared.errors import CapacityError, RequestError

C, SLOTS = 32, 24
GROUPS = (CacheGroup("a", (0,), 1, 4, 4, block_size=C), CacheGroup("b", (1,), 1, 4, 4, window=3, block_size=C))


def step(*requests: tuple[int, int, int]) -> StepInput:
    """Makes a step of requests (slot, tokens before, tokens now); each wants the logits of its last token. Tokens are
    1, 2, 3 .."""
    slots, before, counts = (np.array(values, np.int32) for values in zip(*requests, strict=True))
    q_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, counts, strict=True)]).astype(np.int32)
    return StepInput(
        ids=np.arange(1, q_start[-1] + 1, dtype=np.int32),
        positions=positions,
        q_start=q_start,
        kv_len=before + counts,
        block_table={g.name: slots[:, None] for g in GROUPS},
        slots={g.name: np.repeat(slots, counts) * np.int32(C) + positions for g in GROUPS},
        rows=q_start[1:] - 1,
    )


def runs(one: StepInput) -> list[SlotRun]:
    return plan_runs(one, slots_of(one, GROUPS, SLOTS), C)


def shapes(one: StepInput) -> list[tuple[int, tuple[int, ...]]]:
    return [(run.first, run.ids.shape) for run in runs(one)]


def test_decodes_run_over_a_range_of_slots() -> None:
    (run,) = runs(step((5, 9, 1), (3, 4, 1)))  # in no order, with slot 4 between them
    assert run.first == 3
    np.testing.assert_array_equal(run.ids, [[2], [0], [1]])
    np.testing.assert_array_equal(run.places, [[4], [C - 1], [9]])  # the idle row's place isn't a request's
    np.testing.assert_array_equal(run.wanted, [2, 0])
    np.testing.assert_array_equal(run.order, [0, 1])  # of the step's rows


def test_decodes_far_apart_run_apart() -> None:
    far = MOST_HOLES + 1
    assert shapes(step((0, 1, 1), (far, 1, 1))) == [(0, (far + 1, 1))]
    assert shapes(step((0, 1, 1), (far + 1, 1, 1))) == [(0, (1, 1)), (far + 1, (1, 1))]


def test_prompts_of_like_length_run_together() -> None:
    assert shapes(step((1, 0, 8), (2, 0, 7), (3, 0, 8))) == [(1, (3, 8))]
    (run,) = runs(step((1, 0, 8), (2, 0, 7)))
    np.testing.assert_array_equal(run.ids, [range(1, 9), [*range(9, 16), 0]])
    np.testing.assert_array_equal(run.wanted, [7, 14])


def test_prompts_run_apart_where_padding_is_dear_or_not_possible() -> None:
    assert shapes(step((1, 0, 20), (2, 0, 3))) == [(1, (1, 20)), (2, (1, 3))]
    assert shapes(step((1, 0, 8), (3, 0, 8))) == [(1, (1, 8)), (3, (1, 8))]  # slot 2 may be somebody's
    # Padding behind a request that is nearly at the end of its slot would be written behind the slot.
    assert shapes(step((1, 0, 12), (2, C - 11, 10))) == [(1, (1, 12)), (2, (1, 10))]
    assert shapes(step((1, 0, 12), (2, C - 12, 10))) == [(1, (2, 12))]


def test_parts_of_prompts_run_one_by_one_where_they_must() -> None:
    one = step((1, 0, 8), (2, 0, 8), (3, 4, 8), (4, 4, 8), (5, 0, 8))
    assert shapes(one) == [(1, (5, 8))]
    planned = plan_runs(one, slots_of(one, GROUPS, SLOTS), C, chunks_together=False)
    assert [(run.first, run.ids.shape) for run in planned] == [(1, (2, 8)), (3, (1, 8)), (4, (1, 8)), (5, (1, 8))]


def test_decodes_and_prompts_of_one_step() -> None:
    assert shapes(step((0, 5, 1), (1, 0, 6), (2, 3, 1))) == [(0, (3, 1)), (1, (1, 6))]


def test_rows_are_the_steps() -> None:
    one = step((1, 0, 4), (2, 0, 4))
    one = one.changed(rows=np.array([6, 0, 3], np.int32))
    (run,) = runs(one)
    np.testing.assert_array_equal(one.ids[one.rows[run.order]], run.ids.reshape(-1)[run.wanted])
    assert sorted(run.order.tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("requests", "error"),
    [([(24, 0, 3)], "slots are 0 to 23"), ([(-1, 0, 3)], "slots are"), ([(2, 0, 3), (2, 0, 1)], "the same slot")],
)
def test_wrong_slots(requests: Sequence[tuple[int, int, int]], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        runs(step(*requests))


def test_slots_that_differ_between_groups() -> None:
    one = step((1, 0, 3))
    one.arrays["block_table:b"] = one.block_tables["b"] + np.int32(1)
    with pytest.raises(RequestError, match="a request's slots in a and b differ"):
        runs(one)


def test_requests_longer_than_a_slot() -> None:
    runs(step((1, 0, C - 1)))
    with pytest.raises(CapacityError, match=f"has {C} tokens, and a slot holds {C - 1}\n.*larger context"):
        runs(step((1, 0, C)))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_masks(window: int) -> None:
    places = np.array([[0, 1, 2], [4, 5, 6]], np.int64)
    masks = mask(places, 8, window)
    assert masks.shape == (2, 1, 3, 8)
    for b, q in np.ndindex(2, 3):
        p = int(places[b, q])
        seen = [p - window < key <= p if window else key <= p for key in range(8)]
        np.testing.assert_array_equal(masks[b, 0, q], seen)
    out = np.ones_like(masks)
    assert mask(places, 8, window, out=out) is out
    np.testing.assert_array_equal(out, masks)
