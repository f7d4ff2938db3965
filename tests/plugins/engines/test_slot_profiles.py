"""Which profile a run goes to, how it is cut where none holds it, and which idle rows make it a common size."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.plugins.engines.section import EngineSection, ProfileSection
from enginewright.plugins.engines.slot_profiles import (
    check_profiles,
    choices_of,
    choose,
    cut,
    lengthen,
    widen,
)
from enginewright.plugins.steps.slots import SlotRun
from enginewright.runtime.shared.errors import BundleError

C = 33


def engine(*profiles: ProfileSection) -> EngineSection:
    return EngineSection(file="a.plan", bytes=1, sha256="0" * 64, profiles=profiles)


def profile(phase: str, most_b: int, most_s: int, most_r: int = 4, capacity: int = C) -> ProfileSection:
    sizes = {"B": (1, 1, most_b), "S": (1, 1, most_s), "R": (1, 1, most_r)}
    return ProfileSection(phase=phase, C=capacity, **sizes)  # type: ignore[arg-type]


def between(phase: str, b: tuple[int, int], s: tuple[int, int]) -> ProfileSection:
    """Makes them as buckets do: each begins where the one before it ends."""
    sizes = {"B": (b[0], *b), "S": (s[0], *s), "R": (1, 1, b[1] * s[1])}
    return ProfileSection(phase=phase, C=C, **sizes)  # type: ignore[arg-type]


CHOICES = choices_of(
    [
        engine(profile("decode", 4, 1), profile("decode", 16, 1)),
        engine(profile("prefill", 2, 8), profile("prefill", 1, 16)),
    ]
)


def test_the_smallest_profile_that_holds_it() -> None:
    for sizes, expected in (
        ((1, 1), (0, 0)),
        ((4, 1), (0, 0)),
        ((5, 1), (0, 1)),
        ((1, 2), (1, 0)),
        ((2, 8), (1, 0)),
        ((1, 9), (1, 1)),
    ):
        choice = choose(CHOICES, *sizes)
        assert choice is not None
        assert (choice.engine, choice.profile) == expected
    assert choose(CHOICES, 17, 1) is None
    assert choose(CHOICES, 2, 9) is None


def run_of(batch: int, length: int, wanted: list[int], first: int = 3) -> SlotRun:
    ids = np.arange(batch * length).reshape(batch, length)
    order = np.array(range(10, 10 + len(wanted)))
    return SlotRun(first, ids, np.tile(np.arange(length), (batch, 1)), np.array(wanted), order)


BUCKETS = choices_of(
    [
        engine(
            *(between("decode", b, (1, 1)) for b in ((1, 2), (3, 6))),
            *(between("prefill", (1, 2), s) for s in ((2, 4), (5, 16))),
        )
    ]
)


@pytest.mark.parametrize("choices", [CHOICES, BUCKETS], ids=["from one", "buckets"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (5, 1), (20, 1), (2, 8), (3, 8), (2, 20), (1, 16), (5, 33)])
def test_parts_are_the_run(batch: int, length: int, choices) -> None:
    assert check_profiles(choices, "here") == C
    rows_expected = sorted({0, batch * length - 1, batch * length // 2})
    run = run_of(batch, length, rows_expected)
    seen, rows = np.full((batch, length), -1), np.full(len(rows_expected), -1)
    for choice, part in cut(run, choices):
        assert choice.sizes.holds(*part.ids.shape, 1)
        top, left = part.first - run.first, int(part.places[0, 0])
        seen[top : top + part.ids.shape[0], left : left + part.ids.shape[1]] = part.ids
        rows[part.order] = part.ids.ravel()[part.wanted]
    np.testing.assert_array_equal(seen, run.ids)
    assert rows.tolist() == rows_expected


def test_idle_rows() -> None:
    for first, batch, slots, expected in (
        (0, 1, 8, (0, 1)),
        (0, 3, 8, (0, 4)),
        (2, 3, 8, (2, 4)),
        (3, 3, 8, (2, 4)),
        (5, 3, 8, (4, 4)),
        (5, 2, 7, (5, 2)),
        (4, 3, 7, (3, 4)),
        (1, 5, 6, (0, 6)),
    ):
        run = run_of(batch, 1, list(range(batch)), first)
        wide = widen(run, slots, 8, C)
        assert (wide.first, len(wide.ids)) == expected
        part = slice(first - wide.first, first - wide.first + batch)
        np.testing.assert_array_equal(wide.ids[part], run.ids)
        np.testing.assert_array_equal(wide.ids[wide.wanted, 0], run.ids[:, 0])
        idle = np.ones(len(wide.ids), bool)
        idle[part] = False
        assert (wide.places[idle] == C - 1).all()
    alone = run_of(3, 1, [0], 0)
    assert widen(alone, 8, 3, C) is alone  # four rows are more than the profile has


def test_prompts_have_few_lengths() -> None:
    run = run_of(2, 20, [0, 19, 39])
    run.places[1] += 5
    longer = lengthen(run, (1, 8, 40), 64)
    assert longer.ids.shape == longer.places.shape == (2, 32)
    np.testing.assert_array_equal(longer.ids[:, :20], run.ids)
    np.testing.assert_array_equal(longer.places, np.add.outer([0, 5], np.arange(32)))
    assert longer.ids.ravel()[longer.wanted].tolist() == run.ids.ravel()[run.wanted].tolist()
    assert lengthen(run, (1, 8, 40), 37).ids.shape == (2, 32)  # the last place that is written is the slot's last
    assert lengthen(run, (1, 8, 40), 36) is run
    assert lengthen(run, (1, 8, 24), 64).ids.shape == (2, 24)


def test_few_ranges_serve_all_batches() -> None:
    shapes = set()
    for first in range(64):
        for batch in range(1, 65 - first):
            wide = widen(run_of(batch, 1, [0], first), 64, 64, C)
            shapes.add((wide.first, len(wide.ids)))
            assert wide.first <= first and first + batch <= wide.first + len(wide.ids) <= 64
            assert len(wide.ids) < 4 * batch
    assert len(shapes) <= 4 * 64


def test_profiles_that_do_not_fit_together() -> None:
    assert check_profiles(CHOICES, "here") == C
    for profiles, what in (
        ((profile("decode", 4, 1), profile("prefill", 1, 8, capacity=20)), "their slots are of 20 and 33 places"),
        ((profile("decode", 4, 1), between("prefill", (2, 2), (1, 8))), "none holds a prompt of 2 tokens"),
        ((profile("decode", 4, 1), between("prefill", (1, 2), (3, 8))), "none holds a prompt of 2 tokens"),
        ((between("decode", (2, 4), (1, 1)),), "none holds 1 requests of one token"),
        ((profile("decode", 4, 1), between("decode", (6, 8), (1, 1))), "none holds 5 requests of one token"),
    ):
        with pytest.raises(BundleError, match=f"here: profiles: {what}"):
            check_profiles(choices_of([engine(*profiles)]), "here")
