"""Times of two builds show which one is slower, even if other work hides it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from enginewright.optimizer.build_budget import Budget
from enginewright.optimizer.build_speed import ROUNDS, TAIL, Settled, SpeedPairs, speed_checks
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import Progress, silent


def noisy(factor: float, seed: int) -> Callable[..., SpeedPairs]:
    """Times on a machine that others use: each waits for one to eight turns of another process."""

    def measure(
        new: Bundle, older: Bundle, target: str, threads: int, settled: Settled, progress: Progress
    ) -> SpeedPairs:
        generator = np.random.default_rng(seed)
        times = 0.01 * generator.integers(1, 9, (4, ROUNDS[-1])) * generator.uniform(0.9, 1.1, (4, ROUNDS[-1]))
        times[[0, 2]] *= factor
        for rounds in ROUNDS:
            prefill, prefill_older, decode, decode_older = times[:, :rounds].tolist()
            pairs = SpeedPairs(
                tuple(zip(prefill, prefill_older, strict=True)), tuple(zip(decode, decode_older, strict=True))
            )
            if settled(pairs):
                break
        return pairs

    return measure


def test_equal_builds_on_a_busy_machine_do_not_fail() -> None:
    """Nearly half of all pairs are above the limit here."""
    budget = Budget()

    def failed(seed: int) -> bool:
        def settled(pairs: SpeedPairs) -> bool:
            return all(check.outcome != "inconclusive" for check in speed_checks(pairs, budget, None))

        pairs = noisy(1.0, seed)(None, None, "cpu", 1, settled, silent)
        return any(check.outcome == "failed" for check in speed_checks(pairs, budget, None))

    assert sum(failed(seed) for seed in range(1000)) <= 5


def test_the_interval_is_that_of_the_sign_test() -> None:
    for count, rank in ((9, 0), (10, 1), (20, 3), (40, 10)):
        below = sum(math.comb(count, x) for x in range(rank)) / 2**count
        assert below <= TAIL < below + math.comb(count, rank) / 2**count
        pairs = [(float(i), 1.0) for i in range(1, count + 1)]
        expected = (float(rank), float(count + 1 - rank)) if rank else (0.0, math.inf)
        assert SpeedPairs.interval(pairs) == expected
