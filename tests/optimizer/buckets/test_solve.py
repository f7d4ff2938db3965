"""Buckets against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.optimizer.buckets.histogram import DEFAULTS, Histogram, default_histogram, uniform
from enginewright.optimizer.buckets.solve import Sizes, geometric, padding, powers_of_two, round_up, solve
from enginewright.runtime.shared.errors import RequestError

HISTOGRAMS = st.dictionaries(st.integers(1, 40), st.integers(1, 1000), min_size=1, max_size=9)


def brute_force(histogram: Histogram, count: int, multiple: int, limit: int) -> int:
    """The least padding of any ``count`` sizes at all, or fewer, that are multiples or the limit."""
    allowed = sorted({round_up(s, multiple, limit) for s in range(1, limit + 1)})
    sets = (s for k in range(1, count + 1) for s in combinations(allowed, k) if s[-1] >= histogram.longest)
    return min(padding(histogram, s) for s in sets)


@given(HISTOGRAMS, st.integers(1, 4), st.sampled_from([1, 3, 8]))
@settings(max_examples=60, deadline=None)
def test_no_other_sizes_are_better(counts: dict[int, int], most: int, multiple: int) -> None:
    histogram = Histogram.from_counts(counts, "test")
    limit = min(histogram.longest, 14) if multiple == 1 else round_up(histogram.longest, multiple)
    if multiple == 1:  # every size from 1 on is tried: keep that within bounds
        histogram = Histogram.from_counts({min(length, limit): n for length, n in counts.items()}, "test")
    solutions = solve(histogram, most, multiple, limit)
    for k, best in enumerate(solutions, 1):
        assert len(best.sizes) == k and list(best.sizes) == sorted(set(best.sizes))
        assert all(s % multiple == 0 or s == limit for s in best.sizes)
        assert best.padded == padding(histogram, best.sizes) == brute_force(histogram, k, multiple, limit)


@given(st.dictionaries(st.integers(1, 5000), st.integers(1, 10**15), min_size=1, max_size=60), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_large_numbers_are_exact_and_never_worse_than_others(counts: dict[int, int], most: int) -> None:
    histogram = Histogram.from_counts(counts, "test")
    for multiple in (1, 8, 48):
        solutions = solve(histogram, most, multiple)
        costs = [s.padded for s in solutions]
        assert costs == sorted(set(costs), reverse=True)  # each one more pays
        for k, best in enumerate(solutions, 1):
            assert best.padded == padding(histogram, best.sizes)
            powers = powers_of_two(best.sizes[-1], k, multiple)
            assert len(powers) <= k and best.padded <= padding(histogram, powers)
            others = geometric(best.sizes[0], best.sizes[-1], k, multiple)
            assert len(others) <= k and best.padded <= padding(histogram, others)


def test_quadratic_programming_finds_the_same_on_a_large_histogram() -> None:
    histogram = default_histogram("code", 700)
    lengths = [length for length, _ in histogram.counts]
    counts = [count for _, count in histogram.counts]
    n = len(lengths)
    c, t = [0], [0]
    for length, count in histogram.counts:
        c.append(c[-1] + count)
        t.append(t[-1] + length * count)
    assert n > 200 and sum(counts) == 10_000
    costs = [0] + [lengths[j - 1] * c[j] - t[j] for j in range(1, n + 1)]
    for best in solve(histogram, 4):
        assert best.padded == costs[n]
        k = len(best.sizes)
        costs = [
            min((costs[i] + lengths[j - 1] * (c[j] - c[i]) - t[j] + t[i] for i in range(k, j)), default=0)
            for j in range(n + 1)
        ]


def test_as_many_sizes_as_lengths_pad_nothing() -> None:
    histogram = Histogram.from_counts({3: 5, 9: 1, 10: 2}, "test")
    assert solve(histogram, 8) == [Sizes((10,), 36), Sizes((3, 10), 1), Sizes((3, 9, 10), 0)]
    assert solve(histogram, 8, 8) == [Sizes((16,), 84), Sizes((8, 16), 44)]
    assert solve(histogram, 8, 8, 12) == [Sizes((12,), 52), Sizes((8, 12), 32)]
    assert solve(histogram, 2, 100) == [Sizes((100,), 97 * 5 + 91 + 180)]


def test_equal_sets_are_decided_the_same_way() -> None:
    histogram = uniform(4)  # (1, 4) pads 3, (2, 4) pads 2, (3, 4) pads 3: none is equal
    assert solve(histogram, 2)[1] == Sizes((2, 4), 2)
    tied = Histogram.from_counts({1: 1, 2: 1, 3: 1}, "test")  # (1, 3) and (2, 3) both pad 1
    assert solve(tied, 2)[1] == solve(tied, 3)[1] == Sizes((1, 3), 1)


def test_what_others_choose() -> None:
    assert powers_of_two(1800) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1800)
    assert powers_of_two(1800, 3) == (512, 1024, 1800)
    assert powers_of_two(48, None, 12) == (12, 24, 36, 48)
    assert powers_of_two(1) == (1,)
    assert geometric(4, 64, 5) == (4, 8, 16, 32, 64)
    assert geometric(64, 64, 5) == (64,) == geometric(1, 64, 1)
    assert geometric(1, 3, 9) == (1, 2, 3)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_beat_powers_of_two(name: str) -> None:
    histogram = default_histogram(name, 4096)
    assert histogram.longest <= 4096 and histogram.entries == 10_000
    for best in solve(histogram, 16, 8)[3:]:
        powers = powers_of_two(best.sizes[-1], len(best.sizes), 8)
        assert best.padded < padding(histogram, powers)


@pytest.mark.parametrize(
    ("most", "multiple", "message"), [(0, 1, "most: 0"), (257, 1, "most: 257"), (1, 0, "multiple")]
)
def test_numbers_out_of_range(most: int, multiple: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        solve(uniform(4), most, multiple)


def test_sizes_that_hold_too_little() -> None:
    with pytest.raises(ValueError, match="no size holds a length of 4"):
        padding(uniform(4), (1, 3))
