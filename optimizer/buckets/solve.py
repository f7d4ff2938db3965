"""Finds the sizes with the least padding, exactly, by dynamic programming.

Given lengths l with counts n(l) and a bound on the number of sizes, choose sizes s_1 < s_2 < ... that minimise

    sum over l of n(l) * (the least s_i that is at least l, minus l)

Only occurring lengths, rounded up to the multiple, are candidates: any other size can be reduced to the next lower
candidate without more padding. For the first j candidates, the padding with k sizes is

    E_k(j) = min over i < j of  E_{k-1}(i) + s_j * (C_j - C_i) - (S_j - S_i)

with C and S the sums of counts and of lengths. For one j this is the minimum of lines in s_j, of slope -C_i and height
E_{k-1}(i) + S_i: slopes fall with i and s_j rises with j, so the lower hull of the lines gives all of E_k in linear
time (the convex hull trick: Hirschberg and Larmore, "The least weight subsequence problem", 1987). All numbers are
integers of any size, so the result is exact. n candidates and k buckets take O(n k).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from enginewright.runtime.shared.errors import RequestError

from .histogram import Histogram

MOST_BUCKETS = 256


@dataclass(frozen=True)
class Sizes:
    """A set of step sizes.

    Attributes:
        sizes: the sizes in tokens, ascending.
        padded: the number of padding tokens if every length of a histogram is padded to the next size.
    """

    sizes: tuple[int, ...]
    padded: int


def solve(histogram: Histogram, most: int, multiple: int = 1, limit: int | None = None) -> list[Sizes]:
    """Returns the best sets of 1, 2, ... ``most`` sizes, fewer if there are fewer candidates. Each has less padding
    than the one before.

    Args:
        histogram: lengths and counts.
        most: maximum number of sizes, from 1 to 256.
        multiple: sizes are rounded up to multiples of it.
        limit: maximum of a rounded size; at least the longest length.

    The result is deterministic if several sets are best. Raises RequestError if ``most`` or ``multiple`` is out of
    range.
    """
    if not 1 <= most <= MOST_BUCKETS:
        raise RequestError(f"most: {most} is not in 1 .. {MOST_BUCKETS}", hint="Allow at least one bucket.")
    if multiple < 1:
        raise RequestError(f"multiple: {multiple} is below 1", hint="1 leaves sizes as they are.")
    rounded: dict[int, tuple[int, int]] = {}  # size -> counts and tokens of the lengths that are rounded to it
    for length, count in histogram.counts:
        size = round_up(length, multiple, limit)
        counts, tokens = rounded.get(size, (0, 0))
        rounded[size] = counts + count, tokens + count * length
    sizes = sorted(rounded)
    c = [0, *accumulate(rounded[s][0] for s in sizes)]
    t = [0, *accumulate(rounded[s][1] for s in sizes)]
    n = len(sizes)
    # With one size for the first j of them; then one more each time. Entry 0 is none of them.
    cost = [0, *(sizes[j - 1] * c[j] - t[j] for j in range(1, n + 1))]
    before: list[list[int]] = [[0] * (n + 1)]
    solutions = [_trace(sizes, before, cost[n])]
    while len(before) < min(most, n):
        cost, chosen = _one_more(sizes, c, t, cost, len(before))
        before.append(chosen)
        solutions.append(_trace(sizes, before, cost[n]))
    return solutions


def _one_more(
    sizes: Sequence[int], c: Sequence[int], t: Sequence[int], cost: Sequence[int], k: int
) -> tuple[list[int], list[int]]:
    """Computes E_{k+1} from E_k = ``cost``, in the module's terms, and the best i for each j.

    Both are defined for j > k.
    """
    result, chosen = [0] * len(cost), [0] * len(cost)
    hull: list[int] = []
    at = 0
    for j in range(k + 1, len(cost)):
        i = j - 1  # the line that may be taken from here on
        while len(hull) >= 2 and _is_above(c, t, cost, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
        at = min(at, len(hull) - 1)
        x = sizes[j - 1]
        while at + 1 < len(hull) and _height(c, t, cost, hull[at + 1], x) < _height(c, t, cost, hull[at], x):
            at += 1
        chosen[j] = hull[at]
        result[j] = x * c[j] - t[j] + _height(c, t, cost, hull[at], x)
    return result, chosen


def _height(c: Sequence[int], t: Sequence[int], cost: Sequence[int], i: int, x: int) -> int:
    return cost[i] + t[i] - c[i] * x


def _is_above(c: Sequence[int], t: Sequence[int], cost: Sequence[int], a: int, b: int, d: int) -> bool:
    """Returns True if line b is nowhere below both a (with a larger slope) and d (with a smaller one)."""
    ya, yb, yd = cost[a] + t[a], cost[b] + t[b], cost[d] + t[d]
    # d crosses a no later than b crosses a.
    return (yd - ya) * (c[b] - c[a]) <= (yb - ya) * (c[d] - c[a])


def _trace(sizes: Sequence[int], before: Sequence[Sequence[int]], padded: int) -> Sizes:
    largest_first, j = [], len(sizes)
    for chosen in reversed(before):
        largest_first.append(sizes[j - 1])
        j = chosen[j]
    return Sizes(tuple(reversed(largest_first)), padded)


def round_up(length: int, multiple: int, limit: int | None = None) -> int:
    """Returns the next multiple of ``multiple``, or ``limit`` if that is less."""
    size = -(-length // multiple) * multiple
    return size if limit is None else min(size, limit)


def padding(histogram: Histogram, sizes: Iterable[int]) -> int:
    """Returns the padded tokens for a set of sizes. Raises ValueError if the longest length is above all of them."""
    rising = sorted(sizes)
    if not rising or rising[-1] < histogram.longest:
        raise ValueError(f"no size holds a length of {histogram.longest}")
    return sum(count * (rising[bisect_left(rising, length)] - length) for length, count in histogram.counts)


def powers_of_two(largest: int, most: int | None = None, multiple: int = 1) -> tuple[int, ...]:
    """Returns ``largest`` and the powers of two below it, rounded up to ``multiple``; at most ``most``, the largest."""
    sizes = {largest}
    power = 1
    while power < largest:
        sizes.add(round_up(power, multiple, largest))
        power *= 2
    return tuple(sorted(sizes)[-(most or len(sizes)) :])


def geometric(smallest: int, largest: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    """Returns at most ``count`` sizes from ``smallest`` to ``largest``, with about the same factor between neighbours.

    All but the last are rounded up to a multiple of ``multiple``.
    """
    if count < 2 or smallest >= largest:
        return (largest,)
    steps = (smallest * (largest / smallest) ** (i / (count - 1)) for i in range(count - 1))
    return tuple(sorted({*(round_up(round(s), multiple, largest) for s in steps), largest}))
